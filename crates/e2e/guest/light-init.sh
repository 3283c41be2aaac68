#!/bin/sh
# The light guest's only process tree. What a test may ask for in user-data, a line each:
#   #light port=N      proxy on port N instead of 3128
#   #light no-agent    no guest agent
#   #light no-proxy    nothing listens on the proxy's port
#   #light poweroff    turn off after starting up
mount -t devtmpfs d /dev
mount -t proc p /proc
mount -t sysfs s /sys
sh /etc/modules.sh
ip link set lo up
ip link set eth0 up
for d in /dev/vdb /dev/sr0; do mount -t iso9660 -o ro $d /seed 2>/dev/null && break; done
wants() { grep -q "^#light $1" /seed/user-data 2>/dev/null; }
value() { sed -n "s/^#light $1=//p" /seed/user-data 2>/dev/null; }

udhcpc -i eth0 -q -n -t 20 -T 1 -A 1 -s /etc/udhcpc.sh

# What the seed held, to be compared with what was sent.
mkdir -p /tmp/www
for f in user-data meta-data vendor-data network-config; do
  [ -e /seed/$f ] && cat /seed/$f > /tmp/www/$f
done
echo light-ok > /tmp/www/index.html
httpd -p 80 -h /tmp/www

if ! wants no-proxy; then
  port=$(value port)
  # tinyproxy's own default lets every port be CONNECTed to.
  { echo "Port ${port:-3128}"; echo "Timeout 60"; echo "LogLevel Error"; echo "MaxClients 100"; } > /etc/tinyproxy.conf
  tinyproxy -c /etc/tinyproxy.conf
fi
if ! wants no-agent; then
  for p in /sys/class/virtio-ports/*; do
    if [ "$(cat $p/name)" = org.qemu.guest_agent.0 ]; then
      qemu-ga -m virtio-serial -p /dev/$(basename $p) -t /tmp -d -f /tmp/ga.pid
    fi
  done
fi
echo "LIGHT-UP $(cut -d' ' -f1 /proc/uptime)"
wants poweroff && poweroff -f
exec sh -c 'while :; do sleep 3600; done'

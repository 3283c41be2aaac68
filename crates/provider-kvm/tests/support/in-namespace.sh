#!/bin/bash
# libvirtd of our own, in the network and mount namespaces that the caller made for it:
#   unshare --net --mount --pid --fork --mount-proc bash in-namespace.sh WORKDIR COMMAND...
# Its sockets, state and settings are private; when the namespaces go, so does everything in them.
set -e
W=$1; shift
mkdir -p "$W"/{lib,pool,log,run}
mount --make-rprivate /
mkdir -p /run/libvirt /var/lib/libvirt /var/log/libvirt /run/sshd
mount -t tmpfs tmpfs /run/libvirt
mount --bind "$W/lib" /var/lib/libvirt
mount --bind "$W/log" /var/log/libvirt
cp -a /etc/libvirt "$W/etc"
rm -f "$W"/etc/qemu/*.xml "$W"/etc/qemu/networks/*.xml "$W"/etc/qemu/networks/autostart/* "$W"/etc/storage/*.xml "$W"/etc/storage/autostart/*
cat > "$W/etc/qemu.conf" <<'C'
security_driver = "none"
user = "root"
group = "root"
dynamic_ownership = 0
remember_owner = 0
cgroup_controllers = []
namespaces = []
stdio_handler = "logd"
C
cat > "$W/libvirtd.conf" <<C
unix_sock_group = "root"
unix_sock_ro_perms = "0777"
unix_sock_rw_perms = "0770"
auth_unix_ro = "none"
auth_unix_rw = "none"
log_outputs = "3:file:$W/log/libvirtd.log"
C
mount --bind "$W/etc" /etc/libvirt
ip link set lo up
virtlogd -d -p "$W/virtlogd.pid"
libvirtd -d -p "$W/libvirtd.pid" -f "$W/libvirtd.conf" --timeout 0
export LIBVIRT_DEFAULT_URI=qemu:///system
for _ in $(seq 100); do virsh -q uri >/dev/null 2>&1 && break; sleep 0.1; done
cat > "$W/net.xml" <<'C'
<network><name>testnet</name><forward mode='open'/><bridge name='testbr0' stp='off' delay='0'/><ip address='10.77.0.1' netmask='255.255.255.0'><dhcp><range start='10.77.0.10' end='10.77.0.200'/></dhcp></ip></network>
C
virsh -q net-define "$W/net.xml"; virsh -q net-start testnet
virsh -q pool-define-as default dir --target "$W/pool"; virsh -q pool-start default
set +e
W=$W "$@"
rc=$?
exit $rc

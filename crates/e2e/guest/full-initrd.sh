#!/bin/sh
# Finds the root file system and hands over to its systemd.
b=/bin/busybox
$b mount -t devtmpfs d /dev
$b mount -t proc p /proc
$b mount -t sysfs s /sys
$b sh /modules.sh
n=0
while ! root=$($b findfs LABEL=@LABEL@ 2>/dev/null); do
  n=$((n + 1))
  if [ $n -gt 200 ]; then
    echo "no file system @LABEL@"
    exec /bin/sh
  fi
  $b usleep 50000
done
$b mount -t ext4 -o rw,noatime "$root" /newroot || exec /bin/sh
$b umount /proc
$b umount /sys
$b mount --move /dev /newroot/dev
exec $b switch_root /newroot /lib/systemd/systemd

#!/bin/sh
# Called by udhcpc with what the server answered in the environment.
[ "$1" = bound ] || exit 0
ip addr add "$ip/${mask:-24}" dev "$interface"
[ "$router" ] && ip route add default via "$router"
[ "$dns" ] && echo "nameserver $dns" > /etc/resolv.conf
exit 0

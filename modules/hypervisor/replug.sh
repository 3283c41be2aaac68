# Plugs the taps of running guests back into the bridge $1: for when the bridge was made anew.
set -euo pipefail

bridge=$1
virsh=${VIRSH:-virsh}
for domain in $("$virsh" -q -c qemu:///system list --name); do
  # Interface, type, source, model, MAC address.
  "$virsh" -q -c qemu:///system domiflist "$domain" | while read -r tap type source _; do
    if [ "$type" = bridge ] && [ "$source" = "$bridge" ] && [ ! -e "/sys/class/net/$bridge/brif/$tap" ]; then
      echo "$domain: plugging $tap into $bridge"
      ip link set dev "$tap" master "$bridge" up
    fi
  done
done

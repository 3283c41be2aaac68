# Prints what a far operator needs to know of this machine.
set -euo pipefail

address=${1:-$(hostname -f 2>/dev/null || hostname)}
echo "# known_hosts (services.egress-proxies-operator.providers.NAME.kvm.knownHosts):"
for key in /etc/ssh/ssh_host_*_key.pub; do
  read -r type data _ <"$key"
  if [ "$PORT" = 22 ]; then
    echo "$address $type $data"
  else
    echo "[$address]:$PORT $type $data"
  fi
done
echo
echo "# host (under hosts: in the providers file):"
echo "- name: $(hostname)"
echo "  address: $address:$PORT"
echo "  user: $LOGIN"
echo "  socket: $SOCKET"
echo "  pool: $POOL"
printf '%s\n' "$NETWORK"

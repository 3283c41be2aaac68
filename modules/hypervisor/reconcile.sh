# Brings libvirt's pools and networks in line with the definitions in $1 (pools/NAME.xml and
# networks/NAME.xml, with NAME.autostart beside those that start by themselves), and removes those
# that an earlier run made and that are no longer there. $STATE_DIRECTORY/made lists what was made.
# Nothing here deletes a volume, a directory or a guest.
set -euo pipefail

definitions=$1
made=$STATE_DIRECTORY/made
touch "$made"
export LIBVIRT_DEFAULT_URI=${LIBVIRT_DEFAULT_URI:-qemu:///system}

# A definition for an object that is already there must carry the UUID that libvirt knows it by.
with_uuid() { # XML UUID
  sed "s|<uuid>[^<]*</uuid>|<uuid>$2</uuid>|" "$1"
}

# The path of a pool or the bridge of a network, to see whether a definition really changed.
essence() {
  tr -d '\n' | grep -oE "<path>[^<]*</path>|<bridge name=['\"][^'\"]*['\"]|<forward mode=['\"][^'\"]*['\"]|<ip address=['\"][^'\"]*['\"]|<range start=['\"][^'\"]*['\"]" | tr '"' "'" | sort
}

pool() { # XML
  name=$(basename "$1" .xml)
  new=$(mktemp)
  if uuid=$(virsh -q pool-uuid "$name" 2>/dev/null); then
    with_uuid "$1" "$uuid" >"$new"
  else
    cp "$1" "$new"
  fi
  path=$(sed -n 's|.*<path>\(.*\)</path>.*|\1|p' "$new")
  mkdir -p -m 0711 "$path"
  if [ "$(virsh -q pool-dumpxml --inactive "$name" 2>/dev/null | essence)" != "$(essence <"$new")" ]; then
    echo "pool $name: $path"
    virsh -q pool-define "$new"
    # A running pool keeps its old path until it is started anew; guests' open disks do not notice.
    virsh -q pool-destroy "$name" 2>/dev/null || true
  fi
  rm -f "$new"
  if [ "$(virsh -q pool-info "$name" | sed -n 's/^State: *//p')" != running ]; then
    virsh -q pool-start "$name"
  fi
  if [ -e "${1%.xml}.autostart" ]; then
    virsh -q pool-autostart "$name"
  else
    virsh -q pool-autostart --disable "$name"
  fi
}

# Guests that are plugged into a network: taking it down would cut them off.
plugged() { # NAME
  for domain in $(virsh -q list --name); do
    virsh -q domiflist "$domain" | awk '{print $3}'
  done | grep -cxF "$1" || true
}

# Not by grep -q: it closes the pipe early, and with pipefail virsh's SIGPIPE would read as "no".
active() { # NAME
  [ "$(virsh -q net-info "$1" | sed -n 's/^Active: *//p')" = yes ]
}

network() { # XML
  name=$(basename "$1" .xml)
  new=$(mktemp)
  if uuid=$(virsh -q net-uuid "$name" 2>/dev/null); then
    with_uuid "$1" "$uuid" >"$new"
  else
    cp "$1" "$new"
  fi
  if [ "$(virsh -q net-dumpxml --inactive "$name" 2>/dev/null | essence)" != "$(essence <"$new")" ]; then
    echo "network $name"
    virsh -q net-define "$new"
    if active "$name"; then
      if [ "$(plugged "$name")" = 0 ]; then
        virsh -q net-destroy "$name"
      else
        echo "network $name: guests are plugged into it; the change takes effect when it is next started (virsh net-destroy $name; virsh net-start $name)"
      fi
    fi
  fi
  rm -f "$new"
  if ! active "$name"; then
    virsh -q net-start "$name"
  fi
  virsh -q net-autostart "$name"
}

wanted=$(mktemp)
trap 'rm -f "$wanted"' EXIT
for xml in "$definitions"/pools/*.xml; do
  [ -e "$xml" ] && printf 'pool %s\n' "$(basename "$xml" .xml)" >>"$wanted"
done
for xml in "$definitions"/networks/*.xml; do
  [ -e "$xml" ] && printf 'network %s\n' "$(basename "$xml" .xml)" >>"$wanted"
done
sort -o "$wanted" "$wanted"

# Recorded before anything is made, together with what is still to be removed: a run that is cut
# short is finished by the next one.
sort -u "$made" "$wanted" >"$made.new"
mv "$made.new" "$made"

for xml in "$definitions"/pools/*.xml; do
  [ ! -e "$xml" ] || pool "$xml"
done
for xml in "$definitions"/networks/*.xml; do
  [ ! -e "$xml" ] || network "$xml"
done

comm -23 "$made" "$wanted" | while read -r kind name; do
  echo "removing $kind $name, which is no longer declared"
  case $kind in
  pool)
    # Stops and forgets the pool; the directory and every disk in it stay.
    virsh -q pool-destroy "$name" 2>/dev/null </dev/null || true
    virsh -q pool-undefine "$name" </dev/null || ! virsh -q pool-uuid "$name" 2>/dev/null </dev/null
    ;;
  network)
    if [ "$(plugged "$name" </dev/null)" != 0 ]; then
      echo "network $name: guests are plugged into it; it stays until they are gone"
      printf 'network %s\n' "$name" >>"$wanted"
      continue
    fi
    virsh -q net-destroy "$name" 2>/dev/null </dev/null || true
    virsh -q net-undefine "$name" </dev/null || ! virsh -q net-uuid "$name" 2>/dev/null </dev/null
    ;;
  esac
done
sort -u "$wanted" >"$made.new"
mv "$made.new" "$made"

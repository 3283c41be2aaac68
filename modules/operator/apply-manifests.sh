# Applies the manifests in $MANIFESTS (named NAMESPACE.NAME.yaml) and deletes the Proxies of an
# earlier run that are no longer among them. $STATE_DIRECTORY/applied says what that run applied.
set -euo pipefail

applied=$STATE_DIRECTORY/applied
touch "$applied"

# The API answers a little after the operator's process runs.
for attempt in $(seq 1 60); do
  if egress-proxies-operator client --namespace default get >/dev/null 2>&1; then
    break
  fi
  if [ "$attempt" = 60 ]; then
    egress-proxies-operator client --namespace default get
  fi
  sleep 1
done

wanted=$(mktemp)
for file in "$MANIFESTS"/*.yaml; do
  [ -e "$file" ] || continue
  name=$(basename "$file" .yaml)
  namespace=${name%%.*}
  if ! kubectl get namespace "$namespace" >/dev/null 2>&1; then
    kubectl create namespace "$namespace"
  fi
  egress-proxies-operator client --namespace "$namespace" apply -f "$file"
  printf '%s\n' "$name" >>"$wanted"
done
sort -o "$wanted" "$wanted"

# Recorded before anything is deleted, together with what is still to be deleted: a run that is cut
# short is finished by the next one.
sort -u "$applied" "$wanted" >"$applied.new"
mv "$applied.new" "$applied"

comm -23 "$applied" "$wanted" | while read -r name; do
  namespace=${name%%.*}
  proxy=${name#*.}
  if egress-proxies-operator client --namespace "$namespace" get "$proxy" >/dev/null 2>&1 </dev/null; then
    echo "deleting $namespace/$proxy, which is no longer declared"
    egress-proxies-operator client --namespace "$namespace" delete "$proxy" --timeout 4m </dev/null
  fi
done
mv "$wanted" "$applied"

# Operator, two proxies, one lease, and everything gone again.
state=$(mktemp -d)
egress-proxies-operator dev --state-dir "$state" --discovery-addr 127.0.0.1:8090 &
operator=$!
trap 'kill "$operator" 2>/dev/null || true; wait "$operator" || true; rm -rf "$state"' EXIT

until [ -s "$state/admin.kubeconfig" ]; do
  kill -0 "$operator"
  sleep 0.2
done
export KUBECONFIG=$state/admin.kubeconfig

for name in one two; do
  kubectl apply -f - <<PROXY
apiVersion: crawl.example.com/v1alpha1
kind: Proxy
metadata:
  name: $name
  namespace: default
spec:
  mode: Managed
  provider: local
PROXY
done
kubectl wait --for=condition=Ready proxy --all --timeout=60s
kubectl get proxies -o wide

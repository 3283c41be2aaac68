{
  says = [ "services.egress-proxies-operator.namespace is empty" ];
  module.services.egress-proxies-operator = {
    enable = true;
    providers.here.local = { };
    controlPlane = "/var/lib/secrets/kubeconfig";
    namespace = "";
  };
}

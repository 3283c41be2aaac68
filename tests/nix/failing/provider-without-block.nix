{
  says = [ "services.egress-proxies-operator.providers.empty has no block" ];
  module.services.egress-proxies-operator = {
    enable = true;
    providers.here.local = { };
    providers.empty = { };
  };
}

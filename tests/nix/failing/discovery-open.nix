{
  says = [
    "services.egress-proxies-operator.discovery.tokenFile"
    "not loopback only"
  ];
  module.services.egress-proxies-operator = {
    enable = true;
    providers.here.local = { };
    discovery.addresses = [ ":8090" ];
  };
}

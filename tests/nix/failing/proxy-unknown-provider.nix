{
  says = [
    "proxies.p.provider: there is no provider nope; services.egress-proxies-operator.providers has: here"
  ];
  module.services.egress-proxies-operator = {
    enable = true;
    providers.here.local = { };
    proxies.p.provider = "nope";
  };
}

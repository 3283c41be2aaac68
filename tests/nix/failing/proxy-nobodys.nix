{
  says = [ "proxies.p: give either provider" ];
  module.services.egress-proxies-operator = {
    enable = true;
    providers.here.local = { };
    proxies.p = { };
  };
}

{
  says = [ "providers.both has the blocks gcp and local" ];
  module.services.egress-proxies-operator = {
    enable = true;
    providers.here.local = { };
    providers.both = {
      local = { };
      gcp = { };
    };
  };
}

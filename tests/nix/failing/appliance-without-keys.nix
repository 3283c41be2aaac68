{
  says = [ "services.egress-proxies-appliance.adminKeys is empty" ];
  module.services.egress-proxies-appliance = {
    enable = true;

  };
}

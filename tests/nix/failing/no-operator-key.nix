{
  says = [ "services.egress-proxies-hypervisor.ssh.authorizedKeys is empty" ];
  module = {
    networking.useNetworkd = false;
    services.egress-proxies-hypervisor = {
      enable = true;
      network.enable = true;
    };
  };
}

{
  says = [
    "services.egress-proxies-hypervisor.ssh.authorizedKeys"
    "is a path"
  ];
  module = {
    networking.useNetworkd = false;
    services.egress-proxies-hypervisor = {
      enable = true;
      network.enable = true;
      ssh.authorizedKeys = [ "/root/key.pub" ];
    };
  };
}

{
  says = [
    "services.egress-proxies-hypervisor.ssh.authorizedKeys"
    "is not an OpenSSH public key"
  ];
  module = {
    networking.useNetworkd = false;
    services.egress-proxies-hypervisor = {
      enable = true;
      network.enable = true;
      ssh.authorizedKeys = [ "hello" ];
    };
  };
}

{
  says = [ "services.egress-proxies-hypervisor.ssh.authorizedKeys: an entry is a private key" ];
  module = {
    networking.useNetworkd = false;
    services.egress-proxies-hypervisor = {
      enable = true;
      network.enable = true;
      ssh.authorizedKeys = [
        "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEA\n-----END OPENSSH PRIVATE KEY-----"
      ];
    };
  };
}

{
  says = [ "services.egress-proxies-hypervisor: guests need a network" ];
  module = {
    networking.useNetworkd = false;
    services.egress-proxies-hypervisor = {
      enable = true;
      ssh.authorizedKeys = [
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ9ZJvCzG0a0b5h0Jk7rF9S2kKXlKk3mQv3fJZQm3V1c op"
      ];
    };
  };
}

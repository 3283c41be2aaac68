{
  says = [ "services.egress-proxies-hypervisor.bridge.gateway: a gateway needs an address" ];
  module = {
    networking.useNetworkd = false;
    services.egress-proxies-hypervisor = {
      enable = true;
      bridge = {
        enable = true;
        interfaces = [ "enp1s0" ];
        gateway = "192.0.2.1";
      };
      ssh.authorizedKeys = [
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ9ZJvCzG0a0b5h0Jk7rF9S2kKXlKk3mQv3fJZQm3V1c op"
      ];
    };
  };
}

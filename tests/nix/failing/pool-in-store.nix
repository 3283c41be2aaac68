{
  says = [
    "services.egress-proxies-hypervisor.pool.path"
    "is inside the Nix store"
  ];
  module = {
    networking.useNetworkd = false;
    services.egress-proxies-hypervisor = {
      enable = true;
      network.enable = true;
      pool.path = "${builtins.storeDir}/pool";
      ssh.authorizedKeys = [
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ9ZJvCzG0a0b5h0Jk7rF9S2kKXlKk3mQv3fJZQm3V1c op"
      ];
    };
  };
}

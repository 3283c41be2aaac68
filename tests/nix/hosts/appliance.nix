# The appliance, on its disk.
{
  imports = [
    ../../../modules/appliance.nix
    ../../../modules/appliance/disk.nix
  ];
  services.egress-proxies-appliance = {
    enable = true;
    adminKeys = [
      "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ9ZJvCzG0a0b5h0Jk7rF9S2kKXlKk3mQv3fJZQm3V1c operator"
    ];
  };
}

# Every hypervisor. Add the machine's hardware-configuration.nix and boot loader.
{
  services.egress-proxies-hypervisor = {
    enable = true;
    bridge.enable = true;
    bridge.interfaces = [ "enp1s0" ];
    # The public half of the operator's key.
    ssh.authorizedKeys = [
      "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ9ZJvCzG0a0b5h0Jk7rF9S2kKXlKk3mQv3fJZQm3V1c replace-me"
    ];
  };
  system.stateVersion = "26.05";
}

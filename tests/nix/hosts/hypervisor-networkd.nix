# A hypervisor that uses systemd-networkd and nftables.
{
  networking.useNetworkd = true;
  networking.nftables.enable = true;
  services.egress-proxies-hypervisor = {
    enable = true;
    bridge.enable = true;
    bridge.interfaces = [ "enp1s0" ];
    bridge.macAddress = "52:54:00:12:34:56";
    network.enable = true;
    ssh.authorizedKeys = [
      "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ9ZJvCzG0a0b5h0Jk7rF9S2kKXlKk3mQv3fJZQm3V1c operator"
    ];
    ksm = true;
  };
}

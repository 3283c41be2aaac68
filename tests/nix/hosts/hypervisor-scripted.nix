# A hypervisor with the scripted networking, the iptables firewall and fixed addresses.
{
  networking.useNetworkd = false;
  services.egress-proxies-hypervisor = {
    enable = true;
    bridge = {
      enable = true;
      name = "br0";
      interfaces = [ "enp1s0" ];
      dhcp = false;
      addresses = [
        "192.0.2.10/24"
        "2001:db8::10/64"
      ];
      gateway = "192.0.2.1";
    };
    pool.path = "/srv/proxies";
    ssh.user = "proxies";
    ssh.authorizedKeys = [
      "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ9ZJvCzG0a0b5h0Jk7rF9S2kKXlKk3mQv3fJZQm3V1c operator"
    ];
    nestedVirtualisation = true;
  };
}

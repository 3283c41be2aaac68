{
  services.egress-proxies-appliance = {
    enable = true;
    # Who may administer it: your public key.
    adminKeys = [
      "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ9ZJvCzG0a0b5h0Jk7rF9S2kKXlKk3mQv3fJZQm3V1c replace-me"
    ];
  };

  # Proxies that are always there. "kvm" is the appliance's own provider.
  services.egress-proxies-operator.proxies.first = {
    provider = "kvm";
    placement = {
      machineType = "small";
      image = "debian-13";
    };
    cloudInit.inline = ''
      #cloud-config
      packages: [squid]
      write_files:
        - path: /etc/squid/conf.d/allow.conf
          content: "http_access allow all"
      runcmd:
        - systemctl restart squid
    '';
    attributes.purpose = "crawl";
  };

  system.stateVersion = "26.05";
}

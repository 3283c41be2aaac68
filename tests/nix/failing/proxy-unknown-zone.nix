{
  says = [ "proxies.p.placement.zone: the provider k has no nas9; it has: nas1" ];
  module = {
    services.egress-proxies-operator = {
      enable = true;
      providers.k.kvm = {
        sshKeyFile = "/var/lib/secrets/key";
        knownHosts = "nas1 ssh-ed25519 AAAA";
        machineTypes.small = {
          vcpus = 1;
          memoryMiB = 512;
        };
        hosts.nas1 = {
          address = "nas1:22";
          user = "u";
          bridge = "br0";
        };

      };
      proxies.p = {
        provider = "k";
        placement = {
          image = "https://e/x";
          machineType = "small";
          zone = "nas9";
        };
      };
    };
  };
}

{
  says = [ "providers.k.kvm.images.x: give one of sha256" ];
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
        images.x = {
          url = "https://e/x";
          sha256 = "a";
          sha512 = "b";
        };
      };

    };
  };
}

{
  says = [
    "providers.k.kvm.sshKeyFile"
    "is inside the Nix store"
  ];
  module = {
    services.egress-proxies-operator = {
      enable = true;
      providers.k.kvm = {
        sshKeyFile = "${builtins.storeDir}/0000-key";
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

    };
  };
}

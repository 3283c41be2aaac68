{
  says = [
    "providers.k.kvm.sshKeyFile"
    "ssh-keygen"
  ];
  module = {
    services.egress-proxies-operator = {
      enable = true;
      providers.k.kvm = {
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

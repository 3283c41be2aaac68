{
  says = [
    "services.egress-proxies-operator.providers.k.kvm.hosts is empty"
    "name at least one hypervisor"
  ];
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

      };

    };
  };
}

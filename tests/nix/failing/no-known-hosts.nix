{
  says = [
    "providers.k.kvm.knownHosts"
    "egress-proxies-hypervisor-info"
  ];
  module = {
    services.egress-proxies-operator = {
      enable = true;
      providers.k.kvm = {
        sshKeyFile = "/var/lib/secrets/key";
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

{
  says = [ "providers.k.kvm.machineTypes is empty" ];
  module = {
    services.egress-proxies-operator = {
      enable = true;
      providers.k.kvm = {
        sshKeyFile = "/var/lib/secrets/key";
        knownHosts = "nas1 ssh-ed25519 AAAA";
        hosts.nas1 = {
          address = "nas1:22";
          user = "u";
          bridge = "br0";
        };

      };

    };
  };
}

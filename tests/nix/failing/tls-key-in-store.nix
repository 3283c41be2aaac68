{
  says = [
    "services.egress-proxies-operator.discovery.tls.keyFile"
    "is inside the Nix store"
  ];
  module.services.egress-proxies-operator = {
    enable = true;
    providers.here.local = { };
    discovery.tls = {
      certificateFile = "/etc/tls.pem";
      keyFile = "${builtins.storeDir}/0000-key";
    };
  };
}

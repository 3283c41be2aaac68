{
  says = [
    "services.egress-proxies-operator.discovery.tokenFile"
    "is inside the Nix store"
  ];
  module.services.egress-proxies-operator = {
    enable = true;
    providers.here.local = { };
    discovery.tokenFile = "${builtins.storeDir}/0000-token";
  };
}

{
  says = [
    "services.egress-proxies-operator.credentials.key.path"
    "is inside the Nix store"
  ];
  module.services.egress-proxies-operator = {
    enable = true;
    providers.here.local = { };
    credentials.key.path = "${builtins.storeDir}/0000-key";
  };
}

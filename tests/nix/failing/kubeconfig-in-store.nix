{
  says = [
    "services.egress-proxies-operator.controlPlane"
    "is inside the Nix store"
  ];
  module.services.egress-proxies-operator = {
    enable = true;
    providers.here.local = { };
    controlPlane = "${builtins.storeDir}/0000-kubeconfig";
  };
}

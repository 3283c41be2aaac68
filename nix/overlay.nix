# What the modules expect to find in pkgs.
final: _prev: {
  egress-proxies-operator = final.callPackage ./package.nix { };
}

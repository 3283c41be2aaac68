# The appliance as a NixOS configuration for each architecture: what its images hold, and what
# `nixos-rebuild switch --target-host` brings an installed one to. It has no administrator's key in it
# (keys come from the boot partition); the template `host` makes one that has.
{ self, nixpkgs }:
let
  inherit (nixpkgs) lib;
  configuration =
    system:
    lib.nixosSystem {
      modules = [
        self.nixosModules.appliance
        ./image.nix
        { nixpkgs.hostPlatform = system; }
      ];
    };
in
lib.listToAttrs (
  map (system: lib.nameValuePair "appliance-${system}" (configuration system)) [
    "x86_64-linux"
    "aarch64-linux"
  ]
)

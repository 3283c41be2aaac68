# The NixOS modules, each with the overlay that its default package comes from.
{ self }:
let
  withOverlay = module: {
    imports = [ module ];
    nixpkgs.overlays = [ self.overlays.default ];
  };
in
rec {
  operator = withOverlay ../modules/operator.nix;
  hypervisor = ../modules/hypervisor.nix;
  appliance = withOverlay ../modules/appliance.nix;
  # The disk that the appliance's images have; for `nixos-rebuild --target-host`.
  appliance-disk = ../modules/appliance/disk.nix;
  default = operator;
}

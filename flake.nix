{
  description = "Egress proxies as a Kubernetes resource, made real on hosts, clouds and this machine";

  inputs.nixpkgs.url = "github:NixOS/nixpkgs/nixos-26.05";

  # What an output is lives in nix/ (packages, shell, images, checks), modules/ (NixOS modules) and
  # tests/ (NixOS VM tests).
  outputs =
    { self, nixpkgs }:
    let
      systems = [
        "x86_64-linux"
        "aarch64-linux"
      ];
      each =
        file:
        nixpkgs.lib.genAttrs systems (
          system:
          import file {
            inherit self nixpkgs system;
            inherit (nixpkgs) lib;
            pkgs = nixpkgs.legacyPackages.${system}.extend self.overlays.default;
          }
        );
    in
    {
      overlays.default = import ./nix/overlay.nix;
      nixosModules = import ./nix/modules.nix { inherit self; };
      nixosConfigurations = import ./nix/appliance.nix { inherit self nixpkgs; };
      templates = import ./nix/templates.nix;

      packages = each ./nix/packages.nix;
      apps = each ./nix/apps.nix;
      devShells = each ./nix/shell.nix;
      checks = each ./nix/checks.nix;
      formatter = nixpkgs.lib.genAttrs systems (system: nixpkgs.legacyPackages.${system}.nixfmt-tree);
    };
}

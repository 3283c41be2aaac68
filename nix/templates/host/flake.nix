{
  inputs.egress-proxies.url = "github:egress-proxies/egress-proxies-operator";
  inputs.nixpkgs.follows = "egress-proxies/nixpkgs";

  outputs =
    { nixpkgs, egress-proxies, ... }:
    {
      # nixos-rebuild switch --flake .#proxies --target-host admin@egress-appliance.local --sudo
      nixosConfigurations.proxies = nixpkgs.lib.nixosSystem {
        system = "x86_64-linux";
        modules = [
          egress-proxies.nixosModules.appliance
          egress-proxies.nixosModules.appliance-disk
          ./configuration.nix
        ];
      };
    };
}

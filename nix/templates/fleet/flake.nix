{
  inputs.egress-proxies.url = "github:egress-proxies/egress-proxies-operator";
  inputs.nixpkgs.follows = "egress-proxies/nixpkgs";

  outputs =
    { nixpkgs, egress-proxies, ... }:
    let
      machine =
        modules:
        nixpkgs.lib.nixosSystem {
          system = "x86_64-linux";
          inherit modules;
        };
    in
    {
      nixosConfigurations = {
        operator = machine [
          egress-proxies.nixosModules.operator
          ./operator.nix
        ];
        nas1 = machine [
          egress-proxies.nixosModules.hypervisor
          ./hypervisor.nix
          { networking.hostName = "nas1"; }
        ];
        nas2 = machine [
          egress-proxies.nixosModules.hypervisor
          ./hypervisor.nix
          { networking.hostName = "nas2"; }
        ];
      };
    };
}

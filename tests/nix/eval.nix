# What the Nix tier evaluates. Everything is text or numbers, for `nix-instantiate --eval --json`.
{
  # A nixpkgs source: whole, or for `failing` and `counts` just its `lib`.
  nixpkgs,
}:
let
  lib = import (nixpkgs + "/lib");
  overlay = import ../../nix/overlay.nix;

  files =
    dir:
    lib.mapAttrs' (name: _: lib.nameValuePair (lib.removeSuffix ".nix" name) (dir + "/${name}")) (
      lib.filterAttrs (name: kind: kind == "regular" && lib.hasSuffix ".nix" name) (builtins.readDir dir)
    );

  # What any machine has, so that nothing but our own assertions can fail.
  machine = {
    nixpkgs.hostPlatform = "x86_64-linux";
    nixpkgs.overlays = [ overlay ];
    boot.loader.systemd-boot.enable = lib.mkDefault true;
    fileSystems."/" = lib.mkDefault {
      device = "/dev/disk/by-label/nixos";
      fsType = "ext4";
    };
    system.stateVersion = lib.mkDefault "26.05";
  };

  evaluate =
    extra:
    (import (nixpkgs + "/nixos/lib/eval-config.nix") {
      system = null;
      modules = [
        machine
      ]
      ++ modules
      ++ extra;
    }).config;

  modules = [
    ../../modules/operator.nix
    ../../modules/hypervisor.nix
    ../../modules/appliance.nix
  ];

  # Hundreds of assertions of NixOS's own take seconds for each example; ours need only `lib`.
  standIn =
    module:
    lib.evalModules {
      modules = [
        (import ./stand-ins.nix { inherit lib; })
        module
      ]
      ++ modules;
    };

  failed = config: map (a: a.message) (lib.filter (a: !a.assertion) config.assertions);

  rendered = config: {
    failed = failed config;
    warnings = lib.filter (lib.hasInfix "egress-proxies") config.warnings;
    files = (import ./render.nix { inherit lib; }) config;
    # NixOS's own units that a fault of theirs would stop guests by.
    upstream = lib.mapAttrs (_: u: u.text) (
      lib.filterAttrs (
        name: _:
        lib.elem name [
          "libvirtd.service"
          "libvirt-guests.service"
          "br0-netdev.service"
        ]
      ) config.systemd.units
    );
  };
in
{
  hosts = lib.mapAttrs (_: file: rendered (evaluate [ file ])) (files ./hosts);
  toplevels = lib.mapAttrs (_: file: (evaluate [ file ]).system.build.toplevel.drvPath) (
    files ./hosts
  );
  failing = lib.mapAttrs (
    _: file:
    let
      example = import file;
    in
    {
      inherit (example) says;
      failed = failed (standIn example.module).config;
    }
  ) (files ./failing);
  # The VM tests' scripts, to be looked at as the Python that they are.
  scripts =
    let
      pkgs = import nixpkgs {
        system = "x86_64-linux";
        overlays = [ overlay ];
      };
      support = import ../support { inherit pkgs; };
    in
    lib.mapAttrs (_: file: (import file { inherit pkgs support; }).testScript) (files ../.);
  # What is wrong with a module in a file, by our assertions: for examples in documents.
  example = file: failed (standIn file).config;
  # How many assertions the modules hold for a machine that uses all of them.
  assertions = lib.mapAttrs (_: file: lib.length (standIn file).config.assertions) (
    removeAttrs (files ./hosts) [ "appliance" ]
  );
  options =
    let
      pkgs = import nixpkgs {
        system = "x86_64-linux";
        overlays = [ overlay ];
      };
    in
    {
      inherit (import ../../nix/options-doc.nix { inherit pkgs lib; }) count text;
    };
}

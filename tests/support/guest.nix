# A small NixOS that is a proxy as it boots: Squid for everybody, the QEMU guest agent, an address by
# DHCP. The directory has it as guest.qcow2.
{ pkgs }:
let
  nixos = import (pkgs.path + "/nixos/lib/eval-config.nix") {
    system = null;
    modules = [
      (
        { modulesPath, ... }:
        {
          imports = [
            (modulesPath + "/profiles/minimal.nix")
            (modulesPath + "/profiles/qemu-guest.nix")
          ];
          nixpkgs.hostPlatform = pkgs.stdenv.hostPlatform.system;
          networking.hostName = "proxy";
          networking.firewall.enable = false;
          services.qemuGuest.enable = true;
          services.squid = {
            enable = true;
            extraConfig = "http_access allow all";
            validateConfig = false;
          };
          boot.kernelParams = [ "console=ttyS0" ];
          documentation.enable = false;
          nix.enable = false;
          virtualisation.diskSize = 3072;
          system.stateVersion = "26.05";
        }
      )
    ];
  };
  image = nixos.config.system.build.images.qemu-efi;
in
pkgs.runCommand "egress-test-guest" { } ''
  mkdir $out
  ln -s ${image}/${image.passthru.filePath} $out/guest.qcow2
''

{
  self,
  system,
  pkgs,
  lib,
  ...
}:
let
  operator = pkgs.egress-proxies-operator;
  appliance = self.nixosConfigurations."appliance-${system}";
  images = appliance.config.system.build.images;
in
{
  default = operator;
  egress-proxies-operator = operator;

  crds = pkgs.runCommand "egress-proxies-crds" { } ''
    mkdir $out
    ${lib.getExe operator} crd > $out/crd.yaml
  '';

  container = pkgs.dockerTools.buildLayeredImage {
    name = "egress-proxies-operator";
    tag = operator.version;
    contents = [ pkgs.dockerTools.caCertificates ];
    config = {
      Entrypoint = [ (lib.getExe operator) ];
      User = "65532:65532";
      Env = [ "STATE_DIRECTORY=/var/lib/egress-proxies-operator" ];
      Labels."org.opencontainers.image.source" = operator.meta.homepage;
    };
  };

  options-doc = (import ./options-doc.nix { inherit pkgs lib; }).file;

  # The appliance, by the formats of nixpkgs' image framework.
  appliance-qcow2 = images.qemu-efi;
  appliance-raw-efi = images.raw-efi;
  appliance-iso = images.iso;
  appliance-netboot = images.netboot;
}

# What an image for everybody adds to the appliance: no key in it, and a variant for each format. The
# formats themselves are nixpkgs' image framework's.
{
  lib,
  modulesPath,
  ...
}:
let
  onDisk.virtualisation.diskSize = 6 * 1024;

  # Booted from a medium that is not written to: state is lost at power-off.
  onMedium = {
    boot.initrd.systemd.repart.enable = lib.mkForce false;
    systemd.repart.partitions = lib.mkForce { };
    boot.loader.systemd-boot.enable = lib.mkForce false;
  };
in
{
  imports = [ ../modules/appliance/disk.nix ];

  services.egress-proxies-appliance.enable = true;
  services.egress-proxies-appliance.keysFromOutside = true;

  image.modules = {
    qemu-efi = onDisk;
    raw-efi = onDisk;
    iso = onMedium;
    netboot.imports = [
      (modulesPath + "/installer/netboot/netboot.nix")
      onMedium
    ];
  };

  system.stateVersion = "26.05";
}

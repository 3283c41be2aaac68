# The appliance's disk: a system partition of fixed size, and state (images, guests' disks, leases,
# the embedded API's data) on a partition of its own that takes the rest of the disk at first boot.
# A system that is written anew keeps it.
{ lib, ... }:
{
  fileSystems = {
    "/" = {
      device = "/dev/disk/by-label/nixos";
      fsType = "ext4";
    };
    "/boot" = {
      device = "/dev/disk/by-label/ESP";
      fsType = "vfat";
    };
    "/var/lib" = {
      device = "/dev/disk/by-partlabel/egress-state";
      fsType = "ext4";
      neededForBoot = true;
    };
  };

  boot.loader.systemd-boot.enable = lib.mkDefault true;
  boot.loader.efi.canTouchEfiVariables = lib.mkDefault false;
  boot.growPartition = false;
  boot.initrd.systemd.enable = true;
  boot.initrd.systemd.repart.enable = true;
  systemd.repart.partitions."50-egress-state" = {
    Type = "linux-generic";
    Label = "egress-state";
    Format = "ext4";
    SizeMinBytes = "4G";
  };
  boot.initrd.availableKernelModules = [
    "ahci"
    "nvme"
    "sd_mod"
    "usb_storage"
    "virtio_blk"
    "virtio_pci"
    "virtio_scsi"
  ];
}

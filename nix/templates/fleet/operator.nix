# The operator. Add the machine's hardware-configuration.nix and boot loader.
{ config, ... }:
{
  services.egress-proxies-operator = {
    enable = true;
    # ssh-keygen -t ed25519 -N "" -f /var/lib/secrets/egress-ssh-key
    credentials.ssh-key.path = "/var/lib/secrets/egress-ssh-key";
    providers.fleet.kvm = {
      sshKeyFile = config.services.egress-proxies-operator.credentials.ssh-key.file;
      # What `egress-proxies-hypervisor-info` prints on each hypervisor.
      knownHosts = ''
        nas1.example.net ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ9ZJvCzG0a0b5h0Jk7rF9S2kKXlKk3mQv3fJZQm3V1c
        nas2.example.net ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ9ZJvCzG0a0b5h0Jk7rF9S2kKXlKk3mQv3fJZQm3V1d
      '';
      images.debian-13 = {
        url = "https://cloud.debian.org/images/cloud/trixie/latest/debian-13-genericcloud-amd64.qcow2";
        checksums = "https://cloud.debian.org/images/cloud/trixie/latest/SHA512SUMS";
      };
      machineTypes.small = {
        vcpus = 1;
        memoryMiB = 512;
      };
      hosts.nas1 = {
        address = "nas1.example.net:22";
        user = "egress-hypervisor";
        socket = "/run/libvirt/libvirt-sock";
        bridge = "br-egress";
      };
      hosts.nas2 = {
        address = "nas2.example.net:22";
        user = "egress-hypervisor";
        socket = "/run/libvirt/libvirt-sock";
        bridge = "br-egress";
      };
    };
    discovery = {
      addresses = [ ":8090" ];
      openFirewall = true;
      tokenFile = "/var/lib/secrets/discovery-token";
    };
  };
  system.stateVersion = "26.05";
}

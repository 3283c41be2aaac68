# `services.egress-proxies-operator.providers`: the providers file as typed options. Names are those
# of the file, so that its documentation holds here too; lists of named things are attribute sets.
{ lib }:
let
  inherit (lib) mkOption types;

  optional =
    type: description:
    mkOption {
      type = types.nullOr type;
      default = null;
      inherit description;
    };

  # A field that this module does not know is passed on, and judged by check-config.
  freeform = types.attrsOf types.anything;

  image = types.submodule {
    freeformType = freeform;
    options = {
      url = mkOption {
        type = types.str;
        example = "https://cloud.debian.org/images/cloud/trixie/latest/debian-13-genericcloud-amd64.qcow2";
        description = "Where the image is fetched from, by http or https.";
      };
      sha256 = optional types.str "The image's SHA-256, in hexadecimal.";
      sha512 = optional types.str "The image's SHA-512, in hexadecimal.";
      checksums = optional types.str "URL of a SHA256SUMS or SHA512SUMS file that names the image.";
      format = optional (types.enum [
        "qcow2"
        "raw"
      ]) "What the image is, after decompression. Unset: qcow2.";
      compression = optional (types.enum [
        "none"
        "xz"
        "gz"
        "zstd"
      ]) "How the image is compressed. Unset: judged by the URL's suffix.";
      firmware = optional (types.enum [
        "uefi"
        "bios"
      ]) "What boots it. Unset: uefi.";
    };
  };

  machineType = types.submodule {
    freeformType = freeform;
    options = {
      vcpus = mkOption {
        type = types.ints.positive;
        example = 1;
        description = "Virtual processors.";
      };
      memoryMiB = mkOption {
        type = types.ints.positive;
        example = 512;
        description = "Memory, in MiB. UEFI firmware wants 256 at the least.";
      };
    };
  };

  host = types.submodule {
    freeformType = freeform;
    options = {
      local = mkOption {
        type = types.bool;
        default = false;
        description = ''
          This very machine, its libvirt socket opened directly. The service is then let at that
          socket; without such a host it is not.
        '';
      };
      address = optional types.str "The host's sshd, as HOST:PORT.";
      user = optional types.str "The user to log in as; what `services.egress-proxies-hypervisor.ssh.user` is there.";
      socket = optional types.str "The host's libvirt socket. Unset: virtqemud's, then libvirtd's.";
      pool = optional types.str "The libvirt storage pool for images and disks. Unset: `default`.";
      bridge = optional types.str "The bridge that guests are plugged into. Give this or `network`.";
      network = optional types.str "The libvirt network that guests are plugged into. Give this or `bridge`.";
      domainType = optional (types.enum [
        "auto"
        "kvm"
        "qemu"
      ]) "Whether guests are accelerated. Unset: kvm where the host can, else software emulation.";
      cpuMode = optional types.str "The guests' CPU. Unset: host-passthrough under kvm, maximum under emulation.";
      draining = optional types.bool "Take no new guests; those that are there are served and deleted.";
    };
  };

  kvm = types.submodule {
    freeformType = freeform;
    options = {
      sshKeyFile = optional (types.either types.path types.str) ''
        The private key for the hosts: an absolute path outside of the Nix store that the user
        `egress-proxies` may read. It is read again when it changes. A file that only root may read
        is given as a credential:
        `config.services.egress-proxies-operator.credentials.NAME.file`.
      '';
      knownHostsFile = optional (types.either types.path types.str) ''
        The hosts' keys, as in known_hosts(5). Not a secret; `knownHosts` writes it for you.
      '';
      knownHosts = mkOption {
        type = types.lines;
        default = "";
        example = "nas1.example.net ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIC...";
        description = ''
          Lines of the known_hosts file, as `egress-proxies-hypervisor-info` prints them on a host.
          Instead of `knownHostsFile`.
        '';
      };
      insecureIgnoreHostKey = optional types.bool "Trust whatever answers at a host's address. Leave it unset.";
      diskSizeGb = optional types.ints.positive "Capacity of a guest's disk, in GB. Unset: 10.";
      vendorData = optional types.str "Extra cloud-init vendor-data for every guest.";
      networkConfig = optional types.str "cloud-init network-config for every guest. Unset: DHCP, by the guest's own default.";
      installGuestAgent = optional types.bool "Whether vendor-data brings the QEMU guest agent. Unset: true.";
      images = mkOption {
        type = types.attrsOf image;
        default = { };
        description = "Images by the key that a Proxy's `placement.image` names.";
      };
      machineTypes = mkOption {
        type = types.attrsOf machineType;
        default = { };
        description = "Profiles by the name that a Proxy's `placement.machineType` names.";
      };
      hosts = mkOption {
        type = types.attrsOf host;
        default = { };
        description = "Hypervisors by the name that a Proxy's `placement.zone` names.";
      };
    };
  };

  freeformBlock =
    description:
    mkOption {
      type = types.nullOr freeform;
      default = null;
      inherit description;
    };
in
{
  option = mkOption {
    default = { };
    example = lib.literalExpression ''
      {
        kvm-home.kvm = {
          sshKeyFile = config.services.egress-proxies-operator.credentials.ssh-key.file;
          knownHosts = "nas1.example.net ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIC...";
          machineTypes.small = { vcpus = 1; memoryMiB = 512; };
          images.debian-13.url = "https://cloud.debian.org/images/cloud/trixie/latest/debian-13-genericcloud-amd64.qcow2";
          hosts.nas1 = { address = "nas1.example.net:22"; user = "egress-hypervisor"; bridge = "br0"; };
        };
      }
    '';
    description = ''
      Provider instances by name: what a Proxy's `spec.provider` names. Each has exactly one block,
      and the block is its type. Rendered to the providers file, which the operator itself checks
      when the system is built.
    '';
    type = types.attrsOf (
      types.submodule {
        options = {
          kvm = mkOption {
            type = types.nullOr kvm;
            default = null;
            description = "Virtual machines on libvirt hosts, this machine or far ones.";
          };
          local = freeformBlock "Processes on this machine; fields as in docs/reference/local-provider.md. `{ }` is enough.";
          kubernetes = freeformBlock "Squid pods in the cluster that the control plane is.";
          gcp = freeformBlock "Compute Engine instances.";
        };
      }
    );
  };

  types = [
    "gcp"
    "kubernetes"
    "kvm"
    "local"
  ];
}

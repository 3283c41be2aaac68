# The options of `services.egress-proxies-hypervisor`.
{ config, lib, ... }:
let
  inherit (lib) mkOption mkEnableOption types;
  cidr = types.strMatching "[0-9a-fA-F.:]+/[0-9]+";
in
{
  options.services.egress-proxies-hypervisor = {
    enable = mkEnableOption "this machine as a libvirt host for egress proxies";

    bridge = {
      enable = mkEnableOption "a bridge over interfaces of this machine, so that guests are on its network";
      name = mkOption {
        type = types.strMatching "[A-Za-z0-9_.-]{1,15}";
        default = "br-egress";
        description = "Name of the bridge.";
      };
      interfaces = mkOption {
        type = types.listOf types.str;
        default = [ ];
        example = [ "enp1s0" ];
        description = ''
          Interfaces that become ports of the bridge, which takes over their addresses. With
          systemd-networkd patterns are taken too, such as `en*`.
        '';
      };
      stp = mkOption {
        type = types.bool;
        default = lib.any (lib.hasInfix "*") config.services.egress-proxies-hypervisor.bridge.interfaces;
        defaultText = lib.literalMD "true when an interface is given as a pattern";
        description = "Spanning tree, for where two ports may lead to one network.";
      };
      dhcp = mkOption {
        type = types.bool;
        default = true;
        description = "The machine's own address on the bridge comes by DHCP.";
      };
      addresses = mkOption {
        type = types.listOf cidr;
        default = [ ];
        example = [ "192.0.2.10/24" ];
        description = "Fixed addresses of the machine on the bridge.";
      };
      gateway = mkOption {
        type = types.nullOr types.str;
        default = null;
        example = "192.0.2.1";
        description = "Default gateway, with fixed addresses.";
      };
      macAddress = mkOption {
        type = types.nullOr (types.strMatching "([0-9a-f]{2}:){5}[0-9a-f]{2}");
        default = null;
        description = "The bridge's hardware address: that of the first interface keeps the machine's DHCP address.";
      };
    };

    network = {
      enable = mkEnableOption "a libvirt network of its own, with DHCP, and NAT to the outside";
      name = mkOption {
        type = types.strMatching "[A-Za-z0-9_.-]+";
        default = "egress";
        description = "Name of the network in libvirt.";
      };
      bridgeName = mkOption {
        type = types.strMatching "[A-Za-z0-9_.-]{1,15}";
        default = "virbr-egress";
        description = "Name of the interface that libvirt makes for it.";
      };
      subnet = mkOption {
        type = types.strMatching "[0-9]+\\.[0-9]+\\.[0-9]+\\.0/24";
        default = "192.168.131.0/24";
        description = "IPv4 network of the guests, a /24. The machine takes .1, DHCP hands out .16 to .254.";
      };
      nat = mkOption {
        type = types.bool;
        default = true;
        description = "Guests reach the outside through this machine's addresses. Off: they reach nothing but this machine.";
      };
    };

    pool = {
      name = mkOption {
        type = types.strMatching "[A-Za-z0-9_.-]+";
        default = "default";
        description = "Name of the storage pool.";
      };
      path = mkOption {
        type = types.strMatching "/.*";
        default = "/var/lib/libvirt/images";
        description = "Directory of the pool. Changing it points the pool elsewhere; files are not moved.";
      };
      autostart = mkOption {
        type = types.bool;
        default = true;
        description = "Start the pool with libvirtd.";
      };
    };

    ssh = {
      enable = mkOption {
        type = types.bool;
        default = true;
        description = "Let a far operator in over SSH: to the libvirt socket, and to nothing else.";
      };
      user = mkOption {
        type = types.strMatching "[a-z_][a-z0-9_-]{0,30}";
        default = "egress-hypervisor";
        description = "The user that the operator logs in as.";
      };
      authorizedKeys = mkOption {
        type = types.listOf types.str;
        default = [ ];
        example = [ "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIC... operator" ];
        description = "The operator's public keys, a line each.";
      };
      socket = mkOption {
        type = types.strMatching "/[^] \t]+";
        default = "/run/libvirt/libvirt-sock";
        description = "The one socket that may be reached.";
      };
      openFirewall = mkOption {
        type = types.bool;
        default = true;
        description = "Open sshd's ports.";
      };
    };

    guests = {
      onShutdown = mkOption {
        type = types.enum [
          "shutdown"
          "suspend"
        ];
        default = "shutdown";
        description = ''
          What becomes of guests when the machine goes down. A proxy has no state worth a saved
          memory image, so the default shuts down; the operator starts or rebuilds what it needs.
        '';
      };
      parallel = mkOption {
        type = types.ints.positive;
        default = 10;
        description = "How many guests are shut down at a time.";
      };
      timeoutSeconds = mkOption {
        type = types.ints.positive;
        default = 60;
        description = "How long a shutdown of all guests may take.";
      };
    };

    nestedVirtualisation = mkOption {
      type = types.bool;
      default = false;
      description = "Let guests run guests of their own.";
    };

    ksm = mkOption {
      type = types.bool;
      default = false;
      description = ''
        Merge equal memory pages of guests, which are many where guests come from one image. Guests
        that do not trust each other can time each other through it.
      '';
    };

    rendered = mkOption {
      type = types.attrsOf types.str;
      readOnly = true;
      internal = true;
      description = "What the options render to, as text: for tests, and for people who look.";
    };
  };
}

# Enough of NixOS to evaluate our modules' options and assertions with nixpkgs' `lib` alone: the
# options that they set, with types that take what they set. What the real options make of it is seen
# only with a whole nixpkgs.
{ lib }:
let
  inherit (lib) mkOption types;
  any = mkOption {
    type = types.attrsOf types.anything;
    default = { };
  };
  list = mkOption {
    type = types.listOf types.anything;
    default = [ ];
  };
  lines = mkOption {
    type = types.lines;
    default = "";
  };
  flag =
    default:
    mkOption {
      type = types.bool;
      inherit default;
    };
  value =
    default:
    mkOption {
      type = types.anything;
      inherit default;
    };
  service = types.submodule {
    freeformType = types.attrsOf types.anything;
    options = {
      after = list;
      before = list;
      wants = list;
      requires = list;
      path = list;
    };
  };
in
{
  options = {
    assertions = list;
    warnings = list;
    environment = {
      systemPackages = list;
      etc = any;
    };
    systemd = {
      services = mkOption {
        type = types.attrsOf service;
        default = { };
      };
      network = any;
      repart = any;
    };
    users = any;
    security = {
      polkit.enable = flag false;
      polkit.extraConfig = lines;
      sudo = any;
    };
    networking = {
      hostName = value "machine";
      useNetworkd = flag false;
      useDHCP = flag true;
      bridges = any;
      interfaces = any;
      defaultGateway = any;
      defaultGateway6 = any;
      dhcpcd = any;
      nftables.enable = flag false;
      firewall = {
        allowedTCPPorts = list;
        interfaces = any;
        extraForwardRules = lines;
        extraReversePathFilterRules = lines;
        extraCommands = lines;
        extraStopCommands = lines;
      };
    };
    services = {
      openssh = {
        enable = flag false;
        openFirewall = flag true;
        ports = value [ 22 ];
        settings = any;
        authorizedKeysFiles = list;
        extraConfig = lines;
      };
      getty = any;
      avahi = any;
    };
    virtualisation.libvirtd = {
      enable = flag false;
      package = value "/libvirt";
      onBoot = value null;
      onShutdown = value null;
      parallelShutdown = value 0;
      shutdownTimeout = value 0;
      allowedBridges = list;
    };
    boot = any;
    hardware = any;
    nix = any;
    system = any;
  };

  config._module.args = {
    utils = {
      escapeSystemdExecArgs = lib.concatStringsSep " ";
      escapeSystemdPath = lib.id;
    };
    # Packages are only named, never built: each is a string that says which.
    pkgs =
      lib.genAttrs [
        "bash"
        "coreutils"
        "diffutils"
        "gawk"
        "gnugrep"
        "gnused"
        "iproute2"
        "kubectl"
        "squid"
      ] (name: "/${name}")
      // {
        egress-proxies-operator = {
          type = "derivation";
          name = "egress-proxies-operator";
          version = "0";
          meta.mainProgram = "egress-proxies-operator";
          outPath = "/egress-proxies-operator";
          outputName = "out";
        };
        stdenv.hostPlatform.isAarch64 = false;
        writeText = name: _: "/${name}";
        runCommand =
          name: _: _:
          "/${name}";
        linkFarm = name: _: "/${name}";
        writeShellScriptBin = name: _: "/${name}";
      };
  };
}

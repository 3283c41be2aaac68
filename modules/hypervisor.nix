# `services.egress-proxies-hypervisor`: a libvirt host for egress proxies. What this file does, in
# order: libvirtd and its guests, the pool and the network, the operator's way in, the firewall.
{
  config,
  lib,
  pkgs,
  utils,
  ...
}:
let
  cfg = config.services.egress-proxies-hypervisor;
  define = import ./hypervisor/definitions.nix { inherit lib; };
  restricted = import ./hypervisor/ssh.nix { inherit lib; };
  unit = "egress-proxies-hypervisor";

  nologin = "/run/current-system/sw/bin/nologin";
  access = {
    inherit (cfg.ssh) user socket;
    inherit nologin;
  };
  keyOptions = restricted.keyOptions { inherit (access) socket nologin; };
  # Spaces within the options would end them.
  keys = map (key: "${keyOptions} ${key}") cfg.ssh.authorizedKeys;

  definitions = lib.optionalAttrs cfg.enable (
    {
      "pools/${cfg.pool.name}.xml" = define.pool cfg.pool;
    }
    // lib.optionalAttrs cfg.pool.autostart { "pools/${cfg.pool.name}.autostart" = ""; }
    // lib.optionalAttrs cfg.network.enable {
      "networks/${cfg.network.name}.xml" = define.network cfg.network;
    }
  );
  definitionsDir = pkgs.linkFarm "${unit}-definitions" (
    lib.mapAttrs (name: text: pkgs.writeText (baseNameOf name) text) definitions
  );

  info = pkgs.writeShellScriptBin "egress-proxies-hypervisor-info" ''
    export PORT=${toString (lib.head (config.services.openssh.ports ++ [ 22 ]))}
    export LOGIN=${cfg.ssh.user} SOCKET=${cfg.ssh.socket} POOL=${cfg.pool.name}
    export NETWORK=${
      lib.escapeShellArg (
        if cfg.bridge.enable then "  bridge: ${cfg.bridge.name}" else "  network: ${cfg.network.name}"
      )
    }
    exec ${pkgs.bash}/bin/bash ${./hypervisor/info.sh} "$@"
  '';
in
{
  imports = [
    ./hypervisor/options.nix
    ./hypervisor/bridge.nix
  ];

  config = lib.mkMerge [
    {
      services.egress-proxies-hypervisor.rendered = definitions // {
        "sshd_config.match" = restricted.matchBlock access;
        "authorized_keys" = lib.concatStringsSep "\n" keys + "\n";
      };

      # Pools and networks; where the module is turned off, only what it once made is removed.
      systemd.services.${unit} = {
        description = "Storage pool and network for egress proxies";
        wantedBy = [ "multi-user.target" ];
        unitConfig.ConditionPathExists = lib.mkIf (!cfg.enable) "/var/lib/${unit}/made";
        requires = lib.mkIf config.virtualisation.libvirtd.enable [ "libvirtd.socket" ];
        after = [
          "libvirtd.socket"
          "libvirtd.service"
          "network.target"
        ];
        # A later start than libvirtd's, but not a stop with it: nothing is undone by a restart.
        path = [
          config.virtualisation.libvirtd.package
          pkgs.coreutils
          pkgs.diffutils
          pkgs.gawk
          pkgs.gnugrep
          pkgs.gnused
        ];
        serviceConfig = {
          Type = "oneshot";
          RemainAfterExit = true;
          StateDirectory = unit;
          ExecStart =
            if cfg.enable || config.virtualisation.libvirtd.enable then
              "${pkgs.bash}/bin/bash ${./hypervisor/reconcile.sh} ${definitionsDir}"
            else
              # Without libvirtd its definitions mean nothing; only the record goes.
              "${pkgs.coreutils}/bin/rm /var/lib/${unit}/made";
        };
      };
    }

    (lib.mkIf cfg.enable {
      assertions = import ./hypervisor/assertions.nix { inherit lib; } {
        inherit cfg;
        networkd = config.networking.useNetworkd;
      };

      virtualisation.libvirtd = {
        enable = true;
        onBoot = "ignore";
        onShutdown = cfg.guests.onShutdown;
        parallelShutdown = cfg.guests.parallel;
        shutdownTimeout = cfg.guests.timeoutSeconds;
        allowedBridges = lib.optional cfg.bridge.enable cfg.bridge.name;
      };
      security.polkit.enable = true;

      # Restarting libvirtd must not stop guests. Some nixpkgs releases had libvirt-guests require
      # libvirtd, and so be stopped with it: nixpkgs#485136.
      systemd.services.libvirt-guests = {
        requires = lib.mkForce [ ];
        bindsTo = lib.mkForce [ ];
        partOf = lib.mkForce [ ];
        wants = [ "libvirtd.service" ];
        restartIfChanged = lib.mkForce false;
        stopIfChanged = lib.mkForce false;
      };
      systemd.services.libvirtd = {
        restartIfChanged = lib.mkForce false;
        serviceConfig.KillMode = lib.mkForce "process";
      };

      boot.extraModprobeConfig = lib.mkIf cfg.nestedVirtualisation ''
        options kvm_intel nested=1
        options kvm_amd nested=1
      '';
      hardware.ksm.enable = cfg.ksm;

      environment.systemPackages = [ info ];
    })

    # Taps that a re-made bridge lost are plugged again, when its device appears.
    (lib.mkIf (cfg.enable && cfg.bridge.enable) {
      systemd.services."${unit}-replug" = {
        description = "Plug running guests into ${cfg.bridge.name} again";
        wantedBy = [ "sys-subsystem-net-devices-${utils.escapeSystemdPath cfg.bridge.name}.device" ];
        after = [
          "libvirtd.socket"
          "network.target"
        ];
        # Not at boot: then libvirtd plugs them itself, and must not be started out of order.
        unitConfig.ConditionPathExists = "/run/libvirt/libvirtd.pid";
        path = [
          config.virtualisation.libvirtd.package
          pkgs.iproute2
          pkgs.coreutils
        ];
        serviceConfig = {
          Type = "oneshot";
          ExecStart = "${pkgs.bash}/bin/bash ${./hypervisor/replug.sh} ${cfg.bridge.name}";
        };
      };
    })

    (lib.mkIf (cfg.enable && cfg.network.enable) {
      # libvirt's own nftables rules cannot undo a drop in the host's table, so what guests ask of
      # this machine is opened here, on their interface only: DHCP and DNS.
      networking.firewall.interfaces.${cfg.network.bridgeName} = {
        allowedUDPPorts = [
          53
          67
        ];
        allowedTCPPorts = [ 53 ];
      };
      networking.firewall.extraForwardRules = lib.mkIf config.networking.nftables.enable ''
        iifname "${cfg.network.bridgeName}" accept comment "egress-proxies: guests to the outside"
        oifname "${cfg.network.bridgeName}" ct state { established, related } accept comment "egress-proxies: answers to guests"
      '';
      boot.kernel.sysctl."net.ipv4.ip_forward" = lib.mkIf cfg.network.nat (lib.mkDefault 1);
    })

    (lib.mkIf (cfg.enable && cfg.ssh.enable) {
      services.openssh = {
        enable = true;
        openFirewall = cfg.ssh.openFirewall;
        # Last: what follows a Match line belongs to it.
        extraConfig = lib.mkOrder 2000 (restricted.matchBlock access);
      };
      users.groups.${cfg.ssh.user} = { };
      users.users.${cfg.ssh.user} = {
        isSystemUser = true;
        group = cfg.ssh.user;
        extraGroups = [ "libvirtd" ];
        description = "far operator of egress proxies";
        shell = nologin;
        # No password ever fits; unlike "!" it does not lock the account against keys.
        hashedPassword = "*";
        openssh.authorizedKeys.keys = keys;
      };
    })
  ];
}

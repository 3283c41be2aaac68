# `services.egress-proxies-appliance`: operator and hypervisor on one machine, which is nothing else.
# It boots, makes its bridge, serves, and says on its console and over mDNS where it is.
{
  config,
  lib,
  pkgs,
  ...
}:
let
  inherit (lib) mkOption mkEnableOption types;
  cfg = config.services.egress-proxies-appliance;
  operator = config.services.egress-proxies-operator;
  hypervisor = config.services.egress-proxies-hypervisor;
  token = "/var/lib/egress-proxies-appliance/discovery-token";

  outsideKeys = "/run/egress-proxies-appliance/authorized_keys";

  # Run over SSH by an administrator: `ssh admin@egress-appliance.local egress-proxies-kubeconfig`.
  kubeconfig = pkgs.writeShellScriptBin "egress-proxies-kubeconfig" ''
    exec /run/wrappers/bin/sudo -n ${pkgs.coreutils}/bin/cat /var/lib/egress-proxies-operator/admin.kubeconfig
  '';
  showToken = pkgs.writeShellScriptBin "egress-proxies-token" ''
    exec /run/wrappers/bin/sudo -n ${pkgs.coreutils}/bin/cat ${token}
  '';
in
{
  imports = [
    ./operator.nix
    ./hypervisor.nix
  ];

  options.services.egress-proxies-appliance = {
    enable = mkEnableOption "the egress proxies appliance: operator and hypervisor on one machine";
    interfaces = mkOption {
      type = types.listOf types.str;
      default = [
        "en*"
        "eth*"
      ];
      example = [ "enp1s0" ];
      description = "Interfaces that become ports of the guests' bridge.";
    };
    adminKeys = mkOption {
      type = types.listOf types.str;
      default = [ ];
      example = [ "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIC... me" ];
      description = ''
        Public keys that may log in as `admin`, who may do everything. Without any, only the
        console is left, which logs nobody in.
      '';
    };
    keysFromOutside = mkOption {
      type = types.bool;
      default = false;
      description = ''
        Take administrators' keys also from outside of the configuration, for an image that is made
        once for everybody: the file `egress-appliance/admin-keys` on the boot partition, and the
        system credential `egress.admin-keys` (on the kernel command line
        `systemd.set_credential=egress.admin-keys:...`, or by SMBIOS from a hypervisor).
      '';
    };
    providerName = mkOption {
      type = types.str;
      default = "kvm";
      description = "Name of the provider that makes machines here: what a Proxy's `spec.provider` names.";
    };
  };

  config = lib.mkIf cfg.enable {
    assertions = [
      {
        assertion = cfg.adminKeys != [ ] || cfg.keysFromOutside;
        message = "services.egress-proxies-appliance.adminKeys is empty: nobody could fetch the kubeconfig; give your public key, such as [ (lib.fileContents ./me.pub) ].";
      }
      {
        assertion = !(lib.any (lib.hasInfix "PRIVATE KEY") cfg.adminKeys);
        message = "services.egress-proxies-appliance.adminKeys: an entry is a private key; give the public one, the line in the file that ends in .pub.";
      }
    ];

    # Weaker than a default: whatever names the machine wins.
    networking.hostName = lib.mkOverride 1100 "egress-appliance";
    networking.useNetworkd = lib.mkDefault true;
    networking.useDHCP = false;
    networking.nftables.enable = lib.mkDefault true;

    services.egress-proxies-hypervisor = {
      enable = true;
      bridge.enable = true;
      bridge.interfaces = cfg.interfaces;
      # The operator is here: nobody needs to come in for the socket.
      ssh.enable = false;
    };

    services.egress-proxies-operator = {
      enable = true;
      controlPlane = "embedded";
      # The Kubernetes API stays on loopback and is reached through SSH; leases are for the network.
      discovery.addresses = lib.mkDefault [ ":8090" ];
      discovery.openFirewall = lib.mkDefault true;
      discovery.tokenFile = lib.mkDefault token;
      providers.${cfg.providerName}.kvm = {
        hosts.appliance = {
          local = true;
          bridge = hypervisor.bridge.name;
          pool = hypervisor.pool.name;
          inherit (hypervisor.ssh) socket;
        };
        machineTypes.small = lib.mkDefault {
          vcpus = 1;
          memoryMiB = 512;
        };
        images.debian-13 = lib.mkDefault {
          url = "https://cloud.debian.org/images/cloud/trixie/latest/debian-13-genericcloud-${
            if pkgs.stdenv.hostPlatform.isAarch64 then "arm64" else "amd64"
          }.qcow2";
          checksums = "https://cloud.debian.org/images/cloud/trixie/latest/SHA512SUMS";
        };
      };
    };

    # A token of its own for each appliance, made at its first boot.
    systemd.services.egress-proxies-appliance-token = {
      description = "Make the discovery API's token";
      wantedBy = [ "egress-proxies-operator.service" ];
      before = [ "egress-proxies-operator.service" ];
      unitConfig.ConditionPathExists = "!${token}";
      serviceConfig = {
        Type = "oneshot";
        StateDirectory = "egress-proxies-appliance";
        StateDirectoryMode = "0700";
        UMask = "0077";
      };
      script = ''
        ${pkgs.coreutils}/bin/head -c 32 /dev/urandom | ${pkgs.coreutils}/bin/base64 -w0 >${token}.new
        ${pkgs.coreutils}/bin/mv ${token}.new ${token}
      '';
    };
    systemd.services.egress-proxies-operator.requires = [ "egress-proxies-hypervisor.service" ];
    systemd.services.egress-proxies-operator.after = [ "egress-proxies-hypervisor.service" ];

    # Administration: by key only.
    services.openssh = {
      enable = true;
      settings.PasswordAuthentication = false;
      settings.KbdInteractiveAuthentication = false;
      settings.PermitRootLogin = "prohibit-password";
    };
    services.openssh.authorizedKeysFiles = lib.mkIf cfg.keysFromOutside [ "${outsideKeys}.%u" ];
    systemd.services.egress-proxies-appliance-keys = lib.mkIf cfg.keysFromOutside {
      description = "Administrators' keys from outside of the configuration";
      wantedBy = [ "multi-user.target" ];
      before = [ "sshd.service" ];
      unitConfig.RequiresMountsFor = "/boot";
      serviceConfig = {
        Type = "oneshot";
        RemainAfterExit = true;
        RuntimeDirectory = "egress-proxies-appliance";
        ImportCredential = "egress.admin-keys";
      };
      script = ''
        for source in /boot/egress-appliance/admin-keys "$CREDENTIALS_DIRECTORY/egress.admin-keys"; do
          if [ -r "$source" ]; then
            # What an editor on another system makes of a text file.
            ${pkgs.coreutils}/bin/tr -d '\r' <"$source"
            echo
          fi
        done >${outsideKeys}.admin
      '';
    };
    users.mutableUsers = false;
    users.allowNoPasswordLogin = true;
    users.users.admin = {
      isNormalUser = true;
      extraGroups = [ "wheel" ];
      openssh.authorizedKeys.keys = cfg.adminKeys;
    };
    # nixos-rebuild switch --target-host copies closures in as this user.
    nix.settings.trusted-users = [ "@wheel" ];
    security.sudo.wheelNeedsPassword = false;

    environment.systemPackages = [
      kubeconfig
      showToken
      pkgs.kubectl
    ];

    # agetty fills in the address, and shows it again when it changes.
    services.getty.greetingLine = ''
      egress proxies appliance ${operator.package.version or ""}
        address      \4{${hypervisor.bridge.name}} \6{${hypervisor.bridge.name}}
        name         ${config.networking.hostName}.local
        leases       http://${config.networking.hostName}.local:8090/
    '';
    services.getty.helpLine = lib.mkForce ''
      On your machine:
        ssh admin@${config.networking.hostName}.local egress-proxies-kubeconfig > egress.kubeconfig
        ssh -N -L 6443:127.0.0.1:6443 admin@${config.networking.hostName}.local &
        kubectl --kubeconfig egress.kubeconfig get proxies
    '';

    services.avahi = {
      enable = true;
      openFirewall = true;
      publish.enable = true;
      publish.addresses = true;
      publish.userServices = true;
      allowInterfaces = [ hypervisor.bridge.name ];
      extraServiceFiles.egress-proxies = ''
        <?xml version="1.0" standalone="no"?>
        <!DOCTYPE service-group SYSTEM "avahi-service.dtd">
        <service-group>
          <name replace-wildcards="yes">Egress proxies on %h</name>
          <service>
            <type>_egress-proxies._tcp</type>
            <port>8090</port>
          </service>
        </service-group>
      '';
    };
  };
}

# `services.egress-proxies-operator`: the operator as a service. What this file does, in order: render
# the providers file and the manifests, run the unit, apply what is declared, open ports.
{
  config,
  lib,
  pkgs,
  utils,
  ...
}:
let
  ours = import ./lib.nix { inherit lib; };
  cfg = config.services.egress-proxies-operator;
  unit = "egress-proxies-operator";
  providerTypes = (import ./operator/providers.nix { inherit lib; }).types;
  manifestOf = (import ./operator/proxies.nix { inherit lib; }).manifest;
  base = import ./operator/service.nix { inherit lib; };

  embedded = cfg.controlPlane == "embedded";
  credential = name: "/run/credentials/${unit}.service/${name}";

  # The providers file.
  knownHostsName = name: "${unit}/known_hosts.${name}";
  renderKvm =
    name: kvm:
    removeAttrs kvm [ "knownHosts" ]
    // {
      sshKeyFile = if kvm.sshKeyFile == null then null else toString kvm.sshKeyFile;
      knownHostsFile =
        if kvm.knownHosts != "" then
          "/etc/${knownHostsName name}"
        else if kvm.knownHostsFile != null then
          toString kvm.knownHostsFile
        else
          null;
      hosts = lib.mapAttrsToList (
        host: settings:
        {
          name = host;
        }
        // removeAttrs settings [ "local" ]
        // lib.optionalAttrs settings.local { local = true; }
      ) kvm.hosts;
    };
  renderProvider =
    name: provider:
    let
      type = lib.findFirst (t: provider.${t} != null) "none" providerTypes;
    in
    {
      inherit name type;
      ${type} = if type == "kvm" then renderKvm name provider.kvm else provider.${type} or { };
    };
  providersText = ours.toYAML (
    ours.dropNulls (
      lib.recursiveUpdate {
        providers = lib.mapAttrsToList renderProvider cfg.providers;
      } cfg.extraConfig
    )
  );
  providersFile =
    if cfg.checkConfig then
      pkgs.runCommand "providers.yaml"
        {
          text = providersText;
          passAsFile = [ "text" ];
          nativeBuildInputs = [ cfg.package ];
        }
        ''
          egress-proxies-operator check-config "$textPath"
          cp "$textPath" "$out"
        ''
    else
      pkgs.writeText "providers.yaml" providersText;

  kvmProviders = lib.filterAttrs (_: p: p.kvm != null) cfg.providers;
  near = lib.any (p: lib.any (h: h.local) (lib.attrValues p.kvm.hosts)) (lib.attrValues kvmProviders);
  local = lib.any (p: p.local != null) (lib.attrValues cfg.providers);

  # The command line.
  flag = name: value: [
    "--${name}"
    value
  ];
  arguments =
    (
      if embedded then
        flag "control-plane" "embedded" ++ flag "api-addr" cfg.api.address
      else
        flag "control-plane" "cluster" ++ flag "kubeconfig" (credential "kubeconfig")
    )
    ++ lib.optionals (cfg.namespace != null) (flag "namespace" cfg.namespace)
    ++ flag "providers-config" cfg.providersFile
    ++ lib.concatMap (flag "discovery-addr") cfg.discovery.addresses
    ++ lib.optionals (cfg.discovery.tokenFile != null) (
      flag "discovery-token-file" (credential "discovery-token")
    )
    ++ lib.optionals (cfg.discovery.tls.keyFile != null) (
      flag "discovery-tls-cert" (toString cfg.discovery.tls.certificateFile)
      ++ flag "discovery-tls-key" (credential "discovery-tls-key")
    )
    ++ lib.optionals (cfg.metrics.address != null) (flag "metrics-addr" cfg.metrics.address)
    ++ flag "log" cfg.logLevel
    ++ cfg.extraArgs;

  credentials =
    lib.mapAttrs (_: c: { inherit (c) path encrypted; }) cfg.credentials
    // lib.optionalAttrs (!embedded) (plain "kubeconfig" cfg.controlPlane)
    // lib.optionalAttrs (cfg.discovery.tokenFile != null) (
      plain "discovery-token" cfg.discovery.tokenFile
    )
    // lib.optionalAttrs (cfg.discovery.tls.keyFile != null) (
      plain "discovery-tls-key" cfg.discovery.tls.keyFile
    );
  plain = name: path: {
    ${name} = {
      inherit path;
      encrypted = false;
    };
  };
  load =
    encrypted:
    lib.mapAttrsToList (name: c: "${name}:${toString c.path}") (
      lib.filterAttrs (_: c: c.encrypted == encrypted) credentials
    );

  # Only what keeps the service working, for when the confinement is off.
  unconfined = lib.filterAttrs (
    name: _:
    lib.elem name [
      "Type"
      "Restart"
      "RestartSec"
      "TimeoutStartSec"
      "TimeoutStopSec"
      "StateDirectory"
      "StateDirectoryMode"
      "RuntimeDirectory"
      "RuntimeDirectoryMode"
      "CacheDirectory"
      "CacheDirectoryMode"
      "UMask"
      "WatchdogSec"
      "LimitNOFILE"
    ]
  ) base;

  manifests = lib.mapAttrs' (
    _: proxy: lib.nameValuePair "${proxy.namespace}.${proxy.name}.yaml" (ours.toYAML (manifestOf proxy))
  ) cfg.proxies;
  manifestsDir = pkgs.linkFarm "egress-proxies-manifests" (
    lib.mapAttrs (name: text: pkgs.writeText name text) manifests
  );

  ports = addresses: lib.filter (p: p != null) (map ours.portOf addresses);
in
{
  imports = [ ./operator/options.nix ];

  config = lib.mkMerge [
    {
      services.egress-proxies-operator.rendered = {
        "providers.yaml" = providersText;
      }
      // manifests;
    }
    (lib.mkIf cfg.enable {
      assertions = import ./operator/assertions.nix { inherit lib; } {
        inherit cfg;
        libvirtd = config.virtualisation.libvirtd.enable;
      };

      # The near hypervisor's socket. Of the user, not of the unit: polkit, which guards the socket,
      # looks a user's groups up by name.
      users.users.egress-proxies.extraGroups = lib.optional near "libvirtd";

      environment.systemPackages = [ cfg.package ];
      environment.etc = {
        "${unit}/providers.yaml".source = providersFile;
      }
      // lib.mapAttrs' (name: p: lib.nameValuePair (knownHostsName name) { text = p.kvm.knownHosts; }) (
        lib.filterAttrs (_: p: p.kvm.knownHosts != "") kvmProviders
      );

      systemd.services.${unit} = {
        description = "Egress proxies operator";
        documentation = [ "https://github.com/egress-proxies/egress-proxies-operator" ];
        wantedBy = [ "multi-user.target" ];
        wants = [ "network-online.target" ];
        after = [ "network-online.target" ] ++ lib.optional near "libvirtd.service";
        # A changed providers file is a reload: running machines and leases do not notice.
        reloadTriggers = [ providersFile ];
        environment = cfg.tracing.environment;
        # What the local provider may be told to run.
        path = lib.optional local pkgs.squid;
        serviceConfig =
          (if cfg.hardening.enable then base else unconfined)
          // {
            ExecStart = utils.escapeSystemdExecArgs ([ (lib.getExe cfg.package) ] ++ arguments);
            ExecReload = "${pkgs.coreutils}/bin/kill -HUP $MAINPID";
            User = "egress-proxies";
            Group = "egress-proxies";
            LoadCredential = load false;
            LoadCredentialEncrypted = load true;
          }
          # The local provider's processes outlive a restart of the operator, which finds them again.
          # For that it must see them, which it cannot from another user namespace than theirs.
          // lib.optionalAttrs local {
            KillMode = "process";
            PrivateUsers = false;
          }
          // cfg.hardening.extraServiceConfig;
      };

      networking.firewall.allowedTCPPorts =
        lib.optionals cfg.discovery.openFirewall (ports cfg.discovery.addresses)
        ++ lib.optionals cfg.api.openFirewall (ports [ cfg.api.address ])
        ++ lib.optionals (cfg.metrics.openFirewall && cfg.metrics.address != null) (ports [
          cfg.metrics.address
        ]);
    })

    # Declared Proxies: applied after each start of the operator, removed ones deleted.
    (lib.mkIf cfg.enable {
      systemd.services."${unit}-manifests" = {
        description = "Proxies declared in the NixOS configuration";
        # Where nothing is declared and nothing ever was, there is nothing to prune either.
        unitConfig.ConditionPathExists = lib.mkIf (
          cfg.proxies == { }
        ) "/var/lib/egress-proxies-operator-manifests/applied";
        wantedBy = [ "multi-user.target" ];
        requires = [ "${unit}.service" ];
        after = [ "${unit}.service" ];
        partOf = [ "${unit}.service" ];
        path = [
          cfg.package
          pkgs.coreutils
          pkgs.kubectl
        ];
        environment = {
          MANIFESTS = "${manifestsDir}";
          # kubectl keeps what it learns of an API there.
          HOME = "/var/lib/egress-proxies-operator-manifests";
          KUBECONFIG = if embedded then "/var/lib/${unit}/admin.kubeconfig" else "%d/kubeconfig";
        };
        serviceConfig = {
          Type = "oneshot";
          RemainAfterExit = true;
          User = "egress-proxies";
          Group = "egress-proxies";
          StateDirectory = "egress-proxies-operator-manifests";
          StateDirectoryMode = "0700";
          LoadCredential = lib.optional (!embedded) "kubeconfig:${toString cfg.controlPlane}";
          ExecStart = "${pkgs.bash}/bin/bash ${./operator/apply-manifests.sh}";
          TimeoutStartSec = "5min";
          Restart = "on-failure";
          RestartSec = "5s";
          CapabilityBoundingSet = "";
          NoNewPrivileges = true;
          PrivateDevices = true;
          PrivateTmp = true;
          ProtectHome = true;
          ProtectSystem = "strict";
          RestrictAddressFamilies = [
            "AF_INET"
            "AF_INET6"
            "AF_UNIX"
          ];
          SystemCallFilter = [ "@system-service" ];
          UMask = "0077";
        };
      };
    })
  ];
}

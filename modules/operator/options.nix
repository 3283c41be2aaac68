# The options of `services.egress-proxies-operator`, without what they lead to.
{
  config,
  lib,
  pkgs,
  ...
}:
let
  inherit (lib) mkOption mkEnableOption types;
  cfg = config.services.egress-proxies-operator;
  secretFile =
    description:
    mkOption {
      type = types.nullOr (types.either types.path types.str);
      default = null;
      example = "/var/lib/secrets/NAME";
      description =
        description
        + " An absolute path outside of the Nix store; handed over as a credential, so only root needs to be able to read it.";
    };
in
{
  options.services.egress-proxies-operator = {
    enable = mkEnableOption "the egress proxies operator";

    package = mkOption {
      type = types.package;
      default =
        pkgs.egress-proxies-operator
          or (throw "services.egress-proxies-operator.package: pkgs has no egress-proxies-operator; use the flake's nixosModules.operator or its overlay.");
      defaultText = lib.literalExpression "pkgs.egress-proxies-operator";
      description = "The package to run.";
    };

    controlPlane = mkOption {
      type = types.either (types.enum [ "embedded" ]) (types.either types.path types.str);
      default = "embedded";
      example = "/var/lib/secrets/cluster.kubeconfig";
      description = ''
        Where Proxies live: `embedded`, the Kubernetes API that the operator serves itself, or the
        absolute path of a kubeconfig of a cluster, outside of the Nix store.
      '';
    };

    namespace = mkOption {
      type = types.nullOr types.str;
      default = null;
      description = "Only Proxies in this namespace. Null: all.";
    };

    api = {
      address = mkOption {
        type = types.str;
        default = "127.0.0.1:6443";
        description = "Where the embedded Kubernetes API listens, with TLS.";
      };
      openFirewall = mkOption {
        type = types.bool;
        default = false;
        description = "Open the embedded Kubernetes API's port.";
      };
    };

    providers = (import ./providers.nix { inherit lib; }).option;
    proxies = (import ./proxies.nix { inherit lib; }).option;

    extraConfig = mkOption {
      type = types.attrsOf types.anything;
      default = { };
      description = "Merged into the providers file at its top level, for what has no option yet.";
    };

    checkConfig = mkOption {
      type = types.bool;
      default = true;
      description = ''
        Have the operator check the rendered providers file when the system is built. It needs to run
        on the building machine, so turn it off where that cannot be.
      '';
    };

    discovery = {
      addresses = mkOption {
        type = types.listOf types.str;
        default = [ "127.0.0.1:8090" ];
        example = [
          ":8090"
          "unix:/run/egress-proxies-operator/discovery.sock"
        ];
        description = "Where the discovery and lease API listens: ADDR:PORT, :PORT for all addresses, or unix:PATH.";
      };
      openFirewall = mkOption {
        type = types.bool;
        default = false;
        description = "Open the ports of the discovery API.";
      };
      tokenFile = secretFile "The bearer token of the discovery API.";
      allowAnonymous = mkOption {
        type = types.bool;
        default = false;
        description = "Serve the discovery API to other machines without a token.";
      };
      tls = {
        certificateFile = mkOption {
          type = types.nullOr (types.either types.path types.str);
          default = null;
          description = "Certificate chain, in PEM, for TLS on the discovery API.";
        };
        keyFile = secretFile "Private key, in PEM, for TLS on the discovery API.";
      };
    };

    metrics = {
      address = mkOption {
        type = types.nullOr types.str;
        default = null;
        example = "127.0.0.1:8080";
        description = "Where Prometheus metrics are served. Null: nowhere.";
      };
      openFirewall = mkOption {
        type = types.bool;
        default = false;
        description = "Open the port of the metrics.";
      };
    };

    tracing.environment = mkOption {
      type = types.attrsOf types.str;
      default = { };
      example = {
        OTEL_EXPORTER_OTLP_ENDPOINT = "http://127.0.0.1:4317";
      };
      description = "The OpenTelemetry SDK's environment (`OTEL_...`). Without any, nothing is traced.";
    };

    credentials = mkOption {
      default = { };
      example = {
        ssh-key.path = "/var/lib/secrets/egress-ssh-key";
      };
      description = ''
        Secrets for the service, by name: read by systemd as root and put before the service alone.
        Read when the service starts; a changed one needs a restart.
      '';
      type = types.attrsOf (
        types.submodule (
          { name, ... }:
          {
            options = {
              path = mkOption {
                type = types.either types.path types.str;
                example = "/var/lib/secrets/egress-ssh-key";
                description = "The file, an absolute path; outside of the Nix store unless it is encrypted.";
              };
              encrypted = mkOption {
                type = types.bool;
                default = false;
                description = "The file was made by systemd-creds(1).";
              };
              file = mkOption {
                type = types.str;
                readOnly = true;
                default = "/run/credentials/egress-proxies-operator.service/${name}";
                defaultText = lib.literalExpression ''"/run/credentials/egress-proxies-operator.service/''${name}"'';
                description = "Where the service finds it: what other options take.";
              };
            };
          }
        )
      );
    };

    logLevel = mkOption {
      type = types.str;
      default = "info";
      example = "info,egress_provider_kvm=debug";
      description = "What is logged: a level, or target=level pairs.";
    };

    extraArgs = mkOption {
      type = types.listOf types.str;
      default = [ ];
      example = [
        "--lease-cooldown"
        "30m"
      ];
      description = "Further flags; docs/reference/flags.md lists them.";
    };

    hardening = {
      enable = mkOption {
        type = types.bool;
        default = true;
        description = "Confine the service. Off only to find out whether the confinement is in the way.";
      };
      extraServiceConfig = mkOption {
        type = types.attrsOf types.anything;
        default = { };
        example = {
          IPAddressDeny = "any";
          IPAddressAllow = "192.0.2.0/24";
        };
        description = "Settings of the unit that win over the module's.";
      };
    };

    providersFile = mkOption {
      type = types.str;
      readOnly = true;
      internal = true;
      default = "/etc/egress-proxies-operator/providers.yaml";
      description = "The providers file in use.";
    };
    rendered = mkOption {
      type = types.attrsOf types.str;
      readOnly = true;
      internal = true;
      description = "What the options render to, as text: for tests, and for people who look.";
    };
  };

  # The user is one that a bus policy can name, not a DynamicUser.
  config = lib.mkIf cfg.enable {
    users.users.egress-proxies = {
      isSystemUser = true;
      group = "egress-proxies";
      description = "egress proxies operator";
    };
    users.groups.egress-proxies = { };
  };
}

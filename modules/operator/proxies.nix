# `services.egress-proxies-operator.proxies`: Proxies declared in Nix, and the manifests they become.
{ lib }:
let
  inherit (lib) mkOption types;
  ours = import ../lib.nix { inherit lib; };

  optional =
    type: description:
    mkOption {
      type = types.nullOr type;
      default = null;
      inherit description;
    };

  submodule = types.submodule (
    { name, ... }:
    {
      options = {
        name = mkOption {
          type = types.str;
          default = name;
          defaultText = lib.literalMD "the attribute's name";
          description = "Name of the Proxy.";
        };
        namespace = mkOption {
          type = types.str;
          default = "default";
          description = "Namespace of the Proxy.";
        };
        provider = optional types.str "The provider instance that makes it. Unset: somebody else's proxy, at `endpoint`.";
        placement = {
          region = optional types.str "A cloud's region.";
          zone = optional types.str "A cloud's zone; for kvm the name of a host.";
          machineType = optional types.str "A cloud's machine type; for kvm a profile's name.";
          image = optional types.str "A cloud's image; for kvm an image's key or a URL.";
        };
        endpoint.host = optional types.str "Host of a proxy that is somebody else's: it is only probed and leased.";
        port = mkOption {
          type = types.port;
          default = 3128;
          description = "Where the proxy listens.";
        };
        maxLeases = mkOption {
          type = types.ints.between 0 1000000;
          default = 5;
          description = "How many leases may be active at a time; 0: never leased.";
        };
        attributes = mkOption {
          type = types.attrsOf types.str;
          default = { };
          example = {
            geo = "de";
          };
          description = "Labels that a lease can select by.";
        };
        cloudInit = {
          inline = optional types.lines ''
            User-data of the guest. It ends in the Nix store and in the Proxy: no secret in it, those
            belong in a Secret (`secretRef`).
          '';
          secretRef = optional (types.submodule {
            options = {
              name = mkOption {
                type = types.str;
                description = "Name of a Secret in the Proxy's namespace.";
              };
              key = mkOption {
                type = types.str;
                default = "user-data";
                description = "Key within it.";
              };
            };
          }) "The Secret that holds the user-data.";
        };
        healthCheck = mkOption {
          type = types.attrsOf (types.either types.str types.int);
          default = { };
          example = {
            url = "https://www.gstatic.com/generate_204";
            intervalSeconds = 30;
          };
          description = "How it is probed; fields as in a Proxy's `spec.healthCheck`.";
        };
      };
    }
  );

  emptyToNull = set: if set == { } then null else set;
in
{
  option = mkOption {
    type = types.attrsOf submodule;
    default = { };
    example = lib.literalExpression ''
      {
        de-1 = {
          provider = "kvm-home";
          placement = { machineType = "small"; image = "debian-13"; };
          cloudInit.inline = builtins.readFile ./squid.cloud-config;
          attributes.geo = "de";
        };
        office.endpoint.host = "proxy.example.net";
      }
    '';
    description = ''
      Proxies that are applied when the operator starts and at every switch. One that is removed here
      is deleted, and with it the machine behind it; Proxies made by other means are left alone.
    '';
  };

  manifest = proxy: {
    apiVersion = "crawl.example.com/v1alpha1";
    kind = "Proxy";
    metadata = {
      inherit (proxy) name namespace;
      labels."app.kubernetes.io/managed-by" = "nixos";
    };
    spec = ours.dropNulls {
      mode = if proxy.provider == null then "External" else "Managed";
      inherit (proxy) provider port maxLeases;
      placement = emptyToNull (ours.dropNulls proxy.placement);
      endpoint = emptyToNull (ours.dropNulls proxy.endpoint);
      cloudInit = emptyToNull (ours.dropNulls proxy.cloudInit);
      attributes = emptyToNull proxy.attributes;
      healthCheck = emptyToNull proxy.healthCheck;
    };
  };
}

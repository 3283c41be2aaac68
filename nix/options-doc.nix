# The option reference. `text` is pure evaluation (a test compares it with what is checked in), the
# derivation is the same as a file.
{
  pkgs,
  lib,
}:
let
  evaluated = import (pkgs.path + "/nixos/lib/eval-config.nix") {
    system = null;
    modules = [
      ../modules/appliance.nix
      {
        nixpkgs.hostPlatform = "x86_64-linux";
        nixpkgs.overlays = [ (import ./overlay.nix) ];
      }
    ];
  };
  root = toString ../.;
  document = pkgs.nixosOptionsDoc {
    options.services = {
      inherit (evaluated.options.services)
        egress-proxies-appliance
        egress-proxies-hypervisor
        egress-proxies-operator
        ;
    };
    warningsAreErrors = true;
    transformOptions =
      option:
      option
      // {
        # Without this, the path of whoever evaluated.
        declarations = map (d: lib.removePrefix "${root}/" (toString d)) option.declarations;
      };
  };

  literal =
    value:
    if value._type or "" == "literalMD" then
      " ${value.text}"
    else
      let
        text = value.text or (lib.generators.toPretty { } value);
      in
      if lib.hasInfix "\n" text then "\n\n```nix\n${lib.removeSuffix "\n" text}\n```" else " `${text}`";

  # {option}`x` and its like are written for nixpkgs' own renderer.
  plain = text: lib.removeSuffix "\n" (text.text or text);

  section =
    name: option:
    ''
      ## `${name}`

      ${plain (option.description or "")}

      - Type: ${option.type}
    ''
    + lib.optionalString (option ? default) "- Default:${literal option.default}\n"
    + lib.optionalString (option ? example) "- Example:${literal option.example}\n"
    + lib.optionalString (option.readOnly or false) "- Read only.\n"
    + "- Declared in: ${lib.concatMapStringsSep ", " (d: "`${d}`") option.declarations}\n";

  visible = lib.filterAttrs (
    _: option: !(option.internal or false) && (option.visible or true) != false
  ) document.optionsNix;
in
rec {
  count = lib.length (lib.attrNames visible);
  text = ''
    # NixOS options

    Generated from `modules/`; a test compares. How to use them: [howto/nixos.md](../howto/nixos.md).

  ''
  + lib.concatStringsSep "\n" (lib.mapAttrsToList section visible);
  file = pkgs.writeText "nixos-options.md" text;
}

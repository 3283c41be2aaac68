# `nix flake check`: format, lint, the package with its unit tests, the modules' evaluation, and a VM
# test for each tests/*.nix.
{
  nixpkgs,
  pkgs,
  lib,
  ...
}:
let
  support = import ../tests/support { inherit pkgs; };
  vmTests =
    lib.mapAttrs'
      (
        file: _:
        lib.nameValuePair "vm-${lib.removeSuffix ".nix" file}" (
          pkgs.testers.runNixOSTest (
            import (../tests + "/${file}") {
              inherit pkgs support;
            }
          )
        )
      )
      (
        lib.filterAttrs (name: kind: kind == "regular" && lib.hasSuffix ".nix" name) (
          builtins.readDir ../tests
        )
      );

  evaluation = import ../tests/nix/eval.nix { inherit nixpkgs; };
  options = import ./options-doc.nix { inherit pkgs lib; };

  nixFiles = lib.fileset.toSource {
    root = ../.;
    fileset = lib.fileset.unions [
      ../flake.nix
      (lib.fileset.fileFilter (file: file.hasExt "nix") ../nix)
      (lib.fileset.fileFilter (file: file.hasExt "nix") ../modules)
      (lib.fileset.fileFilter (file: file.hasExt "nix") ../tests)
    ];
  };

  # An example fails with the sentence that it says it does, and with no other.
  wrongExamples = lib.filterAttrs (
    _: example:
    !(
      lib.length example.failed == 1
      && lib.all (text: lib.hasInfix text (lib.head example.failed)) example.says
    )
  ) evaluation.failing;
  failingHosts = lib.filterAttrs (_: host: host.failed != [ ]) evaluation.hosts;
in
vmTests
// {
  package = pkgs.egress-proxies-operator;

  format = pkgs.runCommand "check-format" { nativeBuildInputs = [ pkgs.nixfmt ]; } ''
    find ${nixFiles} -name '*.nix' -exec nixfmt --check {} +
    touch $out
  '';

  lint = pkgs.runCommand "check-lint" { nativeBuildInputs = [ pkgs.deadnix ]; } ''
    deadnix --fail ${nixFiles}
    touch $out
  '';

  modules =
    assert lib.assertMsg (wrongExamples == { }) "assertions: ${builtins.toJSON wrongExamples}";
    assert lib.assertMsg (failingHosts == { }) "hosts: ${builtins.toJSON failingHosts}";
    pkgs.writeText "check-modules" (
      builtins.toJSON {
        hosts = lib.attrNames evaluation.hosts;
        failing = lib.attrNames evaluation.failing;
      }
    );

  options-doc = pkgs.runCommand "check-options-doc" { } ''
    diff -u ${../docs/reference/nixos-options.md} ${options.file}
    touch $out
  '';
}

# The operator, with what belongs beside it in the places where a system looks for it.
{
  lib,
  rustPlatform,
  pkg-config,
  installShellFiles,
  libvirt,
  stdenv,
}:
let
  root = ../.;
  # Whatever does not change the build does not change the package.
  sources = lib.fileset.unions [
    ../Cargo.toml
    ../Cargo.lock
    ../crates
    (lib.fileset.maybeMissing ../.cargo)
    (lib.fileset.maybeMissing ../deploy)
    (lib.fileset.maybeMissing ../LICENSE)
  ];
  manifest = lib.importTOML ../Cargo.toml;
in
rustPlatform.buildRustPackage {
  pname = "egress-proxies-operator";
  inherit (manifest.workspace.package) version;

  src = lib.fileset.toSource {
    inherit root;
    fileset = sources;
  };
  cargoLock.lockFile = ../Cargo.lock;

  nativeBuildInputs = [
    pkg-config
    installShellFiles
  ];
  buildInputs = [ libvirt ];

  cargoBuildFlags = [
    "--package"
    "egress-proxies-operator"
  ];
  # Unit tests only: the others want root, daemons and a network.
  cargoTestFlags = [
    "--workspace"
    "--lib"
    "--bins"
  ];

  postInstall =
    lib.optionalString (stdenv.buildPlatform.canExecute stdenv.hostPlatform) ''
      mkdir -p $out/share/egress-proxies-operator
      $out/bin/egress-proxies-operator crd > $out/share/egress-proxies-operator/crd.yaml
    ''
    + ''
      # What the repository ships, as far as it ships it.
      copy() { # FROM TO
        if [ -e "$1" ]; then
          mkdir -p "$2"
          cp -r "$1" "$2"
        fi
      }
      copy deploy/systemd/egress-proxies-operator.service $out/lib/systemd/system
      copy deploy/systemd/egress-proxies-operator.socket $out/lib/systemd/system
      copy deploy/systemd/egress-proxies-operator.catalog $out/lib/systemd/catalog
      copy deploy/systemd/sysusers.conf $out/lib/sysusers.d
      for policy in deploy/dbus/*.conf; do copy "$policy" $out/share/dbus-1/system.d; done
      for service in deploy/dbus/*.service; do copy "$service" $out/share/dbus-1/system-services; done
      for rules in deploy/polkit/*; do copy "$rules" $out/share/polkit-1/actions; done
      copy deploy/grafana $out/share/egress-proxies-operator
      for page in deploy/man/*; do [ ! -e "$page" ] || installManPage "$page"; done
    '';

  meta = {
    description = "Egress proxies as a Kubernetes resource";
    homepage = "https://github.com/egress-proxies/egress-proxies-operator";
    license = lib.licenses.asl20;
    mainProgram = "egress-proxies-operator";
    platforms = lib.platforms.linux;
  };
}

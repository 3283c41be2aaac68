# Takes a machine's configuration apart into the files that our modules put there, by name.
{ lib }:
config:
let
  operator = config.services.egress-proxies-operator;
  hypervisor = config.services.egress-proxies-hypervisor;
  inherit (config.services) openssh;

  prefixed = prefix: lib.mapAttrs' (name: text: lib.nameValuePair "${prefix}/${name}" text);

  ours = lib.filterAttrs (
    name: unit:
    lib.hasPrefix "egress-proxies" name
    # Written out only to be masked by.
    && unit.enable
  ) config.systemd.units;

  setting =
    value:
    if lib.isBool value then
      lib.boolToYesNo value
    else if lib.isList value then
      # As nixpkgs' sshd module joins them: by commas for algorithms, by spaces for names.
      lib.concatStringsSep "," value
    else
      toString value;
  sshd =
    lib.concatStrings (
      lib.mapAttrsToList (name: value: "${name} ${setting value}\n") (
        lib.filterAttrs (_: value: value != null) openssh.settings
      )
    )
    + openssh.extraConfig;

  users = lib.filterAttrs (_: user: user.openssh.authorizedKeys.keys != [ ]) config.users.users;

  networkd = lib.filterAttrs (name: _: lib.hasPrefix "20-" name) config.systemd.network.units;

  firewall = config.networking.firewall;
  interfaces = lib.filterAttrs (
    name: _: lib.elem name [ hypervisor.network.bridgeName ]
  ) firewall.interfaces;
in
prefixed "units" (lib.mapAttrs (_: unit: unit.text) ours)
// lib.optionalAttrs operator.enable (
  prefixed "operator" operator.rendered
  // lib.mapAttrs' (name: file: lib.nameValuePair "operator/${baseNameOf name}" file.text) (
    lib.filterAttrs (
      name: file: lib.hasPrefix "egress-proxies-operator/known_hosts" name && file.text != null
    ) config.environment.etc
  )
)
// lib.optionalAttrs hypervisor.enable (
  prefixed "libvirt" (lib.filterAttrs (name: _: lib.hasSuffix ".xml" name) hypervisor.rendered)
)
// prefixed "networkd" (lib.mapAttrs (_: unit: unit.text) networkd)
// lib.optionalAttrs (hypervisor.enable && hypervisor.ssh.enable) {
  "ssh/match.conf" = hypervisor.rendered."sshd_config.match";
}
// lib.optionalAttrs openssh.enable (
  {
    "ssh/sshd_config" = sshd;
  }
  // lib.mapAttrs' (
    name: user:
    lib.nameValuePair "ssh/authorized_keys.${name}" (
      lib.concatMapStrings (key: key + "\n") user.openssh.authorizedKeys.keys
    )
  ) users
)
// lib.optionalAttrs (operator.enable || hypervisor.enable) {
  "firewall.json" = builtins.toJSON {
    tcp = firewall.allowedTCPPorts;
    udp = firewall.allowedUDPPorts;
    interfaces = lib.mapAttrs (_: i: { inherit (i) allowedTCPPorts allowedUDPPorts; }) interfaces;
    forward = firewall.extraForwardRules;
    reversePath = firewall.extraReversePathFilterRules;
    commands = lib.filter (lib.hasInfix hypervisor.bridge.name) (
      lib.splitString "\n" firewall.extraCommands
    );
  };
}
// lib.optionalAttrs (hypervisor.enable && config.networking.bridges != { }) {
  "networking.json" = builtins.toJSON {
    inherit (config.networking) bridges;
    addresses = lib.mapAttrs (_: i: {
      inherit (i) useDHCP;
      ipv4 = map (a: "${a.address}/${toString a.prefixLength}") i.ipv4.addresses;
      ipv6 = map (a: "${a.address}/${toString a.prefixLength}") i.ipv6.addresses;
    }) config.networking.interfaces;
    gateway = config.networking.defaultGateway;
  };
}

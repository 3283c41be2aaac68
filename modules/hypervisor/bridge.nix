# The bridge, by systemd-networkd or by the scripted networking, whichever the machine uses.
{
  config,
  lib,
  ...
}:
let
  cfg = config.services.egress-proxies-hypervisor;
  inherit (cfg) bridge;
  networkd = config.networking.useNetworkd;
  # A pattern is refused with the scripted networking, by an assertion; it must not get to where it
  # would be a unit's name.
  named = lib.filter (name: !(lib.hasInfix "*" name)) bridge.interfaces;
  isV4 = address: !(lib.hasInfix ":" address);
  split =
    address:
    let
      parts = lib.splitString "/" address;
    in
    {
      address = lib.head parts;
      prefixLength = lib.toInt (lib.last parts);
    };
in
{
  config = lib.mkIf (cfg.enable && bridge.enable) (
    lib.mkMerge [
      (lib.mkIf networkd {
        systemd.network.enable = true;
        systemd.network.netdevs."20-${bridge.name}" = {
          netdevConfig = {
            Name = bridge.name;
            Kind = "bridge";
          }
          // lib.optionalAttrs (bridge.macAddress != null) { MACAddress = bridge.macAddress; };
          # A guest's port must forward at once, or its first DHCP requests are lost.
          bridgeConfig = {
            STP = bridge.stp;
            ForwardDelaySec = if bridge.stp then 2 else 0;
          };
        };
        systemd.network.networks."20-${bridge.name}-ports" = {
          matchConfig.Name = lib.concatStringsSep " " bridge.interfaces;
          networkConfig = {
            Bridge = bridge.name;
            LinkLocalAddressing = "no";
          };
          linkConfig.RequiredForOnline = "no";
        };
        systemd.network.networks."20-${bridge.name}" = {
          matchConfig.Name = bridge.name;
          networkConfig = {
            DHCP = if bridge.dhcp then "yes" else "no";
            # A restart of networkd, as a switch may do, keeps the address.
            KeepConfiguration = if bridge.dhcp then "dynamic-on-stop" else "static";
            IPv6AcceptRA = true;
          };
          address = bridge.addresses;
          routes = lib.optional (bridge.gateway != null) { Gateway = bridge.gateway; };
          linkConfig.RequiredForOnline = "routable";
        };
      })

      (lib.mkIf (!networkd) {
        networking.bridges.${bridge.name} = {
          interfaces = named;
          rstp = bridge.stp;
        };
        networking.interfaces = {
          ${bridge.name} = {
            useDHCP = bridge.dhcp;
            macAddress = bridge.macAddress;
            ipv4.addresses = map split (lib.filter isV4 bridge.addresses);
            ipv6.addresses = map split (lib.filter (a: !(isV4 a)) bridge.addresses);
          };
        }
        // lib.genAttrs named (_: {
          useDHCP = false;
        });
        networking.defaultGateway = lib.mkIf (bridge.gateway != null && isV4 bridge.gateway) {
          address = bridge.gateway;
          interface = bridge.name;
        };
        networking.defaultGateway6 = lib.mkIf (bridge.gateway != null && !(isV4 bridge.gateway)) {
          address = bridge.gateway;
          interface = bridge.name;
        };
        # nixpkgs reloads `${bridge.name}-netdev` at a switch, which moves ports and leaves the bridge,
        # its address and the guests' taps alone; the test of the golden files holds it to that.

        # Guests' taps are no business of dhcpcd.
        networking.dhcpcd.denyInterfaces = [ "vnet*" ];
      })

      {
        # With br_netfilter loaded (by Docker, or a Kubernetes node), bridged frames go through the
        # host's FORWARD rules; what is only bridged is let through, so that guests get their DHCP.
        networking.firewall.extraForwardRules = lib.mkIf config.networking.nftables.enable ''
          iifname "${bridge.name}" oifname "${bridge.name}" accept comment "egress-proxies: bridged frames"
        '';
        networking.firewall.extraReversePathFilterRules = lib.mkIf config.networking.nftables.enable ''
          iifname "${bridge.name}" udp sport { 67, 68 } udp dport { 67, 68 } accept comment "egress-proxies: guests' DHCP"
        '';
        networking.firewall.extraCommands = lib.mkIf (!config.networking.nftables.enable) ''
          ip46tables -D FORWARD -i ${bridge.name} -o ${bridge.name} -j ACCEPT 2>/dev/null || true
          ip46tables -I FORWARD -i ${bridge.name} -o ${bridge.name} -j ACCEPT
        '';
        networking.firewall.extraStopCommands = lib.mkIf (!config.networking.nftables.enable) ''
          ip46tables -D FORWARD -i ${bridge.name} -o ${bridge.name} -j ACCEPT 2>/dev/null || true
        '';
      }
    ]
  );
}

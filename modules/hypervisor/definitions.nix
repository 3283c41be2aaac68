# The libvirt definitions that the options ask for, as XML. No store path is ever in them: what
# libvirt keeps outlives a generation and a garbage collection.
{ lib }:
let
  ours = import ../lib.nix { inherit lib; };
  esc = lib.escapeXML;
in
{
  pool = pool: ''
    <pool type="dir">
      <name>${esc pool.name}</name>
      <uuid>${ours.uuidOf "egress-proxies pool ${pool.name}"}</uuid>
      <target>
        <path>${esc pool.path}</path>
        <permissions>
          <mode>0711</mode>
        </permissions>
      </target>
    </pool>
  '';

  network =
    network:
    let
      prefix = lib.removeSuffix ".0/24" network.subnet;
    in
    ''
      <network>
        <name>${esc network.name}</name>
        <uuid>${ours.uuidOf "egress-proxies network ${network.name}"}</uuid>
      ${lib.optionalString network.nat ''
        ${"  "}<forward mode="nat"/>
      ''}  <bridge name="${esc network.bridgeName}" stp="off" delay="0"/>
        <ip address="${prefix}.1" netmask="255.255.255.0">
          <dhcp>
            <range start="${prefix}.16" end="${prefix}.254"/>
          </dhcp>
        </ip>
      </network>
    '';
}

# What a user may get wrong, each as a sentence that names the option and says what to do.
{ lib }:
let
  ours = import ../lib.nix { inherit lib; };
  here = "services.egress-proxies-hypervisor";

  keyFault =
    key:
    if ours.isPrivateKey key then
      "is a private key; give the public one, the line in the file that ends in .pub, and make a new pair: this one is in the Nix store now"
    else if lib.hasPrefix "/" key then
      "is a path; give the line in that file, such as lib.fileContents ./operator.pub"
    else if !(ours.isPublicKey key) then
      "is not an OpenSSH public key; it looks like \"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIC... comment\""
    else
      null;
  keyAssertion = key: {
    assertion = keyFault key == null;
    # A private key is not repeated in a message.
    message = "${here}.ssh.authorizedKeys: ${
      if ours.isPrivateKey key then "an entry" else "\"${key}\""
    } ${toString (keyFault key)}.";
  };
in
{ cfg, networkd }:
[
  {
    assertion = cfg.bridge.enable -> networkd || !(lib.any (lib.hasInfix "*") cfg.bridge.interfaces);
    message = "${here}.bridge.interfaces: patterns need systemd-networkd; set networking.useNetworkd = true, or name the interfaces.";
  }
  {
    assertion = cfg.bridge.enable || cfg.network.enable;
    message = "${here}: guests need a network; set bridge.enable = true with bridge.interfaces (guests on this machine's network), or network.enable = true (a network of their own, with NAT).";
  }
  {
    assertion = cfg.bridge.enable -> cfg.bridge.interfaces != [ ];
    message = "${here}.bridge.interfaces is empty: name the interface that leads to the network, such as [ \"enp1s0\" ] (`ip link` lists them), or use network.enable instead.";
  }
  {
    assertion = cfg.bridge.enable -> !(lib.elem cfg.bridge.name cfg.bridge.interfaces);
    message = "${here}.bridge.interfaces: ${cfg.bridge.name} is the bridge itself; name the interfaces that become its ports.";
  }
  {
    assertion = cfg.bridge.gateway != null -> cfg.bridge.addresses != [ ];
    message = "${here}.bridge.gateway: a gateway needs an address of the machine on the same network; set bridge.addresses, or leave both to DHCP.";
  }
  {
    assertion = cfg.ssh.enable -> cfg.ssh.authorizedKeys != [ ];
    message = "${here}.ssh.authorizedKeys is empty: give the operator's public key (the .pub file's line), or set ssh.enable = false when the operator runs on this machine.";
  }
  {
    assertion = !(lib.hasPrefix builtins.storeDir cfg.pool.path);
    message = "${here}.pool.path: ${cfg.pool.path} is inside the Nix store, which cannot be written; use a directory such as /var/lib/libvirt/images.";
  }
]
++ map keyAssertion cfg.ssh.authorizedKeys

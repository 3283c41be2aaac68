# The operator's way in: one socket forwarded, nothing else. Two lines of defence: sshd's block for
# the user, which suffices alone, and the options before the key, which hold where another Match block
# came first. The one thing that no key option forbids is a remote forward of a unix socket.
#
# What does not work, although it looks tighter: `AllowTcpForwarding no` and `PermitOpen none` refuse
# unix sockets too, whatever sshd_config(5) says of TCP. A bracketed path with any port is the form
# of PermitOpen that names a socket.
{ lib }:
{
  keyOptions =
    { socket, nologin }:
    lib.concatStringsSep "," [
      "restrict"
      "port-forwarding"
      ''permitopen="[${socket}]:*"''
      # port-forwarding means both directions; with a list, only what is on it may be listened on.
      ''permitlisten="[/nonexistent]:*"''
      ''command="${nologin}"''
    ];

  matchBlock =
    {
      user,
      socket,
      nologin,
    }:
    ''
      Match User ${user}
        AuthenticationMethods publickey
        AllowTcpForwarding local
        AllowStreamLocalForwarding local
        PermitOpen [${socket}]:*
        PermitListen none
        GatewayPorts no
        MaxSessions 0
        ForceCommand ${nologin}
        PermitTTY no
        PermitTunnel no
        PermitUserRC no
        AllowAgentForwarding no
        X11Forwarding no
      Match all
    '';
}

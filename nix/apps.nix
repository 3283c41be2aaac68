{
  pkgs,
  lib,
  ...
}:
let
  operator = lib.getExe pkgs.egress-proxies-operator;
  app = description: program: {
    type = "app";
    program = lib.getExe program;
    meta = { inherit description; };
  };
in
{
  # Operator, embedded control plane and local provider on a throwaway state directory; it prints the
  # kubeconfig's path.
  default = app "Try it: the operator with everything on this machine" (
    pkgs.writeShellApplication {
      name = "egress-proxies-dev";
      text = ''exec ${operator} dev "$@"'';
    }
  );

  # The same with two proxies, a lease and the way back.
  demo = app "Watch it: two proxies made, leased and taken away" (
    pkgs.writeShellApplication {
      name = "egress-proxies-demo";
      runtimeInputs = [
        pkgs.egress-proxies-operator
        pkgs.curl
        pkgs.kubectl
      ];
      text = builtins.readFile ./demo.sh;
    }
  );
}

# How confined the service is, what it can read, and that no secret is in the store.
{ support, ... }:
{
  name = "egress-proxies-hardening";

  nodes.machine = {
    imports = [ support.operator ];
    services.egress-proxies-operator = {
      providers.here.local = { };
      discovery.tokenFile = "/var/lib/secrets/token";
      proxies.one.provider = "here";
    };
    systemd.tmpfiles.rules = [
      "d /var/lib/secrets 0700 root root"
      "f /var/lib/secrets/token 0600 root root - only-root-reads-this"
    ];
  };

  testScript = ''
    machine.wait_for_unit("egress-proxies-operator.service")
    machine.succeed("systemd-analyze security egress-proxies-operator.service --threshold=15 --no-pager")

    with subtest("the token works, and only root and the service read it"):
        machine.wait_until_succeeds(
            "curl --fail -H 'authorization: Bearer only-root-reads-this' http://127.0.0.1:8090/v1/proxies"
        )
        machine.fail("curl --fail http://127.0.0.1:8090/v1/proxies")
        machine.fail("su nobody -s /bin/sh -c 'cat /run/credentials/egress-proxies-operator.service/discovery-token'")

    with subtest("no secret in the store"):
        machine.fail("grep -rl only-root-reads-this $(nix-store --query --requisites /run/current-system 2>/dev/null | grep -E 'egress|etc')")

    with subtest("what is declared is there, what is no longer declared goes"):
        machine.wait_for_unit("egress-proxies-operator-manifests.service")
        machine.wait_until_succeeds("kubectl get proxy one")

    with subtest("a changed providers file is a reload, not a restart"):
        pid = machine.succeed("systemctl show -P MainPID egress-proxies-operator.service")
        machine.succeed("systemctl reload egress-proxies-operator.service")
        assert machine.succeed("systemctl show -P MainPID egress-proxies-operator.service") == pid

    with subtest("a stop is quick"):
        machine.succeed("timeout 10 systemctl stop egress-proxies-operator.service")
  '';
}

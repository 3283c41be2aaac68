# The operator on one machine, the hypervisor on another: host-key check, a changed key, a hypervisor
# that goes away and comes back.
{ support, ... }:
{
  name = "egress-proxies-two-machines";

  nodes.hypervisor = {
    imports = [ support.hypervisor ];
    services.egress-proxies-hypervisor.ssh.authorizedKeys = [
      support.publicKey
    ];
  };

  nodes.operator = {
    imports = [
      support.operator
      (support.imageServer support.guestImage)
    ];
    services.egress-proxies-operator.providers.kvm.kvm = support.kvm "operator" // {
      sshKeyFile = "/var/lib/secrets/key";
      knownHostsFile = "/var/lib/secrets/known_hosts";
      hosts.far = {
        address = "hypervisor:22";
        user = "egress-hypervisor";
        network = "egress";
      };
    };
  };

  testScript = ''
    ${support.script}
    start_all()
    hypervisor.wait_for_unit("egress-proxies-hypervisor.service")
    operator.wait_for_unit("egress-proxies-operator.service")

    def said(text):
        operator.wait_until_succeeds(f"kubectl get proxy one -o yaml | grep -qiE '{text}'")

    def trust():
        operator.succeed("ssh-keyscan -t ed25519 hypervisor > /var/lib/secrets/known_hosts")

    operator.wait_until_succeeds("kubectl get proxies")
    operator.succeed("kubectl apply -f ${support.manifest "one" "http://operator:8000/"}")

    with subtest("without a key and a known host nothing is reached, and it says so"):
        said("key")
        operator.succeed("mkdir -p /var/lib/secrets; cp ${support.privateKey} /var/lib/secrets/key")
        operator.succeed("touch /var/lib/secrets/known_hosts; chown -R egress-proxies /var/lib/secrets; chmod 600 /var/lib/secrets/key")
        said("known")

    with subtest("with both, the machine comes up"):
        trust()
        wait_ready(operator, "one")

    with subtest("the key opens nothing but the socket"):
        operator.fail("ssh -i /var/lib/secrets/key -o UserKnownHostsFile=/var/lib/secrets/known_hosts egress-hypervisor@hypervisor true")

    with subtest("a rotated host key is refused until it is known"):
        hypervisor.succeed("rm /etc/ssh/ssh_host_*; systemctl restart sshd-keygen sshd")
        hypervisor.succeed("pkill -u egress-hypervisor || true")
        said("changed|host key")
        before = domain_ids(hypervisor)
        trust()
        wait_ready(operator, "one")
        assert domain_ids(hypervisor) == before

    with subtest("a hypervisor that was away is taken up again, its guest not rebuilt"):
        hypervisor.block()
        said("unreachable|timed out|ProviderUnreachable")
        hypervisor.unblock()
        wait_ready(operator, "one")
        assert domain_ids(hypervisor) == before
  '';
}

# The appliance, whole: kubectl applies a Proxy, a machine boots behind it, and it is leased.
{ support, ... }:
{
  name = "egress-proxies-appliance";

  nodes.machine = {
    imports = [
      ../modules/appliance.nix
      (support.imageServer support.guestImage)
    ];
    virtualisation = {
      cores = 2;
      memorySize = 4096;
      diskSize = 8192;
    };
    services.egress-proxies-appliance = {
      enable = true;
      interfaces = [ "eth1" ];
      adminKeys = [ support.publicKey ];
    };
    # The test network has no DHCP: guests get their addresses from libvirt's own.
    services.egress-proxies-hypervisor.network.enable = true;
    services.egress-proxies-operator.providers.kvm.kvm = support.kvm "192.168.131.1" // {
      hosts.near = {
        local = true;
        network = "egress";
      };
    };
    services.egress-proxies-operator.discovery.tokenFile = null;
    services.egress-proxies-operator.discovery.allowAnonymous = true;
    environment.variables.KUBECONFIG = "/var/lib/egress-proxies-operator/admin.kubeconfig";
  };

  testScript = ''
    ${support.script}
    machine.wait_for_unit("egress-proxies-operator.service")
    machine.succeed("virsh -c qemu:///system pool-info default | grep running")
    machine.wait_until_succeeds("kubectl get proxies")
    machine.succeed("kubectl apply -f ${support.manifest "one" "http://192.168.131.1:8000/"} && kubectl patch proxy one --type merge -p '{\"spec\":{\"placement\":{\"zone\":\"near\"}}}'")
    wait_ready(machine, "one")
    assert "one" in lease(machine)

    with subtest("a deleted Proxy leaves nothing"):
        machine.succeed("kubectl delete proxy one --timeout=300s")
        assert domain_ids(machine) == []

    with subtest("the console and the network tell where it is"):
        machine.succeed("grep -q machine.local /etc/issue")
        machine.succeed("su admin -c egress-proxies-kubeconfig | grep -q 127.0.0.1:6443")
        machine.wait_for_unit("avahi-daemon.service")
  '';
}

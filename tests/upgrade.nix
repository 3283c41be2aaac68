# A switch to a changed generation, and a restart of libvirtd, leave guests and leases alone.
{ support, ... }:
{
  name = "egress-proxies-upgrade";

  nodes.machine = {
    imports = [
      support.hypervisor
      support.operator
      (support.imageServer support.guestImage)
    ];
    services.egress-proxies-hypervisor.ssh.enable = false;
    services.egress-proxies-operator.providers.kvm.kvm = support.kvm "192.168.131.1" // {
      hosts.near = {
        local = true;
        network = "egress";
      };
    };
    # Everything that a later generation may change: the operator's command line, its providers,
    # libvirtd's own configuration, a second pool's path.
    specialisation.changed.configuration = {
      services.egress-proxies-operator.logLevel = "debug";
      services.egress-proxies-operator.providers.kvm.kvm.machineTypes.large = {
        vcpus = 2;
        memoryMiB = 1024;
      };
      virtualisation.libvirtd.extraConfig = "max_clients = 100";
      services.egress-proxies-hypervisor.ksm = true;
    };
  };

  testScript = ''
    ${support.script}
    machine.wait_for_unit("egress-proxies-operator.service")
    machine.wait_until_succeeds("kubectl get proxies")
    machine.succeed("kubectl apply -f ${support.manifest "one" "http://192.168.131.1:8000/"}")
    wait_ready(machine, "one")
    leased = lease(machine)
    before = domain_ids(machine)
    boot = machine.succeed("virsh -c qemu:///system domstats --state --vcpu")

    with subtest("restarting libvirtd"):
        machine.succeed("systemctl restart libvirtd.service")
        machine.wait_until_succeeds("virsh -c qemu:///system list")
        assert domain_ids(machine) == before
        machine.succeed("systemctl is-active libvirt-guests.service")

    with subtest("switching"):
        machine.succeed("/run/current-system/specialisation/changed/bin/switch-to-configuration test")
        machine.wait_for_unit("egress-proxies-operator.service")
        assert domain_ids(machine) == before
        wait_ready(machine, "one", 120)
        machine.succeed("grep -q large /etc/egress-proxies-operator/providers.yaml")

    with subtest("nothing that libvirt keeps names the store"):
        machine.fail("grep -r /nix/store /var/lib/libvirt/qemu/*.xml /var/lib/libvirt/storage")
  '';
}

# An operator with a far hypervisor, declared Proxies, and everything that has a port.
{ config, ... }:
{
  services.egress-proxies-operator = {
    enable = true;
    providers.kvm-home.kvm = {
      sshKeyFile = config.services.egress-proxies-operator.credentials.ssh-key.file;
      knownHosts = "nas1.example.net ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ9ZJvCzG0a0b5h0Jk7rF9S2kKXlKk3mQv3fJZQm3V1c";
      diskSizeGb = 12;
      images.debian-13 = {
        url = "https://cloud.debian.org/images/cloud/trixie/latest/debian-13-genericcloud-amd64.qcow2";
        checksums = "https://cloud.debian.org/images/cloud/trixie/latest/SHA512SUMS";
      };
      machineTypes.small = {
        vcpus = 1;
        memoryMiB = 512;
      };
      hosts.nas1 = {
        address = "nas1.example.net:22";
        user = "egress-hypervisor";
        socket = "/run/libvirt/libvirt-sock";
        bridge = "br0";
      };
      hosts.nas2 = {
        address = "[2001:db8::2]:2222";
        user = "egress-hypervisor";
        network = "egress";
        pool = "proxies";
        draining = true;
      };
    };
    credentials.ssh-key.path = "/var/lib/secrets/egress-ssh-key";
    proxies = {
      de-1 = {
        provider = "kvm-home";
        placement = {
          zone = "nas1";
          machineType = "small";
          image = "debian-13";
        };
        cloudInit.secretRef.name = "squid";
        attributes.geo = "de";
      };
      office = {
        namespace = "crawl";
        endpoint.host = "proxy.example.net";
        maxLeases = 2;
        healthCheck.intervalSeconds = 30;
      };
    };
    discovery = {
      addresses = [
        ":8090"
        "unix:/run/egress-proxies-operator/discovery.sock"
      ];
      openFirewall = true;
      tokenFile = "/var/lib/secrets/discovery-token";
    };
    metrics.address = "127.0.0.1:8080";
    tracing.environment.OTEL_EXPORTER_OTLP_ENDPOINT = "http://127.0.0.1:4317";
    extraArgs = [
      "--lease-cooldown"
      "30m"
    ];
  };
}

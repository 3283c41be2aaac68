# What the VM tests share: machines, manifests, and the words that test scripts use.
{ pkgs }:
let
  keys = import (pkgs.path + "/nixos/tests/ssh-keys.nix") pkgs;
in
{
  # A guest that needs no network to become a proxy: Squid and the guest agent are in the image.
  guestImage = import ./guest.nix { inherit pkgs; };

  # nixpkgs' own key for tests, which everybody has.
  publicKey = keys.snakeOilEd25519PublicKey;
  privateKey = keys.snakeOilEd25519PrivateKey;

  # A libvirt host on the test network.
  hypervisor = {
    imports = [ ../../modules/hypervisor.nix ];
    virtualisation = {
      cores = 2;
      memorySize = 3072;
      diskSize = 8192;
    };
    services.egress-proxies-hypervisor = {
      enable = true;
      network.enable = true;
    };
  };

  # An operator that serves its own Kubernetes API.
  operator = {
    imports = [ ../../modules/operator.nix ];
    services.egress-proxies-operator = {
      enable = true;
      # The package is not built to be run while this is evaluated elsewhere.
      checkConfig = pkgs.stdenv.buildPlatform.canExecute pkgs.stdenv.hostPlatform;
    };
    environment.systemPackages = [ pkgs.kubectl ];
    environment.variables.KUBECONFIG = "/var/lib/egress-proxies-operator/admin.kubeconfig";
  };

  # The images and profiles of a kvm provider, the image served by the machine `web` or by itself.
  kvm = imageHost: {
    images.test.url = "http://${imageHost}:8000/guest.qcow2";
    machineTypes.small = {
      vcpus = 1;
      memoryMiB = 768;
    };
  };

  imageServer = guest: {
    services.nginx.enable = true;
    services.nginx.virtualHosts.images = {
      listen = [
        {
          addr = "0.0.0.0";
          port = 8000;
        }
      ];
      root = guest;
    };
    networking.firewall.allowedTCPPorts = [ 8000 ];
  };

  # A Managed Proxy on the provider `kvm`. Its probe asks the image server through the proxy.
  manifest =
    name: target:
    pkgs.writeText "${name}.yaml" (
      builtins.toJSON {
        apiVersion = "crawl.example.com/v1alpha1";
        kind = "Proxy";
        metadata = {
          inherit name;
          namespace = "default";
        };
        spec = {
          mode = "Managed";
          provider = "kvm";
          placement = {
            image = "test";
            machineType = "small";
          };
          healthCheck = {
            url = target;
            expectedStatus = 200;
          };
        };
      }
    );

  # Under software emulation within software emulation a guest takes minutes.
  script = ''
    def wait_ready(machine, name, seconds=1500):
        machine.wait_until_succeeds("kubectl get proxies")
        machine.succeed(f"kubectl wait --for=condition=Ready proxy/{name} --timeout={seconds}s")


    def lease(machine):
        return machine.succeed(
            "curl --fail --silent -X POST -H 'content-type: application/json' "
            "-d '{\"target\":\"example.com\"}' http://127.0.0.1:8090/v1/leases"
        )


    def domain_ids(machine):
        return machine.succeed("virsh -c qemu:///system list --id").split()


    def uid(machine, name):
        return machine.succeed(f"kubectl get proxy/{name} -o jsonpath={{.metadata.uid}}")
  '';
}

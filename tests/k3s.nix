# The operator for a real cluster: k3s on the same machine, proxies as processes of this one.
{ pkgs, support, ... }:
let
  manifest = pkgs.writeText "one.yaml" (
    builtins.toJSON {
      apiVersion = "crawl.example.com/v1alpha1";
      kind = "Proxy";
      metadata.name = "one";
      spec.mode = "Managed";
      spec.provider = "local";
    }
  );
in
{
  name = "egress-proxies-k3s";

  nodes.machine =
    { config, ... }:
    {
      imports = [ support.operator ];
      virtualisation = {
        cores = 2;
        memorySize = 3072;
        diskSize = 4096;
      };
      services.k3s = {
        enable = true;
        role = "server";
        images = [ config.services.k3s.package.airgap-images ];
        extraFlags = [ "--disable=traefik,metrics-server,servicelb" ];
      };
      services.egress-proxies-operator = {
        controlPlane = "/etc/rancher/k3s/k3s.yaml";
        providers.local.local = { };
      };
      # Its kubeconfig and the CRD are there before the operator is.
      systemd.services.egress-proxies-operator.wantedBy = pkgs.lib.mkForce [ ];
      systemd.services.egress-proxies-operator-manifests.wantedBy = pkgs.lib.mkForce [ ];
      environment.variables.KUBECONFIG = pkgs.lib.mkForce "/etc/rancher/k3s/k3s.yaml";
    };

  testScript = ''
    machine.wait_for_unit("k3s.service")
    machine.wait_until_succeeds("kubectl get nodes | grep -w Ready")
    machine.succeed("egress-proxies-operator crd | kubectl apply -f -")
    machine.succeed("kubectl wait --for=condition=Established crd/proxies.crawl.example.com")
    machine.succeed("systemctl start egress-proxies-operator.service")
    machine.succeed("kubectl apply -f ${manifest}")
    machine.succeed("kubectl wait --for=condition=Provisioned proxy/one --timeout=120s")
    machine.succeed("kubectl delete proxy one --timeout=120s")
    machine.fail("pgrep -fx '.*forward-proxy --listen.*'")
  '';
}

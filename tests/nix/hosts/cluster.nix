# An operator that works for a cluster.
{
  services.egress-proxies-operator = {
    enable = true;
    controlPlane = "/var/lib/secrets/cluster.kubeconfig";
    namespace = "crawl";
    providers.here.local = { };
    hardening.extraServiceConfig.MemoryMax = "512M";
  };
}

{
  says = [ "proxies.p.cloudInit: give either inline or secretRef" ];
  module.services.egress-proxies-operator = {
    enable = true;
    providers.here.local = { };
    proxies.p = {
      provider = "here";
      cloudInit.inline = "x";
      cloudInit.secretRef.name = "y";
    };
  };
}

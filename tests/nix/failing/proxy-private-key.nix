{
  says = [ "proxies.p.cloudInit.inline holds a private key" ];
  module.services.egress-proxies-operator = {
    enable = true;
    providers.here.local = { };
    proxies.p = {
      provider = "here";
      cloudInit.inline = "-----BEGIN OPENSSH PRIVATE KEY-----";
    };
  };
}

{
  says = [ "services.egress-proxies-operator.credentials.a:b: the name becomes a file name" ];
  module.services.egress-proxies-operator = {
    enable = true;
    providers.here.local = { };
    credentials."a:b".path = "/var/lib/secrets/x";
  };
}

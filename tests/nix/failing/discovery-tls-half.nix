{
  says = [
    "services.egress-proxies-operator.discovery.tls: certificateFile and keyFile belong together"
  ];
  module.services.egress-proxies-operator = {
    enable = true;
    providers.here.local = { };
    discovery.tls.certificateFile = "/etc/tls.pem";
  };
}

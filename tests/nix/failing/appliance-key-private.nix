{
  says = [ "services.egress-proxies-appliance.adminKeys: an entry is a private key" ];
  module.services.egress-proxies-appliance = {
    enable = true;
    adminKeys = [ "-----BEGIN OPENSSH PRIVATE KEY-----" ];
  };
}

# The least there is: processes on this machine.
{
  services.egress-proxies-operator = {
    enable = true;
    providers.here.local = { };
    proxies.one.provider = "here";
  };
}

{
  host = {
    path = ./templates/host;
    description = "One machine: operator and hypervisor";
  };
  fleet = {
    path = ./templates/fleet;
    description = "An operator, and hypervisors that it reaches over SSH";
  };
}

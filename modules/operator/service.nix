# What the operator's unit is held to, whatever its configuration: the [Service] settings that do not
# depend on an option. When the repository ships the unit itself, its settings are read from there, so
# that NixOS and every other distribution run the same thing.
{ lib }:
let
  ours = import ../lib.nix { inherit lib; };
  shipped = ../../deploy/systemd/egress-proxies-operator.service;

  # Set by the module: they name store paths, users or files.
  perConfiguration = [
    "ExecStart"
    "ExecStartPre"
    "ExecReload"
    "Environment"
    "EnvironmentFile"
    "LoadCredential"
    "LoadCredentialEncrypted"
    "User"
    "Group"
    "SupplementaryGroups"
    "BusName"
  ];

  own = {
    # READY comes when caches are synced and sockets serve, which waits for the cluster's API.
    Type = "notify";
    TimeoutStartSec = "5min";
    Restart = "on-failure";
    RestartSec = "2s";
    # A stop ends in-flight requests and libvirt calls in under 10 s; more is a fault.
    TimeoutStopSec = "30s";

    StateDirectory = "egress-proxies-operator";
    StateDirectoryMode = "0700";
    RuntimeDirectory = "egress-proxies-operator";
    # The sockets in it have modes of their own.
    RuntimeDirectoryMode = "0755";
    CacheDirectory = "egress-proxies-operator";
    CacheDirectoryMode = "0700";
    UMask = "0077";

    CapabilityBoundingSet = "";
    AmbientCapabilities = "";
    NoNewPrivileges = true;
    LockPersonality = true;
    MemoryDenyWriteExecute = true;
    DevicePolicy = "closed";
    KeyringMode = "private";
    PrivateDevices = true;
    PrivateTmp = true;
    PrivateUsers = true;
    ProcSubset = "pid";
    ProtectClock = true;
    ProtectControlGroups = true;
    ProtectHome = true;
    ProtectHostname = true;
    ProtectKernelLogs = true;
    ProtectKernelModules = true;
    ProtectKernelTunables = true;
    ProtectProc = "invisible";
    ProtectSystem = "strict";
    RemoveIPC = true;
    RestrictAddressFamilies = [
      "AF_INET"
      "AF_INET6"
      "AF_UNIX"
    ];
    RestrictNamespaces = true;
    RestrictRealtime = true;
    RestrictSUIDSGID = true;
    SystemCallArchitectures = "native";
    SystemCallErrorNumber = "EPERM";
    SystemCallFilter = [
      "@system-service"
      "~@privileged"
      "~@resources"
    ];
    LimitNOFILE = 65536;
  };
in
if builtins.pathExists shipped then
  removeAttrs (ours.readServiceSection (builtins.readFile shipped)) perConfiguration
else
  own

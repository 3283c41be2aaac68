# What a user may get wrong, each as a sentence that names the option and says what to do.
{ lib }:
let
  ours = import ../lib.nix { inherit lib; };
  here = "services.egress-proxies-operator";
  types = (import ./providers.nix { inherit lib; }).types;

  names = set: if set == { } then "none" else lib.concatStringsSep ", " (lib.attrNames set);

  secret =
    option: value:
    let
      fault = if value == null then null else ours.secretPathFault value;
    in
    {
      assertion = fault == null;
      message = "${option}: ${toString value} ${toString fault}.";
    };

  hostAssertions =
    at: kvm: name: host:
    let
      option = "${at}.hosts.${name}";
    in
    [
      {
        assertion = ours.isPlainName name;
        message = "${option}: the name becomes part of ids and volume names; use letters, digits, dots, dashes and underscores, starting with a letter or digit.";
      }
      {
        assertion = host.local != (host.address != null);
        message = "${option}: give either address (such as \"nas1.example.net:22\") for a far host, or local = true for this machine.";
      }
      {
        assertion = (host.bridge != null) != (host.network != null);
        message = "${option}: give either bridge (a bridge of the host, such as \"br0\") or network (a libvirt network, such as \"egress\"), so that guests can be reached.";
      }
      {
        assertion = host.local || host.user != null;
        message = "${option}.user: say whom to log in as; on a NixOS hypervisor it is services.egress-proxies-hypervisor.ssh.user there, \"egress-hypervisor\" unless changed.";
      }
      {
        assertion = host.local || kvm.sshKeyFile != null;
        message = "${at}.sshKeyFile: ${name} is reached over SSH, which needs a private key; make one with `ssh-keygen -t ed25519` and give its path.";
      }
      {
        assertion =
          host.local
          || kvm.insecureIgnoreHostKey == true
          || kvm.knownHostsFile != null
          || kvm.knownHosts != "";
        message = "${at}.knownHosts: ${name} is reached over SSH and its key must be known; run `egress-proxies-hypervisor-info` there, or `ssh-keyscan` from a place you trust, and paste the line.";
      }
    ];

  kvmAssertions =
    at: kvm:
    [
      {
        assertion = kvm.hosts != { };
        message = "${at}.hosts is empty: name at least one hypervisor, such as hosts.nas1 = { address = \"nas1.example.net:22\"; user = \"egress-hypervisor\"; bridge = \"br0\"; }.";
      }
      {
        assertion = kvm.machineTypes != { };
        message = "${at}.machineTypes is empty: name at least one profile, such as machineTypes.small = { vcpus = 1; memoryMiB = 512; }.";
      }
      {
        assertion = kvm.knownHostsFile == null || kvm.knownHosts == "";
        message = "${at}: give either knownHosts or knownHostsFile, not both.";
      }
      {
        assertion = kvm.sshKeyFile == null || !(lib.hasSuffix ".pub" (toString kvm.sshKeyFile));
        message = "${at}.sshKeyFile: ${toString kvm.sshKeyFile} is by its name a public key; give the private key, the file without .pub.";
      }
      (secret "${at}.sshKeyFile" kvm.sshKeyFile)
    ]
    ++ lib.concatLists (lib.mapAttrsToList (hostAssertions at kvm) kvm.hosts)
    ++ lib.concatLists (
      lib.mapAttrsToList (name: image: [
        {
          assertion = ours.isPlainName name;
          message = "${at}.images.${name}: the key becomes part of volume names; use letters, digits, dots, dashes and underscores, starting with a letter or digit.";
        }
        {
          assertion = lib.hasPrefix "https://" image.url || lib.hasPrefix "http://" image.url;
          message = "${at}.images.${name}.url: ${image.url} is neither http nor https; the operator fetches images itself and needs such a URL.";
        }
        {
          assertion =
            lib.count (v: v != null) [
              image.sha256
              image.sha512
              image.checksums
            ] <= 1;
          message = "${at}.images.${name}: give one of sha256, sha512 and checksums.";
        }
      ]) kvm.images
    );

  providerAssertions =
    name: provider:
    let
      at = "${here}.providers.${name}";
      given = lib.filter (type: provider.${type} != null) types;
    in
    [
      {
        assertion = lib.length given == 1;
        message =
          if given == [ ] then
            "${at} has no block: set one of ${lib.concatStringsSep ", " types}, such as ${at}.local = { }."
          else
            "${at} has the blocks ${lib.concatStringsSep " and " given}: a provider has exactly one; give each a name of its own.";
      }
    ]
    ++ lib.optionals (provider.kvm != null) (kvmAssertions "${at}.kvm" provider.kvm);

  # What placement names must exist; the operator would say the same at run time, but later.
  placementAssertions =
    at: placement: provider: kvm:
    let
      known =
        field: set:
        let
          value = placement.${field};
        in
        {
          assertion = value == null || set ? ${value};
          message = "${at}.placement.${field}: the provider ${provider} has no ${toString value}; it has: ${names set}.";
        };
    in
    [
      (known "zone" kvm.hosts)
      (known "machineType" kvm.machineTypes)
      {
        assertion =
          placement.image == null
          || kvm.images ? ${placement.image}
          || builtins.match "https?://.*" placement.image != null;
        message = "${at}.placement.image: the provider ${provider} has no image ${toString placement.image}; it has: ${names kvm.images}. An http or https URL is taken too.";
      }
      {
        assertion = placement.image != null;
        message = "${at}.placement.image: a virtual machine needs an image; the provider ${provider} has: ${names kvm.images}.";
      }
      {
        assertion = placement.machineType != null;
        message = "${at}.placement.machineType: a virtual machine needs a profile; the provider ${provider} has: ${names kvm.machineTypes}.";
      }
    ];

  proxyAssertions =
    cfg: name: proxy:
    let
      at = "${here}.proxies.${name}";
      provider = if proxy.provider == null then null else cfg.providers.${proxy.provider} or null;
    in
    [
      {
        assertion = (proxy.provider != null) != (proxy.endpoint.host != null);
        message = "${at}: give either provider (the operator makes the proxy) or endpoint.host (somebody else's proxy).";
      }
      {
        assertion = proxy.provider == null || provider != null;
        message = "${at}.provider: there is no provider ${toString proxy.provider}; ${here}.providers has: ${names cfg.providers}.";
      }
      {
        assertion = proxy.cloudInit.inline == null || proxy.cloudInit.secretRef == null;
        message = "${at}.cloudInit: give either inline or secretRef.";
      }
      {
        assertion = proxy.cloudInit.inline == null || !(ours.isPrivateKey proxy.cloudInit.inline);
        message = "${at}.cloudInit.inline holds a private key, and inline user-data ends in the world-readable Nix store; put it in a Secret and name it with secretRef.";
      }
    ]
    ++ lib.optionals (provider != null && provider.kvm != null) (
      placementAssertions at proxy.placement proxy.provider provider.kvm
    );
in
{ cfg, libvirtd }:
[
  {
    assertion = cfg.controlPlane == "embedded" || cfg.namespace == null || cfg.namespace != "";
    message = "${here}.namespace is empty: leave it null for all namespaces.";
  }
  {
    assertion =
      cfg.discovery.tokenFile != null
      || cfg.discovery.allowAnonymous
      || lib.all ours.isLoopback cfg.discovery.addresses;
    message = "${here}.discovery.tokenFile: the discovery API hands out leases at ${lib.concatStringsSep ", " cfg.discovery.addresses}, which is not loopback only; give a token file, or say discovery.allowAnonymous = true.";
  }
  {
    assertion = (cfg.discovery.tls.certificateFile == null) == (cfg.discovery.tls.keyFile == null);
    message = "${here}.discovery.tls: certificateFile and keyFile belong together; give both or neither.";
  }
  (secret "${here}.discovery.tokenFile" cfg.discovery.tokenFile)
  (secret "${here}.discovery.tls.keyFile" cfg.discovery.tls.keyFile)
]
++ lib.optional (cfg.controlPlane != "embedded") (secret "${here}.controlPlane" cfg.controlPlane)
++ lib.concatLists (
  lib.mapAttrsToList (
    name: credential:
    [
      {
        assertion = ours.isPlainName name;
        message = "${here}.credentials.${name}: the name becomes a file name; use letters, digits, dots, dashes and underscores, starting with a letter or digit.";
      }
    ]
    # What is encrypted may be read by anybody.
    ++ lib.optional (!credential.encrypted) (secret "${here}.credentials.${name}.path" credential.path)
  ) cfg.credentials
)
++ lib.concatLists (lib.mapAttrsToList providerAssertions cfg.providers)
++ lib.concatLists (
  lib.mapAttrsToList (
    name: provider:
    map (host: {
      assertion = libvirtd;
      message = "${here}.providers.${name}.kvm.hosts.${host}.local: libvirtd does not run on this machine; set services.egress-proxies-hypervisor.enable = true, or give the address of another.";
    }) (lib.attrNames (lib.filterAttrs (_: h: h.local) provider.kvm.hosts))
  ) (lib.filterAttrs (_: p: p.kvm != null) cfg.providers)
)
++ lib.concatLists (lib.mapAttrsToList (proxyAssertions cfg) cfg.proxies)

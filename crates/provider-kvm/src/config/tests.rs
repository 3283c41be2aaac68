use super::*;
use egress_provider::config::{self, BuildContext, ProviderBlueprint, ProviderType};
use egress_provider::{Provider, ProviderError};
use std::sync::{Arc, Mutex};

#[derive(Default)]
struct Probe(Mutex<Option<KvmConfig>>);
struct Nothing;
impl ProviderBlueprint for Nothing {
    fn build(&self, _: BuildContext) -> Result<Arc<dyn Provider>, ProviderError> {
        unreachable!("only read")
    }
}
impl ProviderType for Probe {
    fn type_name(&self) -> &'static str {
        "kvm"
    }
    fn read(&self, fields: &mut Fields<'_>) -> Option<Box<dyn ProviderBlueprint>> {
        *self.0.lock().unwrap() = read(fields);
        Some(Box::new(Nothing))
    }
}

fn parse(block: &str) -> Result<KvmConfig, Vec<String>> {
    let probe = Probe::default();
    let text = format!("providers:\n- name: k\n  type: kvm\n  kvm:\n{block}");
    match config::parse(&text, &[&probe]) {
        Ok(_) => Ok(probe.0.into_inner().unwrap().unwrap()),
        Err(faults) => Err(faults.iter().map(ToString::to_string).collect()),
    }
}

#[test]
fn a_local_host_needs_little() {
    let config = parse(
        "
    machineTypes: {small: {vcpus: 1, memoryMiB: 512}}
    hosts: [{name: here, local: true, network: default}]
",
    )
    .unwrap();
    assert!(config.ssh.is_none());
    assert_eq!(config.disk_size_gb, 10);
    assert!(config.install_guest_agent);
    let host = &config.hosts[0];
    assert_eq!(host.sockets, DEFAULT_SOCKETS);
    assert_eq!(
        (host.pool.as_str(), host.reach.clone()),
        ("default", Reach::Local)
    );
    assert_eq!(host.domain_type, DomainType::Auto);
}

#[test]
fn everything_is_read() {
    let config = parse(&format!(
            "
    sshKeyFile: /k
    knownHostsFile: /kh
    diskSizeGb: 20
    vendorData: '#cloud-config'
    networkConfig: 'version: 2'
    installGuestAgent: false
    images:
      debian-13: {{url: 'https://example.com/d.qcow2', sha512: {}}}
      raw: {{url: 'http://example.com/d.raw.XZ', checksums: 'http://example.com/SHA256SUMS', format: raw, firmware: bios}}
    machineTypes: {{small: {{vcpus: 2, memoryMiB: 2048}}}}
    hosts:
    - {{name: a, address: 'nas:2222', user: u, bridge: br0, pool: p, socket: /s, domainType: qemu, cpuMode: Nehalem, draining: true}}
    - {{name: b, address: '[::1]:22', user: u, network: net}}
",
            "ab".repeat(64)
        ))
        .unwrap();
    let image = &config.images["debian-13"];
    assert_eq!(
        image.checksum,
        Checksum::Known(ImageDigest::Sha512("ab".repeat(64)))
    );
    assert_eq!(
        (image.format, image.compression),
        (Some(Format::Qcow2), Compression::None)
    );
    let raw = &config.images["raw"];
    assert_eq!(
        (raw.format, raw.compression),
        (Some(Format::Raw), Compression::Xz)
    );
    assert_eq!(raw.firmware, Firmware::Bios);
    assert!(matches!(raw.checksum, Checksum::File(_)));
    assert_eq!(
        config.hosts[0].reach,
        Reach::Ssh {
            host: "nas".into(),
            port: 2222,
            user: "u".into()
        }
    );
    assert_eq!(
        config.hosts[1].reach,
        Reach::Ssh {
            host: "::1".into(),
            port: 22,
            user: "u".into()
        }
    );
    assert!(config.hosts[0].draining);
}

#[test]
fn all_faults_at_once_each_with_its_path() {
    let faults = parse(
        "
    diskSizeGb: 0
    images:
      x/y: {url: 'ftp://example.com/x', sha256: abc, firmware: efi}
      z: {sha256: 'abc'}
    machineTypes: {small: {vcpus: 0}}
    hosts:
    - {name: a, address: 'u@nas', user: u, bridge: br0, network: net}
    - {name: a, local: true, address: x, socket: rel}
    - {local: true, user: me, network: net, domainType: xen, prot: 1}
    - {name: c, address: 'c:99999', network: net}
",
    )
    .unwrap_err();
    let p = "providers[0] \"k\": kvm";
    let expect = [
        format!("{p}.diskSizeGb: must be a whole number from 1 to 65536, not 0"),
        format!("{p}.images.x/y.url: must be an http or https URL, not ftp:"),
        format!("{p}.images.x/y.sha256: must be 64 hexadecimal digits"),
        format!("{p}.images.x/y.firmware: must be one of uefi, bios, not \"efi\""),
        format!("{p}.images.z: url is required"),
        format!("{p}.machineTypes.small.vcpus: must be a whole number from 1 to 512, not 0"),
        format!("{p}.machineTypes.small: memoryMiB is required"),
        format!("{p}.hosts[0]: bridge and network exclude each other: keep one"),
        format!("{p}.hosts[1].name: \"a\" is taken by another host"),
        format!("{p}.hosts[1]: address and local exclude each other: keep one"),
        format!("{p}.hosts[1].socket: must be an absolute path"),
        format!("{p}.hosts[1]: bridge or network is required: what VMs are plugged into"),
        format!("{p}.hosts[2]: name is required"),
        format!("{p}.hosts[2].domainType: must be one of auto, kvm, qemu, not \"xen\""),
        format!("{p}.hosts[3]: user is required: who to log in as"),
    ];
    for wanted in &expect {
        assert!(
            faults.contains(wanted),
            "missing: {wanted}\nin: {faults:#?}"
        );
    }
    assert!(
        faults.iter().any(|f| f.contains("hosts[0].address")),
        "{faults:#?}"
    );
    assert!(
        faults
            .iter()
            .any(|f| f.contains("hosts[2].prot: unknown field")),
        "{faults:#?}"
    );
}

#[test]
fn far_hosts_need_key_and_known_hosts() {
    let block = "
    machineTypes: {small: {vcpus: 1, memoryMiB: 512}}
    hosts: [{name: a, address: nas, user: u, network: net}]
";
    let faults = parse(block).unwrap_err();
    assert!(faults[0].contains("sshKeyFile is required"), "{faults:#?}");
    assert!(
        faults[1].contains("knownHostsFile is required"),
        "{faults:#?}"
    );
    let config = parse(&format!(
        "    sshKeyFile: /k\n    insecureIgnoreHostKey: true{block}"
    ))
    .unwrap();
    assert_eq!(config.ssh.unwrap().host_keys, HostKeys::InsecureIgnore);
    let faults = parse("    {}\n").unwrap_err();
    assert_eq!(faults.len(), 2, "{faults:#?}");
}

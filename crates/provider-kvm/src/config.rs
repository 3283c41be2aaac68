//! The `kvm` block of the providers file.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;

use data_encoding::HEXLOWER;
use egress_core::SecretBytes;
use egress_provider::config::{Faults, Fields, is_plain_name};
use egress_ssh::HostKeys;
use serde_json::Value;
use sha2::{Digest, Sha256};
use url::Url;

/// Where a libvirt daemon listens, in the order they are tried: the modular daemon first.
pub const DEFAULT_SOCKETS: [&str; 2] = ["/run/libvirt/virtqemud-sock", "/run/libvirt/libvirt-sock"];

/// A whole block, valid.
#[derive(Debug, Clone)]
pub struct KvmConfig {
    /// None when every host is local.
    pub ssh: Option<SshFiles>,
    /// Capacity of a VM's disk.
    pub disk_size_gb: u64,
    pub vendor_data: Option<SecretBytes>,
    pub network_config: Option<SecretBytes>,
    pub install_guest_agent: bool,
    pub images: BTreeMap<String, ImageSpec>,
    pub machine_types: BTreeMap<String, MachineType>,
    /// In the order of the file.
    pub hosts: Vec<HostConfig>,
}

/// What every far host is reached with.
#[derive(Debug, Clone)]
pub struct SshFiles {
    pub key_file: PathBuf,
    pub host_keys: HostKeys,
}

/// A named profile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MachineType {
    pub vcpus: u64,
    pub memory_mib: u64,
}

/// One hypervisor host.
#[derive(Debug, Clone)]
pub struct HostConfig {
    pub name: String,
    pub reach: Reach,
    /// Tried in order.
    pub sockets: Vec<String>,
    pub pool: String,
    pub nic: Nic,
    pub domain_type: DomainType,
    pub cpu_mode: Option<String>,
    pub draining: bool,
}

/// The way to a host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reach {
    Local,
    Ssh {
        host: String,
        port: u16,
        user: String,
    },
}

/// What a VM's network card is plugged into.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Nic {
    Bridge(String),
    Network(String),
}

impl fmt::Display for Nic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bridge(name) => write!(f, "bridge {name}"),
            Self::Network(name) => write!(f, "network {name}"),
        }
    }
}

/// Hardware virtualisation or software emulation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DomainType {
    /// kvm where the host has it.
    Auto,
    Kvm,
    Qemu,
}

/// What is in a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    Qcow2,
    Raw,
}

impl Format {
    /// libvirt's name, and a volume's suffix.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Qcow2 => "qcow2",
            Self::Raw => "raw",
        }
    }
}

/// How an image travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    None,
    Xz,
    Gz,
    Zstd,
}

impl Compression {
    /// By the suffix of the URL's path.
    fn by_suffix(url: &Url) -> Self {
        let path = url.path().to_ascii_lowercase();
        if path.ends_with(".xz") {
            Self::Xz
        } else if path.ends_with(".gz") {
            Self::Gz
        } else if path.ends_with(".zst") || path.ends_with(".zstd") {
            Self::Zstd
        } else {
            Self::None
        }
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Xz => "xz",
            Self::Gz => "gz",
            Self::Zstd => "zstd",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Firmware {
    Uefi,
    Bios,
}

/// What an image's bytes must hash to (as they come over the network, before decompression).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Checksum {
    /// Not configured: what the first fetch finds is recorded.
    Unknown,
    Known(ImageDigest),
    /// In a SHA256SUMS or SHA512SUMS file, by the image's file name.
    File(Url),
}

/// A digest, in lower-case hexadecimal.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ImageDigest {
    Sha256(String),
    Sha512(String),
}

impl ImageDigest {
    pub fn hex(&self) -> &str {
        match self {
            Self::Sha256(hex) | Self::Sha512(hex) => hex,
        }
    }

    /// By its length.
    pub fn parse(hex: &str) -> Option<Self> {
        let hex = hex.to_ascii_lowercase();
        if !hex.bytes().all(|b| b.is_ascii_hexdigit()) {
            return None;
        }
        match hex.len() {
            64 => Some(Self::Sha256(hex)),
            128 => Some(Self::Sha512(hex)),
            _ => None,
        }
    }
}

impl fmt::Display for ImageDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sha256(hex) => write!(f, "sha256:{hex}"),
            Self::Sha512(hex) => write!(f, "sha512:{hex}"),
        }
    }
}

/// An image and how to get it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageSpec {
    /// Part of the volume's name.
    pub key: String,
    pub url: Url,
    pub checksum: Checksum,
    /// None: what the content says.
    pub format: Option<Format>,
    pub compression: Compression,
    pub firmware: Firmware,
}

impl ImageSpec {
    /// An image that a placement names by URL alone.
    pub fn from_url(url: Url) -> Self {
        let digest = HEXLOWER.encode(&Sha256::digest(url.as_str().as_bytes()));
        Self {
            key: format!("url-{}", &digest[..12]),
            compression: Compression::by_suffix(&url),
            url,
            checksum: Checksum::Unknown,
            format: None,
            firmware: Firmware::Uefi,
        }
    }

    /// What the recorded digest is recorded under: another URL or checksum is another image.
    pub fn pin_key(&self) -> String {
        let checksum = match &self.checksum {
            Checksum::Unknown => String::new(),
            Checksum::Known(digest) => digest.to_string(),
            Checksum::File(url) => url.to_string(),
        };
        format!("{} {} {checksum}", self.key, self.url)
    }
}

/// An http or https URL with a host.
pub fn parse_image_url(text: &str) -> Result<Url, String> {
    let url = Url::parse(text).map_err(|error| format!("{text:?} is not a URL: {error}"))?;
    match url.scheme() {
        "http" | "https" if url.has_host() => Ok(url),
        other => Err(format!("must be an http or https URL, not {other}:")),
    }
}

/// Reads the block. None: there were faults.
pub fn read(fields: &mut Fields<'_>) -> Option<KvmConfig> {
    let key_file = fields.optional_str("sshKeyFile");
    let known_hosts = fields.optional_str("knownHostsFile");
    let insecure = fields
        .optional_bool("insecureIgnoreHostKey")
        .unwrap_or(false);
    let disk_size_gb = fields.optional_int("diskSizeGb", 1..=65_536).unwrap_or(10);
    let vendor_data = fields.optional_str("vendorData").map(SecretBytes::new);
    let network_config = fields.optional_str("networkConfig").map(SecretBytes::new);
    let install_guest_agent = fields.optional_bool("installGuestAgent").unwrap_or(true);
    let images = fields.map("images", read_image).into_iter().collect();
    let machine_types: BTreeMap<_, _> = fields
        .map("machineTypes", |key, value, path, faults| {
            read_machine_type(key, value, path, faults)
        })
        .into_iter()
        .collect();
    let mut names = BTreeSet::new();
    let mut count = 0;
    let hosts: Vec<HostConfig> = fields.list("hosts", |value, path, faults| {
        count += 1;
        read_host(value, path, faults, &mut names)
    });
    if machine_types.is_empty() {
        fields.fault(
            "machineTypes",
            "at least one is needed, such as small: {vcpus: 1, memoryMiB: 1024}",
        );
    }
    if count == 0 {
        fields.fault(
            "hosts",
            "at least one is needed, such as {name: here, local: true, network: default}",
        );
    }
    let any_far = hosts.iter().any(|h| h.reach != Reach::Local);
    let ssh = read_ssh_files(fields, key_file, known_hosts, insecure, any_far);
    Some(KvmConfig {
        ssh,
        disk_size_gb,
        vendor_data,
        network_config,
        install_guest_agent,
        images,
        machine_types,
        hosts,
    })
}

fn read_ssh_files(
    fields: &mut Fields<'_>,
    key_file: Option<String>,
    known_hosts: Option<String>,
    insecure: bool,
    any_far: bool,
) -> Option<SshFiles> {
    if insecure && known_hosts.is_some() {
        fields.fault(
            "insecureIgnoreHostKey",
            "contradicts knownHostsFile: leave one of them out",
        );
    }
    if !any_far {
        return None;
    }
    if key_file.is_none() {
        fields.fault(
            "",
            "sshKeyFile is required: some hosts are reached over SSH",
        );
    }
    let host_keys = match known_hosts {
        Some(path) => Some(HostKeys::KnownHosts(path.into())),
        None if insecure => Some(HostKeys::InsecureIgnore),
        None => {
            fields.fault(
                "",
                "knownHostsFile is required: some hosts are reached over SSH (ssh-keyscan -p PORT HOST shows what to put there; compare it with the host's own)",
            );
            None
        }
    };
    Some(SshFiles {
        key_file: key_file?.into(),
        host_keys: host_keys?,
    })
}

fn read_machine_type(
    key: &str,
    value: &Value,
    path: &str,
    faults: &mut Faults,
) -> Option<MachineType> {
    let mut fields = Fields::new(value, path, faults);
    if !is_plain_name(key) {
        fields.fault(
            "",
            "the key may hold only letters, digits, dot, dash and underscore",
        );
    }
    let vcpus = required_int(&mut fields, "vcpus", 1..=512);
    // Below 256 MiB the UEFI firmware itself crashes.
    let memory_mib = required_int(&mut fields, "memoryMiB", 256..=16_777_216);
    fields.finish();
    Some(MachineType {
        vcpus: vcpus?,
        memory_mib: memory_mib?,
    })
}

fn required_int(
    fields: &mut Fields<'_>,
    name: &str,
    range: std::ops::RangeInclusive<u64>,
) -> Option<u64> {
    // `optional_int` has already told a value that does not fit: only a missing one is left.
    match fields.take(name) {
        None | Some(Value::Null) => {
            fields.fault("", format!("{name} is required"));
            None
        }
        Some(value) => match value.as_u64() {
            Some(n) if range.contains(&n) => Some(n),
            _ => {
                fields.fault(
                    name,
                    format!(
                        "must be a whole number from {} to {}, not {value}",
                        range.start(),
                        range.end()
                    ),
                );
                None
            }
        },
    }
}

/// One of a few words; `default` when left out. None: there was a fault.
fn word<T: Copy>(
    fields: &mut Fields<'_>,
    name: &str,
    words: &[(&str, T)],
    default: T,
) -> Option<T> {
    let Some(value) = fields.take(name).filter(|v| !v.is_null()) else {
        return Some(default);
    };
    let found = value
        .as_str()
        .and_then(|text| words.iter().find(|(word, _)| *word == text));
    if found.is_none() {
        let known: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
        fields.fault(
            name,
            format!("must be one of {}, not {value}", known.join(", ")),
        );
    }
    found.map(|(_, value)| *value)
}

fn read_image(key: &str, value: &Value, path: &str, faults: &mut Faults) -> Option<ImageSpec> {
    let mut fields = Fields::new(value, path, faults);
    if !is_plain_name(key) {
        fields.fault("", "the key may hold only letters, digits, dot, dash and underscore, and starts with a letter or digit: it becomes part of a volume's name");
    }
    let url = fields
        .required_str("url")
        .and_then(|text| read_url(&mut fields, "url", &text));
    let mut checksums = Vec::new();
    for (name, length) in [("sha256", 64), ("sha512", 128)] {
        let Some(hex) = fields.optional_str(name) else {
            continue;
        };
        match ImageDigest::parse(&hex) {
            Some(digest) if hex.len() == length => checksums.push(Checksum::Known(digest)),
            _ => fields.fault(name, format!("must be {length} hexadecimal digits")),
        }
    }
    if let Some(text) = fields.optional_str("checksums")
        && let Some(url) = read_url(&mut fields, "checksums", &text)
    {
        checksums.push(Checksum::File(url));
    }
    if checksums.len() > 1 {
        fields.fault(
            "",
            "sha256, sha512 and checksums exclude each other: keep one",
        );
    }
    let format = word(
        &mut fields,
        "format",
        &[("qcow2", Format::Qcow2), ("raw", Format::Raw)],
        Format::Qcow2,
    );
    let by_suffix = url
        .as_ref()
        .map_or(Compression::None, Compression::by_suffix);
    let compression = word(
        &mut fields,
        "compression",
        &[
            ("none", Compression::None),
            ("xz", Compression::Xz),
            ("gz", Compression::Gz),
            ("zstd", Compression::Zstd),
        ],
        by_suffix,
    );
    let firmware = word(
        &mut fields,
        "firmware",
        &[("uefi", Firmware::Uefi), ("bios", Firmware::Bios)],
        Firmware::Uefi,
    );
    fields.finish();
    Some(ImageSpec {
        key: key.to_owned(),
        url: url?,
        checksum: checksums.pop().unwrap_or(Checksum::Unknown),
        format: Some(format?),
        compression: compression?,
        firmware: firmware?,
    })
}

fn read_url(fields: &mut Fields<'_>, name: &str, text: &str) -> Option<Url> {
    match parse_image_url(text) {
        Ok(url) => Some(url),
        Err(message) => {
            fields.fault(name, message);
            None
        }
    }
}

fn read_host(
    value: &Value,
    path: &str,
    faults: &mut Faults,
    names: &mut BTreeSet<String>,
) -> Option<HostConfig> {
    let mut fields = Fields::new(value, path, faults);
    let name = fields.required_str("name");
    if let Some(name) = &name {
        if !is_plain_name(name) {
            fields.fault("name", format!("{name:?} may hold only letters, digits, dot, dash and underscore, and starts with a letter or digit: it becomes part of ids"));
        } else if !names.insert(name.clone()) {
            fields.fault("name", format!("{name:?} is taken by another host"));
        }
    }
    let reach = read_reach(&mut fields);
    let sockets = match fields.optional_str("socket") {
        None => DEFAULT_SOCKETS.map(str::to_owned).to_vec(),
        Some(socket) => {
            if !socket.starts_with('/') {
                fields.fault("socket", "must be an absolute path");
            }
            vec![socket]
        }
    };
    let pool = fields
        .optional_str("pool")
        .unwrap_or_else(|| "default".to_owned());
    let nic = match (
        fields.optional_str("bridge"),
        fields.optional_str("network"),
    ) {
        (Some(bridge), None) => Some(Nic::Bridge(bridge)),
        (None, Some(network)) => Some(Nic::Network(network)),
        (Some(_), Some(_)) => {
            fields.fault("", "bridge and network exclude each other: keep one");
            None
        }
        (None, None) => {
            fields.fault(
                "",
                "bridge or network is required: what VMs are plugged into",
            );
            None
        }
    };
    let domain_type = word(
        &mut fields,
        "domainType",
        &[
            ("auto", DomainType::Auto),
            ("kvm", DomainType::Kvm),
            ("qemu", DomainType::Qemu),
        ],
        DomainType::Auto,
    );
    let cpu_mode = fields.optional_str("cpuMode");
    let draining = fields.optional_bool("draining").unwrap_or(false);
    fields.finish();
    Some(HostConfig {
        name: name?,
        reach: reach?,
        sockets,
        pool,
        nic: nic?,
        domain_type: domain_type?,
        cpu_mode,
        draining,
    })
}

fn read_reach(fields: &mut Fields<'_>) -> Option<Reach> {
    let local = fields.optional_bool("local").unwrap_or(false);
    let address = fields.optional_str("address");
    let user = fields.optional_str("user");
    match (local, address) {
        (true, None) => {
            if user.is_some() {
                fields.fault(
                    "user",
                    "has no meaning for a local host: the operator opens the socket as itself",
                );
            }
            Some(Reach::Local)
        }
        (true, Some(_)) => {
            fields.fault("", "address and local exclude each other: keep one");
            None
        }
        (false, None) => {
            fields.fault(
                "",
                "address is required (host:port), or local: true for this machine",
            );
            None
        }
        (false, Some(address)) => {
            if user.is_none() {
                fields.fault("", "user is required: who to log in as");
            }
            match split_address(&address) {
                Some((host, port)) => Some(Reach::Ssh {
                    host,
                    port,
                    user: user?,
                }),
                None => {
                    fields.fault(
                        "address",
                        format!(
                            "{address:?} is not of the form host:port (an IPv6 address in brackets)"
                        ),
                    );
                    None
                }
            }
        }
    }
}

/// `host`, `host:port`, `[v6]:port`; port 22 when left out.
fn split_address(text: &str) -> Option<(String, u16)> {
    let (host, port) = if let Some(rest) = text.strip_prefix('[') {
        let (host, rest) = rest.split_once(']')?;
        host.parse::<std::net::Ipv6Addr>().ok()?;
        match rest.strip_prefix(':') {
            Some(port) => (host, Some(port)),
            None if rest.is_empty() => (host, None),
            None => return None,
        }
    } else {
        match text.split_once(':') {
            Some((_, port)) if port.contains(':') => return None,
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        }
    };
    let port = match port {
        None => 22,
        Some(port) => port.parse().ok().filter(|p| *p != 0)?,
    };
    let good = !host.is_empty()
        && !host
            .chars()
            .any(|c| c.is_whitespace() || c == '@' || c == '/');
    good.then(|| (host.to_owned(), port))
}

#[cfg(test)]
mod tests;

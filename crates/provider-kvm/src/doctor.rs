//! What is wrong with a host, and what to do about it: each check from the outside in, until one
//! fails that the others rest on.

use serde::Serialize;
use virt::sys;

use crate::capabilities::Capabilities;
use crate::config::{DomainType, Firmware, KvmConfig, Nic, Reach};
use crate::host::calls::Calls;
use crate::host::error::{HostError, LibvirtError};
use crate::host::{CALL, Host};
use crate::provider::KvmProvider;
use crate::storage::{Pool, StorageError};

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Check {
    pub name: &'static str,
    pub ok: bool,
    pub detail: String,
    /// Only of a fault.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub what_to_do: Option<String>,
}

impl Check {
    fn good(name: &'static str, detail: impl Into<String>) -> Self {
        Self {
            name,
            ok: true,
            detail: detail.into(),
            what_to_do: None,
        }
    }

    fn bad(name: &'static str, detail: impl Into<String>, what_to_do: impl Into<String>) -> Self {
        Self {
            name,
            ok: false,
            detail: detail.into(),
            what_to_do: Some(what_to_do.into()),
        }
    }
}

/// All checks of one host, in order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HostReport {
    pub host: String,
    pub checks: Vec<Check>,
}

impl HostReport {
    pub fn ok(&self) -> bool {
        self.checks.iter().all(|check| check.ok)
    }
}

impl KvmProvider {
    /// Looks at all hosts, side by side.
    pub async fn doctor(&self) -> Vec<HostReport> {
        let config = self.config();
        let reports = self.hosts().map(|host| async move {
            HostReport {
                host: host.name().to_owned(),
                checks: examine(host, config).await,
            }
        });
        futures::future::join_all(reports).await
    }
}

async fn examine(host: &Host, config: &KvmConfig) -> Vec<Check> {
    let mut checks = Vec::new();
    if let Reach::Ssh {
        host: name,
        port,
        user,
    } = &host.config.reach
    {
        let address = egress_core::record::host_port(name, *port);
        if config
            .ssh
            .as_ref()
            .is_some_and(|ssh| ssh.host_keys == egress_ssh::HostKeys::InsecureIgnore)
        {
            checks.push(Check::bad(
                "host key",
                "not checked: insecureIgnoreHostKey is set",
                "set knownHostsFile, and remove insecureIgnoreHostKey",
            ));
        }
        match host.connect_ssh().await {
            Ok(()) => checks.push(Check::good("ssh", format!("{user}@{address}"))),
            Err(error) => {
                checks.push(Check::bad("ssh", error.to_string(), ssh_advice(&error)));
                return checks;
            }
        }
    }
    if let Err(error) = host.session().await {
        let advice = match &error {
            HostError::Ssh { .. } => ssh_advice(&error),
            HostError::Socket { .. } => "start libvirtd (or virtqemud and virtstoraged), put the operator's user into the socket's group, or set the host's socket".to_owned(),
            _ => "see the host's journal: journalctl -u libvirtd -u virtqemud".to_owned(),
        };
        let name = match &error {
            HostError::Ssh { .. } | HostError::Socket { .. } => "socket",
            _ => "libvirt",
        };
        checks.push(Check::bad(name, error.to_string(), advice));
        return checks;
    }
    checks.push(Check::good("socket", host.config.sockets.join(" or ")));
    let (host_config, config) = (host.config.clone(), config.clone());
    let examined = host
        .run("doctor", CALL, move |calls| {
            let mut checks = Vec::new();
            checks.push(version(calls));
            checks.extend(pool(calls, &host_config.pool, config.disk_size_gb << 30));
            checks.push(nic(calls, &host_config.nic));
            checks.push(kvm(calls, host_config.domain_type));
            checks.push(firmware(calls, host_config.domain_type, &config));
            checks.push(memory(calls, &config));
            Ok::<_, LibvirtError>(checks)
        })
        .await;
    match examined {
        Ok(Ok(more)) => checks.extend(more),
        Ok(Err(error)) => checks.push(Check::bad(
            "libvirt",
            error.to_string(),
            "see the host's journal: journalctl -u libvirtd -u virtqemud",
        )),
        Err(error) => checks.push(Check::bad(
            "libvirt",
            error.to_string(),
            "the daemon does not answer: restart it (running guests stay)",
        )),
    }
    checks
}

fn ssh_advice(error: &HostError) -> String {
    use egress_ssh::SshError;
    let HostError::Ssh { error, .. } = error else {
        return "see docs/howto/kvm.md".to_owned();
    };
    match &**error {
        SshError::Key(_) => "put a private key without a passphrase where sshKeyFile says, readable for the operator only",
        SshError::KnownHosts { .. } => "make the known_hosts file, with the host's key as the host itself shows it (ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub)",
        SshError::Dial { .. } => "check address and port, and that sshd runs and no firewall is between",
        SshError::HandshakeTimeout { .. } | SshError::Handshake { .. } | SshError::Lost { .. } => "see the host's journal: journalctl -u ssh",
        SshError::HostKey(_) | SshError::NoHeldHostKeyType { .. } => "compare the fingerprint on the host itself, then correct the known_hosts file",
        SshError::AuthRefused { .. } => "add the public key to the user's authorized_keys on the host; the account must not be locked (password * instead of !)",
        SshError::ForwardingProhibited { .. } => "allow it for this key: see \"The key on the host\" in docs/howto/kvm.md",
        SshError::SocketNotThere { .. } => "start libvirtd (or virtqemud), and put the user into the libvirt group",
        SshError::SocketRefused { .. } => "start libvirtd (or virtqemud), put the user into the libvirt group, and see \"The key on the host\" in docs/howto/kvm.md",
        SshError::LocalSocket { .. } => "the operator's runtime directory must be writable for it",
    }
    .to_owned()
}

fn version(calls: &Calls<'_>) -> Check {
    let text = |v: u32| format!("{}.{}.{}", v / 1_000_000, v / 1000 % 1000, v % 1000);
    let libvirt = calls.rpc(
        "virConnectGetLibVersion",
        "host",
        virt::connect::Connect::lib_version,
    );
    let qemu = calls.rpc(
        "virConnectGetVersion",
        "host",
        virt::connect::Connect::hyp_version,
    );
    match (libvirt, qemu) {
        // Firmware autoselection with features: 7.2.
        (Ok(libvirt), Ok(qemu)) if libvirt >= 7_002_000 => Check::good(
            "libvirt",
            format!("libvirt {}, QEMU {}", text(libvirt), text(qemu)),
        ),
        (Ok(libvirt), Ok(_)) => Check::bad(
            "libvirt",
            format!("libvirt {} is too old", text(libvirt)),
            "7.2 or newer is needed: it picks the firmware by its features",
        ),
        (Err(error), _) | (_, Err(error)) => Check::bad(
            "libvirt",
            error.to_string(),
            "install QEMU and libvirt's driver for it (qemu-system-x86, libvirt-daemon-driver-qemu)",
        ),
    }
}

fn pool(calls: &Calls<'_>, name: &str, disk: u64) -> Vec<Check> {
    let pool = match Pool::open(calls, name) {
        Ok(pool) => pool,
        Err(error @ StorageError::NoPool { .. }) => {
            return vec![Check::bad(
                "pool",
                error.to_string(),
                format!(
                    "virsh pool-define-as {name} dir --target /var/lib/libvirt/images && virsh pool-start {name} && virsh pool-autostart {name}"
                ),
            )];
        }
        Err(error) => {
            return vec![Check::bad(
                "pool",
                error.to_string(),
                format!("virsh pool-start {name} says why; often its directory is missing"),
            )];
        }
    };
    let space = match pool.require(disk, "one VM's disk (diskSizeGb)") {
        Ok(()) => Check::good(
            "space",
            pool.available()
                .map_or_else(|e| e.to_string(), |b| format!("{} GiB free", b >> 30)),
        ),
        Err(error) => Check::bad(
            "space",
            error.to_string(),
            "free some, or set a smaller diskSizeGb",
        ),
    };
    vec![Check::good("pool", name), space]
}

fn nic(calls: &Calls<'_>, nic: &Nic) -> Check {
    match nic {
        Nic::Network(name) => {
            let found = calls.rpc("virNetworkLookupByName", name, |conn| {
                conn.lookup_network_by_name(name)
            });
            match found {
                Err(error) => Check::bad(
                    "network",
                    error.to_string(),
                    format!(
                        "define the libvirt network {name}, or set the host's network or bridge"
                    ),
                ),
                Ok(network) => {
                    match calls.rpc("virNetworkIsActive", name, |_| network.is_active()) {
                        Ok(true) => Check::good("network", name),
                        Ok(false) => Check::bad(
                            "network",
                            format!("network {name} is not active"),
                            format!("virsh net-start {name} && virsh net-autostart {name}"),
                        ),
                        Err(error) => {
                            Check::bad("network", error.to_string(), "virsh net-list --all")
                        }
                    }
                }
            }
        }
        Nic::Bridge(name) => {
            let found = calls.rpc("virInterfaceLookupByName", name, |conn| {
                conn.lookup_interface_by_name(name)
            });
            match found {
                Ok(_) => Check::good("bridge", name),
                Err(error) if error.is(sys::VIR_ERR_NO_INTERFACE) => Check::bad(
                    "bridge",
                    format!("the host has no interface {name}"),
                    format!("make the bridge {name} and put the uplink into it"),
                ),
                // Not every host has libvirt's interface driver.
                Err(error) => Check::good(
                    "bridge",
                    format!("{name} (not looked at: {})", error.message),
                ),
            }
        }
    }
}

fn kvm(calls: &Calls<'_>, wanted: DomainType) -> Check {
    match (wanted, Capabilities::read(calls, "kvm")) {
        (DomainType::Qemu, _) => Check::good("kvm", "not asked for: domainType is qemu (slow)"),
        (_, Ok(_)) => Check::good("kvm", "available"),
        (DomainType::Kvm, Err(error)) => Check::bad(
            "kvm",
            error.to_string(),
            "switch virtualisation on in the machine's firmware, load kvm_intel or kvm_amd, or set domainType: qemu (slow)",
        ),
        (DomainType::Auto, Err(error)) => Check::bad(
            "kvm",
            format!(
                "not available, so VMs run emulated, which is slow: {}",
                error.message
            ),
            "switch virtualisation on in the machine's firmware, load kvm_intel or kvm_amd; or set domainType: qemu if that is meant",
        ),
    }
}

fn firmware(calls: &Calls<'_>, wanted: DomainType, config: &KvmConfig) -> Check {
    let all_bios =
        !config.images.is_empty() && config.images.values().all(|i| i.firmware == Firmware::Bios);
    if all_bios {
        return Check::good("firmware", "bios for all images");
    }
    let found = match wanted {
        DomainType::Qemu => Capabilities::read(calls, "qemu"),
        DomainType::Kvm | DomainType::Auto => {
            Capabilities::read(calls, "kvm").or_else(|_| Capabilities::read(calls, "qemu"))
        }
    };
    match found {
        Ok(found) if found.uefi_without_secure_boot => {
            Check::good("firmware", "UEFI without secure boot")
        }
        Ok(found) if found.uefi => Check::bad(
            "firmware",
            "only firmware with secure boot is installed",
            "install the one without as well (Debian: ovmf has both; Fedora: edk2-ovmf)",
        ),
        Ok(_) => Check::bad(
            "firmware",
            "no UEFI firmware is installed",
            "install it (Debian: ovmf; Fedora: edk2-ovmf; NixOS: services.egress-proxies-hypervisor brings it), or set firmware: bios for the image",
        ),
        Err(error) => Check::bad(
            "firmware",
            error.to_string(),
            "install QEMU for x86_64 (qemu-system-x86) and its firmware (ovmf, edk2-ovmf)",
        ),
    }
}

fn memory(calls: &Calls<'_>, config: &KvmConfig) -> Check {
    let smallest = config
        .machine_types
        .values()
        .map(|m| m.memory_mib)
        .min()
        .unwrap_or(0);
    match calls.available_memory() {
        Ok(bytes) if bytes >> 20 >= smallest => {
            Check::good("memory", format!("{} MiB available", bytes >> 20))
        }
        Ok(bytes) => Check::bad(
            "memory",
            format!(
                "{} MiB available, the smallest machine type asks for {smallest}",
                bytes >> 20
            ),
            "stop something on the host, or configure a smaller machine type",
        ),
        Err(error) => Check::good("memory", format!("not told: {}", error.message)),
    }
}

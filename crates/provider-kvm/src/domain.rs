//! The domain that a Proxy's VM is, as libvirt's XML, written and read.

use egress_core::{InstallationId, ProxyKey, Uid};
use jiff::Timestamp;
use sha2::{Digest, Sha256};
use uuid::Uuid;

use crate::config::{Firmware, Format, MachineType, Nic};
use crate::xml::{BadXml, Element};

/// The namespace of the operator's own element in a domain's metadata.
pub const NAMESPACE: &str = "https://crawl.example.com/egress-proxies/kvm/1";

/// UIDs of Kubernetes are UUIDs and become the domain's; anything else is hashed into one.
pub fn uuid_of(uid: &Uid) -> Uuid {
    Uuid::parse_str(uid.as_str())
        .unwrap_or_else(|_| Uuid::new_v5(&Uuid::NAMESPACE_URL, uid.as_str().as_bytes()))
}

/// A MAC address out of the UID, the same each time: locally administered, unicast, 40 bits of
/// hash (24, as under QEMU's own prefix, would collide among a few thousand guests). Never
/// `fe:…`, which libvirt keeps for the host's side.
pub fn mac_of(uid: &Uid) -> String {
    let digest = Sha256::new()
        .chain_update(b"egress mac ")
        .chain_update(uid.as_str().as_bytes())
        .finalize();
    format!(
        "52:{:02x}:{:02x}:{:02x}:{:02x}:{:02x}",
        digest[0], digest[1], digest[2], digest[3], digest[4]
    )
}

/// Whose a domain is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Marks {
    pub uid: Uid,
    pub installation: InstallationId,
    pub created_at: Option<Timestamp>,
}

impl Marks {
    /// Reads the operator's element, or a document that holds it. libvirt may have left out its
    /// namespace. None: not ours.
    pub fn read(root: &Element) -> Option<Self> {
        let proxy = if root.name == "proxy" {
            root
        } else {
            root.find(&["metadata", "proxy"])?
        };
        if proxy.text_at(&["managed"]) != Some("true") {
            return None;
        }
        let created_at = proxy.text_at(&["created-at"]).and_then(|t| t.parse().ok());
        Some(Self {
            uid: Uid::new(proxy.text_at(&["uid"])?),
            installation: InstallationId::new(proxy.text_at(&["installation"])?),
            created_at,
        })
    }

    fn write(&self, key: &ProxyKey) -> Element {
        let field = |name: &str, text: &str| Element::new(&format!("egress:{name}")).text(text);
        let created = self.created_at.map(|t| field("created-at", &t.to_string()));
        Element::new("egress:proxy")
            .attr("xmlns:egress", NAMESPACE)
            .child(field("managed", "true"))
            .child(field("uid", self.uid.as_str()))
            .child(field("installation", self.installation.as_str()))
            .child(field("object", &key.to_string()))
            .children(created)
    }
}

/// A disk: its path on the host, as libvirt told it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    pub path: String,
    pub format: Format,
}

/// Everything that a domain is defined from.
#[derive(Debug, Clone)]
pub struct DomainSpec {
    pub name: String,
    pub key: ProxyKey,
    pub marks: Marks,
    pub machine: MachineType,
    /// kvm, or software emulation.
    pub kvm: bool,
    pub cpu_mode: Option<String>,
    pub firmware: Firmware,
    pub overlay: Disk,
    pub seed: Disk,
    pub nic: Nic,
}

impl DomainSpec {
    /// The document to define.
    pub fn to_xml(&self) -> String {
        let e = Element::new;
        e("domain")
            .attr("type", if self.kvm { "kvm" } else { "qemu" })
            .child(e("name").text(self.name.as_str()))
            .child(e("uuid").text(uuid_of(&self.marks.uid).to_string()))
            .child(e("title").text(format!("Egress proxy {}", self.key)))
            .child(e("metadata").child(self.marks.write(&self.key)))
            .child(
                e("memory")
                    .attr("unit", "MiB")
                    .text(self.machine.memory_mib.to_string()),
            )
            .child(e("vcpu").text(self.machine.vcpus.to_string()))
            .child(self.os())
            .child(e("features").child(e("acpi")).child(e("apic")))
            .child(self.cpu())
            .child(e("clock").attr("offset", "utc"))
            .child(e("on_poweroff").text("destroy"))
            .child(e("on_reboot").text("restart"))
            .child(e("on_crash").text("destroy"))
            .child(self.devices())
            .to_document()
    }

    fn os(&self) -> Element {
        let e = Element::new;
        let kind = e("type")
            .attr("arch", "x86_64")
            .attr("machine", "q35")
            .text("hvm");
        let boot = e("boot").attr("dev", "hd");
        match self.firmware {
            // libvirt picks the firmware and the VM's own NVRAM file: no path is ever pinned.
            Firmware::Uefi => {
                let feature = |name: &str| e("feature").attr("enabled", "no").attr("name", name);
                e("os")
                    .attr("firmware", "efi")
                    .child(kind)
                    .child(
                        e("firmware")
                            .child(feature("enrolled-keys"))
                            .child(feature("secure-boot")),
                    )
                    .child(boot)
            }
            Firmware::Bios => e("os").child(kind).child(boot),
        }
    }

    fn cpu(&self) -> Element {
        let default = if self.kvm {
            "host-passthrough"
        } else {
            "maximum"
        };
        let mode = self.cpu_mode.as_deref().unwrap_or(default);
        match mode {
            "host-passthrough" | "host-model" | "maximum" => Element::new("cpu").attr("mode", mode),
            model => Element::new("cpu")
                .attr("mode", "custom")
                .attr("match", "exact")
                .child(Element::new("model").attr("fallback", "allow").text(model)),
        }
    }

    fn devices(&self) -> Element {
        let e = Element::new;
        let disk = |disk: &Disk, target: &str| {
            // type="file" with libvirt's own path: the AppArmor helper gives QEMU no access to a
            // pool/volume reference.
            e("disk")
                .attr("type", "file")
                .attr("device", "disk")
                .child(
                    e("driver")
                        .attr("name", "qemu")
                        .attr("type", disk.format.as_str())
                        .attr("discard", "unmap"),
                )
                .child(e("source").attr("file", disk.path.as_str()))
                .child(e("target").attr("dev", target).attr("bus", "virtio"))
        };
        let (nic_type, source) = match &self.nic {
            Nic::Bridge(name) => ("bridge", e("source").attr("bridge", name.as_str())),
            Nic::Network(name) => ("network", e("source").attr("network", name.as_str())),
        };
        e("devices")
            .child(disk(&self.overlay, "vda"))
            // A read-only virtio disk: cloud kernels have no AHCI driver, and never see a CD on
            // SATA (virt-manager#445).
            .child(disk(&self.seed, "vdb").child(e("readonly")))
            .child(
                e("interface")
                    .attr("type", nic_type)
                    .child(e("mac").attr("address", mac_of(&self.marks.uid)))
                    .child(source)
                    .child(e("model").attr("type", "virtio")),
            )
            .child(
                e("serial")
                    .attr("type", "pty")
                    .child(e("target").attr("port", "0")),
            )
            .child(
                e("console")
                    .attr("type", "pty")
                    .child(e("target").attr("type", "serial").attr("port", "0")),
            )
            .child(
                e("channel").attr("type", "unix").child(
                    e("target")
                        .attr("type", "virtio")
                        .attr("name", "org.qemu.guest_agent.0"),
                ),
            )
            .child(
                e("rng")
                    .attr("model", "virtio")
                    .child(e("backend").attr("model", "random").text("/dev/urandom")),
            )
            .child(e("memballoon").attr("model", "virtio"))
    }
}

/// What is read from a domain that is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DomainView {
    pub marks: Option<Marks>,
    /// Of the first network card, in lower case.
    pub mac: Option<String>,
    /// Whether that card is on a libvirt network, which alone knows leases.
    pub on_network: bool,
    /// Whether the guest agent answers: asking one that does not costs seconds.
    pub agent_connected: bool,
    pub nvram: Option<String>,
    /// Paths of its disks.
    pub disks: Vec<String>,
}

impl DomainView {
    /// # Errors
    /// `BadXml`.
    pub fn parse(xml: &str) -> Result<Self, BadXml> {
        let root = Element::parse(xml)?;
        let devices = root.find(&["devices"]);
        let interface = devices.and_then(|d| d.find(&["interface"]));
        let agent_connected = devices.is_some_and(|d| {
            d.all("channel").any(|c| {
                c.find(&["target"]).is_some_and(|t| {
                    t.get("name") == Some("org.qemu.guest_agent.0")
                        && t.get("state") == Some("connected")
                })
            })
        });
        let disks = devices
            .iter()
            .flat_map(|d| d.all("disk"))
            .filter_map(|d| d.find(&["source"])?.get("file").map(str::to_owned))
            .collect();
        Ok(Self {
            marks: Marks::read(&root),
            mac: interface
                .and_then(|i| i.find(&["mac"])?.get("address"))
                .map(str::to_ascii_lowercase),
            on_network: interface.and_then(|i| i.get("type")) == Some("network"),
            agent_connected,
            nvram: root
                .text_at(&["os", "nvram"])
                .filter(|t| !t.is_empty())
                .map(str::to_owned),
            disks,
        })
    }
}

#[cfg(test)]
mod tests;

use std::process::Command;

use super::*;

fn spec() -> DomainSpec {
    let uid = Uid::new("6f1c1f0e-5b0a-4d3a-9c55-0d0a6c3b7f11");
    DomainSpec {
        name: egress_core::InstanceName::for_uid(&uid).to_string(),
        key: ProxyKey::new("default", "p1"),
        marks: Marks {
            uid,
            installation: InstallationId::new("test"),
            created_at: Some("2026-01-02T03:04:05Z".parse().unwrap()),
        },
        machine: MachineType {
            vcpus: 2,
            memory_mib: 1024,
        },
        kvm: true,
        cpu_mode: None,
        firmware: Firmware::Uefi,
        overlay: Disk {
            path: "/pool/proxy.qcow2".into(),
            format: Format::Qcow2,
        },
        seed: Disk {
            path: "/pool/proxy-seed.iso".into(),
            format: Format::Raw,
        },
        nic: Nic::Network("default".into()),
    }
}

/// The file is the truth; `EGRESS_UPDATE_GOLDEN=1` writes it anew for a reviewer to read.
#[track_caller]
fn golden(name: &str, spec: &DomainSpec) {
    let path = format!("{}/testdata/{name}.xml", env!("CARGO_MANIFEST_DIR"));
    let xml = spec.to_xml();
    if std::env::var_os("EGRESS_UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, &xml).unwrap();
    }
    assert_eq!(
        std::fs::read_to_string(&path).unwrap_or_default(),
        xml,
        "{path}"
    );
    // libvirt's own schema.
    let checked = Command::new("virt-xml-validate")
        .args([path.as_str(), "domain"])
        .output()
        .expect("virt-xml-validate: install libvirt-clients and libxml2-utils");
    assert!(
        checked.status.success(),
        "{name}: {}{}",
        String::from_utf8_lossy(&checked.stdout),
        String::from_utf8_lossy(&checked.stderr)
    );
}

#[test]
fn golden_domains() {
    golden("kvm-uefi-network", &spec());
    let emulated = DomainSpec {
        kvm: false,
        firmware: Firmware::Bios,
        nic: Nic::Bridge("br0".into()),
        ..spec()
    };
    golden("qemu-bios-bridge", &emulated);
    let nasty = DomainSpec {
        cpu_mode: Some("Nehalem".into()),
        overlay: Disk {
            path: "/pool/a & <b> \"c\" 'd'.qcow2".into(),
            format: Format::Raw,
        },
        key: ProxyKey::new("default", "a.b"),
        ..spec()
    };
    golden("cpu-model-odd-path", &nasty);
}

#[test]
fn what_is_written_is_read_back() {
    let spec = spec();
    let view = DomainView::parse(&spec.to_xml()).unwrap();
    assert_eq!(view.marks, Some(spec.marks.clone()));
    assert_eq!(view.mac, Some(mac_of(&spec.marks.uid)));
    assert!(view.on_network && !view.agent_connected);
    assert_eq!(view.disks, ["/pool/proxy.qcow2", "/pool/proxy-seed.iso"]);
}

#[test]
fn marks_are_read_with_and_without_their_namespace() {
    let bare = "<domain><metadata><proxy><managed>true</managed><uid>u</uid><installation>i</installation></proxy></metadata></domain>";
    let marks = Marks::read(&Element::parse(bare).unwrap()).unwrap();
    assert_eq!((marks.uid.as_str(), marks.created_at), ("u", None));
    let own = "<proxy><managed>true</managed><uid>u</uid><installation>i</installation><created-at>2026-01-02T03:04:05Z</created-at></proxy>";
    assert!(
        Marks::read(&Element::parse(own).unwrap())
            .unwrap()
            .created_at
            .is_some()
    );
    for foreign in [
        "<domain/>",
        "<domain><metadata><proxy><uid>u</uid><installation>i</installation></proxy></metadata></domain>",
        "<domain><metadata><other/></metadata></domain>",
    ] {
        assert_eq!(
            Marks::read(&Element::parse(foreign).unwrap()),
            None,
            "{foreign}"
        );
    }
}

#[test]
fn macs_are_stable_local_unicast_and_apart() {
    let macs: std::collections::BTreeSet<String> = (0..5000)
        .map(|i| mac_of(&Uid::new(format!("uid-{i}"))))
        .collect();
    assert_eq!(macs.len(), 5000, "collisions");
    for mac in &macs {
        let first = u8::from_str_radix(&mac[..2], 16).unwrap();
        assert_eq!(first & 0b11, 0b10, "{mac}");
    }
    assert_eq!(mac_of(&Uid::new("a")), mac_of(&Uid::new("a")));
}

#[test]
fn no_store_path_and_no_loader_is_ever_pinned() {
    let xml = spec().to_xml();
    for word in ["loader", "nvram", "emulator", "/nix"] {
        assert!(!xml.contains(word), "{word}");
    }
}

#[test]
fn an_agent_counts_when_libvirt_says_that_it_is_connected() {
    let xml = "<domain><devices><channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0' state='connected'/></channel><interface type='bridge'><mac address='52:54:00:AA:BB:CC'/></interface></devices><os><nvram template='/t'>/var/lib/libvirt/qemu/nvram/x_VARS.fd</nvram></os></domain>";
    let view = DomainView::parse(xml).unwrap();
    assert!(view.agent_connected && !view.on_network);
    assert_eq!(view.mac.as_deref(), Some("52:54:00:aa:bb:cc"));
    assert_eq!(
        view.nvram.as_deref(),
        Some("/var/lib/libvirt/qemu/nvram/x_VARS.fd")
    );
}

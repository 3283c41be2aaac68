//! The samples in the documentation are read as they stand.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

use egress_provider::config;
use egress_provider_kvm::{KvmType, Metrics};

fn read(path: &str) -> String {
    std::fs::read_to_string(format!("{}/../../{path}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

#[test]
fn the_sample_configuration_has_no_faults() {
    let kvm = KvmType::new(Metrics::default());
    let blueprints = config::parse(&read("docs/samples/kvm-providers.yaml"), &[&kvm])
        .map_err(|faults| faults.to_string())
        .unwrap();
    assert_eq!(blueprints[0].name, "kvm-home");
}

/// What the sample Proxy names is there in the sample configuration.
#[test]
fn the_sample_proxy_fits_the_sample_configuration() {
    let proxy = read("docs/samples/kvm-proxy.yaml");
    let file = read("docs/samples/kvm-providers.yaml");
    for field in ["provider", "zone", "machineType", "image"] {
        let line = proxy
            .lines()
            .find_map(|l| l.trim().strip_prefix(&format!("{field}: ")))
            .unwrap_or_else(|| panic!("{field} is not in the sample"));
        assert!(file.contains(line), "{field}: {line} is not configured");
    }
}

#[test]
fn every_field_is_in_the_reference() {
    let reference = read("docs/reference/kvm-config.md");
    let source = read("crates/provider-kvm/src/config.rs");
    let mut fields: Vec<&str> = Vec::new();
    for call in [
        "optional_str(\"",
        "required_str(\"",
        "optional_bool(\"",
        "optional_int(\"",
        "map(\"",
        "list(\"",
    ] {
        fields.extend(
            source
                .split(call)
                .skip(1)
                .filter_map(|rest| rest.split('"').next()),
        );
    }
    assert!(fields.len() > 15, "{fields:?}");
    for field in fields {
        assert!(
            reference.contains(&format!("`{field}`")),
            "{field} is not in the reference"
        );
    }
}

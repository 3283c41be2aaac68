//! What a placement means here, and the ids of instances.

use egress_core::spec::Placement;
use egress_core::{InstanceName, ProviderId};

use super::error::KvmError;
use crate::config::{ImageSpec, KvmConfig, MachineType, parse_image_url};

/// `hosts/<host>/domains/<name>`.
pub(crate) fn provider_id(host: &str, name: &str) -> ProviderId {
    ProviderId::new(format!("hosts/{host}/domains/{name}"))
}

/// Host and domain name of an id.
pub(crate) fn parse_id(id: &ProviderId) -> Result<(&str, &str), KvmError> {
    let mut parts = id.as_str().split('/');
    match (
        parts.next(),
        parts.next(),
        parts.next(),
        parts.next(),
        parts.next(),
    ) {
        (Some("hosts"), Some(host), Some("domains"), Some(name), None)
            if !host.is_empty() && !name.is_empty() =>
        {
            Ok((host, name))
        }
        _ => Err(KvmError::BadId(id.to_string())),
    }
}

/// Whether a domain may be one of ours, by its name alone.
pub(crate) fn is_instance_name(name: &str) -> bool {
    name.strip_prefix("proxy-").is_some_and(|rest| {
        rest.len() == 16
            && rest
                .bytes()
                .all(|b| b.is_ascii_lowercase() || (b'2'..=b'7').contains(&b))
    })
}

/// The names of an instance's volumes. Two installations that share a pool have different ones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct VolumeNames {
    pub overlay: String,
    pub seed: String,
}

impl VolumeNames {
    pub fn of(name: &InstanceName) -> Self {
        Self::of_text(name.as_str())
    }

    pub fn of_text(name: &str) -> Self {
        Self {
            overlay: format!("{name}.qcow2"),
            seed: format!("{name}-seed.iso"),
        }
    }

    /// The instance that a volume of that name belongs to.
    pub fn instance_of(volume: &str) -> Option<&str> {
        let name = volume
            .strip_suffix("-seed.iso")
            .or_else(|| volume.strip_suffix(".qcow2"))?;
        is_instance_name(name).then_some(name)
    }
}

/// A placement, looked up.
#[derive(Debug, Clone)]
pub(crate) struct Resolved {
    pub image: ImageSpec,
    pub machine: MachineType,
    /// Names of the hosts that may be chosen from: one, or all.
    pub hosts: Vec<String>,
}

fn list<'n>(names: impl Iterator<Item = &'n String>) -> String {
    let names: Vec<&str> = names.map(String::as_str).collect();
    if names.is_empty() {
        "none".to_owned()
    } else {
        names.join(", ")
    }
}

/// # Errors
/// [`KvmError::Placement`], which lists what there is.
pub(crate) fn resolve(config: &KvmConfig, placement: &Placement) -> Result<Resolved, KvmError> {
    let image = match placement.image.as_deref() {
        None => {
            return Err(KvmError::Placement(format!(
                "placement.image is required: an image key ({}) or an http(s) URL",
                list(config.images.keys())
            )));
        }
        Some(key) => match config.images.get(key) {
            Some(image) => image.clone(),
            None if key.contains("://") => ImageSpec::from_url(
                parse_image_url(key)
                    .map_err(|why| KvmError::Placement(format!("placement.image: {why}")))?,
            ),
            None => {
                return Err(KvmError::Placement(format!(
                    "placement.image {key:?} is neither an image key ({}) nor an http(s) URL",
                    list(config.images.keys())
                )));
            }
        },
    };
    let machine = match placement.machine_type.as_deref() {
        None if config.machine_types.len() == 1 => config.machine_types.values().next().copied(),
        None => None,
        Some(key) => config.machine_types.get(key).copied(),
    };
    let machine = machine.ok_or_else(|| {
        let known = list(config.machine_types.keys());
        KvmError::Placement(match &placement.machine_type {
            Some(key) => {
                format!("placement.machineType {key:?} does not exist; configured: {known}")
            }
            None => format!("placement.machineType is required: one of {known}"),
        })
    })?;
    let hosts = match placement.zone.as_deref() {
        None => config.hosts.iter().map(|h| h.name.clone()).collect(),
        Some(zone) if config.hosts.iter().any(|h| h.name == zone) => vec![zone.to_owned()],
        Some(zone) => {
            return Err(KvmError::Placement(format!(
                "placement.zone {zone:?} names no host; configured: {}",
                list(config.hosts.iter().map(|h| &h.name))
            )));
        }
    };
    Ok(Resolved {
        image,
        machine,
        hosts,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_and_names() {
        let id = provider_id("nas1", "proxy-abc");
        assert_eq!(id.as_str(), "hosts/nas1/domains/proxy-abc");
        assert_eq!(parse_id(&id).unwrap(), ("nas1", "proxy-abc"));
        for bad in [
            "",
            "hosts/a",
            "hosts//domains/x",
            "hosts/a/domains/",
            "hosts/a/domains/x/y",
            "zones/a/instances/x",
        ] {
            assert!(parse_id(&ProviderId::new(bad)).is_err(), "{bad}");
        }
        assert!(is_instance_name("proxy-zklycewkdo64v6wc"));
        for bad in [
            "proxy-",
            "proxy-zklycewkdo64v6w",
            "proxy-zklycewkdo64v6w1",
            "xproxy-zklycewkdo64v6wc",
            "proxy-ZKLYCEWKDO64V6WC",
        ] {
            assert!(!is_instance_name(bad), "{bad}");
        }
        let names = VolumeNames::of_text("proxy-zklycewkdo64v6wc");
        assert_eq!(
            VolumeNames::instance_of(&names.overlay),
            Some("proxy-zklycewkdo64v6wc")
        );
        assert_eq!(
            VolumeNames::instance_of(&names.seed),
            Some("proxy-zklycewkdo64v6wc")
        );
        assert_eq!(VolumeNames::instance_of("base-x.qcow2"), None);
        assert_eq!(VolumeNames::instance_of("proxy-mine.qcow2"), None);
    }
}

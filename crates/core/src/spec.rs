//! What a `Proxy` asks for, validated: raw objects are turned into these once, and what builds on
//! them cannot fail on a bad value any more.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use data_encoding::HEXLOWER;
use sha2::{Digest, Sha256};
use url::Url;

use crate::secret::SecretBytes;

/// What each field means is the provider's matter.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Placement {
    pub region: Option<String>,
    pub zone: Option<String>,
    pub machine_type: Option<String>,
    pub image: Option<String>,
}

/// How a proxy is probed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HealthCheck {
    /// Absolute http or https URL, fetched through the proxy.
    pub url: Url,
    pub interval: Duration,
    pub timeout: Duration,
    /// Successes in a row that turn unhealthy to healthy; at least 1.
    pub success_threshold: u32,
    /// Failures in a row that turn healthy to unhealthy; at least 1.
    pub failure_threshold: u32,
    pub expected_status: u16,
}

/// Where the user-data comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CloudInitSource {
    Inline(SecretBytes),
    SecretRef { name: String, key: String },
}

/// A Managed proxy's own part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ManagedSpec {
    /// The name of a configured provider instance, not its type.
    pub provider: String,
    pub placement: Placement,
    pub cloud_init: Option<CloudInitSource>,
}

/// Managed: the operator creates and owns the instance. External: somebody else's proxy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModeSpec {
    Managed(ManagedSpec),
    External { host: String },
}

/// A whole validated spec.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProxySpec {
    pub mode: ModeSpec,
    pub port: u16,
    pub attributes: BTreeMap<String, String>,
    pub health_check: HealthCheck,
    /// 0: never leased.
    pub max_leases: u32,
}

/// The hash of what a running instance was built from: provider, placement, port and user-data,
/// and nothing else. Every field is length-prefixed, so that no two different inputs share a text.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SpecHash(String);

impl SpecHash {
    pub fn of(
        provider: &str,
        placement: &Placement,
        port: u16,
        user_data: Option<&SecretBytes>,
    ) -> Self {
        let mut hash = Sha256::new();
        let mut field = |tag: &str, value: Option<&[u8]>| {
            hash.update(tag.as_bytes());
            match value {
                None => hash.update([0]),
                Some(bytes) => {
                    hash.update([1]);
                    hash.update((bytes.len() as u64).to_be_bytes());
                    hash.update(bytes);
                }
            }
        };
        field("provider", Some(provider.as_bytes()));
        field("region", placement.region.as_deref().map(str::as_bytes));
        field("zone", placement.zone.as_deref().map(str::as_bytes));
        field(
            "machineType",
            placement.machine_type.as_deref().map(str::as_bytes),
        );
        field("image", placement.image.as_deref().map(str::as_bytes));
        field("port", Some(&port.to_be_bytes()));
        field("userData", user_data.map(SecretBytes::expose_secret));
        Self(HEXLOWER.encode(&hash.finalize())[..32].to_owned())
    }

    /// A hash read back from an annotation.
    pub fn from_annotation(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for SpecHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn base() -> Placement {
        Placement {
            zone: Some("nas1".into()),
            ..Placement::default()
        }
    }

    #[test]
    fn the_hash_changes_with_each_part_and_only_with_these() {
        let data = SecretBytes::new("#cloud-config\n");
        let one = SpecHash::of("kvm", &base(), 3128, Some(&data));
        assert_eq!(one, SpecHash::of("kvm", &base(), 3128, Some(&data)));
        let others = [
            SpecHash::of("kvm2", &base(), 3128, Some(&data)),
            SpecHash::of("kvm", &Placement::default(), 3128, Some(&data)),
            SpecHash::of("kvm", &base(), 3129, Some(&data)),
            SpecHash::of("kvm", &base(), 3128, None),
            SpecHash::of("kvm", &base(), 3128, Some(&SecretBytes::new("x"))),
            // The same text in another field is another spec.
            SpecHash::of(
                "kvm",
                &Placement {
                    region: Some("nas1".into()),
                    ..Placement::default()
                },
                3128,
                Some(&data),
            ),
        ];
        for (i, other) in others.iter().enumerate() {
            assert_ne!(&one, other, "change {i} did not change the hash");
        }
    }

    #[test]
    fn no_user_data_and_empty_user_data_differ() {
        let none = SpecHash::of("a", &Placement::default(), 1, None);
        let empty = SpecHash::of("a", &Placement::default(), 1, Some(&SecretBytes::default()));
        assert_ne!(none, empty);
    }
}

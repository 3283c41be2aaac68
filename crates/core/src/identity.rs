//! Who is who: the names by which one proxy is known on each side.

use std::fmt;
use std::str::FromStr;

use data_encoding::BASE32_NOPAD;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// `namespace/name` of a Proxy object.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProxyKey {
    pub namespace: String,
    pub name: String,
}

impl ProxyKey {
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self {
            namespace: namespace.into(),
            name: name.into(),
        }
    }
}

impl fmt::Display for ProxyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// `namespace/name` did not have exactly that form.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not of the form namespace/name")]
pub struct BadProxyKey(pub String);

impl FromStr for ProxyKey {
    type Err = BadProxyKey;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        match s.split_once('/') {
            Some((namespace, name))
                if !namespace.is_empty() && !name.is_empty() && !name.contains('/') =>
            {
                Ok(Self::new(namespace, name))
            }
            _ => Err(BadProxyKey(s.to_owned())),
        }
    }
}

macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(String);

        impl $name {
            pub fn new(text: impl Into<String>) -> Self {
                Self(text.into())
            }

            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

text_id! {
    /// `metadata.uid` of a Proxy: a new one each time an object of that name is created.
    Uid
}
text_id! {
    /// A backend's own id of an instance, such as `hosts/nas1/domains/proxy-abc`. Opaque above
    /// the provider that made it.
    ProviderId
}
text_id! {
    /// Which operator installation made an instance: two that share a hypervisor must not
    /// collect each other's.
    InstallationId
}

/// The deterministic name of the instance behind one Proxy: `proxy-` and the first 16 characters
/// of the lower-case, unpadded base32 of SHA-256 of the object's UID. A create is keyed on it, so
/// one that is repeated after a crash finds the instance of the first.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InstanceName(String);

impl InstanceName {
    pub fn for_uid(uid: &Uid) -> Self {
        let digest = Sha256::digest(uid.as_str().as_bytes());
        let text = BASE32_NOPAD.encode(&digest).to_ascii_lowercase();
        Self(format!("proxy-{}", &text[..16]))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for InstanceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instance_name_is_stable_and_a_valid_dns_label() {
        let name = InstanceName::for_uid(&Uid::new("6f1c1f0e-5b0a-4d3a-9c55-0d0a6c3b7f11"));
        let again = InstanceName::for_uid(&Uid::new("6f1c1f0e-5b0a-4d3a-9c55-0d0a6c3b7f11"));
        assert_eq!(name, again);
        assert_eq!(name.as_str().len(), "proxy-".len() + 16);
        assert!(
            name.as_str()
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
        );
        // Computed apart from this code: sha256("a"), base32, lower case, 16 characters.
        assert_eq!(
            InstanceName::for_uid(&Uid::new("a")).as_str(),
            "proxy-zklycewkdo64v6wc"
        );
    }

    #[test]
    fn proxy_key_round_trips_and_refuses_other_forms() {
        let key: ProxyKey = "default/p1".parse().unwrap();
        assert_eq!(key.to_string(), "default/p1");
        for bad in ["p1", "/p1", "default/", "a/b/c", ""] {
            assert!(bad.parse::<ProxyKey>().is_err(), "{bad:?} was accepted");
        }
    }
}

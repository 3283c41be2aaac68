//! One proxy as the lease store and the edges see it: neither a Kubernetes object nor a backend
//! instance, but what a crawler needs to know.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::identity::{ProxyKey, Uid};

/// Where a Proxy stands in its life.
///
/// ```text
///            create            address + first verdict
/// Pending ----------> Provisioning ----------> Ready <----> Unhealthy
///    |  permanent error     |                     |             |
///    +--------> Failed <----+      (spec change, stopped, gone: back to Provisioning)
///            any phase, deletionTimestamp set ----------> Deleting
/// ```
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub enum Phase {
    #[default]
    Pending,
    Provisioning,
    Ready,
    Unhealthy,
    Deleting,
    Failed,
}

impl Phase {
    pub const ALL: [Phase; 6] = [
        Self::Pending,
        Self::Provisioning,
        Self::Ready,
        Self::Unhealthy,
        Self::Deleting,
        Self::Failed,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "Pending",
            Self::Provisioning => "Provisioning",
            Self::Ready => "Ready",
            Self::Unhealthy => "Unhealthy",
            Self::Deleting => "Deleting",
            Self::Failed => "Failed",
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A proxy, ready to be listed or leased.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProxyRecord {
    pub key: ProxyKey,
    pub uid: Uid,
    /// Host name, IPv4 or IPv6 (without brackets). None before there is an address.
    pub host: Option<String>,
    pub port: u16,
    pub attributes: BTreeMap<String, String>,
    pub phase: Phase,
    /// The prober's verdict; false while there is none.
    pub healthy: bool,
    /// How long the last successful probe took.
    pub latency_millis: Option<u64>,
    pub max_leases: u32,
    /// A deletion timestamp is set: no new leases, listed nowhere.
    pub deleting: bool,
}

impl ProxyRecord {
    /// `http://host:port`, an IPv6 address in exactly one pair of brackets.
    pub fn url(&self) -> Option<String> {
        self.host
            .as_deref()
            .map(|host| format!("http://{}", host_port(host, self.port)))
    }
}

/// `host:port` with exactly one pair of brackets around an IPv6 address, whether or not `host`
/// came with one (RFC 3986, section 3.2.2).
pub fn host_port(host: &str, port: u16) -> String {
    let bare = host
        .strip_prefix('[')
        .and_then(|h| h.strip_suffix(']'))
        .unwrap_or(host);
    match bare.parse::<IpAddr>() {
        Ok(IpAddr::V6(v6)) => format!("[{v6}]:{port}"),
        _ => format!("{bare}:{port}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ipv6_has_exactly_one_pair_of_brackets() {
        assert_eq!(host_port("2001:db8::1", 3128), "[2001:db8::1]:3128");
        assert_eq!(host_port("[2001:db8::1]", 3128), "[2001:db8::1]:3128");
        assert_eq!(host_port("192.0.2.1", 80), "192.0.2.1:80");
        assert_eq!(host_port("proxy.example", 8080), "proxy.example:8080");
    }
}

//! Which target addresses a proxy may reach. Decided by the resolved address, because a name can
//! resolve to anything (squid#1161: a proxy that handed out the cloud's metadata service).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::net::Net;

/// Never reached, whatever is allowed: addresses that hand out the machine's own credentials, that
/// mean "this host", or that no TCP peer has.
const NEVER: &[(&str, &str)] = &[
    ("169.254.0.0/16", "link-local, where clouds serve metadata"),
    ("fe80::/10", "link-local"),
    ("fd00:ec2::/32", "the metadata service of EC2"),
    ("fd20:ce::/32", "the metadata service of Compute Engine"),
    (
        "100.100.100.200/32",
        "the metadata service of Alibaba Cloud",
    ),
    ("168.63.129.16/32", "the wire server of Azure"),
    ("192.0.0.192/32", "the metadata service of Oracle Cloud"),
    ("0.0.0.0/8", "this host"),
    ("::/128", "this host"),
    ("224.0.0.0/4", "multicast"),
    ("ff00::/8", "multicast"),
    ("255.255.255.255/32", "broadcast"),
];

/// Reached only when allowed by name: the machine itself and the networks around it
/// (IANA's special-purpose registries, RFC 6890).
const INNER: &[(&str, &str)] = &[
    ("127.0.0.0/8", "loopback"),
    ("::1/128", "loopback"),
    ("10.0.0.0/8", "private"),
    ("172.16.0.0/12", "private"),
    ("192.168.0.0/16", "private"),
    ("100.64.0.0/10", "shared (carrier-grade NAT)"),
    ("192.0.0.0/24", "reserved for protocols"),
    ("198.18.0.0/15", "reserved for benchmarks"),
    ("240.0.0.0/4", "reserved"),
    ("fc00::/7", "private (unique local)"),
    ("fec0::/10", "private (site-local)"),
];

/// Why an address was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refusal {
    pub why: &'static str,
    /// An allowed network could admit it.
    pub may_be_allowed: bool,
}

/// The addresses a proxy may connect to: the public internet, and the networks allowed beside it.
#[derive(Debug, Clone)]
pub struct TargetPolicy {
    never: Vec<(Net, &'static str)>,
    inner: Vec<(Net, &'static str)>,
    allowed: Vec<Net>,
}

impl TargetPolicy {
    /// `allowed` admits loopback and private networks; it never admits link-local or metadata
    /// addresses.
    pub fn new(allowed: Vec<Net>) -> Self {
        let table = |rows: &'static [(&'static str, &'static str)]| {
            rows.iter()
                .filter_map(|(net, why)| net.parse().ok().map(|net| (net, *why)))
                .collect()
        };
        Self {
            never: table(NEVER),
            inner: table(INNER),
            allowed,
        }
    }

    /// # Errors
    /// Why this address is not reached.
    pub fn check(&self, address: IpAddr) -> Result<(), Refusal> {
        let address = address.to_canonical();
        // An address that stands for an IPv4 one (NAT64, 6to4) is as good as that one.
        let forms = [Some(address), embedded_v4(address).map(IpAddr::V4)];
        for form in forms.into_iter().flatten() {
            if let Some((_, why)) = self.never.iter().find(|(net, _)| net.contains(form)) {
                return Err(Refusal {
                    why,
                    may_be_allowed: false,
                });
            }
            if let Some((_, why)) = self.inner.iter().find(|(net, _)| net.contains(form))
                && !self.allowed.iter().any(|net| net.contains(form))
            {
                return Err(Refusal {
                    why,
                    may_be_allowed: true,
                });
            }
        }
        Ok(())
    }

    /// The networks that are never reached, for other programs' configuration (Squid).
    pub fn never() -> impl Iterator<Item = &'static str> {
        NEVER.iter().map(|(net, _)| *net)
    }

    /// The networks that are reached only when allowed, for other programs' configuration.
    pub fn inner() -> impl Iterator<Item = &'static str> {
        INNER.iter().map(|(net, _)| *net)
    }
}

/// The IPv4 address inside: IPv4-compatible (`::a.b.c.d`), NAT64 (RFC 6052, RFC 8215), 6to4
/// (RFC 3056).
fn embedded_v4(address: IpAddr) -> Option<Ipv4Addr> {
    let IpAddr::V6(v6) = address else {
        return None;
    };
    let s = v6.segments();
    let low = Ipv4Addr::from_bits((u32::from(s[6]) << 16) | u32::from(s[7]));
    match s {
        _ if v6 == Ipv6Addr::LOCALHOST || v6 == Ipv6Addr::UNSPECIFIED => None,
        [0, 0, 0, 0, 0, 0, ..] | [0x64, 0xff9b, 0, 0, 0, 0, ..] | [0x64, 0xff9b, 1, ..] => {
            Some(low)
        }
        [0x2002, a, b, ..] => Some(Ipv4Addr::from_bits((u32::from(a) << 16) | u32::from(b))),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(allowed: &[&str], address: &str) -> Option<Refusal> {
        let allowed = allowed.iter().map(|n| n.parse().unwrap()).collect();
        TargetPolicy::new(allowed)
            .check(address.parse().unwrap())
            .err()
    }

    #[test]
    fn every_row_of_the_tables_is_a_network() {
        let policy = TargetPolicy::new(Vec::new());
        assert_eq!(policy.never.len(), NEVER.len());
        assert_eq!(policy.inner.len(), INNER.len());
    }

    #[test]
    fn metadata_is_never_reached_in_whatever_form_it_is_written() {
        for address in [
            "169.254.169.254",
            "::ffff:169.254.169.254",
            "::169.254.169.254",
            "64:ff9b::a9fe:a9fe",
            "2002:a9fe:a9fe::1",
            "fe80::1",
            "fd00:ec2::254",
            "fd20:ce::254",
            "100.100.100.200",
            "168.63.129.16",
            "0.0.0.0",
            "::",
            "224.0.0.1",
            "ff02::1",
            "255.255.255.255",
        ] {
            let refused = refusal(&["0.0.0.0/0", "::/0"], address);
            assert_eq!(refused.map(|r| r.may_be_allowed), Some(false), "{address}");
        }
    }

    #[test]
    fn inner_networks_are_reached_only_when_allowed() {
        for address in [
            "127.0.0.1",
            "::1",
            "::ffff:127.0.0.1",
            "10.1.2.3",
            "172.31.0.1",
            "192.168.1.1",
            "100.64.0.1",
            "fd12::1",
            "64:ff9b::7f00:1",
        ] {
            assert_eq!(
                refusal(&[], address).map(|r| r.may_be_allowed),
                Some(true),
                "{address}"
            );
            assert_eq!(refusal(&["0.0.0.0/0", "::/0"], address), None, "{address}");
        }
        assert_eq!(refusal(&["127.0.0.0/8"], "127.66.0.3"), None);
        assert!(refusal(&["127.0.0.0/8"], "10.0.0.1").is_some());
    }

    #[test]
    fn the_public_internet_is_reached() {
        for address in [
            "1.1.1.1",
            "2606:4700::1111",
            "64:ff9b::101:101",
            "172.32.0.1",
        ] {
            assert_eq!(refusal(&[], address), None, "{address}");
        }
    }
}

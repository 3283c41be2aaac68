//! Which of a guest's addresses counts.

use std::net::{IpAddr, Ipv6Addr};

use virt::domain::Domain;
use virt::sys;

use crate::domain::DomainView;
use crate::host::calls::{Calls, GuestAddress};

/// Asks the sources in order (DHCP leases, guest agent, the host's ARP table) and takes the first
/// answer that holds a usable address of the operator's own network card. A source that fails
/// knows nothing: an agent that is not up yet is no error.
pub fn find(calls: &Calls<'_>, domain: &Domain, view: &DomainView, name: &str) -> Option<IpAddr> {
    let mac = view.mac.as_deref()?;
    let sources = [
        (
            sys::VIR_DOMAIN_INTERFACE_ADDRESSES_SRC_LEASE,
            view.on_network,
        ),
        (
            sys::VIR_DOMAIN_INTERFACE_ADDRESSES_SRC_AGENT,
            view.agent_connected,
        ),
        (sys::VIR_DOMAIN_INTERFACE_ADDRESSES_SRC_ARP, true),
    ];
    sources
        .into_iter()
        .filter(|(_, asked)| *asked)
        .find_map(|(source, _)| {
            let found = calls.interface_addresses(domain, source, name).ok()?;
            choose(&found, mac)
        })
}

/// The first usable address of the card with that MAC (in any case), IPv4 before IPv6.
pub fn choose(found: &[GuestAddress], mac: &str) -> Option<IpAddr> {
    let usable = || {
        found
            .iter()
            .filter(|a| {
                a.mac
                    .as_deref()
                    .is_some_and(|m| m.eq_ignore_ascii_case(mac))
            })
            .filter_map(|a| a.address.parse::<IpAddr>().ok())
            .filter(|ip| is_routable(*ip))
    };
    usable().find(IpAddr::is_ipv4).or_else(|| usable().next())
}

/// Never loopback, link-local, unspecified, multicast or broadcast. Private ranges do count: they
/// are what a home network has.
fn is_routable(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(v4) => {
            !(v4.is_loopback()
                || v4.is_link_local()
                || v4.is_unspecified()
                || v4.is_multicast()
                || v4.is_broadcast()
                || v4.octets()[0] == 0)
        }
        IpAddr::V6(v6) => {
            !(v6.is_loopback()
                || v6.is_unspecified()
                || v6.is_multicast()
                || is_v6_link_local(v6)
                || v6.to_ipv4_mapped().is_some())
        }
    }
}

/// fe80::/10 (RFC 4291, section 2.5.6).
fn is_v6_link_local(ip: Ipv6Addr) -> bool {
    ip.segments()[0] & 0xffc0 == 0xfe80
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: &str = "52:0a:0b:0c:0d:0e";

    fn seen(list: &[(&str, &str)]) -> Vec<GuestAddress> {
        list.iter()
            .map(|(mac, address)| GuestAddress {
                mac: (!mac.is_empty()).then(|| (*mac).to_owned()),
                address: (*address).to_owned(),
            })
            .collect()
    }

    #[track_caller]
    fn chosen(list: &[(&str, &str)], expect: Option<&str>) {
        assert_eq!(choose(&seen(list), MAC), expect.map(|e| e.parse().unwrap()));
    }

    #[test]
    fn only_our_own_card_counts() {
        let docker = ("02:42:ac:11:00:01", "172.17.0.1");
        chosen(
            &[
                ("00:00:00:00:00:00", "127.0.0.1"),
                docker,
                (MAC, "10.0.0.5"),
            ],
            Some("10.0.0.5"),
        );
        chosen(&[docker, ("", "10.0.0.9")], None);
        chosen(&[("52:0A:0B:0C:0D:0E", "10.0.0.5")], Some("10.0.0.5"));
    }

    #[test]
    fn v4_before_v6_and_a_global_v6_alone_will_do() {
        chosen(&[(MAC, "2001:db8::1"), (MAC, "10.0.0.5")], Some("10.0.0.5"));
        chosen(
            &[(MAC, "fe80::1"), (MAC, "2001:db8::1")],
            Some("2001:db8::1"),
        );
        chosen(&[(MAC, "fd00::5")], Some("fd00::5"));
    }

    #[test]
    fn what_cannot_be_reached_from_outside_never_counts() {
        for bad in [
            "127.0.0.1",
            "169.254.1.1",
            "0.0.0.0",
            "::1",
            "::",
            "fe80::1",
            "febf::1",
            "ff02::1",
            "255.255.255.255",
            "::ffff:10.0.0.1",
            "x",
        ] {
            chosen(&[(MAC, bad)], None);
        }
        chosen(&[], None);
    }
}

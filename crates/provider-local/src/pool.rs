//! Which address and port an instance gets: the same one again while it is free, from its name.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;

use egress_core::InstanceName;
use egress_forward_proxy::Net;
use sha2::{Digest, Sha256};

/// Beyond what is known to be taken, this many are tried: others on the machine may hold some.
const FURTHER: usize = 256;

/// Where instances may listen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pool {
    pub(crate) nets: Vec<Net>,
    /// None: each instance has the port it asked for.
    pub(crate) ports: Option<RangeInclusive<u16>>,
}

impl Pool {
    /// Where to try, in this order. Addresses that nobody uses come before those that are used with
    /// another port.
    pub(crate) fn candidates(
        &self,
        name: &InstanceName,
        port: u16,
        used: &BTreeSet<SocketAddr>,
    ) -> Vec<SocketAddr> {
        let limit = used.len() + FURTHER;
        let start = number_of(name);
        match &self.ports {
            None => {
                let addresses: BTreeSet<IpAddr> = used.iter().map(SocketAddr::ip).collect();
                let all: Vec<IpAddr> = self.addresses(start, limit).collect();
                let (shared, own): (Vec<IpAddr>, Vec<IpAddr>) =
                    all.into_iter().partition(|a| addresses.contains(a));
                own.into_iter()
                    .chain(shared)
                    .map(|address| SocketAddr::new(address, port))
                    .filter(|candidate| !used.contains(candidate))
                    .collect()
            }
            Some(ports) => {
                let count = u64::from(ports.end() - ports.start()) + 1;
                self.addresses(start, 16)
                    .flat_map(|address| {
                        (0..count).map(move |i| {
                            let offset = (start.wrapping_add(i)) % count;
                            // Below the number of ports, so it fits.
                            let offset = u16::try_from(offset).unwrap_or_default();
                            SocketAddr::new(address, ports.start() + offset)
                        })
                    })
                    .filter(|candidate| !used.contains(candidate))
                    .take(limit)
                    .collect()
            }
        }
    }

    /// Up to `limit` usable addresses, from `start` on and round.
    fn addresses(&self, start: u64, limit: usize) -> impl Iterator<Item = IpAddr> + '_ {
        let total: u128 = self
            .nets
            .iter()
            .fold(0u128, |sum, net| sum.saturating_add(net.size()));
        let start = u128::from(start) % total.max(1);
        (0..total)
            .take(limit.saturating_mul(2))
            .filter_map(move |i| self.nth((start + i) % total))
            .take(limit)
    }

    fn nth(&self, mut index: u128) -> Option<IpAddr> {
        for net in &self.nets {
            let size = net.size();
            if index >= size {
                index -= size;
                continue;
            }
            // The ends of an IPv4 network are its own and its broadcast address, the first of an
            // IPv6 one is the routers' (RFC 4291, section 2.6.1).
            let first_is_special = size > 2;
            let last_is_special = net.first().is_ipv4() && size > 2;
            if (first_is_special && index == 0) || (last_is_special && index == size - 1) {
                return None;
            }
            return net.nth(index);
        }
        None
    }
}

/// Evenly spread over all names.
pub(crate) fn number_of(name: &InstanceName) -> u64 {
    let digest = Sha256::digest(name.as_str().as_bytes());
    digest
        .iter()
        .take(8)
        .fold(0, |number, byte| (number << 8) | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use egress_core::Uid;
    use proptest::prelude::*;

    use super::*;

    fn pool(nets: &[&str], ports: Option<RangeInclusive<u16>>) -> Pool {
        Pool {
            nets: nets.iter().map(|n| n.parse().unwrap()).collect(),
            ports,
        }
    }

    fn name(n: u32) -> InstanceName {
        InstanceName::for_uid(&Uid::new(n.to_string()))
    }

    #[test]
    fn each_gets_an_address_of_its_own_until_they_run_out() {
        let pool = pool(&["192.0.2.8/29"], None);
        let mut used = BTreeSet::new();
        for n in 0..6 {
            let first = pool.candidates(&name(n), 3128, &used)[0];
            assert_eq!(first.port(), 3128);
            let last_byte = first.to_string();
            assert!(!last_byte.starts_with("192.0.2.8:") && !last_byte.starts_with("192.0.2.15:"));
            assert!(used.iter().all(|u: &SocketAddr| u.ip() != first.ip()));
            used.insert(first);
        }
        assert!(pool.candidates(&name(9), 3128, &used).is_empty());
        assert_eq!(pool.candidates(&name(9), 3129, &used).len(), 6);
    }

    #[test]
    fn ports_come_from_the_range() {
        let pool = pool(&["127.0.0.1"], Some(20000..=20002));
        let mut used = BTreeSet::new();
        for n in 0..3 {
            used.insert(pool.candidates(&name(n), 3128, &used)[0]);
        }
        let ports: Vec<u16> = used.iter().map(SocketAddr::port).collect();
        assert_eq!(ports, [20000, 20001, 20002]);
        assert!(pool.candidates(&name(3), 3128, &used).is_empty());
    }

    #[test]
    fn a_whole_internet_of_addresses_is_no_trouble() {
        let pool = pool(&["::/0", "10.0.0.0/8"], None);
        let found = pool.candidates(&name(1), 3128, &BTreeSet::new());
        assert_eq!(found.len(), FURTHER);
        assert_eq!(found, pool.candidates(&name(1), 3128, &BTreeSet::new()));
    }

    proptest! {
        #[test]
        fn candidates_are_free_distinct_and_within(
            n in any::<u32>(),
            prefix in 20u8..=32,
            taken in proptest::collection::btree_set(0u8..255, 0..40),
        ) {
            let pool = Pool {
                nets: vec![Net::new(IpAddr::from([127, 66, 1, 0]), prefix)],
                ports: None,
            };
            let used: BTreeSet<SocketAddr> = taken
                .iter()
                .map(|last| SocketAddr::from(([127, 66, 1, *last], 3128)))
                .collect();
            let found = pool.candidates(&name(n), 3128, &used);
            let distinct: BTreeSet<_> = found.iter().collect();
            prop_assert_eq!(distinct.len(), found.len());
            for candidate in &found {
                prop_assert!(!used.contains(candidate));
                prop_assert!(pool.nets[0].contains(candidate.ip()));
            }
        }
    }
}

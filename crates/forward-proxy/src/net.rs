//! Address networks.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

/// A network such as `10.0.0.0/8` or `fd00::/8`; a bare address is a network of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Net {
    first: IpAddr,
    prefix: u8,
}

/// The text is no network.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadNet {
    #[error("{0:?} is not a network: give an address with a prefix length such as \"10.0.0.0/8\"")]
    Form(String),
    #[error("{text:?} has host bits set: the network is \"{network}\"")]
    HostBits { text: String, network: Net },
}

impl Net {
    /// The network of `prefix` bits that `address` is in; a prefix that is too long is the
    /// address alone.
    pub fn new(address: IpAddr, prefix: u8) -> Self {
        let address = address.to_canonical();
        let prefix = prefix.min(width(address));
        let host_bits = width(address) - prefix;
        let bits = clear_low(bits_of(address), host_bits);
        Self {
            first: address_like(address, bits),
            prefix,
        }
    }

    /// `127.0.0.0/8` and `::1`.
    pub fn loopback() -> Vec<Self> {
        vec![
            Self::new(IpAddr::from([127, 0, 0, 0]), 8),
            Self::new(IpAddr::from([0, 0, 0, 0, 0, 0, 0, 1u16]), 128),
        ]
    }

    /// An IPv4 address written as IPv6 (`::ffff:10.0.0.1`, what a dual-stack listener sees) is in
    /// the IPv4 networks.
    pub fn contains(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        address.is_ipv4() == self.first.is_ipv4()
            && clear_low(bits_of(address), width(address) - self.prefix) == bits_of(self.first)
    }

    /// The first address.
    pub fn first(&self) -> IpAddr {
        self.first
    }

    pub fn prefix(&self) -> u8 {
        self.prefix
    }

    /// How many addresses it holds; `u128::MAX` for all of IPv6.
    pub fn size(&self) -> u128 {
        1u128
            .checked_shl(u32::from(width(self.first) - self.prefix))
            .unwrap_or(u128::MAX)
    }

    /// The address at `index`; None past the end.
    pub fn nth(&self, index: u128) -> Option<IpAddr> {
        (index < self.size()).then(|| address_like(self.first, bits_of(self.first) + index))
    }

    /// Does it hold addresses from the whole internet (`0.0.0.0/0`, `::/0`)?
    pub fn is_everything(&self) -> bool {
        self.prefix == 0
    }
}

fn width(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

fn bits_of(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => u128::from(v4.to_bits()),
        IpAddr::V6(v6) => v6.to_bits(),
    }
}

fn address_like(like: IpAddr, bits: u128) -> IpAddr {
    match like {
        // The bits come from an IPv4 network, so they fit.
        IpAddr::V4(_) => IpAddr::V4(u32::try_from(bits).unwrap_or(u32::MAX).into()),
        IpAddr::V6(_) => IpAddr::V6(bits.into()),
    }
}

fn clear_low(bits: u128, low: u8) -> u128 {
    let mask = u128::MAX.checked_shl(u32::from(low)).unwrap_or(0);
    bits & mask
}

impl fmt::Display for Net {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.first, self.prefix)
    }
}

impl FromStr for Net {
    type Err = BadNet;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad = || BadNet::Form(text.chars().take(80).collect());
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => {
                let address: IpAddr = address.parse().map_err(|_| bad())?;
                if !prefix.bytes().all(|b| b.is_ascii_digit()) {
                    return Err(bad());
                }
                let prefix: u8 = prefix.parse().map_err(|_| bad())?;
                if prefix > width(address) {
                    return Err(bad());
                }
                (address, prefix)
            }
            None => {
                let address: IpAddr = text.parse().map_err(|_| bad())?;
                (address, width(address))
            }
        };
        let network = Self::new(address, prefix);
        if address.to_canonical() == address && network.first != address {
            return Err(BadNet::HostBits {
                text: text.to_owned(),
                network,
            });
        }
        Ok(network)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn net(text: &str) -> Net {
        text.parse().unwrap()
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn holds_its_own_addresses_and_no_others() {
        for (network, inside, outside) in [
            ("10.0.0.0/8", "10.255.255.255", "11.0.0.0"),
            ("192.0.2.4", "192.0.2.4", "192.0.2.5"),
            ("0.0.0.0/0", "203.0.113.9", "2001:db8::1"),
            ("::/0", "2001:db8::1", "203.0.113.9"),
            ("fe80::/10", "febf::1", "fec0::1"),
            ("::1", "::1", "::2"),
            ("10.0.0.0/8", "::ffff:10.1.2.3", "::10.1.2.3"),
        ] {
            assert!(net(network).contains(ip(inside)), "{network} {inside}");
            assert!(!net(network).contains(ip(outside)), "{network} {outside}");
        }
    }

    #[test]
    fn reads_what_it_writes_and_refuses_other_texts() {
        for text in ["127.0.0.0/8", "::1/128", "2001:db8::/32", "0.0.0.0/0"] {
            assert_eq!(net(text).to_string(), text);
        }
        for text in [
            "",
            "10.0.0.0/33",
            "::/129",
            "10.0.0.0/+8",
            "10/8",
            "a/8",
            "10.0.0.0/",
        ] {
            assert!(text.parse::<Net>().is_err(), "{text:?} was accepted");
        }
        let refused = "10.1.2.3/8".parse::<Net>().unwrap_err().to_string();
        assert!(refused.contains("10.0.0.0/8"), "{refused}");
    }

    #[test]
    fn counts_and_numbers_its_addresses() {
        assert_eq!(net("127.66.0.0/16").size(), 65536);
        assert_eq!(net("127.66.0.0/16").nth(258), Some(ip("127.66.1.2")));
        assert_eq!(net("192.0.2.1").nth(1), None);
        assert_eq!(net("::/0").size(), u128::MAX);
        assert_eq!(net("fd00::/64").nth(10), Some(ip("fd00::a")));
    }
}

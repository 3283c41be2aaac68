//! Crawl targets, compared as lower-cased host names.

use std::fmt;

/// The host a crawler works against: `Example.com`, `https://example.com/x`, `example.com:443`
/// and `example.com.` are all the target `example.com`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Target(String);

/// The text names no host.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("target {0:?} names no host: give a host name such as \"example.com\"")]
pub struct BadTarget(pub String);

impl Target {
    /// Takes what people write for a host: with a scheme, a path, a user, a port, a trailing dot
    /// or brackets around an IPv6 address.
    pub fn parse(text: &str) -> Result<Self, BadTarget> {
        let bad = || BadTarget(text.chars().take(200).collect());
        let rest = text.trim();
        let rest = rest.split_once("://").map_or(rest, |(_, after)| after);
        let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
        let host_port = authority
            .rsplit_once('@')
            .map_or(authority, |(_, after)| after);
        let host = if let Some(inner) = host_port.strip_prefix('[') {
            inner
                .split_once(']')
                .map(|(host, _)| host)
                .ok_or_else(bad)?
        } else if host_port.matches(':').count() == 1 {
            host_port.split(':').next().unwrap_or_default()
        } else {
            host_port
        };
        let host = host.trim_end_matches('.').to_lowercase();
        if host.is_empty()
            || host.len() > 253
            || host.chars().any(|c| c.is_whitespace() || c.is_control())
        {
            return Err(bad());
        }
        Ok(Self(host))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_people_write_is_one_host() {
        for text in [
            "example.com",
            "EXAMPLE.com",
            "example.com.",
            "example.com:443",
            "https://example.com",
            "https://user:pw@Example.com:8443/path?q=1#f",
            " example.com ",
        ] {
            assert_eq!(
                Target::parse(text).unwrap().as_str(),
                "example.com",
                "{text:?}"
            );
        }
        for text in [
            "2001:DB8::1",
            "[2001:db8::1]",
            "[2001:db8::1]:443",
            "http://[2001:db8::1]:80/",
        ] {
            assert_eq!(
                Target::parse(text).unwrap().as_str(),
                "2001:db8::1",
                "{text:?}"
            );
        }
    }

    #[test]
    fn what_names_no_host_is_refused() {
        for text in ["", " ", ".", "https://", "/path", "a b", "[::1", ":80"] {
            assert!(Target::parse(text).is_err(), "{text:?} was accepted");
        }
    }
}

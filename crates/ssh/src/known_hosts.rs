//! `known_hosts` files, read and matched as sshd(8) describes them (section "SSH_KNOWN_HOSTS FILE
//! FORMAT").
//!
//! Our own because a library that forgives here is a hole: `@revoked` must refuse, a host that is
//! only vouched for by a `@cert-authority` must be refused with that reason (certificates are not
//! verified here), several keys of one type must not read as "changed", and one broken line must
//! not take the whole file with it. Keys are compared as the bytes on the wire, so a key type
//! that this program cannot use is no error.

use std::fmt;
use std::path::{Path, PathBuf};

use data_encoding::{BASE64, BASE64_NOPAD};
use hmac::{Hmac, KeyInit, Mac};
use sha1::Sha1;
use sha2::{Digest, Sha256};

/// One usable line.
#[derive(Debug, Clone)]
struct Entry {
    line: usize,
    marker: Marker,
    hosts: Hosts,
    /// Such as `ssh-ed25519`.
    key_type: String,
    /// The public key as it goes over the wire.
    blob: Vec<u8>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Marker {
    None,
    CertAuthority,
    Revoked,
}

#[derive(Debug, Clone)]
enum Hosts {
    Patterns(Vec<String>),
    Hashed { salt: Vec<u8>, hash: Vec<u8> },
}

/// A parsed file.
#[derive(Debug, Clone)]
pub struct KnownHosts {
    path: PathBuf,
    entries: Vec<Entry>,
    bad_lines: Vec<(usize, &'static str)>,
}

/// Why a host key was not accepted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HostKeyRefused {
    #[error(
        "host key of {host} is unknown: {key_type} {fingerprint}. If that fingerprint is right, add this line to {}: {line}", path.display()
    )]
    Unknown {
        host: String,
        key_type: String,
        fingerprint: String,
        path: PathBuf,
        /// What to add.
        line: String,
    },
    #[error(
        "HOST KEY CHANGED: {host} shows {key_type} {fingerprint}, but {}:{recorded_at} records another key. Either the host was installed anew (then replace that line by: {line}) or somebody answers in its place", path.display()
    )]
    Changed {
        host: String,
        key_type: String,
        fingerprint: String,
        path: PathBuf,
        recorded_at: usize,
        line: String,
    },
    #[error("host key {key_type} {fingerprint} of {host} is marked @revoked at {}:{revoked_at}", path.display())]
    Revoked {
        host: String,
        key_type: String,
        fingerprint: String,
        path: PathBuf,
        revoked_at: usize,
    },
    #[error(
        "{host} is known only through the @cert-authority at {}:{authority_at}, and host certificates are not supported. Add the host's own key: {line}", path.display()
    )]
    OnlyCertAuthority {
        host: String,
        path: PathBuf,
        authority_at: usize,
        line: String,
    },
    #[error("{host} showed a host certificate although none was asked for")]
    Certificate { host: String },
}

impl KnownHosts {
    /// Reads a file's text. Lines that cannot be read are left out and told by [`Self::bad_lines`].
    pub fn parse(path: impl Into<PathBuf>, text: &str) -> Self {
        let mut entries = Vec::new();
        let mut bad_lines = Vec::new();
        for (i, raw) in text.lines().enumerate() {
            let line = raw.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            match parse_line(i + 1, line) {
                Ok(entry) => entries.push(entry),
                Err(why) => bad_lines.push((i + 1, why)),
            }
        }
        Self {
            path: path.into(),
            entries,
            bad_lines,
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Line numbers that could not be read, and why.
    pub fn bad_lines(&self) -> &[(usize, &'static str)] {
        &self.bad_lines
    }

    /// The types of the keys that vouch for the host, in the order of the file: only algorithms
    /// for these are to be offered, or the server shows a key that is not held although another
    /// one is.
    pub fn key_types(&self, host: &HostName) -> Vec<&str> {
        let mut types: Vec<&str> = Vec::new();
        for entry in &self.entries {
            if entry.marker == Marker::None
                && entry.matches(host)
                && !types.contains(&entry.key_type.as_str())
            {
                types.push(&entry.key_type);
            }
        }
        types
    }

    /// Whether the host may be who it says, by the key it showed (as it goes over the wire).
    ///
    /// # Errors
    /// Every answer but "yes".
    pub fn check(&self, host: &HostName, blob: &[u8]) -> Result<(), Box<HostKeyRefused>> {
        let key_type = blob_type(blob).unwrap_or("unknown").to_owned();
        let fingerprint = fingerprint(blob);
        let line = format!("{host} {key_type} {}", BASE64.encode(blob));
        let matching = || self.entries.iter().filter(|e| e.matches(host));
        // Revocation wins over everything, wherever in the file it stands.
        if let Some(revoked) =
            matching().find(|e| e.marker == Marker::Revoked && e.blob.as_slice() == blob)
        {
            return Err(Box::new(HostKeyRefused::Revoked {
                host: host.to_string(),
                key_type,
                fingerprint,
                path: self.path.clone(),
                revoked_at: revoked.line,
            }));
        }
        let plain = || matching().filter(|e| e.marker == Marker::None);
        if plain().any(|e| e.blob.as_slice() == blob) {
            return Ok(());
        }
        if let Some(other) = plain().find(|e| e.key_type == key_type) {
            return Err(Box::new(HostKeyRefused::Changed {
                host: host.to_string(),
                key_type,
                fingerprint,
                path: self.path.clone(),
                recorded_at: other.line,
                line,
            }));
        }
        if let Some(authority) = matching().find(|e| e.marker == Marker::CertAuthority)
            && plain().next().is_none()
        {
            return Err(Box::new(HostKeyRefused::OnlyCertAuthority {
                host: host.to_string(),
                path: self.path.clone(),
                authority_at: authority.line,
                line,
            }));
        }
        Err(Box::new(HostKeyRefused::Unknown {
            host: host.to_string(),
            key_type,
            fingerprint,
            path: self.path.clone(),
            line,
        }))
    }
}

/// A host as `known_hosts` writes it: the bare name for port 22, else `[name]:port`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostName(String);

impl HostName {
    pub fn new(host: &str, port: u16) -> Self {
        let host = host.to_ascii_lowercase();
        Self(if port == 22 {
            host
        } else {
            format!("[{host}]:{port}")
        })
    }
}

impl fmt::Display for HostName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Entry {
    fn matches(&self, host: &HostName) -> bool {
        match &self.hosts {
            Hosts::Hashed { salt, hash } => Hmac::<Sha1>::new_from_slice(salt)
                .is_ok_and(|mac| mac.chain_update(&host.0).verify_slice(hash).is_ok()),
            Hosts::Patterns(patterns) => {
                let mut found = false;
                for pattern in patterns {
                    match pattern.strip_prefix('!') {
                        // A negation that matches takes the whole line out.
                        Some(negated) if wildcard(negated, &host.0) => return false,
                        Some(_) => {}
                        None => found |= wildcard(pattern, &host.0),
                    }
                }
                found
            }
        }
    }
}

fn parse_line(number: usize, line: &str) -> Result<Entry, &'static str> {
    let mut fields = line.split_ascii_whitespace();
    let mut first = fields.next().ok_or("empty")?;
    let marker = match first {
        "@revoked" => Marker::Revoked,
        "@cert-authority" => Marker::CertAuthority,
        other if other.starts_with('@') => return Err("unknown marker"),
        _ => Marker::None,
    };
    if marker != Marker::None {
        first = fields.next().ok_or("a marker without a host")?;
    }
    let hosts = match first.strip_prefix("|1|") {
        Some(rest) => {
            let (salt, hash) = rest.split_once('|').ok_or("broken hashed host")?;
            Hosts::Hashed {
                salt: BASE64.decode(salt.as_bytes()).map_err(|_| "broken salt")?,
                hash: BASE64.decode(hash.as_bytes()).map_err(|_| "broken hash")?,
            }
        }
        None if first.starts_with('|') => return Err("unknown kind of hashed host"),
        None => Hosts::Patterns(first.split(',').map(str::to_ascii_lowercase).collect()),
    };
    let key_type = fields.next().ok_or("no key type")?;
    let blob = fields.next().ok_or("no key")?;
    let blob = BASE64
        .decode(blob.as_bytes())
        .map_err(|_| "the key is not base64")?;
    if blob_type(&blob) != Some(key_type) {
        return Err("the key is not of the type that the line says");
    }
    Ok(Entry {
        line: number,
        marker,
        hosts,
        key_type: key_type.to_owned(),
        blob,
    })
}

/// The type that a key blob begins with (RFC 4253, section 6.6).
fn blob_type(blob: &[u8]) -> Option<&str> {
    let (len, rest) = blob.split_first_chunk::<4>()?;
    let len = usize::try_from(u32::from_be_bytes(*len)).ok()?;
    std::str::from_utf8(rest.get(..len)?).ok()
}

/// `SHA256:…` as ssh-keygen prints it.
pub(crate) fn fingerprint(blob: &[u8]) -> String {
    format!("SHA256:{}", BASE64_NOPAD.encode(&Sha256::digest(blob)))
}

/// `*` any number of characters, `?` exactly one. Iterative, so that a hostile pattern costs at
/// most the product of the lengths.
fn wildcard(pattern: &str, text: &str) -> bool {
    let (pattern, text) = (pattern.as_bytes(), text.as_bytes());
    let (mut p, mut t) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while t < text.len() {
        match pattern.get(p) {
            Some(b'*') => {
                star = Some((p, t));
                p += 1;
            }
            Some(b'?') => {
                p += 1;
                t += 1;
            }
            Some(c) if *c == text[t] => {
                p += 1;
                t += 1;
            }
            _ => match star {
                Some((at, from)) => {
                    p = at + 1;
                    t = from + 1;
                    star = Some((at, from + 1));
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|c| *c == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blob(kind: &str, seed: u8) -> Vec<u8> {
        let mut blob = u32::try_from(kind.len()).unwrap().to_be_bytes().to_vec();
        blob.extend(kind.as_bytes());
        blob.extend([0, 0, 0, 32]);
        blob.extend([seed; 32]);
        blob
    }

    fn line(hosts: &str, kind: &str, seed: u8) -> String {
        format!("{hosts} {kind} {}\n", BASE64.encode(&blob(kind, seed)))
    }

    fn hashed(host: &str) -> String {
        let salt = [7_u8; 20];
        let mac = Hmac::<Sha1>::new_from_slice(&salt)
            .unwrap()
            .chain_update(host)
            .finalize()
            .into_bytes();
        format!("|1|{}|{}", BASE64.encode(&salt), BASE64.encode(&mac))
    }

    const ED: &str = "ssh-ed25519";
    const RSA: &str = "ssh-rsa";

    fn check(
        text: &str,
        host: &str,
        port: u16,
        kind: &str,
        seed: u8,
    ) -> Result<(), Box<HostKeyRefused>> {
        KnownHosts::parse("/kh", text).check(&HostName::new(host, port), &blob(kind, seed))
    }

    #[test]
    fn any_matching_line_accepts() {
        let text = line("h", RSA, 1) + &line("h", ED, 2) + &line("h", ED, 3);
        for (kind, seed) in [(RSA, 1), (ED, 2), (ED, 3)] {
            check(&text, "h", 22, kind, seed).unwrap();
            check(&text, "H", 22, kind, seed).unwrap();
        }
        let refused = check(&text, "h", 22, ED, 4).unwrap_err();
        assert!(
            matches!(*refused, HostKeyRefused::Changed { recorded_at: 2, .. }),
            "{refused:?}"
        );
        assert!(refused.to_string().contains("/kh:2"), "{refused}");
    }

    #[test]
    fn ports_brackets_hashes_wildcards_negation_and_tabs() {
        for (hosts, host, port, good) in [
            ("[h]:2222", "h", 2222, true),
            ("[h]:2222", "h", 22, false),
            ("h", "h", 2222, false),
            (hashed("h").as_str(), "h", 22, true),
            (hashed("[h]:2222").as_str(), "h", 2222, true),
            (hashed("h").as_str(), "i", 22, false),
            ("*.example.com", "a.example.com", 22, true),
            ("*.example.com,!b.example.com", "b.example.com", 22, false),
            ("!b.example.com,*.example.com", "b.example.com", 22, false),
            ("10.0.0.?", "10.0.0.7", 22, true),
            ("10.0.0.?", "10.0.0.77", 22, false),
            ("[*]:2222", "x", 2222, true),
            ("[::1]:2222", "::1", 2222, true),
            ("::1", "::1", 22, true),
            ("x,y,h", "h", 22, true),
        ] {
            let text = line(hosts, ED, 1);
            assert_eq!(
                check(&text, host, port, ED, 1).is_ok(),
                good,
                "{hosts} {host}:{port}"
            );
            let tabs = text.replacen(' ', "\t", 2);
            assert_eq!(
                check(&tabs, host, port, ED, 1).is_ok(),
                good,
                "tabs: {hosts}"
            );
        }
    }

    #[test]
    fn revoked_wins_wherever_it_stands() {
        let good = line("h", ED, 1);
        let revoked = format!("@revoked {}", line("*", ED, 1));
        for text in [format!("{good}{revoked}"), format!("{revoked}{good}")] {
            let refused = check(&text, "h", 22, ED, 1).unwrap_err();
            assert!(
                matches!(*refused, HostKeyRefused::Revoked { .. }),
                "{refused:?}"
            );
        }
        // Another key being revoked says nothing of this one.
        let other = format!("@revoked {}{good}", line("*", ED, 9));
        check(&other, "h", 22, ED, 1).unwrap();
    }

    #[test]
    fn a_cert_authority_is_refused_and_said() {
        let authority = format!("@cert-authority {}", line("*", ED, 1));
        // Not even the authority's own key is a host key.
        let refused = check(&authority, "h", 22, ED, 1).unwrap_err();
        assert!(
            matches!(*refused, HostKeyRefused::OnlyCertAuthority { .. }),
            "{refused:?}"
        );
        check(&(authority + &line("h", ED, 2)), "h", 22, ED, 2).unwrap();
    }

    #[test]
    fn an_unknown_key_names_fingerprint_and_the_line_that_would_accept_it() {
        let refused = check("", "h", 2222, ED, 5).unwrap_err();
        let HostKeyRefused::Unknown {
            line, fingerprint, ..
        } = &*refused
        else {
            panic!("{refused:?}");
        };
        assert!(fingerprint.starts_with("SHA256:") && fingerprint.len() == 50);
        assert!(refused.to_string().contains(fingerprint.as_str()));
        check(line, "h", 2222, ED, 5).unwrap();
    }

    #[test]
    fn one_bad_line_does_not_take_the_file_with_it() {
        let text = format!(
            "# comment\n\nnonsense\n@what h ssh-ed25519 AAAA\nh ssh-ed25519 !!!\nh ssh-rsa {}\n|2|a|b ssh-rsa AAAA\n{}",
            BASE64.encode(&blob(ED, 1)),
            line("h", ED, 1)
        );
        check(&text, "h", 22, ED, 1).unwrap();
        let bad: Vec<usize> = KnownHosts::parse("/kh", &text)
            .bad_lines()
            .iter()
            .map(|(n, _)| *n)
            .collect();
        assert_eq!(bad, [3, 4, 5, 6, 7]);
    }

    #[test]
    fn only_held_types_are_told() {
        let text = line("h", RSA, 1)
            + &format!("@revoked {}", line("h", "ecdsa-sha2-nistp256", 1))
            + &line("other", ED, 1);
        let known = KnownHosts::parse("/kh", &text);
        assert_eq!(known.key_types(&HostName::new("h", 22)), [RSA]);
    }

    #[test]
    fn wildcards_match_whole_texts() {
        assert!(wildcard("*a*b", "xxaxxb"));
        assert!(!wildcard("*a*b", "xxaxxbc"));
        assert!(wildcard("***", ""));
        assert!(!wildcard("", "x"));
        assert!(!wildcard("?", ""));
    }
}

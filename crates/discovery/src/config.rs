//! Where the API listens and who may use it.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use egress_core::SecretBytes;

/// One place to listen at.
#[derive(Debug, Clone)]
pub enum Listen {
    /// A port on every address of the machine, IPv6 and IPv4: `:8090`.
    Port(u16),
    /// `127.0.0.1:8090`, `[::1]:8090`.
    Tcp(SocketAddr),
    /// `unix:/run/egress/discovery.sock`. Never TLS: who may connect is the directory's matter.
    Unix(PathBuf),
    /// A listening socket that was handed over (systemd socket activation), TCP or unix.
    Inherited(Arc<OwnedFd>),
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Port(port) => write!(f, ":{port}"),
            Self::Tcp(address) => write!(f, "{address}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Inherited(_) => f.write_str("an inherited socket"),
        }
    }
}

/// The text is no address to listen at.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no address to listen at: give \":8090\", \"127.0.0.1:8090\", \"[::1]:8090\" or \
     \"unix:/path/to/socket\""
)]
pub struct BadListen(pub String);

impl FromStr for Listen {
    type Err = BadListen;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad = || BadListen(text.to_owned());
        if let Some(path) = text.strip_prefix("unix:") {
            let path = PathBuf::from(path);
            return if path.is_absolute() {
                Ok(Self::Unix(path))
            } else {
                Err(bad())
            };
        }
        if text.starts_with('/') {
            return Ok(Self::Unix(text.into()));
        }
        if let Ok(address) = text.parse() {
            return Ok(Self::Tcp(address));
        }
        let (host, port) = text.rsplit_once(':').unwrap_or(("", text));
        let port = port.parse().map_err(|_| bad())?;
        match host {
            "" => Ok(Self::Port(port)),
            "localhost" => Ok(Self::Tcp(SocketAddr::new(
                IpAddr::from([127, 0, 0, 1]),
                port,
            ))),
            _ => Err(bad()),
        }
    }
}

/// Certificate chain and key, PEM; read again when they change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    pub certificate: PathBuf,
    pub key: PathBuf,
}

/// Where the bearer token comes from.
#[derive(Debug, Clone, Default)]
pub enum TokenSource {
    /// The API is open to whoever reaches it.
    #[default]
    None,
    Static(SecretBytes),
    /// Its content without surrounding white space; read again when it changes.
    File(PathBuf),
}

impl TokenSource {
    /// Whether anybody who reaches the API may use it. Said loudly at the start.
    pub fn is_open(&self) -> bool {
        matches!(self, Self::None)
    }
}

/// Everything about the API that an administrator may choose.
#[derive(Debug, Clone)]
pub struct Config {
    pub addresses: Vec<Listen>,
    pub tls: Option<TlsFiles>,
    pub token: TokenSource,
    pub limits: Limits,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            addresses: vec![Listen::Port(8090)],
            tls: None,
            token: TokenSource::None,
            limits: Limits::default(),
        }
    }
}

/// What one client can take.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Bytes of a request body.
    pub max_body: usize,
    /// Open connections over all addresses; further ones wait in the socket's backlog.
    pub max_connections: usize,
    /// Concurrent requests of one HTTP/2 connection.
    pub max_streams: u32,
    /// Clients of `/v1/watch`.
    pub max_watchers: usize,
    /// To send a whole request header (which is also how long an idle HTTP/1 connection is kept),
    /// and for a TLS handshake.
    pub header_timeout: Duration,
    /// To send a whole body.
    pub body_timeout: Duration,
    /// How long requests that are being answered may go on after a stop.
    pub drain: Duration,
    /// A comment to the clients of `/v1/watch` in this interval, so that proxies between keep
    /// the connection.
    pub keepalive: Duration,
    /// How often lease counts are looked at for the clients of `/v1/watch`; changes of proxies
    /// show at once.
    pub watch_interval: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_body: 64 * 1024,
            max_connections: 1024,
            max_streams: 128,
            max_watchers: 256,
            header_timeout: Duration::from_secs(30),
            body_timeout: Duration::from_secs(10),
            drain: Duration::from_secs(5),
            keepalive: Duration::from_secs(15),
            watch_interval: Duration::from_secs(1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_people_write_them() {
        for (text, shown) in [
            (":8090", ":8090"),
            ("8090", ":8090"),
            ("127.0.0.1:8090", "127.0.0.1:8090"),
            ("localhost:8090", "127.0.0.1:8090"),
            ("[::1]:0", "[::1]:0"),
            ("unix:/run/x.sock", "unix:/run/x.sock"),
            ("/run/x.sock", "unix:/run/x.sock"),
        ] {
            assert_eq!(text.parse::<Listen>().unwrap().to_string(), shown);
        }
        for text in [
            "", ":", ":x", ":70000", "::1:80", "unix:x", "unix:", "host:80",
        ] {
            assert!(text.parse::<Listen>().is_err(), "{text:?} was accepted");
        }
    }
}

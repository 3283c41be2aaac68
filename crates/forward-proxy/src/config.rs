//! What a proxy is told, as fields and as a command line.

use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;
use std::time::Duration;

use crate::net::Net;

/// One proxy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Where it listens; at least one.
    pub listen: Vec<SocketAddr>,
    /// The source addresses of outgoing connections, at most one of each family. Empty: the
    /// system's choice. With only one family given, only targets of that family are reached, so
    /// that nothing leaves by another path.
    pub bind_addresses: Vec<IpAddr>,
    /// Who may use it. Never empty; loopback by default.
    pub allow_clients: Vec<Net>,
    /// Loopback and private networks that may be targets, beside the public internet. Link-local
    /// and metadata addresses are refused whatever stands here.
    pub allow_targets: Vec<Net>,
    /// Connections of clients at one time; further ones wait in the listener's queue.
    pub max_connections: usize,
    pub timeouts: Timeouts,
}

/// How long each step may take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Timeouts {
    /// For a whole request head, and between two requests of a kept connection.
    pub header: Duration,
    /// For resolving a target's name.
    pub resolve: Duration,
    /// For connecting to a target, over all its addresses.
    pub connect: Duration,
    /// Without a byte either way while a plain request waits for its response.
    pub response: Duration,
    /// Without a byte either way in a tunnel or a response's body.
    pub idle: Duration,
    /// For what is going on when the proxy is told to stop.
    pub drain: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            header: Duration::from_secs(30),
            resolve: Duration::from_secs(5),
            connect: Duration::from_secs(10),
            response: Duration::from_secs(60),
            idle: Duration::from_secs(600),
            drain: Duration::from_secs(1),
        }
    }
}

/// 0 is no limit that helps anybody, and each connection takes two descriptors and some memory.
pub const MAX_CONNECTIONS: std::ops::RangeInclusive<usize> = 1..=65_536;
pub const DEFAULT_MAX_CONNECTIONS: usize = 1024;

/// A configuration that cannot work.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    #[error("{0}: a value is missing")]
    NoValue(String),
    #[error(
        "{0:?}: unknown flag; known are --listen, --bind-address, --allow-client, --allow-target, --max-connections"
    )]
    UnknownFlag(String),
    #[error("{flag} {value:?}: {why}")]
    BadValue {
        flag: &'static str,
        value: String,
        why: String,
    },
    #[error("--listen is required, for example --listen 127.0.0.1:3128")]
    NoListen,
    #[error(
        "--bind-address {0}: another address of that family was given already; at most one IPv4 and one IPv6 address"
    )]
    TwoOfOneFamily(IpAddr),
    #[error("--max-connections {0}: must be from 1 to 65536")]
    MaxConnections(usize),
}

impl Config {
    /// A proxy at `listen` with every default: loopback clients, public targets.
    pub fn new(listen: SocketAddr) -> Self {
        Self {
            listen: vec![listen],
            bind_addresses: Vec::new(),
            allow_clients: Net::loopback(),
            allow_targets: Vec::new(),
            max_connections: DEFAULT_MAX_CONNECTIONS,
            timeouts: Timeouts::default(),
        }
    }

    /// Checks what the types do not say.
    ///
    /// # Errors
    /// The first fault.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if self.listen.is_empty() {
            return Err(ConfigError::NoListen);
        }
        for (i, address) in self.bind_addresses.iter().enumerate() {
            if self.bind_addresses[..i]
                .iter()
                .any(|other| other.is_ipv4() == address.is_ipv4())
            {
                return Err(ConfigError::TwoOfOneFamily(*address));
            }
        }
        if !MAX_CONNECTIONS.contains(&self.max_connections) {
            return Err(ConfigError::MaxConnections(self.max_connections));
        }
        Ok(())
    }

    /// The flags that make this configuration again. Timeouts have no flags: they are the
    /// program's own.
    pub fn to_args(&self) -> Vec<String> {
        let mut args = Vec::new();
        let mut flag = |name: &str, value: String| args.extend([name.to_owned(), value]);
        for listen in &self.listen {
            flag("--listen", listen.to_string());
        }
        for address in &self.bind_addresses {
            flag("--bind-address", address.to_string());
        }
        for net in &self.allow_clients {
            flag("--allow-client", net.to_string());
        }
        for net in &self.allow_targets {
            flag("--allow-target", net.to_string());
        }
        if self.max_connections != DEFAULT_MAX_CONNECTIONS {
            flag("--max-connections", self.max_connections.to_string());
        }
        args
    }

    /// Reads what [`Config::to_args`] writes, `--flag value` and `--flag=value` alike.
    ///
    /// # Errors
    /// The first fault, with the flag and the value.
    pub fn from_args<I>(args: I) -> Result<Self, ConfigError>
    where
        I: IntoIterator,
        I::Item: Into<String>,
    {
        let mut config = Self {
            listen: Vec::new(),
            bind_addresses: Vec::new(),
            allow_clients: Vec::new(),
            allow_targets: Vec::new(),
            max_connections: DEFAULT_MAX_CONNECTIONS,
            timeouts: Timeouts::default(),
        };
        let mut args = args.into_iter().map(Into::into);
        while let Some(arg) = args.next() {
            let (flag, inline) = match arg.split_once('=') {
                Some((flag, value)) => (flag.to_owned(), Some(value.to_owned())),
                None => (arg, None),
            };
            let mut value = || {
                inline
                    .clone()
                    .or_else(|| args.next())
                    .ok_or_else(|| ConfigError::NoValue(flag.clone()))
            };
            match flag.as_str() {
                "--listen" => config.listen.push(parse("--listen", &value()?)?),
                "--bind-address" => config
                    .bind_addresses
                    .push(parse("--bind-address", &value()?)?),
                "--allow-client" => config
                    .allow_clients
                    .push(parse("--allow-client", &value()?)?),
                "--allow-target" => config
                    .allow_targets
                    .push(parse("--allow-target", &value()?)?),
                "--max-connections" => {
                    config.max_connections = parse("--max-connections", &value()?)?;
                }
                _ => return Err(ConfigError::UnknownFlag(flag)),
            }
        }
        if config.allow_clients.is_empty() {
            config.allow_clients = Net::loopback();
        }
        config.validate()?;
        Ok(config)
    }
}

fn parse<T>(flag: &'static str, value: &str) -> Result<T, ConfigError>
where
    T: FromStr,
    T::Err: std::fmt::Display,
{
    value
        .parse()
        .map_err(|error: T::Err| ConfigError::BadValue {
            flag,
            value: value.to_owned(),
            why: error.to_string(),
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_and_fields_are_the_same_thing() {
        let config = Config {
            listen: vec![
                "127.66.0.3:3128".parse().unwrap(),
                "[::1]:3128".parse().unwrap(),
            ],
            bind_addresses: vec!["192.0.2.7".parse().unwrap(), "2001:db8::7".parse().unwrap()],
            allow_clients: vec!["10.0.0.0/8".parse().unwrap()],
            allow_targets: vec!["::1/128".parse().unwrap()],
            max_connections: 7,
            timeouts: Timeouts::default(),
        };
        assert_eq!(Config::from_args(config.to_args()), Ok(config));
    }

    #[test]
    fn nobody_is_allowed_by_default_but_the_machine_itself() {
        let config = Config::from_args(["--listen=127.0.0.1:1"]).unwrap();
        assert_eq!(config, Config::new("127.0.0.1:1".parse().unwrap()));
        assert_eq!(config.allow_clients, Net::loopback());
        assert!(config.allow_targets.is_empty());
    }

    #[test]
    fn each_wrong_flag_has_its_sentence() {
        for (args, says) in [
            (vec![], "--listen is required"),
            (vec!["--listen"], "--listen: a value is missing"),
            (
                vec!["--listen", "localhost:1"],
                "--listen \"localhost:1\": invalid socket address",
            ),
            (
                vec!["--port", "1"],
                "\"--port\": unknown flag; known are --listen",
            ),
            (
                vec!["--listen=127.0.0.1:1", "--allow-client", "10.0.0.1/8"],
                "the network is \"10.0.0.0/8\"",
            ),
            (
                vec![
                    "--listen=127.0.0.1:1",
                    "--bind-address=::1",
                    "--bind-address=::2",
                ],
                "another address of that family",
            ),
            (
                vec!["--listen=127.0.0.1:1", "--max-connections=0"],
                "from 1 to 65536",
            ),
        ] {
            let error = Config::from_args(args).unwrap_err().to_string();
            assert!(error.contains(says), "{error:?} does not say {says:?}");
        }
    }
}

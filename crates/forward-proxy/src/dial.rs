//! From a target's name to a connection.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use http::StatusCode;
use tokio::net::{TcpSocket, TcpStream};

use crate::config::{Config, Timeouts};
use crate::policy::TargetPolicy;

/// RFC 8305, section 5: how long one address has before the next is tried beside it.
const ATTEMPT_DELAY: Duration = Duration::from_millis(250);
/// A name with hundreds of addresses does not get hundreds of attempts.
const MAX_ADDRESSES: usize = 8;

/// Name resolution, so that tests choose what a name means.
pub trait Resolve: Send + Sync + 'static {
    /// The addresses of a name, in the order of preference.
    fn resolve<'a>(&'a self, host: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>>;
}

/// The system's resolver (`getaddrinfo`).
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemResolver;

impl Resolve for SystemResolver {
    fn resolve<'a>(&'a self, host: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        Box::pin(async move {
            let found = tokio::net::lookup_host((host, 0)).await?;
            Ok(found.map(|address| address.ip()).collect())
        })
    }
}

/// Why a target was not reached; the text goes to the client.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    #[error("{host} does not resolve: {source}")]
    Resolve { host: String, source: io::Error },
    #[error("{0} has no address")]
    NoAddress(String),
    #[error("resolving {0} took too long")]
    ResolveTimeout(String),
    #[error("{host} is {address}, which is not allowed as a target ({why})")]
    Denied {
        host: String,
        address: IpAddr,
        why: &'static str,
    },
    #[error("{0} has no address of the family of this proxy's source address")]
    NoSource(String),
    #[error("connecting to {address} failed: {source}")]
    Connect {
        address: SocketAddr,
        source: io::Error,
    },
    #[error("connecting to {0} took too long")]
    ConnectTimeout(String),
}

impl DialError {
    /// The status a client gets.
    pub fn status(&self) -> StatusCode {
        match self {
            Self::Denied { .. } => StatusCode::FORBIDDEN,
            Self::ResolveTimeout(_) | Self::ConnectTimeout(_) => StatusCode::GATEWAY_TIMEOUT,
            Self::Resolve { .. }
            | Self::NoAddress(_)
            | Self::NoSource(_)
            | Self::Connect { .. } => StatusCode::BAD_GATEWAY,
        }
    }
}

/// Connects to targets.
pub(crate) struct Dialer {
    resolver: Arc<dyn Resolve>,
    policy: TargetPolicy,
    bind: Vec<IpAddr>,
    timeouts: Timeouts,
}

impl Dialer {
    pub(crate) fn new(config: &Config, resolver: Arc<dyn Resolve>) -> Self {
        Self {
            resolver,
            policy: TargetPolicy::new(config.allow_targets.clone()),
            bind: config.bind_addresses.clone(),
            timeouts: config.timeouts.clone(),
        }
    }

    /// `host` is a name or an address without brackets.
    pub(crate) async fn dial(&self, host: &str, port: u16) -> Result<TcpStream, DialError> {
        let addresses = self.addresses(host).await?;
        let connecting = self.connect(in_turns(&addresses), port);
        match tokio::time::timeout(self.timeouts.connect, connecting).await {
            Ok(result) => result,
            Err(_) => Err(DialError::ConnectTimeout(egress_host(host))),
        }
    }

    /// What the name resolves to, without what is denied and what no source address fits.
    async fn addresses(&self, host: &str) -> Result<Vec<IpAddr>, DialError> {
        let found = match host.parse::<IpAddr>() {
            Ok(address) => vec![address],
            Err(_) => {
                let resolving = self.resolver.resolve(host);
                match tokio::time::timeout(self.timeouts.resolve, resolving).await {
                    Ok(Ok(found)) => found,
                    Ok(Err(source)) => {
                        return Err(DialError::Resolve {
                            host: egress_host(host),
                            source,
                        });
                    }
                    Err(_) => return Err(DialError::ResolveTimeout(egress_host(host))),
                }
            }
        };
        let Some(&first) = found.first() else {
            return Err(DialError::NoAddress(egress_host(host)));
        };
        let permitted: Vec<IpAddr> = found
            .into_iter()
            .map(|address| address.to_canonical())
            .filter(|address| self.policy.check(*address).is_ok())
            .collect();
        if permitted.is_empty() {
            return Err(DialError::Denied {
                host: egress_host(host),
                address: first,
                why: self.policy.check(first).err().map_or("denied", |r| r.why),
            });
        }
        let reachable: Vec<IpAddr> = permitted
            .into_iter()
            .filter(|address| self.bind.is_empty() || self.source_for(*address).is_some())
            .collect();
        if reachable.is_empty() {
            return Err(DialError::NoSource(egress_host(host)));
        }
        Ok(reachable)
    }

    fn source_for(&self, address: IpAddr) -> Option<IpAddr> {
        self.bind
            .iter()
            .copied()
            .find(|source| source.is_ipv4() == address.is_ipv4())
    }

    /// Happy Eyeballs (RFC 8305): the next address is tried when one fails or is slow, and the
    /// first connection wins.
    async fn connect(
        &self,
        mut waiting: VecDeque<IpAddr>,
        port: u16,
    ) -> Result<TcpStream, DialError> {
        let mut attempts = FuturesUnordered::new();
        let mut failure = None;
        loop {
            if let Some(address) = waiting.pop_front() {
                let address = SocketAddr::new(address, port);
                let source = self.source_for(address.ip());
                attempts.push(async move { (address, connect_from(source, address).await) });
            }
            let ended = if waiting.is_empty() {
                attempts.next().await
            } else {
                match tokio::time::timeout(ATTEMPT_DELAY, attempts.next()).await {
                    Ok(ended) => ended,
                    Err(_) => continue,
                }
            };
            match ended {
                Some((_, Ok(stream))) => return Ok(stream),
                // The first failure is that of the preferred address: the one to tell.
                Some((address, Err(source))) => {
                    failure.get_or_insert(DialError::Connect { address, source });
                }
                None => {}
            }
            if attempts.is_empty() && waiting.is_empty() {
                return Err(failure.unwrap_or(DialError::NoAddress(String::new())));
            }
        }
    }
}

/// A host as it may be shown in a message: cut, because a client chose it.
fn egress_host(host: &str) -> String {
    host.chars().take(255).collect()
}

/// The families in turns, beginning with the resolver's choice, so that a dead family costs one
/// delay and not one for each of its addresses.
fn in_turns(addresses: &[IpAddr]) -> VecDeque<IpAddr> {
    let preferred_v4 = addresses.first().is_some_and(IpAddr::is_ipv4);
    let (mut a, mut b): (VecDeque<IpAddr>, VecDeque<IpAddr>) = addresses
        .iter()
        .partition(|address| address.is_ipv4() == preferred_v4);
    let mut turns = VecDeque::new();
    while turns.len() < MAX_ADDRESSES && !(a.is_empty() && b.is_empty()) {
        turns.extend(a.pop_front());
        turns.extend(b.pop_front());
    }
    turns
}

async fn connect_from(source: Option<IpAddr>, to: SocketAddr) -> io::Result<TcpStream> {
    let socket = if to.is_ipv4() {
        TcpSocket::new_v4()?
    } else {
        TcpSocket::new_v6()?
    };
    if let Some(source) = source {
        socket.bind(SocketAddr::new(source, 0))?;
    }
    let stream = socket.connect(to).await?;
    // A connect to a local port that nobody listens on can meet itself (TCP simultaneous open).
    if stream.local_addr()? == stream.peer_addr()? {
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    crate::serve::tune(&stream);
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_take_turns_from_the_preferred_one() {
        let ips =
            |texts: &[&str]| -> Vec<IpAddr> { texts.iter().map(|t| t.parse().unwrap()).collect() };
        let turns = in_turns(&ips(&["::1", "::2", "::3", "192.0.2.1", "192.0.2.2"]));
        assert_eq!(
            Vec::from(turns),
            ips(&["::1", "192.0.2.1", "::2", "192.0.2.2", "::3"])
        );
        assert_eq!(
            in_turns(&ips(&["192.0.2.1", "::1"])).front(),
            Some(&IpAddr::from([192, 0, 2, 1]))
        );
    }
}

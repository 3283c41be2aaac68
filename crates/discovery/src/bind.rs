//! Binding every address, or none.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use tokio::net::{TcpListener, UnixListener};

use crate::config::{Config, Limits, Listen};
use crate::tls::{Reloading, TlsError};

/// The API cannot listen. Says where, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    #[error(
        "port {port} is already in use ({address}): stop the program that listens there, or choose \
         another address with --discovery-addr"
    )]
    PortInUse { address: SocketAddr, port: u16 },
    #[error("{address} is not an address of this machine: choose another with --discovery-addr")]
    NotOurs { address: SocketAddr },
    #[error(
        "this user may not listen on {address}: choose a port over 1023 with --discovery-addr, or \
         have systemd pass the socket"
    )]
    Forbidden { address: SocketAddr },
    #[error("cannot listen on {address}: {source}")]
    Tcp {
        address: SocketAddr,
        source: io::Error,
    },
    #[error(
        "the socket {} is already in use: stop the program that listens there, or choose another \
         path with --discovery-addr",
        path.display()
    )]
    SocketInUse { path: PathBuf },
    #[error(
        "{} is there and is no socket: move it away, or choose another path with --discovery-addr",
        path.display()
    )]
    NotASocket { path: PathBuf },
    #[error(
        "cannot listen on the socket {}: {source}; does its directory exist, and may this user \
         write to it?",
        path.display()
    )]
    Unix { path: PathBuf, source: io::Error },
    #[error("the inherited socket cannot be used: {0}")]
    Inherited(#[source] io::Error),
    #[error("no address to listen at: give one with --discovery-addr")]
    NoAddress,
    #[error(transparent)]
    Tls(#[from] TlsError),
}

/// Listening sockets, not served yet: connections wait in their backlogs.
#[derive(Debug)]
pub struct Bound {
    pub(crate) listeners: Vec<BoundListener>,
    pub(crate) limits: Limits,
}

impl Bound {
    pub fn listeners(&self) -> &[BoundListener] {
        &self.listeners
    }

    /// The first TCP address.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.listeners.iter().find_map(BoundListener::local_addr)
    }
}

/// One listening socket.
#[derive(Debug)]
pub struct BoundListener {
    pub(crate) socket: ListeningSocket,
    pub(crate) tls: Option<Arc<Reloading>>,
    shown: String,
    _path: Option<UnixPath>,
}

#[derive(Debug)]
pub(crate) enum ListeningSocket {
    Tcp(TcpListener),
    Unix(UnixListener),
}

/// Removes the socket that we made.
#[derive(Debug)]
pub(crate) struct UnixPath(PathBuf);

impl Drop for UnixPath {
    fn drop(&mut self) {
        // Somebody else may have removed it, which is as good.
        let _ = std::fs::remove_file(&self.0);
    }
}

impl BoundListener {
    /// None for a unix socket.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        match &self.socket {
            ListeningSocket::Tcp(listener) => listener.local_addr().ok(),
            ListeningSocket::Unix(_) => None,
        }
    }
}

/// `http://127.0.0.1:8090`, `https://[::1]:8090`, `unix:/run/x.sock`.
impl std::fmt::Display for BoundListener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.local_addr(), &self.tls) {
            (Some(address), Some(_)) => write!(f, "https://{address}"),
            (Some(address), None) => write!(f, "http://{address}"),
            (None, _) => f.write_str(&self.shown),
        }
    }
}

/// Binds every address of the configuration. Needs a tokio runtime.
///
/// # Errors
/// At the first that cannot be bound; then none is.
pub async fn bind(config: &Config) -> Result<Bound, BindError> {
    if config.addresses.is_empty() {
        return Err(BindError::NoAddress);
    }
    let tls = config
        .tls
        .clone()
        .map(Reloading::new)
        .transpose()?
        .map(Arc::new);
    let mut listeners = Vec::new();
    for address in &config.addresses {
        let socket = match address {
            Listen::Port(port) => ListeningSocket::Tcp(any(*port)?),
            Listen::Tcp(address) => ListeningSocket::Tcp(tcp(*address, false)?),
            Listen::Unix(path) => ListeningSocket::Unix(unix(path).await?),
            Listen::Inherited(fd) => inherited(fd).map_err(BindError::Inherited)?,
        };
        let tls = match socket {
            ListeningSocket::Tcp(_) => tls.clone(),
            ListeningSocket::Unix(_) => None,
        };
        listeners.push(BoundListener {
            socket,
            tls,
            shown: address.to_string(),
            // An inherited one is removed by whoever made it.
            _path: match address {
                Listen::Unix(path) => Some(UnixPath(path.clone())),
                _ => None,
            },
        });
    }
    Ok(Bound {
        listeners,
        limits: config.limits.clone(),
    })
}

/// Both families on one socket, or IPv4 alone where the kernel has no IPv6.
fn any(port: u16) -> Result<TcpListener, BindError> {
    match tcp((Ipv6Addr::UNSPECIFIED, port).into(), true) {
        Err(BindError::Tcp { .. } | BindError::NotOurs { .. }) => {
            tcp((Ipv4Addr::UNSPECIFIED, port).into(), false)
        }
        other => other,
    }
}

fn tcp(address: SocketAddr, both: bool) -> Result<TcpListener, BindError> {
    let listen = || {
        let socket = Socket::new(
            Domain::for_address(address),
            Type::STREAM.cloexec().nonblocking(),
            Some(Protocol::TCP),
        )?;
        if address.is_ipv6() {
            socket.set_only_v6(!both)?;
        }
        // A restart must not wait for the connections of the one before.
        socket.set_reuse_address(true)?;
        socket.bind(&SockAddr::from(address))?;
        socket.listen(1024)?;
        TcpListener::from_std(socket.into())
    };
    listen().map_err(|source| match source.kind() {
        io::ErrorKind::AddrInUse => BindError::PortInUse {
            address,
            port: address.port(),
        },
        io::ErrorKind::AddrNotAvailable => BindError::NotOurs { address },
        io::ErrorKind::PermissionDenied => BindError::Forbidden { address },
        _ => BindError::Tcp { address, source },
    })
}

/// Takes the place of a socket that a killed predecessor left, not that of a living one.
async fn unix(path: &Path) -> Result<UnixListener, BindError> {
    let failed = |source| BindError::Unix {
        path: path.into(),
        source,
    };
    match std::fs::symlink_metadata(path) {
        Ok(there) if there.file_type().is_socket() => {
            match tokio::net::UnixStream::connect(path).await {
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    std::fs::remove_file(path).map_err(failed)?;
                }
                _ => return Err(BindError::SocketInUse { path: path.into() }),
            }
        }
        Ok(_) => return Err(BindError::NotASocket { path: path.into() }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(failed(error)),
    }
    let listener = UnixListener::bind(path).map_err(failed)?;
    // Connecting needs write permission: the owner and the group, not everybody.
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o660)).map_err(failed)?;
    Ok(listener)
}

fn inherited(fd: &OwnedFd) -> io::Result<ListeningSocket> {
    let socket = Socket::from(fd.try_clone()?);
    if !socket.is_listener()? {
        return Err(io::Error::other("it is not listening"));
    }
    socket.set_nonblocking(true)?;
    match socket.domain()? {
        Domain::IPV4 | Domain::IPV6 => {
            Ok(ListeningSocket::Tcp(TcpListener::from_std(socket.into())?))
        }
        Domain::UNIX => {
            let listener = UnixListener::from_std(OwnedFd::from(socket).into())?;
            Ok(ListeningSocket::Unix(listener))
        }
        other => Err(io::Error::other(format!(
            "it is neither TCP nor unix but of family {other:?}"
        ))),
    }
}

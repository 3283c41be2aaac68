//! What went wrong on the way to a remote socket.

use std::sync::Arc;
use std::time::Duration;

use egress_core::ErrorClass;

use crate::key::KeyError;
use crate::known_hosts::HostKeyRefused;

/// A failure, apart enough from the others to tell a user what to do. Cheap to clone: callers that
/// shared a dial share its failure.
#[derive(Debug, Clone, thiserror::Error)]
pub enum SshError {
    #[error(transparent)]
    Key(#[from] KeyError),
    #[error("known_hosts file {path}: {error}. Without it no host key can be checked")]
    KnownHosts {
        path: String,
        error: Arc<std::io::Error>,
    },
    #[error("cannot reach {address}: {error}")]
    Dial {
        address: String,
        error: Arc<std::io::Error>,
    },
    #[error("{address} did not finish the SSH handshake within {} s", after.as_secs())]
    HandshakeTimeout { address: String, after: Duration },
    #[error("SSH handshake with {address} failed: {error}")]
    Handshake {
        address: String,
        error: Arc<russh::Error>,
    },
    #[error(
        "{address} offers no host key of a type that known_hosts holds for it ({held}); it offers {offered}. Add a line for one of these"
    )]
    NoHeldHostKeyType {
        address: String,
        held: String,
        offered: String,
    },
    #[error("{0}")]
    HostKey(Box<HostKeyRefused>),
    #[error(
        "{address} refused the key {fingerprint} for user {user}: it must be in that user's authorized_keys, and the account must not be locked"
    )]
    AuthRefused {
        address: String,
        user: String,
        fingerprint: String,
    },
    /// The server said so itself, or opened another socket and this one not.
    #[error(
        "{address} forbids forwarding to the socket {path}: its sshd needs \"AllowStreamLocalForwarding local\" and \"AllowTcpForwarding local\" (\"no\" stops sockets too), no \"DisableForwarding\", and \"PermitOpen\", where it is set, must hold [{path}]:*"
    )]
    ForwardingProhibited { address: String, path: String },
    /// Forwarding works, but not to this socket.
    #[error(
        "{address} allows forwarding, but nothing answers at {path}, or user {user} may not open it: is the daemon running, and the user in the socket's group (often libvirt)?"
    )]
    SocketNotThere {
        address: String,
        user: String,
        path: String,
    },
    /// OpenSSH gives one and the same answer to a missing socket and to a forbidden one.
    #[error(
        "{address} did not open the socket {path}: either nothing listens there (is the daemon running?), or user {user} may not open it (is the user in its group, often libvirt?), or sshd forbids it: \"AllowStreamLocalForwarding\" and \"AllowTcpForwarding\" must be \"local\" or \"yes\", and \"PermitOpen\", where it is set, must hold [{path}]:*"
    )]
    SocketRefused {
        address: String,
        user: String,
        path: String,
    },
    #[error("the SSH connection to {address} was lost: {reason}")]
    Lost { address: String, reason: String },
    #[error("private socket {path}: {error}")]
    LocalSocket {
        path: String,
        error: Arc<std::io::Error>,
    },
}

impl SshError {
    /// Whether it may heal by itself.
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::Key(key) => key.class(),
            // Files and the far sshd's settings are what a person changes without touching the
            // operator's configuration: it must heal by itself then, and say so until then.
            Self::HostKey(_)
            | Self::NoHeldHostKeyType { .. }
            | Self::AuthRefused { .. }
            | Self::ForwardingProhibited { .. }
            | Self::KnownHosts { .. }
            | Self::Dial { .. }
            | Self::HandshakeTimeout { .. }
            | Self::Handshake { .. }
            | Self::SocketNotThere { .. }
            | Self::SocketRefused { .. }
            | Self::Lost { .. }
            | Self::LocalSocket { .. } => ErrorClass::Transient,
        }
    }
}

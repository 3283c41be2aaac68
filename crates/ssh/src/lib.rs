//! SSH to a hypervisor host: one connection, strict host keys, unix sockets forwarded through it.
//!
//! - [`known_hosts`]: reading and matching `known_hosts` files.
//! - [`key`]: the client's private key, and what may be wrong with its file.
//! - [`host`]: [`SshHost`], the one connection to a host that all its callers share.
//! - [`bridge`]: a private local socket that leads to one remote socket, once.
//! - [`error`]: what went wrong, apart enough to tell a user what to do.

pub mod bridge;
pub mod error;
pub mod host;
pub mod key;
pub mod known_hosts;

pub use bridge::{Bridge, BridgeDir};
pub use error::SshError;
pub use host::{HostKeys, RemoteSocket, SshConfig, SshHost};

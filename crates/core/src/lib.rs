//! The heart of the operator without any I/O: who is who, what a user asked for, what an error
//! means, and what a proxy looks like from outside. No tokio, no kube, no clock of its own.
//!
//! - [`identity`]: keys, UIDs, instance names, the installation.
//! - [`spec`]: what a `Proxy` asks for, validated; the hash of what an instance is built from.
//! - [`error`]: the four classes every backend error falls into.
//! - [`record`]: one proxy as the lease store and the edges (HTTP, D-Bus) see it.
//! - [`target`]: crawl targets compared as lower-cased host names.
//! - [`secret`]: bytes that never show themselves.
//! - [`clock`]: wall-clock time, injected.

pub mod clock;
pub mod error;
pub mod identity;
pub mod record;
pub mod secret;
pub mod spec;
pub mod target;

pub use clock::{Clock, SystemClock};
pub use error::ErrorClass;
pub use identity::{InstallationId, InstanceName, ProviderId, ProxyKey, Uid};
pub use record::{Phase, ProxyRecord};
pub use secret::SecretBytes;

//! The `local` provider: each Proxy is a process on the operator's own machine.
//!
//! - [`config`]: the `local:` block of the providers file, and the type that reads it.
//! - [`provider`]: [`LocalProvider`], which gives each instance an address and a record on disk.
//! - `shared`: what is remembered of each instance; `choose`: where it listens and leaves from;
//!   `command`: what is run.
//! - `pool`: which address and port an instance gets; pure.
//! - `record`: what is known of one instance, written so that no crash loses it.
//! - `supervise`: how a process is started, watched and ended; `child` does it with child
//!   processes that outlive the operator, `process` and `spawner` are its tools.
//! - `squid`: the configuration that Squid is run with.

mod child;
mod choose;
mod command;
pub mod config;
mod pool;
mod process;
pub mod provider;
mod record;
mod shared;
mod spawner;
mod squid;
mod supervise;

pub use config::{LocalConfig, LocalType, Program};
pub use provider::LocalProvider;

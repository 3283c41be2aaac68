//! A small forward proxy: CONNECT tunnels and plain `http://` forwarding, IPv4 and IPv6, for a
//! list of client networks, leaving from a chosen source address.
//!
//! - [`config`]: [`Config`] and its command line, the one place where flags and fields meet.
//! - [`net`]: address networks such as `127.0.0.0/8`.
//! - [`policy`]: which target addresses are never reached (link-local, cloud metadata) and which
//!   only when allowed (loopback, private).
//! - [`dial`]: resolving, checking what was resolved, and connecting without being held up by a
//!   dead address family (RFC 8305).
//! - `serve`, `forward`, `tunnel`: accepting, plain requests, CONNECT.
//!
//! The proxy adds nothing that names it or its clients: no `Via`, no `X-Forwarded-For`. One
//! single-threaded runtime is enough for each ([`run_blocking`]).

pub mod config;
pub mod dial;
mod forward;
pub mod net;
pub mod policy;
mod serve;
mod tunnel;

pub use config::{Config, ConfigError, Timeouts};
pub use dial::{Resolve, SystemResolver};
pub use net::Net;
pub use serve::{ServeError, bind, run, run_blocking, run_with};

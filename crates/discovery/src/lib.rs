//! The discovery and lease API over HTTP.
//!
//! It answers from the operator's [`Directory`] and the lease store; on a request it never calls
//! the Kubernetes API. The call that an administrator makes of it:
//!
//! ```text
//! Config --bind--> Bound (sockets listen, clients wait)
//!    \--router(deps)--> Router        serve(Bound, Router, cancel) until cancelled, then drains
//! ```
//!
//! - [`Config`], [`Listen`], [`TokenSource`]: where it listens and who may use it.
//! - [`Directory`]: where it learns about proxies.
//! - `proxies`, `leases`, `watch`: the handlers; `wire` and `error` are what they say.
//! - `serve`, `sniff`, `tls`: HTTP/1 and HTTP/2 over TCP, TLS and unix sockets.
//! - `openapi`: the document, made from the handlers.

mod bind;
mod body;
mod config;
mod directory;
mod error;
mod leases;
pub mod metrics;
mod openapi;
mod proxies;
mod router;
mod serve;
mod sniff;
mod stamp;
mod tls;
mod token;
mod watch;
mod wire;

#[cfg(test)]
mod tests;

pub use bind::{BindError, Bound, BoundListener, bind};
pub use config::{BadListen, Config, Limits, Listen, TlsFiles, TokenSource};
pub use directory::Directory;
pub use error::{ErrorBody, NoMatchBody};
pub use metrics::Metrics;
pub use openapi::openapi;
pub use router::{Deps, router};
pub use serve::{ServeError, serve};
pub use tls::TlsError;
pub use token::TokenError;
pub use wire::{LeaseAnswer, LeaseRequest, Proxy, ProxyList, Removed, RenewRequest, ReportRequest};

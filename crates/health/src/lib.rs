//! Probing: each proxy is asked to fetch its health-check URL, and the verdicts wake whoever cares.
//!
//! - [`contract`]: what others see: the reconciler sets targets and reads verdicts.
//! - [`engine`]: one task with a timer queue that keeps every proxy's schedule; bounded
//!   concurrency, no task per proxy.
//! - [`prober`]: one probe: dial, CONNECT, TLS, one GET; or one absolute-URI request.
//! - [`roots`]: which certificates the targets are verified with.
//! - `state`: thresholds and verdicts of one proxy, without I/O.
//! - `fleet`: many proxies failing at one moment for one reason.
//! - `transitions`: a coalescing queue for each subscriber, which cannot lose a key.
//! - [`metrics`]: the series `egress_probe...`.

pub mod contract;
pub mod engine;
mod fleet;
pub mod metrics;
pub mod prober;
pub mod roots;
mod state;
mod transitions;

pub use contract::{Health, ProbeClass, Target, Verdict};
pub use engine::{Config, Engine, StartError};
pub use fleet::CommonFailure;
pub use metrics::Metrics;
pub use prober::{HttpProbe, Outcome, Probe, ProbeRequest};
pub use roots::{CaError, load_ca_file};

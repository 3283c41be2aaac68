//! From what a Proxy asks for to what is there: observe, validate, plan, apply, status.
//!
//! A reconcile reads as a table of contents in `step`; each part is a module of its own:
//!
//! | module | what | talks to |
//! |---|---|---|
//! | `observe` | the object, its Secret, its instance | Kubernetes, provider |
//! | `plan` | the next action, or the state to rest in | nobody (pure) |
//! | `apply` | one action, repeatable, safe to cut off | Kubernetes, provider |
//! | `status` | the status that follows | nobody (pure) |
//! | `step` | the loop over these, Events, waits | |
//! | `sweep` | orphans | Kubernetes, provider |
//! | `watch`, `triggers`, `queue`, `index` | who is woken by what | Kubernetes, provider, prober |
//! | `directory` | Proxies as leases and edges see them | nobody |
//! | `reconciler` | the tasks around it all | |
//!
//! Everything that a decision rests on is in the object, at the provider, or in a Secret: a
//! reconcile can be cut off at every await and begun again by another process.

mod apply;
mod config;
mod context;
mod directory;
mod error;
mod events;
mod index;
mod kubernetes;
mod memory;
pub mod messages;
mod metrics;
mod observe;
mod plan;
mod queue;
mod reconciler;
mod status;
mod step;
mod sweep;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod triggers;
mod watch;

pub use config::{Backoff, Config, Deps};
pub use directory::{Directory, record_of};
pub use error::{ApiError, ReconcileError, RunError};
pub use metrics::Metrics;
pub use reconciler::{Handle, Readiness, ReadinessChanges, Reconciler};
pub use sweep::Sweep;

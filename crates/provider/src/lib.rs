//! The contract between the reconciler and the backends that make proxies real.
//!
//! - [`contract`]: the [`Provider`] trait and what goes in and comes out.
//! - [`config`]: the providers file: named instances, strict, all faults at once.
//! - [`set`]: the running providers by name, swapped as a whole on a reload.
//! - `fake`: a backend in memory with fault injection (feature `testing`).
//! - `conformance`: one suite that every implementation passes, the fake included (feature
//!   `testing`).
//! - [`wrap`]: metrics, tracing and the concurrency limit, applied once where the program is put
//!   together; the series are in [`metrics`].
//!
//! Whoever implements the trait never sees a Kubernetes type; whoever calls it never sees a
//! backend's own error type.

pub mod config;
#[cfg(any(test, feature = "testing"))]
pub mod conformance;
pub mod contract;
#[cfg(any(test, feature = "testing"))]
pub mod fake;
pub mod metrics;
pub mod set;
pub mod wrap;

pub use contract::{
    CreateRequest, Instance, InstanceEvent, InstanceState, Operation, Provider, ProviderError, Step,
};
pub use set::{ProviderSet, SetChange};

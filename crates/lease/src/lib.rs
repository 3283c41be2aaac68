//! Leases and cooldowns: who may use which proxy, for how long, and against what.
//!
//! [`contract`] is what others see.

pub mod contract;

pub use contract::{
    AcquireError, AcquireRequest, Acquired, Lease, LeaseId, LeaseStore, NoMatch, RenewError,
    Report, ReportError, Selector, StoreFailure,
};

//! Leases and cooldowns: who may use which proxy, for how long, and against what.
//!
//! - [`contract`]: what others see, the trait [`LeaseStore`] above all.
//! - `policy`, `select`, `index`: what each call does, as a state machine without I/O whose
//!   changes are data that can be written, published, and undone.
//! - [`SqliteStore`] makes each change durable before it answers (`db` is the database);
//!   [`MemoryStore`] forgets everything at a restart.
//! - [`time`]: a lease ends by a clock that only moves forward.
//! - `conformance` (feature `testing`): what every store must do, run against both.
//!
//! The life of a lease:
//!
//! ```text
//!            acquire                      time over / released / proxy gone
//! (nothing) ---------> active -- renew --+----------------------------------> ended
//!                        ^               |                                      |
//!                        +---------------+    reportable for one cooldown window, then forgotten
//! ```

mod config;
pub mod contract;
mod db;
mod id;
mod index;
mod memory;
pub mod metrics;
mod policy;
mod select;
mod sqlite;
pub mod time;

#[cfg(any(test, feature = "testing"))]
pub mod conformance;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use config::{Config, ConfigError};
pub use contract::{
    AcquireError, AcquireRequest, Acquired, Lease, LeaseId, LeaseStore, NoMatch, RenewError,
    Report, ReportError, Selector, StoreFailure,
};
pub use db::OpenError;
pub use memory::MemoryStore;
pub use metrics::Metrics;
pub use sqlite::SqliteStore;
pub use time::Time;

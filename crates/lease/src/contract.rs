//! The lease store as the edges and the reconciler know it.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use egress_core::target::Target;
use egress_core::{ProxyKey, ProxyRecord, Uid};
use jiff::Timestamp;

/// An opaque, unguessable id.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseId(pub String);

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Every pair must match an attribute exactly.
pub type Selector = BTreeMap<String, String>;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AcquireRequest {
    pub selector: Selector,
    /// More than zero; the store refuses what is over its maximum.
    pub ttl: Duration,
    pub target: Option<Target>,
    /// The same key with the same body gives the same lease again while it lives.
    pub idempotency_key: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    pub id: LeaseId,
    pub proxy: ProxyKey,
    pub uid: Uid,
    pub target: Option<Target>,
    pub granted_at: Timestamp,
    pub expires_at: Timestamp,
    pub ttl: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Acquired {
    New(Lease),
    /// An idempotency key was used again.
    Again(Lease),
}

/// The considered proxies (not being deleted, selector matches) by the first reason that excluded
/// each: unhealthy, then at capacity, then in cooldown.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NoMatch {
    pub considered: usize,
    pub at_capacity: usize,
    pub in_cooldown: usize,
    pub unhealthy: usize,
}

#[derive(Debug, thiserror::Error)]
pub enum AcquireError {
    #[error("ttl must be more than 0 and at most {} seconds", maximum.as_secs())]
    InvalidTtl { maximum: Duration },
    #[error("no proxy can be leased: {0:?}")]
    NoMatch(NoMatch),
    #[error("the idempotency key was used with another body")]
    IdempotencyMismatch,
    /// The operator is stopping: no new leases.
    #[error("no new leases: the operator is stopping")]
    Closed,
    #[error(transparent)]
    Store(#[from] StoreFailure),
}

#[derive(Debug, thiserror::Error)]
pub enum RenewError {
    #[error("ttl must be more than 0 and at most {} seconds", maximum.as_secs())]
    InvalidTtl { maximum: Duration },
    #[error("no such lease")]
    Unknown,
    /// It ended within the last cooldown window.
    #[error("the lease has expired")]
    Expired,
    #[error(transparent)]
    Store(#[from] StoreFailure),
}

#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    #[error("no such lease")]
    Unknown,
    #[error(transparent)]
    Store(#[from] StoreFailure),
}

/// The database failed (disk full, I/O error): nothing was changed.
#[derive(Debug, thiserror::Error)]
#[error("the lease database failed to {action}: {message}")]
pub struct StoreFailure {
    pub action: &'static str,
    pub message: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Report {
    Ok,
    RateLimited,
    Banned,
}

/// Calls block for as long as a durable write takes (milliseconds): async callers use
/// `spawn_blocking`. Capacity is never exceeded under any concurrency.
pub trait LeaseStore: Send + Sync + 'static {
    /// Candidates come from the caller, in any order; the store applies the policy and chooses.
    /// What it grants is durable before this returns.
    ///
    /// # Errors
    /// See [`AcquireError`]; nothing was granted then.
    fn acquire(
        &self,
        request: &AcquireRequest,
        candidates: &[ProxyRecord],
    ) -> Result<Acquired, AcquireError>;

    fn get(&self, id: &LeaseId) -> Option<Lease>;

    /// # Errors
    /// See [`RenewError`].
    fn renew(&self, id: &LeaseId, ttl: Duration) -> Result<Lease, RenewError>;

    /// Unknown and expired ids are fine.
    ///
    /// # Errors
    /// Only when the database fails.
    fn release(&self, id: &LeaseId) -> Result<(), StoreFailure>;

    /// A lease that ended can be reported for one cooldown window after its end.
    ///
    /// # Errors
    /// See [`ReportError`].
    fn report(
        &self,
        id: &LeaseId,
        report: Report,
        target: Option<Target>,
    ) -> Result<(), ReportError>;

    /// Ends the leases of a proxy object that is being deleted or is gone, cooldowns included.
    ///
    /// # Errors
    /// Only when the database fails.
    fn end_for(&self, uid: &Uid) -> Result<usize, StoreFailure>;

    /// Active leases by proxy object.
    fn active(&self) -> BTreeMap<Uid, usize>;

    /// Ends what has expired and forgets what is past its report window; called every second.
    ///
    /// # Errors
    /// Only when the database fails.
    fn sweep(&self) -> Result<(), StoreFailure>;

    /// No new leases from now on (a stop).
    fn close(&self);
}

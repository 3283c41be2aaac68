//! Clocks that tests move, and records to lease.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use egress_core::clock::ManualClock;
use egress_core::{Phase, ProxyKey, ProxyRecord, Uid};
use jiff::{SignedDuration, Timestamp};

use crate::contract::AcquireRequest;
use crate::time::{Monotonic, Time};

/// Both clocks of a store. Clones share them.
#[derive(Debug, Clone)]
pub struct ManualTime {
    wall: ManualClock,
    monotonic: Arc<ManualMonotonic>,
}

#[derive(Debug, Default)]
struct ManualMonotonic {
    millis: AtomicU64,
    boots: AtomicU64,
}

impl Monotonic for ManualMonotonic {
    fn elapsed(&self) -> Duration {
        Duration::from_millis(self.millis.load(Ordering::SeqCst))
    }

    fn epoch(&self) -> String {
        format!("boot {}", self.boots.load(Ordering::SeqCst))
    }
}

impl Default for ManualTime {
    fn default() -> Self {
        Self {
            // 2026-01-01T00:00:00Z
            wall: ManualClock::at(Timestamp::constant(1_767_225_600, 0)),
            monotonic: Arc::default(),
        }
    }
}

impl ManualTime {
    pub fn time(&self) -> Time {
        Time::new(Arc::new(self.wall.clone()), self.monotonic.clone())
    }

    /// Time passes.
    pub fn advance(&self, by: Duration) {
        let millis = u64::try_from(by.as_millis()).unwrap_or(u64::MAX);
        self.monotonic.millis.fetch_add(millis, Ordering::SeqCst);
        self.jump(SignedDuration::try_from(by).unwrap_or(SignedDuration::MAX));
    }

    /// Somebody sets the wall clock.
    pub fn jump(&self, by: SignedDuration) {
        self.wall.advance(by);
    }

    /// The machine restarts: the boot-time clock starts again.
    pub fn reboot(&self) {
        self.monotonic.millis.store(0, Ordering::SeqCst);
        self.monotonic.boots.fetch_add(1, Ordering::SeqCst);
    }
}

/// A healthy proxy `default/NAME` with the UID `uid-NAME` and room for `max_leases`.
pub fn proxy(name: &str, max_leases: u32) -> ProxyRecord {
    ProxyRecord {
        key: ProxyKey::new("default", name),
        uid: Uid::new(format!("uid-{name}")),
        host: Some("192.0.2.1".into()),
        port: 3128,
        attributes: BTreeMap::new(),
        phase: Phase::Ready,
        healthy: true,
        latency_millis: Some(20),
        max_leases,
        deleting: false,
    }
}

/// Any proxy, for 300 seconds, for no target.
pub fn request() -> AcquireRequest {
    AcquireRequest {
        selector: BTreeMap::new(),
        ttl: Duration::from_secs(300),
        target: None,
        idempotency_key: None,
    }
}

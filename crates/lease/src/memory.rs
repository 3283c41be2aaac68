//! Leases that a restart forgets (`--lease-store memory`).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use egress_core::target::Target;
use egress_core::{ProxyRecord, Uid};

use crate::config::Config;
use crate::contract::{
    AcquireError, AcquireRequest, Acquired, Lease, LeaseId, LeaseStore, RenewError, Report,
    ReportError, StoreFailure,
};
use crate::metrics::{Gauges, Metrics};
use crate::policy::{Log, State};
use crate::time::{Now, Time};

/// The policy behind a lock, and nothing else.
pub struct MemoryStore(Arc<Inner>);

struct Inner {
    core: Mutex<Core>,
    time: Time,
    metrics: Metrics,
}

struct Core {
    state: State,
    closed: bool,
}

impl MemoryStore {
    pub fn new(config: Config, time: impl Into<Time>) -> Self {
        Self::with_metrics(config, time, Metrics::default())
    }

    pub fn with_metrics(config: Config, time: impl Into<Time>, metrics: Metrics) -> Self {
        let inner = Arc::new(Inner {
            core: Mutex::new(Core {
                state: State::new(config),
                closed: false,
            }),
            time: time.into(),
            metrics,
        });
        let weak = Arc::downgrade(&inner);
        inner.metrics.watch(weak);
        Self(inner)
    }

    fn run<T>(&self, operation: impl FnOnce(&mut State, Now, &mut Log) -> T) -> T {
        let mut core = self.0.lock();
        self.run_in(&mut core, operation)
    }

    fn run_in<T>(
        &self,
        core: &mut Core,
        operation: impl FnOnce(&mut State, Now, &mut Log) -> T,
    ) -> T {
        let now = self.0.time.now();
        let mut log = Log::new();
        core.state.expire(now, &mut log);
        let result = operation(&mut core.state, now, &mut log);
        self.0.metrics.observe(&log);
        result
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Gauges for Inner {
    fn active_leases(&self) -> usize {
        self.lock().state.index.active_total(self.time.now().mono)
    }

    fn active_cooldowns(&self) -> usize {
        self.lock()
            .state
            .index
            .cooldowns_total(self.time.now().mono)
    }
}

impl LeaseStore for MemoryStore {
    fn acquire(
        &self,
        request: &AcquireRequest,
        candidates: &[ProxyRecord],
    ) -> Result<Acquired, AcquireError> {
        let id = LeaseId::random();
        let mut core = self.0.lock();
        let result = if core.closed {
            Err(AcquireError::Closed)
        } else {
            self.run_in(&mut core, |state, now, log| {
                state.acquire(now, request, candidates, id, log)
            })
        };
        drop(core);
        result.inspect_err(|error| self.0.metrics.refused(error))
    }

    fn get(&self, id: &LeaseId) -> Option<Lease> {
        let core = self.0.lock();
        let now = self.0.time.now();
        let held = core.state.index.get(id, now.mono)?;
        Some(held.lease.clone())
    }

    fn renew(&self, id: &LeaseId, ttl: Duration) -> Result<Lease, RenewError> {
        self.run(|state, now, log| state.renew(now, id, ttl, log))
    }

    fn release(&self, id: &LeaseId) -> Result<(), StoreFailure> {
        self.run(|state, now, log| state.release(now, id, log));
        Ok(())
    }

    fn report(
        &self,
        id: &LeaseId,
        report: Report,
        target: Option<Target>,
    ) -> Result<(), ReportError> {
        self.run(|state, now, log| state.report(now, id, report, target, log))
            .inspect(|()| self.0.metrics.reported(report))
    }

    fn end_for(&self, uid: &Uid) -> Result<usize, StoreFailure> {
        Ok(self.run(|state, now, log| state.end_for(now, uid, log)))
    }

    fn active(&self) -> BTreeMap<Uid, usize> {
        let core = self.0.lock();
        core.state.index.active(self.0.time.now().mono)
    }

    fn sweep(&self) -> Result<(), StoreFailure> {
        self.run(State::sweep);
        Ok(())
    }

    fn close(&self) {
        self.0.lock().closed = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    crate::lease_store_conformance!(|config, time| {
        Arc::new(MemoryStore::new(config, time)) as Arc<dyn LeaseStore>
    });
}

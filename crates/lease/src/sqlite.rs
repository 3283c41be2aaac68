//! Leases that survive a restart.
//!
//! A call decides on the caller's thread, under a lock, against the newest state, and puts its
//! changes into the pending batch. One thread writes batch after batch, each in one transaction:
//! while it waits for the disk, the next batch gathers, so many callers share one fsync. A caller
//! returns when its batch is on the disk. Reads come from an index that shows only what is.
//!
//! ```text
//! callers: lock { decide, apply to state, append to pending } -- wait for the batch's ticket
//! writer:  take pending -> BEGIN .. COMMIT -> ok:     publish to the index, answer
//!                                          -> failed: undo it and what came after, answer failure
//! ```

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use egress_core::target::Target;
use egress_core::{ProxyRecord, Uid};

use crate::config::Config;
use crate::contract::{
    AcquireError, AcquireRequest, Acquired, Lease, LeaseId, LeaseStore, RenewError, Report,
    ReportError, StoreFailure,
};
use crate::db::{Db, OpenError};
use crate::index::Index;
use crate::metrics::{Gauges, Metrics};
use crate::policy::{Log, State};
use crate::time::{Now, Time};

/// The policy, with every change in an SQLite database before it is answered.
pub struct SqliteStore {
    shared: Arc<Shared>,
    writer: Option<JoinHandle<()>>,
}

struct Shared {
    core: Mutex<Core>,
    /// Signalled when there is something for the writer.
    work: Condvar,
    /// What is on the disk.
    published: RwLock<Index>,
    time: Time,
    metrics: Metrics,
    #[cfg(test)]
    faults: Mutex<Option<fn(&mut Db)>>,
}

struct Core {
    /// What will be on the disk when everything pending is.
    state: State,
    pending: Batch,
    /// The ticket of the batch that is being written.
    writing: Option<Arc<Ticket>>,
    closed: bool,
    stop: bool,
    /// The writer is gone: nothing can be made durable any more.
    dead: bool,
}

#[derive(Default)]
struct Batch {
    log: Log,
    /// Somebody waits for the ticket.
    wanted: bool,
    ticket: Arc<Ticket>,
}

/// The outcome of one batch.
#[derive(Default)]
struct Ticket {
    outcome: Mutex<Option<Result<(), Failed>>>,
    done: Condvar,
}

#[derive(Clone)]
struct Failed {
    action: &'static str,
    message: Arc<str>,
}

impl From<Failed> for StoreFailure {
    fn from(failed: Failed) -> Self {
        Self {
            action: failed.action,
            message: failed.message.to_string(),
        }
    }
}

fn writer_gone() -> Failed {
    Failed {
        action: "write",
        message: "its writer thread has ended: restart the operator".into(),
    }
}

impl Ticket {
    fn resolve(&self, outcome: Result<(), Failed>) {
        *lock(&self.outcome) = Some(outcome);
        self.done.notify_all();
    }

    fn wait(&self) -> Result<(), StoreFailure> {
        let mut outcome = lock(&self.outcome);
        loop {
            if let Some(outcome) = outcome.as_ref() {
                return outcome.clone().map_err(Into::into);
            }
            outcome = self
                .done
                .wait(outcome)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// A panic while a lock is held leaves nothing half-done that matters more than going on.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SqliteStore {
    /// Opens the database at `path` (its directory must exist), or makes one.
    ///
    /// # Errors
    /// See [`OpenError`]; each says what to do.
    pub fn open(
        path: impl AsRef<Path>,
        config: Config,
        time: impl Into<Time>,
    ) -> Result<Self, OpenError> {
        Self::open_with_metrics(path, config, time, Metrics::default())
    }

    /// As [`SqliteStore::open`].
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open_with_metrics(
        path: impl AsRef<Path>,
        config: Config,
        time: impl Into<Time>,
        metrics: Metrics,
    ) -> Result<Self, OpenError> {
        let path = path.as_ref();
        let time = time.into();
        let mut db = Db::open(path)?;
        let state = db.load(path, config, time.now(), &time.epoch())?;
        let shared = Arc::new(Shared {
            published: RwLock::new(state.index.clone()),
            core: Mutex::new(Core {
                state,
                pending: Batch::default(),
                writing: None,
                closed: false,
                stop: false,
                dead: false,
            }),
            work: Condvar::new(),
            time,
            metrics,
            #[cfg(test)]
            faults: Mutex::new(None),
        });
        let weak = Arc::downgrade(&shared);
        shared.metrics.watch(weak);
        let writer = std::thread::Builder::new()
            .name("lease-writer".into())
            .spawn({
                let shared = Arc::clone(&shared);
                move || write_batches(&shared, db)
            })
            .map_err(OpenError::Thread)?;
        Ok(Self {
            shared,
            writer: Some(writer),
        })
    }

    /// Decides, and waits until the decision is durable. A refusal that changed nothing waits for
    /// nothing.
    fn run<T, E: From<StoreFailure>>(
        &self,
        operation: impl FnOnce(&mut State, Now, &mut Log) -> Result<T, E>,
    ) -> Result<T, E> {
        self.run_in(self.shared.core(), operation)
    }

    fn run_in<T, E: From<StoreFailure>>(
        &self,
        mut core: MutexGuard<'_, Core>,
        operation: impl FnOnce(&mut State, Now, &mut Log) -> Result<T, E>,
    ) -> Result<T, E> {
        if core.dead {
            return Err(StoreFailure::from(writer_gone()).into());
        }
        let Core {
            state,
            pending,
            writing,
            ..
        } = &mut *core;
        let now = self.shared.time.now();
        let before = pending.log.len();
        state.expire(now, &mut pending.log);
        let result = operation(state, now, &mut pending.log);
        let changed = pending.log.len() > before;
        // A success may rest on what is not durable yet, such as the first answer to this
        // idempotency key: then it shares that fate.
        let rests = result.is_ok() && (!pending.log.is_empty() || writing.is_some());
        if !changed && !rests {
            return result;
        }
        pending.wanted = true;
        let ticket = Arc::clone(&pending.ticket);
        drop(core);
        self.shared.work.notify_one();
        ticket.wait()?;
        result
    }
}

impl Shared {
    fn core(&self) -> MutexGuard<'_, Core> {
        lock(&self.core)
    }

    fn published(&self) -> RwLockReadGuard<'_, Index> {
        self.published
            .read()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// Marks the store dead however the writer ends, so that nobody waits for it.
struct Undertaker<'a>(&'a Shared);

impl Drop for Undertaker<'_> {
    fn drop(&mut self) {
        let mut core = self.0.core();
        core.dead = true;
        let pending = std::mem::take(&mut core.pending);
        pending.ticket.resolve(Err(writer_gone()));
        if let Some(ticket) = core.writing.take() {
            ticket.resolve(Err(writer_gone()));
        }
    }
}

fn write_batches(shared: &Shared, mut db: Db) {
    let _undertaker = Undertaker(shared);
    while let Some(batch) = next_batch(shared) {
        let outcome = write(shared, &mut db, &batch.log);
        let mut core = shared.core();
        core.writing = None;
        match &outcome {
            Ok(()) => {
                let mut published = shared
                    .published
                    .write()
                    .unwrap_or_else(PoisonError::into_inner);
                for change in &batch.log {
                    published.apply(change);
                }
                drop(published);
                shared.metrics.observe(&batch.log);
            }
            Err(failed) => {
                // What was decided meanwhile rests on what has just failed.
                let later = std::mem::take(&mut core.pending);
                core.state.undo(&later.log);
                core.state.undo(&batch.log);
                later.ticket.resolve(Err(failed.clone()));
            }
        }
        drop(core);
        batch.ticket.resolve(outcome);
    }
}

/// None: the store is being dropped and everything is written.
fn next_batch(shared: &Shared) -> Option<Batch> {
    let mut core = shared.core();
    while !core.pending.wanted {
        if core.stop {
            return None;
        }
        core = shared
            .work
            .wait(core)
            .unwrap_or_else(PoisonError::into_inner);
    }
    let batch = std::mem::take(&mut core.pending);
    core.writing = Some(Arc::clone(&batch.ticket));
    Some(batch)
}

fn write(shared: &Shared, db: &mut Db, log: &Log) -> Result<(), Failed> {
    #[cfg(test)]
    if let Some(fault) = lock(&shared.faults).take() {
        fault(db);
    }
    if log.is_empty() {
        return Ok(());
    }
    let started = Instant::now();
    let outcome = db.write(log, shared.time.now());
    shared.metrics.wrote(started.elapsed());
    outcome.map_err(|failure| {
        shared.metrics.failed();
        tracing::error!(%failure, "nothing was changed");
        Failed {
            action: failure.action,
            message: failure.message.into(),
        }
    })
}

impl Drop for SqliteStore {
    fn drop(&mut self) {
        self.shared.core().stop = true;
        self.shared.work.notify_one();
        if let Some(writer) = self.writer.take()
            && writer.join().is_err()
        {
            tracing::error!("the lease writer had panicked");
        }
    }
}

impl Gauges for Shared {
    fn active_leases(&self) -> usize {
        self.published().active_total(self.time.now().mono)
    }

    fn active_cooldowns(&self) -> usize {
        self.published().cooldowns_total(self.time.now().mono)
    }
}

impl LeaseStore for SqliteStore {
    fn acquire(
        &self,
        request: &AcquireRequest,
        candidates: &[ProxyRecord],
    ) -> Result<Acquired, AcquireError> {
        let id = LeaseId::random();
        let core = self.shared.core();
        let result = if core.closed {
            Err(AcquireError::Closed)
        } else {
            self.run_in(core, |state, now, log| {
                state.acquire(now, request, candidates, id, log)
            })
        };
        result.inspect_err(|error| self.shared.metrics.refused(error))
    }

    fn get(&self, id: &LeaseId) -> Option<Lease> {
        let now = self.shared.time.now();
        let published = self.shared.published();
        Some(published.get(id, now.mono)?.lease.clone())
    }

    fn renew(&self, id: &LeaseId, ttl: Duration) -> Result<Lease, RenewError> {
        self.run(|state, now, log| state.renew(now, id, ttl, log))
    }

    fn release(&self, id: &LeaseId) -> Result<(), StoreFailure> {
        self.run(|state, now, log| {
            state.release(now, id, log);
            Ok(())
        })
    }

    fn report(
        &self,
        id: &LeaseId,
        report: Report,
        target: Option<Target>,
    ) -> Result<(), ReportError> {
        self.run(|state, now, log| state.report(now, id, report, target, log))
            .inspect(|()| self.shared.metrics.reported(report))
    }

    fn end_for(&self, uid: &Uid) -> Result<usize, StoreFailure> {
        self.run(|state, now, log| Ok(state.end_for(now, uid, log)))
    }

    fn active(&self) -> BTreeMap<Uid, usize> {
        let now = self.shared.time.now();
        self.shared.published().active(now.mono)
    }

    fn sweep(&self) -> Result<(), StoreFailure> {
        self.run(|state, now, log| {
            state.sweep(now, log);
            Ok(())
        })
    }

    fn close(&self) {
        self.shared.core().closed = true;
    }
}

#[cfg(test)]
mod tests;

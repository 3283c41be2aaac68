//! The schedule of all probes: one task, one timer queue.
//!
//! ```text
//!   set() --> timers --due--> queue of its lane --free worker--> probe --result--> standing
//!               ^                                                                     |
//!               +--------------- next time: interval with jitter, or soon ------------+
//! ```
//!
//! A target's every change gives it a new number. A result carries the number that it was made for,
//! so that one for another instance, address or check finds nobody and is thrown away.
//!
//! Proxies that are known to work have workers of their own: those that hang until their timeout
//! can take three quarters of them and no more, so a crowd of dead proxies delays no living one.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use egress_core::ProxyKey;
use futures::stream::BoxStream;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use rustls_pki_types::CertificateDer;
use tokio::sync::Notify;
use tokio::task::{AbortHandle, Id, JoinError, JoinHandle, JoinSet};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::contract::{Health, ProbeClass, Target, Verdict};
use crate::fleet::{CommonFailure, Fleet};
use crate::metrics::Metrics;
use crate::prober::{HttpProbe, Outcome, Probe, ProbeRequest};
use crate::roots::{TlsError, client_config};
use crate::state::{Change, Standing};

/// How the prober works.
#[derive(Debug, Clone)]
pub struct Config {
    /// Probes at one time; at least 1.
    pub workers: usize,
    /// Roots that health-check targets are verified with, beside the system's.
    pub extra_ca: Vec<CertificateDer<'static>>,
    /// Between two probes of a new instance that has not worked yet.
    pub fast_interval: Duration,
    /// How long a new instance is probed that often; after it more and more seldom, down to its
    /// own interval.
    pub fast_for: Duration,
    /// For reaching a new instance's port.
    pub fast_dial_timeout: Duration,
    /// For a whole probe of a new instance, at first. It grows with the time that the instance
    /// takes, so that one behind a slow way is not failed for ever.
    pub fast_timeout: Duration,
    /// Probes a second of all new instances together: many that never start must not keep the
    /// machine busy.
    pub fast_rate: u32,
    /// For the jitter; None: from the system.
    pub seed: Option<u64>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            workers: 128,
            extra_ca: Vec::new(),
            fast_interval: Duration::from_millis(200),
            fast_for: Duration::from_secs(120),
            fast_dial_timeout: Duration::from_millis(500),
            fast_timeout: Duration::from_secs(2),
            fast_rate: 200,
            seed: None,
        }
    }
}

/// Why the prober did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Tls(#[from] TlsError),
}

/// A probe that does not end by itself is given up this long after its timeout.
const OVERTIME: Duration = Duration::from_secs(2);

/// An interval of nothing would keep the machine busy.
const LEAST_INTERVAL: Duration = Duration::from_millis(100);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lane {
    /// Known to work.
    Working,
    /// New or failing.
    Failing,
}

/// Where a target is on its way round.
#[derive(Debug)]
enum Place {
    Waiting(Instant),
    Queued(Instant),
    Probing(Instant, AbortHandle),
}

impl Place {
    fn due(&self) -> Instant {
        match self {
            Self::Waiting(due) | Self::Queued(due) | Self::Probing(due, _) => *due,
        }
    }
}

#[derive(Debug)]
struct Entry {
    target: Target,
    standing: Standing,
    place: Place,
    /// Since when it is new: it has not been healthy yet.
    new_since: Option<Instant>,
}

impl Entry {
    fn lane(&self) -> Lane {
        if self.standing.healthy() == Some(true) {
            Lane::Working
        } else {
            Lane::Failing
        }
    }
}

struct State {
    entries: HashMap<u64, Entry>,
    by_key: BTreeMap<ProxyKey, u64>,
    timers: BTreeSet<(Instant, u64)>,
    /// May hold numbers of targets that are gone: skipped when their turn comes.
    working: VecDeque<u64>,
    failing: VecDeque<u64>,
    /// How many of `working` and `failing` are still waiting.
    queued: usize,
    next_number: u64,
    new_count: usize,
    fleet: Fleet,
    rng: SmallRng,
}

/// The prober. Dropping it does not end its task; the cancellation token given at the start does.
pub struct Engine {
    state: Mutex<State>,
    changed: Notify,
    transitions: crate::transitions::Transitions,
    metrics: Metrics,
    config: Config,
}

impl Engine {
    /// Starts the real prober; the handle ends after `cancel`.
    ///
    /// # Errors
    /// When TLS cannot be set up, such as a further root that is no certificate.
    pub fn start(
        config: Config,
        metrics: Metrics,
        cancel: CancellationToken,
    ) -> Result<(Arc<Self>, JoinHandle<()>), StartError> {
        let probe = Arc::new(HttpProbe::new(client_config(&config.extra_ca)?));
        Ok(Self::start_with(config, probe, metrics, cancel))
    }

    /// Starts with a prober of the caller's choice.
    pub fn start_with(
        config: Config,
        probe: Arc<dyn Probe>,
        metrics: Metrics,
        cancel: CancellationToken,
    ) -> (Arc<Self>, JoinHandle<()>) {
        let rng = SmallRng::seed_from_u64(config.seed.unwrap_or_else(rand::random));
        let engine = Arc::new(Self {
            state: Mutex::new(State {
                entries: HashMap::new(),
                by_key: BTreeMap::new(),
                timers: BTreeSet::new(),
                working: VecDeque::new(),
                failing: VecDeque::new(),
                queued: 0,
                next_number: 0,
                new_count: 0,
                fleet: Fleet::default(),
                rng,
            }),
            changed: Notify::new(),
            transitions: crate::transitions::Transitions::default(),
            metrics,
            config,
        });
        let handle = tokio::spawn(Arc::clone(&engine).run(probe, cancel));
        (engine, handle)
    }

    /// Most proxies fail now for one reason: hardly each proxy's own fault.
    pub fn common_failure(&self) -> Option<CommonFailure> {
        self.lock().fleet.common()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn run(self: Arc<Self>, probe: Arc<dyn Probe>, cancel: CancellationToken) {
        let mut tasks = JoinSet::new();
        let mut running: HashMap<Id, (u64, Lane)> = HashMap::new();
        loop {
            let next = self.start_due(probe.as_ref(), &mut tasks, &mut running);
            let timer = async {
                match next {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = cancel.cancelled() => break,
                Some(ended) = tasks.join_next_with_id(), if !tasks.is_empty() => {
                    self.take(ended, &mut running);
                }
                () = self.changed.notified() => {}
                () = timer => {}
            }
        }
        tasks.shutdown().await;
        self.metrics.in_flight.set(0);
        self.transitions.close();
    }

    /// Queues what is due and starts as much as there are workers for. Gives the time of the next
    /// timer.
    fn start_due(
        &self,
        probe: &dyn Probe,
        tasks: &mut JoinSet<Outcome>,
        running: &mut HashMap<Id, (u64, Lane)>,
    ) -> Option<Instant> {
        let now = Instant::now();
        let mut state = self.lock();
        let state = &mut *state;
        while let Some(&(due, number)) = state.timers.first() {
            if due > now {
                break;
            }
            state.timers.pop_first();
            if let Some(entry) = state.entries.get_mut(&number) {
                entry.place = Place::Queued(due);
                state.queued += 1;
                match entry.lane() {
                    Lane::Working => state.working.push_back(number),
                    Lane::Failing => state.failing.push_back(number),
                }
            }
        }
        let workers = self.config.workers.max(1);
        let failing_workers = (workers * 3 / 4).max(1);
        let mut failing = running
            .values()
            .filter(|(_, lane)| *lane == Lane::Failing)
            .count();
        while running.len() < workers {
            // Whoever was due first; the queues are in that order.
            let working = state.head(Lane::Working);
            let failing_head = state
                .head(Lane::Failing)
                .filter(|_| failing < failing_workers);
            let lane = match (working, failing_head) {
                (None, None) => break,
                (Some(_), None) => Lane::Working,
                (None, Some(_)) => Lane::Failing,
                (Some(working), Some(failing)) if working <= failing => Lane::Working,
                (Some(_), Some(_)) => Lane::Failing,
            };
            let Some(number) = state.queue(lane).pop_front() else {
                break;
            };
            let Some(entry) = state.entries.get_mut(&number) else {
                continue;
            };
            let Place::Queued(due) = entry.place else {
                continue;
            };
            state.queued -= 1;
            let request = self.request(entry, now);
            let limit = request.timeout + OVERTIME;
            let probing = probe.probe(request);
            let handle = tasks.spawn(async move {
                match tokio::time::timeout(limit, probing).await {
                    Ok(outcome) => outcome,
                    Err(_) => Outcome::failure(ProbeClass::Timeout, "the probe did not end"),
                }
            });
            running.insert(handle.id(), (number, lane));
            failing += usize::from(lane == Lane::Failing);
            entry.place = Place::Probing(due, handle);
            self.metrics
                .lag
                .observe(now.duration_since(due).as_secs_f64());
        }
        self.metrics.backlog.set(as_gauge(state.queued));
        self.metrics.in_flight.set(as_gauge(running.len()));
        state.timers.first().map(|(due, _)| *due)
    }

    fn request(&self, entry: &Entry, now: Instant) -> ProbeRequest {
        let check = &entry.target.check;
        let (dial_timeout, timeout) = match entry.new_since {
            None => (check.timeout, check.timeout),
            Some(since) => {
                let waited = now.duration_since(since);
                let grown = self.config.fast_timeout.max(waited / 4);
                let dial = self.config.fast_dial_timeout.max(waited / 20);
                (dial.min(check.timeout), grown.min(check.timeout))
            }
        };
        ProbeRequest {
            host: entry.target.host.clone(),
            port: entry.target.port,
            url: check.url.clone(),
            expected_status: check.expected_status,
            dial_timeout,
            timeout,
        }
    }

    fn take(
        &self,
        ended: Result<(Id, Outcome), JoinError>,
        running: &mut HashMap<Id, (u64, Lane)>,
    ) {
        let (id, outcome) = match ended {
            Ok((id, outcome)) => (id, Some(outcome)),
            Err(error) => {
                let failed = || Outcome::failure(ProbeClass::Io, "the probe failed inside");
                (error.id(), error.is_panic().then(failed))
            }
        };
        let Some((number, _)) = running.remove(&id) else {
            return;
        };
        match outcome {
            Some(outcome) => self.result(number, &outcome),
            // Aborted, because its target changed or went.
            None => {
                self.metrics.discarded.inc();
            }
        }
    }

    fn result(&self, number: u64, outcome: &Outcome) {
        let now = Instant::now();
        let mut state = self.lock();
        let state = &mut *state;
        let Some(entry) = state.entries.get_mut(&number) else {
            self.metrics.discarded.inc();
            return;
        };
        self.metrics.class_counter(outcome.class).inc();
        let due = entry.place.due();
        let fleet = &mut state.fleet;
        let others = if outcome.class == ProbeClass::Success {
            fleet.recover(number);
            None
        } else {
            fleet.fail(number, outcome.class, entry.standing.at_rest(), now);
            fleet
                .is_proven(number)
                .then(|| fleet.others(number, outcome.class))
                .flatten()
                .map(|(failing, others)| {
                    format!(
                        "and {failing} of {others} others: the operator's own network or the \
                         health check's target?"
                    )
                })
        };
        let before = entry.standing.healthy();
        let change = entry.standing.apply(&entry.target.check, outcome, others);
        let after = entry.standing.healthy();
        if before != after {
            self.metrics.count_targets(before, -1);
            self.metrics.count_targets(after, 1);
        }
        let first_success = after == Some(true) && entry.new_since.take().is_some();
        if first_success {
            state.new_count -= 1;
            fleet.prove(number);
        }
        let delay = delay(
            &self.config,
            entry,
            first_success,
            state.new_count,
            now,
            &mut state.rng,
        );
        // From when it was due and not from when it ended, so that a slow probe keeps its rate.
        let next = if entry.new_since.is_some() || first_success {
            now + delay
        } else {
            (due + delay).max(now)
        };
        entry.place = Place::Waiting(next);
        state.timers.insert((next, number));
        if change != Change::None {
            if change == Change::Verdict {
                tracing::debug!(
                    proxy = %entry.target.key,
                    healthy = after == Some(true),
                    result = entry.standing.message(),
                    "health verdict"
                );
            }
            self.transitions.tell(&entry.target.key);
        }
        self.reconsider(fleet);
    }

    fn reconsider(&self, fleet: &mut Fleet) {
        let before = fleet.common();
        match fleet.reconsider() {
            None => {}
            Some(Some(failure)) => {
                self.metrics.set_common_failure(failure.class, true);
                tracing::warn!(
                    class = %failure.class,
                    failing = failure.failing,
                    proxies = failure.proxies,
                    "most proxies fail at one time for one reason: look at the operator's own \
                     network and at the health checks' target before the proxies"
                );
            }
            Some(None) => {
                if let Some(failure) = before {
                    self.metrics.set_common_failure(failure.class, false);
                    tracing::info!(class = %failure.class, "the common failure is over");
                }
            }
        }
    }
}

/// How long until the next probe.
fn delay(
    config: &Config,
    entry: &Entry,
    first_success: bool,
    new_count: usize,
    now: Instant,
    rng: &mut SmallRng,
) -> Duration {
    let interval = entry.target.check.interval.max(LEAST_INTERVAL);
    if let Some(since) = entry.new_since {
        let waited = now.duration_since(since);
        let backing_off = waited.saturating_sub(config.fast_for) / 10;
        let shared = Duration::from_secs(1) / config.fast_rate.max(1)
            * u32::try_from(new_count).unwrap_or(u32::MAX);
        let fast = config.fast_interval.max(backing_off).max(shared);
        return fast.min(interval).mul_f64(rng.random_range(0.8..1.2));
    }
    if first_success {
        // Proxies that came up together, as after a restart, are spread over the whole interval.
        return interval.mul_f64(rng.random_range(0.1..1.0));
    }
    interval.mul_f64(rng.random_range(0.9..1.1))
}

fn as_gauge(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

impl State {
    fn queue(&mut self, lane: Lane) -> &mut VecDeque<u64> {
        match lane {
            Lane::Working => &mut self.working,
            Lane::Failing => &mut self.failing,
        }
    }

    /// When the first in the queue was due; those that are gone are dropped.
    fn head(&mut self, lane: Lane) -> Option<Instant> {
        loop {
            let number = *self.queue(lane).front()?;
            match self.entries.get(&number).map(|entry| &entry.place) {
                Some(Place::Queued(due)) => return Some(*due),
                _ => self.queue(lane).pop_front(),
            };
        }
    }

    /// Takes a target out, with all that is known of it.
    fn take_out(&mut self, number: u64) -> Option<Entry> {
        let entry = self.entries.remove(&number)?;
        match &entry.place {
            Place::Waiting(due) => {
                self.timers.remove(&(*due, number));
            }
            Place::Queued(_) => self.queued -= 1,
            Place::Probing(_, handle) => handle.abort(),
        }
        if entry.new_since.is_some() {
            self.new_count -= 1;
        }
        Some(entry)
    }

    fn put_in(&mut self, entry: Entry) -> u64 {
        let number = self.next_number;
        self.next_number += 1;
        self.timers.insert((entry.place.due(), number));
        self.new_count += usize::from(entry.new_since.is_some());
        self.by_key.insert(entry.target.key.clone(), number);
        self.entries.insert(number, entry);
        number
    }
}

impl Health for Engine {
    fn set(&self, target: Target) {
        let now = Instant::now();
        let mut state = self.lock();
        let old = match state.by_key.get(&target.key).copied() {
            Some(number) => {
                if state
                    .entries
                    .get(&number)
                    .is_some_and(|e| e.target == target)
                {
                    return;
                }
                state.take_out(number).map(|entry| (number, entry))
            }
            None => None,
        };
        let mut fresh = Entry {
            target,
            standing: Standing::default(),
            place: Place::Waiting(now),
            new_since: Some(now),
        };
        let mut proven = false;
        if let Some((number, old)) = old {
            let same_instance = old.target.uid == fresh.target.uid
                && old.target.host == fresh.target.host
                && old.target.port == fresh.target.port;
            if same_instance {
                fresh.standing = old.standing;
                fresh.new_since = old.new_since.map(|_| now);
                proven = state.fleet.is_proven(number);
                let (was, is) = (&old.target.check, &fresh.target.check);
                if was.url != is.url || was.expected_status != is.expected_status {
                    fresh.standing.restart_counts();
                }
            } else {
                self.metrics.count_targets(old.standing.healthy(), -1);
                self.metrics.count_targets(None, 1);
            }
            state.fleet.forget(number);
        } else {
            self.metrics.count_targets(None, 1);
        }
        let number = state.put_in(fresh);
        if proven {
            state.fleet.prove(number);
        }
        self.reconsider(&mut state.fleet);
        drop(state);
        self.changed.notify_one();
    }

    fn remove(&self, key: &ProxyKey) {
        let mut state = self.lock();
        let Some(number) = state.by_key.remove(key) else {
            return;
        };
        if let Some(entry) = state.take_out(number) {
            self.metrics.count_targets(entry.standing.healthy(), -1);
        }
        state.fleet.forget(number);
        self.reconsider(&mut state.fleet);
        drop(state);
        self.changed.notify_one();
    }

    fn verdict(&self, key: &ProxyKey) -> Option<Verdict> {
        let state = self.lock();
        let entry = state.entries.get(state.by_key.get(key)?)?;
        Some(Verdict {
            uid: entry.target.uid.clone(),
            host: entry.target.host.clone(),
            port: entry.target.port,
            healthy: entry.standing.healthy()?,
            latency: entry.standing.latency(),
            class: entry.standing.class()?,
            message: entry.standing.message().to_owned(),
        })
    }

    fn transitions(&self) -> BoxStream<'static, ProxyKey> {
        // Under the lock: a verdict is either in what the stream begins with or told after it.
        let state = self.lock();
        let known: Vec<ProxyKey> = state
            .entries
            .values()
            .filter(|entry| entry.standing.healthy().is_some())
            .map(|entry| entry.target.key.clone())
            .collect();
        self.transitions.subscribe(known)
    }
}

#[cfg(test)]
mod tests;

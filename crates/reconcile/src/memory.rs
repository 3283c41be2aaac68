//! What the reconciler remembers of each Proxy between two reconciles and nowhere else: waits,
//! not facts. Losing it (a restart) costs at most one early retry.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use egress_core::{ErrorClass, ProviderId, ProxyKey, Uid};
use egress_provider::Provider;
use tokio::time::Instant;

use crate::config::Backoff;

/// A delete that was accepted so long ago is sent again.
const RESEND_DELETE: Duration = Duration::from_secs(30);

#[derive(Clone)]
pub(crate) struct Memory {
    pub uid: Uid,
    hold: Option<Hold>,
    /// Errors of the provider in a row.
    pub failures: u32,
    /// Errors of the Kubernetes API in a row.
    pub api_failures: u32,
    delete_accepted: Option<(ProviderId, Instant)>,
    provisioning: Option<(ProviderId, Instant)>,
    losses: u32,
    last_loss: Option<Instant>,
    pub leases_ended: bool,
    pub deletion_told: bool,
}

/// No calls of the provider until then, or until what the error rests on changes.
#[derive(Clone)]
struct Hold {
    /// None: latched.
    until: Option<Instant>,
    on: HoldKey,
}

/// What an error rests on: when any of it changes, it is worth another try at once.
#[derive(Clone)]
pub(crate) struct HoldKey {
    pub generation: Option<i64>,
    pub deleting: bool,
    /// The hash that is wanted, or why there is none.
    pub wanted: String,
    pub target: Option<Arc<dyn Provider>>,
    pub home: Option<Arc<dyn Provider>>,
}

impl PartialEq for HoldKey {
    fn eq(&self, other: &Self) -> bool {
        let same = |a: &Option<Arc<dyn Provider>>, b: &Option<Arc<dyn Provider>>| match (a, b) {
            (Some(a), Some(b)) => Arc::ptr_eq(a, b),
            (None, None) => true,
            _ => false,
        };
        self.generation == other.generation
            && self.deleting == other.deleting
            && self.wanted == other.wanted
            && same(&self.target, &other.target)
            && same(&self.home, &other.home)
    }
}

impl Memory {
    pub(crate) fn of(uid: Uid) -> Self {
        Self {
            uid,
            hold: None,
            failures: 0,
            api_failures: 0,
            delete_accepted: None,
            provisioning: None,
            losses: 0,
            last_loss: None,
            leases_ended: false,
            deletion_told: false,
        }
    }

    /// How long an earlier error is still waited out. `Some(None)`: until something changes.
    pub(crate) fn held(&mut self, on: &HoldKey) -> Option<Option<Instant>> {
        match &self.hold {
            Some(hold) if hold.on != *on => {
                self.hold = None;
                self.failures = 0;
                None
            }
            Some(hold) if hold.until.is_some_and(|until| until <= Instant::now()) => None,
            Some(hold) => Some(hold.until),
            None => None,
        }
    }

    /// Waits after an error of `class`, as long as `on` stays the same. Returns until when.
    pub(crate) fn hold(
        &mut self,
        class: ErrorClass,
        on: HoldKey,
        backoff: &Backoff,
    ) -> Option<Instant> {
        self.failures = self.failures.saturating_add(1);
        let now = Instant::now();
        let until = match class {
            // Latched, except while deleting: a Proxy can always finish deleting.
            ErrorClass::Permanent if !on.deleting => None,
            ErrorClass::QuotaExceeded => Some(now + backoff.quota()),
            _ => Some(now + backoff.after(self.failures)),
        };
        self.hold = Some(Hold { until, on });
        until
    }

    /// The provider is back: what waits for it waits no longer than `at_most`.
    pub(crate) fn shorten_hold(&mut self, at_most: Duration) {
        if let Some(Hold {
            until: Some(until), ..
        }) = &mut self.hold
        {
            *until = (*until).min(Instant::now() + at_most);
        }
    }

    pub(crate) fn no_failure(&mut self) {
        self.hold = None;
        self.failures = 0;
    }

    /// Notes an accepted delete; true: the first of this instance.
    pub(crate) fn delete_was_accepted(&mut self, id: &ProviderId) -> bool {
        let first = self.delete_accepted.as_ref().is_none_or(|(d, _)| d != id);
        self.delete_accepted = Some((id.clone(), Instant::now()));
        first
    }

    pub(crate) fn delete_is_accepted(&self, id: &ProviderId) -> bool {
        self.delete_accepted
            .as_ref()
            .is_some_and(|(d, at)| d == id && at.elapsed() < RESEND_DELETE)
    }

    /// The instance is gone; false: it went without our doing.
    pub(crate) fn instance_is_gone(&mut self) -> bool {
        self.provisioning = None;
        self.delete_accepted.take().is_some()
    }

    /// Since when this process has seen it provisioning.
    pub(crate) fn provisioning_since(&mut self, id: &ProviderId) -> Instant {
        match &self.provisioning {
            Some((known, since)) if known == id => *since,
            _ => {
                let now = Instant::now();
                self.provisioning = Some((id.clone(), now));
                now
            }
        }
    }

    /// The instance died (stopped, vanished, never came up).
    pub(crate) fn note_loss(&mut self, forget_after: Duration) {
        let now = Instant::now();
        if self
            .last_loss
            .is_some_and(|at| now.duration_since(at) > forget_after)
        {
            self.losses = 0;
        }
        self.losses = self.losses.saturating_add(1);
        self.last_loss = Some(now);
    }

    /// When an instance may be made again: at once after the first loss, later after each next.
    pub(crate) fn create_not_before(&self, backoff: &Backoff) -> Option<Instant> {
        let wait = backoff.plain(self.losses.checked_sub(1).filter(|n| *n > 0)?);
        self.last_loss
            .map(|at| at + wait)
            .filter(|due| *due > Instant::now())
    }
}

/// Of all Proxies. A reconcile takes its Memory out as a copy and puts it back.
#[derive(Default)]
pub(crate) struct Memories(Mutex<HashMap<ProxyKey, Memory>>);

impl Memories {
    fn lock(&self) -> MutexGuard<'_, HashMap<ProxyKey, Memory>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn get(&self, key: &ProxyKey) -> Option<Memory> {
        self.lock().get(key).cloned()
    }

    pub(crate) fn put(&self, key: &ProxyKey, memory: Memory) {
        self.lock().insert(key.clone(), memory);
    }

    pub(crate) fn remove(&self, key: &ProxyKey) -> Option<Memory> {
        self.lock().remove(key)
    }

    pub(crate) fn shorten_hold(&self, key: &ProxyKey, at_most: Duration) {
        if let Some(memory) = self.lock().get_mut(key) {
            memory.shorten_hold(at_most);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(generation: i64, deleting: bool) -> HoldKey {
        HoldKey {
            generation: Some(generation),
            deleting,
            wanted: "h".into(),
            target: None,
            home: None,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn permanent_latches_until_something_changes_but_never_a_deletion() {
        let backoff = Backoff::default();
        let mut memory = Memory::of(Uid::new("u"));
        assert_eq!(
            memory.hold(ErrorClass::Permanent, on(1, false), &backoff),
            None
        );
        tokio::time::advance(Duration::from_secs(86_400)).await;
        assert_eq!(memory.held(&on(1, false)), Some(None));
        assert_eq!(memory.held(&on(2, false)), None);
        assert!(
            memory
                .hold(ErrorClass::Permanent, on(2, true), &backoff)
                .is_some()
        );
    }

    #[tokio::test(start_paused = true)]
    async fn transient_waits_longer_each_time_up_to_the_limit() {
        let backoff = Backoff::default();
        let mut memory = Memory::of(Uid::new("u"));
        let mut last = Duration::ZERO;
        for n in 0..20 {
            let until = memory
                .hold(ErrorClass::Transient, on(1, false), &backoff)
                .unwrap();
            let wait = until - Instant::now();
            assert!(wait >= Duration::from_millis(800), "{wait:?}");
            assert!(wait <= Duration::from_secs(360), "{wait:?}");
            if n < 8 {
                assert!(wait > last, "{n}: {wait:?} after {last:?}");
            }
            last = wait;
            assert!(memory.held(&on(1, false)).is_some());
            tokio::time::advance(wait).await;
            assert!(memory.held(&on(1, false)).is_none());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_loss_is_made_good_at_once_and_the_next_later() {
        let backoff = Backoff::default();
        let mut memory = Memory::of(Uid::new("u"));
        assert_eq!(memory.create_not_before(&backoff), None);
        memory.note_loss(backoff.max);
        assert_eq!(memory.create_not_before(&backoff), None);
        memory.note_loss(backoff.max);
        let second = memory.create_not_before(&backoff).unwrap() - Instant::now();
        memory.note_loss(backoff.max);
        let third = memory.create_not_before(&backoff).unwrap() - Instant::now();
        assert!(second >= Duration::from_secs(1) && third > second);
        tokio::time::advance(backoff.max * 2).await;
        memory.note_loss(backoff.max);
        assert_eq!(memory.create_not_before(&backoff), None);
    }
}

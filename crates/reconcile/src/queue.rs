//! Which Proxy is due: a queue of keys in which each key runs at most once at a time, always runs
//! again after its last wake-up, and no group (provider) takes all the room.
//!
//! ```text
//!  wake(key, at) ---> due (earliest wins) ---> running ---> done(key, again?)
//!                        ^                        |
//!                        +--- woken while running +
//! ```

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use egress_core::ProxyKey;
use tokio::sync::Notify;
use tokio::time::Instant;

type Slot = (Instant, u64);

#[derive(Default)]
struct Group {
    due: BTreeMap<Slot, ProxyKey>,
    running: usize,
}

#[derive(Default)]
struct Inner {
    groups: BTreeMap<String, Group>,
    waiting: HashMap<ProxyKey, (String, Slot)>,
    /// The group that a running key counts against, and when it was woken meanwhile.
    running: HashMap<ProxyKey, (String, Option<(String, Instant)>)>,
    sequence: u64,
}

/// See the module.
pub(crate) struct Queue {
    inner: Mutex<Inner>,
    changed: Notify,
    per_group: usize,
}

impl Queue {
    pub(crate) fn new(per_group: usize) -> Self {
        Self {
            inner: Mutex::default(),
            changed: Notify::new(),
            per_group: per_group.max(1),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `key` at `at`, or earlier where it is due earlier already.
    pub(crate) fn wake(&self, key: ProxyKey, group: &str, at: Instant) {
        self.lock().wake(key, group, at);
        self.changed.notify_one();
    }

    /// The next key that is due, as soon as there is one whose group has room. It counts as
    /// running until [`Queue::done`]. For one consumer.
    pub(crate) async fn next(&self) -> ProxyKey {
        loop {
            let changed = self.changed.notified();
            let earliest = {
                let mut inner = self.lock();
                match inner.earliest(self.per_group) {
                    Some((group, slot)) if slot.0 <= Instant::now() => {
                        if let Some(key) = inner.start(&group, slot) {
                            return key;
                        }
                        continue;
                    }
                    other => other.map(|(_, slot)| slot.0),
                }
            };
            match earliest {
                Some(at) => {
                    tokio::select! {
                        () = changed => {}
                        () = tokio::time::sleep_until(at) => {}
                    }
                }
                None => changed.await,
            }
        }
    }

    /// `key` ran; `again`: when it wants to run next. A wake-up while it ran counts too.
    pub(crate) fn done(&self, key: &ProxyKey, again: Option<(&str, Instant)>) {
        {
            let mut inner = self.lock();
            let Some((group, woken)) = inner.running.remove(key) else {
                return;
            };
            if let Some(g) = inner.groups.get_mut(&group) {
                g.running = g.running.saturating_sub(1);
            }
            if let Some((group, at)) = woken {
                inner.wake(key.clone(), &group, at);
            }
            if let Some((group, at)) = again {
                inner.wake(key.clone(), group, at);
            }
            inner.tidy(&group);
        }
        self.changed.notify_one();
    }

    /// Keys that are due now and not running yet.
    pub(crate) fn depth(&self) -> usize {
        let now = Instant::now();
        self.lock()
            .groups
            .values()
            .map(|g| g.due.range(..=(now, u64::MAX)).count())
            .sum()
    }
}

impl Inner {
    fn wake(&mut self, key: ProxyKey, group: &str, at: Instant) {
        if let Some((_, woken)) = self.running.get_mut(&key) {
            let at = woken.as_ref().map_or(at, |(_, other)| at.min(*other));
            *woken = Some((group.to_owned(), at));
            return;
        }
        let mut at = at;
        if let Some((old_group, slot)) = self.waiting.remove(&key) {
            at = at.min(slot.0);
            if let Some(g) = self.groups.get_mut(&old_group) {
                g.due.remove(&slot);
            }
            if old_group != group {
                self.tidy(&old_group);
            }
        }
        self.sequence += 1;
        let slot = (at, self.sequence);
        self.groups
            .entry(group.to_owned())
            .or_default()
            .due
            .insert(slot, key.clone());
        self.waiting.insert(key, (group.to_owned(), slot));
    }

    fn earliest(&self, per_group: usize) -> Option<(String, Slot)> {
        self.groups
            .iter()
            .filter(|(_, g)| g.running < per_group)
            .filter_map(|(name, g)| g.due.first_key_value().map(|(slot, _)| (name, *slot)))
            .min_by_key(|(_, slot)| *slot)
            .map(|(name, slot)| (name.clone(), slot))
    }

    fn start(&mut self, group: &str, slot: Slot) -> Option<ProxyKey> {
        let g = self.groups.get_mut(group)?;
        let key = g.due.remove(&slot)?;
        g.running += 1;
        self.waiting.remove(&key);
        self.running.insert(key.clone(), (group.to_owned(), None));
        Some(key)
    }

    fn tidy(&mut self, group: &str) {
        if self
            .groups
            .get(group)
            .is_some_and(|g| g.due.is_empty() && g.running == 0)
        {
            self.groups.remove(group);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn key(n: u8) -> ProxyKey {
        ProxyKey::new("default", format!("p{n}"))
    }

    async fn idle(queue: &Queue) -> bool {
        tokio::time::timeout(Duration::from_millis(1), queue.next())
            .await
            .is_err()
    }

    #[tokio::test(start_paused = true)]
    async fn the_earliest_wake_up_wins_and_many_are_one() {
        let queue = Queue::new(10);
        let now = Instant::now();
        queue.wake(key(1), "a", now + Duration::from_secs(60));
        queue.wake(key(1), "a", now + Duration::from_secs(2));
        queue.wake(key(1), "a", now + Duration::from_secs(30));
        assert_eq!(queue.next().await, key(1));
        assert_eq!(now.elapsed().as_secs(), 2);
        queue.done(&key(1), None);
        assert!(idle(&queue).await);
    }

    #[tokio::test(start_paused = true)]
    async fn a_key_woken_while_it_runs_runs_again_and_not_at_the_same_time() {
        let queue = Queue::new(10);
        let now = Instant::now();
        queue.wake(key(1), "a", now);
        assert_eq!(queue.next().await, key(1));
        queue.wake(key(1), "a", now);
        assert!(idle(&queue).await, "it runs still");
        queue.done(&key(1), Some(("a", now + Duration::from_secs(300))));
        assert_eq!(queue.next().await, key(1));
        assert!(now.elapsed() < Duration::from_secs(1));
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_group_does_not_hold_up_the_others() {
        let queue = Queue::new(2);
        let now = Instant::now();
        for n in 0..10 {
            queue.wake(key(n), "slow", now);
        }
        queue.wake(key(100), "fast", now + Duration::from_millis(1));
        assert_eq!(queue.next().await, key(0));
        assert_eq!(queue.next().await, key(1));
        assert_eq!(queue.next().await, key(100));
        assert!(idle(&queue).await);
        assert_eq!(queue.depth(), 8);
        queue.done(&key(0), None);
        assert_eq!(queue.next().await, key(2));
    }

    #[derive(Debug, Clone)]
    enum Op {
        Wake(u8, u8, u64),
        Start,
        Finish(u8, bool),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            (0..6u8, 0..3u8, 0..50u64).prop_map(|(k, g, at)| Op::Wake(k, g, at)),
            Just(Op::Start),
            (0..6u8, any::<bool>()).prop_map(|(k, again)| Op::Finish(k, again)),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

        /// Whatever happens: each key runs after its last wake-up, once at a time.
        #[test]
        fn nothing_is_lost(ops in prop::collection::vec(op(), 1..80)) {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_time()
                .start_paused(true)
                .build()
                .unwrap();
            runtime.block_on(async {
                let queue = Queue::new(2);
                let mut pending = std::collections::BTreeSet::new();
                let mut running = std::collections::BTreeSet::new();
                for op in ops {
                    match op {
                        Op::Wake(k, g, at) => {
                            let at = Instant::now() + Duration::from_millis(at);
                            queue.wake(key(k), &format!("g{g}"), at);
                            pending.insert(key(k));
                        }
                        Op::Start => {
                            let next = tokio::time::timeout(Duration::from_millis(60), queue.next());
                            if let Ok(k) = next.await {
                                assert!(running.insert(k.clone()), "{k} runs twice at a time");
                                assert!(pending.remove(&k), "{k} was not woken");
                            }
                        }
                        Op::Finish(k, again) => {
                            if running.remove(&key(k)) {
                                let again = again.then(|| ("g0", Instant::now()));
                                if again.is_some() {
                                    pending.insert(key(k));
                                }
                                queue.done(&key(k), again);
                            }
                        }
                    }
                }
                for k in running {
                    queue.done(&k, None);
                }
                while !pending.is_empty() {
                    let k = tokio::time::timeout(Duration::from_secs(1), queue.next())
                        .await
                        .expect("a wake-up was lost");
                    pending.remove(&k);
                    queue.done(&k, None);
                }
                assert!(idle(&queue).await);
                assert!(queue.lock().groups.is_empty());
            });
        }
    }
}

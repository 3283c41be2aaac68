//! Many proxies that fail at one moment for one reason are hardly all broken: the operator's own
//! network, or the probed URL, is. Reading that as so many bans is the mistake to prevent
//! (metric-scraper#25).

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Duration;

use tokio::time::Instant;

use crate::contract::ProbeClass;

/// "At one moment": long enough for the failure thresholds of all to be reached.
const WINDOW: Duration = Duration::from_secs(120);
/// Two proxies failing together are no crowd.
const CROWD: usize = 3;

/// Most proxies fail at one time for one reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommonFailure {
    pub class: ProbeClass,
    /// How many fail this way.
    pub failing: usize,
    /// Of how many that once worked.
    pub proxies: usize,
}

/// Follows when proxies that worked began to fail.
#[derive(Debug, Default)]
pub(crate) struct Fleet {
    /// Those that were healthy at some time.
    proven: HashSet<u64>,
    /// Those that began to fail within the window, or while a common failure was on.
    failing: HashMap<u64, (Instant, ProbeClass)>,
    order: VecDeque<(Instant, u64)>,
    counts: HashMap<ProbeClass, usize>,
    common: Option<ProbeClass>,
}

impl Fleet {
    /// It became healthy for the first time.
    pub(crate) fn prove(&mut self, id: u64) {
        self.proven.insert(id);
    }

    /// A proxy changed its id, because its check changed; or its state started over.
    pub(crate) fn forget(&mut self, id: u64) {
        self.recover(id);
        self.proven.remove(&id);
    }

    pub(crate) fn is_proven(&self, id: u64) -> bool {
        self.proven.contains(&id)
    }

    pub(crate) fn recover(&mut self, id: u64) {
        if let Some((_, class)) = self.failing.remove(&id) {
            self.uncount(class);
        }
    }

    /// A proxy failed; `first` of a row.
    pub(crate) fn fail(&mut self, id: u64, class: ProbeClass, first: bool, now: Instant) {
        self.prune(now);
        if !self.is_proven(id) {
            return;
        }
        if let Some((_, counted)) = self.failing.get_mut(&id) {
            let before = std::mem::replace(counted, class);
            self.uncount(before);
        } else if first {
            self.failing.insert(id, (now, class));
            self.order.push_back((now, id));
        } else {
            return;
        }
        *self.counts.entry(class).or_default() += 1;
    }

    fn uncount(&mut self, class: ProbeClass) {
        if let Some(count) = self.counts.get_mut(&class) {
            *count = count.saturating_sub(1);
        }
    }

    fn prune(&mut self, now: Instant) {
        // While it lasts, its members stay: else it would seem over once they have failed for long.
        if self.common.is_some() {
            return;
        }
        while let Some(&(at, id)) = self.order.front() {
            if now.duration_since(at) <= WINDOW {
                break;
            }
            self.order.pop_front();
            if self.failing.get(&id).is_some_and(|(since, _)| *since == at) {
                self.recover(id);
            }
        }
    }

    /// "and 41 of 42 others" for a proxy that now turns unhealthy with this class.
    pub(crate) fn others(&self, id: u64, class: ProbeClass) -> Option<(usize, usize)> {
        let counted = self.counts.get(&class).copied().unwrap_or_default();
        let own = usize::from(self.failing.get(&id).is_some_and(|(_, own)| *own == class));
        let failing = counted - own.min(counted);
        let others = self.proven.len() - usize::from(self.is_proven(id));
        (failing + 1 >= CROWD && failing * 2 >= others).then_some((failing, others))
    }

    pub(crate) fn common(&self) -> Option<CommonFailure> {
        self.common.map(|class| CommonFailure {
            class,
            failing: self.counts.get(&class).copied().unwrap_or_default(),
            proxies: self.proven.len(),
        })
    }

    /// Looks again; Some when it began (`Some(failure)`) or ended (`None`).
    pub(crate) fn reconsider(&mut self) -> Option<Option<CommonFailure>> {
        match self.common {
            None => {
                let (class, count) = self.counts.iter().max_by_key(|(_, count)| **count)?;
                if *count >= CROWD && *count * 2 >= self.proven.len() {
                    self.common = Some(*class);
                    return Some(self.common());
                }
                None
            }
            Some(class) => {
                let count = self.counts.get(&class).copied().unwrap_or_default();
                // Well below where it began, so that it does not come and go.
                if count < CROWD || count * 4 < self.proven.len() {
                    self.common = None;
                    return Some(None);
                }
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fleet(proven: u64) -> (Fleet, Instant) {
        let mut fleet = Fleet::default();
        for id in 0..proven {
            fleet.prove(id);
        }
        (fleet, Instant::now())
    }

    #[tokio::test(start_paused = true)]
    async fn a_crowd_that_fails_together_is_told_once_until_it_is_over() {
        let (mut fleet, now) = fleet(43);
        for id in 0..21 {
            fleet.fail(id, ProbeClass::Timeout, true, now);
            assert_eq!(fleet.reconsider(), None, "after {id}");
        }
        fleet.fail(21, ProbeClass::Timeout, true, now);
        let failure = CommonFailure {
            class: ProbeClass::Timeout,
            failing: 22,
            proxies: 43,
        };
        assert_eq!(fleet.reconsider(), Some(Some(failure)));
        for id in 22..43 {
            fleet.fail(id, ProbeClass::Timeout, true, now + WINDOW * 2);
            assert_eq!(fleet.reconsider(), None);
        }
        assert_eq!(fleet.others(0, ProbeClass::Timeout), Some((42, 42)));
        let mut ended = 0;
        for id in 0..43 {
            fleet.recover(id);
            ended += usize::from(fleet.reconsider() == Some(None));
        }
        assert_eq!(ended, 1);
        assert_eq!(fleet.others(0, ProbeClass::Timeout), None);
    }

    #[tokio::test(start_paused = true)]
    async fn failures_apart_in_time_or_reason_are_no_crowd() {
        let (mut fleet, now) = fleet(6);
        for id in 0..6 {
            let at = now + WINDOW * 2 * u32::try_from(id).unwrap();
            fleet.fail(id, ProbeClass::Dial, true, at);
            assert_eq!(fleet.reconsider(), None);
            assert_eq!(fleet.others(id, ProbeClass::Dial), None);
        }
        let (mut fleet, now) = super::tests::fleet(6);
        let classes = [ProbeClass::Dial, ProbeClass::Tls, ProbeClass::Io];
        for id in 0..6u64 {
            let class = classes[usize::try_from(id).unwrap() % 3];
            fleet.fail(id, class, true, now);
            assert_eq!(fleet.reconsider(), None);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn those_that_never_worked_do_not_count() {
        let (mut fleet, now) = fleet(3);
        for id in 10..20 {
            fleet.fail(id, ProbeClass::Dial, true, now);
        }
        assert_eq!(fleet.reconsider(), None);
        fleet.forget(0);
        fleet.forget(1);
        fleet.fail(2, ProbeClass::Dial, true, now);
        assert_eq!(fleet.reconsider(), None);
    }
}

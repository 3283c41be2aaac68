//! The in-memory index that answers reads: active leases, their count by proxy, cooldowns.
//!
//! A store keeps it up to date from [`Change`]s, which carry the entry before and after. That
//! makes each change reversible: a batch whose write failed is undone exactly.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use egress_core::Uid;
use egress_core::target::Target;
use jiff::Timestamp;

use crate::contract::{Lease, LeaseId};
use crate::time::Mono;

/// An active lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Held {
    pub lease: Lease,
    pub deadline: Mono,
    pub key: Option<IdempotencyKey>,
}

/// An idempotency key and a digest of the body that it came with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct IdempotencyKey {
    pub text: String,
    pub body: [u8; 32],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EndReason {
    Expired,
    Released,
    /// The proxy object is being deleted, is gone, or was made again.
    ProxyGone,
}

impl EndReason {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Expired => "expired",
            Self::Released => "released",
            Self::ProxyGone => "proxy_gone",
        }
    }

    pub fn parse(text: &str) -> Option<Self> {
        [Self::Expired, Self::Released, Self::ProxyGone]
            .into_iter()
            .find(|reason| reason.as_str() == text)
    }
}

/// What is remembered of a lease for a late report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ended {
    pub uid: Uid,
    pub target: Option<Target>,
    pub reason: EndReason,
    pub at: Timestamp,
    /// From here on the lease is unknown.
    pub forget: Mono,
}

/// No target: for every target.
pub(crate) type CooldownKey = (Uid, Option<Target>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cooldown {
    pub started: Timestamp,
    pub until: Timestamp,
    pub deadline: Mono,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Entry {
    Active(Arc<Held>),
    Ended(Arc<Ended>),
}

/// One change of the store, with what was there before.
#[derive(Debug, Clone)]
pub(crate) enum Change {
    Lease {
        id: LeaseId,
        before: Option<Entry>,
        after: Option<Entry>,
    },
    Cooldown {
        key: CooldownKey,
        before: Option<Cooldown>,
        after: Option<Cooldown>,
    },
}

impl Change {
    pub fn inverse(&self) -> Self {
        match self.clone() {
            Self::Lease { id, before, after } => Self::Lease {
                id,
                before: after,
                after: before,
            },
            Self::Cooldown { key, before, after } => Self::Cooldown {
                key,
                before: after,
                after: before,
            },
        }
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Index {
    leases: HashMap<LeaseId, Arc<Held>>,
    counts: BTreeMap<Uid, usize>,
    deadlines: BTreeSet<(Mono, LeaseId)>,
    cooldowns: BTreeMap<CooldownKey, Cooldown>,
}

impl Index {
    pub fn apply(&mut self, change: &Change) {
        match change {
            Change::Lease { id, before, after } => {
                if let Some(Entry::Active(held)) = before {
                    self.remove(id, held);
                }
                if let Some(Entry::Active(held)) = after {
                    self.insert(id, held);
                }
            }
            Change::Cooldown { key, after, .. } => match after {
                Some(cooldown) => {
                    self.cooldowns.insert(key.clone(), *cooldown);
                }
                None => {
                    self.cooldowns.remove(key);
                }
            },
        }
    }

    fn insert(&mut self, id: &LeaseId, held: &Arc<Held>) {
        *self.counts.entry(held.lease.uid.clone()).or_default() += 1;
        self.deadlines.insert((held.deadline, id.clone()));
        self.leases.insert(id.clone(), Arc::clone(held));
    }

    fn remove(&mut self, id: &LeaseId, held: &Held) {
        if let Some(count) = self.counts.get_mut(&held.lease.uid) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&held.lease.uid);
            }
        }
        self.deadlines.remove(&(held.deadline, id.clone()));
        self.leases.remove(id);
    }

    /// The lease, unless its time is over at `now`.
    pub fn get(&self, id: &LeaseId, now: Mono) -> Option<&Arc<Held>> {
        self.leases.get(id).filter(|held| held.deadline > now)
    }

    /// The lease, its time being over or not.
    pub fn entry(&self, id: &LeaseId) -> Option<&Arc<Held>> {
        self.leases.get(id)
    }

    pub fn of(&self, uid: &Uid) -> impl Iterator<Item = &Arc<Held>> {
        self.leases
            .values()
            .filter(move |held| held.lease.uid == *uid)
    }

    /// The first lease whose time is over at `now`.
    pub fn first_due(&self, now: Mono) -> Option<&Arc<Held>> {
        let (deadline, id) = self.deadlines.first()?;
        if *deadline > now {
            return None;
        }
        self.leases.get(id)
    }

    /// Leases by proxy object, those counted too whose time is over but that nobody ended yet.
    pub fn held(&self, uid: &Uid) -> usize {
        self.counts.get(uid).copied().unwrap_or(0)
    }

    /// Active leases by proxy object at `now`.
    pub fn active(&self, now: Mono) -> BTreeMap<Uid, usize> {
        let mut counts = self.counts.clone();
        let due = self.deadlines.iter().take_while(|(at, _)| *at <= now);
        for held in due.filter_map(|(_, id)| self.leases.get(id)) {
            if let Some(count) = counts.get_mut(&held.lease.uid) {
                *count -= 1;
                if *count == 0 {
                    counts.remove(&held.lease.uid);
                }
            }
        }
        counts
    }

    pub fn active_total(&self, now: Mono) -> usize {
        let due = self.deadlines.iter().take_while(|(at, _)| *at <= now);
        self.leases.len() - due.count()
    }

    pub fn cooldown(&self, key: &CooldownKey) -> Option<&Cooldown> {
        self.cooldowns.get(key)
    }

    /// Whether the proxy may not be used for `target` at `now`.
    pub fn cooling(&self, uid: &Uid, target: Option<&Target>, now: Mono) -> bool {
        let active = |target: Option<Target>| {
            self.cooldowns
                .get(&(uid.clone(), target))
                .is_some_and(|cooldown| cooldown.deadline > now)
        };
        active(None) || target.is_some_and(|target| active(Some(target.clone())))
    }

    pub fn cooldowns(&self) -> impl Iterator<Item = (&CooldownKey, &Cooldown)> {
        self.cooldowns.iter()
    }

    pub fn cooldowns_of(&self, uid: &Uid) -> impl Iterator<Item = (&CooldownKey, &Cooldown)> {
        // A pair sorts by its uid first, and no target comes before any.
        self.cooldowns
            .range((uid.clone(), None)..)
            .take_while(move |((of, _), _)| of == uid)
    }

    pub fn cooldowns_total(&self, now: Mono) -> usize {
        self.cooldowns
            .values()
            .filter(|cooldown| cooldown.deadline > now)
            .count()
    }
}

//! The policy, without I/O: what each call does to the store's state.
//!
//! Each operation applies its [`Change`]s at once and appends them to a log. The caller makes the
//! log durable before it answers, or undoes it.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use egress_core::target::Target;
use egress_core::{ProxyRecord, Uid};
use sha2::{Digest, Sha256};

use crate::config::Config;
use crate::contract::{
    AcquireError, AcquireRequest, Acquired, Lease, LeaseId, RenewError, Report, ReportError,
};
use crate::index::{
    Change, Cooldown, CooldownKey, EndReason, Ended, Entry, Held, IdempotencyKey, Index,
};
use crate::select::select;
use crate::time::{Mono, Now, millis, wall_after};

/// A log of changes, in order.
pub(crate) type Log = Vec<Change>;

/// Everything that is known, active and ended.
#[derive(Debug, Clone)]
pub(crate) struct State {
    config: Config,
    pub(crate) index: Index,
    ended: HashMap<LeaseId, Arc<Ended>>,
    forget: BTreeSet<(Mono, LeaseId)>,
    keys: HashMap<String, LeaseId>,
}

impl State {
    pub fn new(config: Config) -> Self {
        Self {
            config,
            index: Index::default(),
            ended: HashMap::new(),
            forget: BTreeSet::new(),
            keys: HashMap::new(),
        }
    }

    /// Makes one change; its inverse undoes it.
    pub fn apply(&mut self, change: &Change) {
        self.index.apply(change);
        let Change::Lease { id, before, after } = change else {
            return;
        };
        match before {
            Some(Entry::Active(held)) => {
                if let Some(key) = &held.key {
                    self.keys.remove(&key.text);
                }
            }
            Some(Entry::Ended(ended)) => {
                self.ended.remove(id);
                self.forget.remove(&(ended.forget, id.clone()));
            }
            None => {}
        }
        match after {
            Some(Entry::Active(held)) => {
                if let Some(key) = &held.key {
                    self.keys.insert(key.text.clone(), id.clone());
                }
            }
            Some(Entry::Ended(ended)) => {
                self.forget.insert((ended.forget, id.clone()));
                self.ended.insert(id.clone(), Arc::clone(ended));
            }
            None => {}
        }
    }

    /// Undoes a log.
    pub fn undo(&mut self, log: &[Change]) {
        for change in log.iter().rev() {
            self.apply(&change.inverse());
        }
    }

    fn put(&mut self, log: &mut Log, change: Change) {
        self.apply(&change);
        log.push(change);
    }

    fn end(&mut self, log: &mut Log, held: &Arc<Held>, reason: EndReason, now: Now) {
        // A lease that ran out ended at its deadline, whenever that was noticed.
        let (at, from) = match reason {
            EndReason::Expired => (held.lease.expires_at, held.deadline),
            EndReason::Released | EndReason::ProxyGone => (now.wall, now.mono),
        };
        let ended = Ended {
            uid: held.lease.uid.clone(),
            target: held.lease.target.clone(),
            reason,
            at,
            forget: from.after(millis(self.config.cooldown)),
        };
        self.put(
            log,
            Change::Lease {
                id: held.lease.id.clone(),
                before: Some(Entry::Active(Arc::clone(held))),
                after: Some(Entry::Ended(Arc::new(ended))),
            },
        );
    }

    /// Ends the leases whose time is over. Every operation does this first, so that the end of a
    /// lease is as durable as whatever was decided because of it.
    pub fn expire(&mut self, now: Now, log: &mut Log) {
        while let Some(held) = self.index.first_due(now.mono).cloned() {
            self.end(log, &held, EndReason::Expired, now);
        }
    }

    /// Forgets what nothing can ask for any more.
    pub fn sweep(&mut self, now: Now, log: &mut Log) {
        self.expire(now, log);
        while let Some((at, id)) = self.forget.first().cloned() {
            if at > now.mono {
                break;
            }
            let before = self.ended.get(&id).cloned().map(Entry::Ended);
            self.put(
                log,
                Change::Lease {
                    id,
                    before,
                    after: None,
                },
            );
        }
        let over: Vec<_> = self
            .index
            .cooldowns()
            .filter(|(_, cooldown)| cooldown.deadline <= now.mono)
            .map(|(key, cooldown)| (key.clone(), *cooldown))
            .collect();
        self.thaw(log, over);
    }

    fn thaw(&mut self, log: &mut Log, over: Vec<(CooldownKey, Cooldown)>) {
        for (key, cooldown) in over {
            self.put(
                log,
                Change::Cooldown {
                    key,
                    before: Some(cooldown),
                    after: None,
                },
            );
        }
    }

    fn check_ttl(&self, ttl: Duration) -> Option<Duration> {
        (ttl.as_millis() == 0 || ttl > self.config.max_ttl).then_some(self.config.max_ttl)
    }

    /// `id` is what a new lease will be called.
    pub fn acquire(
        &mut self,
        now: Now,
        request: &AcquireRequest,
        candidates: &[ProxyRecord],
        id: LeaseId,
        log: &mut Log,
    ) -> Result<Acquired, AcquireError> {
        if let Some(maximum) = self.check_ttl(request.ttl) {
            return Err(AcquireError::InvalidTtl { maximum });
        }
        let key = request.idempotency_key.as_ref().map(|text| IdempotencyKey {
            text: text.clone(),
            body: body_digest(request),
        });
        if let Some(held) = key.as_ref().and_then(|key| self.held_by(&key.text)) {
            if held.key != key {
                return Err(AcquireError::IdempotencyMismatch);
            }
            let there = candidates
                .iter()
                .any(|proxy| proxy.uid == held.lease.uid && !proxy.deleting);
            if there {
                return Ok(Acquired::Again(held.lease.clone()));
            }
            // The proxy behind the first answer is gone, or was made again: that lease is over.
            self.end(log, &held, EndReason::ProxyGone, now);
        }
        let proxy =
            select(&self.index, now.mono, request, candidates).map_err(AcquireError::NoMatch)?;
        let ttl = millis(request.ttl);
        let lease = Lease {
            id: id.clone(),
            proxy: proxy.key.clone(),
            uid: proxy.uid.clone(),
            target: request.target.clone(),
            granted_at: now.wall,
            expires_at: wall_after(now.wall, ttl),
            ttl: request.ttl,
        };
        let held = Held {
            lease: lease.clone(),
            deadline: now.mono.after(ttl),
            key,
        };
        self.put(
            log,
            Change::Lease {
                id,
                before: None,
                after: Some(Entry::Active(Arc::new(held))),
            },
        );
        Ok(Acquired::New(lease))
    }

    fn held_by(&self, key: &str) -> Option<Arc<Held>> {
        self.index.entry(self.keys.get(key)?).cloned()
    }

    pub fn renew(
        &mut self,
        now: Now,
        id: &LeaseId,
        ttl: Duration,
        log: &mut Log,
    ) -> Result<Lease, RenewError> {
        if let Some(maximum) = self.check_ttl(ttl) {
            return Err(RenewError::InvalidTtl { maximum });
        }
        let Some(held) = self.index.get(id, now.mono).cloned() else {
            return Err(match self.remembered(id, now) {
                // A lease that was given back, or whose proxy went, is not there any more.
                Some(ended) if ended.reason == EndReason::Expired => RenewError::Expired,
                _ => RenewError::Unknown,
            });
        };
        let ttl_ms = millis(ttl);
        let renewed = Held {
            lease: Lease {
                expires_at: wall_after(now.wall, ttl_ms),
                ttl,
                ..held.lease.clone()
            },
            deadline: now.mono.after(ttl_ms),
            key: held.key.clone(),
        };
        let lease = renewed.lease.clone();
        self.put(
            log,
            Change::Lease {
                id: id.clone(),
                before: Some(Entry::Active(held)),
                after: Some(Entry::Active(Arc::new(renewed))),
            },
        );
        Ok(lease)
    }

    fn remembered(&self, id: &LeaseId, now: Now) -> Option<&Arc<Ended>> {
        self.ended.get(id).filter(|ended| ended.forget > now.mono)
    }

    pub fn release(&mut self, now: Now, id: &LeaseId, log: &mut Log) {
        if let Some(held) = self.index.get(id, now.mono).cloned() {
            self.end(log, &held, EndReason::Released, now);
        }
    }

    pub fn report(
        &mut self,
        now: Now,
        id: &LeaseId,
        report: Report,
        target: Option<Target>,
        log: &mut Log,
    ) -> Result<(), ReportError> {
        let (uid, of_lease) = if let Some(held) = self.index.get(id, now.mono) {
            (held.lease.uid.clone(), held.lease.target.clone())
        } else {
            let ended = self.remembered(id, now).ok_or(ReportError::Unknown)?;
            if ended.reason == EndReason::ProxyGone {
                // Nothing is left that a cooldown could keep anybody from.
                return Ok(());
            }
            (ended.uid.clone(), ended.target.clone())
        };
        let length = match report {
            Report::Ok => return Ok(()),
            Report::RateLimited => millis(self.config.cooldown),
            Report::Banned => millis(self.config.ban_cooldown),
        };
        if length == 0 {
            return Ok(());
        }
        let key = (uid, target.or(of_lease));
        let before = self.index.cooldown(&key).copied();
        let after = Cooldown {
            started: now.wall,
            until: wall_after(now.wall, length),
            deadline: now.mono.after(length),
        };
        // A milder report does not shorten a ban.
        if before.is_none_or(|running| running.deadline < after.deadline) {
            self.put(
                log,
                Change::Cooldown {
                    key,
                    before,
                    after: Some(after),
                },
            );
        }
        Ok(())
    }

    pub fn end_for(&mut self, now: Now, uid: &Uid, log: &mut Log) -> usize {
        let held: Vec<_> = self.index.of(uid).cloned().collect();
        for held in &held {
            self.end(log, held, EndReason::ProxyGone, now);
        }
        let cooldowns: Vec<_> = self
            .index
            .cooldowns_of(uid)
            .map(|(key, cooldown)| (key.clone(), *cooldown))
            .collect();
        self.thaw(log, cooldowns);
        held.len()
    }
}

/// A digest of what a request asks for, its idempotency key aside. Each text is preceded by its
/// length, so that no two requests share one.
fn body_digest(request: &AcquireRequest) -> [u8; 32] {
    let mut hash = Sha256::new();
    let mut text = |text: &str| {
        hash.update((text.len() as u64).to_be_bytes());
        hash.update(text.as_bytes());
    };
    for (key, value) in &request.selector {
        text(key);
        text(value);
    }
    // Cannot be a selector's: those come in pairs, and this makes the number of texts odd.
    text(request.target.as_ref().map_or("", Target::as_str));
    hash.update(request.ttl.as_millis().to_be_bytes());
    hash.finalize().into()
}

//! Random sequences of calls, restarts and clock changes against a model simple enough to be
//! obviously right: lists that are searched from end to end.

use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone)]
enum Op {
    Acquire {
        proxies: [bool; 3],
        target: Option<u8>,
        ttl: u64,
        key: Option<u8>,
    },
    Renew(usize, u64),
    Release(usize),
    Report(usize, Report, Option<u8>),
    EndFor(usize),
    Recreate(usize),
    Advance(u64),
    Sweep,
    Restart {
        reboot: bool,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let target = || prop::option::of(0..2_u8);
    let report = prop_oneof![
        Just(Report::Ok),
        Just(Report::RateLimited),
        Just(Report::Banned)
    ];
    prop_oneof![
        8 => (any::<[bool; 3]>(), target(), 0..40_u64, prop::option::weighted(0.3, 0..3_u8))
            .prop_map(|(proxies, target, ttl, key)| Op::Acquire { proxies, target, ttl, key }),
        2 => (0..12_usize, 0..40_u64).prop_map(|(which, ttl)| Op::Renew(which, ttl)),
        3 => (0..12_usize).prop_map(Op::Release),
        3 => (0..12_usize, report, target()).prop_map(|(l, r, t)| Op::Report(l, r, t)),
        1 => (0..3_usize).prop_map(Op::EndFor),
        1 => (0..3_usize).prop_map(Op::Recreate),
        4 => (1..25_u64).prop_map(Op::Advance),
        1 => Just(Op::Sweep),
        2 => any::<bool>().prop_map(|reboot| Op::Restart { reboot }),
    ]
}

const MAX_TTL: u64 = 30;
const COOLDOWN: u64 = 20;
const BAN: u64 = 45;

fn config() -> Config {
    Config {
        cooldown: Duration::from_secs(COOLDOWN),
        ban_cooldown: Duration::from_secs(BAN),
        default_ttl: Duration::from_secs(10),
        max_ttl: Duration::from_secs(MAX_TTL),
    }
}

fn target(n: Option<u8>) -> Option<Target> {
    n.map(|n| Target::parse(&format!("t{n}.example")).unwrap())
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum End {
    Expired,
    Released,
    ProxyGone,
}

#[derive(Debug, Clone)]
struct ModelLease {
    id: LeaseId,
    uid: Uid,
    target: Option<u8>,
    expires: u64,
    ended: Option<(u64, End)>,
    key: Option<u8>,
    body: (Option<u8>, u64),
}

#[derive(Default)]
struct Model {
    now: u64,
    leases: Vec<ModelLease>,
    cooldowns: Vec<(Uid, Option<u8>, u64)>,
}

impl Model {
    fn settle(&mut self) {
        for lease in &mut self.leases {
            if lease.ended.is_none() && lease.expires <= self.now {
                lease.ended = Some((lease.expires, End::Expired));
            }
        }
    }

    fn held(&self, uid: &Uid) -> usize {
        let active = self.leases.iter().filter(|l| l.ended.is_none());
        active.filter(|l| l.uid == *uid).count()
    }

    fn cooling(&self, uid: &Uid, target: Option<u8>) -> bool {
        self.cooldowns.iter().any(|(of, what, until)| {
            of == uid && *until > self.now && (what.is_none() || *what == target)
        })
    }

    fn active(&self) -> BTreeMap<Uid, usize> {
        let mut counts = BTreeMap::new();
        for lease in self.leases.iter().filter(|l| l.ended.is_none()) {
            *counts.entry(lease.uid.clone()).or_insert(0) += 1;
        }
        counts
    }

    fn end_for(&mut self, uid: &Uid) -> usize {
        let now = self.now;
        let of = self.leases.iter_mut().filter(|l| l.uid == *uid);
        let ended = of
            .filter(|l| l.ended.is_none())
            .map(|l| l.ended = Some((now, End::ProxyGone)))
            .count();
        self.cooldowns.retain(|(of, _, _)| of != uid);
        ended
    }
}

/// The world of one run: model, store, and what they are given.
struct Run {
    fixture: Fixture,
    store: Option<SqliteStore>,
    model: Model,
    fleet: [ProxyRecord; 3],
    made: u32,
}

impl Run {
    fn new() -> Self {
        let mut fixture = Fixture::new();
        fixture.config = config();
        let store = Some(fixture.open());
        let latency = |name: &str, leases, millis| ProxyRecord {
            latency_millis: Some(millis),
            ..proxy(name, leases)
        };
        Self {
            fixture,
            store,
            model: Model::default(),
            fleet: [
                latency("a", 1, 30),
                latency("b", 2, 10),
                latency("c", 2, 10),
            ],
            made: 0,
        }
    }

    fn store(&self) -> &SqliteStore {
        self.store.as_ref().unwrap()
    }

    fn lease(&self, which: usize) -> (usize, LeaseId) {
        let count = self.model.leases.len();
        if count == 0 {
            return (usize::MAX, LeaseId("nobody's".into()));
        }
        // Counted from the newest: the old ones are forgotten anyway.
        let index = count - 1 - which % count;
        (index, self.model.leases[index].id.clone())
    }

    /// What is known of an ended lease, within its window.
    fn ended(&self, index: usize) -> Option<End> {
        let (at, end) = self.model.leases.get(index)?.ended?;
        (self.model.now < at + COOLDOWN).then_some(end)
    }

    fn active(&self, index: usize) -> bool {
        let lease = self.model.leases.get(index);
        lease.is_some_and(|lease| lease.ended.is_none())
    }

    fn acquire(&mut self, proxies: [bool; 3], target_: Option<u8>, ttl: u64, key: Option<u8>) {
        let candidates: Vec<_> = (self.fleet.iter().zip(proxies))
            .filter(|(_, there)| *there)
            .map(|(proxy, _)| proxy.clone())
            .collect();
        let answer = self.store().acquire(
            &AcquireRequest {
                selector: BTreeMap::new(),
                ttl: Duration::from_secs(ttl),
                target: target(target_),
                idempotency_key: key.map(|n| format!("key-{n}")),
            },
            &candidates,
        );
        if ttl == 0 || ttl > MAX_TTL {
            assert!(matches!(answer, Err(AcquireError::InvalidTtl { .. })));
            return;
        }
        let now = self.model.now;
        let first = key.and_then(|key| {
            let mut active = self.model.leases.iter_mut().filter(|l| l.ended.is_none());
            active.find(|l| l.key == Some(key))
        });
        if let Some(first) = first {
            if first.body != (target_, ttl) {
                assert!(matches!(answer, Err(AcquireError::IdempotencyMismatch)));
                return;
            }
            if candidates.iter().any(|proxy| proxy.uid == first.uid) {
                match answer {
                    Ok(Acquired::Again(lease)) => assert_eq!(lease.id, first.id),
                    other => panic!("{other:?}"),
                }
                return;
            }
            first.ended = Some((now, End::ProxyGone));
        }
        let model = &self.model;
        let mut counts = NoMatch::default();
        let mut usable = Vec::new();
        for proxy in &candidates {
            counts.considered += 1;
            if model.held(&proxy.uid) >= proxy.max_leases as usize {
                counts.at_capacity += 1;
            } else if model.cooling(&proxy.uid, target_) {
                counts.in_cooldown += 1;
            } else {
                usable.push((
                    model.held(&proxy.uid),
                    proxy.latency_millis,
                    proxy.key.to_string(),
                    proxy.uid.clone(),
                ));
            }
        }
        usable.sort();
        match (answer, usable.first()) {
            (Ok(Acquired::New(lease)), Some((_, _, _, uid))) => {
                assert_eq!(lease.uid, *uid);
                self.model.leases.push(ModelLease {
                    id: lease.id,
                    uid: lease.uid,
                    target: target_,
                    expires: now + ttl,
                    ended: None,
                    key,
                    body: (target_, ttl),
                });
            }
            (Err(AcquireError::NoMatch(told)), None) => assert_eq!(told, counts),
            other => panic!("{other:?}"),
        }
    }

    fn report(&mut self, which: usize, report: Report, of: Option<u8>) {
        let (index, id) = self.lease(which);
        let answer = self.store().report(&id, report, target(of));
        let ended = self.ended(index);
        if !self.active(index) && ended.is_none() {
            assert!(matches!(answer, Err(ReportError::Unknown)), "{answer:?}");
            return;
        }
        answer.unwrap();
        let length = match report {
            Report::Ok => return,
            Report::RateLimited => COOLDOWN,
            Report::Banned => BAN,
        };
        if ended != Some(End::ProxyGone) {
            let lease = &self.model.leases[index];
            let until = self.model.now + length;
            let cooldown = (lease.uid.clone(), of.or(lease.target), until);
            self.model.cooldowns.push(cooldown);
        }
    }

    fn step(&mut self, op: &Op) {
        self.model.settle();
        match *op {
            Op::Acquire {
                proxies,
                target,
                ttl,
                key,
            } => self.acquire(proxies, target, ttl, key),
            Op::Renew(which, ttl) => {
                let (index, id) = self.lease(which);
                let answer = self.store().renew(&id, Duration::from_secs(ttl));
                if ttl == 0 || ttl > MAX_TTL {
                    assert!(matches!(answer, Err(RenewError::InvalidTtl { .. })));
                } else if self.active(index) {
                    self.model.leases[index].expires = self.model.now + ttl;
                    assert_eq!(answer.unwrap().ttl, Duration::from_secs(ttl));
                } else if self.ended(index) == Some(End::Expired) {
                    assert!(matches!(answer, Err(RenewError::Expired)), "{answer:?}");
                } else {
                    assert!(matches!(answer, Err(RenewError::Unknown)), "{answer:?}");
                }
            }
            Op::Release(which) => {
                let (index, id) = self.lease(which);
                self.store().release(&id).unwrap();
                if self.active(index) {
                    self.model.leases[index].ended = Some((self.model.now, End::Released));
                }
            }
            Op::Report(which, report, of) => self.report(which, report, of),
            Op::EndFor(which) => {
                let uid = self.fleet[which].uid.clone();
                let ended = self.store().end_for(&uid).unwrap();
                assert_eq!(ended, self.model.end_for(&uid));
            }
            Op::Recreate(which) => {
                self.made += 1;
                self.fleet[which].uid = Uid::new(format!("made-{}", self.made));
            }
            Op::Advance(seconds) => {
                self.model.now += seconds;
                self.fixture.time.advance(Duration::from_secs(seconds));
            }
            Op::Sweep => self.store().sweep().unwrap(),
            Op::Restart { reboot } => {
                self.store = None;
                if reboot {
                    self.fixture.time.reboot();
                }
                self.store = Some(self.fixture.open());
            }
        }
    }

    fn compare(&mut self) {
        self.model.settle();
        assert_eq!(self.store().active(), self.model.active());
        for lease in self.model.leases.iter().rev().take(12) {
            let there = self.store().get(&lease.id).is_some();
            assert_eq!(there, lease.ended.is_none(), "{lease:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 48,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn the_store_behaves_as_the_model(ops in prop::collection::vec(op(), 1..60)) {
        let mut run = Run::new();
        for op in &ops {
            run.step(op);
            run.compare();
        }
    }

    /// With a wall clock that is set at will, restarts of the operator between: a lease lasts
    /// exactly its ttl, and capacity holds.
    #[test]
    fn no_clock_revives_a_lease(
        steps in prop::collection::vec((0..4_u8, -500..500_i64, 1..20_u64), 1..40)
    ) {
        let fixture = Fixture::new();
        let mut store = fixture.open();
        let candidates = [proxy("a", 2)];
        let mut leases: Vec<(LeaseId, u64, bool)> = Vec::new();
        let mut uptime = 0;
        for (what, jump, seconds) in steps {
            match what {
                0 => fixture.time.jump(SignedDuration::from_secs(jump)),
                1 => {
                    drop(store);
                    store = fixture.open();
                }
                2 => {
                    fixture.time.advance(Duration::from_secs(seconds));
                    uptime += seconds;
                }
                _ => {
                    let short = AcquireRequest {
                        ttl: Duration::from_secs(seconds),
                        ..request()
                    };
                    if let Ok(Acquired::New(lease)) = store.acquire(&short, &candidates) {
                        leases.push((lease.id, uptime + seconds, false));
                    }
                }
            }
            // As the app does every second: an end that was seen is written down.
            store.sweep().unwrap();
            for (id, until, over) in &mut leases {
                let there = store.get(id).is_some();
                assert!(!(*over && there), "revived");
                assert_eq!(there, uptime < *until, "not by its ttl");
                *over |= !there;
            }
            assert!(store.active().values().all(|held| *held <= 2));
        }
    }
}

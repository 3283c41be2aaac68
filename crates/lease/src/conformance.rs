//! What every lease store must do. [`lease_store_conformance!`](crate::lease_store_conformance)
//! makes a test of each case.

#![allow(clippy::unwrap_used, clippy::panic, clippy::missing_panics_doc)]

use std::collections::BTreeMap;
use std::sync::{Arc, Barrier};
use std::time::Duration;

use egress_core::target::Target;
use egress_core::{ProxyRecord, Uid};
use jiff::SignedDuration;

use crate::contract::{
    AcquireError, AcquireRequest, Acquired, Lease, LeaseId, LeaseStore, NoMatch, RenewError,
    Report, ReportError,
};
use crate::testing::{ManualTime, proxy, request};
use crate::{Config, Time};

/// Opens an empty store.
pub type Open<'a> = &'a dyn Fn(Config, Time) -> Arc<dyn LeaseStore>;

/// One `#[test]` a case, for the store that the expression opens: a
/// `fn(Config, Time) -> Arc<dyn LeaseStore>`.
#[macro_export]
macro_rules! lease_store_conformance {
    ($open:expr) => {
        $crate::lease_store_conformance!(@cases $open;
            grants_and_shows_a_lease,
            prefers_the_least_leased_then_the_fastest_then_the_first,
            a_refusal_partitions_the_considered,
            selectors_match_every_pair_exactly,
            refuses_a_ttl_out_of_bounds,
            expires_by_the_monotonic_clock_whatever_the_wall_clock_does,
            renews_from_now,
            release_frees_the_slot_and_is_idempotent,
            a_report_starts_a_cooldown_for_its_target,
            a_report_without_any_target_cools_for_all,
            a_milder_report_does_not_shorten_a_ban,
            a_late_report_lands_for_one_window,
            an_idempotency_key_lives_as_long_as_its_lease,
            a_key_of_a_proxy_made_again_gets_a_new_lease,
            a_proxy_made_again_starts_afresh,
            end_for_ends_leases_and_cooldowns,
            a_lowered_maximum_refuses_and_keeps,
            twenty_contenders_for_one_slot_have_one_winner,
            many_threads_never_exceed_capacity,
            one_key_used_at_once_by_many_takes_one_slot,
            closed_refuses_new_leases_only,
        );
    };
    (@cases $open:expr; $($case:ident),* $(,)?) => {
        $(#[test] fn $case() { $crate::conformance::$case(&$open); })*
    };
}

fn target(text: &str) -> Option<Target> {
    Some(Target::parse(text).unwrap())
}

fn for_target(text: &str) -> AcquireRequest {
    AcquireRequest {
        target: target(text),
        ..request()
    }
}

#[track_caller]
fn granted(result: Result<Acquired, AcquireError>) -> Lease {
    match result {
        Ok(Acquired::New(lease)) => lease,
        other => panic!("not a new lease: {other:?}"),
    }
}

#[track_caller]
fn no_match(result: Result<Acquired, AcquireError>) -> NoMatch {
    match result {
        Err(AcquireError::NoMatch(counts)) => counts,
        other => panic!("not refused for want of a proxy: {other:?}"),
    }
}

fn seconds(n: u64) -> Duration {
    Duration::from_secs(n)
}

pub fn grants_and_shows_a_lease(open: Open<'_>) {
    let time = ManualTime::default();
    let store = open(Config::default(), time.time());
    let lease = granted(store.acquire(&for_target("Example.com:443"), &[proxy("a", 1)]));
    assert_eq!(lease.proxy.to_string(), "default/a");
    assert_eq!(lease.uid, Uid::new("uid-a"));
    assert_eq!(lease.target, target("example.com"));
    assert_eq!(lease.ttl, seconds(300));
    assert_eq!(lease.granted_at.to_string(), "2026-01-01T00:00:00Z");
    assert_eq!(lease.expires_at.to_string(), "2026-01-01T00:05:00Z");
    assert!(lease.id.0.len() >= 26, "guessable: {}", lease.id);
    assert_eq!(store.get(&lease.id), Some(lease.clone()));
    assert_eq!(store.active(), BTreeMap::from([(lease.uid, 1)]));
    assert_eq!(store.get(&LeaseId("other".into())), None);
}

pub fn prefers_the_least_leased_then_the_fastest_then_the_first(open: Open<'_>) {
    let store = open(Config::default(), ManualTime::default().time());
    let with = |name: &str, latency| ProxyRecord {
        latency_millis: latency,
        ..proxy(name, 9)
    };
    let candidates = [
        with("unknown", None),
        with("slow", Some(90)),
        with("fast-b", Some(10)),
        with("fast-a", Some(10)),
    ];
    let order: Vec<_> = (0..6)
        .map(|_| granted(store.acquire(&request(), &candidates)).proxy.name)
        .collect();
    assert_eq!(
        order,
        ["fast-a", "fast-b", "slow", "unknown", "fast-a", "fast-b"]
    );
}

pub fn a_refusal_partitions_the_considered(open: Open<'_>) {
    let store = open(Config::default(), ManualTime::default().time());
    let full = proxy("full", 1);
    granted(store.acquire(&request(), std::slice::from_ref(&full)));
    let banned = proxy("banned", 2);
    let lease = granted(store.acquire(&request(), std::slice::from_ref(&banned)));
    store.report(&lease.id, Report::Banned, None).unwrap();
    // Full and banned: the first reason counts.
    let both = proxy("both", 1);
    let lease = granted(store.acquire(&request(), std::slice::from_ref(&both)));
    store.report(&lease.id, Report::Banned, None).unwrap();
    let sick = ProxyRecord {
        healthy: false,
        ..proxy("sick", 1)
    };
    let sick_and_closed = ProxyRecord {
        healthy: false,
        ..proxy("sick-and-closed", 0)
    };
    let homeless = ProxyRecord {
        host: None,
        ..proxy("homeless", 1)
    };
    let going = ProxyRecord {
        deleting: true,
        ..proxy("going", 1)
    };
    let closed = proxy("closed", 0);
    let counts = no_match(store.acquire(
        &request(),
        &[
            full,
            banned,
            both,
            sick,
            sick_and_closed,
            homeless,
            going,
            closed,
        ],
    ));
    assert_eq!(
        counts,
        NoMatch {
            considered: 7,
            unhealthy: 3,
            at_capacity: 3,
            in_cooldown: 1,
        }
    );
    assert_eq!(no_match(store.acquire(&request(), &[])), NoMatch::default());
}

pub fn selectors_match_every_pair_exactly(open: Open<'_>) {
    let store = open(Config::default(), ManualTime::default().time());
    let mut german = proxy("german", 1);
    german.attributes = BTreeMap::from([
        ("country".to_owned(), "DE".to_owned()),
        ("kind".to_owned(), "home".to_owned()),
    ]);
    let select = |pairs: &[(&str, &str)]| AcquireRequest {
        selector: pairs
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect(),
        ..request()
    };
    for miss in [
        select(&[("country", "de")]),
        select(&[("country", "DE"), ("kind", "office")]),
        select(&[("city", "")]),
    ] {
        let counts = no_match(store.acquire(&miss, std::slice::from_ref(&german)));
        assert_eq!(counts.considered, 0, "{miss:?}");
    }
    let hit = select(&[("country", "DE"), ("kind", "home")]);
    granted(store.acquire(&hit, &[proxy("other", 1), german]));
}

pub fn refuses_a_ttl_out_of_bounds(open: Open<'_>) {
    let store = open(Config::default(), ManualTime::default().time());
    let candidates = [proxy("a", 5)];
    let with = |ttl| AcquireRequest { ttl, ..request() };
    let maximum = Config::default().max_ttl;
    for ttl in [
        Duration::ZERO,
        Duration::from_micros(999),
        maximum + Duration::from_millis(1),
        Duration::MAX,
    ] {
        assert!(
            matches!(
                store.acquire(&with(ttl), &candidates),
                Err(AcquireError::InvalidTtl { maximum: told }) if told == maximum
            ),
            "{ttl:?}"
        );
    }
    let lease = granted(store.acquire(&with(maximum), &candidates));
    assert!(matches!(
        store.renew(&lease.id, Duration::ZERO),
        Err(RenewError::InvalidTtl { .. })
    ));
    assert_eq!(store.get(&lease.id), Some(lease));
}

pub fn expires_by_the_monotonic_clock_whatever_the_wall_clock_does(open: Open<'_>) {
    let time = ManualTime::default();
    let store = open(Config::default(), time.time());
    let candidates = [proxy("a", 1)];
    let lease = granted(store.acquire(&request(), &candidates));

    time.jump(SignedDuration::from_hours(5));
    assert!(store.get(&lease.id).is_some(), "a clock set ahead ended it");
    time.jump(SignedDuration::from_hours(-10));
    time.advance(Duration::from_millis(299_999));
    assert!(store.get(&lease.id).is_some(), "ended early");

    time.advance(Duration::from_millis(1));
    assert_eq!(store.get(&lease.id), None, "outlived its ttl");
    assert_eq!(store.active(), BTreeMap::new());
    time.jump(SignedDuration::from_hours(-10));
    assert_eq!(store.get(&lease.id), None, "revived");
    assert!(matches!(
        store.renew(&lease.id, seconds(1)),
        Err(RenewError::Expired)
    ));
    // No sweep is needed for the slot to be free.
    let next = granted(store.acquire(&request(), &candidates));
    time.jump(SignedDuration::from_hours(-10));
    store.sweep().unwrap();
    assert_eq!(store.get(&lease.id), None);
    assert!(store.get(&next.id).is_some());
}

pub fn renews_from_now(open: Open<'_>) {
    let time = ManualTime::default();
    let store = open(Config::default(), time.time());
    let lease = granted(store.acquire(&request(), &[proxy("a", 1)]));
    time.advance(seconds(200));
    let renewed = store.renew(&lease.id, seconds(150)).unwrap();
    assert_eq!(renewed.expires_at.to_string(), "2026-01-01T00:05:50Z");
    assert_eq!(renewed.granted_at, lease.granted_at);
    assert_eq!(store.get(&lease.id), Some(renewed));
    time.advance(seconds(149));
    // A shorter one shortens.
    store.renew(&lease.id, seconds(10)).unwrap();
    time.advance(seconds(10));
    assert_eq!(store.get(&lease.id), None);
    assert!(matches!(
        store.renew(&LeaseId("nobody's".into()), seconds(1)),
        Err(RenewError::Unknown)
    ));
    // Past the window, nobody knows it.
    time.advance(Config::default().cooldown);
    assert!(matches!(
        store.renew(&lease.id, seconds(1)),
        Err(RenewError::Unknown)
    ));
}

pub fn release_frees_the_slot_and_is_idempotent(open: Open<'_>) {
    let store = open(Config::default(), ManualTime::default().time());
    let candidates = [proxy("a", 1)];
    let lease = granted(store.acquire(&request(), &candidates));
    store.release(&lease.id).unwrap();
    store.release(&lease.id).unwrap();
    store.release(&LeaseId("nobody's".into())).unwrap();
    assert_eq!(store.get(&lease.id), None);
    assert!(matches!(
        store.renew(&lease.id, seconds(1)),
        Err(RenewError::Unknown)
    ));
    let second = granted(store.acquire(&request(), &candidates));
    // The old id does not end the new lease.
    store.release(&lease.id).unwrap();
    assert!(store.get(&second.id).is_some());
    assert_eq!(
        no_match(store.acquire(&request(), &candidates)).at_capacity,
        1
    );
}

pub fn a_report_starts_a_cooldown_for_its_target(open: Open<'_>) {
    let time = ManualTime::default();
    let config = Config {
        cooldown: seconds(60),
        ban_cooldown: seconds(600),
        ..Config::default()
    };
    let store = open(config, time.time());
    let candidates = [proxy("a", 9)];
    let lease = granted(store.acquire(&for_target("lease.example"), &candidates));

    store.report(&lease.id, Report::Ok, None).unwrap();
    granted(store.acquire(&for_target("lease.example"), &candidates));

    // Without its own target, a report is about the lease's.
    store.report(&lease.id, Report::RateLimited, None).unwrap();
    // With one, about that.
    store
        .report(
            &lease.id,
            Report::Banned,
            target("https://Other.example./x"),
        )
        .unwrap();
    for cooling in ["lease.example", "other.example"] {
        let counts = no_match(store.acquire(&for_target(cooling), &candidates));
        assert_eq!(counts.in_cooldown, 1, "{cooling}");
    }
    granted(store.acquire(&for_target("third.example"), &candidates));
    granted(store.acquire(&request(), &candidates));

    time.advance(Duration::from_millis(59_999));
    no_match(store.acquire(&for_target("lease.example"), &candidates));
    time.advance(Duration::from_millis(1));
    granted(store.acquire(&for_target("lease.example"), &candidates));
    no_match(store.acquire(&for_target("other.example"), &candidates));
    store.sweep().unwrap();
    no_match(store.acquire(&for_target("other.example"), &candidates));
    time.jump(SignedDuration::from_hours(-1));
    time.advance(seconds(540));
    granted(store.acquire(&for_target("other.example"), &candidates));
}

pub fn a_report_without_any_target_cools_for_all(open: Open<'_>) {
    let store = open(Config::default(), ManualTime::default().time());
    let candidates = [proxy("a", 9)];
    let lease = granted(store.acquire(&request(), &candidates));
    store.report(&lease.id, Report::Banned, None).unwrap();
    for request in [request(), for_target("any.example")] {
        assert_eq!(
            no_match(store.acquire(&request, &candidates)).in_cooldown,
            1
        );
    }
    // Another proxy is not concerned.
    granted(store.acquire(&request(), &[candidates[0].clone(), proxy("b", 1)]));
}

pub fn a_milder_report_does_not_shorten_a_ban(open: Open<'_>) {
    let time = ManualTime::default();
    let config = Config {
        cooldown: seconds(60),
        ban_cooldown: seconds(600),
        ..Config::default()
    };
    let store = open(config, time.time());
    let candidates = [proxy("a", 9)];
    let lease = granted(store.acquire(&for_target("x.example"), &candidates));
    store.report(&lease.id, Report::Banned, None).unwrap();
    store.report(&lease.id, Report::RateLimited, None).unwrap();
    time.advance(seconds(599));
    no_match(store.acquire(&for_target("x.example"), &candidates));
    time.advance(seconds(1));
    granted(store.acquire(&for_target("x.example"), &candidates));
}

pub fn a_late_report_lands_for_one_window(open: Open<'_>) {
    let time = ManualTime::default();
    let window = Config::default().cooldown;
    let store = open(Config::default(), time.time());
    let candidates = [proxy("a", 9)];
    let expired = granted(store.acquire(&for_target("one.example"), &candidates));
    let released = granted(store.acquire(&for_target("two.example"), &candidates));
    time.advance(seconds(300));
    store.release(&released.id).unwrap();
    // Both ended at the same instant, one by running out.
    time.advance(window - Duration::from_millis(1));
    store.sweep().unwrap();
    store.report(&expired.id, Report::Banned, None).unwrap();
    no_match(store.acquire(&for_target("one.example"), &candidates));
    time.advance(Duration::from_millis(1));
    for id in [&expired.id, &released.id] {
        assert!(matches!(
            store.report(id, Report::Banned, None),
            Err(ReportError::Unknown)
        ));
    }
    assert!(matches!(
        store.report(&LeaseId("nobody's".into()), Report::Ok, None),
        Err(ReportError::Unknown)
    ));
}

pub fn an_idempotency_key_lives_as_long_as_its_lease(open: Open<'_>) {
    let time = ManualTime::default();
    let store = open(Config::default(), time.time());
    let candidates = [proxy("a", 5)];
    let keyed = AcquireRequest {
        idempotency_key: Some("k1".into()),
        ..for_target("x.example")
    };
    let first = granted(store.acquire(&keyed, &candidates));
    assert_eq!(
        store.acquire(&keyed, &candidates).unwrap(),
        Acquired::Again(first.clone())
    );
    let others = [
        AcquireRequest {
            ttl: seconds(299),
            ..keyed.clone()
        },
        AcquireRequest {
            target: None,
            ..keyed.clone()
        },
        AcquireRequest {
            selector: BTreeMap::from([("x.example".into(), String::new())]),
            target: None,
            ..keyed.clone()
        },
    ];
    for other in &others {
        assert!(
            matches!(
                store.acquire(other, &candidates),
                Err(AcquireError::IdempotencyMismatch)
            ),
            "{other:?}"
        );
    }
    assert_eq!(store.active().values().sum::<usize>(), 1);
    // The same lease, as it is now.
    time.advance(seconds(100));
    let renewed = store.renew(&first.id, seconds(300)).unwrap();
    assert_eq!(
        store.acquire(&keyed, &candidates).unwrap(),
        Acquired::Again(renewed)
    );
    // The key is free when the lease has run out, and when it was given back.
    time.advance(seconds(300));
    let second = granted(store.acquire(&keyed, &candidates));
    assert_ne!(second.id, first.id);
    store.release(&second.id).unwrap();
    granted(store.acquire(&others[0], &candidates));
}

pub fn a_key_of_a_proxy_made_again_gets_a_new_lease(open: Open<'_>) {
    let store = open(Config::default(), ManualTime::default().time());
    let keyed = AcquireRequest {
        idempotency_key: Some("k1".into()),
        ..request()
    };
    let first = granted(store.acquire(&keyed, &[proxy("a", 1)]));
    let again = ProxyRecord {
        uid: Uid::new("another"),
        ..proxy("a", 1)
    };
    let second = granted(store.acquire(&keyed, &[again]));
    assert_eq!(second.uid, Uid::new("another"));
    assert_eq!(store.get(&first.id), None);
}

pub fn a_proxy_made_again_starts_afresh(open: Open<'_>) {
    let store = open(Config::default(), ManualTime::default().time());
    let lease = granted(store.acquire(&request(), &[proxy("a", 1)]));
    store.report(&lease.id, Report::Banned, None).unwrap();
    let again = ProxyRecord {
        uid: Uid::new("another"),
        ..proxy("a", 1)
    };
    granted(store.acquire(&request(), &[again]));
}

pub fn end_for_ends_leases_and_cooldowns(open: Open<'_>) {
    let store = open(Config::default(), ManualTime::default().time());
    let (a, b) = (proxy("a", 9), proxy("b", 9));
    let first = granted(store.acquire(&for_target("x.example"), std::slice::from_ref(&a)));
    granted(store.acquire(&request(), std::slice::from_ref(&a)));
    let other = granted(store.acquire(&request(), std::slice::from_ref(&b)));
    store.report(&first.id, Report::Banned, None).unwrap();
    store
        .report(&first.id, Report::Banned, target("y.example"))
        .unwrap();
    store
        .report(&other.id, Report::Banned, target("y.example"))
        .unwrap();

    assert_eq!(store.end_for(&a.uid).unwrap(), 2);
    assert_eq!(store.end_for(&a.uid).unwrap(), 0);
    assert_eq!(store.get(&first.id), None);
    assert_eq!(store.active(), BTreeMap::from([(b.uid.clone(), 1)]));
    assert!(matches!(
        store.renew(&first.id, seconds(1)),
        Err(RenewError::Unknown)
    ));
    // A late report is taken, and keeps nobody from anything.
    store.report(&first.id, Report::Banned, None).unwrap();
    granted(store.acquire(&for_target("x.example"), std::slice::from_ref(&a)));
    granted(store.acquire(&for_target("y.example"), std::slice::from_ref(&a)));
    no_match(store.acquire(&for_target("y.example"), std::slice::from_ref(&b)));
}

pub fn a_lowered_maximum_refuses_and_keeps(open: Open<'_>) {
    let store = open(Config::default(), ManualTime::default().time());
    let wide = [proxy("a", 3)];
    let leases: Vec<_> = (0..3)
        .map(|_| granted(store.acquire(&request(), &wide)))
        .collect();
    let narrow = [proxy("a", 1)];
    no_match(store.acquire(&request(), &narrow));
    assert!(leases.iter().all(|lease| store.get(&lease.id).is_some()));
    for lease in &leases[..2] {
        store.release(&lease.id).unwrap();
        no_match(store.acquire(&request(), &narrow));
    }
    store.release(&leases[2].id).unwrap();
    granted(store.acquire(&request(), &narrow));
}

pub fn twenty_contenders_for_one_slot_have_one_winner(open: Open<'_>) {
    let store = open(Config::default(), ManualTime::default().time());
    for _ in 0..10 {
        let start = Arc::new(Barrier::new(20));
        let threads: Vec<_> = (0..20)
            .map(|_| {
                let (store, start) = (Arc::clone(&store), Arc::clone(&start));
                std::thread::spawn(move || {
                    let candidates = [proxy("a", 1)];
                    start.wait();
                    store.acquire(&request(), &candidates)
                })
            })
            .collect();
        let (won, lost): (Vec<_>, Vec<_>) = threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .partition(Result::is_ok);
        assert_eq!(won.len(), 1);
        for refused in lost {
            assert_eq!(no_match(refused).at_capacity, 1);
        }
        for acquired in won {
            store.release(&granted(acquired).id).unwrap();
        }
    }
}

pub fn many_threads_never_exceed_capacity(open: Open<'_>) {
    let store = open(Config::default(), ManualTime::default().time());
    let candidates = Arc::new([proxy("a", 1), proxy("b", 2), proxy("c", 3)]);
    // What the holders themselves see: each counts itself in while it holds the lease.
    let holders = Arc::new([(); 3].map(|()| std::sync::atomic::AtomicU32::new(0)));
    let threads: Vec<_> = (0..16)
        .map(|_| {
            let store = Arc::clone(&store);
            let (candidates, holders) = (Arc::clone(&candidates), Arc::clone(&holders));
            std::thread::spawn(move || {
                use std::sync::atomic::Ordering::SeqCst;
                let mut granted = 0;
                for _ in 0..40 {
                    match store.acquire(&request(), &candidates[..]) {
                        Ok(Acquired::New(lease)) => {
                            let which = candidates
                                .iter()
                                .position(|proxy| proxy.uid == lease.uid)
                                .unwrap();
                            let now = holders[which].fetch_add(1, SeqCst) + 1;
                            assert!(now <= candidates[which].max_leases, "over capacity");
                            granted += 1;
                            std::thread::yield_now();
                            holders[which].fetch_sub(1, SeqCst);
                            store.release(&lease.id).unwrap();
                        }
                        Err(AcquireError::NoMatch(counts)) => {
                            assert_eq!(counts.considered, 3);
                            assert_eq!(counts.at_capacity, 3);
                        }
                        other => panic!("{other:?}"),
                    }
                }
                granted
            })
        })
        .collect();
    let granted: u32 = threads
        .into_iter()
        .map(|thread| thread.join().unwrap())
        .sum();
    assert!(granted >= 40, "only {granted} were granted");
    assert_eq!(store.active(), BTreeMap::new());
}

pub fn one_key_used_at_once_by_many_takes_one_slot(open: Open<'_>) {
    let store = open(Config::default(), ManualTime::default().time());
    let start = Arc::new(Barrier::new(16));
    let threads: Vec<_> = (0..16)
        .map(|_| {
            let (store, start) = (Arc::clone(&store), Arc::clone(&start));
            std::thread::spawn(move || {
                let keyed = AcquireRequest {
                    idempotency_key: Some("retry".into()),
                    ..request()
                };
                start.wait();
                store.acquire(&keyed, &[proxy("a", 16)]).unwrap()
            })
        })
        .collect();
    let answers: Vec<_> = threads
        .into_iter()
        .map(|thread| thread.join().unwrap())
        .collect();
    let fresh = answers
        .iter()
        .filter(|answer| matches!(answer, Acquired::New(_)))
        .count();
    assert_eq!(fresh, 1);
    assert_eq!(store.active().values().sum::<usize>(), 1);
}

pub fn closed_refuses_new_leases_only(open: Open<'_>) {
    let store = open(Config::default(), ManualTime::default().time());
    let candidates = [proxy("a", 9)];
    let lease = granted(store.acquire(&request(), &candidates));
    store.close();
    assert!(matches!(
        store.acquire(&request(), &candidates),
        Err(AcquireError::Closed)
    ));
    store.renew(&lease.id, seconds(10)).unwrap();
    store.report(&lease.id, Report::Ok, None).unwrap();
    store.release(&lease.id).unwrap();
    store.sweep().unwrap();
}

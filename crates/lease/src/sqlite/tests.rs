//! What only the durable store does: restarts, crashes, failures. The common part is
//! [`crate::conformance`].

mod crash;
mod model;

use std::sync::Barrier;

use jiff::SignedDuration;
use rusqlite::Connection;
use tempfile::TempDir;

use super::*;
use crate::contract::NoMatch;
use crate::testing::{ManualTime, proxy, request};

crate::lease_store_conformance!(|config, time| {
    // Open descriptors keep the files; the directory's entry may go.
    let directory = TempDir::new().unwrap();
    Arc::new(SqliteStore::open(directory.path().join("leases.db"), config, time).unwrap())
        as Arc<dyn LeaseStore>
});

pub(super) struct Fixture {
    directory: TempDir,
    pub time: ManualTime,
    pub config: Config,
}

impl Fixture {
    pub fn new() -> Self {
        Self {
            directory: TempDir::new().unwrap(),
            time: ManualTime::default(),
            config: Config::default(),
        }
    }

    pub fn path(&self) -> std::path::PathBuf {
        self.directory.path().join("leases.db")
    }

    pub fn open(&self) -> SqliteStore {
        SqliteStore::open(self.path(), self.config.clone(), self.time.time()).unwrap()
    }
}

#[track_caller]
fn granted(result: Result<Acquired, AcquireError>) -> Lease {
    match result {
        Ok(Acquired::New(lease)) => lease,
        other => panic!("not a new lease: {other:?}"),
    }
}

fn for_target(text: &str) -> AcquireRequest {
    AcquireRequest {
        target: Some(Target::parse(text).unwrap()),
        ..request()
    }
}

#[test]
fn everything_survives_a_restart() {
    let fixture = Fixture::new();
    let candidates = [proxy("a", 3)];
    let keyed = AcquireRequest {
        idempotency_key: Some("k".into()),
        ..for_target("x.example")
    };
    let store = fixture.open();
    let kept = granted(store.acquire(&keyed, &candidates));
    let released = granted(store.acquire(&for_target("y.example"), &candidates));
    store.release(&released.id).unwrap();
    let renewed = granted(store.acquire(&request(), &candidates));
    let renewed = store
        .renew(&renewed.id, Duration::from_millis(123_456))
        .unwrap();
    store.report(&kept.id, Report::Banned, None).unwrap();
    drop(store);

    // Down for 100 s, of a machine that was started again.
    fixture.time.advance(Duration::from_secs(100));
    fixture.time.reboot();
    let store = fixture.open();
    assert_eq!(store.get(&kept.id), Some(kept.clone()));
    assert_eq!(store.get(&renewed.id), Some(renewed.clone()));
    assert_eq!(store.get(&released.id), None);
    assert_eq!(
        store.acquire(&keyed, &candidates).unwrap(),
        Acquired::Again(kept.clone())
    );
    assert!(matches!(
        store.acquire(&for_target("x.example"), &candidates),
        Err(AcquireError::NoMatch(NoMatch { in_cooldown: 1, .. }))
    ));
    store.report(&released.id, Report::Banned, None).unwrap();
    assert!(matches!(
        store.acquire(&for_target("y.example"), &candidates),
        Err(AcquireError::NoMatch(NoMatch { in_cooldown: 1, .. }))
    ));
    fixture.time.advance(Duration::from_millis(23_455));
    assert!(store.get(&renewed.id).is_some());
    fixture.time.advance(Duration::from_millis(1));
    assert_eq!(store.get(&renewed.id), None);
    assert!(store.get(&kept.id).is_some());
}

#[test]
fn what_ran_out_while_down_is_over_and_reportable_from_its_end() {
    let fixture = Fixture::new();
    let store = fixture.open();
    let lease = granted(store.acquire(&for_target("x.example"), &[proxy("a", 1)]));
    drop(store);
    let window = fixture.config.cooldown;
    fixture
        .time
        .advance(Duration::from_secs(300) + window - Duration::from_secs(1));
    let store = fixture.open();
    assert_eq!(store.get(&lease.id), None);
    assert_eq!(store.active(), BTreeMap::new());
    assert!(matches!(
        store.renew(&lease.id, Duration::from_secs(1)),
        Err(RenewError::Expired)
    ));
    store.report(&lease.id, Report::Banned, None).unwrap();
    fixture.time.advance(Duration::from_secs(1));
    assert!(matches!(
        store.report(&lease.id, Report::Banned, None),
        Err(ReportError::Unknown)
    ));
}

#[test]
fn a_clock_set_back_over_a_reboot_revives_nothing() {
    let fixture = Fixture::new();
    let candidates = [proxy("a", 2)];
    let store = fixture.open();
    let over = granted(store.acquire(&request(), &candidates));
    fixture.time.advance(Duration::from_secs(300));
    // The sweep makes the end durable.
    store.sweep().unwrap();
    let running = granted(store.acquire(&request(), &candidates));
    drop(store);

    fixture.time.jump(SignedDuration::from_hours(-24));
    fixture.time.reboot();
    let store = fixture.open();
    assert_eq!(store.get(&over.id), None);
    assert!(store.get(&running.id).is_some());
    fixture.time.advance(Duration::from_secs(300));
    assert_eq!(store.get(&running.id), None, "lived longer than its ttl");
}

/// Nothing of it was written down but by a later write of something else.
#[test]
fn time_that_was_seen_to_pass_stays_passed_after_a_reboot() {
    let fixture = Fixture::new();
    let candidates = [proxy("a", 1), proxy("b", 1)];
    let store = fixture.open();
    let first = granted(store.acquire(&request(), &candidates[..1]));
    fixture.time.advance(Duration::from_secs(299));
    granted(store.acquire(&request(), &candidates[1..]));
    drop(store);
    // One second is left, whatever the clock says now.
    fixture.time.jump(SignedDuration::from_secs(-250));
    fixture.time.reboot();
    let store = fixture.open();
    assert!(store.get(&first.id).is_some());
    fixture.time.advance(Duration::from_secs(1));
    assert_eq!(store.get(&first.id), None);
}

/// Within one boot the wall clock does not matter at all, over restarts too, the first of which
/// comes after a reboot.
#[test]
fn restarts_within_a_boot_do_not_ask_the_wall_clock() {
    let fixture = Fixture::new();
    let candidates = [proxy("a", 1)];
    let store = fixture.open();
    let lease = granted(store.acquire(&for_target("x.example"), &candidates));
    store.report(&lease.id, Report::RateLimited, None).unwrap();
    drop(store);
    fixture.time.reboot();
    for (round, jump) in [-7, 9, -3].into_iter().enumerate() {
        drop(fixture.open());
        fixture.time.jump(SignedDuration::from_hours(jump));
        let store = fixture.open();
        assert_eq!(store.get(&lease.id), Some(lease.clone()), "{round}");
        drop(store);
        if round == 0 {
            fixture.time.advance(Duration::from_secs(100));
        }
    }
    fixture.time.advance(Duration::from_secs(200));
    let store = fixture.open();
    assert_eq!(store.get(&lease.id), None);
    fixture.time.advance(Duration::from_secs(599));
    let again = || store.acquire(&for_target("x.example"), &candidates);
    assert!(matches!(again(), Err(AcquireError::NoMatch(_))));
    fixture.time.advance(Duration::from_secs(1));
    granted(again());
}

#[test]
fn a_failed_write_grants_nothing() {
    let fixture = Fixture::new();
    let candidates = [proxy("a", 10_000)];
    let store = fixture.open();
    let filler = AcquireRequest {
        idempotency_key: None,
        selector: BTreeMap::new(),
        ..for_target(&format!("{}.example", "x".repeat(200)))
    };
    let before = granted(store.acquire(&filler, &candidates));
    // The disk is full: SQLite may not grow the file any more.
    *lock(&store.shared.faults) = Some(|db| {
        db.raw()
            .pragma_update_and_check(None, "max_page_count", 1, |_| Ok(()))
            .unwrap();
    });
    let mut leases = vec![before];
    let failure = loop {
        match store.acquire(&filler, &candidates) {
            Ok(Acquired::New(lease)) => leases.push(lease),
            Err(AcquireError::Store(failure)) => break failure,
            other => panic!("{other:?}"),
        }
        assert!(leases.len() < 1000, "the disk never was full");
    };
    assert!(failure.to_string().contains("full"), "{failure}");
    assert_eq!(store.active().values().sum::<usize>(), leases.len());
    // What needs no room goes on.
    store.release(&leases[0].id).unwrap();

    *lock(&store.shared.faults) = Some(|db| {
        db.raw()
            .pragma_update_and_check(None, "max_page_count", 100_000, |_| Ok(()))
            .unwrap();
    });
    leases.push(granted(store.acquire(&filler, &candidates)));
    drop(store);
    let store = fixture.open();
    assert_eq!(store.get(&leases[0].id), None);
    assert!(leases[1..].iter().all(|l| store.get(&l.id).is_some()));
    assert_eq!(store.active().values().sum::<usize>(), leases.len() - 1);
}

/// One failing write among concurrent calls: whoever was told "granted" has a lease, whoever was
/// told of a failure has none, in memory and on the disk.
#[test]
fn a_failure_among_many_takes_down_exactly_those_that_were_told() {
    let fixture = Fixture::new();
    let store = Arc::new(fixture.open());
    let mut seen_failure = false;
    for round in 0..20 {
        if round % 2 == 0 {
            *lock(&store.shared.faults) = Some(|db| {
                db.raw()
                    .execute_batch(
                        "CREATE TEMP TRIGGER fault BEFORE INSERT ON main.leases
                         BEGIN SELECT RAISE(FAIL, 'disk I/O error'); END",
                    )
                    .unwrap();
            });
        }
        let start = Arc::new(Barrier::new(8));
        let threads: Vec<_> = (0..8)
            .map(|n| {
                let (store, start) = (Arc::clone(&store), Arc::clone(&start));
                std::thread::spawn(move || {
                    start.wait();
                    let keyed = AcquireRequest {
                        // Two threads a key: the second answer rests on the first.
                        idempotency_key: Some(format!("{round}/{}", n / 2)),
                        ..request()
                    };
                    store.acquire(&keyed, &[proxy("a", 10_000)])
                })
            })
            .collect();
        for thread in threads {
            match thread.join().unwrap() {
                Ok(Acquired::New(lease) | Acquired::Again(lease)) => {
                    assert!(store.get(&lease.id).is_some());
                }
                Err(AcquireError::Store(_)) => seen_failure = true,
                Err(other) => panic!("{other:?}"),
            }
        }
        *lock(&store.shared.faults) = Some(|db| {
            db.raw()
                .execute_batch("DROP TRIGGER IF EXISTS temp.fault")
                .unwrap();
        });
        // Takes the fault away also when nothing else is written.
        let lease = granted(store.acquire(&request(), &[proxy("b", 10_000)]));
        store.release(&lease.id).unwrap();
    }
    assert!(seen_failure, "no write failed: this test shows nothing");
    let active = store.active();
    let ids = lock(&store.shared.core).state.index.clone();
    assert_eq!(ids, *store.shared.published());
    drop(store);
    assert_eq!(fixture.open().active(), active);
}

#[test]
fn an_idle_store_writes_nothing() {
    let fixture = Fixture::new();
    let store = fixture.open();
    granted(store.acquire(&request(), &[proxy("a", 1)]));
    let writes = || std::fs::metadata(fixture.path().with_extension("db-wal")).map(|m| m.len());
    let before = writes().unwrap();
    for _ in 0..60 {
        fixture.time.advance(Duration::from_secs(1));
        store.sweep().unwrap();
    }
    assert_eq!(writes().unwrap(), before);
}

#[test]
fn what_is_forgotten_leaves_the_database() {
    let fixture = Fixture::new();
    let store = fixture.open();
    for _ in 0..50 {
        let lease = granted(store.acquire(&for_target("x.example"), &[proxy("a", 1)]));
        store.report(&lease.id, Report::RateLimited, None).unwrap();
        store.release(&lease.id).unwrap();
        fixture.time.advance(fixture.config.cooldown);
    }
    store.sweep().unwrap();
    drop(store);
    let db = Connection::open(fixture.path()).unwrap();
    for table in ["leases", "cooldowns"] {
        let rows: i64 = db
            .query_row(&format!("SELECT count(*) FROM {table}"), [], |row| {
                row.get(0)
            })
            .unwrap();
        assert_eq!(rows, 0, "{table}");
    }
}

#[test]
fn the_database_is_taken_by_one_process_at_a_time() {
    let fixture = Fixture::new();
    let store = fixture.open();
    let error = SqliteStore::open(
        fixture.path(),
        Config::default(),
        ManualTime::default().time(),
    )
    .err()
    .unwrap();
    assert!(matches!(error, OpenError::InUse { .. }), "{error}");
    drop(store);
    fixture.open();
}

#[test]
fn the_database_is_for_our_user_only() {
    let fixture = Fixture::new();
    let store = fixture.open();
    granted(store.acquire(&request(), &[proxy("a", 1)]));
    for name in ["leases.db", "leases.db-wal"] {
        let of = std::fs::metadata(fixture.path().with_file_name(name)).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::mode(&of.permissions());
        assert_eq!(mode & 0o777, 0o600, "{name}");
    }
}

#[test]
fn what_is_no_lease_database_is_left_alone_with_a_sentence() {
    let open = |path: &Path| {
        SqliteStore::open(path, Config::default(), ManualTime::default().time())
            .err()
            .unwrap()
    };
    let fixture = Fixture::new();
    let path = fixture.path();

    let error = open(&path.join("missing/leases.db"));
    assert!(matches!(error, OpenError::Create { .. }), "{error}");

    std::fs::write(
        &path,
        "not a database at all, but long enough to be one".repeat(9),
    )
    .unwrap();
    let error = open(&path);
    assert!(matches!(error, OpenError::Foreign { .. }), "{error}");

    std::fs::remove_file(&path).unwrap();
    Connection::open(&path)
        .unwrap()
        .execute_batch("CREATE TABLE somebody_elses (x)")
        .unwrap();
    let error = open(&path);
    assert!(matches!(error, OpenError::Foreign { .. }), "{error}");

    std::fs::remove_file(&path).unwrap();
    drop(fixture.open());
    Connection::open(&path)
        .unwrap()
        .pragma_update(None, "user_version", 99)
        .unwrap();
    let error = open(&path);
    assert!(
        matches!(error, OpenError::TooNew { found: 99, .. }),
        "{error}"
    );
}

#[test]
fn a_dead_writer_fails_calls_instead_of_hanging_them() {
    let fixture = Fixture::new();
    let store = fixture.open();
    *lock(&store.shared.faults) = Some(|_| panic!("the writer dies in a test"));
    for _ in 0..2 {
        assert!(matches!(
            store.acquire(&request(), &[proxy("a", 1)]),
            Err(AcquireError::Store(_))
        ));
    }
    drop(store);
    assert_eq!(fixture.open().active(), BTreeMap::new());
}

#[test]
fn metrics_count_what_was_durable_and_gauges_read_the_store() {
    let mut registry = prometheus_client::registry::Registry::default();
    let metrics = Metrics::register(&mut registry);
    let fixture = Fixture::new();
    let store = SqliteStore::open_with_metrics(
        fixture.path(),
        Config::default(),
        fixture.time.time(),
        metrics,
    )
    .unwrap();
    let candidates = [proxy("a", 2)];
    let first = granted(store.acquire(&for_target("x.example"), &candidates));
    let second = granted(store.acquire(&request(), &candidates));
    store.acquire(&request(), &candidates).unwrap_err();
    store.report(&first.id, Report::Banned, None).unwrap();
    store.release(&second.id).unwrap();
    let scrape = || {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        text
    };
    let text = scrape();
    for line in [
        "egress_leases_active 1",
        "egress_leases_granted_total 2",
        "egress_leases_refused_total{reason=\"at_capacity\"} 1",
        "egress_leases_refused_total{reason=\"in_cooldown\"} 0",
        "egress_leases_released_total 1",
        "egress_leases_expired_total 0",
        "egress_lease_reports_total{result=\"banned\"} 1",
        "egress_cooldowns_active 1",
    ] {
        assert!(text.lines().any(|l| l == line), "no {line:?} in\n{text}");
    }
    fixture.time.advance(Duration::from_secs(3600));
    let text = scrape();
    assert!(text.contains("egress_leases_active 0"), "{text}");
    assert!(text.contains("egress_cooldowns_active 0"), "{text}");
    store.sweep().unwrap();
    assert!(scrape().contains("egress_leases_expired_total 1"));
}

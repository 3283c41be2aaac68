//! Crashes: a process killed in the middle of acquires, and a log that ends anywhere.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

use egress_core::{Clock, SystemClock};

use super::*;

const PATH: &str = "EGRESS_LEASE_CRASH_TEST";

fn fleet() -> Vec<ProxyRecord> {
    (1..=8).map(|n| proxy(&format!("p{n}"), n * 5)).collect()
}

fn system() -> Arc<dyn Clock> {
    Arc::new(SystemClock)
}

/// Not a test of its own: what [`a_kill_at_any_moment_keeps_capacity`] starts and kills.
#[test]
#[ignore = "started by another test"]
fn child() {
    let Some(path) = std::env::var_os(PATH) else {
        return;
    };
    let store = Arc::new(SqliteStore::open(path, Config::default(), system()).unwrap());
    let say = |word: &str, lease: &Lease| {
        let mut out = std::io::stdout().lock();
        writeln!(out, "@ {word} {} {}", lease.id, lease.uid).unwrap();
        out.flush().unwrap();
    };
    let threads: Vec<_> = (0..4)
        .map(|thread| {
            let store = Arc::clone(&store);
            std::thread::spawn(move || {
                let fleet = fleet();
                let mut turn = 0;
                while let Ok(Acquired::New(lease)) = store.acquire(&request(), &fleet) {
                    say("granted", &lease);
                    turn += 1;
                    if (turn + thread) % 3 == 0 {
                        say("releasing", &lease);
                        store.release(&lease.id).unwrap();
                        say("released", &lease);
                    }
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
}

#[test]
fn a_kill_at_any_moment_keeps_capacity() {
    for round in 0..8 {
        let fixture = Fixture::new();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "sqlite::tests::crash::child"])
            .args(["--ignored", "--nocapture", "--test-threads=1"])
            .env(PATH, fixture.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut heard = Vec::new();
        let kill_after = 3 + round * 9;
        let mut hear = |line: String| {
            // The test harness may have left its own words before ours.
            let mut words = line.split_whitespace().skip_while(|word| *word != "@");
            if let (Some(_), Some(word), Some(id), Some(_)) =
                (words.next(), words.next(), words.next(), words.next())
            {
                heard.push((word.to_owned(), LeaseId(id.to_owned())));
            }
            heard.len()
        };
        for line in lines.by_ref() {
            if hear(line.unwrap()) >= kill_after {
                break;
            }
        }
        child.kill().unwrap();
        child.wait().unwrap();
        // What it had said before it died counts too; its last line may be cut.
        for line in lines.map_while(Result::ok) {
            hear(line);
        }
        assert!(
            heard.len() >= kill_after,
            "the child ended early: {heard:?}"
        );

        let store = SqliteStore::open(fixture.path(), Config::default(), system()).unwrap();
        let said = |which: &str| -> BTreeSet<_> {
            let said = heard.iter().filter(|(word, _)| word == which);
            said.map(|(_, id)| id.clone()).collect()
        };
        for id in said("granted").difference(&said("releasing")) {
            assert!(store.get(id).is_some(), "round {round}: lost {id}");
        }
        for id in said("released") {
            assert_eq!(store.get(&id), None, "round {round}: {id} was released");
        }
        let fleet = fleet();
        let active = store.active();
        for proxy in &fleet {
            let held = active.get(&proxy.uid).copied().unwrap_or(0);
            assert!(
                held <= proxy.max_leases as usize,
                "round {round}: {proxy:?}"
            );
        }
        // Exactly the rest can still be had.
        let mut total = active.values().sum::<usize>();
        while store.acquire(&request(), &fleet).is_ok() {
            total += 1;
        }
        assert_eq!(total, 180, "round {round}");
    }
}

/// The log as a crash of the machine could leave it: cut anywhere. What is left is what was
/// granted up to some moment, in order.
#[test]
fn a_log_cut_anywhere_holds_a_prefix_of_history() {
    let fixture = Fixture::new();
    let store = fixture.open();
    let candidates = [proxy("a", 12), proxy("b", 12)];
    let leases: Vec<_> = (0..24)
        .map(|_| granted(store.acquire(&request(), &candidates)))
        .collect();
    let db = std::fs::read(fixture.path()).unwrap();
    let wal = std::fs::read(fixture.path().with_extension("db-wal")).unwrap();
    assert!(wal.len() > 24 * 4096, "not in the log: {}", wal.len());
    let mut seen = BTreeSet::new();
    for cut in (0..wal.len()).step_by(5003).chain([wal.len()]) {
        let copy = Fixture::new();
        std::fs::write(copy.path(), &db).unwrap();
        std::fs::write(copy.path().with_extension("db-wal"), &wal[..cut]).unwrap();
        let reopened = copy.open();
        let there = leases
            .iter()
            .take_while(|lease| reopened.get(&lease.id).is_some())
            .count();
        let total: usize = reopened.active().values().sum();
        assert_eq!(there, total, "a gap after {cut} bytes");
        assert!(reopened.active().values().all(|held| *held <= 12));
        seen.insert(there);
    }
    assert_eq!(seen.last(), Some(&24));
    assert!(seen.len() > 12, "the cuts fell together: {seen:?}");
}

/// Many callers share a write: far more than one acquire a disk flush.
#[test]
fn callers_at_once_share_writes() {
    let fixture = Fixture::new();
    let mut registry = prometheus_client::registry::Registry::default();
    let metrics = Metrics::register(&mut registry);
    let store = SqliteStore::open_with_metrics(
        fixture.path(),
        Config::default(),
        fixture.time.time(),
        metrics,
    )
    .unwrap();
    let fleet = [proxy("a", 100_000)];
    std::thread::scope(|scope| {
        for _ in 0..32 {
            scope.spawn(|| {
                for _ in 0..10 {
                    granted(store.acquire(&request(), &fleet));
                }
            });
        }
    });
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
    let writes: f64 = text
        .lines()
        .find_map(|line| line.strip_prefix("egress_lease_store_write_seconds_count "))
        .unwrap()
        .parse()
        .unwrap();
    assert!(writes < 160.0, "{writes} writes for 320 acquires");
    assert_eq!(store.active().values().sum::<usize>(), 320);
}

use std::sync::atomic::{AtomicUsize, Ordering};

use egress_core::Uid;
use egress_core::spec::HealthCheck;
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt};
use proptest::prelude::*;

use super::*;

const TICK: Duration = Duration::from_millis(50);

/// A prober that does what the test says and notes when.
struct Script<F> {
    answer: F,
    log: Mutex<Vec<(Instant, ProbeRequest)>>,
    now: Arc<AtomicUsize>,
    most: Arc<AtomicUsize>,
}

impl<F> Script<F>
where
    F: Fn(&ProbeRequest) -> (Duration, Outcome) + Send + Sync + 'static,
{
    fn new(answer: F) -> Arc<Self> {
        Arc::new(Self {
            answer,
            log: Mutex::default(),
            now: Arc::default(),
            most: Arc::default(),
        })
    }

    fn probes(&self, host: &str) -> Vec<Instant> {
        let log = self.log.lock().unwrap();
        log.iter()
            .filter(|(_, request)| request.host == host)
            .map(|(at, _)| *at)
            .collect()
    }

    fn total(&self) -> usize {
        self.log.lock().unwrap().len()
    }
}

/// Counts a probe as going on for as long as it lives.
struct Going(Arc<AtomicUsize>);

impl Drop for Going {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl<F> Probe for Script<F>
where
    F: Fn(&ProbeRequest) -> (Duration, Outcome) + Send + Sync + 'static,
{
    fn probe(&self, request: ProbeRequest) -> BoxFuture<'static, Outcome> {
        let (takes, outcome) = (self.answer)(&request);
        self.log.lock().unwrap().push((Instant::now(), request));
        let going = self.now.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(going, Ordering::SeqCst);
        let going = Going(Arc::clone(&self.now));
        Box::pin(async move {
            let _going = going;
            tokio::time::sleep(takes).await;
            outcome
        })
    }
}

fn good() -> (Duration, Outcome) {
    let latency = Duration::from_millis(30);
    (latency, Outcome::success(204, latency))
}

fn refused() -> (Duration, Outcome) {
    (
        Duration::from_millis(1),
        Outcome::failure(ProbeClass::Dial, "refused"),
    )
}

fn hangs(request: &ProbeRequest) -> (Duration, Outcome) {
    (
        request.timeout,
        Outcome::failure(ProbeClass::Timeout, "silent"),
    )
}

fn check() -> HealthCheck {
    crate::state::tests::check(1, 3)
}

fn target(name: &str) -> Target {
    Target {
        key: ProxyKey::new("default", name),
        uid: Uid::new(format!("uid-{name}")),
        host: name.to_owned(),
        port: 3128,
        check: check(),
    }
}

fn start<F>(
    workers: usize,
    script: &Arc<Script<F>>,
) -> (Arc<Engine>, Metrics, CancellationToken, JoinHandle<()>)
where
    F: Fn(&ProbeRequest) -> (Duration, Outcome) + Send + Sync + 'static,
{
    let config = Config {
        workers,
        seed: Some(7),
        ..Config::default()
    };
    let metrics = Metrics::unregistered();
    let cancel = CancellationToken::new();
    let probe: Arc<dyn Probe> = Arc::clone(script) as Arc<dyn Probe>;
    let (engine, handle) = Engine::start_with(config, probe, metrics.clone(), cancel.clone());
    (engine, metrics, cancel, handle)
}

fn healthy(engine: &Engine, name: &str) -> Option<bool> {
    engine
        .verdict(&ProxyKey::new("default", name))
        .map(|verdict| verdict.healthy)
}

async fn pass(time: Duration) {
    tokio::time::sleep(time).await;
}

#[tokio::test(start_paused = true)]
async fn ready_follows_the_port_and_not_the_interval() {
    let begin = Instant::now();
    let script = Script::new(move |_: &ProbeRequest| {
        if begin.elapsed() < Duration::from_secs(31) {
            refused()
        } else {
            good()
        }
    });
    let (engine, _, _, _) = start(4, &script);
    let mut told = engine.transitions();
    engine.set(target("p"));
    assert_eq!(told.next().await, Some(ProxyKey::new("default", "p")));
    assert_eq!(
        healthy(&engine, "p"),
        Some(false),
        "the first result is a verdict"
    );
    assert!(begin.elapsed() < TICK);
    told.next().await;
    assert_eq!(healthy(&engine, "p"), Some(true));
    let late = begin.elapsed() - Duration::from_secs(31);
    assert!(late < Duration::from_millis(400), "{late:?}");
    let before = script.total();
    pass(Duration::from_secs(100)).await;
    let since = script.total() - before;
    assert!((9..=12).contains(&since), "{since} probes in 10 intervals");
    assert!(
        told.next().now_or_never().is_none(),
        "nothing changed, nothing told"
    );
}

#[tokio::test(start_paused = true)]
async fn one_that_never_starts_is_probed_more_and_more_seldom() {
    let script = Script::new(|_: &ProbeRequest| refused());
    let (engine, _, _, _) = start(4, &script);
    engine.set(target("p"));
    pass(Duration::from_secs(10)).await;
    assert!(script.total() > 30, "{} in the first 10 s", script.total());
    pass(Duration::from_secs(600)).await;
    let before = script.total();
    pass(Duration::from_secs(100)).await;
    let since = script.total() - before;
    assert!((8..=13).contains(&since), "{since} probes in 10 intervals");
}

#[tokio::test(start_paused = true)]
async fn many_new_ones_share_the_fast_rate() {
    let script = Script::new(|_: &ProbeRequest| refused());
    let (engine, _, _, _) = start(64, &script);
    for i in 0..2000 {
        engine.set(target(&format!("p{i}")));
    }
    pass(Duration::from_secs(5)).await;
    let before = script.total();
    pass(Duration::from_secs(20)).await;
    let rate = (script.total() - before) / 20;
    assert!((150..=260).contains(&rate), "{rate} probes a second");
}

#[tokio::test(start_paused = true)]
async fn a_slow_way_succeeds_in_the_end_though_new_ones_have_short_timeouts() {
    let script = Script::new(|request: &ProbeRequest| {
        let takes = Duration::from_millis(3500);
        if request.timeout > takes {
            (takes, Outcome::success(204, takes))
        } else {
            hangs(request)
        }
    });
    let (engine, _, _, _) = start(4, &script);
    engine.set(target("far"));
    pass(Duration::from_secs(25)).await;
    assert_eq!(healthy(&engine, "far"), Some(true));
}

#[tokio::test(start_paused = true)]
async fn ten_thousand_are_spread_over_the_interval_with_bounded_concurrency() {
    let script = Script::new(|_: &ProbeRequest| good());
    let (engine, metrics, _, _) = start(64, &script);
    for i in 0..10_000 {
        engine.set(target(&format!("p{i}")));
    }
    pass(Duration::from_secs(15)).await;
    let begin = Instant::now();
    let before = script.total();
    pass(Duration::from_secs(10)).await;
    let log = script.log.lock().unwrap();
    let mut seconds = [0usize; 10];
    for (at, _) in &log[before..] {
        let second = usize::try_from(at.duration_since(begin).as_secs()).unwrap();
        seconds[second.min(9)] += 1;
    }
    let most = seconds.iter().max().unwrap();
    let least = seconds.iter().min().unwrap();
    assert!(*most < 1300 && *least > 700, "{seconds:?}");
    assert!(script.most.load(Ordering::SeqCst) <= 64);
    assert!(metrics.backlog.get() < 64);
}

#[tokio::test(start_paused = true)]
async fn proxies_that_hang_do_not_delay_those_that_work() {
    let script = Script::new(|request: &ProbeRequest| {
        if request.host.starts_with("dead") {
            hangs(request)
        } else {
            good()
        }
    });
    let (engine, metrics, _, _) = start(8, &script);
    for i in 0..20 {
        engine.set(target(&format!("p{i}")));
    }
    pass(Duration::from_secs(15)).await;
    for i in 0..200 {
        engine.set(target(&format!("dead{i}")));
    }
    let begin = Instant::now();
    pass(Duration::from_secs(300)).await;
    assert!(metrics.backlog.get() > 100, "the backlog is seen");
    for i in 0..20 {
        let probes = script.probes(&format!("p{i}"));
        let after: Vec<_> = probes.iter().filter(|at| **at > begin).collect();
        assert!(after.len() >= 27, "p{i} was probed {} times", after.len());
        for pair in after.windows(2) {
            let gap = pair[1].duration_since(*pair[0]);
            assert!(gap < Duration::from_millis(11_200), "p{i} waited {gap:?}");
        }
    }
    // And the dead ones all have their turn.
    for i in 0..200 {
        assert_eq!(
            healthy(&engine, &format!("dead{i}")),
            Some(false),
            "dead{i}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_result_for_what_is_no_more_is_thrown_away() {
    let script = Script::new(|request: &ProbeRequest| {
        let takes = Duration::from_secs(1);
        if request.host == "old" {
            (takes, Outcome::success(204, takes))
        } else {
            hangs(request)
        }
    });
    let (engine, metrics, _, _) = start(4, &script);
    let mut told = engine.transitions();
    let old = Target {
        host: "old".into(),
        ..target("p")
    };
    let changes: [fn(&mut Target); 3] = [
        |t| t.host = "new".into(),
        |t| {
            t.host = "new".into();
            t.uid = Uid::new("another");
        },
        |t| {
            t.host = "new".into();
            t.port = 1;
        },
    ];
    for (i, change) in changes.into_iter().enumerate() {
        engine.set(old.clone());
        pass(Duration::from_millis(500)).await;
        let mut new = old.clone();
        change(&mut new);
        engine.set(new.clone());
        pass(Duration::from_millis(1000)).await;
        assert_eq!(engine.verdict(&new.key), None, "change {i}");
        assert!(told.next().now_or_never().is_none(), "change {i}");
        assert_eq!(metrics.discarded.get(), i as u64 + 1);
        engine.remove(&new.key);
        pass(TICK).await;
        assert_eq!(
            metrics.in_flight.get(),
            0,
            "an aborted probe frees its worker"
        );
        // The removed one's probe was thrown away too.
        metrics.discarded.inner().fetch_sub(1, Ordering::SeqCst);
    }
}

#[tokio::test(start_paused = true)]
async fn a_result_for_an_older_check_is_thrown_away_and_the_verdict_stays() {
    let script = Script::new(|request: &ProbeRequest| {
        if request.url.path() == "/bad" {
            (
                Duration::from_secs(3),
                Outcome::failure(ProbeClass::Tls, "x"),
            )
        } else {
            good()
        }
    });
    let (engine, metrics, _, _) = start(4, &script);
    let mut one = target("p");
    engine.set(one.clone());
    pass(Duration::from_secs(1)).await;
    one.check.failure_threshold = 1;
    one.check.url = "https://target.example/bad".parse().unwrap();
    engine.set(one.clone());
    pass(Duration::from_secs(1)).await;
    assert_eq!(healthy(&engine, "p"), Some(true));
    one.check.url = "https://target.example/good".parse().unwrap();
    engine.set(one);
    pass(Duration::from_secs(60)).await;
    assert_eq!(healthy(&engine, "p"), Some(true));
    assert_eq!(metrics.discarded.get(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_changed_interval_takes_effect_at_once() {
    let script = Script::new(|_: &ProbeRequest| good());
    let (engine, _, _, _) = start(4, &script);
    let mut one = target("p");
    one.check.interval = Duration::from_secs(3600);
    engine.set(one.clone());
    pass(Duration::from_secs(60)).await;
    let before = script.total();
    one.check.interval = Duration::from_secs(6);
    engine.set(one.clone());
    pass(TICK).await;
    assert_eq!(script.total(), before + 1);
    pass(Duration::from_secs(60)).await;
    assert!(script.total() >= before + 9, "{}", script.total() - before);
    let before = script.total();
    engine.set(one);
    pass(TICK).await;
    assert!(
        script.total() <= before + 1,
        "the same target again changes nothing"
    );
}

#[tokio::test(start_paused = true)]
async fn a_removed_proxy_is_forgotten() {
    let script = Script::new(|_: &ProbeRequest| good());
    let (engine, metrics, _, _) = start(4, &script);
    engine.set(target("p"));
    pass(Duration::from_secs(20)).await;
    engine.remove(&ProxyKey::new("default", "p"));
    let before = script.total();
    pass(Duration::from_secs(60)).await;
    assert_eq!(script.total(), before);
    assert_eq!(healthy(&engine, "p"), None);
    let state = engine.lock();
    assert!(state.entries.is_empty() && state.timers.is_empty() && state.by_key.is_empty());
    drop(state);
    let mut text = String::new();
    let mut registry = prometheus_client::registry::Registry::default();
    registry.register("t", "t", metrics.targets.clone());
    prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
    assert!(!text.lines().any(|l| l.ends_with(" 1")), "{text}");
}

#[tokio::test(start_paused = true)]
async fn a_probe_that_panics_or_never_ends_costs_nobody_their_schedule() {
    let script = Script::new(|request: &ProbeRequest| match request.host.as_str() {
        "stuck" => (Duration::from_secs(100_000), good().1),
        _ => good(),
    });
    struct Panics;
    impl Probe for Panics {
        fn probe(&self, _: ProbeRequest) -> BoxFuture<'static, Outcome> {
            Box::pin(async { panic!("on purpose") })
        }
    }
    let (engine, _, _, _) = start(2, &script);
    engine.set(target("stuck"));
    engine.set(target("p"));
    pass(Duration::from_secs(60)).await;
    assert_eq!(healthy(&engine, "p"), Some(true));
    assert_eq!(healthy(&engine, "stuck"), Some(false));

    let cancel = CancellationToken::new();
    let metrics = Metrics::unregistered();
    let (engine, handle) =
        Engine::start_with(Config::default(), Arc::new(Panics), metrics, cancel.clone());
    engine.set(target("p"));
    pass(Duration::from_secs(5)).await;
    let verdict = engine.verdict(&ProxyKey::new("default", "p")).unwrap();
    assert_eq!(verdict.message, "io: the probe failed inside");
    cancel.cancel();
    handle.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn many_failing_together_are_said_to_be_one_failure() {
    let down = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let down_too = Arc::clone(&down);
    let script = Script::new(move |request: &ProbeRequest| {
        if down_too.load(Ordering::SeqCst) && request.host != "p0" {
            refused()
        } else {
            good()
        }
    });
    let (engine, metrics, _, _) = start(16, &script);
    for i in 0..12 {
        engine.set(target(&format!("p{i}")));
    }
    pass(Duration::from_secs(30)).await;
    assert_eq!(engine.common_failure(), None);
    down.store(true, Ordering::SeqCst);
    pass(Duration::from_secs(60)).await;
    assert_eq!(
        engine.common_failure(),
        Some(CommonFailure {
            class: ProbeClass::Dial,
            failing: 11,
            proxies: 12
        })
    );
    for i in 1..12 {
        let key = ProxyKey::new("default", format!("p{i}"));
        let verdict = engine.verdict(&key).unwrap();
        assert!(!verdict.healthy);
        assert_eq!(
            verdict.message,
            "dial: refused; and 10 of 11 others: the operator's own network or the health \
             check's target?"
        );
    }
    down.store(false, Ordering::SeqCst);
    pass(Duration::from_secs(30)).await;
    assert_eq!(engine.common_failure(), None);
    let on = metrics.common_failure.get_or_create_owned(&metrics_label());
    assert_eq!(on.get(), 0);
    // One of them alone is its own fault.
    let verdict = engine.verdict(&ProxyKey::new("default", "p3")).unwrap();
    assert_eq!(verdict.message, "success: 204");
}

fn metrics_label() -> crate::metrics::ClassLabel {
    crate::metrics::ClassLabel::new(ProbeClass::Dial)
}

#[tokio::test(start_paused = true)]
async fn the_end_ends_probes_and_streams() {
    let script = Script::new(hangs);
    let (engine, metrics, cancel, handle) = start(4, &script);
    let told = engine.transitions();
    engine.set(target("p"));
    pass(Duration::from_millis(10)).await;
    assert_eq!(metrics.in_flight.get(), 1);
    cancel.cancel();
    handle.await.unwrap();
    assert_eq!(script.now.load(Ordering::SeqCst), 0);
    assert_eq!(told.count().await, 0);
}

#[derive(Debug, Clone)]
enum Step {
    Set { name: u8, uid: u8, interval: u64 },
    Remove { name: u8 },
    Flip { name: u8 },
    Pass { millis: u64 },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        (0u8..6, 0u8..3, 1u64..20).prop_map(|(name, uid, interval)| Step::Set {
            name,
            uid,
            interval
        }),
        (0u8..6).prop_map(|name| Step::Remove { name }),
        (0u8..6).prop_map(|name| Step::Flip { name }),
        (0u64..30_000).prop_map(|millis| Step::Pass { millis }),
    ];
    proptest::collection::vec(step, 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever happens in between: who listens to the transitions alone knows every verdict in
    /// the end, each proxy's verdict is what its proxy does, and the books balance.
    #[test]
    fn a_listener_never_misses_a_verdict(steps in steps(), slow in any::<bool>()) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .unwrap();
        runtime.block_on(async move {
            let up: Arc<Mutex<BTreeMap<String, bool>>> = Arc::default();
            let up_too = Arc::clone(&up);
            let script = Script::new(move |request: &ProbeRequest| {
                let up = *up_too.lock().unwrap().get(&request.host).unwrap_or(&true);
                if up { good() } else { hangs(request) }
            });
            let (engine, metrics, _, _) = start(3, &script);
            let seen: Arc<Mutex<BTreeMap<ProxyKey, Option<Verdict>>>> = Arc::default();
            let seen_too = Arc::clone(&seen);
            let engine_too = Arc::clone(&engine);
            let mut told = engine.transitions();
            tokio::spawn(async move {
                while let Some(key) = told.next().await {
                    if slow {
                        pass(Duration::from_secs(7)).await;
                    }
                    let verdict = engine_too.verdict(&key);
                    seen_too.lock().unwrap().insert(key, verdict);
                }
            });
            let mut wanted = BTreeMap::new();
            for step in steps {
                match step {
                    Step::Set { name, uid, interval } => {
                        let mut one = target(&format!("p{name}"));
                        one.uid = Uid::new(format!("{uid}"));
                        one.check.interval = Duration::from_secs(interval);
                        one.check.timeout = Duration::from_secs(1);
                        wanted.insert(one.key.clone(), one.clone());
                        engine.set(one);
                    }
                    Step::Remove { name } => {
                        let key = target(&format!("p{name}")).key;
                        wanted.remove(&key);
                        seen.lock().unwrap().remove(&key);
                        engine.remove(&key);
                    }
                    Step::Flip { name } => {
                        let mut up = up.lock().unwrap();
                        let state = up.entry(format!("p{name}")).or_insert(true);
                        *state = !*state;
                    }
                    Step::Pass { millis } => pass(Duration::from_millis(millis)).await,
                }
            }
            pass(Duration::from_secs(600)).await;
            let up = up.lock().unwrap();
            let seen = seen.lock().unwrap();
            for (key, one) in &wanted {
                let verdict = engine.verdict(key);
                let is_up = *up.get(&one.host).unwrap_or(&true);
                assert_eq!(verdict.as_ref().map(|v| v.healthy), Some(is_up), "{key}");
                assert_eq!(verdict.as_ref().map(|v| &v.uid), Some(&one.uid));
                assert_eq!(seen.get(key), Some(&verdict), "{key} was not told");
            }
            let state = engine.lock();
            assert_eq!(state.entries.len(), wanted.len());
            assert_eq!(state.by_key.len(), wanted.len());
            assert_eq!(state.queued, 0);
            let new = state.entries.values().filter(|e| e.new_since.is_some()).count();
            assert_eq!(state.new_count, new);
            assert!(script.most.load(Ordering::SeqCst) <= 3);
            assert_eq!(metrics.backlog.get(), 0);
        });
    }
}

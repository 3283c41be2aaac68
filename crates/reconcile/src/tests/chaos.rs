//! Crashes at every await point, restarts, stale caches, faults of the provider and of the API, in
//! random order: never two instances for one Proxy, nothing leaks, and it converges.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;

use egress_api::Proxy;
use egress_core::{ErrorClass, ProxyKey};
use egress_provider::Operation;
use egress_provider::fake::{Behaviour, Fault};
use jiff::SignedDuration;
use kube::ResourceExt;
use kube::api::ListParams;
use kube::runtime::watcher::Event;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::json;

use super::bed::{Bed, quick, uid};
use crate::step::{Next, reconcile};
use crate::{Config, Reconciler};

/// Polls a future so many times and then drops it.
struct CutOff<F> {
    inner: Pin<Box<F>>,
    left: u32,
}

impl<F: Future> Future for CutOff<F> {
    type Output = Option<F::Output>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<Self::Output> {
        if self.left == 0 {
            return Poll::Ready(None);
        }
        self.left -= 1;
        match self.inner.as_mut().poll(cx) {
            Poll::Ready(out) => Poll::Ready(Some(out)),
            // Cut off now, not when it would be woken next.
            Poll::Pending if self.left == 0 => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    }
}

/// A reconciler that is stepped by hand; its cache is as old as the test wants.
struct Stepped<'a> {
    bed: &'a Bed,
    reconciler: Reconciler,
}

impl<'a> Stepped<'a> {
    async fn start(bed: &'a Bed) -> Self {
        let mut this = Self {
            reconciler: bed.reconciler(),
            bed,
        };
        this.refresh().await;
        this
    }

    /// A crash and a start of the operator.
    async fn restart(&mut self) {
        self.reconciler = self.bed.reconciler();
        self.refresh().await;
    }

    /// The cache catches up.
    async fn refresh(&mut self) {
        let list = self.bed.api().list(&ListParams::default()).await.unwrap();
        let ctx = Arc::clone(&self.reconciler.ctx);
        let writer = &mut self.reconciler.writer;
        writer.apply_watcher_event(&Event::Init);
        for object in &list.items {
            writer.apply_watcher_event(&Event::InitApply(object.clone()));
        }
        writer.apply_watcher_event(&Event::InitDone);
        for key in ctx.index.keys() {
            ctx.index.update(&key, None);
        }
        for object in &list.items {
            ctx.index.update(&object.key(), Some(object));
        }
    }

    /// True: it came to its end.
    async fn reconcile(&self, key: &ProxyKey, polls: u32) -> bool {
        let cut = CutOff {
            inner: Box::pin(reconcile(&self.reconciler.ctx, key)),
            left: polls,
        };
        cut.await.is_some()
    }

    /// Reconciles all in turn until nobody has anything to do soon.
    async fn settle(&mut self, story: &[String]) {
        for _ in 0..400 {
            self.refresh().await;
            let keys = self.reconciler.ctx.index.keys();
            let mut busy = false;
            for key in keys {
                match reconcile(&self.reconciler.ctx, &key).await {
                    Ok(Next::Never) => busy = true,
                    Ok(Next::At(at)) => {
                        busy |= at < tokio::time::Instant::now() + Duration::from_secs(10);
                    }
                    Err(_) => busy = true,
                }
            }
            if !busy {
                return;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let all: Vec<_> = self
            .bed
            .api()
            .list(&ListParams::default())
            .await
            .unwrap()
            .items;
        panic!(
            "it does not converge: {all:#?}\n{:#?}\n{}",
            self.bed.world.machines(),
            story.join("\n")
        );
    }
}

fn key() -> ProxyKey {
    ProxyKey::new("default", "p1")
}

fn config() -> Config {
    let mut config = quick();
    config.poll = Duration::from_millis(1);
    config.backoff.first = Duration::from_micros(100);
    config.backoff.max = Duration::from_micros(200);
    config.backoff.quota = Duration::from_micros(200);
    config
}

fn behave(bed: &Bed) {
    bed.world.behave(Behaviour {
        polls_until_gone: 1,
        ..Behaviour::default()
    });
}

/// The world is what the objects ask for: no more, no less, each as it should be.
#[track_caller]
fn assert_converged(bed: &Bed, objects: &[Proxy], story: &[String]) {
    let story = || format!("\n{}", story.join("\n"));
    assert_eq!(bed.world.violations(), Vec::<String>::new(), "{}", story());
    let machines = bed.world.machines();
    assert_eq!(machines.len(), objects.len(), "{machines:#?}{}", story());
    for object in objects {
        let machine = bed
            .world
            .machine_of(&uid(object))
            .unwrap_or_else(|| panic!("{} has no instance{}", object.name_any(), story()));
        let status = object.status.as_ref().unwrap();
        assert_eq!(
            Some(machine.provider.as_str()),
            object.spec.provider.as_deref()
        );
        assert_eq!(i32::from(machine.port), object.spec.port);
        assert_eq!(
            status.phase.as_deref(),
            Some("Ready"),
            "{status:#?}{}",
            story()
        );
        assert_eq!(status.ip, Some(machine.address.to_string()));
        assert_eq!(status.observed_generation, object.metadata.generation);
    }
}

/// Every single await point of a create, a replacement (at the same and at another provider) and a
/// deletion: cut off there, started again.
#[tokio::test]
async fn a_crash_at_any_await_point_is_made_good() {
    let scenarios: [(&str, Option<serde_json::Value>); 4] = [
        ("create", None),
        ("replace", Some(json!({"spec": {"port": 8080}}))),
        ("move", Some(json!({"spec": {"provider": "fake-b"}}))),
        ("delete", None),
    ];
    for (name, patch) in scenarios {
        let mut points = 0;
        for polls in 1..500 {
            let story = [format!("{name}, cut off after {polls} polls")];
            let bed = Bed::with(config()).await;
            behave(&bed);
            bed.managed("p1").await;
            let mut stepped = Stepped::start(&bed).await;
            if name != "create" {
                stepped.settle(&story).await;
            }
            if let Some(patch) = &patch {
                bed.patch("p1", patch.clone()).await;
            }
            if name == "delete" {
                bed.delete("p1").await;
            }
            stepped.refresh().await;
            let ended = stepped.reconcile(&key(), polls).await;
            stepped.restart().await;
            stepped.settle(&story).await;
            let objects = bed.api().list(&ListParams::default()).await.unwrap().items;
            assert_eq!(objects.is_empty(), name == "delete", "{story:?}");
            assert_converged(&bed, &objects, &story);
            if ended {
                points = polls;
                break;
            }
        }
        assert!(points > 5, "{name}: only {points} await points were tested");
    }
}

#[derive(Debug)]
enum Op {
    Port(i32),
    Provider(&'static str),
    UserData(u32),
    Attributes(u32),
    Delete,
    Create,
    Fault(&'static str, Operation, ErrorClass, bool),
    Outage(&'static str, Operation, ErrorClass),
    Heal,
    Stop,
    Vanish,
    Restart,
    Conflict,
    Reconcile,
    Crash(u32),
}

fn any_op(rng: &mut StdRng) -> Op {
    let provider = ["fake-a", "fake-b"][rng.random_range(0..2)];
    let operation = [
        Operation::Create,
        Operation::Get,
        Operation::Get,
        Operation::Delete,
        Operation::List,
        Operation::List,
    ][rng.random_range(0..6)];
    let class = [
        ErrorClass::Transient,
        ErrorClass::Transient,
        ErrorClass::QuotaExceeded,
        ErrorClass::Permanent,
        ErrorClass::NotFound,
    ][rng.random_range(0..5)];
    // Only `get` may answer so: of anything else it would be a lie about the world.
    let class = if operation == Operation::Get && class == ErrorClass::NotFound {
        ErrorClass::Transient
    } else {
        class
    };
    match rng.random_range(0..28) {
        0 => Op::Port(rng.random_range(3000..3003)),
        1..=3 => Op::Provider(provider),
        4 => Op::UserData(rng.random_range(0..3)),
        5 => Op::Attributes(rng.random_range(0..9)),
        6 => Op::Delete,
        7 | 8 => Op::Create,
        9..=11 => Op::Fault(provider, operation, class, rng.random()),
        12 | 13 => Op::Outage(provider, operation, class),
        14 => Op::Heal,
        15 => Op::Stop,
        16 => Op::Vanish,
        17 => Op::Restart,
        18 => Op::Conflict,
        19..=22 => Op::Reconcile,
        _ => Op::Crash(rng.random_range(1..40)),
    }
}

async fn apply(op: &Op, bed: &Bed, stepped: &mut Stepped<'_>, key: &ProxyKey) {
    let name = key.name.as_str();
    let there = bed.get(name).await;
    let patch = |patch: serde_json::Value| async {
        if there.is_some() {
            bed.patch(name, patch).await;
        }
    };
    match op {
        Op::Port(port) => patch(json!({"spec": {"port": port}})).await,
        Op::Provider(to) => patch(json!({"spec": {"provider": to}})).await,
        Op::UserData(n) => patch(json!({"spec": {"cloudInit": {"inline": n.to_string()}}})).await,
        Op::Attributes(n) => patch(json!({"spec": {"attributes": {"n": n.to_string()}}})).await,
        Op::Delete => {
            if there.is_some() {
                bed.delete(name).await;
            }
        }
        Op::Create => {
            if there.is_none() {
                bed.managed(name).await;
            }
        }
        Op::Fault(provider, operation, class, late) => {
            let fault = Fault::of(*class);
            let fault = if *late { fault.after_effect() } else { fault };
            bed.world.fail_next(provider, *operation, fault);
        }
        Op::Outage(provider, operation, class) => {
            bed.world
                .fail_always(provider, *operation, Fault::of(*class));
        }
        Op::Heal => heal(bed),
        Op::Stop => bed.world.change(|_| true, |m| m.stopped = true),
        Op::Vanish => {
            for machine in bed.world.machines() {
                bed.world.vanish(&machine.uid);
            }
        }
        Op::Restart => stepped.restart().await,
        Op::Conflict => {
            let once = std::sync::atomic::AtomicBool::new(true);
            bed.wire.refuse(move |method, _| {
                (method == "PATCH" && once.swap(false, std::sync::atomic::Ordering::SeqCst))
                    .then_some(500)
            });
        }
        Op::Reconcile => {
            stepped.reconcile(key, u32::MAX).await;
        }
        Op::Crash(polls) => {
            stepped.reconcile(key, *polls).await;
            // What the process remembered is gone; the cache of the next one is new.
            stepped.restart().await;
        }
    }
}

fn heal(bed: &Bed) {
    bed.world.heal("fake-a");
    bed.world.heal("fake-b");
}

/// One sequence, from the creation of a Proxy to its convergence and its end.
async fn sequence(bed: &Bed, seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    let key = ProxyKey::new("default", format!("p{seed}"));
    bed.managed(&key.name).await;
    let mut stepped = Stepped::start(bed).await;
    let mut story = vec![format!("EGRESS_CHAOS_SEED={seed}")];
    for _ in 0..rng.random_range(5..40) {
        let op = any_op(&mut rng);
        // A cache is behind now and then, not mostly.
        let refresh = rng.random_bool(0.7);
        story.push(format!(
            "{op:?}{}",
            if refresh { ", refreshed" } else { "" }
        ));
        if refresh {
            stepped.refresh().await;
        }
        apply(&op, bed, &mut stepped, &key).await;
        assert_eq!(bed.world.violations(), Vec::<String>::new(), "{story:#?}");
    }
    bed.wire.allow_all();
    heal(bed);
    if bed.get(&key.name).await.is_some() {
        // The administrator's last word: a failure that latched is cleared by a change.
        let last = json!({"spec": {"attributes": {"last": "word"}}});
        bed.patch(&key.name, last).await;
    }
    stepped.settle(&story).await;
    let objects = bed.api().list(&ListParams::default()).await.unwrap().items;
    if objects.is_empty() {
        // What a Proxy that went left behind is the sweep's.
        bed.clock.advance(SignedDuration::from_hours(1));
        stepped.reconciler.sweep_now().await.unwrap();
    }
    assert_converged(bed, &objects, &story);
    if !objects.is_empty() {
        bed.delete(&key.name).await;
        stepped.settle(&story).await;
    }
    assert_eq!(bed.world.machines().len(), 0, "left behind: {story:#?}");
}

/// Runs as many sequences as fit into `time`, or the one of `EGRESS_CHAOS_SEED`.
async fn sequences(bed: &Bed, at_least: u64, time: Duration) {
    behave(bed);
    let seed = std::env::var("EGRESS_CHAOS_SEED").ok();
    if let Some(seed) = seed.and_then(|s| s.parse().ok()) {
        return sequence(bed, seed).await;
    }
    let started = std::time::Instant::now();
    let mut done = 0;
    while done < at_least || started.elapsed() < time {
        done += 1;
        sequence(bed, done).await;
    }
    println!("{done} sequences");
}

#[tokio::test]
async fn random_sequences_never_make_two_leak_nothing_and_converge() {
    sequences(&Bed::on_stub(config()), 20, Duration::from_secs(8)).await;
}

#[tokio::test]
async fn nor_do_they_on_the_embedded_control_plane() {
    sequences(&Bed::with(config()).await, 10, Duration::from_secs(3)).await;
}

use std::time::Duration;

use super::bed::{Bed, Running, quick};
use crate::Readiness;

async fn until_readiness(running: &Running, holds: impl Fn(&Readiness) -> bool) -> Readiness {
    tokio::time::timeout(Duration::from_secs(10), async {
        let mut changes = running.handle.readiness_changes();
        loop {
            let now = running.handle.readiness();
            if holds(&now) {
                return now;
            }
            changes.changed().await;
        }
    })
    .await
    .unwrap_or_else(|_| panic!("still {:?}", running.handle.readiness()))
}

fn is_watch(uri: &str) -> bool {
    uri.contains("watch=true") || uri.contains("watch=1")
}

/// kube#1132: list allowed, watch forbidden.
#[tokio::test]
async fn a_forbidden_watch_is_named_and_heals() {
    let bed = Bed::new().await;
    bed.wire.refuse(|method, uri| {
        (method == "GET" && uri.contains("proxies") && is_watch(uri)).then_some(403)
    });
    let running = bed.start();
    let not = until_readiness(
        &running,
        |r| matches!(r, Readiness::NotReady(why) if why.contains("may not watch")),
    )
    .await;
    let Readiness::NotReady(why) = not else {
        panic!("{not:?}")
    };
    assert!(
        why.contains("proxies.crawl.example.com") && why.contains("\"watch\""),
        "{why}"
    );
    bed.wire.allow_all();
    until_readiness(&running, |r| *r == Readiness::Ready).await;
    bed.managed("p1").await;
    bed.until_phase("p1", "Ready").await;
    running.stop().await.unwrap();
}

/// kube#717: the API is down at the start.
#[tokio::test]
async fn an_api_that_is_down_is_asked_with_backoff_and_found_again() {
    let bed = Bed::new().await;
    bed.wire.refuse(|_, _| Some(503));
    let running = bed.start();
    until_readiness(
        &running,
        |r| matches!(r, Readiness::NotReady(why) if why.contains("cannot list")),
    )
    .await;
    let before = bed.wire.reads.load(std::sync::atomic::Ordering::SeqCst);
    tokio::time::sleep(Duration::from_millis(600)).await;
    let tries = bed.wire.reads.load(std::sync::atomic::Ordering::SeqCst) - before;
    assert!((2..=20).contains(&tries), "{tries} tries in 600 ms");
    bed.wire.allow_all();
    until_readiness(&running, |r| *r == Readiness::Ready).await;
    bed.managed("p1").await;
    bed.until_phase("p1", "Ready").await;
    running.stop().await.unwrap();
}

/// kube#1615: 410 Gone is one new list, and what was missed is seen.
#[tokio::test]
async fn a_forgotten_version_is_one_new_list() {
    let mut config = quick();
    config.watch_timeout = Duration::from_secs(1);
    let bed = Bed::with(config).await;
    let running = bed.start();
    until_readiness(&running, |r| *r == Readiness::Ready).await;
    bed.managed("p1").await;
    bed.until_phase("p1", "Ready").await;
    bed.wire.refuse(|method, uri| {
        (method == "GET" && uri.contains("proxies") && is_watch(uri)).then_some(410)
    });
    // The watch ends by its time, and the next one is refused.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    bed.managed("p2").await;
    bed.wire.allow_all();
    bed.until_phase("p2", "Ready").await;
    bed.delete("p1").await;
    bed.until_gone("p1").await;
    until_readiness(&running, |r| *r == Readiness::Ready).await;
    running.stop().await.unwrap();
}

#[tokio::test]
async fn progress_shows_while_idle() {
    let bed = Bed::new().await;
    let running = bed.start();
    until_readiness(&running, |r| *r == Readiness::Ready).await;
    assert!(running.handle.last_progress().elapsed() < Duration::from_secs(6));
    running.stop().await.unwrap();
}

/// A write that fails with a conflict or an error of the API is repeated.
#[tokio::test]
async fn refused_writes_are_repeated() {
    let bed = Bed::new().await;
    let count = std::sync::atomic::AtomicU64::new(0);
    bed.wire.refuse(move |method, uri| {
        let n = count.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        (method == "PATCH" && uri.contains("proxies") && !n.is_multiple_of(3))
            .then_some(if n.is_multiple_of(2) { 409 } else { 500 })
    });
    let running = bed.start();
    bed.managed("p1").await;
    bed.until_phase("p1", "Ready").await;
    bed.delete("p1").await;
    bed.until_gone("p1").await;
    assert_eq!(bed.world.created(), 1);
    running.stop().await.unwrap();
}

/// kube#1798 of plain calls: one that never answers is given up and repeated.
#[tokio::test]
async fn a_call_that_hangs_is_given_up_and_repeated() {
    let mut config = quick();
    config.api_deadline = Duration::from_millis(200);
    let bed = Bed::with(config).await;
    let hung = std::sync::atomic::AtomicU64::new(0);
    bed.wire.refuse(move |method, uri| {
        (method == "PATCH"
            && uri.contains("proxies")
            && hung.fetch_add(1, std::sync::atomic::Ordering::SeqCst) < 2)
            .then_some(super::bed::HANG)
    });
    let running = bed.start();
    bed.managed("p1").await;
    bed.until_phase("p1", "Ready").await;
    running.stop().await.unwrap();
}

/// linkerd2#15506: a task that died must not leave a process that looks alive.
#[tokio::test]
async fn a_task_that_ends_by_itself_ends_the_run() {
    let bed = Bed::new().await;
    let running = bed.start();
    until_readiness(&running, |r| *r == Readiness::Ready).await;
    bed.health.hang_up();
    let ended = running.ended().await;
    assert!(
        matches!(
            ended,
            Err(crate::RunError::TaskEnded {
                task: "health transitions"
            })
        ),
        "{ended:?}"
    );
}

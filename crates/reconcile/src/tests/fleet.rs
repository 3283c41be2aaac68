use std::sync::atomic::Ordering;
use std::time::Duration;

use egress_core::ErrorClass;
use egress_provider::Operation;
use egress_provider::fake::Fault;
use serde_json::json;

use super::bed::{Bed, quick};

/// A resync of each Proxy every 200 ms for 3 s: fifteen times what happens in 60 s, and more.
#[tokio::test]
async fn a_steady_fleet_of_a_hundred_writes_nothing() {
    let mut config = quick();
    config.resync = Duration::from_millis(200);
    config.first_sweep = Duration::from_millis(500);
    config.sweep_interval = Duration::from_millis(500);
    let bed = Bed::with(config).await;
    let running = bed.start();
    let names: Vec<_> = (0..100).map(|n| format!("p{n}")).collect();
    futures::future::join_all(names.iter().map(|name| bed.managed(name))).await;
    let mut changes = running.directory.changes();
    while running
        .directory
        .records()
        .iter()
        .filter(|r| r.healthy)
        .count()
        < 100
    {
        changes.changed().await.unwrap();
    }
    // Until the last status and Event is written.
    let mut written = u64::MAX;
    while bed.wire.writes.load(Ordering::SeqCst) != written {
        written = bed.wire.writes.load(Ordering::SeqCst);
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    let gets = bed.world.calls("fake-a", Operation::Get);
    bed.wire.take_written();
    let revision = bed.plane.as_ref().unwrap().revision();
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(bed.wire.take_written(), Vec::<String>::new());
    assert_eq!(bed.plane.as_ref().unwrap().revision(), revision);
    let looked = bed.world.calls("fake-a", Operation::Get) - gets;
    assert!(looked >= 500, "only {looked} looks: nothing was tested");
    running.stop().await.unwrap();
    // Nor does a restart of the operator.
    let before = bed.wire.writes.load(Ordering::SeqCst);
    bed.health.be_silent();
    let running = bed.start();
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(bed.wire.writes.load(Ordering::SeqCst), before);
    running.stop().await.unwrap();
}

#[tokio::test]
async fn a_slow_provider_does_not_hold_up_the_others() {
    let mut config = quick();
    config.concurrency = 8;
    config.concurrency_per_provider = 4;
    let bed = Bed::with(config).await;
    bed.world
        .slow_down("fake-a", Operation::Create, Duration::from_secs(3600));
    let running = bed.start();
    for n in 0..20 {
        bed.managed(&format!("slow{n}")).await;
    }
    let started = tokio::time::Instant::now();
    bed.create("quick", json!({"mode": "Managed", "provider": "fake-b"}))
        .await;
    bed.until_phase("quick", "Ready").await;
    assert!(started.elapsed() < Duration::from_secs(3));
    // And a stop does not wait for it longer than its grace.
    let started = tokio::time::Instant::now();
    running.cancel.cancel();
    drop(running);
    assert!(started.elapsed() < Duration::from_secs(1));
}

#[tokio::test]
async fn a_stop_waits_for_running_reconciles_but_not_for_ever() {
    let mut config = quick();
    config.shutdown_grace = Duration::from_millis(200);
    let bed = Bed::with(config).await;
    bed.world
        .slow_down("fake-a", Operation::Create, Duration::from_secs(3600));
    let running = bed.start();
    bed.managed("p1").await;
    let deadline = tokio::time::Instant::now() + Duration::from_secs(5);
    while bed.world.calls("fake-a", Operation::Create) == 0 {
        assert!(tokio::time::Instant::now() < deadline);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let started = tokio::time::Instant::now();
    running.stop().await.unwrap();
    let took = started.elapsed();
    assert!(
        took >= Duration::from_millis(150) && took < Duration::from_secs(3),
        "{took:?}"
    );
}

#[tokio::test]
async fn twenty_at_once_with_errors_are_twenty() {
    let bed = Bed::new().await;
    for _ in 0..10 {
        for (operation, late) in [
            (Operation::Create, true),
            (Operation::Create, false),
            (Operation::Get, false),
        ] {
            let fault = Fault::of(ErrorClass::Transient);
            let fault = if late { fault.after_effect() } else { fault };
            bed.world.fail_next("fake-a", operation, fault);
        }
    }
    let running = bed.start();
    for n in 0..20 {
        bed.managed(&format!("p{n}")).await;
    }
    for n in 0..20 {
        bed.until_phase(&format!("p{n}"), "Ready").await;
    }
    assert_eq!(bed.world.created(), 20);
    assert_eq!(bed.world.violations(), Vec::<String>::new());
    running.stop().await.unwrap();
}

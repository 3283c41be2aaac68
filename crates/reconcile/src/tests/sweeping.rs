use std::time::Duration;

use egress_core::spec::Placement;
use egress_core::{ErrorClass, InstallationId};
use egress_provider::Operation;
use egress_provider::conformance::request;
use egress_provider::fake::{Fault, Stray};
use jiff::SignedDuration;

use super::bed::{Bed, quick};
use egress_core::Clock;
use serde_json::json;

#[tokio::test]
async fn orphans_go_and_nothing_else_does() {
    let bed = Bed::new().await;
    let running = bed.start();
    bed.managed("p1").await;
    bed.until_phase("p1", "Ready").await;
    let me = &bed.installation;
    let mk = |n| request(n, me, Placement::default());
    let now = bed.clock.now();
    // Old, of unknown age, young, another installation's.
    bed.world.plant("fake-a", &mk(1), Some(now));
    bed.world.plant("fake-b", &mk(2), None);
    let other = InstallationId::new("other");
    bed.world
        .plant("fake-a", &request(3, &other, Placement::default()), None);
    bed.clock.advance(SignedDuration::from_mins(11));
    bed.world.plant("fake-a", &mk(4), Some(bed.clock.now()));
    bed.world.add_stray(
        "fake-a",
        Stray {
            name: "volume-1".into(),
            uid: None,
            created_at: Some(now),
        },
    );
    let done = bed.reconciler().sweep_now().await.unwrap();
    assert_eq!((done.found, done.deleted), (2, 2));
    assert_eq!(done.garbage, ["volume-1"]);
    let left: Vec<_> = bed.world.machines().into_iter().map(|m| m.uid).collect();
    assert_eq!(left.len(), 3);
    for n in [1, 2] {
        assert!(!left.contains(&mk(n).uid), "{n} is left");
    }
    // A Proxy that is being deleted has its instance still.
    bed.world.fail_always(
        "fake-a",
        Operation::Delete,
        Fault::of(ErrorClass::Transient),
    );
    bed.delete("p1").await;
    bed.until_phase("p1", "Deleting").await;
    bed.world.heal("fake-a");
    bed.clock.advance(SignedDuration::from_mins(11));
    running.stop().await.unwrap();
    bed.world
        .fail_always("fake-b", Operation::List, Fault::of(ErrorClass::Transient));
    let done = bed.reconciler().sweep_now().await.unwrap();
    assert_eq!(done.found, 1, "the young one of before, and not p1's");
    assert_eq!(done.skipped, ["fake-b"]);
}

#[tokio::test]
async fn a_partial_view_and_a_hasty_sweep_do_no_harm() {
    let mut config = quick();
    config.sweep_cap = 2;
    let bed = Bed::with(config).await;
    for n in 1..=5 {
        let request = request(n, &bed.installation, Placement::default());
        bed.world.plant("fake-a", &request, None);
    }
    bed.world
        .fail_next("fake-a", Operation::List, Fault::of(ErrorClass::Transient));
    let reconciler = bed.reconciler();
    let done = reconciler.sweep_now().await.unwrap();
    assert_eq!((done.found, done.deleted), (0, 0));
    // No Proxy at all (the wrong cluster?): nothing goes before the grace has passed.
    let done = reconciler.sweep_now().await.unwrap();
    assert_eq!((done.found, done.deleted), (0, 0));
    assert_eq!(bed.world.machines().len(), 5);
    bed.clock.advance(SignedDuration::from_mins(11));
    // The Proxies cannot be listed: nobody is known to be gone.
    bed.wire
        .refuse(|method, uri| (method == "GET" && uri.contains("proxies")).then_some(500));
    assert_eq!(reconciler.sweep_now().await, None);
    bed.wire.allow_all();
    assert_eq!(bed.world.machines().len(), 5);
    // So many at a time, and no more.
    for left in [3, 1, 0] {
        reconciler.sweep_now().await.unwrap();
        assert_eq!(bed.world.machines().len(), left);
    }
}

/// The reconciler's own sweep runs soon after the start, without anybody asking.
#[tokio::test]
async fn it_sweeps_soon_after_the_start() {
    let mut config = quick();
    config.first_sweep = Duration::from_millis(20);
    let bed = Bed::with(config).await;
    bed.create(
        "e1",
        json!({"mode": "External", "endpoint": {"host": "192.0.2.1"}}),
    )
    .await;
    let request = request(1, &bed.installation, Placement::default());
    bed.world.plant("fake-a", &request, None);
    let running = bed.start();
    let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
    while !bed.world.machines().is_empty() {
        assert!(tokio::time::Instant::now() < deadline);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    running.stop().await.unwrap();
}

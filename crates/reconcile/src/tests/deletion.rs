use std::sync::Arc;
use std::time::Duration;

use egress_core::ErrorClass;
use egress_lease::{AcquireRequest, LeaseStore};
use egress_provider::fake::{Behaviour, Fault};
use egress_provider::{Operation, Provider};
use serde_json::json;

use super::bed::{Bed, condition, uid};

#[tokio::test]
async fn a_deleted_proxy_ends_its_leases_and_leaves_nothing() {
    let bed = Bed::new().await;
    bed.world.behave(Behaviour {
        polls_until_gone: 3,
        ..Behaviour::default()
    });
    let running = bed.start();
    let proxy = bed.managed("p1").await;
    bed.until_phase("p1", "Ready").await;
    let record = running.directory.get(&proxy.key()).unwrap();
    let request = AcquireRequest {
        selector: Default::default(),
        ttl: Duration::from_secs(60),
        target: None,
        idempotency_key: None,
    };
    bed.leases
        .acquire(&request, std::slice::from_ref(&record))
        .unwrap();
    assert_eq!(bed.leases.active().len(), 1);
    bed.delete("p1").await;
    bed.until("p1", |p| condition(p, "Provisioned").1 == "Deleting")
        .await;
    assert_eq!(bed.leases.active().len(), 0);
    assert!(
        !running
            .directory
            .get(&proxy.key())
            .is_some_and(|r| r.healthy)
    );
    bed.until_gone("p1").await;
    assert_eq!(bed.world.machines().len(), 0);
    bed.until_event("p1", "Deleting").await;
    bed.until_event("p1", "Released").await;
    running.stop().await.unwrap();
}

#[tokio::test]
async fn an_unrecorded_instance_is_found_by_its_name() {
    let bed = Bed::new().await;
    // The answer of create is lost each time, so nothing is recorded.
    bed.world.fail_always(
        "fake-a",
        Operation::Create,
        Fault::of(ErrorClass::Transient).after_effect(),
    );
    let running = bed.start();
    let proxy = bed.managed("p1").await;
    bed.until("p1", |p| condition(p, "ProviderReachable").0 == "False")
        .await;
    assert!(bed.world.machine_of(&uid(&proxy)).is_some());
    bed.delete("p1").await;
    bed.until_gone("p1").await;
    assert_eq!(bed.world.machines().len(), 0);
    running.stop().await.unwrap();
}

#[tokio::test]
async fn skip_cleanup_frees_a_proxy_whose_provider_is_gone() {
    let bed = Bed::new().await;
    let running = bed.start();
    bed.managed("p1").await;
    bed.until_phase("p1", "Ready").await;
    let only_b: Vec<Arc<dyn Provider>> = vec![bed.providers.get("fake-b").unwrap()];
    bed.providers.replace(only_b);
    bed.until_phase("p1", "Failed").await;
    bed.delete("p1").await;
    let stuck = bed
        .until("p1", |p| {
            p.status.as_ref().unwrap().phase.as_deref() == Some("Deleting")
                && condition(p, "Provisioned").1 == "ProviderNotConfigured"
        })
        .await;
    let message = condition(&stuck, "Provisioned").2;
    assert!(
        message.contains("\"fake-a\"") && message.contains("crawl.example.com/skip-cleanup"),
        "{message}"
    );
    bed.until_event("p1", "ProviderNotConfigured").await;
    bed.patch(
        "p1",
        json!({"metadata": {"annotations": {"crawl.example.com/skip-cleanup": "true"}}}),
    )
    .await;
    bed.until_gone("p1").await;
    bed.until_event("p1", "Abandoned").await;
    assert_eq!(bed.world.machines().len(), 1, "abandoned, not deleted");
    running.stop().await.unwrap();
}

#[tokio::test]
async fn a_provider_that_comes_back_lets_the_deletion_finish() {
    let bed = Bed::new().await;
    let running = bed.start();
    bed.managed("p1").await;
    bed.until_phase("p1", "Ready").await;
    let all = bed.providers.all();
    bed.providers.replace(Vec::<Arc<dyn Provider>>::new());
    bed.delete("p1").await;
    bed.until("p1", |p| {
        condition(p, "Provisioned").1 == "ProviderNotConfigured"
    })
    .await;
    bed.providers.replace(all);
    bed.until_gone("p1").await;
    assert_eq!(bed.world.machines().len(), 0);
    running.stop().await.unwrap();
}

#[tokio::test]
async fn get_that_fails_permanently_does_not_keep_a_proxy_from_going() {
    let bed = Bed::new().await;
    let running = bed.start();
    bed.managed("p1").await;
    bed.until_phase("p1", "Ready").await;
    let fault = Fault::of(ErrorClass::Permanent).saying("403 forbidden");
    bed.world
        .fail_always("fake-a", Operation::Get, fault.clone());
    bed.world.fail_always("fake-a", Operation::Delete, fault);
    bed.delete("p1").await;
    // Both fail: it stays, and says so.
    bed.until("p1", |p| {
        condition(p, "Provisioned").2.contains("delete")
            && condition(p, "Provisioned").2.contains("403")
    })
    .await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(bed.get("p1").await.is_some());
    bed.world.heal("fake-a");
    bed.world
        .fail_always("fake-a", Operation::Get, Fault::of(ErrorClass::Permanent));
    bed.until_gone("p1").await;
    assert_eq!(bed.world.machines().len(), 0);
    running.stop().await.unwrap();
}

#[tokio::test]
async fn transient_errors_delay_a_deletion_and_never_lose_the_instance() {
    let bed = Bed::new().await;
    let running = bed.start();
    bed.managed("p1").await;
    bed.until_phase("p1", "Ready").await;
    bed.world
        .fail_always("fake-a", Operation::Get, Fault::of(ErrorClass::Transient));
    bed.delete("p1").await;
    bed.until("p1", |p| condition(p, "ProviderReachable").0 == "False")
        .await;
    assert_eq!(bed.world.machines().len(), 1);
    bed.world.heal("fake-a");
    bed.until_gone("p1").await;
    assert_eq!(bed.world.machines().len(), 0);
    running.stop().await.unwrap();
}

#[tokio::test]
async fn deleted_while_failed_or_before_anything_was_made() {
    let bed = Bed::new().await;
    let running = bed.start();
    bed.create("p1", json!({"mode": "Managed", "provider": "nobody"}))
        .await;
    bed.until_phase("p1", "Failed").await;
    bed.delete("p1").await;
    bed.until_gone("p1").await;
    bed.world.fail_always(
        "fake-a",
        Operation::Create,
        Fault::of(ErrorClass::Permanent),
    );
    bed.managed("p2").await;
    bed.until_phase("p2", "Failed").await;
    bed.delete("p2").await;
    bed.until_gone("p2").await;
    running.stop().await.unwrap();
}

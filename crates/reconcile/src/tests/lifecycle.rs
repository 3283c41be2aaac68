use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use egress_api::{FINALIZER, PROVIDER_ANNOTATION, SPEC_HASH_ANNOTATION};
use egress_core::{ErrorClass, Uid};
use egress_provider::fake::{Behaviour, Fault, UNKNOWN_ZONE};
use egress_provider::{Operation, Provider, Step};
use kube::ResourceExt;
use serde_json::json;

use super::bed::{Bed, condition, ip, quick, uid};

#[tokio::test]
async fn a_managed_proxy_becomes_ready_and_says_how() {
    let bed = Bed::new().await;
    bed.world.behave(Behaviour {
        steps: vec![Step::FetchingImage("debian-13: 42%".into())],
        ..Behaviour::default()
    });
    let running = bed.start();
    let created = bed.managed("p1").await;
    let ready = bed.until_phase("p1", "Ready").await;
    let machine = bed.world.machine_of(&uid(&created)).unwrap();
    assert_eq!(ip(&ready), Some(machine.address.to_string()));
    assert_eq!(ready.finalizers(), [FINALIZER]);
    assert!(ready.annotations().contains_key(SPEC_HASH_ANNOTATION));
    assert_eq!(ready.annotations()[PROVIDER_ANNOTATION], "fake-a");
    let status = ready.status.as_ref().unwrap();
    assert_eq!(
        status.provider_id.as_deref(),
        Some(format!("fake/fake-a/{}", machine.name).as_str())
    );
    assert_eq!(status.observed_generation, ready.metadata.generation);
    for type_ in ["Ready", "Provisioned", "Healthy", "ProviderReachable"] {
        assert_eq!(condition(&ready, type_).0, "True", "{type_}");
    }
    bed.until_event("p1", "Created").await;
    bed.until_event("p1", "Ready").await;
    let record = running.directory.get(&ready.key()).unwrap();
    assert!(record.healthy && record.url().is_some());
    running.stop().await.unwrap();
    // A stop leaves everything as it is.
    assert_eq!(bed.world.machines().len(), 1);
}

#[tokio::test]
async fn what_the_instance_is_built_from_replaces_it_and_nothing_else_does() {
    let bed = Bed::new().await;
    bed.world.behave(Behaviour {
        polls_until_gone: 2,
        ..Behaviour::default()
    });
    let running = bed.start();
    let proxy = bed.managed("p1").await;
    let first = bed.until_phase("p1", "Ready").await;
    for free in [
        json!({"spec": {"attributes": {"geo": "de"}}}),
        json!({"spec": {"maxLeases": 9}}),
        json!({"spec": {"healthCheck": {"intervalSeconds": 20}}}),
    ] {
        let patched = bed.patch("p1", free).await;
        let seen = bed
            .until("p1", |p| {
                p.status.as_ref().unwrap().observed_generation == patched.metadata.generation
            })
            .await;
        assert_eq!(ip(&seen), ip(&first));
    }
    assert_eq!(bed.world.created(), 1);
    let mut last = ip(&first);
    for (n, change) in [
        json!({"spec": {"port": 8080}}),
        json!({"spec": {"placement": {"zone": "a"}}}),
        json!({"spec": {"cloudInit": {"inline": "#cloud-config\n"}}}),
        json!({"spec": {"provider": "fake-b"}}),
    ]
    .into_iter()
    .enumerate()
    {
        bed.patch("p1", change).await;
        let before = last.clone();
        let seen = bed
            .until("p1", |p| {
                p.status.as_ref().unwrap().phase.as_deref() == Some("Ready") && ip(p) != before
            })
            .await;
        last = ip(&seen);
        assert_eq!(bed.world.created(), 2 + n as u64);
        assert_eq!(bed.world.machines().len(), 1);
    }
    let machine = bed.world.machine_of(&uid(&proxy)).unwrap();
    assert_eq!(machine.provider, "fake-b");
    assert_eq!(machine.port, 8080);
    assert_eq!(
        machine.user_data.unwrap().expose_secret(),
        b"#cloud-config\n"
    );
    assert_eq!(bed.world.violations(), Vec::<String>::new());
    bed.until_event("p1", "Replacing").await;
    running.stop().await.unwrap();
}

#[tokio::test]
async fn cloud_init_from_a_secret_says_what_is_missing_and_follows_it() {
    let bed = Bed::new().await;
    let running = bed.start();
    let proxy = bed
        .create(
            "p1",
            json!({"mode": "Managed", "provider": "fake-a",
                   "cloudInit": {"secretRef": {"name": "s1"}}}),
        )
        .await;
    let says = |what: &'static str| {
        bed.until("p1", move |p| {
            let (_, reason, message) = condition(p, "Provisioned");
            reason == "CloudInitError" && message.contains(what)
        })
    };
    let pending = says("does not exist").await;
    assert_eq!(pending.status.unwrap().phase.as_deref(), Some("Pending"));
    assert_eq!(bed.world.created(), 0);
    bed.secret("s1", false, "SENTINEL-1").await;
    // Invisible without its label, so nothing wakes the Proxy; a change of its own does.
    bed.patch("p1", json!({"spec": {"attributes": {"a": "b"}}}))
        .await;
    says("lacks the label crawl.example.com/cloud-init").await;
    bed.secret("s1", true, "SENTINEL-1").await;
    let ready = bed.until_phase("p1", "Ready").await;
    let data = |bed: &Bed| {
        bed.world
            .machine_of(&uid(&proxy))
            .unwrap()
            .user_data
            .unwrap()
    };
    assert_eq!(data(&bed).expose_secret(), b"SENTINEL-1");
    // Rotated: another instance.
    bed.secret("s1", true, "SENTINEL-2").await;
    let again = bed
        .until("p1", |p| ip(p).is_some() && ip(p) != ip(&ready))
        .await;
    assert_eq!(data(&bed).expose_secret(), b"SENTINEL-2");
    // Gone: what runs goes on, and the condition says so.
    let secrets: kube::Api<k8s_openapi::api::core::v1::Secret> =
        kube::Api::namespaced(bed.client.clone(), "default");
    secrets.delete("s1", &Default::default()).await.unwrap();
    let kept = says("does not exist").await;
    assert_eq!(ip(&kept), ip(&again));
    assert_eq!(
        kept.status.as_ref().unwrap().phase.as_deref(),
        Some("Ready")
    );
    let shown = format!("{kept:?}{:?}", bed.event_reasons("p1").await);
    assert!(!shown.contains("SENTINEL"));
    running.stop().await.unwrap();
}

#[tokio::test]
async fn a_key_that_is_missing_in_the_secret_is_named() {
    let bed = Bed::new().await;
    let running = bed.start();
    bed.secret("s1", true, "x").await;
    bed.create(
        "p1",
        json!({"mode": "Managed", "provider": "fake-a",
               "cloudInit": {"secretRef": {"name": "s1", "key": "other"}}}),
    )
    .await;
    bed.until("p1", |p| {
        condition(p, "Provisioned")
            .2
            .contains("no key \"other\", only user-data")
    })
    .await;
    running.stop().await.unwrap();
}

#[tokio::test]
async fn a_provider_that_is_not_configured_heals_when_it_is() {
    let bed = Bed::new().await;
    let running = bed.start();
    bed.create("p1", json!({"mode": "Managed", "provider": "late"}))
        .await;
    let failed = bed.until_phase("p1", "Failed").await;
    let (status, reason, message) = condition(&failed, "Provisioned");
    assert_eq!(
        (status.as_str(), reason.as_str()),
        ("False", "ProviderNotConfigured")
    );
    assert!(message.contains("\"late\""));
    let mut all: Vec<Arc<dyn Provider>> = bed.providers.all();
    all.push(bed.world.provider("late", &bed.installation));
    bed.providers.replace(all);
    bed.until_phase("p1", "Ready").await;
    running.stop().await.unwrap();
}

#[tokio::test]
async fn transient_errors_show_and_heal() {
    let bed = Bed::new().await;
    bed.world.fail_always(
        "fake-a",
        Operation::Create,
        Fault::of(ErrorClass::Transient).saying("connection refused"),
    );
    let running = bed.start();
    bed.managed("p1").await;
    let down = bed
        .until("p1", |p| condition(p, "ProviderReachable").0 == "False")
        .await;
    assert!(
        condition(&down, "ProviderReachable")
            .2
            .contains("connection refused")
    );
    assert_eq!(
        down.status.as_ref().unwrap().phase.as_deref(),
        Some("Pending")
    );
    bed.until_event("p1", "ProviderUnreachable").await;
    // It waits longer each time, whatever its own writes wake.
    let before = bed.world.calls("fake-a", Operation::Create);
    tokio::time::sleep(Duration::from_millis(500)).await;
    let tries = bed.world.calls("fake-a", Operation::Create) - before;
    assert!((1..=8).contains(&tries), "{tries} tries in 500 ms");
    bed.world.heal("fake-a");
    let ready = bed.until_phase("p1", "Ready").await;
    assert_eq!(condition(&ready, "ProviderReachable").0, "True");
    running.stop().await.unwrap();
}

#[tokio::test]
async fn quota_waits_and_permanent_latches_until_the_spec_changes() {
    let bed = Bed::new().await;
    bed.world.fail_next(
        "fake-a",
        Operation::Create,
        Fault::of(ErrorClass::QuotaExceeded),
    );
    let running = bed.start();
    bed.managed("quota").await;
    let full = bed
        .until("quota", |p| {
            condition(p, "Provisioned").1 == "QuotaExceeded"
        })
        .await;
    assert_eq!(full.status.unwrap().phase.as_deref(), Some("Pending"));
    bed.until_phase("quota", "Ready").await;

    bed.create(
        "p1",
        json!({"mode": "Managed", "provider": "fake-a", "placement": {"zone": UNKNOWN_ZONE}}),
    )
    .await;
    let failed = bed.until_phase("p1", "Failed").await;
    assert!(
        condition(&failed, "Provisioned")
            .2
            .contains("use another placement.zone")
    );
    let before = bed.world.calls("fake-a", Operation::Create);
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(
        bed.world.calls("fake-a", Operation::Create),
        before,
        "latched"
    );
    bed.patch("p1", json!({"spec": {"placement": {"zone": "a"}}}))
        .await;
    bed.until_phase("p1", "Ready").await;
    running.stop().await.unwrap();
}

#[tokio::test]
async fn a_stopped_or_vanished_instance_is_made_anew_by_its_event() {
    let bed = Bed::new().await;
    let running = bed.start();
    let proxy = bed.managed("p1").await;
    let first = bed.until_phase("p1", "Ready").await;
    bed.world.stop(&uid(&proxy));
    let second = bed
        .until("p1", |p| ip(p).is_some() && ip(p) != ip(&first))
        .await;
    bed.until_event("p1", "Replacing").await;
    bed.until_phase("p1", "Ready").await;
    bed.world.vanish(&uid(&proxy));
    bed.until("p1", |p| ip(p).is_some() && ip(p) != ip(&second))
        .await;
    assert_eq!(bed.world.machines().len(), 1);
    assert_eq!(bed.world.violations(), Vec::<String>::new());
    running.stop().await.unwrap();
}

#[tokio::test]
async fn an_instance_that_keeps_dying_is_not_made_in_a_tight_loop() {
    let bed = Bed::new().await;
    let running = bed.start();
    let proxy = bed.managed("p1").await;
    bed.until_phase("p1", "Ready").await;
    let uid = uid(&proxy);
    let until = tokio::time::Instant::now() + Duration::from_millis(600);
    while tokio::time::Instant::now() < until {
        bed.world.stop(&uid);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let made = bed.world.created();
    assert!((3..=12).contains(&made), "{made} instances in 600 ms");
    bed.until_phase("p1", "Ready").await;
    running.stop().await.unwrap();
}

#[tokio::test]
async fn provisioning_that_does_not_finish_is_replaced_with_an_event() {
    let mut config = quick();
    config.provisioning_timeout = Duration::from_secs(900);
    let bed = Bed::with(config).await;
    bed.world.behave(Behaviour {
        starts: false,
        ..Behaviour::default()
    });
    let running = bed.start();
    bed.managed("p1").await;
    bed.until("p1", |p| {
        condition(p, "Provisioned").1 == "WaitingForAddress"
    })
    .await;
    bed.world.behave(Behaviour::default());
    bed.clock.advance(jiff::SignedDuration::from_secs(899));
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(bed.world.created(), 1);
    bed.clock.advance(jiff::SignedDuration::from_secs(2));
    bed.until_phase("p1", "Ready").await;
    assert_eq!(bed.world.created(), 2);
    bed.until_event("p1", "ProvisioningTimedOut").await;
    running.stop().await.unwrap();
}

#[tokio::test]
async fn a_changed_address_is_followed_and_probed_anew() {
    let bed = Bed::new().await;
    let running = bed.start();
    let proxy = bed.managed("p1").await;
    bed.until_phase("p1", "Ready").await;
    bed.health.answer("192.0.2.99", None);
    let new: IpAddr = "192.0.2.99".parse().unwrap();
    bed.world.readdress(&uid(&proxy), new);
    let moved = bed
        .until("p1", |p| ip(p).as_deref() == Some("192.0.2.99"))
        .await;
    assert_eq!(
        moved.status.as_ref().unwrap().phase.as_deref(),
        Some("Provisioning")
    );
    assert_eq!(condition(&moved, "Healthy").1, "AwaitingFirstProbe");
    assert!(!running.directory.get(&moved.key()).unwrap().healthy);
    bed.health.answer("192.0.2.99", Some(true));
    bed.until_phase("p1", "Ready").await;
    assert_eq!(bed.world.created(), 1);
    running.stop().await.unwrap();
}

#[tokio::test]
async fn an_external_proxy_is_probed_and_has_no_finalizer() {
    let bed = Bed::new().await;
    bed.health.answer("2001:db8::1", Some(false));
    let running = bed.start();
    let proxy = bed
        .create(
            "e1",
            json!({"mode": "External", "endpoint": {"host": "2001:db8::1"}}),
        )
        .await;
    let sick = bed.until_phase("e1", "Unhealthy").await;
    assert_eq!(condition(&sick, "Healthy").1, "Timeout");
    bed.health.answer("2001:db8::1", Some(true));
    // Leases see the verdict, whether or not it is written yet.
    let ready = bed.until_phase("e1", "Ready").await;
    let record = running.directory.get(&proxy.key()).unwrap();
    assert_eq!(record.url().as_deref(), Some("http://[2001:db8::1]:3128"));
    assert!(ready.finalizers().is_empty());
    bed.delete("e1").await;
    bed.until_gone("e1").await;
    let mut changes = running.directory.changes();
    while running.directory.get(&proxy.key()).is_some() {
        changes.changed().await.unwrap();
    }
    assert_eq!(bed.health.target(&proxy.key()), None);
    assert_eq!(bed.world.created(), 0);
    running.stop().await.unwrap();
}

#[tokio::test]
async fn of_two_proxies_with_one_address_only_the_older_is_leased() {
    let bed = Bed::new().await;
    let running = bed.start();
    let spec = json!({"mode": "External", "endpoint": {"host": "192.0.2.7"}});
    let a = bed.create("a", spec.clone()).await;
    bed.until_phase("a", "Ready").await;
    let b = bed.create("b", spec).await;
    let shared = bed
        .until("b", |p| condition(p, "Healthy").1 == "AddressInUse")
        .await;
    assert!(condition(&shared, "Healthy").2.contains("default/a"));
    assert!(running.directory.get(&a.key()).unwrap().healthy);
    assert!(!running.directory.get(&b.key()).unwrap().healthy);
    bed.delete("a").await;
    bed.until_phase("b", "Ready").await;
    assert!(running.directory.get(&b.key()).unwrap().healthy);
    running.stop().await.unwrap();
}

/// An export carries the instance's identity: the import finds it and builds nothing.
#[tokio::test]
async fn an_imported_object_adopts_its_instance() {
    let old = Bed::new().await;
    let running = old.start();
    let proxy = old.managed("p1").await;
    let ready = old.until_phase("p1", "Ready").await;
    running.stop().await.unwrap();

    let mut new = Bed::new().await;
    new.world = old.world.clone();
    new.providers = old.providers.clone();
    let mut annotations = json!(ready.annotations());
    annotations["crawl.example.com/instance-uid"] = json!(proxy.uid());
    let running = new.start();
    let imported = new
        .create_with(
            "p1",
            json!({"mode": "Managed", "provider": "fake-a"}),
            json!({"annotations": annotations}),
        )
        .await;
    assert_ne!(imported.uid(), proxy.uid());
    let adopted = new.until_phase("p1", "Ready").await;
    assert_eq!(ip(&adopted), ip(&ready));
    assert_eq!(new.world.created(), 1);
    // A copy of the object must not get the same instance.
    new.create_with(
        "copy",
        json!({"mode": "Managed", "provider": "fake-a"}),
        json!({"annotations": annotations}),
    )
    .await;
    let copy = new.until_phase("copy", "Ready").await;
    assert_ne!(ip(&copy), ip(&adopted));
    assert_eq!(new.world.machines().len(), 2);
    new.delete("copy").await;
    new.until_gone("copy").await;
    assert!(
        new.world
            .machine_of(&Uid::new(proxy.uid().unwrap()))
            .is_some()
    );
    running.stop().await.unwrap();
}

/// karpenter-provider-gcp#267: an error while looking made a second machine.
#[tokio::test]
async fn an_error_of_the_old_provider_is_never_taken_for_gone() {
    let bed = Bed::new().await;
    let running = bed.start();
    bed.managed("p1").await;
    bed.until_phase("p1", "Ready").await;
    for operation in [Operation::Get, Operation::List, Operation::Delete] {
        let fault = Fault::of(ErrorClass::Transient).saying("503");
        bed.world.fail_always("fake-a", operation, fault);
    }
    bed.patch("p1", json!({"spec": {"provider": "fake-b"}}))
        .await;
    let unsure = bed
        .until("p1", |p| condition(p, "ProviderReachable").0 == "False")
        .await;
    assert!(condition(&unsure, "ProviderReachable").2.contains("503"));
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(bed.world.created(), 1);
    bed.world.heal("fake-a");
    bed.until("p1", |p| {
        p.status.as_ref().unwrap().phase.as_deref() == Some("Ready")
            && p.annotations()[PROVIDER_ANNOTATION] == "fake-b"
    })
    .await;
    assert_eq!(bed.world.machines().len(), 1);
    assert_eq!(bed.world.violations(), Vec::<String>::new());
    running.stop().await.unwrap();
}

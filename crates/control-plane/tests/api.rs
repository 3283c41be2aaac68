//! The API as `kube::Client` sees it, in process.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests"
)]

mod support;

use std::time::Duration;

use egress_api::Proxy;
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::{ConfigMap, Event, Namespace, Secret};
use kube::api::{
    Api, DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions,
    PropagationPolicy, WatchEvent, WatchParams,
};
use kube::{Client, ResourceExt};
use serde_json::{Value, json};
use support::{in_memory, mk_external, proxies, status};

#[tokio::test]
async fn create_get_update_and_delete() {
    let (plane, client) = in_memory().await;
    let api = proxies(&client);
    let before = plane.revision();
    let made = api
        .create(&PostParams::default(), &mk_external("a"))
        .await
        .unwrap();
    assert!(made.uid().is_some());
    assert!(made.creation_timestamp().is_some());
    assert_eq!(made.metadata.generation, Some(1));
    assert_eq!(made.resource_version(), Some(plane.revision().to_string()));
    assert_eq!(plane.revision(), before + 1);

    let again = status(
        api.create(&PostParams::default(), &mk_external("a"))
            .await
            .unwrap_err(),
    );
    assert_eq!((again.code, again.reason.as_str()), (409, "AlreadyExists"));
    assert_eq!(
        again.message,
        "proxies.crawl.example.com \"a\" already exists"
    );

    let mut changed = made.clone();
    changed.spec.max_leases = 7;
    let stored = api
        .replace("a", &PostParams::default(), &changed)
        .await
        .unwrap();
    assert_eq!(stored.metadata.generation, Some(2));
    let stale = status(
        api.replace("a", &PostParams::default(), &changed)
            .await
            .unwrap_err(),
    );
    assert_eq!((stale.code, stale.reason.as_str()), (409, "Conflict"));

    // The same again writes nothing.
    let before = plane.revision();
    api.replace("a", &PostParams::default(), &stored)
        .await
        .unwrap();
    assert_eq!(plane.revision(), before);

    let gone = api.delete("a", &DeleteParams::default()).await.unwrap();
    assert!(gone.right().is_some_and(|s| s.is_success()));
    let missing = status(api.get("a").await.unwrap_err());
    assert_eq!(missing.message, "proxies.crawl.example.com \"a\" not found");
    assert_eq!(missing.details.unwrap().kind, "proxies");
}

#[tokio::test]
async fn spec_and_status_are_kept_apart() {
    let (_plane, client) = in_memory().await;
    let api = proxies(&client);
    let mut proxy = mk_external("a");
    proxy.status = Some(egress_api::ProxyStatus {
        phase: Some("Ready".to_owned()),
        ..Default::default()
    });
    let made = api.create(&PostParams::default(), &proxy).await.unwrap();
    assert_eq!(made.status, None, "create drops the status");

    let patch = json!({"status": {"phase": "Ready", "ip": "192.0.2.9"}, "spec": {"maxLeases": 9},
                       "metadata": {"labels": {"a": "b"}}});
    let patched = api
        .patch_status("a", &PatchParams::default(), &Patch::Merge(&patch))
        .await
        .unwrap();
    assert_eq!(
        patched.status.clone().unwrap().phase.as_deref(),
        Some("Ready")
    );
    assert_eq!(patched.spec.max_leases, 5, "a status patch leaves the spec");
    assert!(
        patched.labels().is_empty(),
        "a status patch leaves the labels"
    );
    assert_eq!(
        patched.metadata.generation,
        Some(1),
        "status is no new generation"
    );

    let patch = json!({"spec": {"maxLeases": 2}, "status": {"phase": "Failed"}});
    let patched = api
        .patch("a", &PatchParams::default(), &Patch::Merge(&patch))
        .await
        .unwrap();
    assert_eq!(patched.status.unwrap().phase.as_deref(), Some("Ready"));
    assert_eq!(patched.metadata.generation, Some(2));
}

async fn refused(client: &Client, object: Value) -> kube::core::Status {
    let api: Api<kube::core::DynamicObject> = Api::namespaced_with(
        client.clone(),
        "default",
        &kube::core::ApiResource::erase::<Proxy>(&()),
    );
    let object = serde_json::from_value(object).unwrap();
    status(
        api.create(&PostParams::default(), &object)
            .await
            .unwrap_err(),
    )
}

fn object(spec: &Value) -> Value {
    json!({"apiVersion": "crawl.example.com/v1alpha1", "kind": "Proxy", "metadata": {"name": "a"}, "spec": spec})
}

#[tokio::test]
async fn wrong_objects_are_refused_with_the_rule() {
    let (_plane, client) = in_memory().await;
    let error = refused(
        &client,
        object(&json!({"mode": "External", "endpoint": {"host": "x"}, "provider": "kvm"})),
    )
    .await;
    assert_eq!((error.code, error.reason.as_str()), (422, "Invalid"));
    assert_eq!(
        error.message,
        "Proxy.crawl.example.com \"a\" is invalid: spec: Invalid value: an External proxy must not \
         have spec.provider: the operator creates nothing for it"
    );
    let causes = error.details.unwrap().causes;
    assert_eq!(causes.len(), 1);
    assert_eq!(causes[0].field, "spec");

    let error = refused(
        &client,
        object(&json!({"mode": "Managed", "provider": "kvm",
            "cloudInit": {"inline": "x", "secretRef": {"name": "y"}}})),
    )
    .await;
    assert!(
        error
            .message
            .contains("exactly one of inline and secretRef"),
        "{}",
        error.message
    );

    let error = refused(
        &client,
        object(&json!({"mode": "External", "endpoint": {"host": "x"}, "port": 0})),
    )
    .await;
    assert_eq!(
        error.message,
        "Proxy.crawl.example.com \"a\" is invalid: spec.port: Invalid value: 0: spec.port in body \
         should be greater than or equal to 1"
    );

    let error = refused(&client, object(&json!({"endpoint": {"host": "x"}}))).await;
    assert!(
        error.message.contains("spec.mode: Required value"),
        "{}",
        error.message
    );
    assert!(
        error
            .message
            .contains("some validation rules were not checked"),
        "{}",
        error.message
    );

    let error = refused(
        &client,
        object(&json!({"mode": "External", "endpoint": {"host": "x"}, "healthCheck": {"url": "ftp://x"}})),
    )
    .await;
    assert!(
        error.message.contains(
            "spec.healthCheck.url: Invalid value: \"ftp://x\": spec.healthCheck.url must be"
        ),
        "{}",
        error.message
    );
}

#[tokio::test]
async fn the_mode_cannot_change_later() {
    let (_plane, client) = in_memory().await;
    let api = proxies(&client);
    api.create(&PostParams::default(), &mk_external("a"))
        .await
        .unwrap();
    let patch = json!({"spec": {"mode": "Managed", "provider": "kvm", "endpoint": null}});
    let error = status(
        api.patch("a", &PatchParams::default(), &Patch::Merge(&patch))
            .await
            .unwrap_err(),
    );
    assert_eq!(
        error.message,
        "Proxy.crawl.example.com \"a\" is invalid: spec.mode: Invalid value: \"Managed\": \
         spec.mode cannot be changed: delete the Proxy and create another"
    );
}

#[tokio::test]
async fn defaults_are_filled_in_and_unknown_fields_go() {
    let (_plane, client) = in_memory().await;
    let request =
        http::Request::post("/apis/crawl.example.com/v1alpha1/namespaces/default/proxies")
            .header("content-type", "application/json")
            .body(
                object(&json!({"mode": "External", "endpoint": {"host": "x"}, "prot": 1}))
                    .to_string()
                    .into_bytes(),
            )
            .unwrap();
    let answer: Value = client.request(request).await.unwrap();
    assert_eq!(answer["spec"]["port"], 3128);
    assert_eq!(answer["spec"]["healthCheck"]["intervalSeconds"], 10);
    assert_eq!(answer["spec"].get("prot"), None);

    let strict = http::Request::post(
        "/apis/crawl.example.com/v1alpha1/namespaces/default/proxies?fieldValidation=Strict",
    )
    .header("content-type", "application/json")
    .body(
        br#"{"apiVersion":"crawl.example.com/v1alpha1","kind":"Proxy","metadata":{"name":"b"},
                  "spec":{"mode":"External","endpoint":{"host":"x"},"prot":1,"port":1,"port":2}}"#
            .to_vec(),
    )
    .unwrap();
    let error = status(client.request::<Value>(strict).await.unwrap_err());
    assert_eq!(error.code, 400);
    assert_eq!(
        error.message,
        "Proxy in version \"v1alpha1\" cannot be handled as a Proxy: strict decoding error: \
         duplicate field \"spec.port\", unknown field \"spec.prot\""
    );
}

#[tokio::test]
async fn names_are_generated_and_checked() {
    let (_plane, client) = in_memory().await;
    let api = proxies(&client);
    let mut proxy = mk_external("x");
    proxy.metadata.name = None;
    proxy.metadata.generate_name = Some("px-".to_owned());
    let one = api.create(&PostParams::default(), &proxy).await.unwrap();
    let two = api.create(&PostParams::default(), &proxy).await.unwrap();
    assert!(one.name_any().starts_with("px-") && one.name_any().len() == 8);
    assert_ne!(one.name_any(), two.name_any());
    let error = status(
        api.create(&PostParams::default(), &mk_external("Bad_Name"))
            .await
            .unwrap_err(),
    );
    assert!(
        error
            .message
            .contains("metadata.name: Invalid value: \"Bad_Name\": a lowercase RFC 1123 subdomain")
    );
}

#[tokio::test]
async fn finalizers_hold_an_object_until_they_are_gone() {
    let (_plane, client) = in_memory().await;
    let api = proxies(&client);
    let mut proxy = mk_external("a");
    proxy.metadata.finalizers = Some(vec!["crawl.example.com/cleanup".to_owned()]);
    api.create(&PostParams::default(), &proxy).await.unwrap();
    let marked = api
        .delete("a", &DeleteParams::default())
        .await
        .unwrap()
        .left()
        .unwrap();
    assert!(marked.metadata.deletion_timestamp.is_some());
    assert_eq!(marked.metadata.generation, Some(2));
    // Deleting again changes nothing.
    let again = api
        .delete("a", &DeleteParams::default())
        .await
        .unwrap()
        .left()
        .unwrap();
    assert_eq!(again.resource_version(), marked.resource_version());
    // No new finalizers now.
    let patch = json!({"metadata": {"finalizers": ["crawl.example.com/cleanup", "x.y/z"]}});
    let error = status(
        api.patch("a", &PatchParams::default(), &Patch::Merge(&patch))
            .await
            .unwrap_err(),
    );
    assert!(
        error
            .message
            .contains("no new finalizers can be added if the object is being deleted"),
        "{}",
        error.message
    );
    let patch = json!([{"op": "remove", "path": "/metadata/finalizers/0"}]);
    let patch: json_patch::Patch = serde_json::from_value(patch).unwrap();
    api.patch("a", &PatchParams::default(), &Patch::<()>::Json(patch))
        .await
        .unwrap();
    assert_eq!(status(api.get("a").await.unwrap_err()).code, 404);
}

#[tokio::test]
async fn deletion_honours_preconditions_and_dry_run() {
    let (plane, client) = in_memory().await;
    let api = proxies(&client);
    let made = api
        .create(&PostParams::default(), &mk_external("a"))
        .await
        .unwrap();
    let other = DeleteParams {
        preconditions: Some(Preconditions {
            uid: Some("other".to_owned()),
            resource_version: None,
        }),
        ..Default::default()
    };
    let error = status(api.delete("a", &other).await.unwrap_err());
    assert_eq!(error.code, 409);
    assert!(
        error
            .message
            .contains("the UID in the precondition (other) does not match")
    );
    let before = plane.revision();
    let dry = DeleteParams {
        dry_run: true,
        ..Default::default()
    };
    api.delete("a", &dry).await.unwrap();
    let dry = PostParams {
        dry_run: true,
        ..Default::default()
    };
    api.create(&dry, &mk_external("b")).await.unwrap();
    assert_eq!(plane.revision(), before);
    let right = DeleteParams {
        preconditions: Some(Preconditions {
            uid: made.uid(),
            resource_version: made.resource_version(),
        }),
        ..Default::default()
    };
    api.delete("a", &right).await.unwrap();
}

#[tokio::test]
async fn lists_come_in_pages_of_one_revision() {
    let (_plane, client) = in_memory().await;
    let api = proxies(&client);
    for i in 0..25 {
        api.create(&PostParams::default(), &mk_external(&format!("p{i:02}")))
            .await
            .unwrap();
    }
    let mut params = ListParams::default().limit(10);
    let first = api.list(&params).await.unwrap();
    assert_eq!(first.items.len(), 10);
    assert_eq!(first.metadata.remaining_item_count, Some(15));
    // What happens in between does not show.
    api.create(&PostParams::default(), &mk_external("p10a"))
        .await
        .unwrap();
    api.delete("p20", &DeleteParams::default()).await.unwrap();
    let mut names: Vec<String> = first.items.iter().map(ResourceExt::name_any).collect();
    params = params.continue_token(&first.metadata.continue_.clone().unwrap());
    loop {
        let page = api.list(&params).await.unwrap();
        assert_eq!(
            page.metadata.resource_version,
            first.metadata.resource_version
        );
        names.extend(page.items.iter().map(ResourceExt::name_any));
        match page.metadata.continue_.filter(|c| !c.is_empty()) {
            Some(next) => params = params.continue_token(&next),
            None => break,
        }
    }
    let expected: Vec<String> = (0..25).map(|i| format!("p{i:02}")).collect();
    assert_eq!(names, expected);
}

#[tokio::test]
async fn a_page_after_compaction_is_gone_with_a_token_to_go_on() {
    let (plane, client) = in_memory().await;
    let api = proxies(&client);
    for i in 0..6 {
        api.create(&PostParams::default(), &mk_external(&format!("p{i}")))
            .await
            .unwrap();
    }
    let first = api.list(&ListParams::default().limit(2)).await.unwrap();
    api.delete("p5", &DeleteParams::default()).await.unwrap();
    plane.compact(plane.revision()).await.unwrap();
    let token = first.metadata.continue_.unwrap();
    let error = status(
        api.list(&ListParams::default().limit(2).continue_token(&token))
            .await
            .unwrap_err(),
    );
    assert_eq!((error.code, error.reason.as_str()), (410, "Expired"));
    let token = error
        .metadata
        .and_then(|m| m.continue_)
        .expect("a token to go on");
    let rest = api
        .list(&ListParams::default().continue_token(&token))
        .await
        .unwrap();
    let names: Vec<String> = rest.items.iter().map(ResourceExt::name_any).collect();
    assert_eq!(names, ["p2", "p3", "p4"]);
}

#[tokio::test]
async fn selectors_select() {
    let (_plane, client) = in_memory().await;
    let api = proxies(&client);
    for (name, geo) in [("a", "de"), ("b", "fr"), ("c", "de")] {
        let mut proxy = mk_external(name);
        proxy.labels_mut().insert("geo".to_owned(), geo.to_owned());
        api.create(&PostParams::default(), &proxy).await.unwrap();
    }
    let names = async |params: ListParams| -> Vec<String> {
        api.list(&params)
            .await
            .unwrap()
            .iter()
            .map(ResourceExt::name_any)
            .collect()
    };
    assert_eq!(
        names(ListParams::default().labels("geo=de")).await,
        ["a", "c"]
    );
    assert_eq!(
        names(ListParams::default().labels("geo in (fr,it)")).await,
        ["b"]
    );
    assert_eq!(names(ListParams::default().labels("!geo")).await, [""; 0]);
    assert_eq!(
        names(ListParams::default().fields("metadata.name=b")).await,
        ["b"]
    );
    assert_eq!(
        names(ListParams::default().fields("metadata.name!=b")).await,
        ["a", "c"]
    );
    let error = status(
        api.list(&ListParams::default().fields("spec.port=1"))
            .await
            .unwrap_err(),
    );
    assert_eq!(error.message, "field label not supported: spec.port");
    // Pages of a selection are full while there is enough.
    let first = api
        .list(&ListParams::default().labels("geo=de").limit(1))
        .await
        .unwrap();
    let token = first.metadata.continue_.unwrap();
    let rest = api
        .list(
            &ListParams::default()
                .labels("geo=de")
                .limit(1)
                .continue_token(&token),
        )
        .await
        .unwrap();
    assert_eq!(rest.items[0].name_any(), "c");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_watch_sees_every_write_once_and_in_order() {
    const WRITERS: usize = 8;
    const EACH: usize = 40;
    let (plane, client) = in_memory().await;
    let api = proxies(&client);
    let start = plane.revision();
    let params = WatchParams::default().timeout(60);
    let mut slow = api
        .watch(&params, &start.to_string())
        .await
        .unwrap()
        .boxed();
    let mut writers = tokio::task::JoinSet::new();
    for w in 0..WRITERS {
        let api = api.clone();
        writers.spawn(async move {
            for i in 0..EACH {
                let name = format!("w{w}-{i}");
                api.create(&PostParams::default(), &mk_external(&name))
                    .await
                    .unwrap();
                let patch = json!({"metadata": {"labels": {"n": "1"}}});
                api.patch(&name, &PatchParams::default(), &Patch::Merge(&patch))
                    .await
                    .unwrap();
                if i % 2 == 0 {
                    api.delete(&name, &DeleteParams::default()).await.unwrap();
                }
            }
        });
    }
    writers.join_all().await;
    let last = plane.revision();
    assert_eq!(last - start, (WRITERS * EACH * 5 / 2) as u64);
    let mut revisions = Vec::new();
    while revisions.last() != Some(&last) {
        let event = tokio::time::timeout(Duration::from_secs(20), slow.next())
            .await
            .unwrap();
        let object = match event.unwrap().unwrap() {
            WatchEvent::Added(o) | WatchEvent::Modified(o) | WatchEvent::Deleted(o) => o,
            other => panic!("{other:?}"),
        };
        revisions.push(object.resource_version().unwrap().parse::<u64>().unwrap());
    }
    let expected: Vec<u64> = (start + 1..=last).collect();
    assert_eq!(revisions, expected);
    // The same from the log, long after.
    let again: Vec<_> = api
        .watch(&WatchParams::default().timeout(1), &start.to_string())
        .await
        .unwrap()
        .try_collect()
        .await
        .unwrap();
    let seen = again
        .iter()
        .filter(|e| !matches!(e, WatchEvent::Bookmark(_)))
        .count();
    assert_eq!(seen as u64, last - start);
}

#[tokio::test]
async fn a_watch_from_before_a_compaction_is_gone_and_a_relist_goes_on() {
    let (plane, client) = in_memory().await;
    let api = proxies(&client);
    let start = plane.revision();
    api.create(&PostParams::default(), &mk_external("a"))
        .await
        .unwrap();
    plane.compact(plane.revision()).await.unwrap();
    let mut watch = api
        .watch(&WatchParams::default(), &start.to_string())
        .await
        .unwrap()
        .boxed();
    match watch.next().await.unwrap().unwrap() {
        WatchEvent::Error(status) => {
            assert_eq!((status.code, status.reason.as_str()), (410, "Expired"));
        }
        other => panic!("{other:?}"),
    }
    assert!(watch.next().await.is_none());
    let list = api.list(&ListParams::default()).await.unwrap();
    let version = list.metadata.resource_version.unwrap();
    let mut watch = api
        .watch(&WatchParams::default(), &version)
        .await
        .unwrap()
        .boxed();
    api.create(&PostParams::default(), &mk_external("b"))
        .await
        .unwrap();
    assert!(
        matches!(watch.next().await.unwrap().unwrap(), WatchEvent::Added(p) if p.name_any() == "b")
    );
}

#[tokio::test]
async fn a_watch_with_a_selector_sees_objects_come_and_go() {
    let (plane, client) = in_memory().await;
    let api = proxies(&client);
    api.create(&PostParams::default(), &mk_external("a"))
        .await
        .unwrap();
    let start = plane.revision().to_string();
    let params = WatchParams::default().labels("geo=de");
    let mut watch = api.watch(&params, &start).await.unwrap().boxed();
    let label = async |value: Value| {
        let patch = json!({"metadata": {"labels": {"geo": value}}});
        api.patch("a", &PatchParams::default(), &Patch::Merge(&patch))
            .await
            .unwrap();
    };
    label(json!("de")).await;
    assert!(matches!(
        watch.next().await.unwrap().unwrap(),
        WatchEvent::Added(_)
    ));
    label(json!("fr")).await;
    let WatchEvent::Deleted(gone) = watch.next().await.unwrap().unwrap() else {
        panic!()
    };
    assert_eq!(gone.labels()["geo"], "de");
    assert_eq!(gone.resource_version(), Some(plane.revision().to_string()));
}

#[tokio::test]
async fn a_watch_list_sends_what_there_is_and_marks_its_end() {
    let (_plane, client) = in_memory().await;
    let api = proxies(&client);
    for name in ["a", "b"] {
        api.create(&PostParams::default(), &mk_external(name))
            .await
            .unwrap();
    }
    let params = WatchParams::default().initial_events().timeout(1);
    let events: Vec<_> = api
        .watch(&params, "0")
        .await
        .unwrap()
        .try_collect()
        .await
        .unwrap();
    assert!(matches!(&events[0], WatchEvent::Added(p) if p.name_any() == "a"));
    assert!(matches!(&events[1], WatchEvent::Added(p) if p.name_any() == "b"));
    assert!(
        matches!(&events[2], WatchEvent::Bookmark(b)
        if b.metadata.annotations.get("k8s.io/initial-events-end").map(String::as_str) == Some("true")),
        "{:?}",
        events[2]
    );
}

#[tokio::test]
async fn a_reflector_follows() {
    let (plane, client) = in_memory().await;
    let api = proxies(&client);
    api.create(&PostParams::default(), &mk_external("a"))
        .await
        .unwrap();
    let (reader, writer) = kube::runtime::reflector::store();
    let stream = kube::runtime::reflector(
        writer,
        kube::runtime::watcher(api.clone(), Default::default()),
    );
    let task = tokio::spawn(async move { stream.for_each(|_| async {}).await });
    reader.wait_until_ready().await.unwrap();
    assert_eq!(reader.len(), 1);
    for i in 0..50 {
        api.create(&PostParams::default(), &mk_external(&format!("b{i}")))
            .await
            .unwrap();
    }
    plane.compact(plane.revision()).await.unwrap();
    tokio::time::timeout(Duration::from_secs(10), async {
        while reader.len() != 51 {
            tokio::task::yield_now().await;
        }
    })
    .await
    .unwrap();
    task.abort();
}

#[tokio::test]
async fn a_missing_namespace_is_told_and_a_deleted_one_is_emptied() {
    let (_plane, client) = in_memory().await;
    let elsewhere: Api<Proxy> = Api::namespaced(client.clone(), "work");
    let error = status(
        elsewhere
            .create(&PostParams::default(), &mk_external("a"))
            .await
            .unwrap_err(),
    );
    assert_eq!(
        (error.code, error.message.as_str()),
        (404, "namespaces \"work\" not found")
    );

    let namespaces: Api<Namespace> = Api::all(client.clone());
    let mut namespace = Namespace::default();
    namespace.metadata.name = Some("work".to_owned());
    namespaces
        .create(&PostParams::default(), &namespace)
        .await
        .unwrap();
    let mut held = mk_external("held");
    held.metadata.finalizers = Some(vec!["crawl.example.com/cleanup".to_owned()]);
    elsewhere
        .create(&PostParams::default(), &held)
        .await
        .unwrap();
    elsewhere
        .create(&PostParams::default(), &mk_external("free"))
        .await
        .unwrap();
    let deleting = namespaces
        .delete("work", &DeleteParams::default())
        .await
        .unwrap()
        .left()
        .unwrap();
    assert_eq!(
        deleting.status.unwrap().phase.as_deref(),
        Some("Terminating")
    );
    eventually(async || {
        elsewhere
            .list(&ListParams::default())
            .await
            .unwrap()
            .items
            .len()
            == 1
    })
    .await;
    let error = status(
        elsewhere
            .create(&PostParams::default(), &mk_external("late"))
            .await
            .unwrap_err(),
    );
    assert_eq!(error.code, 403);
    assert!(
        error.message.contains("because it is being terminated"),
        "{}",
        error.message
    );
    let patch = json!({"metadata": {"finalizers": null}});
    elsewhere
        .patch("held", &PatchParams::default(), &Patch::Merge(&patch))
        .await
        .unwrap();
    eventually(async || namespaces.get_opt("work").await.unwrap().is_none()).await;
}

async fn eventually(condition: impl AsyncFn() -> bool) {
    tokio::time::timeout(Duration::from_secs(10), async {
        while !condition().await {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("did not come true in 10 s");
}

fn owned_by(name: &str, owner: &Proxy, block: bool) -> ConfigMap {
    let mut map = ConfigMap::default();
    map.metadata.name = Some(name.to_owned());
    let mut reference = owner.object_ref_as_owner();
    reference.block_owner_deletion = Some(block);
    map.metadata.owner_references = Some(vec![reference]);
    map
}

trait OwnerRef {
    fn object_ref_as_owner(&self)
    -> k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
}

impl OwnerRef for Proxy {
    fn object_ref_as_owner(
        &self,
    ) -> k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference {
        kube::Resource::owner_ref(self, &()).unwrap()
    }
}

#[tokio::test]
async fn dependents_follow_their_owner() {
    let (_plane, client) = in_memory().await;
    let api = proxies(&client);
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), "default");
    for (policy, stays) in [
        (PropagationPolicy::Background, false),
        (PropagationPolicy::Foreground, false),
        (PropagationPolicy::Orphan, true),
    ] {
        let owner = api
            .create(&PostParams::default(), &mk_external("owner"))
            .await
            .unwrap();
        maps.create(&PostParams::default(), &owned_by("dependent", &owner, true))
            .await
            .unwrap();
        let params = DeleteParams {
            propagation_policy: Some(policy.clone()),
            ..Default::default()
        };
        api.delete("owner", &params).await.unwrap();
        eventually(async || api.get_opt("owner").await.unwrap().is_none()).await;
        if stays {
            let map = maps.get("dependent").await.unwrap();
            assert!(map.owner_references().is_empty());
        } else {
            eventually(async || maps.get_opt("dependent").await.unwrap().is_none()).await;
        }
    }
    // An owner that does not exist.
    let owner = api
        .create(&PostParams::default(), &mk_external("late"))
        .await
        .unwrap();
    api.delete("late", &DeleteParams::default()).await.unwrap();
    maps.create(&PostParams::default(), &owned_by("orphan", &owner, false))
        .await
        .unwrap();
    eventually(async || maps.get_opt("orphan").await.unwrap().is_none()).await;
}

#[tokio::test]
async fn secrets_take_plain_text_and_show_base64() {
    let (_plane, client) = in_memory().await;
    let api: Api<Secret> = Api::namespaced(client, "default");
    let secret: Secret = serde_json::from_value(json!({
        "metadata": {"name": "s"}, "stringData": {"user-data": "#cloud-config\n"}, "data": {"bin": "AP8="}
    }))
    .unwrap();
    let made = api.create(&PostParams::default(), &secret).await.unwrap();
    assert_eq!(made.type_.as_deref(), Some("Opaque"));
    let data = made.data.unwrap();
    assert_eq!(data["user-data"].0, b"#cloud-config\n");
    assert_eq!(data["bin"].0, [0, 255]);
    assert_eq!(made.string_data, None);
    let patch = json!({"stringData": {"user-data": "other"}});
    let patched = api
        .patch("s", &PatchParams::default(), &Patch::Strategic(&patch))
        .await
        .unwrap();
    assert_eq!(patched.data.unwrap()["user-data"].0, b"other");
    let bad = json!({"data": {"bin": "not base64!"}});
    let error = status(
        api.patch("s", &PatchParams::default(), &Patch::Merge(&bad))
            .await
            .unwrap_err(),
    );
    assert_eq!(error.code, 400, "{}", error.message);
}

#[tokio::test]
async fn events_are_one_thing_in_two_forms() {
    use kube::runtime::events::{Event as NewEvent, EventType, Recorder, Reporter};
    let (_plane, client) = in_memory().await;
    let proxy = proxies(&client)
        .create(&PostParams::default(), &mk_external("a"))
        .await
        .unwrap();
    let reporter = Reporter {
        controller: "egress".to_owned(),
        instance: Some("one".to_owned()),
    };
    let recorder = Recorder::new(client.clone(), reporter);
    let event = NewEvent {
        type_: EventType::Normal,
        reason: "Created".to_owned(),
        note: Some("the instance exists".to_owned()),
        action: "Creating".to_owned(),
        secondary: None,
    };
    let reference = kube::Resource::object_ref(&proxy, &());
    recorder.publish(&event, &reference).await.unwrap();
    recorder.publish(&event, &reference).await.unwrap();
    let core: Api<Event> = Api::namespaced(client.clone(), "default");
    let fields = "involvedObject.name=a,involvedObject.namespace=default,involvedObject.kind=Proxy";
    let found = core
        .list(&ListParams::default().fields(fields))
        .await
        .unwrap();
    assert_eq!(found.items.len(), 1, "repeated into a series");
    assert_eq!(
        found.items[0].message.as_deref(),
        Some("the instance exists")
    );
    assert_eq!(
        found.items[0].reporting_component.as_deref(),
        Some("egress")
    );
    let grouped: Api<k8s_openapi::api::events::v1::Event> = Api::namespaced(client, "default");
    let found = grouped
        .list(&ListParams::default().fields("regarding.name=a"))
        .await
        .unwrap();
    assert_eq!(found.items[0].note.as_deref(), Some("the instance exists"));
    assert!(found.items[0].series.is_some());
}

#[tokio::test]
async fn a_collection_is_deleted_by_selector() {
    let (_plane, client) = in_memory().await;
    let api = proxies(&client);
    for (name, geo) in [("a", "de"), ("b", "fr"), ("c", "de")] {
        let mut proxy = mk_external(name);
        proxy.labels_mut().insert("geo".to_owned(), geo.to_owned());
        api.create(&PostParams::default(), &proxy).await.unwrap();
    }
    let gone = api
        .delete_collection(
            &DeleteParams::default(),
            &ListParams::default().labels("geo=de"),
        )
        .await
        .unwrap();
    assert_eq!(gone.left().unwrap().items.len(), 2);
    let left = api.list(&ListParams::default()).await.unwrap();
    assert_eq!(left.items.len(), 1);
}

#[tokio::test]
async fn an_idle_plane_writes_nothing() {
    let (plane, client) = in_memory().await;
    proxies(&client)
        .create(&PostParams::default(), &mk_external("a"))
        .await
        .unwrap();
    let before = plane.revision();
    for _ in 0..20 {
        proxies(&client).list(&ListParams::default()).await.unwrap();
    }
    let patch = json!({"metadata": {"labels": {}}});
    proxies(&client)
        .patch("a", &PatchParams::default(), &Patch::Merge(&patch))
        .await
        .unwrap();
    assert_eq!(plane.revision(), before);
}

async fn raw(
    plane: &egress_control_plane::ControlPlane,
    request: http::Request<String>,
) -> (u16, http::HeaderMap, String) {
    use http_body_util::BodyExt;
    use tower::ServiceExt;
    let request = request.map(axum::body::Body::from);
    let answer = plane.router().oneshot(request).await.unwrap();
    let (parts, body) = answer.into_parts();
    let bytes = body.collect().await.unwrap().to_bytes();
    (
        parts.status.as_u16(),
        parts.headers,
        String::from_utf8_lossy(&bytes).into_owned(),
    )
}

const PROXIES: &str = "/apis/crawl.example.com/v1alpha1/namespaces/default/proxies";

#[tokio::test]
async fn bodies_and_answers_have_the_forms_that_were_asked_for() {
    let (plane, _client) = in_memory().await;
    let yaml = "apiVersion: crawl.example.com/v1alpha1\nkind: Proxy\nmetadata: {name: a}\nspec: {mode: External, endpoint: {host: x}, prot: 1}\n";
    let post = |content_type: &str, accept: &str, body: &str| {
        http::Request::post(PROXIES)
            .header("content-type", content_type)
            .header("accept", accept)
            .body(body.to_owned())
            .unwrap()
    };
    let (code, headers, body) =
        raw(&plane, post("application/yaml", "application/yaml", yaml)).await;
    assert_eq!(code, 201, "{body}");
    assert_eq!(headers["content-type"], "application/yaml");
    assert_eq!(
        headers["warning"],
        "299 - \"unknown field \\\"spec.prot\\\"\""
    );
    assert!(body.contains("port: 3128"), "{body}");

    let get = |accept: &str| {
        let path = format!("{PROXIES}/a");
        http::Request::get(path)
            .header("accept", accept)
            .body(String::new())
            .unwrap()
    };
    let (_, _, body) = raw(
        &plane,
        get("application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"),
    )
    .await;
    let partial: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(partial["kind"], "PartialObjectMetadata");
    assert_eq!(partial.get("spec"), None);
    let (_, _, body) = raw(&plane, get("application/json;as=Table;g=meta.k8s.io;v=v1")).await;
    let table: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(table["columnDefinitions"][0]["name"], "Name");
    assert_eq!(table["rows"][0]["cells"][1], "External");
    assert_eq!(table["rows"][0]["object"]["kind"], "PartialObjectMetadata");

    assert_eq!(raw(&plane, get("application/cbor")).await.0, 406);
    assert_eq!(raw(&plane, post("text/plain", "*/*", "x")).await.0, 415);
    let (code, _, body) = raw(&plane, post("application/json", "*/*", "{")).await;
    assert_eq!(code, 400, "{body}");
    let (code, _, body) = raw(
        &plane,
        post(
            "application/json",
            "*/*",
            r#"{"apiVersion":"v1","kind":"Proxy"}"#,
        ),
    )
    .await;
    assert_eq!(code, 400);
    assert!(
        body.contains("the API version in the data (v1) does not match the expected API version"),
        "{body}"
    );
    let huge = format!("{{\"x\":\"{}\"}}", "x".repeat(4 << 20));
    assert_eq!(
        raw(&plane, post("application/json", "*/*", &huge)).await.0,
        413
    );
    for (method, path, code) in [
        ("GET", "/apis/crawl.example.com/v1alpha1/nothings", 404),
        ("GET", "/apis/crawl.example.com/v2/proxies", 404),
        ("GET", "/nothing", 404),
        ("GET", "/api/v1/namespaces/default/secrets/a/log", 404),
        (
            "POST",
            "/apis/crawl.example.com/v1alpha1/namespaces/default/proxies/a",
            400,
        ),
        ("DELETE", "/api/v1/namespaces", 405),
        ("POST", "/version", 405),
        ("GET", "/livez", 200),
        ("GET", "/apis/crawl.example.com", 200),
        ("GET", "/openapi/v3/apis/crawl.example.com/v1alpha1", 200),
        ("GET", "/openapi/v2", 404),
        (
            "GET",
            "/apis/crawl.example.com/v1alpha1/proxies?limit=x",
            400,
        ),
        (
            "GET",
            "/apis/crawl.example.com/v1alpha1/proxies?resourceVersion=999999",
            504,
        ),
        (
            "GET",
            "/apis/crawl.example.com/v1alpha1/proxies?continue=x",
            400,
        ),
        (
            "GET",
            "/apis/crawl.example.com/v1alpha1/proxies?watch=1&sendInitialEvents=true",
            422,
        ),
    ] {
        let request = http::Request::builder()
            .method(method)
            .uri(path)
            .body(String::new())
            .unwrap();
        let (found, _, body) = raw(&plane, request).await;
        assert_eq!(found, code, "{method} {path}: {body}");
        // What is not routed at all has no Status, as in a cluster.
        if code >= 400 && body != "404 page not found\n" {
            let status: Value = serde_json::from_str(&body).unwrap();
            assert_eq!(
                (&status["kind"], &status["code"]),
                (&json!("Status"), &json!(code)),
                "{path}"
            );
        }
    }
}

#[tokio::test]
async fn a_table_watch_sends_its_columns_once() {
    use http_body_util::BodyExt;
    use tower::ServiceExt;
    let (plane, client) = in_memory().await;
    for name in ["a", "b"] {
        proxies(&client)
            .create(&PostParams::default(), &mk_external(name))
            .await
            .unwrap();
    }
    let request = http::Request::get(format!("{PROXIES}?watch=true&timeoutSeconds=1"))
        .header("accept", "application/json;as=Table;g=meta.k8s.io;v=v1")
        .body(axum::body::Body::empty())
        .unwrap();
    let answer = plane.router().oneshot(request).await.unwrap();
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    let events: Vec<Value> = body
        .split(|b| *b == b'\n')
        .filter(|l| !l.is_empty())
        .map(|l| serde_json::from_slice(l).unwrap())
        .collect();
    assert_eq!(events.len(), 2);
    assert!(events[0]["object"]["columnDefinitions"].is_array());
    assert!(events[1]["object"]["columnDefinitions"].is_null());
    assert_eq!(events[1]["object"]["rows"][0]["cells"][0], "b");
}

#[tokio::test]
async fn expired_events_go() {
    use std::sync::atomic::{AtomicI64, Ordering};
    let now = std::sync::Arc::new(AtomicI64::new(1_800_000_000));
    let mut config = egress_control_plane::Config::new(
        egress_control_plane::Storage::Memory,
        vec![egress_api::crd()],
    );
    config.clock = {
        let now = std::sync::Arc::clone(&now);
        std::sync::Arc::new(move || {
            jiff::Timestamp::from_second(now.load(Ordering::SeqCst)).unwrap()
        })
    };
    config.tuning.compaction_interval = Duration::from_millis(20);
    let plane = egress_control_plane::ControlPlane::open(config)
        .await
        .unwrap();
    let client = Client::new(plane.router(), "default");
    let events: Api<Event> = Api::namespaced(client, "default");
    let event: Event = serde_json::from_value(json!({
        "metadata": {"name": "e"}, "reason": "R", "message": "m", "type": "Normal",
        "involvedObject": {"kind": "Proxy", "name": "a", "namespace": "default"}
    }))
    .unwrap();
    events.create(&PostParams::default(), &event).await.unwrap();
    now.fetch_add(3599, Ordering::SeqCst);
    let mut later = event.clone();
    later.metadata.name = Some("later".to_owned());
    events.create(&PostParams::default(), &later).await.unwrap();
    now.fetch_add(10, Ordering::SeqCst);
    eventually(async || events.get_opt("e").await.unwrap().is_none()).await;
    assert!(events.get_opt("later").await.unwrap().is_some());
}

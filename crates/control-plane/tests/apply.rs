//! Server-side apply and managed fields.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests"
)]

mod support;

use egress_api::Proxy;
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::{Client, ResourceExt};
use serde_json::{Value, json};
use support::{in_memory, mk_external, proxies, status};

fn config(rest: &Value) -> Value {
    let mut config = json!({
        "apiVersion": "crawl.example.com/v1alpha1", "kind": "Proxy", "metadata": {"name": "a"},
    });
    for part in ["metadata", "spec", "status"] {
        for (key, value) in rest[part].as_object().into_iter().flatten() {
            config[part][key] = value.clone();
        }
    }
    config
}

async fn apply(client: &Client, manager: &str, rest: Value) -> kube::Result<Proxy> {
    let params = PatchParams::apply(manager);
    proxies(client)
        .patch("a", &params, &Patch::Apply(config(&rest)))
        .await
}

async fn apply_status(client: &Client, manager: &str, rest: Value) -> kube::Result<Proxy> {
    let params = PatchParams::apply(manager);
    proxies(client)
        .patch_status("a", &params, &Patch::Apply(config(&rest)))
        .await
}

fn base() -> Value {
    json!({"mode": "External", "endpoint": {"host": "192.0.2.1"}})
}

#[tokio::test]
async fn managers_share_an_object_and_each_keeps_its_own() {
    let (_plane, client) = in_memory().await;
    apply(
        &client,
        "one",
        json!({"spec": base(), "metadata": {"labels": {"a": "1", "both": "x"}}}),
    )
    .await
    .unwrap();
    let two = json!({"metadata": {"labels": {"b": "2", "both": "x"}}, "spec": {"attributes": {"geo": "de"}}});
    apply(&client, "two", two).await.unwrap();
    // One lets go of its labels: the shared one stays, as the other still wants it.
    let proxy = apply(&client, "one", json!({"spec": base()}))
        .await
        .unwrap();
    let labels: Vec<(&str, &str)> = proxy
        .labels()
        .iter()
        .map(|(k, v)| (k.as_str(), v.as_str()))
        .collect();
    assert_eq!(labels, [("b", "2"), ("both", "x")]);
    assert_eq!(proxy.spec.attributes["geo"], "de");
    // The other lets go of everything: its map goes, too.
    let proxy = apply(&client, "two", json!({})).await.unwrap();
    assert!(proxy.labels().is_empty());
    assert!(proxy.spec.attributes.is_empty());
    let managers: Vec<_> = proxy
        .managed_fields()
        .iter()
        .filter_map(|m| m.manager.as_deref())
        .collect();
    assert_eq!(managers, ["one"]);
}

#[tokio::test]
async fn a_conflict_names_manager_and_field_and_can_be_forced() {
    let (plane, client) = in_memory().await;
    apply(
        &client,
        "one",
        json!({"spec": base(), "metadata": {"labels": {"a": "1", "b": "1"}}}),
    )
    .await
    .unwrap();
    let before = plane.revision();
    let other = json!({"metadata": {"labels": {"a": "2", "b": "2"}}});
    let error = status(apply(&client, "two", other.clone()).await.unwrap_err());
    assert_eq!((error.code, error.reason.as_str()), (409, "Conflict"));
    assert_eq!(
        error.message,
        "Apply failed with 2 conflicts: conflicts with \"one\":\n- .metadata.labels.a\n- .metadata.labels.b"
    );
    let causes = error.details.unwrap().causes;
    assert_eq!(causes[0].reason, "FieldManagerConflict");
    assert_eq!(causes[0].field, ".metadata.labels.a");
    assert_eq!(plane.revision(), before);
    let params = PatchParams::apply("two").force();
    proxies(&client)
        .patch("a", &params, &Patch::Apply(config(&other)))
        .await
        .unwrap();
    // The same value is no conflict: both own it then.
    apply(
        &client,
        "three",
        json!({"metadata": {"labels": {"a": "2"}}}),
    )
    .await
    .unwrap();
    // What was taken away is not the first one's any more.
    let proxy = apply(&client, "one", json!({"spec": base()}))
        .await
        .unwrap();
    assert_eq!(proxy.labels()["a"], "2");
}

#[tokio::test]
async fn conditions_are_merged_by_their_type() {
    let (plane, client) = in_memory().await;
    apply(&client, "one", json!({"spec": base()}))
        .await
        .unwrap();
    let condition = |type_: &str, status: &str| json!({"type": type_, "status": status, "reason": "R", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"});
    let healthy = json!({"status": {"conditions": [condition("Healthy", "True")]}});
    apply_status(&client, "prober", healthy.clone())
        .await
        .unwrap();
    let ready = json!({"status": {"phase": "Ready", "conditions": [condition("Ready", "True")]}});
    let proxy = apply_status(&client, "reconciler", ready).await.unwrap();
    let types: Vec<&str> = proxy
        .status
        .as_ref()
        .unwrap()
        .conditions
        .iter()
        .map(|c| c.type_.as_str())
        .collect();
    assert_eq!(types, ["Healthy", "Ready"]);
    let before = plane.revision();
    apply_status(&client, "prober", healthy).await.unwrap();
    assert_eq!(plane.revision(), before, "the same again writes nothing");
    let error = status(
        apply_status(
            &client,
            "prober",
            json!({"status": {"conditions": [condition("Ready", "False")]}}),
        )
        .await
        .unwrap_err(),
    );
    assert!(
        error.message.ends_with("conflict with \"reconciler\" with subresource \"status\": .status.conditions[type=\"Ready\"].status"),
        "{}",
        error.message
    );
    let proxy = apply_status(&client, "prober", json!({"status": {"conditions": []}}))
        .await
        .unwrap();
    let types: Vec<&str> = proxy
        .status
        .as_ref()
        .unwrap()
        .conditions
        .iter()
        .map(|c| c.type_.as_str())
        .collect();
    assert_eq!(types, ["Ready"]);
    // The spec's endpoint does not touch the status.
    let proxy = apply(
        &client,
        "one",
        json!({"spec": base(), "status": {"phase": "Failed"}}),
    )
    .await
    .unwrap();
    assert_eq!(proxy.status.unwrap().phase.as_deref(), Some("Ready"));
}

#[tokio::test]
async fn updates_take_fields_from_their_owners() {
    let (_plane, client) = in_memory().await;
    apply(&client, "one", json!({"spec": base()}))
        .await
        .unwrap();
    let patch = json!({"spec": {"endpoint": {"host": "192.0.2.7"}}});
    let params = PatchParams {
        field_manager: Some("hand".to_owned()),
        ..Default::default()
    };
    let proxy = proxies(&client)
        .patch("a", &params, &Patch::Merge(&patch))
        .await
        .unwrap();
    let of = |proxy: &Proxy, manager: &str| {
        proxy
            .managed_fields()
            .iter()
            .find(|m| m.manager.as_deref() == Some(manager))
            .and_then(|m| m.fields_v1.as_ref())
            .map(|f| f.0.clone())
    };
    assert_eq!(
        of(&proxy, "hand"),
        Some(json!({"f:spec": {"f:endpoint": {"f:host": {}}}}))
    );
    assert_eq!(of(&proxy, "one"), Some(json!({"f:spec": {"f:mode": {}}})));
    // An update that removes a field leaves it to nobody.
    let patch = json!({"metadata": {"labels": {"x": "1"}}});
    proxies(&client)
        .patch("a", &params, &Patch::Merge(&patch))
        .await
        .unwrap();
    let patch = json!({"metadata": {"labels": null}});
    let proxy = proxies(&client)
        .patch("a", &params, &Patch::Merge(&patch))
        .await
        .unwrap();
    assert_eq!(
        of(&proxy, "hand"),
        Some(json!({"f:spec": {"f:endpoint": {"f:host": {}}}}))
    );
    // Managed fields can be forgotten; the next apply then meets what was there before.
    let patch = json!({"metadata": {"managedFields": [{}]}});
    let proxy = proxies(&client)
        .patch("a", &params, &Patch::Merge(&patch))
        .await
        .unwrap();
    assert!(proxy.managed_fields().is_empty());
    let error = status(
        apply(&client, "one", json!({"spec": base()}))
            .await
            .unwrap_err(),
    );
    assert!(
        error
            .message
            .contains("conflict with \"before-first-apply\""),
        "{}",
        error.message
    );
}

#[tokio::test]
async fn what_cannot_be_applied_is_refused() {
    let (_plane, client) = in_memory().await;
    let api: Api<Proxy> = proxies(&client);
    let refused = status(
        api.patch(
            "a",
            &PatchParams::apply("one"),
            &Patch::Apply(config(&json!({
                "spec": base(), "metadata": {"managedFields": [{"manager": "x"}]}
            }))),
        )
        .await
        .unwrap_err(),
    );
    assert_eq!(refused.message, "metadata.managedFields must be nil");
    let wrong = status(
        apply(&client, "one", json!({"spec": {"mode": "External"}}))
            .await
            .unwrap_err(),
    );
    assert!(
        wrong
            .message
            .contains("an External proxy needs spec.endpoint.host"),
        "{}",
        wrong.message
    );
    api.create(&PostParams::default(), &mk_external("b"))
        .await
        .unwrap();
    let other = status(
        api.patch(
            "b",
            &PatchParams::apply("one"),
            &Patch::Apply(config(&json!({"spec": base()}))),
        )
        .await
        .unwrap_err(),
    );
    assert!(
        other.message.contains("does not match the name on the URL"),
        "{}",
        other.message
    );
    // Optimistic locking works with apply, too.
    let mut stale = config(&json!({"spec": base(), "metadata": {"resourceVersion": "1"}}));
    stale["metadata"]["name"] = "b".into();
    let params = PatchParams::apply("one").force();
    let error = status(
        api.patch("b", &params, &Patch::Apply(stale))
            .await
            .unwrap_err(),
    );
    assert_eq!(error.reason, "Conflict");
}

//! Names, labels, annotations, owners: what every object has.

use serde_json::{Value, json};

use super::{Session, external, with};

pub async fn ask(s: &mut Session) -> anyhow::Result<()> {
    let proxies = s.proxies();
    let long = "a".repeat(254);
    let big = "x".repeat(263_000);
    for (what, change) in [
        ("name-upper", json!({"name": "Bad"})),
        ("name-underscore", json!({"name": "bad_name"})),
        ("name-slash", json!({"name": "bad/name"})),
        ("name-dots", json!({"name": "good.name-1"})),
        ("name-dot-end", json!({"name": "bad."})),
        ("name-long", json!({"name": long})),
        ("name-number", json!({"name": 7})),
        (
            "generate-name-long",
            json!({"name": null, "generateName": "a".repeat(80)}),
        ),
        ("namespace-bad", json!({"namespace": "Bad_Space"})),
        ("label-key", json!({"labels": {"bad key": "x"}})),
        ("label-prefix", json!({"labels": {"Bad_/x": "x"}})),
        ("label-value", json!({"labels": {"a": "not good!"}})),
        ("label-value-long", json!({"labels": {"a": "v".repeat(64)}})),
        ("label-number", json!({"labels": {"a": 1}})),
        ("label-list", json!({"labels": ["a"]})),
        ("annotation-key", json!({"annotations": {"bad key": "x"}})),
        ("annotation-bool", json!({"annotations": {"a": true}})),
        ("annotation-big", json!({"annotations": {"a": big}})),
        ("finalizer-plain", json!({"finalizers": ["cleanup"]})),
        ("finalizer-bad", json!({"finalizers": ["not good/x y"]})),
        ("owner-empty", json!({"ownerReferences": [{}]})),
        (
            "owner-bad-version",
            json!({"ownerReferences": [{"apiVersion": "a/b/c", "kind": "K", "name": "n", "uid": "u"}]}),
        ),
        (
            "owner-event",
            json!({"ownerReferences": [{"apiVersion": "v1", "kind": "Event", "name": "n", "uid": "u"}]}),
        ),
        (
            "owners-two-controllers",
            json!({"ownerReferences": [
            {"apiVersion": "v1", "kind": "K", "name": "n", "uid": "u", "controller": true},
            {"apiVersion": "v1", "kind": "K", "name": "m", "uid": "v", "controller": true}]}),
        ),
        (
            "owners-same",
            json!({"ownerReferences": [
            {"apiVersion": "v1", "kind": "K", "name": "n", "uid": "u"},
            {"apiVersion": "v1", "kind": "K", "name": "n", "uid": "u"}]}),
        ),
        (
            "owner-unknown-field",
            json!({"ownerReferences": [{"apiVersion": "v1", "kind": "K", "name": "n", "uid": "u", "boss": true}]}),
        ),
        ("unknown-field", json!({"mood": "good"})),
        ("creation-bad", json!({"creationTimestamp": "yesterday"})),
        (
            "managed-fields-bad",
            json!({"managedFields": [{"operation": "Sing"}]}),
        ),
    ] {
        let name = json!({"metadata": {"name": format!("m-{what}")}});
        let body = with(with(external("m"), &name), &json!({"metadata": change}));
        s.post(what, &proxies, &body).await?;
    }
    s.post(
        "metadata-null",
        &proxies,
        &replaced("metadata", Value::Null),
    )
    .await?;
    s.post("metadata-list", &proxies, &replaced("metadata", json!([])))
        .await?;
    s.post(
        "metadata-missing",
        &proxies,
        &with(external("m"), &json!({"metadata": null})),
    )
    .await?;

    // Owners: the cascade belongs to a controller, what is stored does not.
    let owner = s.given(&external("owner")).await?;
    let owned = json!({"metadata": {"ownerReferences": [{
        "apiVersion": "crawl.example.com/v1alpha1", "kind": "Proxy", "name": "owner",
        "uid": owner["metadata"]["uid"], "controller": true, "blockOwnerDeletion": true,
    }]}});
    s.post("owned", &proxies, &with(external("owned"), &owned))
        .await?;
    s.delete("owner-deleted", &s.proxy_path("owner")).await?;
    Ok(())
}

fn replaced(field: &str, value: Value) -> Value {
    let mut body = external("m");
    body[field] = value;
    body
}

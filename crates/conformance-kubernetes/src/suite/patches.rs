//! Merge patch, JSON patch, strategic merge patch, server-side apply.

use reqwest::Method;
use serde_json::{Value, json};

use super::{Session, external, with};
use crate::client::{Answer, Request};

pub async fn ask(s: &mut Session) -> anyhow::Result<()> {
    merge(s).await?;
    json_patch(s).await?;
    other_types(s).await?;
    apply(s).await?;
    apply_faults(s).await?;
    apply_lists_and_status(s).await
}

async fn merge(s: &mut Session) -> anyhow::Result<()> {
    s.given(&external("m")).await?;
    let path = s.proxy_path("m");
    s.merge(
        "merge/spec",
        &path,
        &json!({"spec": {"port": 8080, "attributes": {"a": "1", "b": "2"}}}),
    )
    .await?;
    s.merge(
        "merge/remove",
        &path,
        &json!({"spec": {"attributes": {"a": null}}}),
    )
    .await?;
    s.merge("merge/nothing", &path, &json!({})).await?;
    s.merge("merge/same", &path, &json!({"spec": {"port": 8080}}))
        .await?;
    s.merge(
        "merge/metadata",
        &path,
        &json!({"metadata": {"annotations": {"note": "x"}, "labels": {"l": "1"}}}),
    )
    .await?;
    s.merge("merge/metadata-null", &path, &json!({"metadata": null}))
        .await?;
    s.merge(
        "merge/old-revision",
        &path,
        &json!({"metadata": {"resourceVersion": "1"}, "spec": {"port": 1}}),
    )
    .await?;
    s.merge(
        "merge/other-uid",
        &path,
        &json!({"metadata": {"uid": "11111111-2222-3333-4444-555555555555"}}),
    )
    .await?;
    s.merge(
        "merge/other-name",
        &path,
        &json!({"metadata": {"name": "n"}}),
    )
    .await?;
    s.merge(
        "merge/other-namespace",
        &path,
        &json!({"metadata": {"namespace": "n"}}),
    )
    .await?;
    s.merge("merge/other-kind", &path, &json!({"kind": "Gateway"}))
        .await?;
    s.merge(
        "merge/generation",
        &path,
        &json!({"metadata": {"generation": 50}}),
    )
    .await?;
    s.merge("merge/unknown", &path, &json!({"spec": {"speed": 1}}))
        .await?;
    s.merge(
        "merge/missing",
        &s.proxy_path("nobody"),
        &json!({"spec": {}}),
    )
    .await?;
    for (what, body) in [
        ("empty", ""),
        ("no-json", "{"),
        ("list", "[]"),
        ("text", "\"x\""),
        ("null", "null"),
    ] {
        let request =
            Request::new(Method::PATCH, path.clone()).body("application/merge-patch+json", body);
        s.call(&format!("merge/body-{what}"), request).await?;
    }
    let yaml = Request::new(Method::PATCH, path.clone())
        .body("application/merge-patch+json", "spec:\n  port: 7000\n");
    s.call("merge/body-yaml", yaml).await?;
    s.merge("merge/collection", &s.proxies(), &json!({}))
        .await?;
    Ok(())
}

async fn operations(
    s: &mut Session,
    what: &str,
    path: &str,
    body: &Value,
) -> anyhow::Result<Answer> {
    let request =
        Request::new(Method::PATCH, path).body("application/json-patch+json", body.to_string());
    s.call(what, request).await
}

async fn json_patch(s: &mut Session) -> anyhow::Result<()> {
    s.given(&external("j")).await?;
    let path = s.proxy_path("j");
    for (what, body) in [
        (
            "add",
            json!([{"op": "add", "path": "/spec/attributes", "value": {"a": "1"}}]),
        ),
        (
            "add-in-map",
            json!([{"op": "add", "path": "/spec/attributes/b~1c", "value": "2"}]),
        ),
        (
            "replace",
            json!([{"op": "replace", "path": "/spec/port", "value": 1234}]),
        ),
        (
            "replace-missing",
            json!([{"op": "replace", "path": "/spec/provider", "value": "x"}]),
        ),
        (
            "remove",
            json!([{"op": "remove", "path": "/spec/attributes/a"}]),
        ),
        (
            "remove-missing",
            json!([{"op": "remove", "path": "/spec/attributes/a"}]),
        ),
        (
            "test-good",
            json!([{"op": "test", "path": "/spec/port", "value": 1234}, {"op": "replace", "path": "/spec/port", "value": 1235}]),
        ),
        (
            "test-bad",
            json!([{"op": "test", "path": "/spec/port", "value": 1}, {"op": "replace", "path": "/spec/port", "value": 2}]),
        ),
        (
            "move",
            json!([{"op": "add", "path": "/metadata/labels", "value": {"x": "1"}}, {"op": "move", "from": "/metadata/labels/x", "path": "/metadata/labels/y"}]),
        ),
        (
            "copy",
            json!([{"op": "copy", "from": "/metadata/labels/y", "path": "/metadata/labels/z"}]),
        ),
        (
            "finalizer-append",
            json!([{"op": "add", "path": "/metadata/finalizers", "value": ["example.com/a"]}, {"op": "add", "path": "/metadata/finalizers/-", "value": "example.com/b"}]),
        ),
        (
            "finalizers-away",
            json!([{"op": "remove", "path": "/metadata/finalizers"}]),
        ),
        ("unknown-op", json!([{"op": "sing", "path": "/spec/port"}])),
        (
            "no-parent",
            json!([{"op": "add", "path": "/spec/a/b/c", "value": 1}]),
        ),
        ("empty", json!([])),
        ("object", json!({"op": "add"})),
        (
            "invalid-result",
            json!([{"op": "replace", "path": "/spec/port", "value": 0}]),
        ),
    ] {
        operations(s, &format!("json/{what}"), &path, &body).await?;
    }
    Ok(())
}

async fn other_types(s: &mut Session) -> anyhow::Result<()> {
    s.given(&external("o")).await?;
    let path = s.proxy_path("o");
    for (what, content_type) in [
        ("strategic", "application/strategic-merge-patch+json"),
        ("json", "application/json"),
        ("yaml", "application/yaml"),
        ("unknown", "text/plain"),
    ] {
        let request =
            Request::new(Method::PATCH, path.clone()).body(content_type, r#"{"spec":{"port":2}}"#);
        s.call(&format!("type/{what}"), request).await?;
    }
    let mut request = Request::new(Method::PATCH, path);
    request.body = Some("{}".to_owned());
    s.call("type/none", request).await?;
    // Built-in kinds take strategic merge patches.
    let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "o"}, "data": {"a": "1", "b": "2"}});
    s.post("strategic/create", &s.core("configmaps"), &map)
        .await?;
    let map = format!("{}/o", s.core("configmaps"));
    for (what, body) in [
        ("merge", r#"{"data":{"c":"3"}}"#),
        ("delete-key", r#"{"data":{"a":null}}"#),
        ("replace-map", r#"{"data":{"$patch":"replace","z":"9"}}"#),
        (
            "finalizers",
            r#"{"metadata":{"finalizers":["example.com/a"]}}"#,
        ),
        (
            "finalizers-merge",
            r#"{"metadata":{"finalizers":["example.com/b"]}}"#,
        ),
        (
            "finalizers-delete",
            r#"{"metadata":{"$deleteFromPrimitiveList/finalizers":["example.com/a","example.com/b"]}}"#,
        ),
        ("bad-directive", r#"{"data":{"$patch":"sing"}}"#),
    ] {
        let request = Request::new(Method::PATCH, map.clone())
            .body("application/strategic-merge-patch+json", body);
        s.call(&format!("strategic/{what}"), request).await?;
    }
    Ok(())
}

fn apply_request(path: &str, query: &str, body: &Value) -> Request {
    Request::new(Method::PATCH, format!("{path}?{query}"))
        .body("application/apply-patch+yaml", body.to_string())
}

async fn apply(s: &mut Session) -> anyhow::Result<()> {
    let path = s.proxy_path("a");
    let body = |spec: Value| {
        let mut body = external("a");
        body["spec"] = spec;
        body
    };
    let host = json!({"host": "192.0.2.1"});
    let one = body(json!({"mode": "External", "endpoint": host, "attributes": {"geo": "de"}}));
    s.call(
        "apply/create",
        apply_request(&path, "fieldManager=one", &one),
    )
    .await?;
    s.call(
        "apply/again",
        apply_request(&path, "fieldManager=one", &one),
    )
    .await?;
    let two = body(
        json!({"mode": "External", "endpoint": host, "attributes": {"asn": "64496"}, "port": 8080}),
    );
    s.call(
        "apply/second-manager",
        apply_request(&path, "fieldManager=two", &two),
    )
    .await?;
    let three = body(json!({"mode": "External", "endpoint": {"host": "192.0.2.3"}, "port": 9090}));
    s.call(
        "apply/conflict",
        apply_request(&path, "fieldManager=three", &three),
    )
    .await?;
    s.call(
        "apply/dry-run-force",
        apply_request(&path, "fieldManager=three&force=true&dryRun=All", &three),
    )
    .await?;
    s.call(
        "apply/force",
        apply_request(&path, "fieldManager=three&force=true", &three),
    )
    .await?;
    let less = body(json!({"mode": "External", "endpoint": {"host": "192.0.2.3"}}));
    s.call(
        "apply/give-up-field",
        apply_request(&path, "fieldManager=three", &less),
    )
    .await?;
    let gone =
        body(json!({"mode": "External", "endpoint": {"host": "192.0.2.3"}, "attributes": {}}));
    s.call(
        "apply/remove-attribute",
        apply_request(&path, "fieldManager=one&force=true", &gone),
    )
    .await?;
    s.merge(
        "apply/merge-over",
        &format!("{path}?fieldManager=hand"),
        &json!({"spec": {"maxLeases": 9}}),
    )
    .await?;
    let mut leases = less.clone();
    leases["spec"]["maxLeases"] = json!(3);
    s.call(
        "apply/conflict-with-update",
        apply_request(&path, "fieldManager=three", &leases),
    )
    .await?;
    leases["spec"]["maxLeases"] = json!(9);
    s.call(
        "apply/shared-value",
        apply_request(&path, "fieldManager=three", &leases),
    )
    .await?;
    s.get("apply/result", &path).await?;
    s.merge(
        "apply/managed-fields-reset",
        &path,
        &json!({"metadata": {"managedFields": [{}]}}),
    )
    .await?;
    s.get("apply/after-reset", &path).await?;
    Ok(())
}

async fn apply_faults(s: &mut Session) -> anyhow::Result<()> {
    let long = format!("fieldManager={}", "m".repeat(129));
    let uid = "11111111-2222-3333-4444-555555555555";
    for (what, query, change) in [
        ("no-manager", "", json!({})),
        ("long-manager", long.as_str(), json!({})),
        (
            "managed-fields",
            "fieldManager=x",
            json!({"metadata": {"managedFields": [{"manager": "x", "operation": "Apply"}]}}),
        ),
        (
            "other-name",
            "fieldManager=x",
            json!({"metadata": {"name": "g"}}),
        ),
        ("no-kind", "fieldManager=x", json!({"kind": null})),
        (
            "unknown-field",
            "fieldManager=x",
            json!({"spec": {"speed": 1}}),
        ),
        (
            "unknown-strict",
            "fieldManager=x&fieldValidation=Strict",
            json!({"spec": {"speed": 1}}),
        ),
        (
            "invalid",
            "fieldManager=x&force=true",
            json!({"spec": {"port": 0}}),
        ),
        (
            "revision-of-nobody",
            "fieldManager=x",
            json!({"metadata": {"resourceVersion": "1"}}),
        ),
        (
            "uid-of-nobody",
            "fieldManager=x",
            json!({"metadata": {"uid": uid}}),
        ),
        ("bad-force", "fieldManager=x&force=perhaps", json!({})),
    ] {
        // An object of its own: what one server takes by mistake is not in the way of the next.
        let name = format!("f-{what}");
        let body = with(external(&name), &change);
        let request = apply_request(&s.proxy_path(&name), query, &body);
        s.call(&format!("apply-fault/{what}"), request).await?;
    }
    s.given(&external("f")).await?;
    let merge = Request::new(Method::PATCH, format!("{}?force=true", s.proxy_path("f")))
        .body("application/merge-patch+json", "{}");
    s.call("apply-fault/force-without-apply", merge).await?;
    let yaml = "apiVersion: crawl.example.com/v1alpha1\nkind: Proxy\nmetadata:\n  name: yaml\nspec:\n  mode: External\n  endpoint:\n    host: 192.0.2.4\n";
    let request = Request::new(
        Method::PATCH,
        format!("{}?fieldManager=x", s.proxy_path("yaml")),
    )
    .body("application/apply-patch+yaml", yaml);
    s.call("apply/yaml", request).await?;
    let request = Request::new(
        Method::PATCH,
        format!("{}?fieldManager=x", s.proxy_path("yaml")),
    )
    .body("application/apply-patch+yaml", "a: [");
    s.call("apply-fault/bad-yaml", request).await?;
    Ok(())
}

async fn apply_lists_and_status(s: &mut Session) -> anyhow::Result<()> {
    let path = s.proxy_path("l");
    let mut body = external("l");
    body["metadata"]["finalizers"] = json!(["example.com/a"]);
    body["metadata"]["labels"] = json!({"a": "1"});
    s.call(
        "apply/finalizer",
        apply_request(&path, "fieldManager=one", &body),
    )
    .await?;
    body["metadata"]["finalizers"] = json!(["example.com/b"]);
    body["metadata"]["labels"] = json!({"b": "2"});
    s.call(
        "apply/finalizer-of-other",
        apply_request(&path, "fieldManager=two", &body),
    )
    .await?;
    body["metadata"]["finalizers"] = json!([]);
    s.call(
        "apply/finalizer-given-up",
        apply_request(&path, "fieldManager=one", &body),
    )
    .await?;
    let condition = |kind: &str, status: &str| json!({"type": kind, "status": status, "reason": "Because", "message": "", "lastTransitionTime": "2001-02-03T04:05:06Z"});
    let status = |conditions: Value| {
        json!({
            "apiVersion": "crawl.example.com/v1alpha1", "kind": "Proxy", "metadata": {"name": "l"},
            "status": {"conditions": conditions},
        })
    };
    let status_path = format!("{path}/status");
    s.call(
        "apply/status",
        apply_request(
            &status_path,
            "fieldManager=one",
            &status(json!([condition("Ready", "True")])),
        ),
    )
    .await?;
    s.call(
        "apply/status-other",
        apply_request(
            &status_path,
            "fieldManager=two",
            &status(json!([condition("Healthy", "True")])),
        ),
    )
    .await?;
    s.call(
        "apply/status-conflict",
        apply_request(
            &status_path,
            "fieldManager=two",
            &status(json!([condition("Ready", "False")])),
        ),
    )
    .await?;
    s.call(
        "apply/status-twice",
        apply_request(
            &status_path,
            "fieldManager=two&force=true",
            &status(json!([condition("A", "True"), condition("A", "False")])),
        ),
    )
    .await?;
    s.merge(
        "apply/release",
        &path,
        &json!({"metadata": {"finalizers": null}}),
    )
    .await?;

    let secret = |data: Value| json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "a"}, "data": data});
    let path = format!("{}/a", s.core("secrets"));
    s.call(
        "apply/secret",
        apply_request(&path, "fieldManager=one", &secret(json!({"a": "MQ=="}))),
    )
    .await?;
    s.call(
        "apply/secret-other",
        apply_request(&path, "fieldManager=two", &secret(json!({"b": "Mg=="}))),
    )
    .await?;
    s.call(
        "apply/secret-conflict",
        apply_request(&path, "fieldManager=two", &secret(json!({"a": "Mg=="}))),
    )
    .await?;
    Ok(())
}

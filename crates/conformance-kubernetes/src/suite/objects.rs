//! create, get, update, delete.

use reqwest::Method;
use serde_json::json;

use super::{Session, external, with};
use crate::client::Request;

pub async fn ask(s: &mut Session) -> anyhow::Result<()> {
    create(s).await?;
    update(s).await?;
    status(s).await?;
    delete(s).await?;
    finalizers(s).await?;
    dry_run(s).await?;
    media_types(s).await
}

async fn create(s: &mut Session) -> anyhow::Result<()> {
    let proxies = s.proxies();
    s.post("create", &proxies, &external("first")).await?;
    s.post("create/again", &proxies, &external("first")).await?;
    s.get("get", &s.proxy_path("first")).await?;
    s.get("get/missing", &s.proxy_path("nobody")).await?;
    s.get(
        "get/pretty",
        &format!("{}?pretty=true", s.proxy_path("first")),
    )
    .await?;

    let generated = with(
        external("x"),
        &json!({"metadata": {"name": null, "generateName": "px-"}}),
    );
    s.post("create/generated", &proxies, &generated).await?;
    for (what, change) in [
        ("no-name", json!({"metadata": {"name": null}})),
        (
            "other-namespace",
            json!({"metadata": {"namespace": "elsewhere"}}),
        ),
        (
            "revision-set",
            json!({"metadata": {"resourceVersion": "5"}}),
        ),
        ("other-kind", json!({"kind": "Gateway"})),
        (
            "other-version",
            json!({"apiVersion": "crawl.example.com/v9"}),
        ),
        ("other-group", json!({"apiVersion": "v1"})),
        ("no-kind", json!({"kind": null})),
        ("no-version", json!({"apiVersion": null})),
    ] {
        let odd = with(external(&format!("odd-{what}")), &change);
        s.post(&format!("create/{what}"), &proxies, &odd).await?;
    }
    // What only the server decides is not taken from the client.
    let pushy = with(
        external("pushy"),
        &json!({"metadata": {
            "uid": "11111111-2222-3333-4444-555555555555",
            "creationTimestamp": "2001-01-01T00:00:00Z",
            "deletionTimestamp": "2001-01-01T00:00:00Z",
            "deletionGracePeriodSeconds": 5,
            "generation": 17,
            "selfLink": "/here",
        }, "status": {"phase": "Ready"}}),
    );
    s.post("create/pushy", &proxies, &pushy).await?;
    let nowhere = proxies.replace(&s.namespace, "nowhere");
    s.post("create/no-namespace", &nowhere, &external("lost"))
        .await?;
    s.get("list/no-namespace", &nowhere).await?;
    s.post("create/on-item", &s.proxy_path("first"), &external("first"))
        .await?;
    s.post(
        "create/all-namespaces",
        "/apis/crawl.example.com/v1alpha1/proxies",
        &external("q"),
    )
    .await?;
    for (what, body) in [
        ("empty-body", ""),
        ("no-json", "{"),
        ("list-body", "[]"),
        ("number-body", "7"),
        ("null-body", "null"),
        ("trailing", "{} {}"),
    ] {
        let request = Request::new(Method::POST, proxies.clone()).body("application/json", body);
        s.call(&format!("create/{what}"), request).await?;
    }
    Ok(())
}

async fn update(s: &mut Session) -> anyhow::Result<()> {
    let made = s.given(&external("changing")).await?;
    let path = s.proxy_path("changing");
    s.put("update/nothing", &path, &made).await?;
    let labelled = with(made.clone(), &json!({"metadata": {"labels": {"a": "b"}}}));
    let now = s.put("update/metadata", &path, &labelled).await?.body;
    let moved = with(
        now.clone(),
        &json!({"spec": {"endpoint": {"host": "192.0.2.8"}}}),
    );
    s.put("update/spec", &path, &moved).await?;
    s.put("update/stale", &path, &moved).await?;
    let blind = with(
        moved.clone(),
        &json!({"metadata": {"resourceVersion": null}}),
    );
    s.put("update/no-revision", &path, &blind).await?;
    let bad = with(
        moved.clone(),
        &json!({"metadata": {"resourceVersion": "abc"}}),
    );
    s.put("update/bad-revision", &path, &bad).await?;
    let current = s.target.client.get(&path).await?.body;
    for (what, change) in [
        ("other-name", json!({"metadata": {"name": "other"}})),
        ("no-name", json!({"metadata": {"name": null}})),
        (
            "other-namespace",
            json!({"metadata": {"namespace": "elsewhere"}}),
        ),
        (
            "other-uid",
            json!({"metadata": {"uid": "11111111-2222-3333-4444-555555555555"}}),
        ),
        ("generation", json!({"metadata": {"generation": 99}})),
        (
            "creation",
            json!({"metadata": {"creationTimestamp": "2001-01-01T00:00:00Z"}}),
        ),
        ("no-spec", json!({"spec": null})),
    ] {
        s.put(
            &format!("update/{what}"),
            &path,
            &with(current.clone(), &change),
        )
        .await?;
    }
    s.put(
        "update/missing",
        &s.proxy_path("nobody"),
        &external("nobody"),
    )
    .await?;
    s.put("update/collection", &s.proxies(), &external("nobody"))
        .await?;
    Ok(())
}

async fn status(s: &mut Session) -> anyhow::Result<()> {
    let made = s.given(&external("state")).await?;
    let path = s.proxy_path("state");
    let status_path = format!("{path}/status");
    let condition = json!({
        "type": "Ready", "status": "True", "reason": "ProbeSucceeded", "message": "",
        "lastTransitionTime": "2001-02-03T04:05:06Z", "observedGeneration": 1,
    });
    let new = with(
        made,
        &json!({
            "status": {"phase": "Ready", "ip": "192.0.2.7", "latencyMillis": 12, "conditions": [condition]},
            "spec": {"port": 9999},
            "metadata": {"labels": {"by": "status"}},
        }),
    );
    let now = s.put("status/update", &status_path, &new).await?.body;
    s.get("status/get", &status_path).await?;
    s.put("status/nothing", &status_path, &now).await?;
    let both = with(
        now.clone(),
        &json!({"status": {"phase": "Failed"}, "spec": {"port": 8888}}),
    );
    s.put("status/ignored-by-update", &path, &both).await?;
    s.merge(
        "status/patch",
        &status_path,
        &json!({"status": {"phase": "Unhealthy"}, "spec": {"port": 1}}),
    )
    .await?;
    s.merge(
        "status/patch-through-object",
        &path,
        &json!({"status": {"phase": "Ready"}}),
    )
    .await?;
    s.merge(
        "status/wrong-type",
        &status_path,
        &json!({"status": {"latencyMillis": "slow"}}),
    )
    .await?;
    s.merge(
        "status/bad-condition",
        &status_path,
        &json!({"status": {"conditions": [{"type": "x"}]}}),
    )
    .await?;
    s.merge(
        "status/unknown-field",
        &status_path,
        &json!({"status": {"mood": "good"}}),
    )
    .await?;
    s.merge(
        "status/unknown-strict",
        &format!("{status_path}?fieldValidation=Strict"),
        &json!({"status": {"mood": "good"}}),
    )
    .await?;
    s.delete("status/delete", &status_path).await?;
    s.post("status/post", &status_path, &now).await?;
    s.get(
        "status/missing",
        &format!("{}/status", s.proxy_path("nobody")),
    )
    .await?;
    Ok(())
}

async fn delete(s: &mut Session) -> anyhow::Result<()> {
    let options =
        |body: serde_json::Value| with(json!({"apiVersion": "v1", "kind": "DeleteOptions"}), &body);
    for (what, body) in [
        (
            "other-uid",
            options(json!({"preconditions": {"uid": "11111111-2222-3333-4444-555555555555"}})),
        ),
        (
            "other-revision",
            options(json!({"preconditions": {"resourceVersion": "1"}})),
        ),
        ("dry-run", options(json!({"dryRun": ["All"]}))),
        ("bad-dry-run", options(json!({"dryRun": ["Some"]}))),
        (
            "bad-propagation",
            options(json!({"propagationPolicy": "Sideways"})),
        ),
        (
            "both-policies",
            options(json!({"propagationPolicy": "Background", "orphanDependents": true})),
        ),
        ("wrong-kind", json!({"apiVersion": "v1", "kind": "Pod"})),
    ] {
        // An object of its own: what one server deletes by mistake is not missed by the next.
        let name = format!("d-{what}");
        s.given(&external(&name)).await?;
        let request = Request::new(Method::DELETE, s.proxy_path(&name)).json(&body);
        s.call(&format!("delete/{what}"), request).await?;
    }
    let made = s.given(&external("going")).await?;
    let path = s.proxy_path("going");
    let uid = made["metadata"]["uid"].clone();
    s.delete("delete/query-dry-run", &format!("{path}?dryRun=All"))
        .await?;
    let right = options(json!({"preconditions": {"uid": uid}}));
    s.call(
        "delete/right-uid",
        Request::new(Method::DELETE, path.clone()).json(&right),
    )
    .await?;
    s.get("delete/gone", &path).await?;
    s.delete("delete/again", &path).await?;

    let again = s.given(&external("going")).await?;
    s.note("delete/made-again", &again);
    let background = options(json!({"propagationPolicy": "Background"}));
    s.call(
        "delete/background",
        Request::new(Method::DELETE, path.clone()).json(&background),
    )
    .await?;
    s.given(&external("going")).await?;
    let foreground = format!("{path}?propagationPolicy=Foreground");
    s.delete("delete/foreground", &foreground).await?;
    s.merge(
        "delete/foreground-release",
        &path,
        &json!({"metadata": {"finalizers": null}}),
    )
    .await?;
    s.given(&external("going")).await?;
    s.delete("delete/orphan", &format!("{path}?propagationPolicy=Orphan"))
        .await?;
    s.merge(
        "delete/orphan-release",
        &path,
        &json!({"metadata": {"finalizers": null}}),
    )
    .await?;

    for name in ["many-1", "many-2", "kept"] {
        let label = if name == "kept" { "no" } else { "yes" };
        s.given(&with(
            external(name),
            &json!({"metadata": {"labels": {"many": label}}}),
        ))
        .await?;
    }
    let proxies = s.proxies();
    s.delete(
        "delete-collection/selected",
        &format!("{proxies}?labelSelector=many%3Dyes"),
    )
    .await?;
    s.get(
        "delete-collection/left",
        &format!("{proxies}?labelSelector=many"),
    )
    .await?;
    s.delete(
        "delete-collection/none",
        &format!("{proxies}?labelSelector=many%3Dyes"),
    )
    .await?;
    s.delete(
        "delete-collection/dry-run",
        &format!("{proxies}?labelSelector=many&dryRun=All"),
    )
    .await?;
    s.delete(
        "delete-collection/all-namespaces",
        "/apis/crawl.example.com/v1alpha1/proxies",
    )
    .await?;
    Ok(())
}

async fn finalizers(s: &mut Session) -> anyhow::Result<()> {
    let held = with(
        external("held"),
        &json!({"metadata": {"finalizers": ["crawl.example.com/cleanup", "example.com/other"]}}),
    );
    s.given(&held).await?;
    let path = s.proxy_path("held");
    s.delete("finalizers/delete", &path).await?;
    s.get("finalizers/still-there", &path).await?;
    s.delete("finalizers/delete-again", &path).await?;
    s.post("finalizers/name-taken", &s.proxies(), &external("held"))
        .await?;
    s.merge(
        "finalizers/spec-change",
        &path,
        &json!({"spec": {"port": 4000}}),
    )
    .await?;
    s.merge(
        "finalizers/one-more",
        &path,
        &json!({"metadata": {"finalizers":
        ["crawl.example.com/cleanup", "example.com/other", "example.com/late"]}}),
    )
    .await?;
    s.merge(
        "finalizers/one-less",
        &path,
        &json!({"metadata": {"finalizers": ["crawl.example.com/cleanup"]}}),
    )
    .await?;
    s.merge(
        "finalizers/revive",
        &path,
        &json!({"metadata": {"deletionTimestamp": null}}),
    )
    .await?;
    s.merge(
        "finalizers/release",
        &path,
        &json!({"metadata": {"finalizers": []}}),
    )
    .await?;
    s.get("finalizers/gone", &path).await?;
    s.given(&held).await?;
    s.target.client.delete(&path).await?;
    let mut now = s.target.client.get(&path).await?.body;
    now["metadata"]["finalizers"] = json!([]);
    s.put("finalizers/release-by-update", &path, &now).await?;
    s.get("finalizers/gone-again", &path).await?;
    Ok(())
}

async fn dry_run(s: &mut Session) -> anyhow::Result<()> {
    let proxies = format!("{}?dryRun=All", s.proxies());
    s.post("dry-run/create", &proxies, &external("dry")).await?;
    s.get("dry-run/not-there", &s.proxy_path("dry")).await?;
    let made = s.given(&external("dry")).await?;
    let path = format!("{}?dryRun=All", s.proxy_path("dry"));
    let moved = with(made, &json!({"spec": {"port": 4001}}));
    s.put("dry-run/update", &path, &moved).await?;
    s.merge("dry-run/patch", &path, &json!({"spec": {"port": 4002}}))
        .await?;
    s.merge("dry-run/invalid", &path, &json!({"spec": {"port": 0}}))
        .await?;
    s.get("dry-run/unchanged", &s.proxy_path("dry")).await?;
    s.post(
        "dry-run/bad",
        &format!("{}?dryRun=Some", s.proxies()),
        &external("dry2"),
    )
    .await?;
    s.delete("dry-run/delete", &path).await?;
    s.get("dry-run/still-there", &s.proxy_path("dry")).await?;
    Ok(())
}

async fn media_types(s: &mut Session) -> anyhow::Result<()> {
    let proxies = s.proxies();
    let yaml = "apiVersion: crawl.example.com/v1alpha1\nkind: Proxy\nmetadata: {name: from-yaml}\nspec: {mode: External, endpoint: {host: 192.0.2.9}}\n";
    let post = |content_type| Request::new(Method::POST, proxies.clone()).body(content_type, yaml);
    s.call("media/yaml-body", post("application/yaml")).await?;
    s.call("media/unknown-body", post("text/plain")).await?;
    // (A body that only claims to be protobuf makes kube-apiserver 1.36 break the connection.)
    let path = s.proxy_path("from-yaml");
    let get = |accept: &str| Request::new(Method::GET, path.clone()).header("accept", accept);
    for (what, accept) in [
        ("any", "*/*"),
        ("application", "application/*"),
        ("json-charset", "application/json; charset=utf-8"),
        ("html", "text/html"),
        ("protobuf", "application/vnd.kubernetes.protobuf"),
        (
            "protobuf-or-json",
            "application/vnd.kubernetes.protobuf,application/json",
        ),
        ("quality", "application/yaml;q=0.1, application/json;q=0.9"),
        (
            "unknown-kind",
            "application/json;as=Nothing;v=v1;g=meta.k8s.io",
        ),
        (
            "partial",
            "application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io",
        ),
        ("table", "application/json;as=Table;v=v1;g=meta.k8s.io"),
        (
            "table-or-json",
            "application/json;as=Table;v=v9;g=meta.k8s.io,application/json",
        ),
    ] {
        s.call(&format!("media/accept-{what}"), get(accept)).await?;
    }
    let yaml_answer = s.target.client.send(get("application/yaml")).await?;
    let read = yaml_answer
        .body
        .as_str()
        .and_then(|text| serde_saphyr::from_str(text).ok());
    s.note(
        "media/accept-yaml",
        &json!({
            "status": yaml_answer.status,
            "type": yaml_answer.headers.get("content-type"),
            "body": read.unwrap_or(serde_json::Value::Null),
        }),
    );
    Ok(())
}

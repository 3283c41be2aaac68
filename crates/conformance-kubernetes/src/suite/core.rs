//! Secrets, ConfigMaps, Events, Namespaces.

use reqwest::Method;
use serde_json::{Value, json};

use super::{Session, external, with};
use crate::client::Request;

pub async fn ask(s: &mut Session) -> anyhow::Result<()> {
    secrets(s).await?;
    config_maps(s).await?;
    events(s).await?;
    namespaces(s).await?;
    who(s).await
}

async fn secrets(s: &mut Session) -> anyhow::Result<()> {
    let path = s.core("secrets");
    let secret = |name: &str, rest: Value| {
        with(
            json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}}),
            &rest,
        )
    };
    s.post(
        "secret/create",
        &path,
        &secret("a", json!({"data": {"k": "djE="}})),
    )
    .await?;
    s.post(
        "secret/string-data",
        &path,
        &secret(
            "b",
            json!({"data": {"x": "MQ==", "y": "Mg=="}, "stringData": {"y": "text ü"}}),
        ),
    )
    .await?;
    s.post("secret/empty", &path, &secret("c", json!({})))
        .await?;
    for (what, rest) in [
        ("bad-base64", json!({"data": {"k": "not base64!"}})),
        ("number", json!({"data": {"k": 7}})),
        ("bad-key", json!({"data": {"bad key": "MQ=="}})),
        ("string-number", json!({"stringData": {"k": 7}})),
        (
            "too-big",
            json!({"stringData": {"k": "x".repeat(1_048_577)}}),
        ),
        ("tls-without-keys", json!({"type": "kubernetes.io/tls"})),
        (
            "basic-auth-empty",
            json!({"type": "kubernetes.io/basic-auth"}),
        ),
        ("immutable-word", json!({"immutable": "yes"})),
        (
            "type-own",
            json!({"type": "example.com/own", "data": {"k": null}}),
        ),
        ("unknown-field", json!({"colour": "red"})),
    ] {
        s.post(&format!("secret/{what}"), &path, &secret(what, rest))
            .await?;
    }
    let item = format!("{path}/a");
    s.merge("secret/merge", &item, &json!({"data": {"l": "djI="}}))
        .await?;
    s.merge(
        "secret/merge-string",
        &item,
        &json!({"stringData": {"m": "text"}}),
    )
    .await?;
    s.merge("secret/type-change", &item, &json!({"type": "other"}))
        .await?;
    s.merge(
        "secret/label",
        &item,
        &json!({"metadata": {"labels": {"crawl.example.com/cloud-init": "true"}}}),
    )
    .await?;
    s.get(
        "secret/labelled",
        &format!("{path}?labelSelector=crawl.example.com/cloud-init%3Dtrue"),
    )
    .await?;
    s.get(
        "secret/by-type",
        &format!("{path}?fieldSelector=type%3DOpaque"),
    )
    .await?;
    s.merge("secret/immutable", &item, &json!({"immutable": true}))
        .await?;
    s.merge(
        "secret/immutable-change",
        &item,
        &json!({"data": {"k": "djM="}}),
    )
    .await?;
    s.merge(
        "secret/immutable-label",
        &item,
        &json!({"metadata": {"labels": {"x": "y"}}}),
    )
    .await?;
    s.merge("secret/mutable-again", &item, &json!({"immutable": false}))
        .await?;
    let now = s.target.client.get(&item).await?.body;
    s.put("secret/update-nothing", &item, &now).await?;
    let blind = with(secret("b", json!({"data": {"z": "MQ=="}})), &json!({}));
    s.put("secret/update-blind", &format!("{path}/b"), &blind)
        .await?;
    s.put(
        "secret/update-missing",
        &format!("{path}/nobody"),
        &secret("nobody", json!({})),
    )
    .await?;
    s.get("secret/status", &format!("{item}/status")).await?;
    let table = Request::new(Method::GET, path.clone())
        .header("accept", "application/json;as=Table;v=v1;g=meta.k8s.io");
    s.call("secret/table", table).await?;
    s.delete("secret/delete", &item).await?;
    s.get("secret/gone", &item).await?;
    s.delete("secret/delete-all", &path).await?;
    Ok(())
}

async fn config_maps(s: &mut Session) -> anyhow::Result<()> {
    let path = s.core("configmaps");
    let map = |name: &str, rest: Value| {
        with(
            json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}}),
            &rest,
        )
    };
    s.post(
        "map/create",
        &path,
        &map(
            "a",
            json!({"data": {"k": "v"}, "binaryData": {"b": "AAEC"}}),
        ),
    )
    .await?;
    for (what, rest) in [
        (
            "same-key",
            json!({"data": {"k": "v"}, "binaryData": {"k": "AAEC"}}),
        ),
        ("bad-key", json!({"data": {"bad key": "v"}})),
        ("number", json!({"data": {"k": 7}})),
        ("bad-binary", json!({"binaryData": {"k": "!"}})),
        ("empty", json!({})),
    ] {
        s.post(&format!("map/{what}"), &path, &map(what, rest))
            .await?;
    }
    let item = format!("{path}/a");
    s.merge("map/merge", &item, &json!({"data": {"k": "w"}}))
        .await?;
    s.merge("map/immutable", &item, &json!({"immutable": true}))
        .await?;
    s.merge("map/immutable-change", &item, &json!({"data": {"k": "x"}}))
        .await?;
    let table = Request::new(
        Method::GET,
        format!("{path}?fieldSelector=metadata.name%3Da"),
    )
    .header("accept", "application/json;as=Table;v=v1;g=meta.k8s.io");
    s.call("map/table", table).await?;
    s.delete("map/delete", &item).await?;
    Ok(())
}

async fn events(s: &mut Session) -> anyhow::Result<()> {
    let path = s.core("events");
    let about = s.given(&external("subject")).await?;
    let namespace = s.namespace.clone();
    let reference = json!({
        "apiVersion": "crawl.example.com/v1alpha1", "kind": "Proxy", "name": "subject",
        "namespace": namespace, "uid": about["metadata"]["uid"],
    });
    let event = |name: &str, rest: Value| {
        with(
            json!({
                "apiVersion": "v1", "kind": "Event", "metadata": {"name": name},
                "involvedObject": reference, "reason": "Created", "message": "made it", "type": "Normal",
                "source": {"component": "suite"}, "count": 1,
                "firstTimestamp": "2001-02-03T04:05:06Z", "lastTimestamp": "2001-02-03T04:05:06Z",
            }),
            &rest,
        )
    };
    s.post("event/create", &path, &event("e1", json!({})))
        .await?;
    s.post(
        "event/warning",
        &path,
        &event(
            "e2",
            json!({"type": "Warning", "reason": "Failed", "message": "broken"}),
        ),
    )
    .await?;
    s.post(
        "event/other-namespace",
        &path,
        &event("e3", json!({"involvedObject": {"namespace": "other"}})),
    )
    .await?;
    s.post(
        "event/odd-type",
        &path,
        &event("e4", json!({"type": "Odd"})),
    )
    .await?;
    s.post(
        "event/no-subject",
        &path,
        &event("e5", json!({"involvedObject": null})),
    )
    .await?;
    s.post("event/micro-time", &path, &event("e6", json!({"eventTime": "2001-02-03T04:05:06.123456Z",
        "reportingComponent": "example.com/suite", "reportingInstance": "suite-1", "action": "Creating"}))).await?;
    s.merge(
        "event/count",
        &format!("{path}/e1"),
        &json!({"count": 2, "lastTimestamp": "2001-02-03T04:05:07Z"}),
    )
    .await?;
    for (what, selector) in [
        ("name", "involvedObject.name%3Dsubject"),
        (
            "describe",
            "involvedObject.name%3Dsubject,involvedObject.kind%3DProxy",
        ),
        ("kind", "involvedObject.kind%3DPod"),
        ("reason", "reason%3DFailed"),
        ("type", "type!%3DNormal"),
        (
            "api-version",
            "involvedObject.apiVersion%3Dcrawl.example.com/v1alpha1",
        ),
        ("source", "source%3Dsuite"),
        ("unknown", "involvedObject.colour%3Dred"),
    ] {
        s.get(
            &format!("event/by-{what}"),
            &format!("{path}?fieldSelector={selector}"),
        )
        .await?;
    }
    let table = Request::new(Method::GET, path.clone())
        .header("accept", "application/json;as=Table;v=v1;g=meta.k8s.io");
    s.call("event/table", table).await?;
    let new = format!("/apis/events.k8s.io/v1/namespaces/{namespace}/events");
    let modern = json!({
        "apiVersion": "events.k8s.io/v1", "kind": "Event", "metadata": {"name": "n1"},
        "eventTime": "2001-02-03T04:05:06.000000Z", "reportingController": "example.com/suite",
        "reportingInstance": "suite-1", "action": "Creating", "reason": "Created", "type": "Normal",
        "note": "made it", "regarding": reference,
    });
    s.post("event/modern", &new, &modern).await?;
    s.get("event/modern-as-core", &format!("{path}/n1")).await?;
    s.get("event/core-as-modern", &format!("{new}/e1")).await?;
    for (what, change) in [
        ("no-time", json!({"eventTime": null})),
        ("no-action", json!({"action": null})),
        ("no-reason", json!({"reason": null})),
        ("no-controller", json!({"reportingController": null})),
        ("no-instance", json!({"reportingInstance": null})),
        ("long-note", json!({"note": "x".repeat(1025)})),
        ("odd-type", json!({"type": "Odd"})),
        (
            "bad-controller",
            json!({"reportingController": "not good!"}),
        ),
    ] {
        let body = with(
            with(
                modern.clone(),
                &json!({"metadata": {"name": format!("n-{what}")}}),
            ),
            &change,
        );
        s.post(&format!("event/modern-{what}"), &new, &body).await?;
    }
    s.merge(
        "event/modern-series",
        &format!("{new}/n1"),
        &json!({"series": {"count": 2, "lastObservedTime": "2001-02-03T04:05:09.000000Z"}}),
    )
    .await?;
    s.get(
        "event/modern-by-subject",
        &format!("{new}?fieldSelector=regarding.name%3Dsubject"),
    )
    .await?;
    s.delete("event/delete", &format!("{path}/e1")).await?;
    Ok(())
}

async fn namespaces(s: &mut Session) -> anyhow::Result<()> {
    let path = "/api/v1/namespaces";
    let namespace =
        |name: &str| json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
    s.post("namespace/create", path, &namespace("extra"))
        .await?;
    s.post("namespace/again", path, &namespace("extra")).await?;
    s.post("namespace/bad-name", path, &namespace("has.dots"))
        .await?;
    s.post("namespace/long-name", path, &namespace(&"n".repeat(64)))
        .await?;
    s.get("namespace/get", "/api/v1/namespaces/extra").await?;
    s.get("namespace/default", "/api/v1/namespaces/default")
        .await?;
    s.get("namespace/missing", "/api/v1/namespaces/nowhere")
        .await?;
    s.get(
        "namespace/by-name",
        "/api/v1/namespaces?fieldSelector=metadata.name%3Dextra",
    )
    .await?;
    s.get(
        "namespace/by-label",
        "/api/v1/namespaces?labelSelector=kubernetes.io/metadata.name%3Dextra",
    )
    .await?;
    s.merge(
        "namespace/label",
        "/api/v1/namespaces/extra",
        &json!({"metadata": {"labels": {"a": "b"}}}),
    )
    .await?;
    s.merge(
        "namespace/name-label",
        "/api/v1/namespaces/extra",
        &json!({"metadata": {"labels": {"kubernetes.io/metadata.name": "x"}}}),
    )
    .await?;
    let table = Request::new(
        Method::GET,
        "/api/v1/namespaces?fieldSelector=metadata.name%3Dextra",
    )
    .header("accept", "application/json;as=Table;v=v1;g=meta.k8s.io");
    s.call("namespace/table", table).await?;
    s.delete("namespace/delete-default", "/api/v1/namespaces/default")
        .await?;
    s.delete("namespace/delete-collection", path).await?;
    s.delete("namespace/delete", "/api/v1/namespaces/extra")
        .await?;
    s.delete("namespace/delete-missing", "/api/v1/namespaces/nowhere")
        .await?;
    Ok(())
}

async fn who(s: &mut Session) -> anyhow::Result<()> {
    let review = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"});
    s.post(
        "who/self",
        "/apis/authentication.k8s.io/v1/selfsubjectreviews",
        &review,
    )
    .await?;
    let access = json!({
        "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {"verb": "list", "group": "crawl.example.com", "resource": "proxies"}},
    });
    s.post(
        "who/may",
        "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
        &access,
    )
    .await?;
    Ok(())
}

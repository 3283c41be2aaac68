//! What a real server refuses, prunes or warns of, and lets no client get away with.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests"
)]

mod support;

use axum::body::Body;
use egress_control_plane::ControlPlane;
use http::{Request, StatusCode};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use support::in_memory;
use tower::ServiceExt;

const PROXIES: &str = "/apis/crawl.example.com/v1alpha1/namespaces/default/proxies";
const SECRETS: &str = "/api/v1/namespaces/default/secrets";
const EVENTS: &str = "/apis/events.k8s.io/v1/namespaces/default/events";

struct Answered {
    code: u16,
    body: Value,
    text: String,
    warnings: Vec<String>,
}

impl Answered {
    fn message(&self) -> &str {
        self.body["message"].as_str().unwrap_or_default()
    }
}

async fn ask(plane: &ControlPlane, method: &str, path: &str, kind: &str, body: &str) -> Answered {
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header("content-type", kind)
        .body(Body::from(body.to_owned()))
        .unwrap();
    let response = plane.router().oneshot(request).await.unwrap();
    let code: StatusCode = response.status();
    let warnings = response
        .headers()
        .get_all("warning")
        .iter()
        .map(|v| v.to_str().unwrap().to_owned())
        .collect();
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    let text = String::from_utf8(bytes.to_vec()).unwrap();
    Answered {
        code: code.as_u16(),
        body: serde_json::from_str(&text).unwrap_or(Value::Null),
        text,
        warnings,
    }
}

async fn send(plane: &ControlPlane, method: &str, path: &str, body: &Value) -> Answered {
    ask(plane, method, path, "application/json", &body.to_string()).await
}

fn external(name: &str) -> Value {
    json!({
        "apiVersion": "crawl.example.com/v1alpha1", "kind": "Proxy", "metadata": {"name": name},
        "spec": {"mode": "External", "endpoint": {"host": "192.0.2.7"}},
    })
}

#[tokio::test]
async fn null_for_an_optional_property_is_the_same_as_nothing() {
    let (plane, _client) = in_memory().await;
    let mut object = external("a");
    object["spec"]["provider"] = Value::Null;
    object["spec"]["attributes"] = Value::Null;
    let made = send(&plane, "POST", PROXIES, &object).await;
    assert_eq!(made.code, 201, "{}", made.text);
    assert!(made.body["spec"].get("provider").is_none());
    object["metadata"]["name"] = "b".into();
    object["spec"] = Value::Null;
    let refused = send(&plane, "POST", PROXIES, &object).await;
    assert_eq!(refused.code, 422);
    assert!(
        refused.message().contains("spec: Required value"),
        "{}",
        refused.message()
    );
}

#[tokio::test]
async fn options_that_cannot_be_meant_delete_nothing() {
    let (plane, _client) = in_memory().await;
    send(&plane, "POST", PROXIES, &external("a")).await;
    let path = format!("{PROXIES}/a");
    for (options, code) in [
        (json!({"dryRun": ["Some"]}), 422),
        (
            json!({"propagationPolicy": "Background", "orphanDependents": false}),
            422,
        ),
        (json!({"apiVersion": "v1", "kind": "Pod"}), 400),
    ] {
        let refused = send(&plane, "DELETE", &path, &options).await;
        assert_eq!(refused.code, code, "{options}: {}", refused.text);
        assert_eq!(send(&plane, "GET", &path, &Value::Null).await.code, 200);
    }
}

#[tokio::test]
async fn an_object_says_what_it_is() {
    let (plane, _client) = in_memory().await;
    let made = send(&plane, "POST", PROXIES, &external("a")).await;
    assert_eq!(made.code, 201);
    for field in ["kind", "apiVersion"] {
        let mut object = external("b");
        object.as_object_mut().unwrap().remove(field);
        let refused = send(&plane, "POST", PROXIES, &object).await;
        assert_eq!(refused.code, 400, "{field}: {}", refused.text);
    }
    let mut nameless = made.body.clone();
    nameless["metadata"].as_object_mut().unwrap().remove("name");
    let refused = send(&plane, "PUT", &format!("{PROXIES}/a"), &nameless).await;
    assert_eq!(
        refused.message(),
        "the name of the object (a based on URL) was undeterminable: name must be provided"
    );
    let elsewhere = send(
        &plane,
        "POST",
        "/apis/crawl.example.com/v1alpha1/proxies",
        &external("c"),
    )
    .await;
    assert_eq!(
        (elsewhere.code, elsewhere.text.as_str()),
        (404, "404 page not found\n")
    );
}

#[tokio::test]
async fn owners_are_checked() {
    let (plane, _client) = in_memory().await;
    let owner = json!({"apiVersion": "v1", "kind": "K", "name": "n", "uid": "u"});
    let mut bad_version = owner.clone();
    bad_version["apiVersion"] = "a/b/c".into();
    let mut event = owner.clone();
    event["kind"] = "Event".into();
    let mut first = owner.clone();
    first["controller"] = true.into();
    let mut second = first.clone();
    second["uid"] = "v".into();
    let mut object = external("a");
    for owners in [
        json!([bad_version]),
        json!([event]),
        json!([first, second]),
        json!([{}]),
    ] {
        object["metadata"]["ownerReferences"] = owners;
        let refused = send(&plane, "POST", PROXIES, &object).await;
        assert_eq!(refused.code, 422, "{}", refused.text);
    }
    object["metadata"]["ownerReferences"] = json!([owner, owner]);
    let path = format!("{PROXIES}?dryRun=All");
    let kept = send(&plane, "POST", &path, &object).await;
    assert_eq!(kept.code, 201, "{}", kept.text);
    assert_eq!(
        kept.body["metadata"]["ownerReferences"],
        json!([owner]),
        "once"
    );
    assert!(kept.warnings[0].contains("duplicate UID(s) observed: u"));
}

#[tokio::test]
async fn secrets_and_events_keep_what_their_types_promise() {
    let (plane, _client) = in_memory().await;
    let secret = json!({"metadata": {"name": "s"}, "type": "kubernetes.io/tls"});
    let refused = send(&plane, "POST", SECRETS, &secret).await;
    assert_eq!(refused.code, 422, "{}", refused.text);
    assert!(
        refused
            .message()
            .contains("data[tls.crt]: Required value, data[tls.key]: Required value")
    );
    let event = json!({
        "apiVersion": "events.k8s.io/v1", "kind": "Event", "metadata": {"name": "e"},
        "eventTime": "2001-02-03T04:05:06.000000Z", "reportingController": "example.com/suite",
        "reportingInstance": "suite-1", "action": "Creating", "reason": "Created", "type": "Normal",
        "regarding": {"kind": "Proxy", "namespace": "default", "name": "a"},
    });
    for field in [
        "eventTime",
        "reportingController",
        "reportingInstance",
        "action",
        "reason",
        "type",
    ] {
        let mut lacking = event.clone();
        lacking.as_object_mut().unwrap().remove(field);
        let refused = send(&plane, "POST", EVENTS, &lacking).await;
        assert_eq!(refused.code, 422, "{field}: {}", refused.text);
    }
    assert_eq!(send(&plane, "POST", EVENTS, &event).await.code, 201);
}

#[tokio::test]
async fn an_apply_has_the_type_of_its_kind() {
    let (plane, _client) = in_memory().await;
    let path = format!("{PROXIES}/a?fieldManager=one");
    let mut object = external("a");
    object["spec"]["speed"] = 1.into();
    let apply = "application/apply-patch+yaml";
    let refused = ask(&plane, "PATCH", &path, apply, &object.to_string()).await;
    assert_eq!(refused.code, 500);
    assert_eq!(
        refused.message(),
        "failed to create typed patch object (/a; crawl.example.com/v1alpha1, Kind=Proxy): \
         .spec.speed: field not declared in schema"
    );
    assert!(refused.body.get("reason").is_none());
    let mut twice = external("a");
    twice["status"] = json!({"conditions": [{"type": "A"}, {"type": "A"}]});
    let refused = ask(&plane, "PATCH", &path, apply, &twice.to_string()).await;
    assert!(
        refused
            .message()
            .ends_with(".status.conditions: duplicate entries for key [type=\"A\"]"),
        "{}",
        refused.text
    );
    let mut revised = external("a");
    revised["metadata"]["resourceVersion"] = "7".into();
    let made = ask(&plane, "PATCH", &path, apply, &revised.to_string()).await;
    assert_eq!(made.code, 201, "{}", made.text);
}

#[tokio::test]
async fn patches_follow_the_rules_of_a_real_server() {
    let (plane, _client) = in_memory().await;
    send(&plane, "POST", PROXIES, &external("a")).await;
    let path = format!("{PROXIES}/a");
    let json_patch = "application/json-patch+json";
    let set = r#"[{"op":"replace","path":"/metadata/labels","value":{"a":"b"}}]"#;
    let patched = ask(&plane, "PATCH", &path, json_patch, set).await;
    assert_eq!(patched.body["metadata"]["labels"]["a"], "b");
    let missing = r#"[{"op":"remove","path":"/spec/none"}]"#;
    let refused = ask(&plane, "PATCH", &path, json_patch, missing).await;
    assert_eq!(
        (refused.code, refused.message()),
        (
            422,
            "the server rejected our request due to an error in our request"
        )
    );
    let merge = "application/merge-patch+json";
    let twice = r#"{"spec":{"port":1,"port":2}}"#;
    let patched = ask(&plane, "PATCH", &path, merge, twice).await;
    assert_eq!(
        patched.warnings,
        [r#"299 - "duplicate field \"spec.port\"""#]
    );
    let forced = format!("{path}?force=true");
    let refused = ask(&plane, "PATCH", &forced, merge, "{}").await;
    assert!(
        refused
            .message()
            .contains("force: Forbidden: may not be specified")
    );
    let kind = ask(&plane, "PATCH", &path, merge, r#"{"metadata":null}"#).await;
    assert_eq!(kind.code, 400, "{}", kind.text);
}

#[tokio::test]
async fn warnings_come_with_a_refusal_too() {
    let (plane, _client) = in_memory().await;
    let mut object = external("a");
    object["spec"]["speed"] = 1.into();
    object["spec"]["port"] = 0.into();
    let refused = send(&plane, "POST", PROXIES, &object).await;
    assert_eq!(refused.code, 422);
    assert_eq!(
        refused.warnings,
        [r#"299 - "unknown field \"spec.speed\"""#]
    );
}

#[tokio::test]
async fn options_of_lists_are_checked() {
    let (plane, _client) = in_memory().await;
    for name in ["a", "b"] {
        send(&plane, "POST", PROXIES, &external(name)).await;
    }
    for (query, code) in [
        ("sendInitialEvents=true", 422),
        ("resourceVersionMatch=Exact", 422),
        ("watch=true&resourceVersionMatch=Exact&continue=x", 422),
        ("resourceVersion=abc", 400),
        ("limit=-1", 200),
    ] {
        let answered = send(&plane, "GET", &format!("{PROXIES}?{query}"), &Value::Null).await;
        assert_eq!(answered.code, code, "{query}: {}", answered.text);
    }
    let any = format!("{PROXIES}?limit=1&resourceVersion=0");
    let whole = send(&plane, "GET", &any, &Value::Null).await;
    assert_eq!(whole.body["items"].as_array().map(Vec::len), Some(2));
}

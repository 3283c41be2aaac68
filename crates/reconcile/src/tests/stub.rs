//! As much of the Kubernetes API as one Proxy's reconcile needs, in a few microseconds a call, so
//! that the random test can run many sequences. The embedded control plane serves all other tests.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{Method, StatusCode, Uri};
use axum::response::Response;
use serde_json::{Value, json};

#[derive(Default)]
struct Objects {
    by_name: BTreeMap<String, Value>,
    version: u64,
}

type Shared = Arc<Mutex<Objects>>;

pub(crate) fn router() -> Router {
    Router::new().fallback(serve).with_state(Shared::default())
}

fn answer(code: StatusCode, body: &Value) -> Response {
    Response::builder()
        .status(code)
        .header("content-type", "application/json")
        .body(Body::from(body.to_string()))
        .unwrap()
}

fn failure(code: StatusCode, reason: &str) -> Response {
    let body = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure",
        "code": code.as_u16(), "reason": reason, "message": reason,
    });
    answer(code, &body)
}

fn merge(into: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *into = patch.clone();
        return;
    };
    if !into.is_object() {
        *into = json!({});
    }
    for (key, value) in patch {
        if value.is_null() {
            into.as_object_mut().unwrap().remove(key);
        } else {
            merge(&mut into[key], value);
        }
    }
}

async fn serve(State(shared): State<Shared>, method: Method, uri: Uri, body: Bytes) -> Response {
    let mut objects = shared.lock().unwrap();
    let path = uri
        .path()
        .trim_start_matches("/apis/crawl.example.com/v1alpha1/");
    let path = path.trim_start_matches("namespaces/default/");
    let mut parts = path
        .trim_start_matches("proxies")
        .trim_start_matches('/')
        .split('/');
    let name = parts.next().unwrap_or_default().to_owned();
    let status_only = parts.next() == Some("status");
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    if !path.starts_with("proxies") {
        // Events.
        return answer(StatusCode::CREATED, &body);
    }
    match (method, name.is_empty()) {
        (Method::GET, true) => {
            let items: Vec<_> = objects.by_name.values().cloned().collect();
            let version = objects.version.to_string();
            answer(
                StatusCode::OK,
                &json!({
                    "kind": "ProxyList", "apiVersion": "crawl.example.com/v1alpha1",
                    "metadata": {"resourceVersion": version}, "items": items,
                }),
            )
        }
        (Method::POST, _) => {
            objects.version += 1;
            let version = objects.version;
            let mut object = body;
            object.as_object_mut().unwrap().remove("status");
            merge(
                &mut object["metadata"],
                &json!({
                    "uid": format!("uid-{version}"), "generation": 1,
                    "resourceVersion": version.to_string(),
                    "creationTimestamp": "2026-01-01T00:00:00Z",
                }),
            );
            let name = object["metadata"]["name"].as_str().unwrap().to_owned();
            objects.by_name.insert(name, object.clone());
            answer(StatusCode::CREATED, &object)
        }
        (method, _) => {
            let Some(old) = objects.by_name.get(&name).cloned() else {
                return failure(StatusCode::NOT_FOUND, "NotFound");
            };
            let mut new = old.clone();
            match method {
                Method::GET => return answer(StatusCode::OK, &old),
                Method::DELETE => {
                    new["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:01Z");
                }
                Method::PATCH => {
                    let seen = &body["metadata"]["resourceVersion"];
                    if !seen.is_null() && *seen != old["metadata"]["resourceVersion"] {
                        return failure(StatusCode::CONFLICT, "Conflict");
                    }
                    merge(&mut new, &body);
                    if status_only {
                        let status = new["status"].clone();
                        new = old.clone();
                        new["status"] = status;
                    } else if let Some(status) = old.get("status") {
                        new["status"] = status.clone();
                    }
                }
                _ => return failure(StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowed"),
            }
            objects.version += 1;
            let deleting = |o: &Value| !o["metadata"]["deletionTimestamp"].is_null();
            if new["spec"] != old["spec"] || deleting(&new) != deleting(&old) {
                let generation = old["metadata"]["generation"].as_i64().unwrap();
                new["metadata"]["generation"] = json!(generation + 1);
            }
            new["metadata"]["resourceVersion"] = json!(objects.version.to_string());
            let held = new["metadata"]["finalizers"]
                .as_array()
                .is_some_and(|f| !f.is_empty());
            if deleting(&new) && !held {
                objects.by_name.remove(&name);
            } else {
                objects.by_name.insert(name, new.clone());
            }
            answer(StatusCode::OK, &new)
        }
    }
}

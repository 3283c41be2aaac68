//! What a client learns before it asks for objects.

use reqwest::Method;
use serde_json::{Value, json};

use super::Session;
use crate::client::Request;

const GROUP: &str = "crawl.example.com";
/// The kinds of the core group that the embedded server has.
const CORE: [&str; 4] = ["configmaps", "events", "namespaces", "secrets"];

pub async fn ask(s: &mut Session) -> anyhow::Result<()> {
    health(s).await?;
    plain(s).await?;
    aggregated(s).await?;
    openapi(s).await?;
    missing(s).await?;
    kubectl(s).await
}

async fn health(s: &mut Session) -> anyhow::Result<()> {
    for path in ["/livez", "/readyz", "/healthz"] {
        s.get(&format!("health{path}"), path).await?;
    }
    let keys = |body: Value| {
        let keys: Vec<String> = body
            .as_object()
            .map(|map| map.keys().cloned().collect())
            .unwrap_or_default();
        json!({"keys": keys, "major": body["major"], "minor": body["minor"]})
    };
    s.call_with("version", Request::new(Method::GET, "/version"), keys)
        .await?;
    Ok(())
}

/// Only the entry of our group.
fn our_group(mut body: Value) -> Value {
    for list in ["groups", "items"] {
        if let Some(list) = body.get_mut(list).and_then(Value::as_array_mut) {
            list.retain(|group| group["name"] == GROUP || group["metadata"]["name"] == GROUP);
        }
    }
    body
}

/// Only the resources that both have.
fn shared_core(mut body: Value) -> Value {
    let keep = |resource: &Value| {
        let name = resource["name"]
            .as_str()
            .or(resource["resource"].as_str())
            .unwrap_or_default();
        CORE.contains(&name)
    };
    if let Some(list) = body.get_mut("resources").and_then(Value::as_array_mut) {
        list.retain(keep);
        list.sort_by_key(|resource| resource["name"].to_string());
    }
    if let Some(groups) = body.get_mut("items").and_then(Value::as_array_mut) {
        for version in groups
            .iter_mut()
            .filter_map(|g| g["versions"].as_array_mut())
            .flatten()
        {
            if let Some(list) = version.get_mut("resources").and_then(Value::as_array_mut) {
                list.retain(keep);
                list.sort_by_key(|resource| resource["resource"].to_string());
            }
        }
    }
    body
}

async fn plain(s: &mut Session) -> anyhow::Result<()> {
    s.get("plain/api", "/api").await?;
    s.call_with("plain/apis", Request::new(Method::GET, "/apis"), our_group)
        .await?;
    s.get("plain/group", "/apis/crawl.example.com").await?;
    s.get("plain/version", "/apis/crawl.example.com/v1alpha1")
        .await?;
    s.call_with(
        "plain/core",
        Request::new(Method::GET, "/api/v1"),
        shared_core,
    )
    .await?;
    Ok(())
}

async fn aggregated(s: &mut Session) -> anyhow::Result<()> {
    let accept =
        "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,application/json";
    let request = |path: &str| Request::new(Method::GET, path).header("accept", accept);
    s.call_with("aggregated/apis", request("/apis"), our_group)
        .await?;
    s.call_with("aggregated/api", request("/api"), shared_core)
        .await?;
    Ok(())
}

async fn openapi(s: &mut Session) -> anyhow::Result<()> {
    let of_group = |body: Value| {
        let paths: Vec<String> = body["paths"]
            .as_object()
            .map(|map| {
                map.keys()
                    .filter(|key| key.contains(GROUP))
                    .cloned()
                    .collect()
            })
            .unwrap_or_default();
        json!({"paths": paths})
    };
    s.call_with(
        "openapi/index",
        Request::new(Method::GET, "/openapi/v3"),
        of_group,
    )
    .await?;
    let document = "/openapi/v3/apis/crawl.example.com/v1alpha1";
    let schemas = |body: Value| {
        json!({
            "proxy": body["components"]["schemas"]["com.example.crawl.v1alpha1.Proxy"],
            "list": body["components"]["schemas"]["com.example.crawl.v1alpha1.ProxyList"],
        })
    };
    s.call_with(
        "openapi/schemas",
        Request::new(Method::GET, document),
        schemas,
    )
    .await?;
    let paths = |body: Value| {
        let mut found = serde_json::Map::new();
        for (path, item) in body["paths"].as_object().into_iter().flatten() {
            for (verb, operation) in item.as_object().into_iter().flatten() {
                if !operation.is_object() {
                    continue;
                }
                let mut parameters: Vec<&str> = operation["parameters"]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .filter_map(|parameter| parameter["name"].as_str())
                    .collect();
                parameters.sort_unstable();
                found.insert(
                    format!("{verb} {path}"),
                    json!({
                        "action": operation["x-kubernetes-action"],
                        "kind": operation["x-kubernetes-group-version-kind"],
                        "parameters": parameters,
                    }),
                );
            }
        }
        Value::Object(found)
    };
    s.call_with("openapi/paths", Request::new(Method::GET, document), paths)
        .await?;
    Ok(())
}

async fn missing(s: &mut Session) -> anyhow::Result<()> {
    for (what, path) in [
        ("path", "/nothing"),
        ("group", "/apis/nothing.example.com"),
        ("group-version", "/apis/nothing.example.com/v1"),
        ("version", "/apis/crawl.example.com/v9"),
        ("version-objects", "/apis/crawl.example.com/v9/proxies"),
        ("resource", "/apis/crawl.example.com/v1alpha1/nothings"),
        (
            "resource-in-namespace",
            "/apis/crawl.example.com/v1alpha1/namespaces/default/nothings",
        ),
        ("core-resource", "/api/v1/nothings"),
        (
            "subresource",
            "/apis/crawl.example.com/v1alpha1/namespaces/default/proxies/a/scale",
        ),
    ] {
        s.get(&format!("missing/{what}"), path).await?;
    }
    Ok(())
}

async fn kubectl(s: &mut Session) -> anyhow::Result<()> {
    for (what, args) in [
        (
            "api-resources",
            &["api-resources", "--api-group=crawl.example.com"][..],
        ),
        (
            "api-resources-wide",
            &[
                "api-resources",
                "--api-group=crawl.example.com",
                "-o",
                "wide",
            ],
        ),
        (
            "api-resources-category",
            &["api-resources", "--categories=crawl", "--no-headers"],
        ),
        ("explain", &["explain", "px"]),
        ("explain-spec", &["explain", "proxies.spec"]),
        ("explain-field", &["explain", "px.spec.healthCheck.url"]),
        ("explain-recursive", &["explain", "px", "--recursive"]),
        ("explain-missing", &["explain", "px.spec.nothing"]),
        ("explain-secret", &["explain", "secret.data"]),
        ("unknown-kind", &["get", "nothings"]),
    ] {
        s.kubectl(&format!("kubectl/{what}"), args, None).await?;
    }
    Ok(())
}

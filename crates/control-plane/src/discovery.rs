//! Discovery: which groups, versions and resources there are, plain and aggregated, and `/version`.

use axum::response::{IntoResponse, Response};
use http::header::{ACCEPT, CONTENT_TYPE};
use http::{HeaderMap, StatusCode};
use serde_json::{Value, json};

use crate::error::{ApiError, ApiResult};
use crate::handlers::encode;
use crate::registry::Kind;
use crate::request::Encoding;
use crate::server::Server;

/// The Kubernetes whose API this is, as far as it is served; `+` marks whose it is.
const VERSION: &str = "v1.36.0+egress";
const AGGREGATED: &str = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";
const VERBS: &[&str] = &[
    "create",
    "delete",
    "deletecollection",
    "get",
    "list",
    "patch",
    "update",
    "watch",
];

pub(crate) fn answer(
    server: &Server,
    segments: &[&str],
    headers: &HeaderMap,
) -> ApiResult<Response> {
    let value = match segments {
        [] => paths(server),
        ["version"] => version(),
        ["api" | "apis"] if wants_aggregated(headers) => {
            return Ok((
                StatusCode::OK,
                [(CONTENT_TYPE, AGGREGATED), (http::header::VARY, "Accept")],
                aggregated(server, segments == ["api"]).to_string(),
            )
                .into_response());
        }
        ["api"] => json!({
            "kind": "APIVersions",
            "versions": ["v1"],
            "serverAddressByClientCIDRs": [],
        }),
        ["apis"] => json!({
            "kind": "APIGroupList",
            "apiVersion": "v1",
            "groups": groups(server).into_iter().map(|(g, v)| group(&g, &v)).collect::<Vec<_>>(),
        }),
        ["apis", name] => {
            let (name, version) = groups(server)
                .into_iter()
                .find(|(g, _)| g == name)
                .ok_or_else(ApiError::no_such_path)?;
            let mut group = group(&name, &version);
            group["kind"] = "APIGroup".into();
            group["apiVersion"] = "v1".into();
            group
        }
        ["api", version] => resources(server, "", version)?,
        ["apis", group, version] => resources(server, group, version)?,
        _ => return Err(ApiError::no_such_path()),
    };
    Ok(encode(StatusCode::OK, &value, Encoding::Json))
}

fn wants_aggregated(headers: &HeaderMap) -> bool {
    headers
        .get(ACCEPT)
        .and_then(|v| v.to_str().ok())
        .is_some_and(|accept| {
            accept.split(',').any(|range| {
                range.trim().starts_with("application/json")
                    && range.contains("g=apidiscovery.k8s.io")
                    && range.contains("v=v2;")
                    && range.contains("as=APIGroupDiscoveryList")
            })
        })
}

fn version() -> Value {
    let (major, minor) = ("1", "36");
    json!({
        "major": major,
        "minor": minor,
        "gitVersion": VERSION,
        "gitCommit": "",
        "gitTreeState": "clean",
        "buildDate": "1970-01-01T00:00:00Z",
        "goVersion": "",
        "compiler": "rustc",
        "platform": format!("{}/{}", std::env::consts::OS, std::env::consts::ARCH),
    })
}

fn paths(server: &Server) -> Value {
    let mut paths = vec!["/api".to_owned(), "/api/v1".to_owned(), "/apis".to_owned()];
    for (group, version) in groups(server) {
        paths.push(format!("/apis/{group}"));
        paths.push(format!("/apis/{group}/{version}"));
    }
    paths.extend(["/healthz", "/livez", "/openapi/v3", "/readyz", "/version"].map(str::to_owned));
    json!({"paths": paths})
}

/// Named groups.
fn groups(server: &Server) -> Vec<(String, String)> {
    server
        .registry
        .groups()
        .into_iter()
        .filter(|(group, _)| !group.is_empty())
        .collect()
}

fn group(name: &str, version: &str) -> Value {
    let preferred = json!({"groupVersion": format!("{name}/{version}"), "version": version});
    json!({"name": name, "versions": [preferred.clone()], "preferredVersion": preferred})
}

fn resources(server: &Server, group: &str, version: &str) -> ApiResult<Value> {
    let mut resources = Vec::new();
    for kind in of(server, group, version) {
        let mut resource = json!({
            "name": kind.plural,
            "singularName": kind.singular,
            "namespaced": kind.namespaced,
            "kind": kind.kind,
            "verbs": verbs(kind),
        });
        if !kind.short_names.is_empty() {
            resource["shortNames"] = json!(kind.short_names);
        }
        if !kind.categories.is_empty() {
            resource["categories"] = json!(kind.categories);
        }
        resources.push(resource);
        if kind.status {
            resources.push(json!({
                "name": format!("{}/status", kind.plural),
                "singularName": "",
                "namespaced": kind.namespaced,
                "kind": kind.kind,
                "verbs": ["get", "patch", "update"],
            }));
        }
    }
    if resources.is_empty() {
        return Err(ApiError::no_such_path());
    }
    let group_version = if group.is_empty() {
        version.to_owned()
    } else {
        format!("{group}/{version}")
    };
    Ok(json!({
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": group_version,
        "resources": resources,
    }))
}

fn of<'a>(server: &'a Server, group: &'a str, version: &'a str) -> impl Iterator<Item = &'a Kind> {
    server
        .registry
        .iter()
        .map(|k| &**k)
        .filter(move |k| k.group == group && k.version == version)
}

/// The same in the order in which kube-apiserver lists those of custom resources.
const CUSTOM_VERBS: &[&str] = &[
    "delete",
    "deletecollection",
    "get",
    "list",
    "patch",
    "create",
    "update",
    "watch",
];

fn verbs(kind: &Kind) -> Vec<&'static str> {
    let all = if kind.custom { CUSTOM_VERBS } else { VERBS };
    all.iter()
        .copied()
        .filter(|v| *v != "deletecollection" || kind.namespaced || kind.custom)
        .collect()
}

fn aggregated(server: &Server, core: bool) -> Value {
    let groups: Vec<(String, String)> = server
        .registry
        .groups()
        .into_iter()
        .filter(|(group, _)| group.is_empty() == core)
        .collect();
    let items: Vec<Value> = groups
        .iter()
        .map(|(group, version)| {
            let resources: Vec<Value> = of(server, group, version)
                .map(aggregated_resource)
                .collect();
            let mut metadata = json!({});
            if !group.is_empty() {
                metadata["name"] = group.as_str().into();
            }
            json!({
                "metadata": metadata,
                "versions": [{"version": version, "resources": resources, "freshness": "Current"}],
            })
        })
        .collect();
    json!({
        "kind": "APIGroupDiscoveryList",
        "apiVersion": "apidiscovery.k8s.io/v2",
        "metadata": {},
        "items": items,
    })
}

fn aggregated_resource(kind: &Kind) -> Value {
    let response_kind = json!({"group": kind.group, "version": kind.version, "kind": kind.kind});
    let mut resource = json!({
        "resource": kind.plural,
        "responseKind": response_kind,
        "scope": if kind.namespaced { "Namespaced" } else { "Cluster" },
        "singularResource": kind.singular,
        "verbs": verbs(kind),
    });
    if !kind.short_names.is_empty() {
        resource["shortNames"] = json!(kind.short_names);
    }
    if !kind.categories.is_empty() {
        resource["categories"] = json!(kind.categories);
    }
    if kind.status {
        resource["subresources"] = json!([{
            "subresource": "status",
            "responseKind": response_kind,
            "verbs": ["get", "patch", "update"],
        }]);
    }
    resource
}

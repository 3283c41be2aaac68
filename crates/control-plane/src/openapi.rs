//! OpenAPI v3: what `kubectl explain` and kubectl's validation read.
//!
//! Generated when first asked for. A document is small: the schemas of one group's kinds and, for
//! each kind, the paths with the operations that kubectl looks for (`x-kubernetes-group-version-kind`
//! and the `fieldValidation` parameter on those that write; without it kubectl would fall back to
//! the protobuf form of OpenAPI v2, which is not served).

use std::collections::BTreeMap;

use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use data_encoding::HEXUPPER;
use http::StatusCode;
use http::header::{CONTENT_TYPE, ETAG};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::error::{ApiError, ApiResult};
use crate::kinds;
use crate::registry::{Kind, Source};
use crate::server::Server;

/// The documents by their path below `/openapi/v3/`, and their hashes.
pub(crate) struct Documents(BTreeMap<String, (Bytes, String)>);

pub(crate) fn answer(
    server: &Server,
    segments: &[&str],
    _query: Option<&str>,
) -> ApiResult<Response> {
    // v2 is answered by "not found": kubectl then does without.
    let ["openapi", "v3", rest @ ..] = segments else {
        return Err(ApiError::no_such_path());
    };
    let documents = server.documents.get_or_init(|| Documents::new(server));
    if rest.is_empty() {
        let paths: Map<String, Value> = documents
            .0
            .iter()
            .map(|(path, (_, hash))| {
                let url = format!("/openapi/v3/{path}?hash={hash}");
                (path.clone(), json!({"serverRelativeURL": url}))
            })
            .collect();
        return Ok(crate::handlers::encode(
            StatusCode::OK,
            &json!({"paths": paths}),
            crate::request::Encoding::Json,
        ));
    }
    let (bytes, hash) = documents
        .0
        .get(&rest.join("/"))
        .ok_or_else(ApiError::no_such_path)?;
    Ok((
        StatusCode::OK,
        [
            (CONTENT_TYPE, "application/json".to_owned()),
            (ETAG, format!("\"{hash}\"")),
        ],
        bytes.clone(),
    )
        .into_response())
}

impl Documents {
    fn new(server: &Server) -> Self {
        let documents = server
            .registry
            .groups()
            .into_iter()
            .map(|(group, version)| {
                let kinds: Vec<&Kind> = server
                    .registry
                    .iter()
                    .map(|k| &**k)
                    .filter(|k| k.group == group && k.version == version)
                    .collect();
                let path = if group.is_empty() {
                    format!("api/{version}")
                } else {
                    format!("apis/{group}/{version}")
                };
                let bytes = Bytes::from(document(&kinds).to_string());
                let hash = HEXUPPER.encode(&Sha256::digest(&bytes));
                (path, (bytes, hash))
            })
            .collect();
        Self(documents)
    }
}

fn document(kinds: &[&Kind]) -> Value {
    let mut types = vec![kinds::METADATA];
    for kind in kinds {
        if let Source::Generated(generate) = &kind.source {
            types.push(*generate);
        }
    }
    let (_, mut schemas) = kinds::definitions(&types);
    let mut paths = Map::new();
    for kind in kinds {
        let name = schema_name(kind);
        if let Source::Inline(schema) = &kind.source {
            schemas[&name] = custom_schema(schema);
        }
        schemas[&name]["x-kubernetes-group-version-kind"] = json!([gvk(kind)]);
        let list = format!("{name}List");
        schemas[&list] = json!({
            "description": format!("{} is a list of {}", kind.list_kind, kind.kind),
            "type": "object",
            "required": ["items"],
            "properties": {
                "apiVersion": {"type": "string"},
                "kind": {"type": "string"},
                "metadata": {"type": "object"},
                "items": {"type": "array", "items": {"$ref": reference(&name)}},
            },
            "x-kubernetes-group-version-kind": [{
                "group": kind.group, "version": kind.version, "kind": kind.list_kind,
            }],
        });
        add_paths(kind, &name, &list, &mut paths);
    }
    json!({
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": "v1.36.0"},
        "paths": paths,
        "components": {"schemas": schemas},
    })
}

/// A CRD's schema with what every object has.
fn custom_schema(schema: &Value) -> Value {
    let mut schema = schema.clone();
    schema["properties"]["apiVersion"] = json!({
        "description": "APIVersion defines the versioned schema of this representation of an object. Servers should convert recognized schemas to the latest internal value, and may reject unrecognized values. More info: https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md#resources",
        "type": "string",
    });
    schema["properties"]["kind"] = json!({
        "description": "Kind is a string value representing the REST resource this object represents. Servers may infer this from the endpoint the client submits requests to. Cannot be updated. In CamelCase. More info: https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md#types-kinds",
        "type": "string",
    });
    schema["properties"]["metadata"] = json!({
        "description": "Standard object's metadata. More info: https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md#metadata",
        "allOf": [{"$ref": reference("io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta")}],
    });
    schema
}

/// The group reversed, the version and the kind, as kube-apiserver names schemas of CRDs.
fn schema_name(kind: &Kind) -> String {
    match &kind.source {
        Source::Generated(generate) => kinds::definitions(&[*generate]).0.pop().unwrap_or_default(),
        Source::Inline(_) => {
            let mut parts: Vec<&str> = kind.group.split('.').collect();
            parts.reverse();
            format!("{}.{}.{}", parts.join("."), kind.version, kind.kind)
        }
    }
}

fn reference(name: &str) -> String {
    format!("#/components/schemas/{name}")
}

fn gvk(kind: &Kind) -> Value {
    json!({"group": kind.group, "version": kind.version, "kind": kind.kind})
}

fn add_paths(kind: &Kind, name: &str, list: &str, paths: &mut Map<String, Value>) {
    let base = if kind.group.is_empty() {
        format!("/api/{}", kind.version)
    } else {
        format!("/apis/{}/{}", kind.group, kind.version)
    };
    let collection = if kind.namespaced {
        format!("{base}/namespaces/{{namespace}}/{}", kind.plural)
    } else {
        format!("{base}/{}", kind.plural)
    };
    let operation = |action: &str, writes: bool, body: Option<&[&str]>, answer: &str| {
        let mut parameters = Vec::new();
        if writes {
            for (parameter, description) in [
                (
                    "dryRun",
                    "When present, indicates that modifications should not be persisted. Valid values are: - All: all dry run stages will be processed",
                ),
                (
                    "fieldManager",
                    "The name associated with the actor or entity that is making these changes.",
                ),
                (
                    "fieldValidation",
                    "Instructs the server on how to handle objects in the request containing unknown or duplicate fields. Valid values are: Ignore, Warn, Strict.",
                ),
            ] {
                parameters.push(json!({
                    "name": parameter, "in": "query", "description": description,
                    "schema": {"type": "string", "uniqueItems": true},
                }));
            }
        }
        let schema = json!({"schema": {"$ref": reference(answer)}});
        let mut operation = json!({
            "x-kubernetes-action": action,
            "x-kubernetes-group-version-kind": gvk(kind),
            "parameters": parameters,
            "responses": {"200": {"description": "OK", "content": {"application/json": schema}}},
        });
        if let Some(types) = body {
            let content: Map<String, Value> = types
                .iter()
                .map(|t| {
                    let schema = if t.contains("patch") {
                        json!({"schema": {"type": "object"}})
                    } else {
                        json!({"schema": {"$ref": reference(name)}})
                    };
                    ((*t).to_owned(), schema)
                })
                .collect();
            operation["requestBody"] = json!({"required": true, "content": content});
        }
        operation
    };
    let namespace = json!({
        "name": "namespace", "in": "path", "required": true,
        "description": "object name and auth scope, such as for teams and projects",
        "schema": {"type": "string", "uniqueItems": true},
    });
    let own_name = json!({
        "name": "name", "in": "path", "required": true,
        "description": format!("name of the {}", kind.kind),
        "schema": {"type": "string", "uniqueItems": true},
    });
    let scope = if kind.namespaced {
        vec![namespace]
    } else {
        Vec::new()
    };
    let whole: &[&str] = &["application/json", "application/yaml"];
    let patches: &[&str] = if kind.strategy.strategic_patch {
        &[
            "application/json-patch+json",
            "application/merge-patch+json",
            "application/strategic-merge-patch+json",
            "application/apply-patch+yaml",
        ]
    } else {
        &[
            "application/json-patch+json",
            "application/merge-patch+json",
            "application/apply-patch+yaml",
        ]
    };
    if kind.namespaced {
        paths.insert(
            format!("{base}/{}", kind.plural),
            json!({"get": operation("list", false, None, list)}),
        );
    }
    paths.insert(
        collection.clone(),
        json!({
            "parameters": scope,
            "get": operation("list", false, None, list),
            "post": operation("post", true, Some(whole), name),
            "delete": operation("deletecollection", true, None, list),
        }),
    );
    let mut one_scope = scope;
    one_scope.push(own_name);
    let item = json!({
        "parameters": one_scope,
        "get": operation("get", false, None, name),
        "put": operation("put", true, Some(whole), name),
        "patch": operation("patch", true, Some(patches), name),
        "delete": operation("delete", true, None, name),
    });
    if kind.status {
        let mut status = item.clone();
        if let Value::Object(map) = &mut status {
            map.remove("delete");
        }
        paths.insert(format!("{collection}/{{name}}/status"), status);
    }
    paths.insert(format!("{collection}/{{name}}"), item);
}

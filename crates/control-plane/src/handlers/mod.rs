//! One set of handlers over all kinds.

mod delete;
mod read;
mod watch;
mod write;

use std::sync::Arc;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt, Limited};
use serde_json::{Value, json};

use crate::decode::MAX_BODY;
use crate::error::{ApiError, ApiResult, warn};
use crate::meta;
use crate::registry::Kind;
use crate::request::{Answer, Encoding, Form, Path, Query, negotiate};
use crate::server::Server;
use crate::storage::{Key, Record, StoreError};
use crate::table::{self, IncludeObject};
use crate::{discovery, openapi};

pub(crate) use delete::{Propagation, mark, remove};

/// One request for a resource, taken apart.
pub(crate) struct Call<'a> {
    pub server: &'a Server,
    pub kind: &'a Arc<Kind>,
    pub path: Path,
    pub query: Query,
    pub headers: HeaderMap,
    pub answer: Answer,
}

/// Answers any request.
pub(crate) async fn handle(server: &Server, request: Request<Body>) -> Response {
    match route(server, request).await {
        Ok(response) => response,
        Err(error) => error.into_response(),
    }
}

async fn route(server: &Server, request: Request<Body>) -> ApiResult<Response> {
    let (parts, body) = request.into_parts();
    let path = parts.uri.path().trim_matches('/').to_owned();
    let segments: Vec<&str> = if path.is_empty() {
        Vec::new()
    } else {
        path.split('/').collect()
    };
    let get = parts.method == Method::GET || parts.method == Method::HEAD;
    let (group, version, rest) = match segments.as_slice() {
        ["api", version, rest @ ..] if !rest.is_empty() => ("", *version, rest),
        ["apis", group, version, rest @ ..] if !rest.is_empty() => (*group, *version, rest),
        ["livez" | "healthz", ..] | ["readyz", ..] if get => return Ok(health(server).await),
        _ if !get => return Err(ApiError::method_not_allowed_here()),
        ["openapi", ..] => return openapi::answer(server, &segments, parts.uri.query()),
        _ => {
            return match discovery::answer(server, &segments, &parts.headers) {
                Err(error) if error.code == 404 => Ok(page_not_found()),
                other => other,
            };
        }
    };
    let path = Path::parse(group, version, rest).ok_or_else(ApiError::no_such_path)?;
    let Some(kind) = server
        .registry
        .find(&path.group, &path.version, &path.plural)
    else {
        if path.group.is_empty() {
            return Err(ApiError::no_such_path());
        }
        return Ok(page_not_found());
    };
    // A cluster-scoped kind below a namespace, or an object of a namespaced kind without one.
    let misplaced = (path.namespace.is_some() && !kind.namespaced)
        || (path.namespace.is_none() && kind.namespaced && path.name.is_some());
    if misplaced {
        return Err(ApiError::no_such_path());
    }
    let call = Call {
        server,
        kind,
        answer: negotiate(&parts.headers)?,
        query: Query::parse(parts.uri.query()),
        headers: parts.headers,
        path,
    };
    call.dispatch(&parts.method, body).await
}

impl Call<'_> {
    async fn dispatch(&self, method: &Method, body: Body) -> ApiResult<Response> {
        let status = match self.path.subresource.as_deref() {
            None => false,
            Some("status") if self.kind.status => true,
            Some(_) => {
                return Err(match self.path.name.as_deref() {
                    Some(name) if self.kind.custom => ApiError::not_found(self.kind, name),
                    _ => ApiError::no_such_path(),
                });
            }
        };
        self.query.check_include(self.answer.form)?;
        let name = self.path.name.as_deref();
        match (method.as_str(), name) {
            ("GET" | "HEAD", Some(name)) => self.get(name).await,
            ("GET" | "HEAD", None) if self.query.flag("watch") => self.watch().await,
            ("GET" | "HEAD", None) => self.list().await,
            // What kube-apiserver does not route at all.
            ("POST" | "DELETE", None) if self.kind.namespaced && self.path.namespace.is_none() => {
                Ok(page_not_found())
            }
            // The object that is named is that of the body.
            ("POST", Some(_)) if self.kind.custom && !status => {
                self.create(&read_body(body).await?).await
            }
            ("POST", Some(_)) if status => Err(ApiError::method_not_allowed(self.kind, "create")),
            ("DELETE", Some(_)) if status => Err(ApiError::method_not_allowed(self.kind, "delete")),
            ("PUT" | "PATCH", None) if self.path.namespace.is_some() => {
                Err(ApiError::bad_request("name must be provided"))
            }
            ("POST", None) => self.create(&read_body(body).await?).await,
            ("PUT", Some(name)) => self.put(name, status, &read_body(body).await?).await,
            ("PATCH", Some(name)) => self.patch(name, status, &read_body(body).await?).await,
            ("DELETE", Some(name)) if !status => self.delete(name, &read_body(body).await?).await,
            ("DELETE", None) => self.delete_collection(&read_body(body).await?).await,
            _ => Err(ApiError::method_not_allowed_here()),
        }
    }

    /// The namespace of the path; empty for cluster-scoped kinds.
    fn namespace(&self) -> &str {
        self.path.namespace.as_deref().unwrap_or_default()
    }

    fn key(&self, name: &str) -> Key {
        Key {
            resource: Arc::clone(&self.kind.resource),
            namespace: self.namespace().to_owned(),
            name: name.to_owned(),
        }
    }

    /// A stored object in the form of the kind asked for.
    fn shown(&self, record: &Record) -> ApiResult<Value> {
        let mut object = record.object().map_err(internal)?;
        if let Some(view) = &self.kind.view {
            (view.show)(&mut object);
        }
        Ok(object)
    }

    /// One object, in the form that was asked for.
    fn reply(&self, code: StatusCode, object: Value, warnings: &[String]) -> Response {
        let shown = match self.answer.form {
            Form::Object => object,
            Form::Partial => table::partial(&object),
            Form::Table => {
                let revision = json!({"resourceVersion": meta::text(&object, "resourceVersion")});
                table::table(
                    self.kind,
                    std::iter::once(&object),
                    &revision,
                    self.query.include_object(),
                    self.server.now(),
                    true,
                )
            }
        };
        let mut response = encode(code, &shown, self.answer.encoding);
        warn(&mut response, warnings);
        response
    }

    fn include(&self) -> IncludeObject {
        self.query.include_object()
    }
}

/// What is not routed at all has no `Status`.
fn page_not_found() -> Response {
    (StatusCode::NOT_FOUND, "404 page not found\n").into_response()
}

/// Writes a value as JSON or YAML.
pub(crate) fn encode(code: StatusCode, value: &Value, encoding: Encoding) -> Response {
    let (content_type, text) = match encoding {
        // One line, ended, as Go's encoder writes it.
        Encoding::Json => ("application/json", format!("{value}\n")),
        // What JSON can say, YAML can.
        Encoding::Yaml => (
            "application/yaml",
            serde_saphyr::to_string(value).unwrap_or_else(|_| value.to_string()),
        ),
    };
    (
        code,
        [
            (CONTENT_TYPE, content_type),
            (CACHE_CONTROL, "no-cache, private"),
        ],
        text,
    )
        .into_response()
}

async fn read_body(body: Body) -> ApiResult<Bytes> {
    match Limited::new(body, MAX_BODY).collect().await {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) if error.is::<http_body_util::LengthLimitError>() => {
            Err(ApiError::too_large(MAX_BODY))
        }
        Err(error) => Err(ApiError::bad_request(format!(
            "the body could not be read: {error}"
        ))),
    }
}

async fn health(server: &Server) -> Response {
    let key = Key {
        resource: "namespaces".into(),
        namespace: String::new(),
        name: "default".to_owned(),
    };
    match server.store.get(&key).await {
        Ok(_) => (StatusCode::OK, "ok").into_response(),
        Err(error) => (
            StatusCode::INTERNAL_SERVER_ERROR,
            format!("the store does not answer: {error}"),
        )
            .into_response(),
    }
}

/// A fault of the store as an answer.
pub(crate) fn internal(error: StoreError) -> ApiError {
    match error {
        StoreError::Compacted { asked, oldest } => {
            ApiError::expired(format!("too old resource version: {asked} ({oldest})"))
        }
        StoreError::Future { asked, newest } => ApiError::too_large_resource_version(asked, newest),
        StoreError::Closed => ApiError::new(
            503,
            "ServiceUnavailable",
            "the control plane is shutting down",
        ),
        other => ApiError::internal(other),
    }
}

//! What goes wrong, as the `Status` object that a Kubernetes client expects.
//!
//! Reasons, codes and sentences are those of kube-apiserver
//! (`k8s.io/apimachinery/pkg/api/errors` and `.../util/validation/field`), because clients match on
//! them and `kubectl` prints them.

use std::fmt;

use axum::response::{IntoResponse, Response};
use http::StatusCode;
use serde_json::{Value, json};

use crate::registry::Kind;

/// Result of a request.
pub(crate) type ApiResult<T> = Result<T, ApiError>;

/// A failed request: a `metav1.Status`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ApiError {
    pub code: u16,
    pub reason: &'static str,
    pub message: String,
    pub details: Option<Box<Value>>,
    /// Only for 410 of a paged list: the token with which the client may go on.
    pub continue_token: Option<String>,
    /// `Warning` headers that go with the refusal.
    pub warnings: Vec<String>,
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for ApiError {}

impl ApiError {
    pub fn new(code: u16, reason: &'static str, message: impl Into<String>) -> Self {
        Self {
            code,
            reason,
            message: message.into(),
            details: None,
            continue_token: None,
            warnings: Vec::new(),
        }
    }

    /// What was noticed before the request was refused.
    pub fn with_warnings(mut self, warnings: &[String]) -> Self {
        self.warnings.extend_from_slice(warnings);
        self
    }

    /// A fault that kube-apiserver lets through untyped: code 500 and no reason.
    pub fn untyped(message: impl Into<String>) -> Self {
        Self::new(500, "", message)
    }

    /// A JSON patch that cannot be carried out; kube-apiserver does not say why.
    pub fn rejected() -> Self {
        Self::new(
            422,
            "Invalid",
            "the server rejected our request due to an error in our request",
        )
        .with_details(json!({}))
    }

    fn with_details(mut self, details: Value) -> Self {
        self.details = Some(Box::new(details));
        self
    }

    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(400, "BadRequest", message)
    }

    pub fn unauthorized() -> Self {
        Self::new(401, "Unauthorized", "Unauthorized")
    }

    pub fn not_found(kind: &Kind, name: &str) -> Self {
        Self::new(
            404,
            "NotFound",
            format!("{} \"{name}\" not found", kind.qualified_resource()),
        )
        .with_details(resource_details(kind, name))
    }

    /// A path that names nothing.
    pub fn no_such_path() -> Self {
        Self::new(
            404,
            "NotFound",
            "the server could not find the requested resource",
        )
        .with_details(json!({}))
    }

    pub fn namespace_not_found(namespace: &str) -> Self {
        Self::new(
            404,
            "NotFound",
            format!("namespaces \"{namespace}\" not found"),
        )
        .with_details(json!({"name": namespace, "kind": "namespaces"}))
    }

    pub fn method_not_allowed(kind: &Kind, action: &str) -> Self {
        Self::new(
            405,
            "MethodNotAllowed",
            format!(
                "{action} is not supported on resources of kind \"{}\"",
                kind.qualified_resource()
            ),
        )
        .with_details(group_kind(&kind.group, &kind.plural))
    }

    pub fn method_not_allowed_here() -> Self {
        Self::new(
            405,
            "MethodNotAllowed",
            "the server does not allow this method on the requested resource",
        )
    }

    pub fn not_acceptable(accepted: &str) -> Self {
        Self::new(
            406,
            "NotAcceptable",
            format!("only the following media types are accepted: {accepted}"),
        )
    }

    /// The metadata of one object was asked for, of a list.
    pub fn not_acceptable_list() -> Self {
        Self::new(
            406,
            "NotAcceptable",
            "you requested PartialObjectMetadata, but the requested object is a list (*unstructured.UnstructuredList)",
        )
    }

    pub fn unsupported_media_type(accepted: &str) -> Self {
        Self::new(
            415,
            "UnsupportedMediaType",
            format!(
                "the body of the request was in an unknown format - accepted media types include: {accepted}"
            ),
        )
    }

    pub fn already_exists(kind: &Kind, name: &str) -> Self {
        Self::new(
            409,
            "AlreadyExists",
            format!("{} \"{name}\" already exists", kind.qualified_resource()),
        )
        .with_details(resource_details(kind, name))
    }

    pub fn conflict(kind: &Kind, name: &str, because: impl fmt::Display) -> Self {
        Self::new(
            409,
            "Conflict",
            format!(
                "Operation cannot be fulfilled on {} \"{name}\": {because}",
                kind.qualified_resource()
            ),
        )
        .with_details(resource_details(kind, name))
    }

    pub fn modified(kind: &Kind, name: &str) -> Self {
        Self::conflict(
            kind,
            name,
            "the object has been modified; please apply your changes to the latest version and try again",
        )
    }

    /// Server-side apply met fields of other managers.
    pub fn apply_conflict(message: String, causes: &[Value]) -> Self {
        Self::new(409, "Conflict", message).with_details(json!({"causes": causes}))
    }

    pub fn forbidden(kind: &Kind, name: &str, because: &str) -> Self {
        Self::new(
            403,
            "Forbidden",
            format!(
                "{} \"{name}\" is forbidden: {because}",
                kind.qualified_resource()
            ),
        )
        .with_details(resource_details(kind, name))
    }

    pub fn namespace_terminating(kind: &Kind, name: &str, namespace: &str) -> Self {
        let mut error = Self::forbidden(
            kind,
            name,
            &format!(
                "unable to create new content in namespace {namespace} because it is being terminated"
            ),
        );
        if let Some(Value::Object(details)) = error.details.as_deref_mut() {
            details.insert(
                "causes".to_owned(),
                json!([{
                    "reason": "NamespaceTerminating",
                    "message": format!("namespace {namespace} is being terminated"),
                    "field": "metadata.namespace",
                }]),
            );
        }
        error
    }

    /// A precondition of a delete does not hold; kube-apiserver names the kind here, and not the
    /// resource.
    pub fn precondition(kind: &Kind, name: &str, because: impl fmt::Display) -> Self {
        let qualified = if kind.group.is_empty() {
            kind.kind.clone()
        } else {
            format!("{}.{}", kind.kind, kind.group)
        };
        let mut details = group_kind(&kind.group, &kind.kind);
        details["name"] = json!(name);
        Self::new(
            409,
            "Conflict",
            format!("Operation cannot be fulfilled on {qualified} \"{name}\": {because}"),
        )
        .with_details(details)
    }

    /// The object breaks its schema, its rules or the rules of metadata.
    pub fn invalid(group: &str, kind: &str, name: &str, faults: &[FieldError]) -> Self {
        let qualified = if group.is_empty() {
            kind.to_owned()
        } else {
            format!("{kind}.{group}")
        };
        let mut shown: Vec<String> = Vec::new();
        for fault in faults {
            let text = fault.to_string();
            if !shown.contains(&text) {
                shown.push(text);
            }
        }
        let all = match shown.as_slice() {
            [one] => one.clone(),
            many => format!("[{}]", many.join(", ")),
        };
        let causes: Vec<Value> = faults
            .iter()
            .map(|f| {
                let mut cause = serde_json::Map::new();
                cause.insert("reason".to_owned(), json!(f.kind.reason()));
                cause.insert("message".to_owned(), json!(f.body()));
                cause.insert("field".to_owned(), json!(f.shown_field()));
                Value::Object(cause)
            })
            .collect();
        let mut details = group_kind(group, kind);
        if let Value::Object(map) = &mut details {
            if !name.is_empty() {
                map.insert("name".to_owned(), json!(name));
            }
            map.insert("causes".to_owned(), Value::Array(causes));
        }
        Self::new(
            422,
            "Invalid",
            format!("{qualified} \"{name}\" is invalid: {all}"),
        )
        .with_details(details)
    }

    pub fn expired(message: impl Into<String>) -> Self {
        Self::new(410, "Expired", message)
    }

    pub fn too_large_resource_version(asked: u64, current: u64) -> Self {
        Self::new(
            504,
            "Timeout",
            format!("Timeout: Too large resource version: {asked}, current: {current}"),
        )
        .with_details(json!({
            "causes": [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}],
            "retryAfterSeconds": 1,
        }))
    }

    pub fn too_large(limit: usize) -> Self {
        Self::new(
            413,
            "RequestEntityTooLarge",
            format!("Request entity too large: limit is {limit}"),
        )
    }

    pub fn internal(error: impl fmt::Display) -> Self {
        let text = error.to_string();
        Self::new(
            500,
            "InternalError",
            format!("Internal error occurred: {text}"),
        )
        .with_details(json!({"causes": [{"message": text}]}))
    }

    /// The `Status` object.
    pub fn status(&self) -> Value {
        let mut metadata = serde_json::Map::new();
        if let Some(token) = &self.continue_token {
            metadata.insert("continue".to_owned(), json!(token));
        }
        let mut status = json!({
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": metadata,
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.code,
        });
        if let (true, Value::Object(map)) = (self.reason.is_empty(), &mut status) {
            map.remove("reason");
        }
        if let (Some(details), Value::Object(map)) = (&self.details, &mut status) {
            map.insert("details".to_owned(), (**details).clone());
        }
        status
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let code = StatusCode::from_u16(self.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        // Those without a reason are the client's fault, whatever their code says.
        if self.code >= 500 && self.code != 504 && !self.reason.is_empty() {
            tracing::error!(
                code = self.code,
                "control plane request failed: {}",
                self.message
            );
        }
        let mut response = (
            code,
            [
                (http::header::CONTENT_TYPE, "application/json"),
                (http::header::CACHE_CONTROL, "no-cache, private"),
            ],
            format!("{}\n", self.status()),
        )
            .into_response();
        warn(&mut response, &self.warnings);
        let wait = self
            .details
            .as_deref()
            .and_then(|d| d["retryAfterSeconds"].as_u64());
        if let Some(seconds) = wait {
            response
                .headers_mut()
                .insert(http::header::RETRY_AFTER, seconds.into());
        }
        response
    }
}

/// Adds `Warning` headers.
pub(crate) fn warn(response: &mut Response, warnings: &[String]) {
    for warning in warnings {
        if let Ok(value) = http::HeaderValue::from_str(&format!("299 - {warning:?}")) {
            response.headers_mut().append(http::header::WARNING, value);
        }
    }
}

fn group_kind(group: &str, kind: &str) -> Value {
    if group.is_empty() && kind.is_empty() {
        json!({})
    } else if group.is_empty() {
        json!({"kind": kind})
    } else {
        json!({"group": group, "kind": kind})
    }
}

pub(crate) fn resource_details(kind: &Kind, name: &str) -> Value {
    let mut details = group_kind(&kind.group, &kind.plural);
    if let (false, Value::Object(map)) = (name.is_empty(), &mut details) {
        map.insert("name".to_owned(), json!(name));
    }
    details
}

/// What kind of fault a field has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    Required,
    Invalid,
    TypeInvalid,
    NotSupported,
    Forbidden,
    Duplicate,
    TooLong,
    TooMany,
}

impl Fault {
    fn reason(self) -> &'static str {
        match self {
            Self::Required => "FieldValueRequired",
            Self::Invalid => "FieldValueInvalid",
            Self::TypeInvalid => "FieldValueTypeInvalid",
            Self::NotSupported => "FieldValueNotSupported",
            Self::Forbidden => "FieldValueForbidden",
            Self::Duplicate => "FieldValueDuplicate",
            Self::TooLong => "FieldValueTooLong",
            Self::TooMany => "FieldValueTooMany",
        }
    }

    fn title(self) -> &'static str {
        match self {
            Self::Required => "Required value",
            Self::Invalid | Self::TypeInvalid => "Invalid value",
            Self::NotSupported => "Unsupported value",
            Self::Forbidden => "Forbidden",
            Self::Duplicate => "Duplicate value",
            Self::TooLong => "Too long",
            Self::TooMany => "Too many",
        }
    }

    fn shows_value(self) -> bool {
        !matches!(self, Self::Required | Self::Forbidden | Self::TooLong)
    }

    /// Faults after which CEL rules are not run: they could not be evaluated sensibly.
    pub fn blocks_rules(self) -> bool {
        matches!(
            self,
            Self::NotSupported | Self::Required | Self::TooLong | Self::TooMany | Self::TypeInvalid
        )
    }
}

/// One fault of one field.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct FieldError {
    pub field: String,
    pub kind: Fault,
    /// None: not shown.
    pub value: Option<Value>,
    pub detail: String,
}

impl FieldError {
    pub fn new(
        field: impl Into<String>,
        kind: Fault,
        value: Option<Value>,
        detail: impl Into<String>,
    ) -> Self {
        Self {
            field: field.into(),
            kind,
            value,
            detail: detail.into(),
        }
    }

    pub fn required(field: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::new(field, Fault::Required, None, detail)
    }

    pub fn invalid(
        field: impl Into<String>,
        value: impl Into<Value>,
        detail: impl Into<String>,
    ) -> Self {
        Self::new(field, Fault::Invalid, Some(value.into()), detail)
    }

    pub fn forbidden(field: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::new(field, Fault::Forbidden, None, detail)
    }

    fn shown_field(&self) -> &str {
        if self.field.is_empty() {
            "<nil>"
        } else {
            &self.field
        }
    }

    fn body(&self) -> String {
        let mut body = self.kind.title().to_owned();
        if let (true, Some(value)) = (self.kind.shows_value(), &self.value) {
            body.push_str(": ");
            body.push_str(&value.to_string());
        }
        if !self.detail.is_empty() {
            body.push_str(": ");
            body.push_str(&self.detail);
        }
        body
    }
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.shown_field(), self.body())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_object_reads_as_a_real_server_says_it() {
        let one = FieldError::invalid(
            "spec.port",
            0,
            "spec.port in body should be greater than or equal to 1",
        );
        let error = ApiError::invalid(
            "crawl.example.com",
            "Proxy",
            "a",
            std::slice::from_ref(&one),
        );
        assert_eq!(
            error.message,
            "Proxy.crawl.example.com \"a\" is invalid: spec.port: Invalid value: 0: \
             spec.port in body should be greater than or equal to 1"
        );
        let status = error.status();
        assert_eq!(status["code"], 422);
        assert_eq!(status["details"]["causes"][0]["field"], "spec.port");
        assert_eq!(
            status["details"]["causes"][0]["message"],
            "Invalid value: 0: spec.port in body should be greater than or equal to 1"
        );
        let two = ApiError::invalid("", "Secret", "a", &[one, FieldError::required("x", "")]);
        assert!(
            two.message.ends_with(", x: Required value]"),
            "{}",
            two.message
        );
        assert!(two.message.starts_with("Secret \"a\" is invalid: ["));
    }
}

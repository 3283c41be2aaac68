//! Refusals, all of one shape.

use axum::Json;
use axum::response::{IntoResponse, Response};
use egress_core::target::BadTarget;
use egress_lease::{AcquireError, NoMatch, RenewError, ReportError, StoreFailure};
use http::header::{ALLOW, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{HeaderValue, StatusCode};
use serde::Serialize;
use utoipa::ToSchema;

/// Every refusal.
#[derive(Debug, Serialize, ToSchema)]
pub struct ErrorBody {
    /// For programs; never changes.
    #[schema(example = "not_found")]
    pub error: &'static str,
    /// For people; may change.
    #[schema(example = "no proxy default/p1")]
    pub message: String,
}

/// Why no proxy could be leased: the considered proxies (their selector matches, they are not
/// being deleted) by the first reason that excluded each.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct NoMatchBody {
    #[schema(example = "no_match")]
    pub error: &'static str,
    pub message: String,
    pub considered: usize,
    pub at_capacity: usize,
    pub in_cooldown: usize,
    pub unhealthy: usize,
}

/// Why a request is refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ApiError {
    #[error("give the token as \"Authorization: Bearer TOKEN\"")]
    Unauthorized,
    #[error("{0}")]
    NotFound(String),
    #[error("this path takes another method, see Allow")]
    MethodNotAllowed,
    #[error("the body is over {0} bytes")]
    BodyTooLarge(usize),
    #[error("the body did not arrive in time")]
    BodyTimeout,
    #[error("send the body as \"Content-Type: application/json\"")]
    UnsupportedMediaType,
    #[error("{0}")]
    InvalidBody(String),
    #[error("{0}")]
    InvalidQuery(String),
    #[error(transparent)]
    InvalidTarget(#[from] BadTarget),
    #[error("{0}")]
    InvalidTtl(String),
    #[error("result is {0}: give \"ok\", \"rate_limited\" or \"banned\"")]
    InvalidResult(String),
    #[error("Idempotency-Key must be one header of 1 to 255 visible ASCII characters")]
    InvalidIdempotencyKey,
    #[error("this Idempotency-Key belongs to a lease that was asked for with another body")]
    IdempotencyMismatch,
    #[error("{}", no_match(.0))]
    NoMatch(NoMatch),
    #[error("no lease {0}: it never was, was given back, or ended too long ago")]
    UnknownLease(String),
    #[error("the lease has expired: acquire another")]
    Expired,
    #[error("not ready yet: {0}")]
    NotReady(String),
    #[error("the operator is stopping and grants no new leases")]
    ShuttingDown,
    #[error("{0} clients are watching already")]
    TooManyWatchers(usize),
    #[error("{0}; nothing was changed")]
    Store(#[from] StoreFailure),
    #[error("an internal error; the operator's log tells more")]
    Internal,
}

fn no_match(counts: &NoMatch) -> String {
    if counts.considered == 0 {
        return "no proxy matches the selector".to_owned();
    }
    format!(
        "none of the {} proxies that match the selector can be leased: {} unhealthy, {} at \
         capacity, {} in cooldown",
        counts.considered, counts.unhealthy, counts.at_capacity, counts.in_cooldown
    )
}

impl ApiError {
    fn status_and_code(&self) -> (StatusCode, &'static str) {
        match self {
            Self::Unauthorized => (StatusCode::UNAUTHORIZED, "unauthorized"),
            Self::NotFound(_) => (StatusCode::NOT_FOUND, "not_found"),
            Self::MethodNotAllowed => (StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed"),
            Self::BodyTooLarge(_) => (StatusCode::PAYLOAD_TOO_LARGE, "body_too_large"),
            Self::BodyTimeout => (StatusCode::REQUEST_TIMEOUT, "body_timeout"),
            Self::UnsupportedMediaType => {
                (StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type")
            }
            Self::InvalidBody(_) => (StatusCode::BAD_REQUEST, "invalid_body"),
            Self::InvalidQuery(_) => (StatusCode::BAD_REQUEST, "invalid_query"),
            Self::InvalidTarget(_) => (StatusCode::BAD_REQUEST, "invalid_target"),
            Self::InvalidTtl(_) => (StatusCode::BAD_REQUEST, "invalid_ttl"),
            Self::InvalidResult(_) => (StatusCode::BAD_REQUEST, "invalid_result"),
            Self::InvalidIdempotencyKey => (StatusCode::BAD_REQUEST, "invalid_idempotency_key"),
            Self::IdempotencyMismatch => (StatusCode::UNPROCESSABLE_ENTITY, "idempotency_mismatch"),
            Self::NoMatch(_) => (StatusCode::CONFLICT, "no_match"),
            Self::UnknownLease(_) => (StatusCode::NOT_FOUND, "unknown_lease"),
            Self::Expired => (StatusCode::CONFLICT, "expired"),
            Self::NotReady(_) => (StatusCode::SERVICE_UNAVAILABLE, "not_ready"),
            Self::ShuttingDown => (StatusCode::SERVICE_UNAVAILABLE, "shutting_down"),
            Self::TooManyWatchers(_) => (StatusCode::SERVICE_UNAVAILABLE, "too_many_watchers"),
            Self::Store(_) => (StatusCode::SERVICE_UNAVAILABLE, "lease_store_failed"),
            Self::Internal => (StatusCode::INTERNAL_SERVER_ERROR, "internal"),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let (status, error) = self.status_and_code();
        let message = self.to_string();
        let mut response = match &self {
            Self::NoMatch(counts) => Json(NoMatchBody {
                error,
                message,
                considered: counts.considered,
                at_capacity: counts.at_capacity,
                in_cooldown: counts.in_cooldown,
                unhealthy: counts.unhealthy,
            })
            .into_response(),
            _ => Json(ErrorBody { error, message }).into_response(),
        };
        *response.status_mut() = status;
        let headers = response.headers_mut();
        if status == StatusCode::UNAUTHORIZED {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if status == StatusCode::SERVICE_UNAVAILABLE {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        debug_assert!(!headers.contains_key(ALLOW), "the router adds it");
        response
    }
}

impl From<AcquireError> for ApiError {
    fn from(error: AcquireError) -> Self {
        match error {
            AcquireError::InvalidTtl { .. } => Self::InvalidTtl(error.to_string()),
            AcquireError::NoMatch(counts) => Self::NoMatch(counts),
            AcquireError::IdempotencyMismatch => Self::IdempotencyMismatch,
            AcquireError::Closed => Self::ShuttingDown,
            AcquireError::Store(failure) => Self::Store(failure),
        }
    }
}

/// With the id that was asked for.
pub(crate) fn renew_error(error: RenewError, id: &str) -> ApiError {
    match error {
        RenewError::InvalidTtl { .. } => ApiError::InvalidTtl(error.to_string()),
        RenewError::Unknown => ApiError::UnknownLease(shown(id)),
        RenewError::Expired => ApiError::Expired,
        RenewError::Store(failure) => ApiError::Store(failure),
    }
}

/// With the id that was asked for.
pub(crate) fn report_error(error: ReportError, id: &str) -> ApiError {
    match error {
        ReportError::Unknown => ApiError::UnknownLease(shown(id)),
        ReportError::Store(failure) => ApiError::Store(failure),
    }
}

/// What a client sent, at a length that an answer can carry.
pub(crate) fn shown(text: &str) -> String {
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{:?}...", &text[..end]),
        None => format!("{text:?}"),
    }
}

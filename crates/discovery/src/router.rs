//! The routes, and what surrounds each: the token, a line in the log, the counts.

use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::{MatchedPath, Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use egress_lease::LeaseStore;
use http::header::CONTENT_TYPE;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::config::{Config, Limits};
use crate::directory::Directory;
use crate::error::{ApiError, ErrorBody};
use crate::metrics::Metrics;
use crate::token::{Guard, TokenError};
use crate::{leases, openapi, proxies, watch};

/// What the API stands on.
pub struct Deps {
    pub directory: Arc<dyn Directory>,
    pub leases: Arc<dyn LeaseStore>,
    /// What a lease lasts whose request names no ttl (`egress_lease::Config::default_ttl`).
    pub default_ttl: Duration,
    pub metrics: Metrics,
    /// Ends `/v1/watch` streams; the same that `serve` gets.
    pub cancel: CancellationToken,
}

/// Shared by all handlers.
#[derive(Clone)]
pub(crate) struct Shared(Arc<Inner>);

pub(crate) struct Inner {
    pub directory: Arc<dyn Directory>,
    pub leases: Arc<dyn LeaseStore>,
    pub default_ttl: Duration,
    pub metrics: Metrics,
    pub cancel: CancellationToken,
    pub limits: Limits,
    pub watchers: Arc<Semaphore>,
    guard: Guard,
}

impl Deref for Shared {
    type Target = Inner;

    fn deref(&self) -> &Inner {
        &self.0
    }
}

impl Shared {
    /// Before the cache holds everything, "no such proxy" would be a guess.
    pub fn ready(&self) -> Result<(), ApiError> {
        if self.directory.synced() {
            return Ok(());
        }
        Err(ApiError::NotReady(self.not_ready_reason()))
    }

    fn not_ready_reason(&self) -> String {
        self.directory
            .not_ready_reason()
            .unwrap_or_else(|| "the proxies are being loaded".to_owned())
    }
}

/// The whole API.
///
/// # Errors
/// When the token cannot be read or is empty.
pub fn router(config: &Config, deps: Deps) -> Result<Router, TokenError> {
    let shared = Shared(Arc::new(Inner {
        directory: deps.directory,
        leases: deps.leases,
        default_ttl: deps.default_ttl,
        metrics: deps.metrics,
        cancel: deps.cancel,
        limits: config.limits.clone(),
        watchers: Arc::new(Semaphore::new(config.limits.max_watchers)),
        guard: Guard::new(&config.token)?,
    }));
    Ok(Router::new()
        .route(HEALTHZ, get(healthz))
        .route(READYZ, get(readyz))
        .route("/openapi.json", get(document))
        .route("/v1/proxies", get(proxies::list))
        .route("/v1/proxies/{namespace}/{name}", get(proxies::get))
        .route("/v1/leases", post(leases::acquire))
        .route("/v1/leases/{id}", get(leases::get).delete(leases::release))
        .route("/v1/leases/{id}/renew", post(leases::renew))
        .route("/v1/leases/{id}/report", post(leases::report))
        .route("/v1/watch", get(watch::watch))
        .fallback(async || ApiError::NotFound("no such path, see /openapi.json".to_owned()))
        .method_not_allowed_fallback(async || ApiError::MethodNotAllowed)
        .layer(from_fn_with_state(shared.clone(), authorize))
        .layer(from_fn_with_state(shared.clone(), account))
        .with_state(shared))
}

const HEALTHZ: &str = "/healthz";
const READYZ: &str = "/readyz";

async fn authorize(State(shared): State<Shared>, request: Request, next: Next) -> Response {
    let open = matches!(request.uri().path(), HEALTHZ | READYZ);
    if open || shared.guard.admits(request.headers()) {
        next.run(request).await
    } else {
        ApiError::Unauthorized.into_response()
    }
}

/// One line a request, without anything that a client keeps secret (neither headers nor query).
async fn account(
    State(shared): State<Shared>,
    matched: Option<MatchedPath>,
    request: Request,
    next: Next,
) -> Response {
    let started = Instant::now();
    let route = matched
        .as_ref()
        .map_or("unmatched", MatchedPath::as_str)
        .to_owned();
    let method = request.method().clone();
    let response = next.run(request).await;
    let (status, took) = (response.status(), started.elapsed());
    shared.metrics.answered(&route, &method, status, took);
    tracing::debug!(
        %method,
        route,
        status = status.as_u16(),
        micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX),
        "answered"
    );
    response
}

/// Says that the process lives.
#[utoipa::path(
    get,
    path = "/healthz",
    operation_id = "healthz",
    tag = "state",
    security(()),
    responses((status = 200, description = "`ok`", body = String, content_type = "text/plain")),
)]
pub(crate) async fn healthz() -> &'static str {
    "ok"
}

/// Says whether the API can answer.
#[utoipa::path(
    get,
    path = "/readyz",
    operation_id = "readyz",
    tag = "state",
    security(()),
    responses(
        (status = 200, description = "`ok`", body = String, content_type = "text/plain"),
        (status = 503, description = "`not_ready`", body = ErrorBody),
    ),
)]
pub(crate) async fn readyz(State(shared): State<Shared>) -> Result<&'static str, ApiError> {
    if let Some(reason) = shared.directory.not_ready_reason() {
        return Err(ApiError::NotReady(reason));
    }
    shared.ready()?;
    Ok("ok")
}

/// This document.
#[utoipa::path(
    get,
    path = "/openapi.json",
    operation_id = "openapi",
    tag = "state",
    responses(
        (status = 200, description = "The OpenAPI document of this API", body = Object),
        (status = 401, description = "`unauthorized`", body = ErrorBody),
    ),
)]
pub(crate) async fn document() -> impl IntoResponse {
    ([(CONTENT_TYPE, "application/json")], openapi())
}

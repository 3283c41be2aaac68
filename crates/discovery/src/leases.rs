//! The calls under `/v1/leases`.

use std::time::Duration;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use egress_core::ProxyRecord;
use egress_core::target::Target;
use egress_lease::{AcquireRequest, Acquired, Lease, LeaseId, Report};
use http::header::LOCATION;
use http::{HeaderMap, HeaderValue, StatusCode};

use crate::body::JsonBody;
use crate::error::{ApiError, ErrorBody, NoMatchBody, renew_error, report_error, shown};
use crate::router::Shared;
use crate::wire::{LeaseAnswer, LeaseRequest, RenewRequest, ReportRequest};

/// A lease that was just granted and given to nobody yet. Dropped before it was told, because its
/// client has gone, it is released: nobody else knows its id.
struct Untold {
    shared: Shared,
    id: Option<LeaseId>,
}

impl Untold {
    fn told(mut self) {
        self.id = None;
    }
}

impl Drop for Untold {
    fn drop(&mut self) {
        let Some(id) = self.id.take() else {
            return;
        };
        let shared = self.shared.clone();
        let release = move || {
            tracing::debug!(lease = %id, "its client has gone: released");
            if let Err(error) = shared.leases.release(&id) {
                tracing::warn!(%error, lease = %id, "a lease that nobody holds runs out by itself");
            }
        };
        // We may be on a thread that must not wait for the disk.
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(release)),
            Err(_) => release(),
        }
    }
}

/// How often an acquire is tried again whose proxy went away meanwhile.
const TRIES: usize = 3;

const IDEMPOTENCY_KEY: &str = "idempotency-key";

impl Shared {
    /// Lease calls wait for the disk.
    async fn blocking<T: Send + 'static>(
        &self,
        call: impl FnOnce(Self) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let shared = self.clone();
        tokio::task::spawn_blocking(move || call(shared))
            .await
            .map_err(|error| {
                tracing::error!(%error, "a lease call has panicked");
                ApiError::Internal
            })?
    }

    fn ttl(&self, seconds: Option<i64>) -> Result<Duration, ApiError> {
        match seconds {
            None => Ok(self.default_ttl),
            // Zero is refused by the store, which knows the maximum that the message names.
            Some(seconds) => Ok(Duration::from_secs(u64::try_from(seconds).unwrap_or(0))),
        }
    }

    /// The lease with its proxy, unless that is gone, going, or another one of this name.
    fn answer(&self, lease: &Lease) -> Option<LeaseAnswer> {
        let record = self.proxy_of(lease)?;
        Some(LeaseAnswer::new(lease, self.show(&record)))
    }

    fn proxy_of(&self, lease: &Lease) -> Option<std::sync::Arc<ProxyRecord>> {
        self.present(&lease.proxy)
            .filter(|record| record.uid == lease.uid)
    }

    fn acquire(
        &self,
        request: &AcquireRequest,
    ) -> Result<(StatusCode, LeaseAnswer, Untold), ApiError> {
        for _ in 0..TRIES {
            let candidates: Vec<ProxyRecord> = self
                .directory
                .proxies()
                .iter()
                .filter(|record| !record.deleting)
                // The store asks the same of each; this saves copying. With a key it must see
                // them all: the proxy of the first answer may have other attributes by now.
                .filter(|record| request.idempotency_key.is_some() || matches(request, record))
                .map(|record| ProxyRecord::clone(record))
                .collect();
            let (status, lease) = match self.leases.acquire(request, &candidates)? {
                Acquired::New(lease) => (StatusCode::CREATED, lease),
                Acquired::Again(lease) => (StatusCode::OK, lease),
            };
            if let Some(answer) = self.answer(&lease) {
                // With a key the client comes back for it.
                let untold = request.idempotency_key.is_none().then_some(lease.id);
                let untold = Untold {
                    shared: self.clone(),
                    id: untold,
                };
                return Ok((status, answer, untold));
            }
            // Its deletion began after we looked, and may have ended its leases before this one.
            self.leases.end_for(&lease.uid)?;
        }
        Err(ApiError::NotReady(
            "proxies come and go too quickly".to_owned(),
        ))
    }
}

fn matches(request: &AcquireRequest, record: &ProxyRecord) -> bool {
    request
        .selector
        .iter()
        .all(|(key, value)| record.attributes.get(key) == Some(value))
}

fn lease_id(path: Result<Path<String>, PathRejection>) -> Result<LeaseId, ApiError> {
    path.map(|Path(id)| LeaseId(id))
        .map_err(|_| ApiError::UnknownLease("of this name".to_owned()))
}

fn unknown(id: &LeaseId) -> ApiError {
    ApiError::UnknownLease(shown(&id.0))
}

fn target(text: Option<&str>) -> Result<Option<Target>, ApiError> {
    Ok(text.map(Target::parse).transpose()?)
}

fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    let mut values = headers.get_all(IDEMPOTENCY_KEY).iter();
    let Some(value) = values.next() else {
        return Ok(None);
    };
    let good = value
        .to_str()
        .ok()
        .filter(|text| (1..=255).contains(&text.len()) && values.next().is_none())
        .ok_or(ApiError::InvalidIdempotencyKey)?;
    Ok(Some(good.to_owned()))
}

/// Leases a proxy.
///
/// Of the healthy proxies that match, have room, and are in no cooldown for this target: the one
/// with the fewest active leases, then the lowest latency, then the first id.
///
/// With an `Idempotency-Key`, the same request sent again while its lease lives gets the same
/// lease again: a retry after a lost answer takes no second slot.
#[utoipa::path(
    post,
    path = "/v1/leases",
    operation_id = "acquireLease",
    tag = "leases",
    params(
        ("Idempotency-Key" = Option<String>, Header, description = "1 to 255 visible ASCII \
          characters, of your choice; a new one for each lease wanted"),
    ),
    request_body = LeaseRequest,
    responses(
        (status = 200, description = "The lease that this Idempotency-Key got before",
         body = LeaseAnswer),
        (status = 201, description = "A new lease", body = LeaseAnswer,
         headers(("Location" = String))),
        (status = 400, description = "`invalid_body`, `invalid_ttl` (0 or less, or over the \
          maximum), `invalid_target`, `invalid_idempotency_key`", body = ErrorBody),
        (status = 401, description = "`unauthorized`", body = ErrorBody),
        (status = 408, description = "`body_timeout`", body = ErrorBody),
        (status = 409, description = "`no_match`", body = NoMatchBody),
        (status = 413, description = "`body_too_large`", body = ErrorBody),
        (status = 415, description = "`unsupported_media_type`", body = ErrorBody),
        (status = 422, description = "`idempotency_mismatch`: this key came with another body",
         body = ErrorBody),
        (status = 503, description = "`not_ready`, `shutting_down`, `lease_store_failed`: nothing \
          was granted", body = ErrorBody),
    ),
)]
pub(crate) async fn acquire(
    State(shared): State<Shared>,
    headers: HeaderMap,
    JsonBody(body): JsonBody<LeaseRequest>,
) -> Result<Response, ApiError> {
    let request = AcquireRequest {
        selector: body.selector.unwrap_or_default(),
        ttl: shared.ttl(body.ttl_seconds)?,
        target: target(body.target.as_deref())?,
        idempotency_key: idempotency_key(&headers)?,
    };
    shared.ready()?;
    let (status, answer, untold) = shared
        .blocking(move |shared| shared.acquire(&request))
        .await?;
    tracing::debug!(lease = answer.lease_id, proxy = answer.proxy.id, "leased");
    let location = HeaderValue::from_str(&format!("/v1/leases/{}", answer.lease_id));
    let mut response = (status, Json(answer)).into_response();
    if let Ok(location) = location {
        response.headers_mut().insert(LOCATION, location);
    }
    untold.told();
    Ok(response)
}

/// Shows a lease.
#[utoipa::path(
    get,
    path = "/v1/leases/{id}",
    operation_id = "getLease",
    tag = "leases",
    params(("id" = String, Path)),
    responses(
        (status = 200, body = LeaseAnswer),
        (status = 401, description = "`unauthorized`", body = ErrorBody),
        (status = 404, description = "`unknown_lease`", body = ErrorBody),
        (status = 503, description = "`not_ready`", body = ErrorBody),
    ),
)]
pub(crate) async fn get(
    State(shared): State<Shared>,
    path: Result<Path<String>, PathRejection>,
) -> Result<Json<LeaseAnswer>, ApiError> {
    let id = lease_id(path)?;
    shared.ready()?;
    shared
        .leases
        .get(&id)
        .and_then(|lease| shared.answer(&lease))
        .map(Json)
        .ok_or_else(|| unknown(&id))
}

/// Keeps a lease for longer.
///
/// It then ends `ttlSeconds` from now.
#[utoipa::path(
    post,
    path = "/v1/leases/{id}/renew",
    operation_id = "renewLease",
    tag = "leases",
    params(("id" = String, Path)),
    request_body = RenewRequest,
    responses(
        (status = 200, body = LeaseAnswer),
        (status = 400, description = "`invalid_body`, `invalid_ttl`", body = ErrorBody),
        (status = 401, description = "`unauthorized`", body = ErrorBody),
        (status = 404, description = "`unknown_lease`", body = ErrorBody),
        (status = 408, description = "`body_timeout`", body = ErrorBody),
        (status = 409, description = "`expired`", body = ErrorBody),
        (status = 413, description = "`body_too_large`", body = ErrorBody),
        (status = 415, description = "`unsupported_media_type`", body = ErrorBody),
        (status = 503, description = "`not_ready`, `lease_store_failed`", body = ErrorBody),
    ),
)]
pub(crate) async fn renew(
    State(shared): State<Shared>,
    path: Result<Path<String>, PathRejection>,
    JsonBody(body): JsonBody<RenewRequest>,
) -> Result<Json<LeaseAnswer>, ApiError> {
    let id = lease_id(path)?;
    let ttl = shared.ttl(body.ttl_seconds)?;
    shared.ready()?;
    shared
        .blocking(move |shared| {
            let lease = shared
                .leases
                .renew(&id, ttl)
                .map_err(|error| renew_error(error, &id.0))?;
            if let Some(answer) = shared.answer(&lease) {
                return Ok(Json(answer));
            }
            shared.leases.end_for(&lease.uid)?;
            Err(unknown(&id))
        })
        .await
}

/// Gives a lease back.
///
/// Unknown and ended leases are fine: it is not active any more, which is what was asked for.
#[utoipa::path(
    delete,
    path = "/v1/leases/{id}",
    operation_id = "releaseLease",
    tag = "leases",
    params(("id" = String, Path)),
    responses(
        (status = 204),
        (status = 401, description = "`unauthorized`", body = ErrorBody),
        (status = 503, description = "`lease_store_failed`", body = ErrorBody),
    ),
)]
pub(crate) async fn release(
    State(shared): State<Shared>,
    path: Result<Path<String>, PathRejection>,
) -> Result<StatusCode, ApiError> {
    let Ok(id) = lease_id(path) else {
        return Ok(StatusCode::NO_CONTENT);
    };
    shared
        .blocking(move |shared| Ok(shared.leases.release(&id)?))
        .await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Reports how a proxy did.
///
/// A lease that ended can still be reported for one cooldown window.
#[utoipa::path(
    post,
    path = "/v1/leases/{id}/report",
    operation_id = "reportLease",
    tag = "leases",
    params(("id" = String, Path)),
    request_body = ReportRequest,
    responses(
        (status = 204),
        (status = 400, description = "`invalid_body`, `invalid_result`, `invalid_target`",
         body = ErrorBody),
        (status = 401, description = "`unauthorized`", body = ErrorBody),
        (status = 404, description = "`unknown_lease`", body = ErrorBody),
        (status = 408, description = "`body_timeout`", body = ErrorBody),
        (status = 413, description = "`body_too_large`", body = ErrorBody),
        (status = 415, description = "`unsupported_media_type`", body = ErrorBody),
        (status = 503, description = "`lease_store_failed`", body = ErrorBody),
    ),
)]
pub(crate) async fn report(
    State(shared): State<Shared>,
    path: Result<Path<String>, PathRejection>,
    JsonBody(body): JsonBody<ReportRequest>,
) -> Result<StatusCode, ApiError> {
    let id = lease_id(path)?;
    let report = match body.result.as_deref() {
        Some("ok") => Report::Ok,
        Some("rate_limited") => Report::RateLimited,
        Some("banned") => Report::Banned,
        Some(other) => return Err(ApiError::InvalidResult(shown(other))),
        None => return Err(ApiError::InvalidResult("missing".to_owned())),
    };
    let target = target(body.target.as_deref())?;
    shared
        .blocking(move |shared| {
            shared
                .leases
                .report(&id, report, target)
                .map_err(|error| report_error(error, &id.0))
        })
        .await?;
    Ok(StatusCode::NO_CONTENT)
}

//! JSON bodies, bounded in size and time.

use std::time::Duration;

use axum::body::Body;
use axum::extract::{FromRequest, Request};
use http::HeaderMap;
use http::header::CONTENT_TYPE;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::de::DeserializeOwned;

use crate::error::ApiError;
use crate::router::Shared;

/// A JSON body; none at all is `{}`.
pub(crate) struct JsonBody<T>(pub T);

impl<T: DeserializeOwned> FromRequest<Shared> for JsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, shared: &Shared) -> Result<Self, ApiError> {
        let limits = &shared.limits;
        let (parts, body) = request.into_parts();
        let bytes = read(&parts.headers, body, limits.max_body, limits.body_timeout).await?;
        if bytes.is_empty() {
            return parse(b"{}").map(Self);
        }
        if !is_json(&parts.headers) {
            return Err(ApiError::UnsupportedMediaType);
        }
        parse(&bytes).map(Self)
    }
}

async fn read(
    headers: &HeaderMap,
    body: Body,
    limit: usize,
    within: Duration,
) -> Result<bytes::Bytes, ApiError> {
    // Refused before a byte of it is read, where the length is told.
    let told = headers
        .get(http::header::CONTENT_LENGTH)
        .and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
    if told.is_some_and(|length| length > limit) {
        return Err(ApiError::BodyTooLarge(limit));
    }
    let collected = tokio::time::timeout(within, Limited::new(body, limit).collect())
        .await
        .map_err(|_| ApiError::BodyTimeout)?
        .map_err(|error| {
            if error.is::<LengthLimitError>() {
                ApiError::BodyTooLarge(limit)
            } else {
                ApiError::InvalidBody(format!("the body broke off: {error}"))
            }
        })?;
    Ok(collected.to_bytes())
}

/// `application/json` or `application/*+json`, with any parameters.
fn is_json(headers: &HeaderMap) -> bool {
    let Some(value) = headers.get(CONTENT_TYPE).and_then(|v| v.to_str().ok()) else {
        return false;
    };
    let essence = value.split(';').next().unwrap_or_default().trim();
    let Some((kind, subtype)) = essence.split_once('/') else {
        return false;
    };
    let subtype = subtype.to_ascii_lowercase();
    kind.eq_ignore_ascii_case("application") && (subtype == "json" || subtype.ends_with("+json"))
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    // Serde would take an array for a struct, and an empty one for one that needs no field.
    if bytes.trim_ascii_start().first() == Some(&b'[') {
        return Err(ApiError::InvalidBody(
            "the body is an array: give an object".to_owned(),
        ));
    }
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        let inner = error.into_inner();
        ApiError::InvalidBody(match path.as_str() {
            "." => format!("the body is not what this call takes: {inner}"),
            path => format!("the body is not what this call takes: {path}: {inner}"),
        })
    })?;
    json.end()
        .map_err(|error| ApiError::InvalidBody(format!("there is more after the body: {error}")))?;
    Ok(value)
}

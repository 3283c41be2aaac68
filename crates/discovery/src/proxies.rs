//! `GET /v1/proxies` and `GET /v1/proxies/{namespace}/{name}`.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use egress_core::{ProxyKey, ProxyRecord, Uid};

use crate::error::{ApiError, ErrorBody, shown};
use crate::router::Shared;
use crate::wire::{Proxy, ProxyList};

/// What a list asks for.
#[derive(Debug, Default, PartialEq, Eq)]
struct Filter {
    healthy: Option<bool>,
    attributes: Vec<(String, String)>,
}

impl Filter {
    fn parse(pairs: Vec<(String, String)>) -> Result<Self, ApiError> {
        let mut filter = Self::default();
        for (key, value) in pairs {
            match key.strip_prefix("attr.") {
                Some("") => {
                    return Err(ApiError::InvalidQuery(
                        "attr. names no attribute: give attr.KEY=VALUE".to_owned(),
                    ));
                }
                Some(attribute) => filter.attributes.push((attribute.to_owned(), value)),
                None if key == "healthy" => {
                    let healthy = match value.as_str() {
                        "true" => true,
                        "false" => false,
                        other => {
                            return Err(ApiError::InvalidQuery(format!(
                                "healthy is {}: give true or false",
                                shown(other)
                            )));
                        }
                    };
                    if filter.healthy.is_some_and(|earlier| earlier != healthy) {
                        return Err(ApiError::InvalidQuery(
                            "healthy is both true and false".to_owned(),
                        ));
                    }
                    filter.healthy = Some(healthy);
                }
                // A misspelt filter would otherwise answer with every proxy.
                None => {
                    return Err(ApiError::InvalidQuery(format!(
                        "no parameter {}: there are healthy and attr.KEY",
                        shown(&key)
                    )));
                }
            }
        }
        Ok(filter)
    }

    fn admits(&self, record: &ProxyRecord) -> bool {
        !record.deleting
            && self.healthy.is_none_or(|healthy| record.healthy == healthy)
            && self
                .attributes
                .iter()
                .all(|(key, value)| record.attributes.get(key) == Some(value))
    }
}

impl Shared {
    /// Proxies that are not being deleted, as they are now, sorted by id.
    pub(crate) fn all(&self, active: &BTreeMap<Uid, usize>) -> Vec<Proxy> {
        self.list(&Filter::default(), active)
    }

    fn list(&self, filter: &Filter, active: &BTreeMap<Uid, usize>) -> Vec<Proxy> {
        let mut proxies: Vec<_> = self
            .directory
            .proxies()
            .iter()
            .filter(|record| filter.admits(record))
            .map(|record| Proxy::new(record, active.get(&record.uid).copied().unwrap_or(0)))
            .collect();
        // By the text, in which `a-b/x` comes before `a/x`: a sort by key would differ.
        proxies.sort_by(|a, b| a.id.cmp(&b.id));
        proxies
    }

    /// A proxy that is there and not being deleted.
    pub(crate) fn present(&self, key: &ProxyKey) -> Option<Arc<ProxyRecord>> {
        self.directory.get(key).filter(|record| !record.deleting)
    }

    pub(crate) fn show(&self, record: &ProxyRecord) -> Proxy {
        let active = self.leases.active();
        Proxy::new(record, active.get(&record.uid).copied().unwrap_or(0))
    }
}

/// Lists proxies.
///
/// Sorted by id. Proxies that are being deleted are not shown.
#[utoipa::path(
    get,
    path = "/v1/proxies",
    operation_id = "listProxies",
    tag = "proxies",
    params(
        ("healthy" = Option<bool>, Query, description = "Only healthy ones, or only unhealthy ones"),
        ("attr.KEY" = Option<String>, Query, description = "Only those with the attribute KEY of \
          exactly this value; may be given for several keys, and all must match"),
    ),
    responses(
        (status = 200, body = ProxyList),
        (status = 400, description = "`invalid_query`", body = ErrorBody),
        (status = 401, description = "`unauthorized`", body = ErrorBody),
        (status = 503, description = "`not_ready`", body = ErrorBody),
    ),
)]
pub(crate) async fn list(
    State(shared): State<Shared>,
    query: Result<Query<Vec<(String, String)>>, QueryRejection>,
) -> Result<Json<ProxyList>, ApiError> {
    let Query(pairs) = query.map_err(|error| ApiError::InvalidQuery(error.body_text()))?;
    let filter = Filter::parse(pairs)?;
    shared.ready()?;
    let proxies = shared.list(&filter, &shared.leases.active());
    Ok(Json(ProxyList {
        count: proxies.len(),
        proxies,
    }))
}

/// Shows one proxy.
#[utoipa::path(
    get,
    path = "/v1/proxies/{namespace}/{name}",
    operation_id = "getProxy",
    tag = "proxies",
    params(
        ("namespace" = String, Path),
        ("name" = String, Path),
    ),
    responses(
        (status = 200, body = Proxy),
        (status = 401, description = "`unauthorized`", body = ErrorBody),
        (status = 404, description = "`not_found`", body = ErrorBody),
        (status = 503, description = "`not_ready`", body = ErrorBody),
    ),
)]
pub(crate) async fn get(
    State(shared): State<Shared>,
    path: Result<Path<(String, String)>, PathRejection>,
) -> Result<Json<Proxy>, ApiError> {
    let Path((namespace, name)) =
        path.map_err(|_| ApiError::NotFound("no such proxy".to_owned()))?;
    shared.ready()?;
    let key = ProxyKey::new(namespace, name);
    let record = shared
        .present(&key)
        .ok_or_else(|| ApiError::NotFound(format!("no proxy {}", shown(&key.to_string()))))?;
    Ok(Json(shared.show(&record)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(pairs: &[(&str, &str)]) -> Result<Filter, ApiError> {
        Filter::parse(
            pairs
                .iter()
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect(),
        )
    }

    #[test]
    fn filters_are_exact_and_misspelt_ones_are_told() {
        let filter = parse(&[("healthy", "true"), ("attr.a", "1"), ("attr.b.c", "")]).unwrap();
        assert_eq!(filter.healthy, Some(true));
        assert_eq!(filter.attributes.len(), 2);
        assert_eq!(filter.attributes[1], ("b.c".to_owned(), String::new()));
        for bad in [
            ("healthy", "yes"),
            ("healthy", "TRUE"),
            ("healthy", ""),
            ("Healthy", "true"),
            ("attr.", "x"),
            ("attr", "x"),
            ("attributes.x", "y"),
        ] {
            assert!(
                matches!(parse(&[bad]), Err(ApiError::InvalidQuery(_))),
                "{bad:?}"
            );
        }
        parse(&[("healthy", "true"), ("healthy", "false")]).unwrap_err();
    }
}

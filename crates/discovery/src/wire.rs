//! What goes over the wire.

use std::collections::BTreeMap;
use std::time::Duration;

use egress_core::{Phase, ProxyRecord};
use egress_lease::Lease;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// One proxy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Proxy {
    /// `namespace/name`.
    #[schema(example = "default/p1")]
    pub id: String,
    /// Where to connect to: an address, or an External proxy's host name. Left out while there
    /// is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(example = "192.0.2.7")]
    pub ip: Option<String>,
    #[schema(example = 3128)]
    pub port: u16,
    /// Left out when there are none.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[schema(required = false)]
    pub attributes: BTreeMap<String, String>,
    #[schema(value_type = PhaseName)]
    pub phase: Phase,
    /// The prober's verdict.
    pub healthy: bool,
    /// How long the last successful probe took. Left out before there was one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency_millis: Option<u64>,
    pub active_leases: usize,
    pub max_leases: u32,
    /// `http://ip:port`, an IPv6 address in brackets. Left out while there is no address.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(example = "http://192.0.2.7:3128")]
    pub url: Option<String>,
}

/// Where a proxy stands in its life. Of these, `Deleting` is never shown.
#[derive(ToSchema)]
#[schema(as = Phase)]
#[allow(
    dead_code,
    reason = "the OpenAPI schema of egress_core::Phase, which knows no OpenAPI"
)]
pub(crate) enum PhaseName {
    Pending,
    Provisioning,
    Ready,
    Unhealthy,
    Deleting,
    Failed,
}

impl Proxy {
    pub(crate) fn new(record: &ProxyRecord, active_leases: usize) -> Self {
        Self {
            id: record.key.to_string(),
            ip: record.host.as_deref().map(bare).map(str::to_owned),
            port: record.port,
            attributes: record.attributes.clone(),
            phase: record.phase,
            healthy: record.healthy,
            latency_millis: record.latency_millis,
            active_leases,
            max_leases: record.max_leases,
            url: record.url(),
        }
    }
}

/// An IPv6 address without brackets, as `ip` is no part of a URL.
fn bare(host: &str) -> &str {
    host.strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'))
        .unwrap_or(host)
}

/// Proxies, sorted by id.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct ProxyList {
    pub proxies: Vec<Proxy>,
    pub count: usize,
}

/// What to lease. Everything is optional, `{}` is a whole request.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LeaseRequest {
    /// Every pair must be an attribute of the proxy.
    #[serde(default)]
    #[schema(example = json!({"country": "DE"}))]
    pub selector: Option<BTreeMap<String, String>>,
    /// 300 when left out, or what `--lease-ttl` says.
    #[serde(default)]
    #[schema(minimum = 1, example = 300)]
    pub ttl_seconds: Option<i64>,
    /// The host that the proxy will be used against; a URL, a port or a trailing dot do no harm.
    #[serde(default)]
    #[schema(example = "example.com")]
    pub target: Option<String>,
}

/// How long to go on.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RenewRequest {
    /// From now on. 300 when left out, or what `--lease-ttl` says.
    #[serde(default)]
    #[schema(minimum = 1, example = 300)]
    pub ttl_seconds: Option<i64>,
}

/// How a leased proxy did.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ReportRequest {
    #[serde(default)]
    #[schema(required = true, value_type = ReportResult)]
    pub result: Option<String>,
    /// The host that it was used against; the lease's when left out. When neither names one, the
    /// report is about every host.
    #[serde(default)]
    #[schema(example = "example.com")]
    pub target: Option<String>,
}

/// `rate_limited` and `banned` start a cooldown of the proxy for the target, `ok` nothing.
#[derive(ToSchema)]
#[schema(rename_all = "snake_case")]
#[allow(
    dead_code,
    reason = "the OpenAPI schema of a field that is checked by hand"
)]
pub(crate) enum ReportResult {
    Ok,
    RateLimited,
    Banned,
}

/// The right to use a proxy until a given moment.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct LeaseAnswer {
    #[serde(rename = "leaseID")]
    #[schema(example = "k5d2w6vgb4xk3ys7q2mpl5uhjn3r6c4t")]
    pub lease_id: String,
    pub proxy: Proxy,
    /// RFC 3339, UTC.
    #[schema(value_type = String, format = DateTime, example = "2026-01-01T00:05:00Z")]
    pub expires_at: jiff::Timestamp,
    #[schema(example = 300)]
    pub ttl_seconds: u64,
    /// Left out when the lease is for no particular host.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(example = "example.com")]
    pub target: Option<String>,
}

impl LeaseAnswer {
    pub(crate) fn new(lease: &Lease, proxy: Proxy) -> Self {
        Self {
            lease_id: lease.id.0.clone(),
            proxy,
            expires_at: lease.expires_at,
            ttl_seconds: rounded_up(lease.ttl),
            target: lease.target.as_ref().map(ToString::to_string),
        }
    }
}

fn rounded_up(ttl: Duration) -> u64 {
    ttl.as_secs() + u64::from(ttl.subsec_nanos() > 0)
}

/// A proxy that is not there any more.
#[derive(Debug, Serialize, ToSchema)]
pub struct Removed {
    #[schema(example = "default/p1")]
    pub id: String,
}

//! What the store counts. The gauges are read from the store when scraped.

use std::fmt;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use crate::contract::{AcquireError, NoMatch, Report};
use crate::index::{Change, EndReason, Entry};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Refusal {
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Reported {
    result: &'static str,
}

/// Active leases and active cooldowns, now.
pub(crate) trait Gauges: Send + Sync {
    fn active_leases(&self) -> usize;
    fn active_cooldowns(&self) -> usize;
}

/// Cheap to clone; clones count together.
#[derive(Clone)]
pub struct Metrics {
    granted: Counter,
    refused: Family<Refusal, Counter>,
    renewed: Counter,
    released: Counter,
    expired: Counter,
    proxy_gone: Counter,
    reports: Family<Reported, Counter>,
    write_seconds: Histogram,
    failures: Counter,
    source: Arc<OnceLock<Weak<dyn Gauges>>>,
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Metrics")
    }
}

/// Counts that nobody scrapes.
impl Default for Metrics {
    fn default() -> Self {
        let metrics = Self {
            granted: Counter::default(),
            refused: Family::default(),
            renewed: Counter::default(),
            released: Counter::default(),
            expired: Counter::default(),
            proxy_gone: Counter::default(),
            reports: Family::default(),
            // 0.5 ms to 4 s: an fsync takes from a fraction of a millisecond to seconds.
            write_seconds: Histogram::new(exponential_buckets(0.0005, 2.0, 14)),
            failures: Counter::default(),
            source: Arc::default(),
        };
        // Series exist before the first event, so that a rate over them is right from the start.
        for reason in REASONS {
            drop(metrics.refused.get_or_create(&Refusal { reason }));
        }
        for report in [Report::Ok, Report::RateLimited, Report::Banned] {
            let result = report_label(report);
            drop(metrics.reports.get_or_create(&Reported { result }));
        }
        metrics
    }
}

const REASONS: [&str; 8] = [
    "invalid_ttl",
    "no_candidates",
    "unhealthy",
    "at_capacity",
    "in_cooldown",
    "idempotency_mismatch",
    "closed",
    "store_failure",
];

fn report_label(report: Report) -> &'static str {
    match report {
        Report::Ok => "ok",
        Report::RateLimited => "rate_limited",
        Report::Banned => "banned",
    }
}

impl Metrics {
    /// Give the result to the store that is opened.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        registry.register(
            "egress_leases_granted",
            "Leases granted",
            metrics.granted.clone(),
        );
        registry.register(
            "egress_leases_refused",
            "Lease requests refused; where no proxy could be had, by what stood in the way of \
             those that came nearest",
            metrics.refused.clone(),
        );
        registry.register(
            "egress_leases_renewed",
            "Lease renewals",
            metrics.renewed.clone(),
        );
        registry.register(
            "egress_leases_released",
            "Leases given back",
            metrics.released.clone(),
        );
        registry.register(
            "egress_leases_expired",
            "Leases that ran out",
            metrics.expired.clone(),
        );
        registry.register(
            "egress_leases_proxy_gone",
            "Leases ended because their proxy was deleted or made again",
            metrics.proxy_gone.clone(),
        );
        registry.register(
            "egress_lease_reports",
            "Reports about leased proxies",
            metrics.reports.clone(),
        );
        registry.register(
            "egress_lease_store_write_seconds",
            "How long a durable write of the lease database took",
            metrics.write_seconds.clone(),
        );
        registry.register(
            "egress_lease_store_failures",
            "Writes of the lease database that failed",
            metrics.failures.clone(),
        );
        registry.register_collector(Box::new(AtScrape(Arc::clone(&metrics.source))));
        metrics
    }

    /// The store whose gauges are scraped: the first one opened with these metrics.
    pub(crate) fn watch(&self, source: Weak<dyn Gauges>) {
        let _ = self.source.set(source);
    }

    /// Counts changes that are durable.
    pub(crate) fn observe(&self, log: &[Change]) {
        for change in log {
            let Change::Lease { before, after, .. } = change else {
                continue;
            };
            match (before, after) {
                (None, Some(Entry::Active(_))) => {
                    self.granted.inc();
                }
                (Some(Entry::Active(_)), Some(Entry::Active(_))) => {
                    self.renewed.inc();
                }
                (Some(Entry::Active(_)), Some(Entry::Ended(ended))) => {
                    match ended.reason {
                        EndReason::Expired => self.expired.inc(),
                        EndReason::Released => self.released.inc(),
                        EndReason::ProxyGone => self.proxy_gone.inc(),
                    };
                }
                _ => {}
            }
        }
    }

    pub(crate) fn refused(&self, error: &AcquireError) {
        let reason = match error {
            AcquireError::InvalidTtl { .. } => "invalid_ttl",
            AcquireError::NoMatch(counts) => nearest(counts),
            AcquireError::IdempotencyMismatch => "idempotency_mismatch",
            AcquireError::Closed => "closed",
            AcquireError::Store(_) => "store_failure",
        };
        self.refused.get_or_create(&Refusal { reason }).inc();
    }

    pub(crate) fn reported(&self, report: Report) {
        self.reports
            .get_or_create(&Reported {
                result: report_label(report),
            })
            .inc();
    }

    pub(crate) fn wrote(&self, took: Duration) {
        self.write_seconds.observe(took.as_secs_f64());
    }

    pub(crate) fn failed(&self) {
        self.failures.inc();
    }
}

/// Cooldown is the last test, capacity the one before it.
fn nearest(counts: &NoMatch) -> &'static str {
    if counts.in_cooldown > 0 {
        "in_cooldown"
    } else if counts.at_capacity > 0 {
        "at_capacity"
    } else if counts.unhealthy > 0 {
        "unhealthy"
    } else {
        "no_candidates"
    }
}

struct AtScrape(Arc<OnceLock<Weak<dyn Gauges>>>);

impl fmt::Debug for AtScrape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("lease gauges")
    }
}

impl Collector for AtScrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let Some(source) = self.0.get().and_then(Weak::upgrade) else {
            return Ok(());
        };
        let gauges = [
            (
                "egress_leases_active",
                "Active leases",
                source.active_leases(),
            ),
            (
                "egress_cooldowns_active",
                "Active cooldowns (a proxy kept from one target, or from all)",
                source.active_cooldowns(),
            ),
        ];
        for (name, help, value) in gauges {
            let gauge = ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
            let encoder = encoder.encode_descriptor(
                name,
                help,
                None,
                prometheus_client::metrics::MetricType::Gauge,
            )?;
            gauge.encode(encoder)?;
        }
        Ok(())
    }
}

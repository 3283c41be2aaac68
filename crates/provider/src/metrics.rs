//! Calls of providers, as metrics.

use egress_core::ErrorClass;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

/// The values of `operation`.
pub(crate) const OPERATIONS: [&str; 6] =
    ["create", "get", "delete", "list", "find", "collect_garbage"];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct RequestLabels {
    pub provider: String,
    pub operation: &'static str,
    /// `success` or the error's class.
    pub result: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct OperationLabels {
    pub provider: String,
    pub operation: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct ProviderLabels {
    pub provider: String,
}

/// Cheap to clone; clones count into the same series.
#[derive(Clone)]
pub struct Metrics {
    pub(crate) requests: Family<RequestLabels, Counter>,
    pub(crate) duration: Family<OperationLabels, Histogram, fn() -> Histogram>,
    pub(crate) in_flight: Family<ProviderLabels, Gauge>,
    pub(crate) waiting: Family<ProviderLabels, Gauge>,
}

impl Metrics {
    /// Registers `egress_provider_requests_total`, `egress_provider_request_duration_seconds`,
    /// `egress_provider_requests_in_flight` and `egress_provider_requests_waiting`.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            requests: Family::default(),
            // 1 ms to 65 s: a local socket and a cloud's slow day.
            duration: Family::new_with_constructor(|| {
                Histogram::new(exponential_buckets(0.001, 2.0, 17))
            }),
            in_flight: Family::default(),
            waiting: Family::default(),
        };
        registry.register(
            "egress_provider_requests",
            "Calls of a provider by operation and result class",
            metrics.requests.clone(),
        );
        registry.register_with_unit(
            "egress_provider_request_duration",
            "Duration of calls of a provider, without the wait for a free slot",
            Unit::Seconds,
            metrics.duration.clone(),
        );
        registry.register(
            "egress_provider_requests_in_flight",
            "Calls of a provider that are being worked on",
            metrics.in_flight.clone(),
        );
        registry.register(
            "egress_provider_requests_waiting",
            "Calls of a provider that wait for its concurrency limit",
            metrics.waiting.clone(),
        );
        metrics
    }

    /// Drops all series of a provider that is no longer configured.
    pub fn forget(&self, provider: &str) {
        let results = [
            "success",
            ErrorClass::NotFound.as_str(),
            ErrorClass::QuotaExceeded.as_str(),
            ErrorClass::Transient.as_str(),
            ErrorClass::Permanent.as_str(),
        ];
        for operation in OPERATIONS {
            for result in results {
                self.requests.remove(&RequestLabels {
                    provider: provider.to_owned(),
                    operation,
                    result,
                });
            }
            self.duration.remove(&OperationLabels {
                provider: provider.to_owned(),
                operation,
            });
        }
        let labels = ProviderLabels {
            provider: provider.to_owned(),
        };
        self.in_flight.remove(&labels);
        self.waiting.remove(&labels);
    }
}

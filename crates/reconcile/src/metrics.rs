//! The reconciler in numbers.

use egress_core::Phase;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct ResultLabel {
    pub result: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct PhaseLabels {
    pub provider: String,
    pub phase: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct ProviderLabel {
    pub provider: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct WatchLabels {
    pub resource: &'static str,
    pub verb: &'static str,
}

/// Cheap to clone; clones count into the same series.
#[derive(Clone)]
pub struct Metrics {
    pub(crate) reconciles: Family<ResultLabel, Counter>,
    pub(crate) duration: Histogram,
    pub(crate) depth: Gauge,
    pub(crate) status_writes: Counter,
    pub(crate) proxies: Family<PhaseLabels, Gauge>,
    pub(crate) watch_errors: Family<WatchLabels, Counter>,
    pub(crate) events_dropped: Counter,
    pub(crate) sweeps: Family<ResultLabel, Counter>,
    pub(crate) orphans_deleted: Family<ProviderLabel, Counter>,
    pub(crate) orphans_found: Gauge,
}

impl Metrics {
    /// Registers what `docs/reference` lists under the reconciler.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            reconciles: Family::default(),
            duration: Histogram::new(exponential_buckets(0.001, 2.0, 17)),
            depth: Gauge::default(),
            status_writes: Counter::default(),
            proxies: Family::default(),
            watch_errors: Family::default(),
            events_dropped: Counter::default(),
            sweeps: Family::default(),
            orphans_deleted: Family::default(),
            orphans_found: Gauge::default(),
        };
        registry.register(
            "egress_reconciles",
            "Reconciles of Proxies by result",
            metrics.reconciles.clone(),
        );
        registry.register_with_unit(
            "egress_reconcile_duration",
            "Duration of reconciles",
            Unit::Seconds,
            metrics.duration.clone(),
        );
        registry.register(
            "egress_reconcile_queue_depth",
            "Proxies that are due and wait for a free reconciler",
            metrics.depth.clone(),
        );
        registry.register(
            "egress_status_writes",
            "Writes of a Proxy's status",
            metrics.status_writes.clone(),
        );
        registry.register(
            "egress_proxies",
            "Proxies by provider (empty: External) and phase",
            metrics.proxies.clone(),
        );
        registry.register(
            "egress_watch_errors",
            "Failed lists and watches of the Kubernetes API",
            metrics.watch_errors.clone(),
        );
        registry.register(
            "egress_events_dropped",
            "Kubernetes Events that could not be written",
            metrics.events_dropped.clone(),
        );
        registry.register(
            "egress_orphan_sweeps",
            "Sweeps for instances without a Proxy, by result",
            metrics.sweeps.clone(),
        );
        registry.register(
            "egress_orphans_deleted",
            "Instances without a Proxy that were deleted",
            metrics.orphans_deleted.clone(),
        );
        registry.register(
            "egress_orphans",
            "Instances without a Proxy that the last sweep found past their grace",
            metrics.orphans_found.clone(),
        );
        metrics
    }

    /// Drops the series of a provider that is no longer configured.
    pub(crate) fn forget_provider(&self, provider: &str) {
        self.orphans_deleted.remove(&ProviderLabel {
            provider: provider.to_owned(),
        });
    }

    pub(crate) fn proxy_entered(&self, provider: &str, phase: Phase) {
        self.proxies.get_or_create(&labels(provider, phase)).inc();
    }

    /// A series that counts nothing any more is dropped: a provider may be gone for good.
    pub(crate) fn proxy_left(&self, provider: &str, phase: Phase) {
        let labels = labels(provider, phase);
        let left = self.proxies.get_or_create(&labels).dec() <= 1;
        if left {
            self.proxies.remove(&labels);
        }
    }
}

fn labels(provider: &str, phase: Phase) -> PhaseLabels {
    PhaseLabels {
        provider: provider.to_owned(),
        phase: phase.as_str(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_series_ends_with_its_last_proxy() {
        let mut registry = Registry::default();
        let metrics = Metrics::register(&mut registry);
        metrics.proxy_entered("kvm", Phase::Ready);
        metrics.proxy_entered("kvm", Phase::Ready);
        metrics.proxy_left("kvm", Phase::Ready);
        let text = |r: &Registry| {
            let mut out = String::new();
            prometheus_client::encoding::text::encode(&mut out, r).unwrap();
            out
        };
        assert!(text(&registry).contains(r#"egress_proxies{provider="kvm",phase="Ready"} 1"#));
        metrics.proxy_left("kvm", Phase::Ready);
        assert!(!text(&registry).contains("kvm"));
    }
}

//! What the prober tells a metrics server.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use crate::contract::ProbeClass;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct ClassLabel {
    class: &'static str,
}

impl ClassLabel {
    pub(crate) fn new(class: ProbeClass) -> Self {
        Self {
            class: class.as_str(),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct StateLabel {
    state: &'static str,
}

/// Cheap to clone; all clones count together.
#[derive(Debug, Clone)]
pub struct Metrics {
    pub(crate) probes: Family<ClassLabel, Counter>,
    pub(crate) duration: Histogram,
    pub(crate) lag: Histogram,
    pub(crate) backlog: Gauge,
    pub(crate) in_flight: Gauge,
    pub(crate) targets: Family<StateLabel, Gauge>,
    pub(crate) discarded: Counter,
    pub(crate) common_failure: Family<ClassLabel, Gauge>,
}

impl Metrics {
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::unregistered();
        registry.register(
            "egress_probes",
            "Probes that ended, by the class of their result",
            metrics.probes.clone(),
        );
        registry.register_with_unit(
            "egress_probe_duration",
            "How long probes took, failed ones included",
            Unit::Seconds,
            metrics.duration.clone(),
        );
        registry.register_with_unit(
            "egress_probe_lag",
            "How late probes started, behind their schedule",
            Unit::Seconds,
            metrics.lag.clone(),
        );
        registry.register(
            "egress_probe_backlog",
            "Probes that are due and wait for a free worker",
            metrics.backlog.clone(),
        );
        registry.register(
            "egress_probes_in_flight",
            "Probes that are going on",
            metrics.in_flight.clone(),
        );
        registry.register(
            "egress_probe_targets",
            "Probed proxies by verdict",
            metrics.targets.clone(),
        );
        registry.register(
            "egress_probe_results_discarded",
            "Results that came for a proxy that had changed or gone meanwhile",
            metrics.discarded.clone(),
        );
        registry.register(
            "egress_probe_common_failure",
            "1 while most proxies fail at one time for one reason",
            metrics.common_failure.clone(),
        );
        metrics
    }

    /// For tests and embedders without a metrics server.
    pub fn unregistered() -> Self {
        let seconds = [
            0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
        ];
        let metrics = Self {
            probes: Family::default(),
            duration: Histogram::new(seconds),
            lag: Histogram::new(seconds),
            backlog: Gauge::default(),
            in_flight: Gauge::default(),
            targets: Family::default(),
            discarded: Counter::default(),
            common_failure: Family::default(),
        };
        // Every series exists from the start, so that a rate over the first failure is right.
        for class in ProbeClass::ALL {
            metrics.class_counter(class);
            if class != ProbeClass::Success {
                metrics.set_common_failure(class, false);
            }
        }
        for state in [Some(true), Some(false), None] {
            metrics.count_targets(state, 0);
        }
        metrics
    }

    pub(crate) fn class_counter(&self, class: ProbeClass) -> Counter {
        self.probes.get_or_create_owned(&ClassLabel::new(class))
    }

    pub(crate) fn set_common_failure(&self, class: ProbeClass, on: bool) {
        self.common_failure
            .get_or_create(&ClassLabel::new(class))
            .set(i64::from(on));
    }

    pub(crate) fn count_targets(&self, healthy: Option<bool>, by: i64) {
        let state = match healthy {
            Some(true) => "healthy",
            Some(false) => "unhealthy",
            None => "unknown",
        };
        self.targets.get_or_create(&StateLabel { state }).inc_by(by);
    }
}

//! What is counted.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CallLabels {
    host: String,
    rpc: String,
    result: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RpcLabels {
    host: String,
    rpc: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FetchLabels {
    host: String,
    image: String,
    result: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ImageLabels {
    host: String,
    image: String,
}

/// The provider's metrics. Clones count together.
#[derive(Clone)]
pub struct Metrics {
    calls: Family<CallLabels, Counter>,
    durations: Family<RpcLabels, Histogram, fn() -> Histogram>,
    fetches: Family<FetchLabels, Counter>,
    fetched_bytes: Family<ImageLabels, Counter>,
    progress: Family<ImageLabels, Gauge<f64, std::sync::atomic::AtomicU64>>,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            calls: Family::default(),
            durations: Family::new_with_constructor(|| {
                Histogram::new(exponential_buckets(0.001, 4.0, 9))
            }),
            fetches: Family::default(),
            fetched_bytes: Family::default(),
            progress: Family::default(),
        }
    }
}

impl Metrics {
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        registry.register(
            "egress_kvm_libvirt_calls",
            "libvirt calls by host, function and result",
            metrics.calls.clone(),
        );
        registry.register_with_unit(
            "egress_kvm_libvirt_call_duration",
            "Duration of libvirt calls",
            Unit::Seconds,
            metrics.durations.clone(),
        );
        registry.register(
            "egress_kvm_image_fetches",
            "Image fetches that ended, by host, image and result",
            metrics.fetches.clone(),
        );
        registry.register_with_unit(
            "egress_kvm_image_fetched",
            "Bytes of images downloaded",
            Unit::Bytes,
            metrics.fetched_bytes.clone(),
        );
        registry.register_with_unit(
            "egress_kvm_image_fetch_progress",
            "How much of a running image fetch is done, 0 to 1; absent when none runs",
            Unit::Other("ratio".to_owned()),
            metrics.progress.clone(),
        );
        metrics
    }

    pub(crate) fn call(&self, host: &str, rpc: &str, ok: bool, took: Duration) {
        self.calls
            .get_or_create(&CallLabels {
                host: host.to_owned(),
                rpc: rpc.to_owned(),
                result: if ok { "ok" } else { "error" },
            })
            .inc();
        self.durations
            .get_or_create(&RpcLabels {
                host: host.to_owned(),
                rpc: rpc.to_owned(),
            })
            .observe(took.as_secs_f64());
    }

    pub(crate) fn fetched(&self, host: &str, image: &str, bytes: u64, progress: Option<f64>) {
        let labels = ImageLabels {
            host: host.to_owned(),
            image: image.to_owned(),
        };
        self.fetched_bytes.get_or_create(&labels).inc_by(bytes);
        if let Some(progress) = progress {
            self.progress.get_or_create(&labels).set(progress);
        }
    }

    pub(crate) fn fetch_ended(&self, host: &str, image: &str, ok: bool) {
        let labels = ImageLabels {
            host: host.to_owned(),
            image: image.to_owned(),
        };
        self.progress.remove(&labels);
        self.fetches
            .get_or_create(&FetchLabels {
                host: host.to_owned(),
                image: image.to_owned(),
                result: if ok { "ok" } else { "error" },
            })
            .inc();
    }
}

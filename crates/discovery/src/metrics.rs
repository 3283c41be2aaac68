//! Requests by route and status, their duration, and who is watching.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Request {
    /// The pattern, never the path: a label that clients choose has no bound.
    route: String,
    method: &'static str,
    status: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Route {
    route: String,
}

/// Cheap to clone; clones count together.
#[derive(Debug, Clone)]
pub struct Metrics {
    requests: Family<Request, Counter>,
    seconds: Family<Route, Histogram, fn() -> Histogram>,
    watchers: Gauge,
}

/// 0.1 ms to 1.6 s.
fn buckets() -> Histogram {
    Histogram::new(exponential_buckets(0.0001, 2.0, 15))
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            requests: Family::default(),
            seconds: Family::new_with_constructor(buckets),
            watchers: Gauge::default(),
        }
    }
}

impl Metrics {
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        registry.register(
            "egress_api_requests",
            "Requests of the discovery API by route and status",
            metrics.requests.clone(),
        );
        registry.register(
            "egress_api_request_seconds",
            "How long requests of the discovery API took, to the answer's header",
            metrics.seconds.clone(),
        );
        registry.register(
            "egress_api_watchers",
            "Clients of /v1/watch",
            metrics.watchers.clone(),
        );
        metrics
    }

    pub(crate) fn answered(
        &self,
        route: &str,
        method: &http::Method,
        status: http::StatusCode,
        took: Duration,
    ) {
        let request = Request {
            route: route.to_owned(),
            method: match method.as_str() {
                "GET" => "GET",
                "HEAD" => "HEAD",
                "POST" => "POST",
                "DELETE" => "DELETE",
                _ => "other",
            },
            status: status.as_u16(),
        };
        self.requests.get_or_create(&request).inc();
        let route = Route {
            route: request.route,
        };
        self.seconds
            .get_or_create(&route)
            .observe(took.as_secs_f64());
    }

    /// Counts one watcher until it is dropped.
    pub(crate) fn watching(&self) -> Watching {
        self.watchers.inc();
        Watching(self.watchers.clone())
    }
}

pub(crate) struct Watching(Gauge);

impl Drop for Watching {
    fn drop(&mut self) {
        self.0.dec();
    }
}

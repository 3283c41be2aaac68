//! What the reconciler is built from.

use std::sync::Arc;
use std::time::Duration;

use egress_core::{Clock, InstallationId};
use egress_health::Health;
use egress_lease::LeaseStore;
use egress_provider::ProviderSet;

use crate::metrics::Metrics;

/// Limits and times. The defaults are the documented ones.
#[derive(Debug, Clone)]
pub struct Config {
    /// Only this namespace; None: all.
    pub namespace: Option<String>,
    /// Provisioning that takes longer is replaced.
    pub provisioning_timeout: Duration,
    /// Between two looks at an instance that is on its way, should no event come.
    pub poll: Duration,
    /// The safety net: each Proxy is reconciled at least so often (give or take a tenth).
    pub resync: Duration,
    /// Reconciles at a time.
    pub concurrency: usize,
    /// Of these, at most so many of one provider.
    pub concurrency_per_provider: usize,
    /// For each call of the Kubernetes API.
    pub api_deadline: Duration,
    /// A watch is renewed after that time; one that stays silent for longer is given up.
    pub watch_timeout: Duration,
    /// After errors.
    pub backoff: Backoff,
    /// After the first list of all Proxies.
    pub first_sweep: Duration,
    pub sweep_interval: Duration,
    /// Younger instances are left alone: their create may be in flight.
    pub orphan_grace: Duration,
    /// At most so many orphans are deleted in one sweep.
    pub sweep_cap: usize,
    /// Running reconciles get so long to end at a stop.
    pub shutdown_grace: Duration,
    /// `reportingInstance` of Events, such as the host's name.
    pub reporting_instance: Option<String>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            namespace: None,
            provisioning_timeout: Duration::from_secs(15 * 60),
            poll: Duration::from_secs(2),
            resync: Duration::from_secs(5 * 60),
            concurrency: 32,
            concurrency_per_provider: 16,
            api_deadline: Duration::from_secs(15),
            watch_timeout: Duration::from_secs(60),
            backoff: Backoff::default(),
            first_sweep: Duration::from_secs(30),
            sweep_interval: Duration::from_secs(5 * 60),
            orphan_grace: Duration::from_secs(10 * 60),
            sweep_cap: 20,
            shutdown_grace: Duration::from_secs(10),
            reporting_instance: None,
        }
    }
}

/// Exponential, with jitter of a fifth in both directions.
#[derive(Debug, Clone)]
pub struct Backoff {
    pub first: Duration,
    pub max: Duration,
    /// After QuotaExceeded.
    pub quota: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self {
            first: Duration::from_secs(1),
            max: Duration::from_secs(5 * 60),
            quota: Duration::from_secs(5 * 60),
        }
    }
}

impl Backoff {
    /// Without jitter; `attempt` counts from 1.
    pub(crate) fn plain(&self, attempt: u32) -> Duration {
        let doublings = attempt.saturating_sub(1).min(20);
        self.first
            .saturating_mul(1 << doublings)
            .min(self.max)
            .max(self.first)
    }

    pub(crate) fn after(&self, attempt: u32) -> Duration {
        jitter(self.plain(attempt), rand::random())
    }

    pub(crate) fn quota(&self) -> Duration {
        jitter(self.quota, rand::random())
    }
}

/// `wait`, a fifth less to a fifth more; `unit` is from 0 to 1.
pub(crate) fn jitter(wait: Duration, unit: f64) -> Duration {
    wait.mul_f64(0.8 + 0.4 * unit.clamp(0.0, 1.0))
}

/// Everything that the reconciler talks to.
#[derive(Clone)]
pub struct Deps {
    pub client: kube::Client,
    pub providers: ProviderSet,
    pub health: Arc<dyn Health>,
    pub leases: Arc<dyn LeaseStore>,
    pub installation: InstallationId,
    pub clock: Arc<dyn Clock>,
    pub metrics: Metrics,
}

//! What every step of a reconcile has at hand.

use std::sync::Arc;

use egress_api::Proxy;
use egress_core::{Clock, InstallationId, ProxyKey};
use egress_health::Health;
use egress_lease::LeaseStore;
use egress_provider::ProviderSet;
use jiff::Timestamp;
use kube::runtime::reflector::{ObjectRef, Store};

use crate::config::Config;
use crate::directory::Directory;
use crate::events::Events;
use crate::index::Index;
use crate::kubernetes::KubernetesApi;
use crate::memory::Memories;
use crate::metrics::Metrics;

pub(crate) struct Context {
    pub config: Config,
    pub api: KubernetesApi,
    pub store: Store<Proxy>,
    pub index: Arc<Index>,
    pub directory: Directory,
    pub providers: ProviderSet,
    pub health: Arc<dyn Health>,
    pub leases: Arc<dyn LeaseStore>,
    pub installation: InstallationId,
    pub clock: Arc<dyn Clock>,
    /// When this process began.
    pub started: Timestamp,
    pub memories: Memories,
    pub events: Events,
    pub metrics: Metrics,
}

impl Context {
    pub(crate) fn cached(&self, key: &ProxyKey) -> Option<Arc<Proxy>> {
        self.store
            .get(&ObjectRef::new(&key.name).within(&key.namespace))
    }

    /// The queue's group of a Proxy: the provider that its calls go to.
    pub(crate) fn group(proxy: Option<&Proxy>) -> String {
        let recorded = proxy.and_then(|p| {
            p.metadata
                .annotations
                .as_ref()
                .and_then(|a| a.get(egress_api::PROVIDER_ANNOTATION))
        });
        recorded
            .or(proxy.and_then(|p| p.spec.provider.as_ref()))
            .cloned()
            .unwrap_or_default()
    }
}

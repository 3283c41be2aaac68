//! The providers file: read, built, wrapped, and read again when it changes.
//!
//! A provider whose block did not change across a reload keeps running as it is; one that cannot
//! be built says so on every call instead of stopping the others.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use egress_core::{InstallationId, ProviderId};
use egress_provider::config::{self, BuildContext, Faults, NamedBlueprint, ProviderType};
use egress_provider::{
    CreateRequest, Instance, InstanceEvent, Operation, Provider, ProviderError, ProviderSet,
    SetChange,
};
use futures::StreamExt;
use futures::stream::BoxStream;
use prometheus_client::registry::Registry;
use serde_json::Value;

use crate::state::Directories;

/// Every backend that this program has: the only list of them.
pub struct Backends {
    pub local: egress_provider_local::LocalType,
    pub kvm: egress_provider_kvm::KvmType,
}

impl Backends {
    pub fn new(registry: &mut Registry) -> Self {
        Self {
            local: egress_provider_local::LocalType::default(),
            kvm: egress_provider_kvm::KvmType::new(egress_provider_kvm::Metrics::register(
                registry,
            )),
        }
    }

    /// Closes connections, and ends what is configured to end with the operator. After the last
    /// other call.
    pub async fn shutdown(&self) {
        self.local.shutdown().await;
        for provider in self.kvm.providers() {
            provider.shutdown().await;
        }
    }

    /// Reads and checks a file.
    pub fn read(&self, path: &Path) -> Result<Vec<NamedBlueprint>, ProvidersError> {
        let text = std::fs::read_to_string(path).map_err(|source| ProvidersError::Read {
            path: path.to_owned(),
            source,
        })?;
        self.parse(&text).map_err(|faults| ProvidersError::Faults {
            path: path.to_owned(),
            faults,
        })
    }

    /// Checks the text of a file.
    pub fn parse(&self, text: &str) -> Result<Vec<NamedBlueprint>, Faults> {
        let types: [&dyn ProviderType; 2] = [&self.local, &self.kvm];
        config::parse(text, &types)
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ProvidersError {
    #[error("cannot read the providers file {}: {source}; give its path with --providers-config", path.display())]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("the providers file {} has {} fault(s):\n{faults}", path.display(), faults.iter().count())]
    Faults { path: PathBuf, faults: Faults },
}

/// Wraps a freshly built provider with what cuts across all of them.
pub type Wrap = Arc<dyn Fn(Arc<dyn Provider>) -> Arc<dyn Provider> + Send + Sync>;

/// Builds providers and keeps the running set in step with the file.
pub struct Loader {
    backends: Backends,
    installation: InstallationId,
    directories: Directories,
    wrap: Wrap,
    set: ProviderSet,
    running: Mutex<BTreeMap<String, Running>>,
}

struct Running {
    type_name: &'static str,
    block: Value,
    provider: Arc<dyn Provider>,
    /// Built without an error: may be kept across a reload.
    healthy: bool,
}

impl fmt::Debug for Loader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loader")
            .field("names", &self.set.names())
            .finish_non_exhaustive()
    }
}

impl Loader {
    pub fn new(
        backends: Backends,
        installation: InstallationId,
        directories: Directories,
        wrap: Wrap,
    ) -> Self {
        Self {
            backends,
            installation,
            directories,
            wrap,
            set: ProviderSet::new([]),
            running: Mutex::new(BTreeMap::new()),
        }
    }

    pub fn backends(&self) -> &Backends {
        &self.backends
    }

    pub fn set(&self) -> ProviderSet {
        self.set.clone()
    }

    /// Takes a checked configuration over.
    pub fn apply(&self, blueprints: Vec<NamedBlueprint>) -> SetChange {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let mut next = BTreeMap::new();
        for named in blueprints {
            let kept = running.remove(&named.name).filter(|old| {
                old.healthy && old.type_name == named.type_name && old.block == named.block
            });
            let entry = kept.unwrap_or_else(|| self.build(&named));
            next.insert(named.name, entry);
        }
        *running = next;
        self.set
            .replace(running.values().map(|r| Arc::clone(&r.provider)))
    }

    fn build(&self, named: &NamedBlueprint) -> Running {
        let context = BuildContext {
            name: named.name.clone(),
            installation: self.installation.clone(),
            state_dir: self.directories.state.join("providers").join(&named.name),
            runtime_dir: self.directories.runtime.join("providers").join(&named.name),
            cache_dir: self.directories.cache.join("providers").join(&named.name),
        };
        let (provider, healthy) = match named.blueprint.build(context) {
            Ok(provider) => (provider, true),
            Err(error) => {
                tracing::error!(PROVIDER = %named.name, %error, "provider cannot be built; the others go on");
                let unavailable: Arc<dyn Provider> = Arc::new(Unavailable {
                    name: named.name.clone(),
                    kind: named.type_name,
                    class: error.class,
                    message: error.message,
                });
                (unavailable, false)
            }
        };
        Running {
            type_name: named.type_name,
            block: named.block.clone(),
            provider: (self.wrap)(provider),
            healthy,
        }
    }
}

/// Stands for a provider that could not be built: every call says why.
struct Unavailable {
    name: String,
    kind: &'static str,
    class: egress_core::ErrorClass,
    message: String,
}

impl Unavailable {
    fn error(&self, operation: Operation) -> ProviderError {
        ProviderError::new(self.class, &self.name, operation, &self.message)
    }
}

#[async_trait]
impl Provider for Unavailable {
    fn name(&self) -> &str {
        &self.name
    }

    fn kind(&self) -> &'static str {
        self.kind
    }

    async fn create(&self, _: &CreateRequest) -> Result<ProviderId, ProviderError> {
        Err(self.error(Operation::Create))
    }

    async fn get(&self, _: &ProviderId) -> Result<Instance, ProviderError> {
        Err(self.error(Operation::Get))
    }

    async fn delete(&self, _: &ProviderId) -> Result<(), ProviderError> {
        Err(self.error(Operation::Delete))
    }

    async fn list(&self) -> Result<Vec<Instance>, ProviderError> {
        Err(self.error(Operation::List))
    }

    fn events(&self) -> BoxStream<'static, InstanceEvent> {
        futures::stream::pending().boxed()
    }

    async fn collect_garbage(
        &self,
        _: &BTreeSet<egress_core::Uid>,
        _: std::time::Duration,
    ) -> Result<Vec<String>, ProviderError> {
        Err(self.error(Operation::List))
    }
}

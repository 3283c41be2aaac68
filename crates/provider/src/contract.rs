//! The `Provider` trait.

use std::fmt;
use std::net::IpAddr;

use async_trait::async_trait;
use egress_core::spec::Placement;
use egress_core::{
    ErrorClass, InstallationId, InstanceName, ProviderId, ProxyKey, SecretBytes, Uid,
};
use futures::stream::BoxStream;
use jiff::Timestamp;

/// A small compute backend: four calls that never wait until a machine runs, and a stream of hints.
///
/// Every implementation passes the `conformance` suite (feature `testing`).
#[async_trait]
pub trait Provider: Send + Sync + 'static {
    /// The configured name, such as `kvm-home`.
    fn name(&self) -> &str;

    /// The type, such as `kvm`.
    fn kind(&self) -> &'static str;

    /// Submits and returns; idempotent by `request.name`, so a repeat after a crash finds the
    /// existing instance (and finishes a half-made one). Work that takes long (an image fetch)
    /// goes on in the background; `get` then tells the step it is in, or the error that ended it.
    async fn create(&self, request: &CreateRequest) -> Result<ProviderId, ProviderError>;

    /// One instance. [`ErrorClass::NotFound`] is a normal answer.
    async fn get(&self, id: &ProviderId) -> Result<Instance, ProviderError>;

    /// Idempotent: something already gone is success. May return before the instance is gone;
    /// `get` says NotFound once it is.
    async fn delete(&self, id: &ProviderId) -> Result<(), ProviderError>;

    /// Everything that this installation ever marked. All or nothing: a partial view is an error.
    async fn list(&self) -> Result<Vec<Instance>, ProviderError>;

    /// "Look at this instance again" hints; may be empty, may repeat, may miss some. Each call
    /// gives a stream of its own.
    fn events(&self) -> BoxStream<'static, InstanceEvent>;

    /// The instance of that name, for a create that may have been cut off before it was recorded.
    async fn find(&self, name: &InstanceName) -> Result<Option<Instance>, ProviderError> {
        Ok(self
            .list()
            .await?
            .into_iter()
            .find(|instance| &instance.name == name))
    }

    /// Deletes what belongs to no instance and no Proxy: volumes, base images. `live` are the UIDs
    /// of all Proxies; what is younger than `grace` stays. Returns the names of what was deleted.
    async fn collect_garbage(
        &self,
        _live: &std::collections::BTreeSet<Uid>,
        _grace: std::time::Duration,
    ) -> Result<Vec<String>, ProviderError> {
        Ok(Vec::new())
    }
}

/// What an instance is to be made from.
#[derive(Debug, Clone)]
pub struct CreateRequest {
    pub name: InstanceName,
    pub uid: Uid,
    pub key: ProxyKey,
    pub installation: InstallationId,
    /// Where the proxy is to listen.
    pub port: u16,
    pub placement: Placement,
    /// Handed to the instance byte for byte.
    pub user_data: Option<SecretBytes>,
}

/// What a backend knows of one instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Instance {
    pub id: ProviderId,
    pub name: InstanceName,
    pub state: InstanceState,
    /// The Proxy that it was made for, from its marks.
    pub uid: Uid,
    /// None: unknown, counts as old.
    pub created_at: Option<Timestamp>,
}

/// Never Running without an address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InstanceState {
    Provisioning(Step),
    Running {
        address: IpAddr,
        /// Where it listens, if that is not the port that was asked for.
        port: Option<u16>,
    },
    Stopped,
}

/// Which step of provisioning an instance is in: the reason and message of the `Provisioned`
/// condition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Message with a percentage, e.g. `debian-13 on nas1: 42% of 406 MiB`.
    FetchingImage(String),
    Creating(String),
    WaitingForAddress(String),
}

impl Step {
    /// The condition's reason.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::FetchingImage(_) => "FetchingImage",
            Self::Creating(_) => "Creating",
            Self::WaitingForAddress(_) => "WaitingForAddress",
        }
    }

    pub fn message(&self) -> &str {
        match self {
            Self::FetchingImage(m) | Self::Creating(m) | Self::WaitingForAddress(m) => m,
        }
    }
}

/// "Look at this instance again."
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InstanceEvent {
    /// Something happened to this instance.
    Instance(InstanceName),
    /// Something may have happened to any instance of this provider (a reconnect).
    All,
}

/// Which call failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    Create,
    Get,
    Delete,
    List,
    Build,
}

impl Operation {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Get => "get",
            Self::Delete => "delete",
            Self::List => "list",
            Self::Build => "build",
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A failed call: its class decides what happens, its text is for people. It names the provider,
/// the operation and the instance, and never carries cloud-init or credentials.
#[derive(Debug, thiserror::Error)]
#[error("{provider}: {operation}{}: {message}", instance.as_deref().map(|i| format!(" {i}")).unwrap_or_default())]
pub struct ProviderError {
    pub class: ErrorClass,
    pub provider: String,
    pub operation: Operation,
    pub instance: Option<String>,
    /// The backend's own text.
    pub message: String,
    #[source]
    pub source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl ProviderError {
    pub fn new(
        class: ErrorClass,
        provider: impl Into<String>,
        operation: Operation,
        message: impl Into<String>,
    ) -> Self {
        Self {
            class,
            provider: provider.into(),
            operation,
            instance: None,
            message: message.into(),
            source: None,
        }
    }

    #[must_use]
    pub fn on(mut self, instance: impl fmt::Display) -> Self {
        self.instance = Some(instance.to_string());
        self
    }

    #[must_use]
    pub fn caused_by(
        mut self,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        self.source = Some(source.into());
        self
    }
}

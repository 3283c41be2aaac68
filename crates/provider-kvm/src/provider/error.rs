//! What went wrong, and what that means.

use egress_core::ErrorClass;
use egress_provider::{Operation, ProviderError};

use crate::host::error::HostError;
use crate::image::ImageError;
use crate::seed::SeedError;
use crate::storage::StorageError;

/// A failed operation of the kvm provider.
#[derive(Debug, Clone, thiserror::Error)]
pub enum KvmError {
    /// The placement asks for what there is not: the message lists what there is.
    #[error("{0}")]
    Placement(String),
    #[error("{0:?} is no id of this provider: hosts/HOST/domains/NAME was expected")]
    BadId(String),
    #[error(
        "host {host:?} is not configured any more; configured: {known}. Put it back, or delete the Proxy"
    )]
    UnknownHost { host: String, known: String },
    #[error("host {0} is draining: it takes no new VMs")]
    Draining(String),
    #[error("domain {name} is not on host {host}")]
    NotFound { host: String, name: String },
    #[error(
        "host {host} has a domain named {name} that is not the operator's ({why}). It is left untouched; rename or remove it"
    )]
    Conflict {
        host: String,
        name: String,
        why: String,
    },
    #[error("host {host} has {available} MiB of memory free, but {needed} MiB are asked for")]
    NoMemory {
        host: String,
        available: u64,
        needed: u64,
    },
    #[error(
        "host {host} has no UEFI firmware without secure boot: install it (Debian: ovmf; Fedora: edk2-ovmf), or set firmware: bios for the image"
    )]
    NoFirmware { host: String },
    #[error("host {host}: {source}")]
    Storage { host: String, source: StorageError },
    #[error(transparent)]
    Host(#[from] HostError),
    #[error("{0}")]
    Image(Box<ImageError>),
    #[error(transparent)]
    Seed(#[from] SeedError),
    #[error("the operator is stopping")]
    Stopped,
    #[error("host {host}: the XML of domain {name} is not readable: {reason}")]
    BadXml {
        host: String,
        name: String,
        reason: String,
    },
}

impl From<ImageError> for KvmError {
    fn from(error: ImageError) -> Self {
        Self::Image(Box::new(error))
    }
}

impl KvmError {
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::Placement(_)
            | Self::UnknownHost { .. }
            | Self::Draining(_)
            | Self::Conflict { .. }
            | Self::NoFirmware { .. }
            | Self::Seed(_) => ErrorClass::Permanent,
            // What has not even the form of an id names nothing.
            Self::NotFound { .. } | Self::BadId(_) => ErrorClass::NotFound,
            Self::NoMemory { .. } => ErrorClass::QuotaExceeded,
            Self::Storage { source, .. } => source.class(),
            Self::Host(error) => error.class(),
            Self::Image(error) => error.class(),
            Self::BadXml { .. } | Self::Stopped => ErrorClass::Transient,
        }
    }

    pub(crate) fn into_provider_error(
        self,
        provider: &str,
        operation: Operation,
        instance: &str,
    ) -> ProviderError {
        let class = match self.class() {
            // A create or a list never answers "not found": what it rests on was gone.
            ErrorClass::NotFound if operation != Operation::Get => ErrorClass::Transient,
            class => class,
        };
        let error = ProviderError::new(class, provider, operation, self.to_string());
        let error = if instance.is_empty() {
            error
        } else {
            error.on(instance)
        };
        error.caused_by(Box::new(self) as Box<dyn std::error::Error + Send + Sync>)
    }
}

/// Puts the host's name to a storage error.
pub(crate) fn on_host(host: &str) -> impl Fn(StorageError) -> KvmError {
    let host = host.to_owned();
    move |source| KvmError::Storage {
        host: host.clone(),
        source,
    }
}

//! What a libvirt host answered, or why it did not.

use std::sync::Arc;
use std::time::Duration;

use egress_core::ErrorClass;
use egress_ssh::SshError;
use virt::sys;

/// An error that libvirt itself reported.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{rpc}: {message} ({name}, code {number})")]
pub struct LibvirtError {
    /// The C function, such as `virDomainCreate`.
    pub rpc: &'static str,
    /// `virErrorNumber`.
    pub number: u32,
    /// The number's name, such as `VIR_ERR_NO_DOMAIN`.
    pub name: &'static str,
    pub message: String,
}

impl LibvirtError {
    pub fn new(rpc: &'static str, error: &virt::error::Error) -> Self {
        let number = error.code().to_raw();
        Self {
            rpc,
            number,
            name: number_name(number),
            message: error.message().to_owned(),
        }
    }

    /// A local verdict in libvirt's form, for something that a call gave and that makes no sense.
    pub fn odd(rpc: &'static str, message: impl Into<String>) -> Self {
        Self {
            rpc,
            number: sys::VIR_ERR_INTERNAL_ERROR,
            name: number_name(sys::VIR_ERR_INTERNAL_ERROR),
            message: message.into(),
        }
    }

    pub fn is(&self, number: sys::virErrorNumber) -> bool {
        self.number == number
    }

    /// The thing does not exist. The `test:` driver says INTERNAL_ERROR or OPERATION_FAILED for
    /// some of these, which is too little to go by.
    pub fn is_gone(&self) -> bool {
        matches!(
            self.number,
            sys::VIR_ERR_NO_DOMAIN
                | sys::VIR_ERR_NO_STORAGE_VOL
                | sys::VIR_ERR_NO_STORAGE_POOL
                | sys::VIR_ERR_NO_NETWORK
        )
    }

    /// A pool that is busy with another job: worth trying again at once.
    pub fn is_pool_busy(&self) -> bool {
        self.message.contains("asynchronous jobs running")
            || self.message.contains("is still in use")
            || self.is(sys::VIR_ERR_RESOURCE_BUSY)
    }

    pub fn class(&self) -> ErrorClass {
        match self.number {
            sys::VIR_ERR_NO_DOMAIN => ErrorClass::NotFound,
            // Nothing of these changes unless a person changes the host or the configuration.
            sys::VIR_ERR_NO_STORAGE_POOL
            | sys::VIR_ERR_NO_NETWORK
            | sys::VIR_ERR_INVALID_ARG
            | sys::VIR_ERR_XML_ERROR
            | sys::VIR_ERR_XML_DETAIL
            | sys::VIR_ERR_XML_INVALID_SCHEMA
            | sys::VIR_ERR_CONFIG_UNSUPPORTED
            | sys::VIR_ERR_NO_SUPPORT
            | sys::VIR_ERR_OPERATION_UNSUPPORTED
            | sys::VIR_ERR_ARGUMENT_UNSUPPORTED
            | sys::VIR_ERR_CPU_INCOMPATIBLE
            | sys::VIR_ERR_AUTH_FAILED
            | sys::VIR_ERR_AUTH_CANCELLED
            | sys::VIR_ERR_AUTH_UNAVAILABLE
            | sys::VIR_ERR_ACCESS_DENIED
            | sys::VIR_ERR_OPERATION_DENIED
            | sys::VIR_ERR_DOM_EXIST => ErrorClass::Permanent,
            sys::VIR_ERR_NO_MEMORY => ErrorClass::QuotaExceeded,
            _ if self.message.contains("No space left on device")
                || self.message.contains("Disk quota exceeded")
                || self.message.contains("Cannot allocate memory") =>
            {
                ErrorClass::QuotaExceeded
            }
            _ => ErrorClass::Transient,
        }
    }
}

fn number_name(number: u32) -> &'static str {
    match number {
        sys::VIR_ERR_INTERNAL_ERROR => "VIR_ERR_INTERNAL_ERROR",
        sys::VIR_ERR_NO_MEMORY => "VIR_ERR_NO_MEMORY",
        sys::VIR_ERR_NO_SUPPORT => "VIR_ERR_NO_SUPPORT",
        sys::VIR_ERR_NO_CONNECT => "VIR_ERR_NO_CONNECT",
        sys::VIR_ERR_INVALID_CONN => "VIR_ERR_INVALID_CONN",
        sys::VIR_ERR_INVALID_ARG => "VIR_ERR_INVALID_ARG",
        sys::VIR_ERR_OPERATION_FAILED => "VIR_ERR_OPERATION_FAILED",
        sys::VIR_ERR_XML_ERROR => "VIR_ERR_XML_ERROR",
        sys::VIR_ERR_DOM_EXIST => "VIR_ERR_DOM_EXIST",
        sys::VIR_ERR_OPERATION_DENIED => "VIR_ERR_OPERATION_DENIED",
        sys::VIR_ERR_XML_DETAIL => "VIR_ERR_XML_DETAIL",
        sys::VIR_ERR_SYSTEM_ERROR => "VIR_ERR_SYSTEM_ERROR",
        sys::VIR_ERR_RPC => "VIR_ERR_RPC",
        sys::VIR_ERR_NO_DOMAIN => "VIR_ERR_NO_DOMAIN",
        sys::VIR_ERR_NO_NETWORK => "VIR_ERR_NO_NETWORK",
        sys::VIR_ERR_AUTH_FAILED => "VIR_ERR_AUTH_FAILED",
        sys::VIR_ERR_NO_STORAGE_POOL => "VIR_ERR_NO_STORAGE_POOL",
        sys::VIR_ERR_NO_STORAGE_VOL => "VIR_ERR_NO_STORAGE_VOL",
        sys::VIR_ERR_OPERATION_INVALID => "VIR_ERR_OPERATION_INVALID",
        sys::VIR_ERR_CONFIG_UNSUPPORTED => "VIR_ERR_CONFIG_UNSUPPORTED",
        sys::VIR_ERR_OPERATION_TIMEOUT => "VIR_ERR_OPERATION_TIMEOUT",
        sys::VIR_ERR_ARGUMENT_UNSUPPORTED => "VIR_ERR_ARGUMENT_UNSUPPORTED",
        sys::VIR_ERR_OPERATION_ABORTED => "VIR_ERR_OPERATION_ABORTED",
        sys::VIR_ERR_NO_DOMAIN_METADATA => "VIR_ERR_NO_DOMAIN_METADATA",
        sys::VIR_ERR_OPERATION_UNSUPPORTED => "VIR_ERR_OPERATION_UNSUPPORTED",
        sys::VIR_ERR_AGENT_UNRESPONSIVE => "VIR_ERR_AGENT_UNRESPONSIVE",
        sys::VIR_ERR_RESOURCE_BUSY => "VIR_ERR_RESOURCE_BUSY",
        sys::VIR_ERR_ACCESS_DENIED => "VIR_ERR_ACCESS_DENIED",
        sys::VIR_ERR_STORAGE_VOL_EXIST => "VIR_ERR_STORAGE_VOL_EXIST",
        sys::VIR_ERR_AUTH_UNAVAILABLE => "VIR_ERR_AUTH_UNAVAILABLE",
        _ => "virErrorNumber",
    }
}

/// Why a call to a host gave no result. Cheap to clone.
#[derive(Debug, Clone, thiserror::Error)]
pub enum HostError {
    #[error("host {host}: {error}")]
    Ssh { host: String, error: Box<SshError> },
    #[error("host {host}: no libvirt socket could be opened: {tried}")]
    Socket { host: String, tried: String },
    #[error("host {host}: libvirt at {socket} did not accept the connection: {error}")]
    Open {
        host: String,
        socket: String,
        error: LibvirtError,
    },
    #[error("host {host}: {error}")]
    Libvirt { host: String, error: LibvirtError },
    #[error("host {host}: {rpc} was not answered within {} s; the connection was dropped", after.as_secs())]
    Deadline {
        host: String,
        rpc: &'static str,
        after: Duration,
    },
    #[error("host {host}: too many calls wait for an answer; {rpc} did not begin within {} s", after.as_secs())]
    Busy {
        host: String,
        rpc: &'static str,
        after: Duration,
    },
    #[error("host {host}: the connection to libvirt was lost during {rpc}: {reason}")]
    Lost {
        host: String,
        rpc: &'static str,
        reason: String,
    },
    #[error("host {host}: cannot start a thread: {error}")]
    Thread {
        host: String,
        error: Arc<std::io::Error>,
    },
}

impl HostError {
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::Ssh { error, .. } => error.class(),
            Self::Open { error, .. } => match error.class() {
                // A daemon that is just starting refuses in many ways.
                ErrorClass::Permanent => ErrorClass::Permanent,
                _ => ErrorClass::Transient,
            },
            Self::Libvirt { error, .. } => error.class(),
            Self::Socket { .. }
            | Self::Deadline { .. }
            | Self::Busy { .. }
            | Self::Lost { .. }
            | Self::Thread { .. } => ErrorClass::Transient,
        }
    }

    /// libvirt's own answer, if it was one.
    pub fn libvirt(&self) -> Option<&LibvirtError> {
        match self {
            Self::Libvirt { error, .. } => Some(error),
            _ => None,
        }
    }
}

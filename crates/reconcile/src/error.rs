//! What can go wrong between the reconciler and the Kubernetes API or the lease store. Errors of
//! providers are not here: they are observations, and decide by their class.

use std::time::Duration;

use egress_core::ProxyKey;
use egress_lease::StoreFailure;

/// A failed call of the Kubernetes API.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    #[error("cannot {action} {what}: {source}")]
    Call {
        action: &'static str,
        what: String,
        #[source]
        source: Box<kube::Error>,
    },
    #[error("cannot {action} {what}: no answer within {} s", limit.as_secs_f32())]
    Deadline {
        action: &'static str,
        what: String,
        limit: Duration,
    },
}

impl ApiError {
    fn code(&self) -> u16 {
        match self {
            Self::Call { source, .. } => match &**source {
                kube::Error::Api(status) => status.code,
                _ => 0,
            },
            Self::Deadline { .. } => 0,
        }
    }

    /// Somebody else wrote the object in between.
    pub(crate) fn is_conflict(&self) -> bool {
        self.code() == 409
    }

    pub(crate) fn is_not_found(&self) -> bool {
        self.code() == 404
    }

    pub(crate) fn is_forbidden(&self) -> bool {
        matches!(self.code(), 401 | 403)
    }

    /// The resource version is too old to go on from.
    pub(crate) fn is_gone(&self) -> bool {
        self.code() == 410
    }
}

/// Why one reconcile did not come to its end; it is repeated with backoff.
#[derive(Debug, thiserror::Error)]
pub enum ReconcileError {
    #[error(transparent)]
    Api(#[from] ApiError),
    #[error("leases of {key} cannot be ended: {source}")]
    Leases {
        key: ProxyKey,
        #[source]
        source: StoreFailure,
    },
    #[error("{0} has no UID: it was never stored")]
    NoUid(ProxyKey),
}

impl ReconcileError {
    /// The metric's label.
    pub(crate) fn category(&self) -> &'static str {
        match self {
            Self::Api(e) if e.is_conflict() => "conflict",
            Self::Api(_) => "api_error",
            Self::Leases { .. } => "lease_error",
            Self::NoUid(_) => "invalid",
        }
    }
}

/// Why the reconciler ended although nobody asked it to.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error("the reconciler's task {task:?} ended")]
    TaskEnded { task: &'static str },
    #[error("the reconciler's task {task:?} panicked: {message}")]
    TaskPanicked { task: &'static str, message: String },
}

//! What all requests share.

use std::sync::{Arc, OnceLock};

use jiff::Timestamp;
use tokio_util::sync::CancellationToken;

use crate::openapi::Documents;
use crate::registry::Registry;
use crate::storage::Store;

/// A clock; injected, so that tests own the time.
pub type Clock = Arc<dyn Fn() -> Timestamp + Send + Sync>;

/// Shared state; cheap to clone.
#[derive(Clone)]
pub(crate) struct Server {
    pub registry: Arc<Registry>,
    pub store: Store,
    pub clock: Clock,
    pub documents: Arc<OnceLock<Documents>>,
    /// Ends watches and background work.
    pub stopping: CancellationToken,
}

impl Server {
    pub fn now(&self) -> Timestamp {
        (self.clock)()
    }
}

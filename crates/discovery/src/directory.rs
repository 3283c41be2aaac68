//! Where the API learns about proxies: the operator's cache, never the API server.

use std::sync::Arc;

use egress_core::{ProxyKey, ProxyRecord};
use tokio::sync::watch;

/// The operator's view of all proxies. Every call answers from memory, at once.
///
/// A proxy that is being deleted must show as `deleting` (or be gone) *before* its leases are
/// ended with `LeaseStore::end_for`: an acquire checks it once more after its grant, so that no
/// lease of a deleted proxy is left behind.
pub trait Directory: Send + Sync + 'static {
    /// All proxies, those being deleted too.
    fn proxies(&self) -> Vec<Arc<ProxyRecord>>;

    fn get(&self, key: &ProxyKey) -> Option<Arc<ProxyRecord>>;

    /// Whether the cache holds everything that there is.
    fn synced(&self) -> bool;

    /// What `/readyz` says while the operator is not ready.
    fn not_ready_reason(&self) -> Option<String>;

    /// Marked as changed whenever a call above may answer differently. Changes may be merged.
    fn changes(&self) -> watch::Receiver<()>;
}

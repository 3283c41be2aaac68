//! The reconciler's view of the Proxies as the discovery API wants it.

use std::sync::Arc;

use egress_core::{ProxyKey, ProxyRecord};
use egress_reconcile::{Handle, Readiness};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// The reconciler's directory and readiness as one.
pub struct ReconcilerDirectory {
    directory: egress_reconcile::Directory,
    handle: Handle,
    changed: watch::Sender<()>,
}

impl ReconcilerDirectory {
    pub fn new(directory: egress_reconcile::Directory, handle: Handle) -> Arc<Self> {
        Arc::new(Self {
            directory,
            handle,
            changed: watch::Sender::new(()),
        })
    }

    /// Passes changes of both sources on until cancelled.
    pub async fn forward(self: Arc<Self>, cancel: CancellationToken) {
        let mut records = self.directory.changes();
        let mut readiness = self.handle.readiness_changes();
        loop {
            tokio::select! {
                () = cancel.cancelled() => return,
                changed = records.changed() => {
                    if changed.is_err() {
                        return;
                    }
                }
                () = readiness.changed() => {}
            }
            self.changed.send_replace(());
        }
    }
}

impl egress_discovery::Directory for ReconcilerDirectory {
    fn proxies(&self) -> Vec<Arc<ProxyRecord>> {
        self.directory.records()
    }

    fn get(&self, key: &ProxyKey) -> Option<Arc<ProxyRecord>> {
        self.directory.get(key)
    }

    fn synced(&self) -> bool {
        self.handle.synced()
    }

    fn not_ready_reason(&self) -> Option<String> {
        match self.handle.readiness() {
            Readiness::Ready => None,
            Readiness::NotReady(why) => Some(why),
        }
    }

    fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }
}

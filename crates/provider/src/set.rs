//! The running providers by name, swapped as a whole when the configuration changes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use arc_swap::ArcSwap;
use tokio::sync::broadcast;

use crate::contract::Provider;

/// Names whose provider was added, removed or replaced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SetChange {
    pub names: BTreeSet<String>,
}

/// Looked up on each reconcile, so that a reload takes effect at once.
#[derive(Clone)]
pub struct ProviderSet {
    current: Arc<ArcSwap<BTreeMap<String, Arc<dyn Provider>>>>,
    changes: broadcast::Sender<SetChange>,
}

impl ProviderSet {
    pub fn new(providers: impl IntoIterator<Item = Arc<dyn Provider>>) -> Self {
        let map = by_name(providers);
        Self {
            current: Arc::new(ArcSwap::from_pointee(map)),
            changes: broadcast::channel(64).0,
        }
    }

    pub fn get(&self, name: &str) -> Option<Arc<dyn Provider>> {
        self.current.load().get(name).cloned()
    }

    /// All of them, in the order of their names.
    pub fn all(&self) -> Vec<Arc<dyn Provider>> {
        self.current.load().values().cloned().collect()
    }

    pub fn names(&self) -> Vec<String> {
        self.current.load().keys().cloned().collect()
    }

    /// Swaps the whole set and tells which names changed. A provider that is the same object as
    /// before counts as unchanged, so a reload passes on what it did not touch.
    pub fn replace(&self, providers: impl IntoIterator<Item = Arc<dyn Provider>>) -> SetChange {
        let new = by_name(providers);
        let old = self.current.swap(Arc::new(new.clone()));
        let names = old
            .keys()
            .chain(new.keys())
            .filter(|name| match (old.get(*name), new.get(*name)) {
                (Some(a), Some(b)) => !Arc::ptr_eq(a, b),
                _ => true,
            })
            .cloned()
            .collect();
        let change = SetChange { names };
        // Nobody listening is fine: the next reconcile looks the provider up anew anyway.
        let _ = self.changes.send(change.clone());
        change
    }

    /// Changes from now on. A receiver that lagged must treat every name as changed.
    pub fn changes(&self) -> broadcast::Receiver<SetChange> {
        self.changes.subscribe()
    }
}

fn by_name(
    providers: impl IntoIterator<Item = Arc<dyn Provider>>,
) -> BTreeMap<String, Arc<dyn Provider>> {
    providers
        .into_iter()
        .map(|p| (p.name().to_owned(), p))
        .collect()
}

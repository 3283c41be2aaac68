//! The reconciler against the embedded control plane and the fake provider.

mod bed;
mod chaos;
mod deletion;
mod fleet;
mod lifecycle;
mod stub;
mod sweeping;
mod watching;

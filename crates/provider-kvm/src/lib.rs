//! Proxies as virtual machines on libvirt hosts, near or over SSH.
//!
//! - [`config`]: the `kvm` block of the providers file.
//! - [`host`]: a hypervisor host: connections, deadlines, events, every libvirt call told.
//! - [`image`]: images come through the operator into a host's pool.
//! - [`seed`]: what cloud-init reads in the guest.
//! - [`domain`]: the VM as libvirt's XML.
//! - [`storage`]: a host's pool and its volumes.
//! - [`address`]: which address of a guest counts.
//! - [`capabilities`]: firmware and virtualisation that a host has.
//! - [`provider`]: the `Provider` trait: create, get, delete, list, events, garbage.
//! - [`doctor`]: what is wrong with a host, and what to do.

pub mod address;
pub mod capabilities;
pub mod config;
pub mod doctor;
pub mod domain;
pub mod host;
pub mod image;
pub mod metrics;
pub mod provider;
pub mod seed;
pub mod storage;
mod xml;

pub use metrics::Metrics;
pub use provider::{KvmProvider, KvmType};

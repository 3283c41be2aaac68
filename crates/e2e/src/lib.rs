//! The harness for tests against real software, and the cases themselves in `tests/`.
//!
//! - [`lab`]: namespaces of a test's own; start here.
//! - [`site`]: what most cases need, put together in a lab.
//! - [`host`]: a libvirt host: libvirtd, pools, networks, domains.
//! - [`sshd`]: the way to a host, with throwaway keys and every fault.
//! - [`guest`]: images that boot, built from Debian's packages.
//! - [`fixtures`]: images that must never boot.
//! - [`mirror`]: an HTTP server that misbehaves.
//! - [`targets`]: a TLS target and a client that goes through a proxy.
//! - [`operator`]: the operator as a process, and Proxies to give it.
//! - [`http`], [`process`], [`exec`]: one request, a background program, a foreground program.
//! - [`prereq`], [`cache`]: what the machine must have, and what is kept from run to run.
//!
//! docs/testing.md says how to run a case and how to look into a lab.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test harness: a step that fails is a test that fails"
)]

pub mod cache;
pub mod exec;
pub mod fixtures;
pub mod guest;
pub mod host;
pub mod http;
pub mod lab;
pub mod mirror;
pub mod operator;
pub mod prereq;
pub mod process;
pub mod site;
pub mod sshd;
pub mod targets;

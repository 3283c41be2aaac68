//! Tests against a real Kubernetes API server, and one black-box suite that asks it and our
//! embedded control plane the same questions.
//!
//! - [`programs`]: etcd, kube-apiserver and kubectl, built from the Go module in
//!   `tests/kubernetes` and cached by the hash of its sources;
//! - [`ApiServer`]: etcd and kube-apiserver on a loopback address of their own, with certificates
//!   and RBAC, started in seconds;
//! - [`Embedded`]: our own control plane, in this process, reached over TLS as users reach it;
//! - [`Target`]: one API server as the suite sees it: a kubeconfig, kubectl, raw HTTP;
//! - [`suite`]: the questions; [`compare`]: the answers, field by field, and the explained list of
//!   differences.
//!
//! The tests run when `EGRESS_TIER_KUBERNETES=1` is set (`cargo xtask test kubernetes` does); they
//! need Go to build the programs the first time.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test harness: a step that fails is a test that fails"
)]

mod api_server;
pub mod certificates;
pub mod client;
pub mod compare;
pub mod daemon;
mod embedded;
pub mod explained;
pub mod kubectl;
pub mod programs;
pub mod suite;
mod target;

pub use api_server::ApiServer;
pub use embedded::Embedded;
pub use target::Target;

/// Whether the tests of this tier are to run; says so when they are not.
pub fn enabled(test: &str) -> bool {
    let on = std::env::var_os("EGRESS_TIER_KUBERNETES").is_some_and(|value| value == "1");
    if !on {
        println!(
            "skipped: {test}: needs a real kube-apiserver; run it with: cargo xtask test kubernetes"
        );
    }
    on
}

/// The crypto provider for every TLS client of this process; the first caller installs it.
pub fn install_crypto_provider() {
    // Somebody else has installed one already: fine.
    let _ = rustls::crypto::ring::default_provider().install_default();
}

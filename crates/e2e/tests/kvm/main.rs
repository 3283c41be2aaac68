//! Cases against real libvirt, QEMU, OVMF and sshd, each in a lab of its own.
//!
//! `cargo xtask test kvm` runs them; docs/testing.md tells how to run one and how to look into a
//! lab. Without `EGRESS_TIER_KVM=1` each says that it was left out.

#![allow(
    clippy::expect_used,
    clippy::panic,
    reason = "tests: clippy knows test functions, but not what they call"
)]

mod conformance;
mod crash;
mod harness;
mod hosts;
mod images;
mod lifecycle;

use std::time::Duration;

/// A light guest boots in ten seconds on an idle machine and in a minute on a busy one.
const BOOT: Duration = Duration::from_secs(150);
/// What needs no guest: libvirt calls, downloads within the lab.
const SOON: Duration = Duration::from_secs(30);

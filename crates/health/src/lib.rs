//! Probing: each proxy is asked to fetch its health-check URL, and the verdicts wake whoever cares.
//!
//! [`contract`] is what others see: the reconciler sets targets and reads verdicts.

pub mod contract;

pub use contract::{Health, ProbeClass, Target, Verdict};

//! The operator as a process on loopback, with the local provider and real proxies.

mod cli;
mod harness;
mod lifecycle;
mod samples;

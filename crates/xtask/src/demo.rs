//! `cargo xtask demo` and `bench`: build, then hand over to the program that does it.

use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, Result};

use crate::{run, setup};

#[derive(clap::Args)]
pub struct Args {
    /// With a real VM on this machine instead of a process (needs root; installs libvirt, QEMU and
    /// what a guest image is built from).
    #[arg(long)]
    kvm: bool,
    /// Use this build profile's programs.
    #[arg(long)]
    release: bool,
}

pub fn run(args: &Args) -> Result<bool> {
    setup::ensure(setup::BUILD)?;
    let bins = run::build(args.release)?;
    let mut command = Command::new(bins.join("egress-demo"));
    command.env("EGRESS_OPERATOR_BIN", bins.join("egress-proxies-operator"));
    if args.kvm {
        command.arg("--kvm");
    }
    hand_over(command)
}

pub fn bench(filter: Option<&str>) -> Result<bool> {
    setup::ensure(setup::BUILD)?;
    let bins = run::build(true)?;
    let mut command = Command::new(bins.join("egress-bench"));
    command.env("EGRESS_OPERATOR_BIN", bins.join("egress-proxies-operator"));
    command.args(filter);
    hand_over(command)
}

/// Replaces this process, so that Ctrl-C and the exit status are the program's own.
fn hand_over(mut command: Command) -> Result<bool> {
    let program = command.get_program().to_owned();
    let error = command.exec();
    Err(error).with_context(|| format!("cannot start {}", program.display()))
}

//! The project's own commands: `cargo xtask demo | test | bench | generate | lint`.
//!
//! They install what they need (Debian packages, as root or with sudo), so that on a fresh machine
//! with Rust the README's first two commands do everything.

mod demo;
mod generate;
mod run;
mod setup;
mod tiers;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    about = "The project's own commands"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// The main job, end to end, on this machine: two Proxies become Ready, one is leased, a
    /// request goes through it; prints a table of each step with its time.
    Demo(demo::Args),
    /// All tests, the real ones included; ends with the line "N passed, N failed".
    Test(tiers::Args),
    /// Measure start time, memory and throughput of the release build; prints a table.
    Bench {
        /// Only benchmarks whose name contains this.
        filter: Option<String>,
    },
    /// Write what is generated from the code (CRD, OpenAPI, flags reference), or check it.
    Generate {
        /// Change nothing; fail if a file differs.
        #[arg(long)]
        check: bool,
    },
    /// Formatting, clippy, documentation and dependency rules.
    Lint,
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Demo(args) => demo::run(&args),
        Command::Test(args) => tiers::run(&args),
        Command::Bench { filter } => demo::bench(filter.as_deref()),
        Command::Generate { check } => generate::run(check),
        Command::Lint => tiers::lint_only(),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

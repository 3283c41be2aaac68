//! The operator's binary: parses, builds, drains. Everything else is in `egress-app`.

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    egress_app::main(egress_app::cli::Cli::parse())
}

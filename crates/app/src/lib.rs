//! Puts the program together: the only crate that names concrete backends.
//!
//! - `cli`: the command line.
//! - `config`: from flags to a checked configuration; every fault at once, before anything runs.
//! - `run`: build, run, drain.
//! - `dev`: the same with throwaway state.
//! - `providers`, `reload`: the providers file and its changes.
//! - `directory`: the reconciler's view of the Proxies as the discovery API wants it.
//! - `client`: for machines without kubectl.
//! - `state`: the state directory and the installation's identity.
//! - `metrics`: the metrics endpoint.

pub mod cli;
mod client;
mod config;
mod dev;
mod directory;
mod doctor;
mod generate;
mod metrics;
mod providers;
mod reload;
mod run;
mod state;

use std::process::ExitCode;

use cli::{Cli, Command, LogFormatChoice};
use egress_telemetry::LogFormat;
use prometheus_client::registry::Registry;

/// The whole program: what `main` calls with the parsed command line.
pub fn main(cli: Cli) -> ExitCode {
    // One crypto provider for every TLS client and server, before any of them is made
    // (rustls#2070: without it a release binary panics at the first handshake).
    let _ = rustls::crypto::ring::default_provider().install_default();
    match dispatch(cli) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(cli: Cli) -> anyhow::Result<ExitCode> {
    match cli
        .command
        .unwrap_or_else(|| Command::Run(Box::new(cli.run)))
    {
        Command::Run(args) => {
            let log = init_log(&args.log)?;
            let config = config::Config::from_args(&args)?;
            runtime()?.block_on(run::run(config, log))?;
        }
        Command::Dev(args) => {
            init_log(&args.log)?;
            runtime()?.block_on(dev::run(&args))?;
        }
        Command::CheckConfig(args) => {
            let backends = providers::Backends::new(&mut Registry::default());
            let found = backends.read(&args.file)?;
            println!(
                "{}: {} provider(s), no faults",
                args.file.display(),
                found.len()
            );
        }
        Command::Doctor(args) => {
            init_log(&args.log)?;
            return runtime()?.block_on(doctor::run(&args));
        }
        Command::Client(command) => runtime()?.block_on(client::run(&command))?,
        Command::Crd => print!("{}", generate::crd()?),
        Command::Generate { what } => print!("{}", generate::generate(what)?),
        Command::ForwardProxy(args) => return forward_proxy(&args.args),
    }
    Ok(ExitCode::SUCCESS)
}

fn init_log(args: &cli::LogArgs) -> anyhow::Result<egress_telemetry::LogControl> {
    let format = match args.log_format {
        LogFormatChoice::Text => LogFormat::Text,
        LogFormatChoice::Json => LogFormat::Json,
    };
    Ok(egress_telemetry::init(args.log.as_deref(), format)?)
}

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?)
}

/// One thread is enough for one small proxy, and many of them run on one machine.
fn forward_proxy(args: &[String]) -> anyhow::Result<ExitCode> {
    let config = egress_forward_proxy::Config::from_args(args.iter().cloned())?;
    egress_forward_proxy::run_blocking(config)?;
    Ok(ExitCode::SUCCESS)
}

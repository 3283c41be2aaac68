//! `doctor`: the hosts of a providers file as the operator would reach them, each fault with what
//! to do about it.

use std::process::ExitCode;
use std::sync::Arc;

use prometheus_client::registry::Registry;

use crate::cli::DoctorArgs;
use crate::providers::{Backends, Loader};
use crate::state::{self, Directories};

/// Exit status 0: no fault; 1: at least one.
pub async fn run(args: &DoctorArgs) -> anyhow::Result<ExitCode> {
    let backends = Backends::new(&mut Registry::default());
    let blueprints = backends.read(&args.providers_config)?;
    let others: Vec<(String, &str)> = blueprints
        .iter()
        .filter(|named| named.type_name != "kvm")
        .map(|named| (named.name.clone(), named.type_name))
        .collect();
    let directories = Directories {
        state: args.state_dir.clone(),
        runtime: args.state_dir.join("run"),
        cache: args.state_dir.join("cache"),
    };
    directories.prepare()?;
    let installation = state::installation_id(&directories.state, None)?;
    let loader = Loader::new(
        backends,
        installation,
        directories,
        Arc::new(|provider| provider),
    );
    loader.apply(blueprints);
    for (name, type_name) in others {
        println!("{name} (type {type_name}): it has no hosts to check");
    }
    let mut good = true;
    for provider in loader.backends().kvm.providers() {
        let name = egress_provider::Provider::name(provider.as_ref()).to_owned();
        for report in provider.doctor().await {
            good &= report.ok();
            println!("{name}: host {}", report.host);
            for check in report.checks {
                let mark = if check.ok { "ok  " } else { "FAULT" };
                println!("  {mark:<6} {:<14} {}", check.name, check.detail);
                if let Some(what) = check.what_to_do {
                    println!("  {:<6} {:<14} -> {what}", "", "");
                }
            }
        }
    }
    Ok(if good {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

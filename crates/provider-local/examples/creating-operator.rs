//! Creates instances one after the other and then waits, so that a test can kill it in between:
//! `creating-operator STATE-DIR PROXY-PROGRAM COUNT BLOCK`. Prints a line before and after each.
//! With `self` for the program it is its own proxy, and removes its own file first, as an upgrade
//! does under a running operator.

use std::io::Write;
use std::path::PathBuf;

use egress_core::InstallationId;
use egress_core::spec::Placement;
use egress_provider::config::{BuildContext, parse};
use egress_provider::conformance;
use egress_provider_local::LocalType;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1).peekable();
    if args.next_if_eq("forward-proxy").is_some() {
        let config = egress_forward_proxy::Config::from_args(args)?;
        return Ok(egress_forward_proxy::run_blocking(config)?);
    }
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?
        .block_on(operate(args))
}

async fn operate(mut args: impl Iterator<Item = String>) -> Result<(), Box<dyn std::error::Error>> {
    let mut next = || args.next().ok_or("an argument is missing");
    let (state_dir, program, count, block) = (next()?, next()?, next()?, next()?);
    let local = if program == "self" {
        std::fs::remove_file(std::env::current_exe()?)?;
        LocalType::new()
    } else {
        LocalType::new().with_program(PathBuf::from(program), vec!["forward-proxy".to_owned()])
    };
    let text = format!("providers: [{{name: here, type: local, local: {block}}}]");
    let blueprints = parse(&text, &[&local])?;
    let state_dir = PathBuf::from(state_dir);
    let installation = InstallationId::new("installation");
    let provider = blueprints[0].blueprint.build(BuildContext {
        name: "here".to_owned(),
        installation: installation.clone(),
        runtime_dir: state_dir.join("run"),
        cache_dir: state_dir.join("cache"),
        state_dir,
    })?;
    for n in 0..count.parse()? {
        println!("creating {n}");
        std::io::stdout().flush()?;
        let request = conformance::request(n, &installation, Placement::default());
        provider.create(&request).await?;
        println!("created {n}");
        std::io::stdout().flush()?;
    }
    std::future::pending::<()>().await;
    Ok(())
}

//! What the repository keeps generated from the code.

use std::fmt::Write;

use anyhow::{Context, Result};
use clap::CommandFactory;

use crate::cli::{Cli, Generated};

pub fn generate(what: Generated) -> Result<String> {
    match what {
        Generated::Crd => crd(),
        Generated::Openapi => Ok(egress_discovery::openapi()),
        Generated::Flags => Ok(flags()),
    }
}

/// The CRD as YAML.
pub fn crd() -> Result<String> {
    let yaml =
        serde_saphyr::to_string(&egress_api::crd()).context("cannot write the CRD as YAML")?;
    Ok(format!(
        "# Generated from crates/api by `cargo xtask generate`; do not edit.\n{yaml}"
    ))
}

/// The reference of all flags as Markdown.
fn flags() -> String {
    let mut out = String::from(
        "# Command line\n\n<!-- Generated from crates/app/src/cli.rs by `cargo xtask generate`; do not edit. -->\n",
    );
    let mut root = Cli::command();
    root.build();
    command(&mut out, &root, "egress-proxies-operator");
    out
}

fn command(out: &mut String, command_: &clap::Command, path: &str) {
    let about = command_.get_long_about().or_else(|| command_.get_about());
    let _ = write!(
        out,
        "\n## `{path}`\n\n{}\n",
        about.map(ToString::to_string).unwrap_or_default()
    );
    let args: Vec<_> = command_
        .get_arguments()
        .filter(|a| !a.is_hide_set() && !matches!(a.get_id().as_str(), "help" | "version"))
        .collect();
    if !args.is_empty() {
        out.push_str("\n| argument | default | meaning |\n|---|---|---|\n");
    }
    for arg in args {
        let values = arg
            .get_value_names()
            .filter(|_| arg.get_action().takes_values())
            .map(|names| {
                names
                    .iter()
                    .map(|n| format!("<{n}>"))
                    .collect::<Vec<_>>()
                    .join(" ")
            })
            .unwrap_or_default();
        let name = match (arg.get_long(), arg.get_short()) {
            (Some(long), _) => format!("`--{long} {values}`").replace(" `", "`"),
            (None, Some(short)) => format!("`-{short} {values}`"),
            (None, None) => format!("`{values}`"),
        };
        let default = arg
            .get_default_values()
            .iter()
            .map(|v| format!("`{}`", v.to_string_lossy()))
            .collect::<Vec<_>>()
            .join(", ");
        let possible: Vec<_> = arg
            .get_possible_values()
            .iter()
            .filter(|v| !v.is_hide_set())
            .map(|v| match v.get_help() {
                Some(help) => format!("`{}`: {help}", v.get_name()),
                None => format!("`{}`", v.get_name()),
            })
            .collect();
        let env = arg
            .get_env()
            .map(|e| format!(" Also `${}`.", e.to_string_lossy()))
            .unwrap_or_default();
        let possible = if possible.is_empty() || !arg.get_action().takes_values() {
            String::new()
        } else {
            format!(" One of {}.", possible.join("; "))
        };
        let help = arg.get_long_help().or_else(|| arg.get_help());
        let help = help
            .map(ToString::to_string)
            .unwrap_or_default()
            .replace('\n', " ");
        let _ = writeln!(
            out,
            "| {name} | {default} | {}{possible}{env} |",
            help.replace('|', "\\|")
        );
    }
    for sub in command_.get_subcommands() {
        if sub.is_hide_set() || sub.get_name() == "help" {
            continue;
        }
        command(out, sub, &format!("{path} {}", sub.get_name()));
    }
}

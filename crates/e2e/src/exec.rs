//! Running other programs: a failure always says which one, how it ended and what it printed.

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};

/// A low-priority command: image builds share the machine with compilers and tests.
pub fn niced(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("nice");
    command.args(["-n", "10"]).arg(program);
    command
}

/// Runs to the end and gives the standard output.
///
/// # Errors
/// When the program cannot be started or ends with another code than 0.
pub fn run(command: &mut Command) -> anyhow::Result<String> {
    command.stdin(Stdio::null());
    let output = command
        .output()
        .with_context(|| format!("cannot run {command:?}"))?;
    text_of(&format!("{command:?}"), &output)
}

/// [`run`] for asynchronous callers; the program is ended when `limit` has passed.
///
/// # Errors
/// As [`run`], and when the time is over.
pub async fn run_within(
    command: &mut tokio::process::Command,
    limit: Duration,
) -> anyhow::Result<String> {
    let shown = format!("{:?}", command.as_std());
    let output = output_within(command, limit).await?;
    text_of(&shown, &output)
}

/// Runs to the end, whatever the exit code.
///
/// # Errors
/// When the program cannot be started or the time is over.
pub async fn output_within(
    command: &mut tokio::process::Command,
    limit: Duration,
) -> anyhow::Result<Output> {
    let shown = format!("{:?}", command.as_std());
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    let child = command
        .spawn()
        .with_context(|| format!("cannot run {shown}"))?;
    tokio::time::timeout(limit, child.wait_with_output())
        .await
        .with_context(|| format!("{shown}: no end within {limit:?}"))?
        .with_context(|| format!("waiting for {shown}"))
}

fn text_of(shown: &str, output: &Output) -> anyhow::Result<String> {
    let stdout = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        bail!(
            "{shown}: {}\n{}{}",
            output.status,
            stderr.trim_end(),
            if stderr.trim().is_empty() {
                stdout.trim_end()
            } else {
                ""
            },
        );
    }
    Ok(stdout.into_owned())
}

/// Copies a whole directory, keeping modes and links.
///
/// # Errors
/// When `cp` fails.
pub fn copy_tree(from: &Path, to: &Path) -> anyhow::Result<()> {
    run(Command::new("cp")
        .args(["-a", "--reflink=auto"])
        .arg(from)
        .arg(to))
    .map(drop)
}

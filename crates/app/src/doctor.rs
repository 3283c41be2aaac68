//! `doctor`: the hosts of a providers file as the operator would reach them.

use std::process::ExitCode;

use crate::cli::DoctorArgs;

pub async fn run(_args: &DoctorArgs) -> anyhow::Result<ExitCode> {
    anyhow::bail!("not yet")
}

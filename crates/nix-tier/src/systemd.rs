//! Rendered units under systemd's own rules.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail};

use crate::exec::output;

/// The exposure that the operator's unit stays under, in tenths: 1.5.
pub const THRESHOLD: u32 = 15;

/// `systemd-analyze verify`. It ends with 0 for unknown keys, so that any word is a failure.
///
/// # Errors
/// With what it said.
pub fn verify(analyze: &Path, unit: &Path) -> Result<()> {
    let output = output(
        Command::new(analyze)
            .args(["verify", "--man=no", "--recursive-errors=no"])
            .arg(unit)
            // A colourless, unpaged answer.
            .env("SYSTEMD_LOG_COLOR", "0"),
    )?;
    let said = String::from_utf8_lossy(&output.stderr);
    let name = unit.file_name().unwrap_or_default().to_string_lossy();
    // Faults of the machine's own units are not ours.
    let ours: Vec<&str> = said.lines().filter(|line| line.contains(&*name)).collect();
    if !ours.is_empty() {
        bail!("{}", ours.join("\n"));
    }
    Ok(())
}

/// `systemd-analyze security`; gives the score in tenths.
///
/// # Errors
/// When the unit is more exposed than [`THRESHOLD`], with the settings that cost most.
pub fn security(analyze: &Path, unit: &Path) -> Result<u32> {
    let output = output(
        Command::new(analyze)
            .args(["security", "--offline=true", "--no-pager"])
            .arg(format!("--threshold={THRESHOLD}"))
            .arg(unit)
            .env("SYSTEMD_COLORS", "0")
            .env("SYSTEMD_EMOJI", "0")
            .env("SYSTEMD_LOG_COLOR", "0"),
    )?;
    let said = String::from_utf8_lossy(&output.stdout);
    let score = said
        .lines()
        .find(|line| line.contains("Overall exposure level"))
        .and_then(|line| {
            line.split_whitespace()
                .find_map(|word| word.parse::<f64>().ok())
        });
    let Some(score) = score else {
        bail!(
            "no score in: {said}{}",
            String::from_utf8_lossy(&output.stderr)
        );
    };
    // The tool prints one decimal.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let tenths = (score * 10.0).round() as u32;
    if !output.status.success() || tenths > THRESHOLD {
        let open: Vec<&str> = said.lines().filter(|line| line.contains("0.")).collect();
        bail!("exposure {score}:\n{}", open.join("\n"));
    }
    Ok(tenths)
}

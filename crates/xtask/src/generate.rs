//! What is generated from the code and checked in: written here, compared by a test.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::run;

/// `(file, arguments of the operator that print it)`.
const GENERATED: &[(&str, &[&str])] = &[
    ("deploy/kubernetes/base/crd.yaml", &["generate", "crd"]),
    (
        "deploy/helm/egress-proxies-operator/crds/proxies.yaml",
        &["generate", "crd"],
    ),
    ("docs/reference/openapi.json", &["generate", "openapi"]),
    ("docs/reference/flags.md", &["generate", "flags"]),
];

/// Writes the files, or with `check` compares them; false when one differs.
pub fn run(check: bool) -> Result<bool> {
    let bins = run::build(false)?;
    settle_all(&bins, check)
}

/// Compares the files with what the built operator prints.
pub fn compare(bins: &Path) -> Result<bool> {
    settle_all(bins, true)
}

fn settle_all(bins: &Path, check: bool) -> Result<bool> {
    let mut same = true;
    for (file, args) in GENERATED {
        let path = run::root().join(file);
        let output = Command::new(bins.join("egress-proxies-operator"))
            .args(*args)
            .output()
            .with_context(|| format!("cannot generate {file}"))?;
        if !output.status.success() {
            bail!(
                "cannot generate {file}: {}",
                String::from_utf8_lossy(&output.stderr)
            );
        }
        same &= settle(&path, &output.stdout, check)?;
    }
    Ok(same)
}

fn settle(path: &Path, wanted: &[u8], check: bool) -> Result<bool> {
    let now = std::fs::read(path).unwrap_or_default();
    if now == wanted {
        return Ok(true);
    }
    if check {
        println!(
            "  {} differs from the code: run cargo xtask generate",
            path.display()
        );
        return Ok(false);
    }
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent)?;
    }
    std::fs::write(path, wanted).with_context(|| format!("cannot write {}", path.display()))?;
    println!("wrote {}", path.display());
    Ok(true)
}

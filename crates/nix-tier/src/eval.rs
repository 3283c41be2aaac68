//! Evaluations of `tests/nix/eval.nix`, and of Nix code as such.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde_json::Value;

use crate::exec::run;
use crate::root;
use crate::tool::Tools;

/// A nixpkgs source.
#[derive(Debug, Clone)]
pub struct Nixpkgs(pub PathBuf);

impl Nixpkgs {
    /// `NIXPKGS`.
    pub fn from_env() -> Option<Self> {
        std::env::var_os("NIXPKGS")
            .filter(|v| !v.is_empty())
            .map(|v| Self(v.into()))
    }

    /// Whether the NixOS modules are there, or `lib` alone.
    pub fn is_whole(&self) -> bool {
        self.0.join("nixos/lib/eval-config.nix").exists()
    }
}

/// Evaluates one attribute of `tests/nix/eval.nix`.
///
/// # Errors
/// With Nix's own message.
pub fn attribute(tools: &Tools, nixpkgs: &Nixpkgs, attribute: &str) -> Result<Value> {
    let text = run(tools
        .nix("nix-instantiate")
        .args(["--eval", "--strict", "--json", "--read-write-mode"])
        .arg(root().join("tests/nix/eval.nix"))
        .args(["--arg", "nixpkgs"])
        .arg(&nixpkgs.0)
        .args(["-A", attribute]))
    .with_context(|| format!("cannot evaluate {attribute}"))?;
    Ok(serde_json::from_str(&text)?)
}

/// Evaluates a module that a document shows, by our assertions; gives those that fail.
///
/// # Errors
/// As [`attribute`].
pub fn example(tools: &Tools, nixpkgs: &Nixpkgs, file: &Path) -> Result<Vec<String>> {
    let expression = format!(
        "(import {}/tests/nix/eval.nix {{ nixpkgs = {}; }}).example {}",
        root().display(),
        nixpkgs.0.display(),
        file.display()
    );
    let text = run(tools.nix("nix-instantiate").args([
        "--eval",
        "--strict",
        "--json",
        "--read-write-mode",
        "-E",
        &expression,
    ]))
    .with_context(|| format!("cannot evaluate {}", file.display()))?;
    Ok(strings(&serde_json::from_str(&text)?))
}

/// One machine of `tests/nix/hosts`.
#[derive(Debug, Default)]
pub struct Host {
    /// Assertions that failed.
    pub failed: Vec<String>,
    pub warnings: Vec<String>,
    /// What our modules render, by name.
    pub files: BTreeMap<String, String>,
    /// Units of NixOS's own that ours touch.
    pub upstream: BTreeMap<String, String>,
}

/// Evaluates a machine against a whole nixpkgs.
///
/// # Errors
/// As [`attribute`].
pub fn host(tools: &Tools, nixpkgs: &Nixpkgs, name: &str) -> Result<Host> {
    let value = attribute(tools, nixpkgs, &format!("hosts.{name}"))?;
    Ok(Host {
        failed: strings(&value["failed"]),
        warnings: strings(&value["warnings"]),
        files: texts(&value["files"]),
        upstream: texts(&value["upstream"]),
    })
}

/// The machines of `tests/nix/hosts`, found there.
///
/// # Errors
/// When the directory cannot be read.
pub fn host_names() -> Result<Vec<String>> {
    let mut names: Vec<String> = nix_files(&root().join("tests/nix/hosts"))?
        .iter()
        .filter_map(|file| Some(file.file_stem()?.to_str()?.to_owned()))
        .collect();
    names.sort();
    Ok(names)
}

/// An example of what an assertion refuses.
#[derive(Debug)]
pub struct Failing {
    /// Texts that the sentence must have.
    pub says: Vec<String>,
    pub failed: Vec<String>,
}

/// Evaluates all examples of `tests/nix/failing`.
///
/// # Errors
/// As [`attribute`].
pub fn failing(tools: &Tools, nixpkgs: &Nixpkgs) -> Result<BTreeMap<String, Failing>> {
    let value = attribute(tools, nixpkgs, "failing")?;
    let object = value.as_object().context("failing is no object")?;
    Ok(object
        .iter()
        .map(|(name, example)| {
            let example = Failing {
                says: strings(&example["says"]),
                failed: strings(&example["failed"]),
            };
            (name.clone(), example)
        })
        .collect())
}

/// All Nix code of the repository.
///
/// # Errors
/// When a directory cannot be read.
pub fn all_files() -> Result<Vec<PathBuf>> {
    let mut found = vec![root().join("flake.nix")];
    for dir in ["nix", "modules", "tests"] {
        found.extend(nix_files(&root().join(dir))?);
    }
    found.sort();
    Ok(found)
}

fn nix_files(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(nix_files(&path)?);
        } else if path.extension().is_some_and(|e| e == "nix") {
            found.push(path);
        }
    }
    Ok(found)
}

fn strings(value: &Value) -> Vec<String> {
    value
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|v| Some(v.as_str()?.to_owned()))
        .collect()
}

fn texts(value: &Value) -> BTreeMap<String, String> {
    value
        .as_object()
        .into_iter()
        .flatten()
        .filter_map(|(name, text)| Some((name.clone(), text.as_str()?.to_owned())))
        .collect()
}

//! The Nix tier: run with `EGRESS_TIER_NIX=1`, and `NIXPKGS=/path/to/nixpkgs` for the evaluations.
//! `EGRESS_BLESS=1` writes the golden files and the option reference anew.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod evaluated;
mod ran;

use std::fs;
use std::path::PathBuf;
use std::sync::{Mutex, Once};

use egress_nix_tier::eval::{self, Nixpkgs};
use egress_nix_tier::tool::Tools;
use egress_nix_tier::{golden, root, skipped};

/// Evaluations take a gigabyte each: one at a time.
static EVALUATION: Mutex<()> = Mutex::new(());

/// Whether the tier was asked for; else one word of all its tests together.
fn tier() -> bool {
    static SAID: Once = Once::new();
    let on = std::env::var_os("EGRESS_TIER_NIX").is_some();
    if !on {
        SAID.call_once(|| skipped("the Nix tier", "EGRESS_TIER_NIX is not set"));
    }
    on
}

fn tools() -> Tools {
    // Only one process downloads.
    let _one = EVALUATION.lock();
    Tools::get().unwrap()
}

/// A nixpkgs source, or a word about what is left out without one.
fn nixpkgs(test: &str, whole: bool) -> Option<Nixpkgs> {
    let Some(nixpkgs) = Nixpkgs::from_env() else {
        skipped(
            test,
            "NIXPKGS does not name a nixpkgs source (NIXPKGS=/path/to/nixpkgs)",
        );
        return None;
    };
    if whole && !nixpkgs.is_whole() {
        skipped(
            test,
            "NIXPKGS is nixpkgs' lib alone, without the NixOS modules",
        );
        return None;
    }
    Some(nixpkgs)
}

fn vm_tests() -> Vec<String> {
    fs::read_dir(root().join("tests"))
        .unwrap()
        .filter_map(|entry| {
            let path = entry.unwrap().path();
            let is_nix = path.is_file() && path.extension().is_some_and(|e| e == "nix");
            is_nix.then(|| path.file_stem().unwrap().to_str().unwrap().to_owned())
        })
        .collect()
}

/// All golden files under a folder of their machine, as `(machine/name, text)`.
fn golden_files(folder: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for host in eval::host_names().unwrap() {
        for (name, text) in golden::read(&host).unwrap() {
            if let Some(name) = name.strip_prefix(folder) {
                found.push((format!("{host}/{name}"), text));
            }
        }
    }
    assert!(!found.is_empty(), "no golden files in {folder}");
    found
}

fn operator() -> Option<PathBuf> {
    std::env::var_os("EGRESS_OPERATOR_BIN")
        .map(PathBuf::from)
        .filter(|path| path.exists())
}

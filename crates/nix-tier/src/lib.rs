//! The Nix tier of the tests.
//!
//! The modules in `modules/` are evaluated by a real Nix ([`tool`], [`eval`]) against the nixpkgs
//! source that `NIXPKGS` names. What they render is compared with `tests/golden/` ([`golden`]) and
//! then run: units by systemd ([`systemd`]), the SSH access by a real sshd ([`sshd`]), pools and
//! networks by a real libvirtd ([`libvirt`]), the providers file by the operator itself. Where there
//! is no nixpkgs, the golden files are what is run.

pub mod eval;
pub mod exec;
pub mod golden;
pub mod libvirt;
pub mod sshd;
pub mod systemd;
pub mod tool;

use std::path::{Path, PathBuf};

/// The repository.
pub fn root() -> PathBuf {
    let crate_dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    crate_dir.ancestors().nth(2).unwrap_or(crate_dir).to_owned()
}

/// Whether this process may make namespaces and mounts.
pub fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt as _;
    std::fs::metadata("/proc/self").is_ok_and(|meta| meta.uid() == 0)
}

/// Says loudly that something was left out; `cargo xtask test` collects these lines.
pub fn skipped(what: &str, why: &str) {
    println!("skipped: {what}: {why}");
}

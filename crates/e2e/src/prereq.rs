//! Debian packages that the real software comes from.
//!
//! On a Debian machine where we are root, what is missing is installed; elsewhere the error names
//! it. A missing prerequisite is never a reason to skip.

use std::collections::BTreeSet;
use std::process::Command;
use std::sync::Mutex;

use anyhow::{Context as _, bail};

use crate::{cache, exec};

/// What a lab with libvirt hosts needs.
pub const KVM: &[&str] = &[
    "dnsmasq-base",
    "iproute2",
    "libvirt-clients",
    "libvirt-daemon",
    "libvirt-daemon-driver-qemu",
    "libvirt-daemon-system",
    "openssh-client",
    "openssh-server",
    "ovmf",
    "procps",
    "qemu-system-x86",
    "qemu-utils",
    "util-linux",
];

/// What building guest images needs. `kmod` is easily forgotten, and an initrd without modules
/// fails only in the guest.
pub const IMAGES: &[&str] = &[
    "binutils",
    "dosfstools",
    "e2fsprogs",
    "fdisk",
    "kmod",
    "mmdebstrap",
    "mtools",
    "qemu-utils",
    "xz-utils",
];

/// Whether this process may make namespaces and install packages.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Makes sure that all of `packages` are installed.
///
/// # Errors
/// When some are missing and cannot be installed; the message names them.
pub fn ensure(packages: &[&str]) -> anyhow::Result<()> {
    // One look for a process: dpkg-query over and over would only cost time.
    static KNOWN: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let mut known = KNOWN
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    let asked: Vec<&str> = packages
        .iter()
        .copied()
        .filter(|p| !known.contains(*p))
        .collect();
    if asked.is_empty() {
        return Ok(());
    }
    let missing = missing(&asked)?;
    if !missing.is_empty() {
        if !is_root() {
            bail!(
                "these Debian packages are missing: {0}. Install them with\n  \
                 sudo apt-get install --no-install-recommends {0}",
                missing.join(" ")
            );
        }
        install(&missing)?;
    }
    known.extend(asked.iter().map(ToString::to_string));
    Ok(())
}

fn missing(packages: &[&str]) -> anyhow::Result<Vec<String>> {
    // Unknown packages make dpkg-query fail although it prints the others: the code says nothing.
    let output = Command::new("dpkg-query")
        .args(["-W", "-f=${db:Status-Status} ${Package}\n"])
        .args(packages)
        .output()
        .context(
            "dpkg-query does not run: the real-software tests install Debian packages and need a \
             Debian machine",
        )?;
    let stdout = String::from_utf8_lossy(&output.stdout);
    let installed: BTreeSet<&str> = stdout
        .lines()
        .filter_map(|line| line.strip_prefix("installed "))
        .collect();
    Ok(packages
        .iter()
        .filter(|package| !installed.contains(**package))
        .map(ToString::to_string)
        .collect())
}

fn install(packages: &[String]) -> anyhow::Result<()> {
    let _one_at_a_time = cache::lock("apt")?;
    println!("installing {}", packages.join(" "));
    if apt_install(packages).is_err() {
        // Lists that are missing or too old are the usual cause.
        update_lists()?;
        apt_install(packages)?;
    }
    Ok(())
}

/// Refreshes apt's package lists.
///
/// # Errors
/// When `apt-get update` fails.
pub fn update_lists() -> anyhow::Result<()> {
    exec::run(apt_get().args(["-q", "update"])).map(drop)
}

fn apt_install(packages: &[String]) -> anyhow::Result<()> {
    exec::run(
        apt_get()
            .args(["-q", "-y", "install", "--no-install-recommends"])
            .args(packages)
            // A daemon that the package would start is none of ours: the labs start their own.
            .env("RUNLEVEL", "1"),
    )
    .map(drop)
}

/// `apt-get` without questions, waiting for another that holds the lock.
pub fn apt_get() -> Command {
    let mut command = Command::new("apt-get");
    command
        .args([
            "-o",
            "DPkg::Lock::Timeout=300",
            "-o",
            "APT::Sandbox::User=root",
        ])
        .env("DEBIAN_FRONTEND", "noninteractive")
        .env("LC_ALL", "C.UTF-8");
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_package_is_missing_and_an_essential_one_is_not() {
        let missing = missing(&["dpkg", "no-such-package-of-debian"]).unwrap();
        assert_eq!(missing, ["no-such-package-of-debian"]);
    }
}

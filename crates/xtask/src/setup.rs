//! What the machine needs beside Rust.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// To build the workspace: a C compiler and linker (SQLite, ring), and libvirt's client library.
pub const BUILD: &[(&str, &str)] = &[
    ("gcc", "/usr/bin/cc"),
    ("libc6-dev", "/usr/include/stdlib.h"),
    ("pkg-config", "/usr/bin/pkg-config"),
    ("libvirt-dev", "/usr/include/libvirt/libvirt.h"),
];

/// For the local tier: Squid, sshd, libvirt without guests, and independent readers of what we write.
pub const LOCAL: &[(&str, &str)] = &[
    ("squid", "/usr/sbin/squid"),
    ("openssh-server", "/usr/sbin/sshd"),
    ("openssh-client", "/usr/bin/ssh-keygen"),
    ("iproute2", "/usr/bin/ip"),
    ("libvirt-daemon", "/usr/sbin/libvirtd"),
    (
        "libvirt-daemon-driver-qemu",
        "/usr/lib/x86_64-linux-gnu/libvirt/connection-driver/libvirt_driver_qemu.so",
    ),
    ("libvirt-daemon-system", "/etc/libvirt/libvirtd.conf"),
    ("libvirt-clients", "/usr/bin/virsh"),
    ("qemu-system-x86", "/usr/bin/qemu-system-x86_64"),
    ("qemu-utils", "/usr/bin/qemu-img"),
    ("ovmf", "/usr/share/OVMF/OVMF_CODE_4M.fd"),
    ("dnsmasq-base", "/usr/sbin/dnsmasq"),
    ("xorriso", "/usr/bin/xorriso"),
    ("genisoimage", "/usr/bin/isoinfo"),
];

/// For the Nix tier, where there is no Nix.
pub const NIX: &[(&str, &str)] = &[("patchelf", "/usr/bin/patchelf")];

/// Installs the packages whose file is missing. Each is `(package, a file it brings)`.
pub fn ensure(packages: &[(&str, &str)]) -> Result<()> {
    let missing: Vec<&str> = packages
        .iter()
        .filter(|(_, file)| !Path::new(file).exists())
        .map(|(p, _)| *p)
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    let list = missing.join(" ");
    if !Path::new("/usr/bin/apt-get").exists() {
        bail!(
            "missing: {list} (Debian's package names). Install your distribution's packages of these and try again."
        );
    }
    println!("installing {list}");
    apt(&["update"]).or_else(|_| apt(&["update"]))?;
    let mut args = vec!["install", "--yes", "--no-install-recommends"];
    args.extend(&missing);
    apt(&args).with_context(|| format!("could not install {list}; run: apt-get install {list}"))
}

fn apt(args: &[&str]) -> Result<()> {
    let root = rustix::process::geteuid().is_root();
    let mut command = if root {
        Command::new("apt-get")
    } else {
        let mut sudo = Command::new("sudo");
        sudo.args(["--preserve-env=DEBIAN_FRONTEND", "apt-get"]);
        sudo
    };
    let output = command
        .env("DEBIAN_FRONTEND", "noninteractive")
        .args(["-q", "-o", "DPkg::Lock::Timeout=300"])
        .args(args)
        .stdin(Stdio::null())
        .output()
        .context("cannot run apt-get (as another user than root this needs sudo)")?;
    if !output.status.success() {
        bail!(
            "apt-get {} failed:\n{}",
            args.join(" "),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(())
}

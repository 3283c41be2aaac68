//! The full guest: Debian with systemd, cloud-init, the guest agent and Squid, as a stock cloud
//! image would have them, without what needs a network that the lab has not.
//!
//! Squid is installed and stopped, with a configuration that admits nobody: only the user-data of
//! a test makes it a proxy.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, ensure};

use super::cpio::Archive;
use super::kernel::{Kernel, module_name};
use super::packages::{Selection, cloud_kernel, codename, debian_sources};
use super::{Image, disk};
use crate::cache::{self, Key};
use crate::{exec, prereq};

/// Memory for cloud-init and Squid side by side.
pub const MEMORY_MIB: u32 = 640;

const INIT: &str = include_str!("../../guest/full-initrd.sh");
const RECIPE: &str = concat!(include_str!("full.rs"), include_str!("disk.rs"));
const LABEL: &str = "guestroot";
/// Free space for logs and cloud-init's state.
const SLACK_MIB: u64 = 96;

/// Installed in the guest.
const GUEST_PACKAGES: &[&str] = &[
    "cloud-init",
    "dbus",
    "iproute2",
    "kmod",
    "libnss-systemd",
    "netbase",
    "qemu-guest-agent",
    "squid",
    "systemd",
    "systemd-resolved",
    "systemd-sysv",
    "udev",
];
/// For the kernel image and the initrd; not installed, so that no initramfs is made in the guest.
const BOOT_PACKAGES: &[&str] = &["busybox-static", "systemd-boot-efi"];
/// Loaded by the initrd.
const BOOT_MODULES: &[&str] = &["virtio_pci", "virtio_blk", "ext4"];
/// Loaded by the guest when it sees the devices.
const GUEST_MODULES: &[&str] = &[
    "autofs4",
    "efivarfs",
    "isofs",
    "nls_iso8859-1",
    "sr_mod",
    "virtio_balloon",
    "virtio_console",
    "virtio_net",
    "virtio_rng",
    "virtio_scsi",
];
const COMMAND_LINE: &str = "console=ttyS0 net.ifnames=0 mitigations=off quiet \
                            systemd.show_status=false systemd.firstboot=off";

/// Files laid over the packages' own.
const FILES: &[(&str, &str)] = &[
    ("etc/fstab", "LABEL=guestroot / ext4 defaults,noatime 0 0\n"),
    ("etc/hostname", "testguest\n"),
    ("etc/machine-id", ""),
    (
        "etc/cloud/cloud.cfg.d/99_lab.cfg",
        include_str!("../../guest/full/cloud.cfg"),
    ),
    (
        "etc/squid/squid.conf",
        include_str!("../../guest/full/squid.conf"),
    ),
    (
        "etc/systemd/system/squid.service.d/lab.conf",
        include_str!("../../guest/full/squid-unit.conf"),
    ),
    (
        "etc/systemd/journald.conf.d/lab.conf",
        include_str!("../../guest/full/journald.conf"),
    ),
];
const ENABLED: &[&str] = &["systemd-networkd.service", "systemd-resolved.service"];
/// Only cost time in a guest that lives for a minute.
const MASKED: &[&str] = &[
    "apt-daily-upgrade.timer",
    "apt-daily.timer",
    "dpkg-db-backup.timer",
    "dev-hugepages.mount",
    "dev-mqueue.mount",
    "e2scrub_all.timer",
    "e2scrub_reap.service",
    "fstrim.timer",
    "getty.target",
    "logrotate.timer",
    "modprobe@.service",
    "serial-getty@.service",
    "sys-kernel-debug.mount",
    "sys-kernel-tracing.mount",
    "systemd-hwdb-update.service",
    "systemd-journal-flush.service",
    "systemd-networkd-wait-online.service",
    "systemd-pstore.service",
    "systemd-update-utmp.service",
];
/// Of no use in a guest without people.
const REMOVED: &[&str] = &[
    "boot",
    "usr/share/bash-completion",
    "usr/share/doc",
    "usr/share/info",
    "usr/share/lintian",
    "usr/share/locale",
    "usr/share/man",
    "var/cache/apt",
    "var/lib/apt/lists",
];

/// The image; built when the cache has none for the mirror's present packages.
///
/// # Errors
/// When packages cannot be had or a tool fails.
pub fn image() -> anyhow::Result<Image> {
    prereq::ensure(prereq::IMAGES)?;
    ensure!(
        prereq::is_root(),
        "building the full guest needs root (it unpacks a Debian system)"
    );
    let kernel = cloud_kernel()?;
    let boot = Selection::resolve(&[BOOT_PACKAGES, &[kernel.as_str()]].concat())?;
    let guest = Selection::resolve(GUEST_PACKAGES)?;
    let mut key = Key::new()
        .with("recipe", RECIPE)
        .with("init", INIT)
        .with("release", codename()?);
    for (path, content) in FILES {
        key = key.with(path, content);
    }
    let key = guest.add_to(boot.add_to(key));
    let entry = cache::entry("guest-full", &key, |out| build(&boot, out))?;
    Ok(Image {
        path: entry.join("disk.qcow2"),
    })
}

fn build(boot: &Selection, out: &Path) -> anyhow::Result<()> {
    let scratch = tempfile::Builder::new().prefix("egress-guest-").tempdir()?;
    let boot_root = scratch.path().join("boot");
    boot.unpack_into(&boot_root, scratch.path())?;
    let kernel = Kernel::in_root(&boot_root)?;

    let root = scratch.path().join("root");
    bootstrap(&root, scratch.path())?;
    customise(&root)?;
    install_modules(&root, &kernel)?;

    let uki = disk::unified_kernel(
        &boot_root.join("usr/lib/systemd/boot/efi/linuxx64.efi.stub"),
        &kernel.image,
        &initrd(&boot_root, &kernel)?,
        COMMAND_LINE,
        scratch.path(),
    )?;
    let used = exec::run(
        Command::new("du")
            .args(["-sm", "--apparent-size"])
            .arg(&root),
    )?;
    let used: u64 = used
        .split_whitespace()
        .next()
        .unwrap_or("")
        .parse()
        .context("du's answer")?;
    // Blocks and inodes cost more than the bytes in them.
    let size_mib = used + used / 4 + SLACK_MIB;
    let root = disk::Root {
        content: &root,
        size_mib,
        label: LABEL,
    };
    disk::image(&uki, Some(&root), scratch.path(), &out.join("disk.qcow2"))
}

fn bootstrap(root: &Path, scratch: &Path) -> anyhow::Result<()> {
    let sources = scratch.join("debian.list");
    fs::write(&sources, debian_sources()?.join("\n") + "\n")?;
    exec::run(
        exec::niced("mmdebstrap")
            .args([
                "--quiet",
                "--mode=root",
                "--variant=minbase",
                "--skip=check/empty",
            ])
            .args([
                "--dpkgopt=path-exclude=/usr/share/man/*",
                "--dpkgopt=force-unsafe-io",
            ])
            .args(["--dpkgopt=path-exclude=/usr/share/locale/*"])
            .args(["--dpkgopt=path-exclude=/usr/share/doc/*"])
            .arg(format!("--include={}", GUEST_PACKAGES.join(",")))
            .arg(codename()?)
            .arg(root)
            .arg(&sources),
    )
    .map(drop)
}

fn customise(root: &Path) -> anyhow::Result<()> {
    for directory in REMOVED {
        match fs::remove_dir_all(root.join(directory)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        }
    }
    for directory in [
        "boot",
        "var/cache/apt/archives/partial",
        "var/lib/apt/lists/partial",
    ] {
        fs::create_dir_all(root.join(directory))?;
    }
    for (path, content) in FILES {
        let path = root.join(path);
        fs::create_dir_all(path.parent().context("a file without a directory")?)?;
        fs::write(&path, content).with_context(|| path.display().to_string())?;
    }
    let units = root.join("etc/systemd/system");
    let systemctl = |verb: &str, names: &[&str]| {
        exec::run(
            Command::new("chroot")
                .arg(root)
                .args(["systemctl", "-q", verb])
                .args(names),
        )
    };
    systemctl("enable", ENABLED)?;
    systemctl("disable", &["squid.service"])?;
    for unit in MASKED {
        let link = units.join(unit);
        let _ = fs::remove_file(&link);
        symlink("/dev/null", link)?;
    }
    let resolv = root.join("etc/resolv.conf");
    let _ = fs::remove_file(&resolv);
    symlink("/run/systemd/resolve/resolv.conf", resolv)?;
    // Compiling cloud-init in the guest would take seconds of an emulated CPU at each boot.
    let compiled = Command::new("nice")
        .args(["-n", "10", "chroot"])
        .arg(root)
        .args([
            "python3",
            "-m",
            "compileall",
            "-q",
            "/usr/lib/python3",
            "/usr/lib/python3.11",
        ])
        .output()?;
    // Some modules of the standard library's tests do not compile, by intention.
    drop(compiled);
    Ok(())
}

fn install_modules(root: &Path, kernel: &Kernel) -> anyhow::Result<()> {
    let directory = root.join(&kernel.modules_dir);
    for file in kernel.load_order(&[GUEST_MODULES, BOOT_MODULES].concat())? {
        let path = directory.join(&file);
        fs::create_dir_all(path.parent().context("a module without a directory")?)?;
        // Kept under its own name: what is compressed is for the guest's kmod to decompress.
        fs::copy(kernel.file(&file), &path)?;
    }
    for list in [
        "modules.builtin",
        "modules.builtin.modinfo",
        "modules.order",
    ] {
        fs::copy(kernel.file(Path::new(list)), directory.join(list))?;
    }
    let version = kernel
        .modules_dir
        .file_name()
        .context("a kernel without a version")?;
    exec::run(Command::new("depmod").arg("-b").arg(root).arg(version)).map(drop)
}

fn initrd(root: &Path, kernel: &Kernel) -> anyhow::Result<Vec<u8>> {
    let mut archive = Archive::default();
    for directory in ["dev", "proc", "sys", "newroot"] {
        archive.directory(directory);
    }
    archive.file("bin/busybox", 0o755, fs::read(root.join("bin/busybox"))?);
    archive.link("bin/sh", "busybox");
    let mut load = String::new();
    for file in kernel.load_order(BOOT_MODULES)? {
        let name = module_name(file.to_str().context("a module's name is no text")?);
        archive.file(&format!("m/{name}.ko"), 0o644, kernel.read_module(&file)?);
        load.push_str(&format!("/bin/busybox insmod /m/{name}.ko\n"));
    }
    archive.file("modules.sh", 0o755, load);
    archive.file("init", 0o755, INIT.replace("@LABEL@", LABEL));
    Ok(archive.finish())
}

//! The light guest: kernel, busybox, tinyproxy and the guest agent, all in the initrd.
//!
//! It takes an address by DHCP, mounts the seed, serves what it found there over HTTP on port 80
//! (so that a test can see that the bytes arrived), proxies on port 3128 and answers the agent.
//! Lines `#light WORD` in user-data change it: see `guest/light-init.sh`.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;

use super::cpio::Archive;
use super::kernel::{Kernel, module_name};
use super::packages::{Selection, cloud_kernel};
use super::{Image, disk};
use crate::cache::{self, Key};
use crate::prereq;

/// Memory that it runs in. OVMF itself crashes with less.
pub const MEMORY_MIB: u32 = 256;

const INIT: &str = include_str!("../../guest/light-init.sh");
const DHCP: &str = include_str!("../../guest/light-dhcp.sh");
/// The recipe is an input as well as what it puts together.
const RECIPE: &str = concat!(include_str!("light.rs"), include_str!("disk.rs"));

const PACKAGES: &[&str] = &[
    "busybox-static",
    "libc6",
    "libglib2.0-0",
    "libnuma1",
    "libpcre2-8-0",
    "libudev1",
    "liburing2",
    "qemu-guest-agent",
    "systemd-boot-efi",
    "tinyproxy-bin",
];
const PROGRAMS: &[&str] = &["usr/sbin/qemu-ga", "usr/bin/tinyproxy"];
const LIBRARIES: &[&str] = &[
    "libc.so.6",
    "libglib-2.0.so.0",
    "libgmodule-2.0.so.0",
    "libm.so.6",
    "libnuma.so.1",
    "libpcre2-8.so.0",
    "libudev.so.1",
    "liburing.so.2",
];
const MODULES: &[&str] = &[
    "virtio_pci",
    "virtio_net",
    "virtio_console",
    "virtio_scsi",
    "sr_mod",
    "isofs",
    "virtio_blk",
];
/// Of busybox, as links.
const APPLETS: &[&str] = &[
    "basename", "cat", "cut", "echo", "grep", "httpd", "insmod", "ip", "mkdir", "mount",
    "poweroff", "sed", "sh", "sleep", "udhcpc", "umount",
];
const COMMAND_LINE: &str =
    "console=ttyS0 net.ifnames=0 mitigations=off loglevel=4 panic=1 rdinit=/init";

/// The image; built when the cache has none for the mirror's present packages.
///
/// # Errors
/// When packages cannot be had or a tool fails.
pub fn image() -> anyhow::Result<Image> {
    prereq::ensure(prereq::IMAGES)?;
    let kernel = cloud_kernel()?;
    let packages = Selection::resolve(&[PACKAGES, &[kernel.as_str()]].concat())?;
    let key = packages.add_to(
        Key::new()
            .with("recipe", RECIPE)
            .with("init", INIT)
            .with("dhcp", DHCP),
    );
    let entry = cache::entry("guest-light", &key, |out| build(&packages, out))?;
    Ok(Image {
        path: entry.join("disk.qcow2"),
    })
}

fn build(packages: &Selection, out: &Path) -> anyhow::Result<()> {
    let scratch = tempfile::tempdir()?;
    let root = scratch.path().join("root");
    packages.unpack_into(&root, scratch.path())?;
    let kernel = Kernel::in_root(&root)?;
    let uki = disk::unified_kernel(
        &root.join("usr/lib/systemd/boot/efi/linuxx64.efi.stub"),
        &kernel.image,
        &initrd(&root, &kernel)?,
        COMMAND_LINE,
        scratch.path(),
    )?;
    disk::image(&uki, None, scratch.path(), &out.join("disk.qcow2"))
}

fn initrd(root: &Path, kernel: &Kernel) -> anyhow::Result<Vec<u8>> {
    let mut archive = Archive::default();
    for directory in [
        "dev", "proc", "sys", "etc", "tmp", "seed", "run", "root", "var/run", "var/log",
    ] {
        archive.directory(directory);
    }
    let busybox = fs::read(root.join("bin/busybox")).context("busybox-static holds no busybox")?;
    archive.file("bin/busybox", 0o755, busybox);
    for applet in APPLETS {
        archive.link(&format!("bin/{applet}"), "busybox");
    }
    for program in PROGRAMS {
        archive.file(
            program,
            0o755,
            fs::read(root.join(program)).context(*program)?,
        );
    }
    // The loader's name is compiled into every program.
    let loader = "lib64/ld-linux-x86-64.so.2";
    archive.file(
        loader,
        0o755,
        fs::read(find(root, "ld-linux-x86-64.so.2")?)?,
    );
    for library in LIBRARIES {
        let path = format!("lib/x86_64-linux-gnu/{library}");
        archive.file(&path, 0o644, fs::read(find(root, library)?)?);
    }
    archive.file("etc/passwd", 0o644, "root:x:0:0:root:/root:/bin/sh\n");
    archive.file("etc/group", 0o644, "root:x:0:\n");
    archive.file("etc/udhcpc.sh", 0o755, DHCP);
    let mut load = String::from("#!/bin/sh\n");
    for file in kernel.load_order(MODULES)? {
        let name = module_name(file.to_str().context("a module's name is no text")?);
        archive.file(&format!("m/{name}.ko"), 0o644, kernel.read_module(&file)?);
        let _ = writeln!(load, "insmod /m/{name}.ko");
    }
    archive.file("etc/modules.sh", 0o755, load);
    archive.file("init", 0o755, INIT);
    Ok(archive.finish())
}

/// The file of that name in a Debian root, where libraries sit in more than one place.
fn find(root: &Path, name: &str) -> anyhow::Result<PathBuf> {
    [
        "lib/x86_64-linux-gnu",
        "usr/lib/x86_64-linux-gnu",
        "lib64",
        "usr/lib64",
    ]
    .iter()
    .map(|directory| root.join(directory).join(name))
    .find(|path| path.exists())
    .with_context(|| format!("no package holds {name}"))
}

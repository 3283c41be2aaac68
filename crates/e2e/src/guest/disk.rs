//! From a kernel and an initrd to a disk that UEFI boots.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};

use crate::exec;

const MIB: u64 = 1 << 20;
/// PE sections are placed at multiples of this.
const PAGE: u64 = 4096;
/// FAT32 needs more clusters than a smaller partition has.
const SMALLEST_ESP: u64 = 34;

/// Makes a unified kernel image: systemd's UEFI stub with the kernel, its initrd and its command
/// line as further PE sections.
pub fn unified_kernel(
    stub: &Path,
    kernel: &Path,
    initrd: &[u8],
    command_line: &str,
    scratch: &Path,
) -> anyhow::Result<PathBuf> {
    let initrd_file = scratch.join("initrd");
    fs::write(&initrd_file, initrd)?;
    let release_file = scratch.join("os-release");
    fs::write(
        &release_file,
        "ID=testguest\nVERSION_ID=1\nPRETTY_NAME=testguest\n",
    )?;
    let command_line_file = scratch.join("cmdline");
    fs::write(&command_line_file, command_line)?;

    let out = scratch.join("guest.efi");
    let mut at = end_of_sections(stub)?;
    let mut objcopy = exec::niced("objcopy");
    for (section, file) in [
        (".osrel", release_file.as_path()),
        (".cmdline", &command_line_file),
        (".linux", kernel),
        (".initrd", &initrd_file),
    ] {
        at = at.next_multiple_of(PAGE);
        objcopy
            .arg("--add-section")
            .arg(format!("{section}={}", file.display()));
        objcopy
            .arg("--change-section-vma")
            .arg(format!("{section}={at:#x}"));
        at += fs::metadata(file)
            .with_context(|| file.display().to_string())?
            .len();
    }
    exec::run(objcopy.arg(stub).arg(&out))?;
    Ok(out)
}

/// The address after the last section of a PE file.
fn end_of_sections(pe: &Path) -> anyhow::Result<u64> {
    let listing = exec::run(Command::new("objdump").arg("-h").arg(pe))?;
    // "  5 .reloc  0000000c  0000000000018000  …": index, name, size, address.
    let ends = listing.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        words.next()?.parse::<u32>().ok()?;
        let _name = words.next()?;
        let size = u64::from_str_radix(words.next()?, 16).ok()?;
        let address = u64::from_str_radix(words.next()?, 16).ok()?;
        Some(address + size)
    });
    ends.max()
        .with_context(|| format!("no sections in {}", pe.display()))
}

/// A root file system to put beside the kernel.
#[derive(Debug)]
pub struct Root<'p> {
    /// The directory with its content.
    pub content: &'p Path,
    /// Size in MiB.
    pub size_mib: u64,
    /// The file system's label.
    pub label: &'p str,
}

/// Writes `out`, a qcow2 image with an EFI system partition that starts `uki`.
pub fn image(
    uki: &Path,
    root: Option<&Root<'_>>,
    scratch: &Path,
    out: &Path,
) -> anyhow::Result<()> {
    let esp_mib = (fs::metadata(uki)?.len().div_ceil(MIB) + 4).max(SMALLEST_ESP);
    let esp = scratch.join("esp.fat");
    File::create(&esp)?.set_len(esp_mib * MIB)?;
    exec::run(
        Command::new("mkfs.vfat")
            .args(["-F", "32", "-n", "ESP"])
            .arg(&esp),
    )?;
    exec::run(
        Command::new("mmd")
            .arg("-i")
            .arg(&esp)
            .args(["::/EFI", "::/EFI/BOOT"]),
    )?;
    exec::run(
        Command::new("mcopy")
            .arg("-i")
            .arg(&esp)
            .arg(uki)
            .arg("::/EFI/BOOT/BOOTX64.EFI"),
    )?;

    let raw = scratch.join("disk.raw");
    let root_mib = root.map_or(0, |root| root.size_mib);
    File::create(&raw)?.set_len((esp_mib + root_mib + 2) * MIB)?;
    let mut table = format!("label: gpt\nstart=2048,size={},type=U\n", esp_mib * 2048);
    if root.is_some() {
        let _ = writeln!(
            table,
            "start={},size={},type=4F68BCE3-E8CD-4DB1-96E7-FBCAF984B709,name=root",
            2048 + esp_mib * 2048,
            root_mib * 2048
        );
    }
    partition(&raw, &table)?;
    place(&esp, &raw, 1)?;
    if let Some(root) = root {
        let file = scratch.join("root.ext4");
        exec::run(
            exec::niced("mke2fs")
                .args([
                    "-q",
                    "-t",
                    "ext4",
                    "-m",
                    "0",
                    "-O",
                    "^has_journal,^metadata_csum",
                ])
                .args(["-E", "lazy_itable_init=1,nodiscard", "-L", root.label, "-d"])
                .arg(root.content)
                .arg(&file)
                .arg(format!("{root_mib}M")),
        )?;
        place(&file, &raw, 1 + esp_mib)?;
    }
    exec::run(
        exec::niced("qemu-img")
            .args(["convert", "-f", "raw", "-O", "qcow2"])
            .arg(&raw)
            .arg(out),
    )?;
    Ok(())
}

fn partition(disk: &Path, table: &str) -> anyhow::Result<()> {
    use std::io::Write as _;
    let mut child = Command::new("sfdisk")
        .arg("-q")
        .arg(disk)
        .stdin(std::process::Stdio::piped())
        .spawn()
        .context("cannot run sfdisk")?;
    child
        .stdin
        .take()
        .context("sfdisk without input")?
        .write_all(table.as_bytes())?;
    let status = child.wait()?;
    ensure!(status.success(), "sfdisk: {status}");
    Ok(())
}

fn place(part: &Path, disk: &Path, at_mib: u64) -> anyhow::Result<()> {
    exec::run(
        Command::new("dd")
            .arg(format!("if={}", part.display()))
            .arg(format!("of={}", disk.display()))
            .args(["bs=1M", "conv=notrunc,sparse", "status=none"])
            .arg(format!("seek={at_mib}")),
    )?;
    fs::remove_file(part)?;
    Ok(())
}

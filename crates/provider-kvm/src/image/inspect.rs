//! An image's first bytes: they decide what it is, and what must never reach a host.
//!
//! QEMU opens whatever a qcow2 header names. A backing file or an external data file in a
//! downloaded image could be any path of the host, so both are refused before a byte is uploaded.
//! The format: <https://www.qemu.org/docs/master/interop/qcow2.html>.

use crate::config::Format;

/// So many first bytes are looked at; header extensions end within the first cluster.
pub const HEAD: usize = 64 * 1024;

const QCOW2_MAGIC: &[u8] = b"QFI\xfb";
const INCOMPATIBLE_CORRUPT: u64 = 1 << 1;
const INCOMPATIBLE_DATA_FILE: u64 = 1 << 2;
/// Dirty, corrupt, data file, compression type, extended L2.
const INCOMPATIBLE_KNOWN: u64 = 0x1f;
const EXTENSION_DATA_FILE: u32 = 0x4441_5441;

/// What an image is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Inspected {
    pub format: Format,
    /// What a guest would see. None for raw: the length of the whole.
    pub virtual_size: Option<u64>,
}

/// Looks at the first bytes (up to [`HEAD`]) of an image that is said to be `wanted`, for a disk
/// of `disk_bytes`.
///
/// # Errors
/// Why it is refused, with the numbers.
pub fn inspect(head: &[u8], wanted: Option<Format>, disk_bytes: u64) -> Result<Inspected, String> {
    if head.is_empty() {
        return Err("it is empty".to_owned());
    }
    if head.starts_with(QCOW2_MAGIC) {
        if wanted == Some(Format::Raw) {
            return Err("its content is qcow2, but format says raw: a raw disk that begins with a qcow2 header could be taken for one".to_owned());
        }
        return qcow2(head, disk_bytes);
    }
    if wanted == Some(Format::Qcow2) {
        return Err(format!(
            "format says qcow2, but the content is {}",
            guess(head)
        ));
    }
    for (magic, name) in [
        (&b"\x7fELF"[..], "an ELF program"),
        (b"KDMV", "VMDK"),
        (b"# Disk DescriptorFile", "VMDK"),
        (b"vhdxfile", "VHDX"),
        (b"conectix", "VHD"),
        (b"QED\0", "QED"),
        (b"LUKS\xba\xbe", "LUKS"),
        (b"\xfd7zXZ\0", "xz-compressed"),
        (b"\x1f\x8b", "gzip-compressed"),
        (b"\x28\xb5\x2f\xfd", "zstd-compressed"),
    ] {
        if head.starts_with(magic) {
            return Err(format!(
                "as a raw image its content must be a disk, but it is {name}"
            ));
        }
    }
    if looks_like_text(head) {
        return Err(format!(
            "as a raw image its content must be a disk, but it is {}",
            guess(head)
        ));
    }
    Ok(Inspected {
        format: Format::Raw,
        virtual_size: None,
    })
}

fn looks_like_text(head: &[u8]) -> bool {
    let start = head.trim_ascii_start();
    start.first() == Some(&b'<') && start.iter().take(64).all(u8::is_ascii)
}

fn guess(head: &[u8]) -> &'static str {
    if head.starts_with(b"\xfd7zXZ\0") {
        "xz-compressed: set compression: xz"
    } else if head.starts_with(b"\x1f\x8b") {
        "gzip-compressed: set compression: gz"
    } else if head.starts_with(b"\x28\xb5\x2f\xfd") {
        "zstd-compressed: set compression: zstd"
    } else if looks_like_text(head) {
        "a web page, perhaps an error page of the mirror"
    } else if head.starts_with(b"KDMV") {
        "VMDK"
    } else if head.get(510..512) == Some(b"\x55\xaa") {
        "a raw disk: set format: raw"
    } else {
        "something else (no qcow2 header)"
    }
}

fn be32(head: &[u8], at: usize) -> Option<u32> {
    let bytes = head.get(at..at.checked_add(4)?)?;
    Some(u32::from_be_bytes(bytes.try_into().ok()?))
}

fn be64(head: &[u8], at: usize) -> Option<u64> {
    let bytes = head.get(at..at.checked_add(8)?)?;
    Some(u64::from_be_bytes(bytes.try_into().ok()?))
}

fn qcow2(head: &[u8], disk_bytes: u64) -> Result<Inspected, String> {
    let short = || "its qcow2 header is cut off".to_owned();
    let version = be32(head, 4).ok_or_else(short)?;
    let header_length = match version {
        2 => 72,
        3 => usize::try_from(be32(head, 100).ok_or_else(short)?).map_err(|_| short())?,
        other => {
            return Err(format!(
                "its qcow2 version is {other}, but only 2 and 3 are known"
            ));
        }
    };
    if version == 3 && !(104..=HEAD).contains(&header_length) {
        return Err(format!(
            "its qcow2 header says that it is {header_length} bytes long"
        ));
    }
    if head.len() < header_length {
        return Err(short());
    }
    let backing_offset = be64(head, 8).ok_or_else(short)?;
    let backing_length = be32(head, 16).ok_or_else(short)?;
    if backing_offset != 0 || backing_length != 0 {
        return Err("its qcow2 header names a backing file, which could be any file of the host. Flatten it first: qemu-img convert -O qcow2".to_owned());
    }
    let cluster_bits = be32(head, 20).ok_or_else(short)?;
    if !(9..=21).contains(&cluster_bits) {
        return Err(format!(
            "its qcow2 cluster size is 2^{cluster_bits} bytes, but must be 2^9 to 2^21"
        ));
    }
    if be32(head, 32).ok_or_else(short)? != 0 {
        return Err("it is encrypted, so no VM could start from it".to_owned());
    }
    if version == 3 {
        let incompatible = be64(head, 72).ok_or_else(short)?;
        if incompatible & INCOMPATIBLE_DATA_FILE != 0 {
            return Err(data_file());
        }
        if incompatible & INCOMPATIBLE_CORRUPT != 0 {
            return Err(
                "its qcow2 header marks it as corrupt: repair it first (qemu-img check -r)"
                    .to_owned(),
            );
        }
        if incompatible & !INCOMPATIBLE_KNOWN != 0 {
            return Err(format!(
                "its qcow2 header needs unknown features ({incompatible:#x})"
            ));
        }
    }
    extensions(head, header_length, 1 << cluster_bits)?;
    let virtual_size = be64(head, 24).ok_or_else(short)?;
    if virtual_size == 0 {
        return Err("its virtual size is 0".to_owned());
    }
    fits(virtual_size, disk_bytes)?;
    Ok(Inspected {
        format: Format::Qcow2,
        virtual_size: Some(virtual_size),
    })
}

fn data_file() -> String {
    "its qcow2 header names an external data file, which could be any file of the host".to_owned()
}

/// Header extensions: a type, a length, the data padded to 8 bytes, until type 0.
fn extensions(head: &[u8], mut at: usize, cluster: usize) -> Result<(), String> {
    let end = head.len().min(cluster);
    while let (Some(kind), Some(length)) = (be32(head, at), be32(head, at + 4)) {
        if kind == 0 || at + 8 > end {
            return Ok(());
        }
        if kind == EXTENSION_DATA_FILE {
            return Err(data_file());
        }
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let Some(next) = length
            .checked_next_multiple_of(8)
            .and_then(|padded| at.checked_add(8)?.checked_add(padded))
        else {
            return Err("a qcow2 header extension has an absurd length".to_owned());
        };
        if next > end {
            return Err("a qcow2 header extension reaches beyond the header".to_owned());
        }
        at = next;
    }
    Ok(())
}

/// A disk is never smaller than what the image says that it is.
///
/// # Errors
/// Both numbers.
pub fn fits(virtual_size: u64, disk_bytes: u64) -> Result<(), String> {
    if virtual_size <= disk_bytes {
        return Ok(());
    }
    let gib = 1 << 30;
    Err(format!(
        "its virtual size is {virtual_size} bytes ({:.1} GiB), but diskSizeGb gives VMs {disk_bytes} bytes ({} GiB): set diskSizeGb to at least {}",
        // Shown with one decimal only.
        virtual_size as f64 / f64::from(gib),
        disk_bytes / u64::from(gib as u32),
        virtual_size.div_ceil(u64::from(gib as u32)),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn header(version: u32, size: u64) -> Vec<u8> {
        let mut head = vec![0_u8; 512];
        head[..4].copy_from_slice(QCOW2_MAGIC);
        head[4..8].copy_from_slice(&version.to_be_bytes());
        head[20..24].copy_from_slice(&16_u32.to_be_bytes());
        head[24..32].copy_from_slice(&size.to_be_bytes());
        head[100..104].copy_from_slice(&104_u32.to_be_bytes());
        head
    }

    fn set(mut head: Vec<u8>, at: usize, bytes: &[u8]) -> Vec<u8> {
        head[at..at + bytes.len()].copy_from_slice(bytes);
        head
    }

    #[track_caller]
    fn refused(head: &[u8], wanted: Option<Format>, word: &str) {
        let why = inspect(head, wanted, 10 * GIB).unwrap_err();
        assert!(why.contains(word), "{why:?} does not say {word:?}");
    }

    #[test]
    fn good_ones_pass() {
        for version in [2, 3] {
            for wanted in [None, Some(Format::Qcow2)] {
                let found = inspect(&header(version, 2 * GIB), wanted, 10 * GIB).unwrap();
                assert_eq!(found.format, Format::Qcow2);
                assert_eq!(found.virtual_size, Some(2 * GIB));
            }
        }
        let raw = set(vec![0; 512], 510, b"\x55\xaa");
        for wanted in [None, Some(Format::Raw)] {
            assert_eq!(inspect(&raw, wanted, GIB).unwrap().format, Format::Raw);
        }
        // Compression type and extended L2 entries are the image's own matter.
        inspect(&set(header(3, GIB), 72, &0x18_u64.to_be_bytes()), None, GIB).unwrap();
        // Other extensions: backing format name, feature table.
        let mut named = header(3, GIB);
        named = set(
            named,
            104,
            &[
                0xE2, 0x79, 0x2A, 0xCA, 0, 0, 0, 5, b'q', b'c', b'o', b'w', b'2',
            ],
        );
        inspect(&named, None, GIB).unwrap();
    }

    #[test]
    fn hostile_and_odd_ones_are_refused() {
        let q = Some(Format::Qcow2);
        refused(&[], q, "empty");
        refused(&header(3, GIB)[..50], q, "cut off");
        refused(&header(3, GIB)[..90], q, "cut off");
        refused(&header(1, GIB), q, "version is 1");
        refused(&header(4, GIB), q, "version is 4");
        refused(
            &set(header(2, GIB), 8, &100_u64.to_be_bytes()),
            q,
            "backing file",
        );
        refused(
            &set(header(3, GIB), 16, &9_u32.to_be_bytes()),
            q,
            "backing file",
        );
        refused(
            &set(header(3, GIB), 72, &4_u64.to_be_bytes()),
            q,
            "data file",
        );
        refused(&set(header(3, GIB), 72, &2_u64.to_be_bytes()), q, "corrupt");
        refused(
            &set(header(3, GIB), 72, &0x20_u64.to_be_bytes()),
            q,
            "unknown features",
        );
        refused(
            &set(header(3, GIB), 32, &2_u32.to_be_bytes()),
            q,
            "encrypted",
        );
        refused(
            &set(header(3, GIB), 20, &40_u32.to_be_bytes()),
            q,
            "cluster size",
        );
        refused(
            &set(header(3, GIB), 100, &u32::MAX.to_be_bytes()),
            q,
            "bytes long",
        );
        refused(&header(3, 0), q, "virtual size is 0");
        refused(&header(3, u64::MAX), q, "diskSizeGb");
        // The extension that names the data file, without the feature bit, after another one.
        let mut sly = set(header(2, GIB), 72, &[1, 2, 3, 4, 0, 0, 0, 3, 9, 9, 9]);
        sly = set(sly, 88, b"DATA\0\0\0\x0b/etc/shadow");
        refused(&sly, q, "data file");
        refused(
            &set(header(3, GIB), 104, &[1, 1, 1, 1, 0xff, 0xff, 0xff, 0xff]),
            q,
            "extension",
        );
    }

    #[test]
    fn both_numbers_are_said() {
        let why = inspect(&header(3, 11 * GIB + 1), None, 10 * GIB).unwrap_err();
        for part in ["11811160065", "10737418240", "at least 12"] {
            assert!(why.contains(part), "{why}");
        }
    }

    #[test]
    fn content_decides() {
        refused(&header(3, GIB), Some(Format::Raw), "qcow2");
        refused(b"\xfd7zXZ\0....", Some(Format::Qcow2), "compression: xz");
        refused(b"\xfd7zXZ\0....", None, "xz");
        refused(b"  <!DOCTYPE html>", Some(Format::Qcow2), "web page");
        refused(b"<html>", None, "web page");
        refused(
            &set(vec![0; 512], 510, b"\x55\xaa"),
            Some(Format::Qcow2),
            "format: raw",
        );
        refused(b"KDMV", None, "VMDK");
    }

    proptest::proptest! {
        #[test]
        fn no_input_makes_it_panic(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..300), version in 0_u32..5) {
            let _ = inspect(&bytes, None, GIB);
            let mut head = header(version, GIB);
            let n = bytes.len().min(300);
            head[72..72 + n].copy_from_slice(&bytes[..n]);
            let _ = inspect(&head, None, GIB);
        }
    }
}

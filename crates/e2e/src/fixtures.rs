//! Images that no host should ever be given, and odd ones that are fine; a few hundred bytes each.
//!
//! The layout is QEMU's docs/interop/qcow2.txt.

/// A qcow2 header, as its fields.
#[derive(Debug, Clone)]
pub struct Qcow2 {
    version: u32,
    virtual_size: u64,
    backing_file: Option<String>,
    data_file: Option<String>,
    encryption: u32,
    incompatible: u64,
    length: usize,
}

/// Bit of the incompatible features that says that the data are in another file.
const EXTERNAL_DATA: u64 = 1 << 2;
const DATA_FILE_NAME: u32 = 0x4441_5441;
const BACKING_FORMAT: u32 = 0xe279_2aca;
const HEADER: u32 = 104;

/// A harmless image of 64 MiB, to be changed.
pub fn mk_qcow2() -> Qcow2 {
    Qcow2 {
        version: 3,
        virtual_size: 64 << 20,
        backing_file: None,
        data_file: None,
        encryption: 0,
        incompatible: 0,
        length: 64 * 1024,
    }
}

impl Qcow2 {
    /// Reads what it does not hold from another file of the host's.
    #[must_use]
    pub fn backed_by(mut self, file: &str) -> Self {
        self.backing_file = Some(file.to_owned());
        self
    }

    /// Keeps its data in another file of the host's.
    #[must_use]
    pub fn with_data_in(mut self, file: &str) -> Self {
        self.data_file = Some(file.to_owned());
        self.incompatible |= EXTERNAL_DATA;
        self
    }

    /// Says that it is that big.
    #[must_use]
    pub fn of_virtual_size(mut self, bytes: u64) -> Self {
        self.virtual_size = bytes;
        self
    }

    /// Version 2 has a shorter header.
    #[must_use]
    pub fn of_version(mut self, version: u32) -> Self {
        self.version = version;
        self
    }

    /// Sets further incompatible features.
    #[must_use]
    pub fn with_incompatible(mut self, bits: u64) -> Self {
        self.incompatible |= bits;
        self
    }

    /// Says that it is encrypted in that way (1: AES, 2: LUKS).
    #[must_use]
    pub fn encrypted(mut self, method: u32) -> Self {
        self.encryption = method;
        self
    }

    /// Ends after that many bytes.
    #[must_use]
    pub fn cut_to(mut self, length: usize) -> Self {
        self.length = length;
        self
    }

    /// The file.
    pub fn bytes(&self) -> Vec<u8> {
        let long = self.version >= 3;
        let mut extensions = Vec::new();
        let mut extension = |kind: u32, data: &[u8]| {
            extensions.extend_from_slice(&kind.to_be_bytes());
            extensions.extend_from_slice(&(data.len() as u32).to_be_bytes());
            extensions.extend_from_slice(data);
            extensions.resize(extensions.len().next_multiple_of(8), 0);
        };
        if self.backing_file.is_some() {
            extension(BACKING_FORMAT, b"raw");
        }
        if let Some(file) = &self.data_file {
            extension(DATA_FILE_NAME, file.as_bytes());
        }
        extension(0, b"");
        let header = if long { HEADER } else { 72 };
        let name_at = u64::from(header) + extensions.len() as u64;
        let name = self.backing_file.as_deref().unwrap_or("");

        let mut bytes = Vec::new();
        bytes.extend_from_slice(b"QFI\xfb");
        bytes.extend_from_slice(&self.version.to_be_bytes());
        bytes.extend_from_slice(&if name.is_empty() { 0 } else { name_at }.to_be_bytes());
        bytes.extend_from_slice(&(name.len() as u32).to_be_bytes());
        bytes.extend_from_slice(&16_u32.to_be_bytes()); // clusters of 64 KiB
        bytes.extend_from_slice(&self.virtual_size.to_be_bytes());
        bytes.extend_from_slice(&self.encryption.to_be_bytes());
        let entries = self.virtual_size.div_ceil(1 << 29) as u32;
        bytes.extend_from_slice(&entries.to_be_bytes()); // of the first-level table
        bytes.extend_from_slice(&(3_u64 << 16).to_be_bytes()); // where it is
        bytes.extend_from_slice(&(1_u64 << 16).to_be_bytes()); // where the reference counts are
        bytes.extend_from_slice(&1_u32.to_be_bytes());
        bytes.extend_from_slice(&0_u32.to_be_bytes()); // snapshots
        bytes.extend_from_slice(&0_u64.to_be_bytes());
        if long {
            bytes.extend_from_slice(&self.incompatible.to_be_bytes());
            bytes.extend_from_slice(&0_u64.to_be_bytes()); // compatible
            bytes.extend_from_slice(&0_u64.to_be_bytes()); // automatically cleared
            bytes.extend_from_slice(&4_u32.to_be_bytes()); // reference counts of 16 bits
            bytes.extend_from_slice(&header.to_be_bytes());
        }
        bytes.extend_from_slice(&extensions);
        bytes.extend_from_slice(name.as_bytes());
        bytes.resize(self.length, 0);
        bytes
    }
}

/// A raw disk: a boot sector and zeroes.
pub fn mk_raw(length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    if let Some(signature) = bytes.get_mut(510..512) {
        signature.copy_from_slice(&[0x55, 0xaa]);
    }
    bytes
}

/// What a mirror sends when the file is not there and it is too polite to say 404.
pub fn mk_html() -> Vec<u8> {
    b"<!DOCTYPE html><html><head><title>Not here</title></head></html>".to_vec()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// What `qemu-img info` makes of an image.
    fn info(image: &Qcow2) -> serde_json::Value {
        crate::prereq::ensure(&["qemu-utils"]).unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), image.bytes()).unwrap();
        let text = crate::exec::run(
            Command::new("qemu-img")
                .args(["info", "--output=json"])
                .arg(file.path()),
        )
        .unwrap();
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn qemu_reads_the_headers_as_they_are_meant() {
        let plain = info(&mk_qcow2());
        assert_eq!(plain["format"], "qcow2");
        assert_eq!(plain["virtual-size"], 64 << 20);
        let backed = info(&mk_qcow2().backed_by("/etc/hostname"));
        assert_eq!(backed["backing-filename"], "/etc/hostname");
        let old = info(&mk_qcow2().of_version(2).backed_by("/etc/hostname"));
        assert_eq!(old["backing-filename"], "/etc/hostname");
        let huge = info(&mk_qcow2().of_virtual_size(1 << 40));
        assert_eq!(huge["virtual-size"], 1_u64 << 40);
        let elsewhere = info(&mk_qcow2().with_data_in("/etc/hostname"));
        assert_eq!(
            elsewhere["format-specific"]["data"]["data-file"],
            "/etc/hostname"
        );
    }
}

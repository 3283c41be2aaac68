//! An initrd: a cpio archive in the `newc` form (Linux: Documentation/driver-api/early-userspace).

use std::collections::BTreeSet;

const DIRECTORY: u32 = 0o040_755;
const LINK: u32 = 0o120_777;
const FILE: u32 = 0o100_000;

/// An archive that grows; entries get fixed owners and times, so equal input is equal output.
#[derive(Debug, Default)]
pub struct Archive {
    bytes: Vec<u8>,
    directories: BTreeSet<String>,
    entries: u32,
}

impl Archive {
    /// A directory and those above it.
    pub fn directory(&mut self, path: &str) {
        let mut above = String::new();
        for part in path.split('/').filter(|part| !part.is_empty()) {
            if !above.is_empty() {
                above.push('/');
            }
            above.push_str(part);
            if self.directories.insert(above.clone()) {
                let name = above.clone();
                self.entry(&name, DIRECTORY, &[]);
            }
        }
    }

    /// A regular file with these permissions.
    pub fn file(&mut self, path: &str, mode: u32, content: impl AsRef<[u8]>) {
        self.parent(path);
        self.entry(path, FILE | mode, content.as_ref());
    }

    /// A symbolic link.
    pub fn link(&mut self, path: &str, target: &str) {
        self.parent(path);
        self.entry(path, LINK, target.as_bytes());
    }

    /// The archive, ended.
    pub fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    fn parent(&mut self, path: &str) {
        if let Some((parent, _)) = path.rsplit_once('/') {
            self.directory(parent);
        }
    }

    fn entry(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.entries += 1;
        let fields = [
            self.entries, // inode
            mode,
            0, // owner
            0, // group
            1, // links
            0, // modified
            content.len() as u32,
            0, // device, major and minor, of the file system
            0,
            0, // and of a device node
            0,
            name.len() as u32 + 1,
            0, // no checksum
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes
                .extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        while !self.bytes.len().is_multiple_of(4) {
            self.bytes.push(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_padded_and_directories_made_once() {
        let mut archive = Archive::default();
        archive.file("usr/bin/a", 0o755, b"x");
        archive.file("usr/bin/b", 0o755, b"");
        let bytes = archive.finish();
        assert_eq!(bytes.len() % 4, 0);
        let magics = bytes
            .windows(6)
            .filter(|window| window == b"070701")
            .count();
        assert_eq!(magics, 5, "usr, usr/bin, a, b and the trailer");
    }
}

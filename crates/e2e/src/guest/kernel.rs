//! The kernel and the modules that an image needs.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};

use crate::exec;

/// An unpacked kernel package.
#[derive(Debug)]
pub struct Kernel {
    /// `/boot/vmlinuz-…`.
    pub image: PathBuf,
    /// `lib/modules/VERSION`, relative to the root of a file system.
    pub modules_dir: PathBuf,
    root: PathBuf,
    /// Name to file, and what must be loaded before it.
    modules: BTreeMap<String, (PathBuf, Vec<PathBuf>)>,
    builtin: String,
}

impl Kernel {
    /// The kernel that was unpacked into `root`.
    pub fn in_root(root: &Path) -> anyhow::Result<Self> {
        let below = root.join("lib/modules");
        let version = std::fs::read_dir(&below)
            .with_context(|| format!("no kernel in {}", below.display()))?
            .next()
            .context("no kernel was unpacked")??
            .file_name();
        let version = version
            .to_str()
            .context("a kernel version that is no text")?;
        exec::run(
            std::process::Command::new("depmod")
                .arg("-b")
                .arg(root)
                .arg(version),
        )?;
        let modules_dir = Path::new("lib/modules").join(version);
        let dir = root.join(&modules_dir);
        let dep = std::fs::read_to_string(dir.join("modules.dep"))?;
        let modules = dep
            .lines()
            .filter_map(|line| line.split_once(':'))
            .map(|(file, needs)| {
                let needs = needs.split_whitespace().map(PathBuf::from).collect();
                (module_name(file), (PathBuf::from(file), needs))
            })
            .collect();
        Ok(Self {
            image: root.join("boot").join(format!("vmlinuz-{version}")),
            builtin: std::fs::read_to_string(dir.join("modules.builtin"))?,
            modules_dir,
            root: root.to_owned(),
            modules,
        })
    }

    /// The files of `wanted` and of all that they need, in the order in which to load them.
    /// Built-in ones are left out.
    pub fn load_order(&self, wanted: &[&str]) -> anyhow::Result<Vec<PathBuf>> {
        let mut order: Vec<PathBuf> = Vec::new();
        for name in wanted {
            let Some((file, needs)) = self.modules.get(&name.replace('-', "_")) else {
                ensure!(
                    self.builtin
                        .lines()
                        .any(|line| module_name(line) == name.replace('-', "_")),
                    "the kernel has no module {name}"
                );
                continue;
            };
            // modules.dep names the nearest first.
            for file in needs.iter().rev().chain([file]) {
                if !order.contains(file) {
                    order.push(file.clone());
                }
            }
        }
        Ok(order)
    }

    /// A file below the modules' directory.
    pub fn file(&self, file: &Path) -> PathBuf {
        self.root.join(&self.modules_dir).join(file)
    }

    /// The content of a module, decompressed where the package compresses them.
    pub fn read_module(&self, file: &Path) -> anyhow::Result<Vec<u8>> {
        let path = self.file(file);
        if path.extension().is_some_and(|extension| extension == "xz") {
            let output = std::process::Command::new("xz")
                .arg("-dc")
                .arg(&path)
                .output()?;
            ensure!(
                output.status.success(),
                "cannot decompress {}",
                path.display()
            );
            return Ok(output.stdout);
        }
        std::fs::read(&path).with_context(|| format!("reading {}", path.display()))
    }
}

/// `kernel/drivers/block/virtio_blk.ko.xz` is `virtio_blk`.
pub fn module_name(file: &str) -> String {
    let base = file.rsplit('/').next().unwrap_or(file);
    base.split_once(".ko")
        .map_or(base, |(name, _)| name)
        .replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_come_after_what_they_need_and_once() {
        let kernel = Kernel {
            image: PathBuf::new(),
            modules_dir: PathBuf::new(),
            root: PathBuf::new(),
            modules: [
                ("virtio", "", "v/virtio.ko"),
                ("virtio_ring", "v/virtio.ko", "v/virtio_ring.ko"),
                (
                    "virtio_net",
                    "v/virtio_ring.ko v/virtio.ko",
                    "n/virtio-net.ko.xz",
                ),
            ]
            .into_iter()
            .map(|(name, needs, file)| {
                let needs = needs.split_whitespace().map(PathBuf::from).collect();
                (name.to_owned(), (PathBuf::from(file), needs))
            })
            .collect(),
            builtin: "kernel/fs/ext4/ext4.ko\n".to_owned(),
        };
        let order = kernel
            .load_order(&["virtio-net", "ext4", "virtio_ring"])
            .unwrap();
        let order: Vec<_> = order.iter().map(|f| f.to_str().unwrap()).collect();
        assert_eq!(
            order,
            ["v/virtio.ko", "v/virtio_ring.ko", "n/virtio-net.ko.xz"]
        );
        assert!(kernel.load_order(&["floppy"]).is_err());
    }
}

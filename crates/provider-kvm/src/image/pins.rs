//! What must survive a restart: the digest that was seen first of an image without a configured
//! one, and which base volumes this installation put where (only those may it remove).

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use crate::config::ImageDigest;

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct File {
    #[serde(default)]
    pins: BTreeMap<String, ImageDigest>,
    /// `host pool volume`.
    #[serde(default)]
    bases: BTreeSet<String>,
}

/// The record, in one small file.
#[derive(Debug)]
pub struct Pins {
    path: PathBuf,
    file: Mutex<File>,
}

impl Pins {
    /// Reads what is there. A damaged file counts as an empty one, and says so.
    pub fn load(state_dir: &Path) -> Self {
        let path = state_dir.join("images.json");
        let file = read_file(&path);
        Self {
            path,
            file: Mutex::new(file),
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    fn read<T>(&self, read: impl FnOnce(&File) -> T) -> T {
        read(&self.file.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The file is replaced as a whole, so that a crash leaves the old or the new one.
    fn change(&self, change: impl FnOnce(&mut File)) -> std::io::Result<()> {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        // During a reload two providers have the file open: what the other wrote is kept.
        let mut new = read_file(&self.path);
        change(&mut new);
        let bytes = serde_json::to_vec_pretty(&new)?;
        if let Some(dir) = self.path.parent() {
            std::fs::create_dir_all(dir)?;
        }
        let aside = self.path.with_extension("json.new");
        let mut out = std::fs::File::create(&aside)?;
        std::io::Write::write_all(&mut out, &bytes)?;
        out.sync_all()?;
        std::fs::rename(&aside, &self.path)?;
        *file = new;
        Ok(())
    }

    pub fn pin(&self, key: &str) -> Option<ImageDigest> {
        self.read(|file| file.pins.get(key).cloned())
    }

    /// # Errors
    /// The file could not be written.
    pub fn set_pin(&self, key: &str, digest: &ImageDigest) -> std::io::Result<()> {
        if self.pin(key).as_ref() == Some(digest) {
            return Ok(());
        }
        self.change(|file| {
            file.pins.insert(key.to_owned(), digest.clone());
        })
    }

    /// # Errors
    /// The file could not be written.
    pub fn forget_pin(&self, key: &str) -> std::io::Result<()> {
        self.change(|file| {
            file.pins.remove(key);
        })
    }

    /// # Errors
    /// The file could not be written.
    pub fn add_base(&self, host: &str, pool: &str, volume: &str) -> std::io::Result<()> {
        let entry = format!("{host} {pool} {volume}");
        if self.read(|file| file.bases.contains(&entry)) {
            return Ok(());
        }
        self.change(|file| {
            file.bases.insert(entry);
        })
    }

    pub fn is_our_base(&self, host: &str, pool: &str, volume: &str) -> bool {
        self.read(|file| file.bases.contains(&format!("{host} {pool} {volume}")))
    }

    /// # Errors
    /// The file could not be written.
    pub fn forget_base(&self, host: &str, pool: &str, volume: &str) -> std::io::Result<()> {
        self.change(|file| {
            file.bases.remove(&format!("{host} {pool} {volume}"));
        })
    }
}

fn read_file(path: &Path) -> File {
    match std::fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes).unwrap_or_else(|error| {
            tracing::warn!(file = %path.display(), %error, "image record not readable: images are looked up anew");
            File::default()
        }),
        Err(_) => File::default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn survives_and_heals() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("new");
        let pins = Pins::load(&state);
        let digest = ImageDigest::Sha256("ab".repeat(32));
        assert_eq!(pins.pin("k"), None);
        pins.set_pin("k", &digest).unwrap();
        pins.add_base("h", "p", "v").unwrap();
        let again = Pins::load(&state);
        assert_eq!(again.pin("k"), Some(digest));
        assert!(again.is_our_base("h", "p", "v"));
        assert!(!again.is_our_base("h", "p", "w"));
        again.forget_pin("k").unwrap();
        again.forget_base("h", "p", "v").unwrap();
        assert_eq!(Pins::load(&state).pin("k"), None);
        std::fs::write(again.path(), "{").unwrap();
        assert!(!Pins::load(&state).is_our_base("h", "p", "v"));
    }
}

//! What is slow to make is kept outside the checkout, under a key that says what it was made from.
//!
//! An entry is a directory `NAME-KEY`. It is built beside its place and renamed there, so that an
//! entry that exists is whole, and a lock lets one process build while others wait for it.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use rustix::fs::FlockOperation;
use sha2::{Digest as _, Sha256};

/// A person who waits wants to know for what.
const WORTH_TELLING: Duration = Duration::from_secs(3);

/// `EGRESS_TEST_CACHE`, else a directory of ours below `XDG_CACHE_HOME`, else one in `/var/cache`
/// for root and in `~/.cache` for others.
pub fn dir() -> PathBuf {
    const NAME: &str = "egress-proxies-operator-tests";
    let var = |name| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    if let Some(dir) = var("EGRESS_TEST_CACHE") {
        return dir;
    }
    if let Some(dir) = var("XDG_CACHE_HOME") {
        return dir.join(NAME);
    }
    match var("HOME") {
        Some(home) if !crate::prereq::is_root() => home.join(".cache").join(NAME),
        _ => Path::new("/var/cache").join(NAME),
    }
}

/// A machine-wide lock, held until it is dropped.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

/// Waits for the lock of that name.
///
/// # Errors
/// When the lock file cannot be made.
pub fn lock(name: &str) -> anyhow::Result<Lock> {
    take(name, FlockOperation::LockExclusive).map(|lock| Lock { _file: lock })
}

/// The lock of that name, unless somebody holds it.
///
/// # Errors
/// When the lock file cannot be made.
pub fn try_lock(name: &str) -> anyhow::Result<Option<Lock>> {
    match take(name, FlockOperation::NonBlockingLockExclusive) {
        Ok(file) => Ok(Some(Lock { _file: file })),
        Err(error)
            if error.downcast_ref::<rustix::io::Errno>()
                == Some(&rustix::io::Errno::WOULDBLOCK) =>
        {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

fn take(name: &str, operation: FlockOperation) -> anyhow::Result<File> {
    let locks = dir().join("locks");
    fs::create_dir_all(&locks).with_context(|| format!("cannot make {}", locks.display()))?;
    let path = locks.join(name);
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .with_context(|| format!("cannot open {}", path.display()))?;
    rustix::fs::flock(&file, operation)?;
    Ok(file)
}

/// The identity of what an entry is made from: every input that could change the result.
#[derive(Debug, Clone, Default)]
pub struct Key {
    hash: Sha256,
}

impl Key {
    /// A key without inputs yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds one input; `("a", "bc")` and `("ab", "c")` differ.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        for part in [name.as_bytes(), value.as_ref()] {
            self.hash.update((part.len() as u64).to_le_bytes());
            self.hash.update(part);
        }
        self
    }

    fn short(&self) -> String {
        data_encoding::HEXLOWER.encode(&self.hash.clone().finalize())[..16].to_owned()
    }
}

/// Where the entry of that name and key is, or would be.
pub fn path(name: &str, key: &Key) -> PathBuf {
    dir().join(format!("{name}-{}", key.short()))
}

/// The entry of that name and key; built by `build` (which gets an empty directory) when there is
/// none. Older entries of the same name that nobody used for a week are removed.
///
/// # Errors
/// When the entry cannot be built.
pub fn entry(
    name: &str,
    key: &Key,
    build: impl FnOnce(&Path) -> anyhow::Result<()>,
) -> anyhow::Result<PathBuf> {
    let root = dir();
    let place = path(name, key);
    if place.is_dir() {
        return Ok(place);
    }
    let _lock = lock(name)?;
    if place.is_dir() {
        return Ok(place);
    }
    let started = Instant::now();
    let scratch = tempfile::Builder::new()
        .prefix(&format!(".{name}-"))
        .tempdir_in(&root)?;
    let out = scratch.path().join("out");
    fs::create_dir(&out)?;
    build(&out).with_context(|| format!("building {name}"))?;
    fs::rename(&out, &place).with_context(|| format!("cannot make {}", place.display()))?;
    if started.elapsed() > WORTH_TELLING {
        println!(
            "built {} in {:.1} s (kept)",
            place.display(),
            started.elapsed().as_secs_f32()
        );
    }
    remove_old(&root, name, &place);
    Ok(place)
}

fn remove_old(root: &Path, name: &str, keep: &Path) {
    const KEPT: Duration = Duration::from_secs(7 * 24 * 3600);
    let Ok(entries) = fs::read_dir(root) else {
        return;
    };
    for entry in entries.flatten() {
        let ours = entry
            .file_name()
            .to_str()
            .and_then(|file| file.strip_prefix(name)?.strip_prefix('-'))
            .is_some_and(|key| key.len() == 16 && key.bytes().all(|b| b.is_ascii_hexdigit()));
        let old = entry
            .metadata()
            .and_then(|meta| meta.modified())
            .is_ok_and(|at| at.elapsed().is_ok_and(|age| age > KEPT));
        if ours && old && entry.path() != keep {
            // Somebody else may be at the same: then there is nothing left to do.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_keeps_its_inputs_apart() {
        let one = Key::new().with("a", "bc");
        assert_ne!(one.short(), Key::new().with("ab", "c").short());
        assert_ne!(one.short(), Key::new().with("a", "bd").short());
        assert_eq!(one.short(), Key::new().with("a", "bc").short());
    }
}

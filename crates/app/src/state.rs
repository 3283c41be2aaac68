//! The state directory and the identity kept in it.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use egress_core::InstallationId;

#[derive(Debug, thiserror::Error)]
pub enum StateError {
    #[error("cannot make the directory {}: {source}; give another one with --{flag}, or run as a user who may write there", path.display())]
    MakeDirectory {
        path: PathBuf,
        flag: &'static str,
        source: io::Error,
    },
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot write {}: {source}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("{} is not an installation identity: it must hold one line of 1 to 63 letters, digits, dots, dashes and underscores; restore it, since everything this installation made carries the old one", path.display())]
    BadIdentity { path: PathBuf },
}

/// The three directories of a running operator.
#[derive(Debug, Clone)]
pub struct Directories {
    pub state: PathBuf,
    pub runtime: PathBuf,
    pub cache: PathBuf,
}

impl Directories {
    /// Makes them, mode 0700 where they are new.
    pub fn prepare(&self) -> Result<(), StateError> {
        for (path, flag) in [
            (&self.state, "state-dir"),
            (&self.runtime, "runtime-dir"),
            (&self.cache, "cache-dir"),
        ] {
            fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(path)
                .map_err(|source| StateError::MakeDirectory {
                    path: path.clone(),
                    flag,
                    source,
                })?;
        }
        Ok(())
    }
}

/// The identity in the state directory; made at the first start, durable before it is used.
pub fn installation_id(state: &Path, chosen: Option<&str>) -> Result<InstallationId, StateError> {
    if let Some(chosen) = chosen {
        return Ok(InstallationId::new(chosen));
    }
    let path = state.join("installation-id");
    match fs::read_to_string(&path) {
        Ok(text) => {
            let id = text.trim();
            if egress_provider::config::is_plain_name(id) {
                Ok(InstallationId::new(id))
            } else {
                Err(StateError::BadIdentity { path })
            }
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let id = uuid::Uuid::new_v4().to_string();
            write_durably(&path, format!("{id}\n").as_bytes())
                .map_err(|source| StateError::Write { path, source })?;
            Ok(InstallationId::new(id))
        }
        Err(source) => Err(StateError::Read { path, source }),
    }
}

/// Whole or not at all, also after a power loss: a new file, synced, renamed, the directory synced.
pub fn write_durably(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let temporary = path.with_extension("new");
    let mut file = fs::OpenOptions::new()
        .create(true)
        .truncate(true)
        .write(true)
        .mode(0o600)
        .open(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&temporary, path)?;
    match path.parent() {
        Some(parent) => fs::File::open(parent)?.sync_all(),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_identity_is_made_once_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let first = installation_id(dir.path(), None).unwrap();
        assert_eq!(first, installation_id(dir.path(), None).unwrap());
        assert_eq!(
            installation_id(dir.path(), Some("lab")).unwrap().as_str(),
            "lab"
        );
        fs::write(dir.path().join("installation-id"), "").unwrap();
        let error = installation_id(dir.path(), None).unwrap_err().to_string();
        assert!(error.contains("restore it"), "{error}");
    }

    #[test]
    fn a_directory_that_cannot_be_made_names_the_flag() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        let directories = Directories {
            state: file.join("state"),
            runtime: dir.path().join("run"),
            cache: dir.path().join("cache"),
        };
        let error = directories.prepare().unwrap_err().to_string();
        assert!(error.contains("--state-dir"), "{error}");
    }
}

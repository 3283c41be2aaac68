//! What is known of one instance, in a file that is either whole or not there.

use std::fs::{self, File};
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use egress_core::{InstallationId, InstanceName, Uid};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// One instance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Record {
    pub(crate) uid: Uid,
    /// `namespace/name`, for people who look into the directory.
    pub(crate) proxy: String,
    pub(crate) installation: InstallationId,
    pub(crate) created_at: Timestamp,
    /// Where it listens, kept for as long as the instance exists.
    pub(crate) address: IpAddr,
    pub(crate) port: u16,
    pub(crate) requested_port: u16,
    /// The name in `bindAddresses`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) bind: Option<String>,
}

impl Record {
    pub(crate) fn name(&self) -> InstanceName {
        InstanceName::for_uid(&self.uid)
    }

    pub(crate) fn listen(&self) -> SocketAddr {
        SocketAddr::new(self.address, self.port)
    }
}

/// A record that could not be read or written.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RecordError {
    #[error("{}: cannot be {action}: {source}", path.display())]
    Io {
        path: PathBuf,
        action: &'static str,
        source: io::Error,
    },
    #[error("{}: not a record of an instance ({source}); if nothing runs behind it, remove it", path.display())]
    Form {
        path: PathBuf,
        source: serde_json::Error,
    },
}

/// The records of one provider instance.
#[derive(Debug, Clone)]
pub(crate) struct Records {
    dir: PathBuf,
}

impl Records {
    /// Makes the directory, for the owner alone.
    pub(crate) fn open(dir: PathBuf) -> Result<Self, RecordError> {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&dir)
            .map_err(|source| RecordError::Io {
                path: dir.clone(),
                action: "made",
                source,
            })?;
        Ok(Self { dir })
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.json"))
    }

    pub(crate) fn read(&self, name: &str) -> Result<Option<Record>, RecordError> {
        read(&self.path(name))
    }

    /// All of them, of every installation, in the order of their names.
    pub(crate) fn all(&self) -> Result<Vec<Record>, RecordError> {
        let listing = |source| RecordError::Io {
            path: self.dir.clone(),
            action: "listed",
            source,
        };
        let mut paths = Vec::new();
        for entry in fs::read_dir(&self.dir).map_err(listing)? {
            let path = entry.map_err(listing)?.path();
            if path.extension().is_some_and(|e| e == "json") {
                paths.push(path);
            }
        }
        paths.sort();
        // One that was deleted since the listing is no fault.
        paths
            .iter()
            .filter_map(|path| read(path).transpose())
            .collect()
    }

    /// After this has returned, no crash and no power loss takes the record away.
    pub(crate) fn write(&self, record: &Record) -> Result<(), RecordError> {
        let path = self.path(record.name().as_str());
        let json = serde_json::to_vec_pretty(record).map_err(|source| RecordError::Form {
            path: path.clone(),
            source,
        })?;
        write_durably(&path, &json).map_err(|source| RecordError::Io {
            path,
            action: "written",
            source,
        })
    }

    pub(crate) fn remove(&self, name: &str) -> Result<(), RecordError> {
        let path = self.path(name);
        crate::child::remove_if_there(&path)
            .and_then(|()| File::open(&self.dir)?.sync_all())
            .map_err(|source| RecordError::Io {
                path,
                action: "removed",
                source,
            })
    }
}

fn read(path: &Path) -> Result<Option<Record>, RecordError> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => {
            return Err(RecordError::Io {
                path: path.to_owned(),
                action: "read",
                source,
            });
        }
    };
    serde_json::from_slice(&bytes)
        .map(Some)
        .map_err(|source| RecordError::Form {
            path: path.to_owned(),
            source,
        })
}

/// A new file beside, synced, renamed over, and the directory synced.
pub(crate) fn write_durably(path: &Path, content: &[u8]) -> io::Result<()> {
    let beside = path.with_extension("new");
    let mut file = File::options()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&beside)?;
    file.write_all(content)?;
    file.sync_all()?;
    fs::rename(&beside, path)?;
    match path.parent() {
        Some(dir) => File::open(dir)?.sync_all(),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_found_again_and_a_broken_one_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let records = Records::open(directory.path().join("a/b")).unwrap();
        let record = Record {
            uid: Uid::new("u"),
            proxy: "default/p".into(),
            installation: InstallationId::new("i"),
            created_at: "2026-01-02T03:04:05Z".parse().unwrap(),
            address: "127.66.0.1".parse().unwrap(),
            port: 3128,
            requested_port: 3128,
            bind: None,
        };
        let name = record.name();
        assert_eq!(records.read(name.as_str()).unwrap(), None);
        records.write(&record).unwrap();
        records.write(&record).unwrap();
        assert_eq!(records.read(name.as_str()).unwrap(), Some(record.clone()));
        assert_eq!(records.all().unwrap(), [record]);
        records.remove(name.as_str()).unwrap();
        records.remove(name.as_str()).unwrap();
        assert!(records.all().unwrap().is_empty());
        fs::write(records.dir().join("proxy-x.json"), "{").unwrap();
        let error = records.all().unwrap_err().to_string();
        assert!(error.contains("proxy-x.json"), "{error}");
    }
}

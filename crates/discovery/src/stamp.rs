//! Noticing that a file changed, without a watcher: it is looked at when it is needed.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Enough of a file's metadata that a change of its content changes it. Links are followed, so
/// that a switched symbolic link (as Kubernetes mounts secrets) is a change too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stamp {
    device: u64,
    inode: u64,
    length: u64,
    modified: (i64, i64),
    changed: (i64, i64),
    /// The file had been changed so shortly before that a second change could carry the same
    /// time: such a stamp proves nothing (git calls such an index entry "racy").
    fresh: bool,
}

/// More than the coarsest timestamp of a file system in use.
const SETTLED: Duration = Duration::from_secs(2);

impl Stamp {
    pub fn of(path: &Path) -> io::Result<Self> {
        let of = std::fs::metadata(path)?;
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let settled = i64::try_from(now.saturating_sub(SETTLED).as_secs()).unwrap_or(i64::MAX);
        Ok(Self {
            device: of.dev(),
            inode: of.ino(),
            length: of.size(),
            modified: (of.mtime(), of.mtime_nsec()),
            changed: (of.ctime(), of.ctime_nsec()),
            fresh: of.ctime() >= settled,
        })
    }

    /// Whether the content is surely what it was at `earlier`.
    pub fn same_as(&self, earlier: &Self) -> bool {
        !self.fresh && self == earlier
    }
}

//! The state directory: its lock and the mode of its files.

use std::fs::File;
use std::path::{Path, PathBuf};

use super::StoreError;

const LOCK_FILE: &str = "control-plane.lock";

/// Makes the directory and takes its lock, which the kernel gives back when the process ends,
/// however it ends.
pub(super) fn lock(directory: &Path) -> Result<File, StoreError> {
    use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
    let failed = |path: PathBuf| move |source| StoreError::Directory { path, source };
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
        .map_err(failed(directory.to_owned()))?;
    let path = directory.join(LOCK_FILE);
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(&path)
        .map_err(failed(path.clone()))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(std::fs::TryLockError::WouldBlock) => Err(StoreError::InUse {
            path: directory.to_owned(),
        }),
        Err(std::fs::TryLockError::Error(source)) => Err(StoreError::Directory { path, source }),
    }
}

/// SQLite makes its files by the umask; Secrets want 0600. The WAL files take the mode of this one.
pub(super) fn private_file(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt;
    File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(path)
        .map(drop)
}

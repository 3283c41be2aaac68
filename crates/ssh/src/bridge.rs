//! A private local unix socket that leads to one remote stream, once.
//!
//! A C library can only be given a path. Ending the bridge is also the one way to get a call back
//! that such a library is blocked in, which is why sockets on the same machine go through one too.

use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, BufReader};
use tokio::net::UnixListener;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::error::SshError;

/// How long the other side may take to connect to the socket that was made for it.
const ACCEPT_WITHIN: Duration = Duration::from_secs(30);
/// Copied at a time, each way.
const BUFFER: usize = 64 * 1024;

/// Numbers the sockets of this process: two values for one directory must not share names.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// A directory (mode 0700) for such sockets. Their names are never used again.
#[derive(Debug, Clone)]
pub struct BridgeDir {
    path: Arc<PathBuf>,
}

impl BridgeDir {
    /// Makes the directory where it is missing, and keeps others out of it.
    ///
    /// # Errors
    /// [`SshError::LocalSocket`].
    pub fn new(path: impl Into<PathBuf>) -> Result<Self, SshError> {
        let path = path.into();
        let made = std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&path)
            .and_then(|()| std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700)));
        made.map_err(|error| local(&path, error))?;
        Ok(Self {
            path: Arc::new(path),
        })
    }

    /// Binds a socket and carries what connects to it first, and only that, to `remote`.
    ///
    /// # Errors
    /// [`SshError::LocalSocket`].
    pub fn bridge<S>(&self, remote: S) -> Result<Bridge, SshError>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        // The process id keeps two operators apart that share a runtime directory by mistake.
        let name = format!(
            "{}-{}.sock",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        let path = self.path.join(name);
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).map_err(|error| local(&path, error))?;
        let guard = RemoveFile(path.clone());
        let stop = CancellationToken::new();
        let ended = CancellationToken::new();
        let task = carry(listener, guard, remote, stop.clone(), ended.clone());
        // Ends by itself, or when the Bridge is dropped: it owns the stop token.
        drop(tokio::spawn(task));
        Ok(Bridge {
            path,
            ended,
            stopper: stop.clone(),
            stop: stop.drop_guard(),
        })
    }
}

/// Removes the socket's name on every way out.
struct RemoveFile(PathBuf);

impl Drop for RemoveFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

async fn carry<S>(
    listener: UnixListener,
    file: RemoveFile,
    mut remote: S,
    stop: CancellationToken,
    ended: CancellationToken,
) where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let _ended = ended.drop_guard();
    let accepted = tokio::select! {
        () = stop.cancelled() => return,
        accepted = tokio::time::timeout(ACCEPT_WITHIN, listener.accept()) => accepted,
    };
    let Ok(Ok((mut near, _))) = accepted else {
        return;
    };
    drop(listener);
    drop(file);
    let (near_read, mut near_write) = near.split();
    let (far_read, mut far_write) = tokio::io::split(&mut remote);
    let mut near_read = BufReader::with_capacity(BUFFER, near_read);
    let mut far_read = BufReader::with_capacity(BUFFER, far_read);
    // An end or an error of either side ends both: half-open streams mean nothing here.
    tokio::select! {
        () = stop.cancelled() => {}
        _ = tokio::io::copy_buf(&mut near_read, &mut far_write) => {}
        _ = tokio::io::copy_buf(&mut far_read, &mut near_write) => {}
    }
}

fn local(path: &Path, error: std::io::Error) -> SshError {
    SshError::LocalSocket {
        path: path.display().to_string(),
        error: Arc::new(error),
    }
}

/// A socket and its task. Dropping it ends both.
#[derive(Debug)]
pub struct Bridge {
    path: PathBuf,
    ended: CancellationToken,
    stopper: CancellationToken,
    stop: DropGuard,
}

impl Bridge {
    /// Connect here, once.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether nothing goes through any more.
    pub fn is_ended(&self) -> bool {
        self.ended.is_cancelled()
    }

    /// Completes when nothing goes through any more.
    pub fn ended(&self) -> CancellationToken {
        self.ended.clone()
    }

    /// Ends the bridge when it is cancelled, for somebody who does not own the bridge.
    pub fn stopper(&self) -> CancellationToken {
        self.stopper.clone()
    }

    /// Ends it; whoever is blocked on the socket gets an end of file at once.
    pub fn end(self) {
        drop(self.stop);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::UnixStream;

    #[tokio::test]
    async fn carries_once_and_leaves_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let bridges = BridgeDir::new(dir.path().join("b")).unwrap();
        let mode = std::fs::metadata(dir.path().join("b"))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o700);
        let (mut far, remote) = tokio::io::duplex(16);
        let bridge = bridges.bridge(remote).unwrap();
        let mut near = UnixStream::connect(bridge.path()).await.unwrap();
        near.write_all(b"ping").await.unwrap();
        let mut got = [0; 4];
        far.read_exact(&mut got).await.unwrap();
        assert_eq!(&got, b"ping");
        assert!(!bridge.path().exists(), "the name is gone once it is used");
        assert!(!bridge.is_ended());
        let ended = bridge.ended();
        bridge.end();
        ended.cancelled().await;
        assert_eq!(near.read(&mut got).await.unwrap(), 0);
    }

    #[tokio::test]
    async fn a_far_end_closes_the_near_end() {
        let dir = tempfile::tempdir().unwrap();
        let bridges = BridgeDir::new(dir.path()).unwrap();
        let (far, remote) = tokio::io::duplex(16);
        let bridge = bridges.bridge(remote).unwrap();
        let mut near = UnixStream::connect(bridge.path()).await.unwrap();
        drop(far);
        let mut got = [0; 4];
        assert_eq!(near.read(&mut got).await.unwrap(), 0);
        drop(near);
        bridge.ended().cancelled().await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_socket_that_nobody_uses_goes_away() {
        let dir = tempfile::tempdir().unwrap();
        let bridges = BridgeDir::new(dir.path()).unwrap();
        let (_far, remote) = tokio::io::duplex(16);
        let bridge = bridges.bridge(remote).unwrap();
        bridge.ended().cancelled().await;
        assert!(!bridge.path().exists());
    }
}

//! A hypervisor host: its connection, shared by all calls, and connections for uploads.

pub mod calls;
pub mod error;
pub mod events;
pub mod session;

use std::sync::Arc;
use std::time::Duration;

use egress_ssh::{Bridge, BridgeDir, SshConfig, SshHost};
use tokio::net::UnixStream;
use tokio::sync::{Mutex, broadcast, watch};
use tokio::time::Instant;
use tracing::{info, warn};

use crate::config::{HostConfig, Reach, SshFiles};
use crate::metrics::Metrics;
use calls::Calls;
use error::{HostError, LibvirtError};
use events::Sink;
use session::Session;

/// An ordinary call.
pub const CALL: Duration = Duration::from_secs(30);
/// Starting a domain, and what else makes the host work.
pub const LONG_CALL: Duration = Duration::from_secs(120);
/// The first connection to a daemon makes it look at its QEMU, which takes seconds.
const OPEN: Duration = Duration::from_secs(60);
/// Calls that may be on their way at the same time.
const THREADS: usize = 4;
const BACKOFF: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(15));

/// What happened to a domain of a host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostEvent {
    Domain {
        uuid: String,
        name: String,
    },
    /// Connected anew: anything may have happened in between.
    Connected,
}

/// A host. Hosts share nothing, so none waits for another.
pub struct Host {
    pub config: HostConfig,
    ssh: Option<SshHost>,
    bridges: BridgeDir,
    metrics: Metrics,
    slot: Mutex<Slot>,
    events: broadcast::Sender<HostEvent>,
    connected: watch::Sender<bool>,
    /// Jobs that change a pool's volumes exclude each other: libvirt refuses some side by side.
    pub pool_lock: Mutex<()>,
    /// Instead of a socket, for tests against libvirt's own test driver.
    uri: Option<String>,
}

#[derive(Default)]
struct Slot {
    live: Option<Arc<Session>>,
    failed: Option<(HostError, Instant, Duration)>,
}

impl Host {
    pub fn new(
        config: HostConfig,
        ssh: Option<&SshFiles>,
        bridges: BridgeDir,
        metrics: Metrics,
    ) -> Self {
        let ssh = match (&config.reach, ssh) {
            (Reach::Ssh { host, port, user }, Some(files)) => Some(SshHost::new(SshConfig::new(
                host.clone(),
                *port,
                user.clone(),
                files.key_file.clone(),
                files.host_keys.clone(),
            ))),
            _ => None,
        };
        Self {
            config,
            ssh,
            bridges,
            metrics,
            slot: Mutex::default(),
            events: broadcast::channel(1024).0,
            connected: watch::channel(false).0,
            pool_lock: Mutex::new(()),
            uri: None,
        }
    }

    /// A host that is no socket but a libvirt URI, such as `test:///default`.
    #[doc(hidden)]
    #[must_use]
    pub fn with_uri(mut self, uri: &str) -> Self {
        self.uri = Some(uri.to_owned());
        self
    }

    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// Events from now on.
    pub fn events(&self) -> broadcast::Receiver<HostEvent> {
        self.events.subscribe()
    }

    /// Whether the last attempt to reach it succeeded.
    pub fn connected(&self) -> watch::Receiver<bool> {
        self.connected.subscribe()
    }

    /// The shared connection. Callers at the same time share a dial; within the backoff of a
    /// failed one they get its error at once.
    ///
    /// # Errors
    /// [`HostError`].
    pub async fn session(&self) -> Result<Arc<Session>, HostError> {
        // Held over the dial on purpose: that is what shares it.
        let mut slot = self.slot.lock().await;
        let fresh = match &self.ssh {
            Some(ssh) => ssh.is_connected().await,
            None => true,
        };
        if let Some(live) = &slot.live {
            if live.is_alive() && fresh {
                return Ok(Arc::clone(live));
            }
            warn!(HOST = self.name(), "connection to libvirt lost");
            slot.live = None;
        }
        let mut pause = BACKOFF.0;
        if let Some((error, until, last)) = &slot.failed {
            // SSH has a backoff of its own, which changed files end.
            if self.ssh.is_none() && Instant::now() < *until {
                return Err(error.clone());
            }
            pause = (*last * 2).min(BACKOFF.1);
        }
        match self.open(THREADS, true).await {
            Ok(session) => {
                let session = Arc::new(session);
                slot.live = Some(Arc::clone(&session));
                slot.failed = None;
                self.connected.send_replace(true);
                let _ = self.events.send(HostEvent::Connected);
                info!(HOST = self.name(), "connected to libvirt");
                Ok(session)
            }
            Err(error) => {
                self.connected.send_replace(false);
                slot.failed = Some((error.clone(), Instant::now() + pause, pause));
                Err(error)
            }
        }
    }

    /// A connection of its own, so that what takes long stands in nobody's way.
    ///
    /// # Errors
    /// [`HostError`].
    pub async fn own_session(&self) -> Result<Session, HostError> {
        self.open(1, false).await
    }

    /// Only the SSH connection; nothing to do for a local host.
    ///
    /// # Errors
    /// [`HostError::Ssh`].
    pub async fn connect_ssh(&self) -> Result<(), HostError> {
        match &self.ssh {
            Some(ssh) => ssh.connect().await.map_err(|error| HostError::Ssh {
                host: self.name().to_owned(),
                error: Box::new(error),
            }),
            None => Ok(()),
        }
    }

    async fn open(&self, threads: usize, events: bool) -> Result<Session, HostError> {
        let sink = events.then(|| {
            let events = self.events.clone();
            let sink: Sink = Arc::new(move |uuid: &str, name: &str| {
                let _ = events.send(HostEvent::Domain {
                    uuid: uuid.to_owned(),
                    name: name.to_owned(),
                });
            });
            sink
        });
        let (uri, bridge) = match &self.uri {
            Some(uri) => (uri.clone(), None),
            None => {
                let bridge = self.bridge().await?;
                let path = bridge.path().display().to_string();
                let path = percent_encode(&path);
                (format!("qemu+unix:///system?socket={path}"), Some(bridge))
            }
        };
        Session::open(
            self.name(),
            uri,
            bridge,
            threads,
            OPEN,
            sink,
            self.metrics.clone(),
        )
        .await
    }

    async fn bridge(&self) -> Result<Bridge, HostError> {
        let ssh_error = |error| HostError::Ssh {
            host: self.name().to_owned(),
            error: Box::new(error),
        };
        match &self.ssh {
            Some(ssh) => {
                let (socket, _) = ssh
                    .open_first(&self.config.sockets)
                    .await
                    .map_err(ssh_error)?;
                self.bridges.bridge(socket).map_err(ssh_error)
            }
            None => {
                let mut tried = Vec::new();
                for path in &self.config.sockets {
                    match UnixStream::connect(path).await {
                        Ok(stream) => return self.bridges.bridge(stream).map_err(ssh_error),
                        Err(error) => tried.push(describe_socket(path, &error)),
                    }
                }
                Err(HostError::Socket {
                    host: self.name().to_owned(),
                    tried: tried.join("; "),
                })
            }
        }
    }

    /// Runs a job that makes libvirt calls on the shared connection.
    ///
    /// # Errors
    /// [`HostError`], libvirt's own errors among them.
    pub async fn call<T: Send + 'static>(
        &self,
        rpc: &'static str,
        within: Duration,
        job: impl FnOnce(&Calls<'_>) -> Result<T, LibvirtError> + Send + 'static,
    ) -> Result<T, HostError> {
        self.run(rpc, within, job)
            .await?
            .map_err(|error| HostError::Libvirt {
                host: self.name().to_owned(),
                error,
            })
    }

    /// As [`Self::call`], for jobs with an error type of their own.
    ///
    /// # Errors
    /// Outside why there was no answer, inside what the job ended with.
    pub async fn run<T: Send + 'static, E: Send + 'static>(
        &self,
        rpc: &'static str,
        within: Duration,
        job: impl FnOnce(&Calls<'_>) -> Result<T, E> + Send + 'static,
    ) -> Result<Result<T, E>, HostError> {
        self.session().await?.run(rpc, within, job).await
    }
}

/// What is wrong with a local socket: who owns it matters when it may not be opened.
fn describe_socket(path: &str, error: &std::io::Error) -> String {
    use std::os::unix::fs::MetadataExt;
    let mut text = format!("{path}: {error}");
    if error.kind() == std::io::ErrorKind::PermissionDenied {
        let me = rustix::process::geteuid().as_raw();
        text.push_str(&format!(" for user id {me}"));
        if let Ok(meta) = std::fs::metadata(path) {
            let groups = std::fs::read_to_string("/etc/group").unwrap_or_default();
            let gid = meta.gid().to_string();
            let group = groups
                .lines()
                .find(|line| line.split(':').nth(2) == Some(&gid))
                .and_then(|line| line.split(':').next())
                .unwrap_or(&gid)
                .to_owned();
            text.push_str(&format!(
                " (mode {:o}, group {group}): put the operator's user into group {group}",
                meta.mode() & 0o777
            ));
        }
    }
    text
}

/// What may stand in a URI's query without a meaning of its own.
fn percent_encode(path: &str) -> String {
    let mut text = String::with_capacity(path.len());
    for byte in path.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'/' | b'-' | b'.' | b'_' | b'~') {
            text.push(char::from(byte));
        } else {
            text.push_str(&format!("%{byte:02X}"));
        }
    }
    text
}

//! One connection to one host, shared by all who need it.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use russh::client::{self, DisconnectReason, Handle};
use russh::keys::{
    Algorithm, EcdsaCurve, HashAlg, PrivateKeyWithHashAlg, PublicKeyBase64, PublicKeyOrCertificate,
};
use russh::{ChannelOpenFailure, ChannelStream};
use tokio::net::TcpStream;
use tokio::sync::{Mutex, watch};
use tokio::time::Instant;
use tracing::{debug, info, warn};

use crate::error::SshError;
use crate::key;
use crate::known_hosts::{HostKeyRefused, HostName, KnownHosts, fingerprint};

/// So many bytes may wait in the kernel that were not sent yet.
const UNSENT: u32 = 128 * 1024;

/// A remote unix socket, open.
pub type RemoteSocket = ChannelStream<client::Msg>;

/// Which host keys are accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostKeys {
    /// Those in this `known_hosts` file. A file that is missing accepts none.
    KnownHosts(PathBuf),
    /// Any. Whoever answers at that address is believed.
    InsecureIgnore,
}

/// Where and as whom.
#[derive(Debug, Clone)]
pub struct SshConfig {
    /// Host name or address, without brackets.
    pub host: String,
    pub port: u16,
    pub user: String,
    pub key_file: PathBuf,
    pub host_keys: HostKeys,
    /// For the TCP connection and for the handshake, together.
    pub connect_timeout: Duration,
    pub keepalive_interval: Duration,
    /// So many unanswered keepalives in a row drop the connection.
    pub keepalive_max: usize,
    /// The pause after a first failed dial; it doubles with each further one.
    pub backoff_first: Duration,
    pub backoff_last: Duration,
}

impl SshConfig {
    pub fn new(
        host: impl Into<String>,
        port: u16,
        user: impl Into<String>,
        key_file: impl Into<PathBuf>,
        host_keys: HostKeys,
    ) -> Self {
        Self {
            host: host.into(),
            port,
            user: user.into(),
            key_file: key_file.into(),
            host_keys,
            connect_timeout: Duration::from_secs(30),
            keepalive_interval: Duration::from_secs(15),
            keepalive_max: 2,
            backoff_first: Duration::from_millis(500),
            backoff_last: Duration::from_secs(15),
        }
    }

    /// `host:port`, an IPv6 address in brackets.
    pub fn address(&self) -> String {
        egress_core::record::host_port(&self.host, self.port)
    }
}

/// A host. Clones share the connection.
#[derive(Clone)]
pub struct SshHost {
    config: Arc<SshConfig>,
    state: Arc<Mutex<State>>,
}

impl fmt::Debug for SshHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SshHost")
            .field("address", &self.config.address())
            .field("user", &self.config.user)
            .finish_non_exhaustive()
    }
}

#[derive(Default)]
struct State {
    live: Option<Arc<Connection>>,
    failed: Option<Failed>,
}

/// A failed dial: until `until`, callers get its error without another attempt, unless the files
/// changed in the meantime.
struct Failed {
    error: SshError,
    until: Instant,
    pause: Duration,
    files: Stamps,
}

struct Connection {
    handle: Handle<Client>,
    /// Some: it ended, and why.
    ended: watch::Receiver<Option<String>>,
    files: Stamps,
}

impl Connection {
    fn is_alive(&self) -> bool {
        !self.handle.is_closed() && self.ended.borrow().is_none()
    }

    fn reason(&self) -> String {
        self.ended
            .borrow()
            .clone()
            .unwrap_or_else(|| "it was closed".to_owned())
    }
}

/// When the files that a connection rests on were last changed.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Stamps(Vec<Option<(SystemTime, u64)>>);

impl Stamps {
    fn of(config: &SshConfig) -> Self {
        let stamp = |path: &Path| {
            let meta = std::fs::metadata(path).ok()?;
            Some((meta.modified().ok()?, meta.len()))
        };
        let mut stamps = vec![stamp(&config.key_file)];
        if let HostKeys::KnownHosts(path) = &config.host_keys {
            stamps.push(stamp(path));
        }
        Self(stamps)
    }
}

impl SshHost {
    pub fn new(config: SshConfig) -> Self {
        Self {
            config: Arc::new(config),
            state: Arc::default(),
        }
    }

    pub fn config(&self) -> &SshConfig {
        &self.config
    }

    /// Whether there is a connection that stands and that rests on the files as they are now.
    pub async fn is_connected(&self) -> bool {
        let state = self.state.lock().await;
        let files = Stamps::of(&self.config);
        state
            .live
            .as_ref()
            .is_some_and(|live| live.is_alive() && live.files == files)
    }

    /// Connects where no connection stands. Callers at the same time share one dial.
    ///
    /// # Errors
    /// What the dial ended with; within its backoff the same error again, at once.
    pub async fn connect(&self) -> Result<(), SshError> {
        self.connection().await.map(drop)
    }

    async fn connection(&self) -> Result<Arc<Connection>, SshError> {
        // Held over the dial on purpose: that is what shares it.
        let mut state = self.state.lock().await;
        let files = Stamps::of(&self.config);
        if let Some(live) = &state.live {
            if live.is_alive() && live.files == files {
                return Ok(Arc::clone(live));
            }
            // Streams that go through the old one keep it until they end.
            debug!(host = %self.config.address(), reason = live.reason(), "SSH connection not used any more");
            state.live = None;
        }
        let mut pause = self.config.backoff_first;
        if let Some(failed) = &state.failed
            && failed.files == files
        {
            if Instant::now() < failed.until {
                return Err(failed.error.clone());
            }
            pause = (failed.pause * 2).min(self.config.backoff_last);
        }
        match dial(&self.config, files.clone()).await {
            Ok(connection) => {
                let connection = Arc::new(connection);
                state.live = Some(Arc::clone(&connection));
                state.failed = None;
                Ok(connection)
            }
            Err(error) => {
                state.failed = Some(Failed {
                    error: error.clone(),
                    until: Instant::now() + pause,
                    pause,
                    files,
                });
                Err(error)
            }
        }
    }

    /// Opens the unix socket at `path` on the host.
    ///
    /// # Errors
    /// [`SshError::ForwardingProhibited`], [`SshError::SocketNotThere`] or, where the server's
    /// answer fits both, [`SshError::SocketRefused`]; or what the dial ended with.
    pub async fn open_streamlocal(&self, path: &str) -> Result<RemoteSocket, SshError> {
        let connection = self.connection().await?;
        let opened = self.open_on(&connection, path).await?;
        match opened {
            Ok(stream) => Ok(stream),
            Err(failure) => Err(self.explain(&connection, path, &failure).await),
        }
    }

    /// Opens the first of several sockets that is there; tells which.
    ///
    /// # Errors
    /// As [`Self::open_streamlocal`], for the last of them.
    pub async fn open_first(&self, paths: &[String]) -> Result<(RemoteSocket, String), SshError> {
        let connection = self.connection().await?;
        let mut last = None;
        for path in paths {
            match self.open_on(&connection, path).await? {
                Ok(stream) => return Ok((stream, path.clone())),
                Err(failure) => last = Some((path, failure)),
            }
        }
        let Some((path, failure)) = last else {
            return Err(SshError::Lost {
                address: self.config.address(),
                reason: "no socket to open was named".to_owned(),
            });
        };
        Err(self.explain(&connection, path, &failure).await)
    }

    /// The outer error is the connection's, the inner the server's refusal.
    async fn open_on(
        &self,
        connection: &Connection,
        path: &str,
    ) -> Result<Result<RemoteSocket, ChannelOpenFailure>, SshError> {
        let open = connection.handle.channel_open_direct_streamlocal(path);
        match tokio::time::timeout(self.config.connect_timeout, open).await {
            Ok(Ok(channel)) => Ok(Ok(channel.into_stream())),
            Ok(Err(russh::Error::ChannelOpenFailure(failure))) => Ok(Err(failure)),
            Ok(Err(error)) => Err(SshError::Lost {
                address: self.config.address(),
                reason: if connection.is_alive() {
                    error.to_string()
                } else {
                    connection.reason()
                },
            }),
            Err(_) => Err(SshError::Lost {
                address: self.config.address(),
                reason: format!(
                    "no answer to opening {path} within {} s",
                    self.config.connect_timeout.as_secs()
                ),
            }),
        }
    }

    /// OpenSSH answers "connect failed" both to a socket that is not there and to one that it
    /// forbids. What else it opens tells more.
    async fn explain(
        &self,
        connection: &Connection,
        path: &str,
        failure: &ChannelOpenFailure,
    ) -> SshError {
        let address = self.config.address();
        let prohibited = SshError::ForwardingProhibited {
            address: address.clone(),
            path: path.to_owned(),
        };
        match failure {
            ChannelOpenFailure::AdministrativelyProhibited
            | ChannelOpenFailure::UnknownChannelType => return prohibited,
            _ => {}
        }
        // Sockets that anybody may connect to where they exist; nothing is sent to them.
        for other in [
            "/run/libvirt/libvirt-sock-ro",
            "/run/libvirt/virtqemud-sock-ro",
            "/run/systemd/journal/stdout",
            "/run/dbus/system_bus_socket",
        ] {
            if other != path
                && let Ok(Ok(stream)) = self.open_on(connection, other).await
            {
                drop(stream);
                return SshError::SocketNotThere {
                    address,
                    user: self.config.user.clone(),
                    path: path.to_owned(),
                };
            }
        }
        SshError::SocketRefused {
            address,
            user: self.config.user.clone(),
            path: path.to_owned(),
        }
    }

    /// Ends the shared connection; streams through it end with an error.
    pub async fn disconnect(&self) {
        let live = self.state.lock().await.live.take();
        if let Some(live) = live {
            let _ = live
                .handle
                .disconnect(russh::Disconnect::ByApplication, "", "en")
                .await;
        }
    }
}

async fn dial(config: &SshConfig, files: Stamps) -> Result<Connection, SshError> {
    let address = config.address();
    let key = Arc::new(key::load(&config.key_file).await?);
    let known = match &config.host_keys {
        HostKeys::InsecureIgnore => {
            warn!(host = %address, "host key NOT checked: insecureIgnoreHostKey is set");
            None
        }
        HostKeys::KnownHosts(path) => {
            let bytes = tokio::fs::read(path)
                .await
                .map_err(|error| SshError::KnownHosts {
                    path: path.display().to_string(),
                    error: Arc::new(error),
                })?;
            let known = KnownHosts::parse(path, &String::from_utf8_lossy(&bytes));
            for (line, why) in known.bad_lines() {
                warn!(file = %path.display(), line, why, "line of known_hosts left out");
            }
            Some(known)
        }
    };
    let host_name = HostName::new(&config.host, config.port);
    let held: Vec<String> = known
        .iter()
        .flat_map(|k| k.key_types(&host_name))
        .map(str::to_owned)
        .collect();
    let mut ssh = client::Config {
        keepalive_interval: Some(config.keepalive_interval),
        keepalive_max: config.keepalive_max,
        nodelay: true,
        ..client::Config::default()
    };
    ssh.preferred.key = algorithms(&held).into();
    let (ended_tx, ended) = watch::channel(None);
    let client = Client {
        host: host_name,
        known,
        ended: ended_tx,
    };
    let user = config.user.clone();
    let work = async {
        let dial_error = |error| SshError::Dial {
            address: address.clone(),
            error: Arc::new(error),
        };
        let tcp = TcpStream::connect((config.host.as_str(), config.port))
            .await
            .map_err(dial_error)?;
        tcp.set_nodelay(true).map_err(dial_error)?;
        // On a slow uplink megabytes of a large upload would wait in the kernel, and every small
        // call behind them. Refused by the kernel, it only goes slower.
        let _ = socket2::SockRef::from(&tcp).set_tcp_notsent_lowat(UNSENT);
        let mut handle = client::connect_stream(Arc::new(ssh), tcp, client)
            .await
            .map_err(|error| handshake_error(&address, &held, error))?;
        let lost = |error: russh::Error| SshError::Handshake {
            address: address.clone(),
            error: Arc::new(error),
        };
        // SHA-1 signatures of RSA keys are refused by today's servers: never use them.
        let hash = if key.algorithm().is_rsa() {
            let best = handle.best_supported_rsa_hash().await.map_err(lost)?;
            Some(best.flatten().unwrap_or(HashAlg::Sha512))
        } else {
            None
        };
        let signer = PrivateKeyWithHashAlg::new(Arc::clone(&key), hash);
        let answer = handle
            .authenticate_publickey(&user, signer)
            .await
            .map_err(lost)?;
        if answer.success() {
            Ok(handle)
        } else {
            Err(SshError::AuthRefused {
                address: address.clone(),
                user: user.clone(),
                fingerprint: fingerprint(&key.public_key().public_key_bytes()),
            })
        }
    };
    let handle = tokio::time::timeout(config.connect_timeout, work)
        .await
        .map_err(|_| SshError::HandshakeTimeout {
            address: address.clone(),
            after: config.connect_timeout,
        })??;
    info!(host = %address, user = %config.user, "SSH connected");
    Ok(Connection {
        handle,
        ended,
        files,
    })
}

fn handshake_error(address: &str, held: &[String], error: ClientError) -> SshError {
    match error {
        ClientError::HostKey(refused) => SshError::HostKey(refused),
        ClientError::Russh(russh::Error::NoCommonAlgo {
            kind: russh::AlgorithmKind::Key,
            theirs,
            ..
        }) if !held.is_empty() => SshError::NoHeldHostKeyType {
            address: address.to_owned(),
            held: held.join(", "),
            offered: theirs.join(", "),
        },
        ClientError::Russh(error) => SshError::Handshake {
            address: address.to_owned(),
            error: Arc::new(error),
        },
    }
}

/// The host key algorithms to offer: those of the held keys, or all when none is held (the key
/// that is then shown is refused, with its fingerprint). Never `ssh-rsa`, which signs with SHA-1.
fn algorithms(held: &[String]) -> Vec<Algorithm> {
    let all = [
        Algorithm::Ed25519,
        Algorithm::Ecdsa {
            curve: EcdsaCurve::NistP256,
        },
        Algorithm::Ecdsa {
            curve: EcdsaCurve::NistP384,
        },
        Algorithm::Ecdsa {
            curve: EcdsaCurve::NistP521,
        },
        Algorithm::Rsa {
            hash: Some(HashAlg::Sha512),
        },
        Algorithm::Rsa {
            hash: Some(HashAlg::Sha256),
        },
    ];
    let usable: Vec<Algorithm> = all
        .iter()
        .filter(|a| {
            let key_type = if (*a).clone().is_rsa() {
                "ssh-rsa"
            } else {
                a.as_str()
            };
            held.iter().any(|h| h == key_type)
        })
        .cloned()
        .collect();
    if usable.is_empty() {
        all.to_vec()
    } else {
        usable
    }
}

/// What the SSH session asks us.
struct Client {
    host: HostName,
    /// None: anybody is believed.
    known: Option<KnownHosts>,
    ended: watch::Sender<Option<String>>,
}

#[derive(Debug, thiserror::Error)]
enum ClientError {
    #[error("{0}")]
    HostKey(Box<HostKeyRefused>),
    #[error(transparent)]
    Russh(#[from] russh::Error),
}

impl client::Handler for Client {
    type Error = ClientError;

    async fn check_server_key(
        &mut self,
        shown: &PublicKeyOrCertificate,
    ) -> Result<bool, Self::Error> {
        let Some(known) = &self.known else {
            return Ok(true);
        };
        match shown {
            PublicKeyOrCertificate::PublicKey { key, .. } => known
                .check(&self.host, &key.public_key_bytes())
                .map(|()| true)
                .map_err(ClientError::HostKey),
            PublicKeyOrCertificate::Certificate(_) => Err(ClientError::HostKey(Box::new(
                HostKeyRefused::Certificate {
                    host: self.host.to_string(),
                },
            ))),
        }
    }

    async fn disconnected(
        &mut self,
        reason: DisconnectReason<Self::Error>,
    ) -> Result<(), Self::Error> {
        let text = match &reason {
            DisconnectReason::ReceivedDisconnect(info) => {
                format!("the server ended it: {}", info.message)
            }
            DisconnectReason::Error(ClientError::Russh(russh::Error::KeepaliveTimeout)) => {
                "keepalives were not answered".to_owned()
            }
            DisconnectReason::Error(error) => error.to_string(),
        };
        let _ = self.ended.send(Some(text));
        match reason {
            DisconnectReason::ReceivedDisconnect(_) => Ok(()),
            DisconnectReason::Error(error) => Err(error),
        }
    }
}

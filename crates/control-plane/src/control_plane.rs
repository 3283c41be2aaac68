//! The control plane as the program holds it.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde_json::json;
use tokio::net::{TcpListener, UnixListener};
use tokio::task::JoinSet;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::collector;
use crate::meta;
use crate::pki::{Pki, PkiError};
use crate::registry::{Registry, RegistryError};
use crate::serve::{self, ServeError, Token};
use crate::server::{Clock, Server};
use crate::storage::{Expect, Key, Storage, Store, StoreError, Write, WriteError};

/// The namespaces that exist from the first start on.
const NAMESPACES: &[&str] = &["default"];

/// What the control plane is made of.
pub struct Config {
    pub storage: Storage,
    /// The kinds beside the built-in ones.
    pub crds: Vec<CustomResourceDefinition>,
    pub clock: Clock,
    pub tuning: Tuning,
}

impl Config {
    /// With the system's clock and the defaults.
    pub fn new(storage: Storage, crds: Vec<CustomResourceDefinition>) -> Self {
        Self {
            storage,
            crds,
            clock: Arc::new(jiff::Timestamp::now),
            tuning: Tuning::default(),
        }
    }
}

/// What is rarely changed.
#[derive(Debug, Clone)]
pub struct Tuning {
    /// How long history is kept, at least; a watch or list from before gets 410 Gone. Also how often
    /// expired Events are looked for.
    pub compaction_interval: Duration,
    /// Further names and addresses in the server's certificate.
    pub server_names: Vec<String>,
    /// Bearer tokens that are let in over TLS, beside client certificates.
    pub tokens: Vec<Token>,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            compaction_interval: Duration::from_secs(300),
            server_names: Vec::new(),
            tokens: Vec::new(),
        }
    }
}

/// Why the control plane did not open.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Registry(#[from] RegistryError),
    #[error("the namespace {name} could not be made: {problem}")]
    Namespace { name: String, problem: String },
    #[error("the thread that opens the database ended")]
    Thread(#[source] tokio::task::JoinError),
}

/// The embedded control plane; cheap to clone. It ends with its last clone, or by
/// [`ControlPlane::shutdown`].
#[derive(Clone)]
pub struct ControlPlane {
    inner: Arc<Inner>,
}

struct Inner {
    server: Server,
    storage: Storage,
    tuning: Tuning,
    pki: OnceLock<Arc<Pki>>,
    making_pki: Mutex<()>,
    tasks: tokio::sync::Mutex<JoinSet<()>>,
    _stop: DropGuard,
}

impl ControlPlane {
    /// Opens the store, and starts what works in the background.
    ///
    /// # Errors
    /// When the state directory is used by another process, or cannot be read or written, or a CRD
    /// cannot be served.
    pub async fn open(config: Config) -> Result<Self, OpenError> {
        let registry = Arc::new(Registry::new(&config.crds)?);
        let storage = config.storage.clone();
        let clock = Arc::clone(&config.clock);
        let millis = move || clock().as_millisecond();
        let store = tokio::task::spawn_blocking(move || Store::open(&storage, Arc::new(millis)))
            .await
            .map_err(OpenError::Thread)??;
        let stopping = CancellationToken::new();
        let server = Server {
            registry,
            store,
            clock: config.clock,
            documents: Arc::new(OnceLock::new()),
            stopping: stopping.clone(),
        };
        make_namespaces(&server).await?;
        let mut tasks = JoinSet::new();
        let seen = server.store.revision();
        tasks.spawn(collector::follow(server.clone(), seen));
        tasks.spawn(collector::tick(
            server.clone(),
            config.tuning.compaction_interval,
        ));
        Ok(Self {
            inner: Arc::new(Inner {
                server,
                storage: config.storage,
                tuning: config.tuning,
                pki: OnceLock::new(),
                making_pki: Mutex::new(()),
                tasks: tokio::sync::Mutex::new(tasks),
                _stop: stopping.drop_guard(),
            }),
        })
    }

    /// The API for this process: who holds the router is trusted. `kube::Client::new(router,
    /// "default")` takes it as it is.
    pub fn router(&self) -> Router {
        Router::new()
            .fallback(
                |State(server): State<Server>, request: Request| async move {
                    crate::handlers::handle(&server, request).await
                },
            )
            .with_state(self.inner.server.clone())
    }

    /// Certificates and keys, made when first asked for and kept in the state directory.
    ///
    /// # Errors
    /// When files cannot be read or written.
    pub fn pki(&self) -> Result<Arc<Pki>, PkiError> {
        if let Some(pki) = self.inner.pki.get() {
            return Ok(Arc::clone(pki));
        }
        let _making = self
            .inner
            .making_pki
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(pki) = self.inner.pki.get() {
            return Ok(Arc::clone(pki));
        }
        let now = self.inner.server.now();
        let pki = Arc::new(match &self.inner.storage {
            Storage::Memory => Pki::in_memory(now)?,
            Storage::Directory(directory) => Pki::open(&directory.join("pki"), now)?,
        });
        Ok(Arc::clone(self.inner.pki.get_or_init(|| pki)))
    }

    /// Serves over TLS to who shows a client certificate of our CA or a token, until cancelled.
    ///
    /// # Errors
    /// When certificates cannot be made or the listener fails.
    pub async fn serve_tls(
        &self,
        listener: TcpListener,
        cancel: CancellationToken,
    ) -> Result<(), ServeError> {
        let pki = self.pki()?;
        serve::tls(
            &self.inner.server,
            &pki,
            &self.inner.tuning.server_names,
            self.inner.tuning.tokens.clone(),
            listener,
            cancel,
        )
        .await
    }

    /// Serves on a unix socket, until cancelled. Who can open the socket is trusted: its file's
    /// permissions are the caller's matter.
    ///
    /// # Errors
    /// When the listener fails.
    pub async fn serve_unix(
        &self,
        listener: UnixListener,
        cancel: CancellationToken,
    ) -> Result<(), ServeError> {
        serve::unix(&self.inner.server, listener, cancel).await
    }

    /// Writes a kubeconfig for the administrator (0600), replacing the file as a whole.
    ///
    /// # Errors
    /// When certificates or the file cannot be made.
    pub fn write_admin_kubeconfig(&self, path: &Path, server: SocketAddr) -> Result<(), PkiError> {
        self.pki()?
            .write_admin_kubeconfig(path, server, self.inner.server.now())
    }

    /// Ends watches and background work, and closes the database with everything in one file.
    pub async fn shutdown(&self) {
        self.inner.server.stopping.cancel();
        let mut tasks = self.inner.tasks.lock().await;
        while tasks.join_next().await.is_some() {}
        self.inner.server.store.close().await;
    }

    /// The newest revision: it grows by one with each write and with nothing else.
    pub fn revision(&self) -> u64 {
        self.inner.server.store.revision()
    }

    /// Forgets what only revisions before this one show, as happens by itself every
    /// [`Tuning::compaction_interval`].
    ///
    /// # Errors
    /// When the store fails.
    pub async fn compact(&self, revision: u64) -> Result<(), StoreError> {
        self.inner.server.store.compact(revision).await.map(drop)
    }
}

async fn make_namespaces(server: &Server) -> Result<(), OpenError> {
    let kind = server.registry.find("", "v1", "namespaces").cloned();
    let Some(kind) = kind else { return Ok(()) };
    for name in NAMESPACES {
        let key = Key {
            resource: Arc::clone(&kind.resource),
            namespace: String::new(),
            name: (*name).to_owned(),
        };
        if server.store.get(&key).await?.is_some() {
            continue;
        }
        let mut object =
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
        meta::fill_system_fields(&kind, &mut object, server.now());
        (kind.strategy.prepare)(&mut object, None);
        let write = Write {
            key,
            expect: Expect::Absent,
            object,
            delete: false,
            guard: None,
        };
        match server.store.write(write).await {
            Ok(_) | Err(WriteError::Changed(_)) => {}
            Err(WriteError::Store(error)) => return Err(error.into()),
            Err(WriteError::Guard) => {
                return Err(OpenError::Namespace {
                    name: (*name).to_owned(),
                    problem: "a guard failed that was not set".to_owned(),
                });
            }
        }
    }
    Ok(())
}

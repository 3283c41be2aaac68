//! Build, run, drain.
//!
//! Everything that can be refused (an address in use, a bad file, a directory that cannot be
//! written) is refused while building, before anything runs. Then every part is a task in one set:
//! a part that ends before the program was asked to stop ends the program.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use egress_control_plane::ControlPlane as Embedded;
use egress_core::{Clock, InstallationId, SystemClock};
use egress_lease::{LeaseStore, MemoryStore, SqliteStore};
use egress_provider::Provider;
use egress_provider::wrap::{Limits, wrap};
use egress_reconcile::Reconciler;
use prometheus_client::registry::Registry;
use tokio::net::{TcpListener, UnixListener};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::config::{Config, ControlPlane, ProvidersSource};
use crate::directory::ReconcilerDirectory;
use crate::providers::{Backends, Loader};
use crate::{metrics, reload, state};

/// How long a stop may take in all; what is not done then is given up.
const STOP_LIMIT: Duration = Duration::from_secs(9);
/// What an earlier run left behind is looked for soon after the start.
const FIRST_SWEEP: Duration = Duration::from_secs(30);
/// How long running reconciles may go on after a stop was asked for.
const RECONCILE_GRACE: Duration = Duration::from_secs(6);

/// A whole operator, built and not yet running: sockets are bound, files are read, databases open.
pub struct App {
    config: Config,
    registry: Registry,
    embedded: Option<EmbeddedApi>,
    client: kube::Client,
    discovery: egress_discovery::Bound,
    metrics: Option<TcpListener>,
    leases: Arc<dyn LeaseStore>,
    lease_config: egress_lease::Config,
    loader: Arc<Loader>,
    installation: InstallationId,
    told: Addresses,
}

struct EmbeddedApi {
    control_plane: Embedded,
    tls: TcpListener,
    unix: Option<UnixListener>,
}

/// Where a running operator is reached.
#[derive(Debug, Clone, Default)]
pub struct Addresses {
    /// The admin kubeconfig of the embedded API.
    pub kubeconfig: String,
    /// `http://...` of the first discovery address.
    pub discovery: String,
}

pub async fn run(config: Config, _log: egress_telemetry::LogControl) -> Result<()> {
    let app = App::build(config).await?;
    app.run(|| {
        // Without systemd there is nobody to tell.
        let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
        tracing::info!("ready");
    })
    .await
}

impl App {
    /// # Errors
    /// When something is refused; nothing runs then.
    pub async fn build(config: Config) -> Result<Self> {
        config.directories.prepare()?;
        let mut registry = Registry::default();
        let backends = Backends::new(&mut registry);
        // What is wrong with the providers is told before any address is taken.
        let blueprints = match &config.providers {
            ProvidersSource::None => Vec::new(),
            ProvidersSource::File(path) => backends.read(path)?,
            ProvidersSource::Text(text) => backends.parse(text)?,
        };
        let discovery = egress_discovery::bind(&config.discovery).await?;
        let metrics = match config.metrics_addr {
            Some(addr) => Some(bind("--metrics-addr", addr).await?),
            None => None,
        };
        let mut told = Addresses {
            discovery: discovery
                .local_addr()
                .map(|a| format!("http://{a}"))
                .unwrap_or_default(),
            ..Addresses::default()
        };
        let (embedded, client) = connect(&config, &mut told).await?;
        let installation =
            state::installation_id(&config.directories.state, config.installation_id.as_deref())?;
        let (leases, lease_config) = lease_store(&config, &mut registry)?;
        let provider_metrics = egress_provider::metrics::Metrics::register(&mut registry);
        let wrapped = Arc::new(move |inner: Arc<dyn Provider>| {
            wrap(inner, Limits::default(), &provider_metrics)
        });
        let loader = Arc::new(Loader::new(
            backends,
            installation.clone(),
            config.directories.clone(),
            wrapped,
        ));
        loader.apply(blueprints);
        if config.discovery.token.is_open() {
            tracing::warn!(
                "the discovery API is open: whoever reaches it may list and lease proxies; give --discovery-token-file"
            );
        }
        Ok(Self {
            config,
            registry,
            embedded,
            client,
            discovery,
            metrics,
            leases,
            lease_config,
            loader,
            installation,
            told,
        })
    }

    pub fn addresses(&self) -> Addresses {
        self.told.clone()
    }

    /// Runs until SIGTERM or SIGINT, or until a part ends by itself. `ready` is called once, when
    /// the caches are synced and the sockets serve.
    ///
    /// # Errors
    /// When a part failed.
    pub async fn run(self, ready: impl FnOnce()) -> Result<()> {
        let mut signals = Signals::new()?;
        let cancel = CancellationToken::new();
        // The API outlives its users: the reconciler's last writes go through it.
        let api_cancel = CancellationToken::new();
        let loader = Arc::clone(&self.loader);
        let leases = Arc::clone(&self.leases);
        let control_plane = self.embedded.as_ref().map(|e| e.control_plane.clone());
        let (mut parts, handle) = self.start(&cancel, &api_cancel)?;

        let mut ready = Some(ready);
        let ended = loop {
            tokio::select! {
                () = signals.stop() => break None,
                Some(part) = parts.work.join_next() => break Some(part),
                Some(part) = parts.api.join_next() => break Some(part),
                () = handle.until_ready(), if ready.is_some() => {
                    if let Some(ready) = ready.take() {
                        ready();
                    }
                }
            }
        };
        let result = match ended {
            None => Ok(()),
            Some(Ok((name, Ok(())))) => Err(anyhow!("{name} ended by itself")),
            Some(Ok((name, Err(error)))) => Err(error.context(format!("{name} failed"))),
            Some(Err(error)) => Err(error.into()),
        };
        if let Err(error) = &result {
            tracing::error!("stopping: {error:#}");
        }
        let _ = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
        leases.close();
        cancel.cancel();
        let drained = async {
            while let Some(part) = parts.work.join_next().await {
                tell_late(part);
            }
            loader.backends().shutdown().await;
            api_cancel.cancel();
            while let Some(part) = parts.api.join_next().await {
                tell_late(part);
            }
            if let Some(control_plane) = control_plane {
                control_plane.shutdown().await;
            }
        };
        tokio::select! {
            done = tokio::time::timeout(STOP_LIMIT, drained) => {
                if done.is_err() {
                    tracing::warn!("the stop took longer than {STOP_LIMIT:?}: what was left is given up; it is taken up at the next start");
                }
            }
            () = signals.stop() => tracing::warn!("stopped a second time: not waiting any more"),
        }
        result
    }

    fn start(
        self,
        cancel: &CancellationToken,
        api_cancel: &CancellationToken,
    ) -> Result<(Parts, egress_reconcile::Handle)> {
        let mut registry = self.registry;
        let mut parts = Parts::default();
        if let Some(EmbeddedApi {
            control_plane,
            tls,
            unix,
        }) = self.embedded
        {
            let (serving, stop) = (control_plane.clone(), api_cancel.clone());
            parts.api("the embedded API", async move {
                Ok(serving.serve_tls(tls, stop).await?)
            });
            if let Some(unix) = unix {
                let stop = api_cancel.clone();
                parts.api("the embedded API's unix socket", async move {
                    Ok(control_plane.serve_unix(unix, stop).await?)
                });
            }
        }
        let (health, engine) = egress_health::Engine::start(
            egress_health::Config {
                workers: self.config.health_workers,
                extra_ca: self.config.health_ca.clone(),
                ..egress_health::Config::default()
            },
            egress_health::Metrics::register(&mut registry),
            // It outlives the reconciler too, which listens to it.
            api_cancel.clone(),
        )?;
        parts.api("the prober", async move { Ok(engine.await?) });

        let reconciler = Reconciler::new(
            egress_reconcile::Config {
                namespace: self.config.namespace.clone(),
                provisioning_timeout: self.config.provisioning_timeout,
                sweep_interval: self.config.sweep_interval,
                first_sweep: FIRST_SWEEP.min(self.config.sweep_interval),
                orphan_grace: self.config.orphan_grace,
                shutdown_grace: RECONCILE_GRACE,
                ..egress_reconcile::Config::default()
            },
            egress_reconcile::Deps {
                client: self.client,
                providers: self.loader.set(),
                health,
                leases: Arc::clone(&self.leases),
                installation: self.installation,
                clock: Arc::new(SystemClock),
                metrics: egress_reconcile::Metrics::register(&mut registry),
            },
        );
        let handle = reconciler.handle();
        let directory = ReconcilerDirectory::new(reconciler.directory(), handle.clone());
        let stop = cancel.clone();
        parts.work(
            "the reconciler",
            async move { Ok(reconciler.run(stop).await?) },
        );
        let (forward, stop) = (Arc::clone(&directory), cancel.clone());
        parts.work("the directory", async move {
            forward.forward(stop).await;
            Ok(())
        });

        let router = egress_discovery::router(
            &self.config.discovery,
            egress_discovery::Deps {
                directory,
                leases: Arc::clone(&self.leases),
                default_ttl: self.lease_config.default_ttl,
                metrics: egress_discovery::Metrics::register(&mut registry),
                cancel: cancel.clone(),
            },
        )?;
        let (bound, stop) = (self.discovery, cancel.clone());
        parts.work("the discovery API", async move {
            Ok(egress_discovery::serve(bound, router, stop).await?)
        });
        let (leases, stop) = (self.leases, cancel.clone());
        parts.work("lease expiry", async move { expire(leases, stop).await });
        let file = match self.config.providers {
            ProvidersSource::File(path) => Some(path),
            ProvidersSource::None | ProvidersSource::Text(_) => None,
        };
        let (loader, stop) = (self.loader, cancel.clone());
        parts.work("the providers file", async move {
            Ok(reload::watch(file, loader, stop).await?)
        });
        if let Some(listener) = self.metrics {
            let (registry, stop) = (Arc::new(registry), cancel.clone());
            parts.work("the metrics endpoint", async move {
                Ok(metrics::serve(listener, registry, stop).await?)
            });
        }
        Ok((parts, handle))
    }
}

type Ended = (&'static str, Result<()>);

/// The running parts: those that work, and the API that they work through.
#[derive(Default)]
struct Parts {
    work: JoinSet<Ended>,
    api: JoinSet<Ended>,
}

impl Parts {
    fn work(
        &mut self,
        name: &'static str,
        part: impl Future<Output = Result<()>> + Send + 'static,
    ) {
        self.work.spawn(async move { (name, part.await) });
    }

    fn api(&mut self, name: &'static str, part: impl Future<Output = Result<()>> + Send + 'static) {
        self.api.spawn(async move { (name, part.await) });
    }
}

fn tell_late(part: Result<Ended, tokio::task::JoinError>) {
    match part {
        Ok((_, Ok(()))) => {}
        Ok((name, Err(error))) => tracing::warn!("{name} ended badly: {error:#}"),
        Err(error) => tracing::warn!("a part ended badly: {error}"),
    }
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    async fn stop(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

async fn bind(flag: &str, addr: std::net::SocketAddr) -> Result<TcpListener> {
    TcpListener::bind(addr).await.with_context(|| {
        format!("{flag}: cannot listen on {addr}; stop what uses it, or choose another address")
    })
}

/// The Kubernetes API that Proxies live in.
async fn connect(
    config: &Config,
    told: &mut Addresses,
) -> Result<(Option<EmbeddedApi>, kube::Client)> {
    match &config.control_plane {
        ControlPlane::Cluster { kubeconfig } => {
            let args = crate::cli::ClientArgs {
                kubeconfig: kubeconfig.clone(),
                namespace: None,
            };
            Ok((None, crate::client::connect(&args).await?))
        }
        ControlPlane::Embedded {
            addr,
            socket,
            kubeconfig,
        } => {
            let tls = bind("--api-addr", *addr).await?;
            let unix = socket
                .as_ref()
                .map(|path| unix_listener(path))
                .transpose()?;
            let storage =
                egress_control_plane::Storage::Directory(config.directories.state.join("api"));
            let control_plane = Embedded::open(egress_control_plane::Config::new(
                storage,
                vec![egress_api::crd()],
            ))
            .await
            .context("the embedded API cannot be opened")?;
            control_plane
                .write_admin_kubeconfig(kubeconfig, tls.local_addr()?)
                .with_context(|| format!("cannot write {}", kubeconfig.display()))?;
            told.kubeconfig = kubeconfig.display().to_string();
            let client = kube::Client::new(control_plane.router(), "default");
            Ok((
                Some(EmbeddedApi {
                    control_plane,
                    tls,
                    unix,
                }),
                client,
            ))
        }
    }
}

/// A socket that only this user and group may open; one that a dead process left is replaced.
fn unix_listener(path: &std::path::Path) -> Result<UnixListener> {
    if std::os::unix::net::UnixStream::connect(path).is_ok() {
        return Err(anyhow!(
            "--api-socket: {} is in use by another process",
            path.display()
        ));
    }
    let _ = std::fs::remove_file(path);
    let listener = UnixListener::bind(path)
        .with_context(|| format!("--api-socket: cannot listen on {}", path.display()))?;
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o660))?;
    Ok(listener)
}

fn lease_store(
    config: &Config,
    registry: &mut Registry,
) -> Result<(Arc<dyn LeaseStore>, egress_lease::Config)> {
    let lease_config = config.leases.clone();
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let metrics = egress_lease::Metrics::register(registry);
    let store: Arc<dyn LeaseStore> = if config.lease_in_memory {
        Arc::new(MemoryStore::with_metrics(
            lease_config.clone(),
            clock,
            metrics,
        ))
    } else {
        let path = config.directories.state.join("leases.sqlite");
        Arc::new(SqliteStore::open_with_metrics(
            path,
            lease_config.clone(),
            clock,
            metrics,
        )?)
    };
    Ok((store, lease_config))
}

async fn expire(leases: Arc<dyn LeaseStore>, cancel: CancellationToken) -> Result<()> {
    let mut tick = tokio::time::interval(Duration::from_secs(1));
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = cancel.cancelled() => return Ok(()),
            _ = tick.tick() => {}
        }
        let leases = Arc::clone(&leases);
        if let Err(error) = tokio::task::spawn_blocking(move || leases.sweep()).await? {
            // A full disk heals; the next tick tries again.
            tracing::warn!(%error, "expired leases cannot be removed");
        }
    }
}

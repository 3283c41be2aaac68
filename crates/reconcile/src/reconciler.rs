//! The tasks around the steps: watches, triggers, the queue with its workers, the sweep; started
//! together, ended together.

use std::sync::Arc;
use std::time::Duration;

use egress_api::Proxy;
use egress_core::ProxyKey;
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use kube::core::DeserializeGuard;
use kube::runtime::reflector::{self, Store, store::Writer};
use std::sync::{Mutex, PoisonError};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

use crate::config::{Config, Deps, jitter};
use crate::context::Context;
use crate::directory::Directory;
use crate::error::RunError;
use crate::events;
use crate::index::Index;
use crate::kubernetes::KubernetesApi;
use crate::memory::Memories;
use crate::metrics::ResultLabel;
use crate::queue::Queue;
use crate::step::{Next, after_error, reconcile};
use crate::sweep::{Sweep, sweep};
use crate::triggers::{self, Objects, Secrets};
use crate::watch::{Metadata, Objects as WholeObjects, WatchState, Watcher};

/// How often the driver shows that it is alive when there is nothing to do.
const HEARTBEAT: Duration = Duration::from_secs(5);

/// The reconciler, built and not yet running.
pub struct Reconciler {
    pub(crate) ctx: Arc<Context>,
    queue: Arc<Queue>,
    client: kube::Client,
    pub(crate) writer: Writer<Proxy>,
    event_writer: events::Writer,
    handle: Handle,
}

/// What others may ask of a reconciler, running or not. Cheap to clone.
#[derive(Clone)]
pub struct Handle {
    proxies: watch::Sender<WatchState>,
    secrets: watch::Sender<WatchState>,
    progress: Arc<Mutex<Instant>>,
}

/// Whether the reconciler works on what the API says now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Readiness {
    Ready,
    /// In words: what fails, and what to do about it.
    NotReady(String),
}

/// See [`Handle::readiness_changes`].
pub struct ReadinessChanges {
    proxies: watch::Receiver<WatchState>,
    secrets: watch::Receiver<WatchState>,
}

impl ReadinessChanges {
    /// Until readiness may have changed since the last call, or since this was made.
    pub async fn changed(&mut self) {
        // The senders live as long as the handle that this came from.
        tokio::select! {
            _ = self.proxies.changed() => {}
            _ = self.secrets.changed() => {}
        }
    }
}

impl Handle {
    /// Ready once both watches run; a refused verb is named.
    pub fn readiness(&self) -> Readiness {
        for (state, what) in [(&self.proxies, "proxies"), (&self.secrets, "secrets")] {
            match &*state.borrow() {
                WatchState::Watching => {}
                WatchState::Starting => {
                    return Readiness::NotReady(format!("the first list of {what} has not ended"));
                }
                WatchState::Failing(why) => return Readiness::NotReady(why.clone()),
            }
        }
        Readiness::Ready
    }

    pub fn synced(&self) -> bool {
        self.readiness() == Readiness::Ready
    }

    /// Changes of [`Handle::readiness`] from now on. Look at it after this call, and again after
    /// each change: then none is missed.
    pub fn readiness_changes(&self) -> ReadinessChanges {
        ReadinessChanges {
            proxies: self.proxies.subscribe(),
            secrets: self.secrets.subscribe(),
        }
    }

    /// Returns once it is ready; at once when it is.
    pub async fn until_ready(&self) {
        let mut changes = self.readiness_changes();
        while self.readiness() != Readiness::Ready {
            changes.changed().await;
        }
    }

    /// When the driver last showed that it is alive: for a watchdog. It does so at least every
    /// five seconds.
    pub fn last_progress(&self) -> Instant {
        *self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn progressed(&self) {
        *self.progress.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }
}

impl Reconciler {
    pub fn new(config: Config, deps: Deps) -> Self {
        let (store, writer) = reflector::store();
        let index = Arc::new(Index::default());
        let directory = Directory::new(
            Arc::clone(&deps.health),
            Arc::clone(&index),
            deps.metrics.clone(),
        );
        let (events, event_writer) = events::channel(
            deps.client.clone(),
            config.reporting_instance.as_deref(),
            config.api_deadline,
            deps.metrics.clone(),
        );
        let queue = Arc::new(Queue::new(config.concurrency_per_provider));
        let ctx = Arc::new(Context {
            api: KubernetesApi::new(deps.client.clone(), config.api_deadline),
            store,
            index,
            directory,
            providers: deps.providers,
            health: deps.health,
            leases: deps.leases,
            installation: deps.installation,
            started: deps.clock.now(),
            clock: deps.clock,
            memories: Memories::default(),
            events,
            metrics: deps.metrics,
            config,
        });
        Self {
            ctx,
            queue,
            client: deps.client,
            writer,
            event_writer,
            handle: Handle {
                proxies: watch::Sender::new(WatchState::Starting),
                secrets: watch::Sender::new(WatchState::Starting),
                progress: Arc::new(Mutex::new(Instant::now())),
            },
        }
    }

    /// All Proxies as last seen.
    pub fn store(&self) -> Store<Proxy> {
        self.ctx.store.clone()
    }

    /// All Proxies with their live verdicts.
    pub fn directory(&self) -> Directory {
        self.ctx.directory.clone()
    }

    /// Readiness and progress.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Runs until `cancel`; then gives running reconciles [`Config::shutdown_grace`] to end.
    ///
    /// # Errors
    /// When one of its tasks ended by itself: nothing is reconciled any more then, and the
    /// process must not go on as if it were.
    pub async fn run(self, cancel: CancellationToken) -> Result<(), RunError> {
        let grace = self.ctx.config.shutdown_grace;
        // Events outlive the rest a little: the last reconciles tell some.
        let events_end = CancellationToken::new();
        let event_task = tokio::spawn(self.event_writer.run(events_end.clone()));
        let mut tasks: JoinSet<&'static str> = JoinSet::new();
        let stop = cancel.child_token();
        spawn_watches(
            &mut tasks,
            &self.ctx,
            &self.queue,
            &self.client,
            self.writer,
            &self.handle,
            &stop,
        );
        let (ctx, queue) = (&self.ctx, &self.queue);
        let until = |name: &'static str, task: futures::future::BoxFuture<'static, ()>| {
            let stop = stop.clone();
            async move {
                tokio::select! {
                    () = task => {}
                    () = stop.cancelled() => {}
                }
                name
            }
        };
        tasks.spawn(until(
            "health transitions",
            Box::pin(triggers::health(Arc::clone(ctx), Arc::clone(queue))),
        ));
        tasks.spawn(until(
            "provider events",
            Box::pin(triggers::providers(Arc::clone(ctx), Arc::clone(queue))),
        ));
        tasks.spawn(until("sweep", Box::pin(sweeps(Arc::clone(ctx)))));
        let driver = drive(
            Arc::clone(ctx),
            Arc::clone(queue),
            self.handle.clone(),
            stop.clone(),
        );
        tasks.spawn(async move {
            driver.await;
            "driver"
        });

        let mut failed = None;
        while let Some(ended) = tasks.join_next().await {
            if failed.is_none() && !stop.is_cancelled() {
                failed = Some(match ended {
                    Ok(task) => RunError::TaskEnded { task },
                    Err(join) => RunError::TaskPanicked {
                        task: "reconciler",
                        message: join.to_string(),
                    },
                });
                stop.cancel();
            }
        }
        events_end.cancel();
        if tokio::time::timeout(grace, event_task).await.is_err() {
            tracing::debug!("some Events were not written before the stop");
        }
        failed.map_or(Ok(()), Err)
    }
}

fn spawn_watches(
    tasks: &mut JoinSet<&'static str>,
    ctx: &Arc<Context>,
    queue: &Arc<Queue>,
    client: &kube::Client,
    writer: Writer<Proxy>,
    handle: &Handle,
    stop: &CancellationToken,
) {
    let config = &ctx.config;
    let api: Api<DeserializeGuard<Proxy>> = match &config.namespace {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    };
    let watcher = Watcher {
        source: WholeObjects(api),
        resource: "proxies.crawl.example.com",
        labels: "",
        deadline: config.api_deadline,
        timeout: config.watch_timeout,
        backoff: config.backoff.clone(),
        metrics: ctx.metrics.clone(),
        state: handle.proxies.clone(),
    };
    let mut objects = Objects::new(Arc::clone(ctx), Arc::clone(queue), writer);
    let stopped = stop.clone();
    tasks.spawn(async move {
        watcher.run(stopped, |change| objects.take(change)).await;
        "watch of proxies"
    });

    let api: Api<Secret> = match &config.namespace {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    };
    let watcher = Watcher {
        source: Metadata(api),
        resource: "secrets",
        labels: "crawl.example.com/cloud-init=true",
        deadline: config.api_deadline,
        timeout: config.watch_timeout,
        backoff: config.backoff.clone(),
        metrics: ctx.metrics.clone(),
        state: handle.secrets.clone(),
    };
    let mut secrets = Secrets {
        ctx: Arc::clone(ctx),
        queue: Arc::clone(queue),
        known: std::collections::BTreeMap::new(),
        listing: None,
    };
    let stopped = stop.clone();
    tasks.spawn(async move {
        watcher.run(stopped, |change| secrets.take(change)).await;
        "watch of secrets"
    });
}

/// Takes what is due from the queue, so many at a time; at a stop waits for what runs.
async fn drive(ctx: Arc<Context>, queue: Arc<Queue>, handle: Handle, stop: CancellationToken) {
    let mut running: JoinSet<ProxyKey> = JoinSet::new();
    let mut keys = std::collections::HashMap::new();
    let limit = ctx.config.concurrency.max(1);
    let mut heartbeat = tokio::time::interval(HEARTBEAT);
    loop {
        tokio::select! {
            key = queue.next(), if running.len() < limit => {
                ctx.metrics.depth.set(i64::try_from(queue.depth()).unwrap_or(i64::MAX));
                let task = running.spawn(one(Arc::clone(&ctx), Arc::clone(&queue), key.clone()));
                keys.insert(task.id(), key);
            }
            Some(ended) = running.join_next_with_id() => {
                match ended {
                    Ok((id, _)) => {
                        keys.remove(&id);
                    }
                    Err(join) => panicked(&ctx, &queue, keys.remove(&join.id()), &join),
                }
            }
            _ = heartbeat.tick() => {
                ctx.metrics.depth.set(i64::try_from(queue.depth()).unwrap_or(i64::MAX));
            }
            () = stop.cancelled() => break,
        }
        handle.progressed();
    }
    let all = async { while running.join_next().await.is_some() {} };
    if tokio::time::timeout(ctx.config.shutdown_grace, all)
        .await
        .is_err()
    {
        tracing::warn!("reconciles cut off at the stop; they go on at the next start");
    }
}

fn panicked(ctx: &Context, queue: &Queue, key: Option<ProxyKey>, join: &tokio::task::JoinError) {
    ctx.metrics
        .reconciles
        .get_or_create(&ResultLabel { result: "panic" })
        .inc();
    let Some(key) = key else { return };
    tracing::error!(PROXY = %key, error = %join, "a reconcile panicked: this is a fault of the operator");
    let group = Context::group(ctx.cached(&key).as_deref());
    let at = Instant::now() + jitter(Duration::from_secs(60), rand::random());
    queue.done(&key, Some((&group, at)));
}

async fn one(ctx: Arc<Context>, queue: Arc<Queue>, key: ProxyKey) -> ProxyKey {
    let span = tracing::info_span!(parent: None, "Reconcile Proxy", PROXY = %key);
    let started = Instant::now();
    let answer = reconcile(&ctx, &key).instrument(span.clone()).await;
    ctx.metrics
        .duration
        .observe(started.elapsed().as_secs_f64());
    let _entered = span.enter();
    let group = Context::group(ctx.cached(&key).as_deref());
    let (result, again) = match answer {
        Ok(Next::Never) => ("gone", None),
        Ok(Next::At(at)) => ("success", Some(at)),
        Err(error) => {
            let wait = after_error(&ctx, &key, &error);
            if error.category() == "conflict" {
                tracing::debug!(%error, "decided from an outdated view: again");
            } else {
                tracing::warn!(%error, retry_in = ?wait, "reconcile not finished");
            }
            (error.category(), Some(Instant::now() + wait))
        }
    };
    ctx.metrics
        .reconciles
        .get_or_create(&ResultLabel { result })
        .inc();
    queue.done(&key, again.map(|at| (group.as_str(), at)));
    key.clone()
}

async fn sweeps(ctx: Arc<Context>) {
    tokio::time::sleep(jitter(ctx.config.first_sweep, rand::random())).await;
    loop {
        sweep(&ctx).await;
        tokio::time::sleep(jitter(ctx.config.sweep_interval, rand::random())).await;
    }
}

impl Reconciler {
    /// One sweep for orphans, now. None: the Proxies could not be listed.
    pub async fn sweep_now(&self) -> Option<Sweep> {
        sweep(&self.ctx).await
    }
}

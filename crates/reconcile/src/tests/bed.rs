//! A control plane in memory, a fake world, a scripted prober, and a reconciler on top.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use egress_api::Proxy;
use egress_control_plane::{Config as PlaneConfig, ControlPlane, Storage};
use egress_core::clock::ManualClock;
use egress_core::{Clock, InstallationId, ProxyKey, Uid};
use egress_health::{Health, ProbeClass, Target, Verdict};
use egress_lease::{LeaseStore, MemoryStore};
use egress_provider::fake::World;
use egress_provider::{Provider, ProviderSet};
use futures::StreamExt;
use futures::stream::BoxStream;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::api::events::v1::Event;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt};
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use tokio::sync::broadcast;
use tokio_stream::wrappers::BroadcastStream;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

use crate::{Backoff, Config, Deps, Directory, Handle, Metrics, Reconciler, RunError};

/// What goes over the client, counted, and refused where a test says so.
#[derive(Default)]
pub(crate) struct Wire {
    pub writes: AtomicU64,
    pub reads: AtomicU64,
    written: Mutex<Vec<String>>,
    refuse: Mutex<Option<Refuse>>,
}

/// Instead of a status: no answer, ever.
pub(crate) const HANG: u16 = 0;

type Refuse = Box<dyn Fn(&str, &str) -> Option<u16> + Send>;

impl Wire {
    pub(crate) fn refuse(&self, with: impl Fn(&str, &str) -> Option<u16> + Send + 'static) {
        *self.refuse.lock().unwrap() = Some(Box::new(with));
    }

    pub(crate) fn allow_all(&self) {
        *self.refuse.lock().unwrap() = None;
    }

    pub(crate) fn take_written(&self) -> Vec<String> {
        std::mem::take(&mut self.written.lock().unwrap())
    }
}

fn client_over(router: Router, wire: Arc<Wire>) -> Client {
    let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
        let router = router.clone();
        let wire = Arc::clone(&wire);
        async move {
            let method = request.method().to_string();
            let uri = request.uri().to_string();
            if method == "GET" {
                wire.reads.fetch_add(1, Ordering::SeqCst);
            } else {
                wire.writes.fetch_add(1, Ordering::SeqCst);
                wire.written.lock().unwrap().push(format!("{method} {uri}"));
            }
            let refused = wire
                .refuse
                .lock()
                .unwrap()
                .as_ref()
                .and_then(|refuse| refuse(&method, &uri));
            if refused == Some(HANG) {
                std::future::pending::<()>().await;
            }
            if let Some(code) = refused {
                let status = json!({
                    "kind": "Status", "apiVersion": "v1", "status": "Failure",
                    "code": code, "reason": "Injected", "message": format!("injected {code}"),
                });
                return Ok(http::Response::builder()
                    .status(code)
                    .header("content-type", "application/json")
                    .body(Body::from(status.to_string()))
                    .unwrap());
            }
            router.oneshot(request.map(Body::new)).await
        }
    });
    Client::new(service, "default")
}

/// A prober that says what the test wants, at once.
pub(crate) struct ScriptedHealth {
    inner: Mutex<Script>,
    transitions: broadcast::Sender<ProxyKey>,
    hung_up: CancellationToken,
}

#[derive(Default)]
struct Script {
    targets: BTreeMap<ProxyKey, Target>,
    /// By host; everything else is healthy.
    answers: BTreeMap<String, Option<bool>>,
    silent: bool,
}

impl ScriptedHealth {
    fn new() -> Self {
        Self {
            inner: Mutex::default(),
            transitions: broadcast::channel(4096).0,
            hung_up: CancellationToken::new(),
        }
    }

    /// The streams of transitions end.
    pub(crate) fn hang_up(&self) {
        self.hung_up.cancel();
    }

    /// No verdicts for new targets.
    pub(crate) fn be_silent(&self) {
        self.inner.lock().unwrap().silent = true;
    }

    pub(crate) fn answer(&self, host: &str, healthy: Option<bool>) {
        let keys: Vec<_> = {
            let mut inner = self.inner.lock().unwrap();
            inner.answers.insert(host.to_owned(), healthy);
            inner
                .targets
                .values()
                .filter(|t| t.host == host)
                .map(|t| t.key.clone())
                .collect()
        };
        for key in keys {
            let _ = self.transitions.send(key);
        }
    }

    pub(crate) fn target(&self, key: &ProxyKey) -> Option<Target> {
        self.inner.lock().unwrap().targets.get(key).cloned()
    }
}

impl Health for ScriptedHealth {
    fn set(&self, target: Target) {
        let key = target.key.clone();
        let news = {
            let mut inner = self.inner.lock().unwrap();
            inner.targets.insert(key.clone(), target.clone()) != Some(target)
        };
        if news {
            let _ = self.transitions.send(key);
        }
    }

    fn remove(&self, key: &ProxyKey) {
        self.inner.lock().unwrap().targets.remove(key);
    }

    fn verdict(&self, key: &ProxyKey) -> Option<Verdict> {
        let inner = self.inner.lock().unwrap();
        let target = inner.targets.get(key)?;
        let healthy = match inner.answers.get(&target.host) {
            Some(answer) => (*answer)?,
            None if inner.silent => return None,
            None => true,
        };
        Some(Verdict {
            uid: target.uid.clone(),
            host: target.host.clone(),
            port: target.port,
            healthy,
            latency: Some(Duration::from_millis(10)),
            class: if healthy {
                ProbeClass::Success
            } else {
                ProbeClass::Timeout
            },
            message: if healthy { "204" } else { "timeout" }.to_owned(),
        })
    }

    fn transitions(&self) -> BoxStream<'static, ProxyKey> {
        BroadcastStream::new(self.transitions.subscribe())
            .filter_map(|key| std::future::ready(key.ok()))
            .take_until(self.hung_up.clone().cancelled_owned())
            .boxed()
    }
}

pub(crate) struct Bed {
    /// None: the stub.
    pub plane: Option<ControlPlane>,
    /// For the test itself; not counted.
    pub client: Client,
    /// For the reconciler.
    pub wire: Arc<Wire>,
    wired: Client,
    pub world: World,
    pub clock: ManualClock,
    pub installation: InstallationId,
    pub providers: ProviderSet,
    pub health: Arc<ScriptedHealth>,
    pub leases: Arc<MemoryStore>,
    pub config: Config,
}

pub(crate) struct Running {
    pub handle: Handle,
    pub directory: Directory,
    pub cancel: CancellationToken,
    task: tokio::task::JoinHandle<Result<(), RunError>>,
}

impl Running {
    /// Waits for an end that nobody asked for.
    pub(crate) async fn ended(self) -> Result<(), RunError> {
        tokio::time::timeout(Duration::from_secs(10), self.task)
            .await
            .expect("it goes on")
            .expect("it panicked")
    }

    pub(crate) async fn stop(self) -> Result<(), RunError> {
        self.cancel.cancel();
        tokio::time::timeout(Duration::from_secs(10), self.task)
            .await
            .expect("it does not stop")
            .expect("it panicked")
    }
}

/// Quick where the defaults are slow.
pub(crate) fn quick() -> Config {
    Config {
        poll: Duration::from_millis(20),
        backoff: Backoff {
            first: Duration::from_millis(20),
            max: Duration::from_millis(200),
            quota: Duration::from_millis(300),
        },
        first_sweep: Duration::from_secs(3600),
        ..Config::default()
    }
}

impl Bed {
    pub(crate) async fn new() -> Self {
        Self::with(quick()).await
    }

    pub(crate) async fn with(config: Config) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let plane = ControlPlane::open(PlaneConfig::new(Storage::Memory, vec![egress_api::crd()]))
            .await
            .unwrap();
        let router = plane.router();
        Self::over(router, Some(plane), config)
    }

    /// On a stub of the API: only what one reconcile needs, and fast.
    pub(crate) fn on_stub(config: Config) -> Self {
        Self::over(super::stub::router(), None, config)
    }

    fn over(router: Router, plane: Option<ControlPlane>, config: Config) -> Self {
        let wire = Arc::new(Wire::default());
        let clock = ManualClock::at(Timestamp::from_second(1_800_000_000).unwrap());
        let as_clock: Arc<dyn Clock> = Arc::new(clock.clone());
        let world = World::new(Arc::clone(&as_clock));
        let installation = InstallationId::new("11111111-1111-4111-8111-111111111111");
        let both: Vec<Arc<dyn Provider>> = vec![
            world.provider("fake-a", &installation),
            world.provider("fake-b", &installation),
        ];
        Self {
            client: Client::new(router.clone(), "default"),
            wired: client_over(router, Arc::clone(&wire)),
            wire,
            plane,
            world,
            installation,
            providers: ProviderSet::new(both),
            health: Arc::new(ScriptedHealth::new()),
            leases: Arc::new(MemoryStore::new(egress_lease::Config::default(), as_clock)),
            clock,
            config,
        }
    }

    pub(crate) fn reconciler(&self) -> Reconciler {
        Reconciler::new(
            self.config.clone(),
            Deps {
                client: self.wired.clone(),
                providers: self.providers.clone(),
                health: Arc::clone(&self.health) as Arc<dyn Health>,
                leases: Arc::clone(&self.leases) as Arc<dyn LeaseStore>,
                installation: self.installation.clone(),
                clock: Arc::new(self.clock.clone()),
                metrics: Metrics::register(&mut Registry::default()),
            },
        )
    }

    pub(crate) fn start(&self) -> Running {
        let reconciler = self.reconciler();
        let cancel = CancellationToken::new();
        Running {
            handle: reconciler.handle(),
            directory: reconciler.directory(),
            task: tokio::spawn(reconciler.run(cancel.clone())),
            cancel,
        }
    }

    pub(crate) fn api(&self) -> Api<Proxy> {
        Api::namespaced(self.client.clone(), "default")
    }

    pub(crate) async fn create(&self, name: &str, spec: Value) -> Proxy {
        self.create_with(name, spec, json!({})).await
    }

    pub(crate) async fn create_with(&self, name: &str, spec: Value, metadata: Value) -> Proxy {
        let mut object = json!({
            "apiVersion": "crawl.example.com/v1alpha1",
            "kind": "Proxy",
            "metadata": {"name": name, "namespace": "default"},
            "spec": spec,
        });
        object["metadata"]
            .as_object_mut()
            .unwrap()
            .extend(metadata.as_object().unwrap().clone());
        let object: Proxy = serde_json::from_value(object).unwrap();
        self.api()
            .create(&PostParams::default(), &object)
            .await
            .unwrap()
    }

    pub(crate) async fn managed(&self, name: &str) -> Proxy {
        self.create(name, json!({"mode": "Managed", "provider": "fake-a"}))
            .await
    }

    pub(crate) async fn patch(&self, name: &str, patch: Value) -> Proxy {
        self.api()
            .patch(name, &PatchParams::default(), &Patch::Merge(patch))
            .await
            .unwrap()
    }

    pub(crate) async fn delete(&self, name: &str) {
        self.api()
            .delete(name, &DeleteParams::default())
            .await
            .unwrap();
    }

    pub(crate) async fn get(&self, name: &str) -> Option<Proxy> {
        self.api().get_opt(name).await.unwrap()
    }

    pub(crate) async fn secret(&self, name: &str, label: bool, data: &str) {
        let labels = if label {
            json!({"crawl.example.com/cloud-init": "true"})
        } else {
            json!({})
        };
        let secret: Secret = serde_json::from_value(json!({
            "apiVersion": "v1", "kind": "Secret",
            "metadata": {"name": name, "labels": labels},
            "stringData": {"user-data": data},
        }))
        .unwrap();
        let api: Api<Secret> = Api::namespaced(self.client.clone(), "default");
        match api.get_opt(name).await.unwrap() {
            None => api.create(&PostParams::default(), &secret).await.unwrap(),
            Some(_) => api
                .patch(name, &PatchParams::default(), &Patch::Merge(&secret))
                .await
                .unwrap(),
        };
    }

    /// Until `holds` of the object, polled with a deadline.
    #[track_caller]
    pub(crate) fn until(
        &self,
        name: &str,
        holds: impl Fn(&Proxy) -> bool,
    ) -> impl Future<Output = Proxy> {
        let caller = std::panic::Location::caller();
        let (api, name) = (self.api(), name.to_owned());
        async move {
            let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
            loop {
                let object = api.get_opt(&name).await.unwrap();
                if let Some(object) = &object
                    && holds(object)
                {
                    return object.clone();
                }
                assert!(
                    tokio::time::Instant::now() < deadline,
                    "{caller}: not within 10 s; {name} is {}",
                    serde_json::to_string_pretty(&object.map(|o| (o.metadata, o.status))).unwrap()
                );
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    }

    #[track_caller]
    pub(crate) fn until_phase(&self, name: &str, phase: &str) -> impl Future<Output = Proxy> {
        let phase = phase.to_owned();
        self.until(name, move |p| {
            p.status.as_ref().and_then(|s| s.phase.as_deref()) == Some(&phase)
        })
    }

    #[track_caller]
    pub(crate) fn until_gone(&self, name: &str) -> impl Future<Output = ()> {
        let caller = std::panic::Location::caller();
        let (api, name) = (self.api(), name.to_owned());
        async move {
            let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
            while let Some(object) = api.get_opt(&name).await.unwrap() {
                assert!(
                    tokio::time::Instant::now() < deadline,
                    "{caller}: still there: {object:?}"
                );
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    }

    /// Reasons of the Events about `name`.
    pub(crate) async fn event_reasons(&self, name: &str) -> BTreeSet<String> {
        let api: Api<Event> = Api::namespaced(self.client.clone(), "default");
        api.list(&ListParams::default())
            .await
            .unwrap()
            .into_iter()
            .filter(|e| e.regarding.as_ref().and_then(|r| r.name.as_deref()) == Some(name))
            .filter_map(|e| e.reason)
            .collect()
    }

    #[track_caller]
    pub(crate) fn until_event(&self, name: &str, reason: &str) -> impl Future<Output = ()> {
        let caller = std::panic::Location::caller();
        async move {
            let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
            while !self.event_reasons(name).await.contains(reason) {
                assert!(
                    tokio::time::Instant::now() < deadline,
                    "{caller}: no Event {reason}, only {:?}",
                    self.event_reasons(name).await
                );
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    }
}

/// `condition(p, "Ready")` is its status, reason and message.
pub(crate) fn condition(proxy: &Proxy, type_: &str) -> (String, String, String) {
    proxy
        .status
        .iter()
        .flat_map(|s| &s.conditions)
        .find(|c| c.type_ == type_)
        .map(|c| (c.status.clone(), c.reason.clone(), c.message.clone()))
        .unwrap_or_default()
}

pub(crate) fn ip(proxy: &Proxy) -> Option<String> {
    proxy.status.as_ref().and_then(|s| s.ip.clone())
}

pub(crate) fn uid(proxy: &Proxy) -> Uid {
    Uid::new(proxy.uid().unwrap())
}

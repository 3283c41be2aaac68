//! The `Provider` trait on libvirt hosts.
//!
//! - `placement`: zone, machine type, image; ids and names.
//! - `create`: from a request to a started domain, each step tolerant of an earlier attempt.
//! - `read`: get and list.
//! - `remove`: delete and garbage.
//!
//! ```text
//! create --base is there--------------------> overlay, seed, define, start
//!    \---it is not--> pending: fetch the image --> the same, in the background
//!                        get: Provisioning(FetchingImage), or the error that ended it
//! ```

mod create;
mod error;
mod placement;
mod read;
mod remove;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use egress_core::{Clock, ErrorClass, InstallationId, InstanceName, ProviderId, SystemClock, Uid};
use egress_provider::config::{BuildContext, Fields, ProviderBlueprint, ProviderType};
use egress_provider::{CreateRequest, Instance, InstanceEvent, Operation, Provider, ProviderError};
use egress_ssh::BridgeDir;
use futures::StreamExt as _;
use futures::stream::BoxStream;
use tokio::sync::broadcast;
use tokio_stream::wrappers::BroadcastStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use error::KvmError;

use crate::config::{self, KvmConfig};
use crate::domain::Marks;
use crate::host::{Host, HostEvent};
use crate::image::cache::{FetchStatus, ImageCache};
use crate::image::download::{Downloader, HttpConfig};
use crate::image::pins::Pins;
use crate::metrics::Metrics;

const GIB: u64 = 1 << 30;

/// The type `kvm`, as the providers file knows it.
pub struct KvmType {
    metrics: Metrics,
    clock: Arc<dyn Clock>,
    built: Built,
}

type Built = Arc<Mutex<BTreeMap<String, Weak<KvmProvider>>>>;

impl KvmType {
    pub fn new(metrics: Metrics) -> Self {
        Self::with_clock(metrics, Arc::new(SystemClock))
    }

    pub fn with_clock(metrics: Metrics, clock: Arc<dyn Clock>) -> Self {
        Self {
            metrics,
            clock,
            built: Arc::default(),
        }
    }

    /// A running provider by its configured name, for what the trait does not have: the state of
    /// image fetches, a refresh, the doctor.
    pub fn provider(&self, name: &str) -> Option<Arc<KvmProvider>> {
        self.built
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(name)
            .and_then(Weak::upgrade)
    }

    /// All running providers of this type, in the order of their names.
    pub fn providers(&self) -> Vec<Arc<KvmProvider>> {
        let mut built = self.built.lock().unwrap_or_else(PoisonError::into_inner);
        built.retain(|_, provider| provider.strong_count() > 0);
        built.values().filter_map(Weak::upgrade).collect()
    }
}

impl ProviderType for KvmType {
    fn type_name(&self) -> &'static str {
        "kvm"
    }

    fn read(&self, fields: &mut Fields<'_>) -> Option<Box<dyn ProviderBlueprint>> {
        let config = config::read(fields)?;
        Some(Box::new(Blueprint {
            config: Arc::new(config),
            metrics: self.metrics.clone(),
            clock: Arc::clone(&self.clock),
            built: Arc::clone(&self.built),
        }))
    }
}

struct Blueprint {
    config: Arc<KvmConfig>,
    metrics: Metrics,
    clock: Arc<dyn Clock>,
    built: Built,
}

impl ProviderBlueprint for Blueprint {
    fn build(&self, context: BuildContext) -> Result<Arc<dyn Provider>, ProviderError> {
        let provider = KvmProvider::build(
            Arc::clone(&self.config),
            &context,
            self.metrics.clone(),
            Arc::clone(&self.clock),
        )?;
        self.built
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(context.name, Arc::downgrade(&provider));
        Ok(provider)
    }
}

/// A configured kvm provider. Dropping it stops its background work.
pub struct KvmProvider {
    inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub name: String,
    pub installation: InstallationId,
    pub config: Arc<KvmConfig>,
    pub hosts: BTreeMap<String, Arc<Host>>,
    pub images: Arc<ImageCache>,
    pub clock: Arc<dyn Clock>,
    /// Instances that wait for their image, and those whose wait ended badly.
    pub pending: Mutex<BTreeMap<String, create::Pending>>,
    /// Calls for one instance follow each other.
    locks: Mutex<BTreeMap<String, Weak<tokio::sync::Mutex<()>>>>,
    /// The address an instance was last seen with, and the run of its domain: one empty answer
    /// does not clear it (kubevirt#12698).
    pub addresses: Mutex<BTreeMap<(String, String), (u32, IpAddr)>>,
    /// Marks never change after define, so each is read once.
    pub marks: Mutex<BTreeMap<(String, String), Option<Marks>>>,
    pub own_events: broadcast::Sender<InstanceEvent>,
    pub tasks: TaskTracker,
    pub stop: CancellationToken,
    supervised: std::sync::Once,
}

impl KvmProvider {
    /// Builds a provider; reaches no host.
    ///
    /// # Errors
    /// When the private socket directory or the HTTP client cannot be made.
    pub fn build(
        config: Arc<KvmConfig>,
        context: &BuildContext,
        metrics: Metrics,
        clock: Arc<dyn Clock>,
    ) -> Result<Arc<Self>, ProviderError> {
        Self::build_with(
            config,
            context,
            metrics,
            clock,
            HttpConfig::default(),
            |host| host,
        )
    }

    /// As [`Self::build`], with hosts and HTTP as a test wants them.
    #[doc(hidden)]
    pub fn build_with(
        config: Arc<KvmConfig>,
        context: &BuildContext,
        metrics: Metrics,
        clock: Arc<dyn Clock>,
        http: HttpConfig,
        adapt: impl Fn(Host) -> Host,
    ) -> Result<Arc<Self>, ProviderError> {
        let failed = |class, error: String| {
            ProviderError::new(class, &context.name, Operation::Build, error)
        };
        let bridges = BridgeDir::new(context.runtime_dir.join("kvm"))
            .map_err(|error| failed(ErrorClass::Transient, error.to_string()))?;
        let downloader = Downloader::new(http)
            .map_err(|error| failed(ErrorClass::Permanent, error.to_string()))?;
        let hosts = config
            .hosts
            .iter()
            .map(|host| {
                let host = Host::new(
                    host.clone(),
                    config.ssh.as_ref(),
                    bridges.clone(),
                    metrics.clone(),
                );
                (host.name().to_owned(), Arc::new(adapt(host)))
            })
            .collect();
        if config
            .ssh
            .as_ref()
            .is_some_and(|ssh| ssh.host_keys == egress_ssh::HostKeys::InsecureIgnore)
        {
            tracing::warn!(
                PROVIDER = context.name,
                "insecureIgnoreHostKey is set: whoever answers at a host's address is believed"
            );
        }
        let pins = Pins::load(&context.state_dir.join("kvm").join(&context.name));
        Ok(Arc::new(Self {
            inner: Arc::new(Inner {
                name: context.name.clone(),
                installation: context.installation.clone(),
                config,
                hosts,
                images: ImageCache::new(downloader, pins, metrics),
                clock,
                pending: Mutex::default(),
                locks: Mutex::default(),
                addresses: Mutex::default(),
                marks: Mutex::default(),
                own_events: broadcast::channel(256).0,
                tasks: TaskTracker::new(),
                stop: CancellationToken::new(),
                supervised: std::sync::Once::new(),
            }),
        }))
    }

    pub fn config(&self) -> &KvmConfig {
        &self.inner.config
    }

    /// Runs what must not stop half-way because its caller went away: a libvirt call goes on in its
    /// thread, and the instance's lock has to be held until it is done.
    async fn whole<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, KvmError>> + Send + 'static,
    ) -> Result<T, KvmError> {
        let span = tracing::Span::current();
        let task = self
            .inner
            .tasks
            .spawn(tracing::Instrument::instrument(Box::pin(work), span));
        task.await.unwrap_or(Err(KvmError::Stopped))
    }

    pub(crate) fn hosts(&self) -> impl Iterator<Item = &Arc<Host>> {
        self.inner.hosts.values()
    }

    /// Image fetches under way.
    pub fn fetches(&self) -> Vec<FetchStatus> {
        self.inner.images.status()
    }

    /// Forgets the digest that was recorded for an image (by its key), so that the next create
    /// fetches what is there now. Running VMs keep the volume they have.
    ///
    /// # Errors
    /// The image is not configured, or the record could not be written.
    pub fn refresh_image(&self, key: &str) -> Result<(), KvmError> {
        let Some(image) = self.inner.config.images.get(key) else {
            let known: Vec<&str> = self
                .inner
                .config
                .images
                .keys()
                .map(String::as_str)
                .collect();
            return Err(KvmError::Placement(format!(
                "image {key:?} is not configured; configured: {}",
                known.join(", ")
            )));
        };
        let pins = &self.inner.images.pins;
        pins.forget_pin(&image.pin_key()).map_err(|error| {
            KvmError::from(crate::image::ImageError::Pins {
                image: key.to_owned(),
                path: pins.path().display().to_string(),
                reason: error.to_string(),
            })
        })
    }

    /// Ends the background work and waits until it has ended.
    pub async fn shutdown(&self) {
        self.inner.stop.cancel();
        self.inner.images.stop();
        self.inner.tasks.close();
        self.inner.tasks.wait().await;
    }
}

impl Drop for KvmProvider {
    fn drop(&mut self) {
        self.inner.stop.cancel();
        self.inner.images.stop();
    }
}

impl Inner {
    pub fn host(&self, name: &str) -> Result<&Arc<Host>, KvmError> {
        self.hosts.get(name).ok_or_else(|| KvmError::UnknownHost {
            host: name.to_owned(),
            known: self
                .hosts
                .keys()
                .map(String::as_str)
                .collect::<Vec<_>>()
                .join(", "),
        })
    }

    pub fn disk_bytes(&self) -> u64 {
        self.config.disk_size_gb.saturating_mul(GIB)
    }

    /// The lock of one instance.
    pub fn lock_of(&self, name: &str) -> Arc<tokio::sync::Mutex<()>> {
        let mut locks = self.locks.lock().unwrap_or_else(PoisonError::into_inner);
        locks.retain(|_, lock| lock.strong_count() > 0);
        if let Some(lock) = locks.get(name).and_then(Weak::upgrade) {
            return lock;
        }
        let lock = Arc::new(tokio::sync::Mutex::new(()));
        locks.insert(name.to_owned(), Arc::downgrade(&lock));
        lock
    }

    pub fn forget(&self, host: &str, name: &str) {
        self.addresses
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&(host.to_owned(), name.to_owned()));
    }

    /// Keeps each host connected, so that its events come; started with the first listener.
    fn supervise(self: &Arc<Self>) {
        self.supervised.call_once(|| {
            for host in self.hosts.values() {
                let (host, stop) = (Arc::clone(host), self.stop.clone());
                self.tasks.spawn(async move {
                    tokio::select! {
                        () = stop.cancelled() => {}
                        () = keep_connected(&host) => {}
                    }
                });
            }
        });
    }

    /// What a host's event says of an instance.
    fn instance_event(event: &HostEvent) -> Option<InstanceEvent> {
        match event {
            HostEvent::Connected => Some(InstanceEvent::All),
            HostEvent::Domain { uuid, name } => {
                if !placement::is_instance_name(name) {
                    return None;
                }
                let instance = InstanceName::for_uid(&Uid::new(uuid));
                // A UID that is no UUID cannot be told from the domain's.
                Some(if instance.as_str() == name {
                    InstanceEvent::Instance(instance)
                } else {
                    InstanceEvent::All
                })
            }
        }
    }
}

/// Never returns. Pauses grow to half a minute, with jitter so that hosts do not move in step.
async fn keep_connected(host: &Host) {
    let mut pause = Duration::from_secs(1);
    loop {
        match host.session().await {
            Ok(session) => {
                pause = Duration::from_secs(1);
                session.ended().await;
            }
            Err(error) => {
                tracing::debug!(HOST = host.name(), %error, "not connected");
                pause = (pause * 2).min(Duration::from_secs(30));
            }
        }
        tokio::time::sleep(pause.mul_f64(rand::random_range(0.8..1.2))).await;
    }
}

#[async_trait]
impl Provider for KvmProvider {
    fn name(&self) -> &str {
        &self.inner.name
    }

    fn kind(&self) -> &'static str {
        "kvm"
    }

    async fn create(&self, request: &CreateRequest) -> Result<ProviderId, ProviderError> {
        let (inner, owned) = (Arc::clone(&self.inner), request.clone());
        self.whole(async move { create::create(&inner, &owned).await })
            .await
            .map_err(|error| {
                error.into_provider_error(
                    &self.inner.name,
                    Operation::Create,
                    request.name.as_str(),
                )
            })
    }

    async fn get(&self, id: &ProviderId) -> Result<Instance, ProviderError> {
        read::get(&self.inner, id).await.map_err(|error| {
            error.into_provider_error(&self.inner.name, Operation::Get, id.as_str())
        })
    }

    async fn delete(&self, id: &ProviderId) -> Result<(), ProviderError> {
        let (inner, owned) = (Arc::clone(&self.inner), id.clone());
        self.whole(async move { remove::delete(&inner, &owned).await })
            .await
            .map_err(|error| {
                error.into_provider_error(&self.inner.name, Operation::Delete, id.as_str())
            })
    }

    async fn list(&self) -> Result<Vec<Instance>, ProviderError> {
        read::list(&self.inner)
            .await
            .map_err(|error| error.into_provider_error(&self.inner.name, Operation::List, ""))
    }

    fn events(&self) -> BoxStream<'static, InstanceEvent> {
        if tokio::runtime::Handle::try_current().is_ok() {
            self.inner.supervise();
        }
        let own = BroadcastStream::new(self.inner.own_events.subscribe())
            .map(|event| Some(event.unwrap_or(InstanceEvent::All)));
        let hosts = self.inner.hosts.values().map(|host| {
            BroadcastStream::new(host.events())
                .map(|event| match event {
                    Ok(event) => Inner::instance_event(&event),
                    // Events were missed: look at everything.
                    Err(_) => Some(InstanceEvent::All),
                })
                .boxed()
        });
        futures::stream::select_all(hosts.chain([own.boxed()]))
            .filter_map(std::future::ready)
            .boxed()
    }

    async fn collect_garbage(
        &self,
        live: &BTreeSet<Uid>,
        grace: Duration,
    ) -> Result<Vec<String>, ProviderError> {
        remove::collect_garbage(&self.inner, live, grace)
            .await
            .map_err(|error| error.into_provider_error(&self.inner.name, Operation::List, ""))
    }
}

//! What wakes whom: each source of news reconciles exactly the Proxies it concerns, at once.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use egress_api::Proxy;
use egress_core::ProxyKey;
use egress_provider::{InstanceEvent, SetChange};
use futures::stream::BoxStream;
use futures::{FutureExt, StreamExt, stream};
use kube::core::{DeserializeGuard, PartialObjectMeta};
use kube::runtime::reflector::store::Writer;
use kube::runtime::watcher;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::Instant;
use tokio_stream::StreamMap;

use crate::config::jitter;
use crate::context::Context;
use crate::queue::Queue;
use crate::watch::Change;

/// Events of one provider that concern all its Proxies are spread over that time.
const SPREAD: Duration = Duration::from_secs(1);
/// A provider whose stream of events ended is asked for another one after that time.
const RESUBSCRIBE: Duration = Duration::from_secs(5);

pub(crate) fn wake(ctx: &Context, queue: &Queue, key: ProxyKey, at: Instant) {
    let group = Context::group(ctx.cached(&key).as_deref());
    queue.wake(key, &group, at);
}

/// Keeps store, index and directory in step with the API, and wakes what changed.
pub(crate) struct Objects {
    ctx: Arc<Context>,
    queue: Arc<Queue>,
    writer: Writer<Proxy>,
    /// Keys seen in the list that is under way, and whether they brought news; None: none is.
    listing: Option<BTreeMap<ProxyKey, bool>>,
}

impl Objects {
    pub(crate) fn new(ctx: Arc<Context>, queue: Arc<Queue>, writer: Writer<Proxy>) -> Self {
        Self {
            ctx,
            queue,
            writer,
            listing: None,
        }
    }

    pub(crate) fn take(&mut self, change: Change<DeserializeGuard<Proxy>>) {
        match change {
            Change::Listing => {
                self.listing = Some(BTreeMap::new());
                self.writer.apply_watcher_event(&watcher::Event::Init);
            }
            Change::Applied(DeserializeGuard(Ok(mut object))) => {
                object.metadata.managed_fields = None;
                self.applied(object);
            }
            Change::Applied(DeserializeGuard(Err(invalid))) => {
                // Left alone: neither reconciled nor swept, its UID is in the API's list.
                tracing::error!(
                    PROXY = format!(
                        "{}/{}",
                        invalid.metadata.namespace.as_deref().unwrap_or_default(),
                        invalid.metadata.name.as_deref().unwrap_or_default()
                    ),
                    error = invalid.error,
                    "a Proxy that cannot be read is left alone: correct its spec"
                );
            }
            Change::Deleted(DeserializeGuard(Ok(object))) => {
                self.writer
                    .apply_watcher_event(&watcher::Event::Delete(object.clone()));
                self.gone(&object.key());
            }
            Change::Deleted(DeserializeGuard(Err(_))) => {}
            Change::Listed => {
                let seen = self.listing.take().unwrap_or_default();
                self.writer.apply_watcher_event(&watcher::Event::InitDone);
                for key in self.ctx.index.keys() {
                    if !seen.contains_key(&key) {
                        self.gone(&key);
                    }
                }
                // The index holds more than the store did while the list was under way.
                for (key, news) in seen {
                    let object = self.ctx.cached(&key);
                    self.ctx.directory.refresh(&key, object.as_deref());
                    if news {
                        self.wake(key);
                    }
                }
            }
        }
    }

    fn applied(&mut self, object: Proxy) {
        let key = object.key();
        let changed = self.ctx.index.update(&key, Some(&object));
        if let Some(seen) = &mut self.listing {
            // What a list that failed half-way brought was never woken.
            let news = changed.object || self.ctx.cached(&key).is_none();
            seen.insert(key, news);
            self.writer
                .apply_watcher_event(&watcher::Event::InitApply(object));
            return;
        }
        self.writer
            .apply_watcher_event(&watcher::Event::Apply(object.clone()));
        self.ctx.directory.refresh(&key, Some(&object));
        if changed.object {
            self.wake(key);
        }
        for neighbour in changed.neighbours {
            self.neighbour(neighbour);
        }
    }

    fn gone(&mut self, key: &ProxyKey) {
        let changed = self.ctx.index.update(key, None);
        self.ctx.directory.refresh(key, None);
        self.wake(key.clone());
        for neighbour in changed.neighbours {
            self.neighbour(neighbour);
        }
    }

    /// Has (or had) the same address: whether it counts as healthy may have changed.
    fn neighbour(&self, key: ProxyKey) {
        let object = self.ctx.cached(&key);
        self.ctx.directory.refresh(&key, object.as_deref());
        self.wake(key);
    }

    fn wake(&self, key: ProxyKey) {
        wake(&self.ctx, &self.queue, key, Instant::now());
    }
}

/// A labelled Secret appeared, changed, or lost its label.
pub(crate) struct Secrets {
    pub ctx: Arc<Context>,
    pub queue: Arc<Queue>,
    /// Versions, so that a new list wakes only whom it brings news.
    pub known: BTreeMap<(String, String), Option<String>>,
    pub listing: Option<BTreeMap<(String, String), Option<String>>>,
}

impl Secrets {
    pub(crate) fn take<K>(&mut self, change: Change<PartialObjectMeta<K>>)
    where
        K: kube::Resource,
    {
        let name_of = |meta: &kube::core::ObjectMeta| {
            (
                meta.namespace.clone().unwrap_or_default(),
                meta.name.clone().unwrap_or_default(),
            )
        };
        match change {
            Change::Listing => self.listing = Some(BTreeMap::new()),
            Change::Applied(object) => {
                let name = name_of(&object.metadata);
                let version = object.metadata.resource_version;
                match &mut self.listing {
                    Some(listing) => {
                        listing.insert(name, version);
                    }
                    None => {
                        self.wake(&name);
                        self.known.insert(name, version);
                    }
                }
            }
            Change::Deleted(object) => {
                let name = name_of(&object.metadata);
                self.known.remove(&name);
                self.wake(&name);
            }
            Change::Listed => {
                let new = self.listing.take().unwrap_or_default();
                let changed: Vec<_> = self
                    .known
                    .keys()
                    .chain(new.keys())
                    .filter(|name| self.known.get(*name) != new.get(*name))
                    .cloned()
                    .collect();
                self.known = new;
                for name in changed {
                    self.wake(&name);
                }
            }
        }
    }

    fn wake(&self, (namespace, name): &(String, String)) {
        for key in self.ctx.index.by_secret(namespace, name) {
            wake(&self.ctx, &self.queue, key, Instant::now());
        }
    }
}

/// Verdicts: the directory knows before the status is written.
pub(crate) async fn health(ctx: Arc<Context>, queue: Arc<Queue>) {
    let mut transitions = ctx.health.transitions();
    while let Some(key) = transitions.next().await {
        let object = ctx.cached(&key);
        ctx.directory.refresh(&key, object.as_deref());
        wake(&ctx, &queue, key, Instant::now());
    }
}

enum ProviderNews {
    Event(InstanceEvent),
    Ended,
}

/// Events of all providers, and changes of the set of providers.
pub(crate) async fn providers(ctx: Arc<Context>, queue: Arc<Queue>) {
    let mut changes = ctx.providers.changes();
    let mut streams: StreamMap<String, BoxStream<'static, ProviderNews>> = StreamMap::new();
    for name in ctx.providers.names() {
        subscribe(&ctx, &mut streams, &name, None);
    }
    loop {
        tokio::select! {
            change = changes.recv() => {
                let names = match change {
                    Ok(SetChange { names }) => names,
                    // Some changes were missed: any may have changed.
                    Err(RecvError::Lagged(_)) => streams
                        .keys()
                        .cloned()
                        .chain(ctx.providers.names())
                        .collect(),
                    Err(RecvError::Closed) => return,
                };
                for name in names {
                    streams.remove(&name);
                    subscribe(&ctx, &mut streams, &name, None);
                    if ctx.providers.get(&name).is_none() {
                        ctx.metrics.forget_provider(&name);
                    }
                    for key in ctx.index.by_provider(&name) {
                        wake(&ctx, &queue, key, Instant::now());
                    }
                }
            }
            Some((name, news)) = streams.next(), if !streams.is_empty() => match news {
                ProviderNews::Event(InstanceEvent::Instance(instance)) => {
                    for key in ctx.index.by_instance(&instance) {
                        wake(&ctx, &queue, key, Instant::now());
                    }
                }
                ProviderNews::Event(InstanceEvent::All) => {
                    for key in ctx.index.by_provider(&name) {
                        // It is back: what waits for it need not wait the whole backoff.
                        ctx.memories.shorten_hold(&key, SPREAD);
                        let at = Instant::now() + SPREAD.mul_f64(rand::random());
                        wake(&ctx, &queue, key, at);
                    }
                }
                ProviderNews::Ended => subscribe(&ctx, &mut streams, &name, Some(RESUBSCRIBE)),
            },
        }
    }
}

fn subscribe(
    ctx: &Context,
    streams: &mut StreamMap<String, BoxStream<'static, ProviderNews>>,
    name: &str,
    wait: Option<Duration>,
) {
    let Some(provider) = ctx.providers.get(name) else {
        return;
    };
    let events = move || {
        provider
            .events()
            .map(ProviderNews::Event)
            .chain(stream::once(std::future::ready(ProviderNews::Ended)))
    };
    let stream = match wait {
        None => events().boxed(),
        // What happened meanwhile was missed: look at everything once.
        Some(wait) => tokio::time::sleep(jitter(wait, rand::random()))
            .map(move |()| {
                stream::once(std::future::ready(ProviderNews::Event(InstanceEvent::All)))
                    .chain(events())
            })
            .into_stream()
            .flatten()
            .boxed(),
    };
    streams.insert(name.to_owned(), stream);
}

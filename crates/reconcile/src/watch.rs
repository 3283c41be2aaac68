//! Lists a kind once and then watches it, for ever: with a deadline on every call and on silence,
//! backoff with jitter, one new list where the server forgot where we were, and a state that says
//! which verb of which resource fails and why.
//!
//! kube's own watcher hides a refused watch behind endless lists (kube#1132, kube#640) and a dead
//! connection behind minutes of silence (kube#1798).

use std::fmt::Debug;
use std::future::Future;
use std::time::Duration;

use futures::{StreamExt, TryStreamExt, stream::BoxStream};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ListMeta;
use kube::Api;
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::core::{ObjectList, PartialObjectMeta};
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::config::Backoff;
use crate::error::ApiError;
use crate::kubernetes::within;
use crate::metrics::{Metrics, WatchLabels};

const PAGE: u32 = 500;

/// What a watch brings.
#[derive(Debug)]
pub(crate) enum Change<K> {
    /// A list begins: what is not applied before `Listed` does not exist any more.
    Listing,
    Applied(K),
    Deleted(K),
    Listed,
}

/// How a watch is doing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum WatchState {
    /// The first list has not ended yet.
    Starting,
    Watching,
    /// In words: which verb of which resource fails, and why.
    Failing(String),
}

/// Where the objects come from: whole ones, or their metadata only.
pub(crate) trait Source: Send + Sync {
    type Object: Clone + Debug + DeserializeOwned + Send + 'static;

    fn list(
        &self,
        params: &ListParams,
    ) -> impl Future<Output = kube::Result<ObjectList<Self::Object>>> + Send;

    fn watch(
        &self,
        params: &WatchParams,
        version: &str,
    ) -> impl Future<
        Output = kube::Result<BoxStream<'static, kube::Result<WatchEvent<Self::Object>>>>,
    > + Send;

    fn version(object: &Self::Object) -> Option<String>;
}

/// Whole objects.
pub(crate) struct Objects<K>(pub Api<K>);

impl<K> Source for Objects<K>
where
    K: Clone + Debug + DeserializeOwned + kube::Resource + Send + Sync + 'static,
{
    type Object = K;

    async fn list(&self, params: &ListParams) -> kube::Result<ObjectList<K>> {
        self.0.list(params).await
    }

    async fn watch(
        &self,
        params: &WatchParams,
        version: &str,
    ) -> kube::Result<BoxStream<'static, kube::Result<WatchEvent<K>>>> {
        Ok(self.0.watch(params, version).await?.boxed())
    }

    fn version(object: &K) -> Option<String> {
        object.meta().resource_version.clone()
    }
}

/// Metadata only: what is in the objects never reaches this process.
pub(crate) struct Metadata<K>(pub Api<K>);

impl<K> Source for Metadata<K>
where
    K: Clone + Debug + DeserializeOwned + kube::Resource + Send + Sync + 'static,
{
    type Object = PartialObjectMeta<K>;

    async fn list(&self, params: &ListParams) -> kube::Result<ObjectList<Self::Object>> {
        self.0.list_metadata(params).await
    }

    async fn watch(
        &self,
        params: &WatchParams,
        version: &str,
    ) -> kube::Result<BoxStream<'static, kube::Result<WatchEvent<Self::Object>>>> {
        Ok(self.0.watch_metadata(params, version).await?.boxed())
    }

    fn version(object: &Self::Object) -> Option<String> {
        object.metadata.resource_version.clone()
    }
}

/// One watch.
pub(crate) struct Watcher<S> {
    pub source: S,
    /// For messages and metrics, e.g. `proxies.crawl.example.com`.
    pub resource: &'static str,
    /// Label selector, empty for all.
    pub labels: &'static str,
    pub deadline: Duration,
    pub timeout: Duration,
    pub backoff: Backoff,
    pub metrics: Metrics,
    pub state: watch::Sender<WatchState>,
}

/// Why a round ended.
enum Ended {
    /// In the ordinary way: watch on from that version.
    At(String),
    /// The server does not know the version any more.
    Forgotten,
    Failed {
        verb: &'static str,
        error: ApiError,
        /// Where a watch that worked can go on.
        resume: Option<String>,
    },
}

impl<S: Source> Watcher<S> {
    /// Runs until `cancel`. `each` is called in order and must not block.
    pub(crate) async fn run(
        self,
        cancel: CancellationToken,
        mut each: impl FnMut(Change<S::Object>) + Send,
    ) {
        tokio::select! {
            () = self.forever(&mut each) => {}
            () = cancel.cancelled() => {}
        }
    }

    async fn forever(&self, each: &mut (impl FnMut(Change<S::Object>) + Send)) {
        let mut failures = 0;
        let mut version: Option<String> = None;
        loop {
            let from = match version.take() {
                Some(version) => Ok(version),
                None => self.list(each).await.map_err(|e| ("list", e)),
            };
            let ended = match from {
                Ok(from) => self.watch(from, each, &mut failures).await,
                Err((verb, error)) => Ended::Failed {
                    verb,
                    error,
                    resume: None,
                },
            };
            match ended {
                Ended::At(at) => version = Some(at),
                Ended::Forgotten => {
                    tracing::debug!(resource = self.resource, "watch too old: listing again");
                    // A server that forgets at once must not be listed in a tight loop.
                    failures += 1;
                    self.pause(failures).await;
                }
                Ended::Failed {
                    verb,
                    error,
                    resume,
                } => {
                    failures += 1;
                    self.failed(verb, &error, failures);
                    self.pause(failures).await;
                    // Where the watch is forbidden, lists are all there is.
                    version = resume.filter(|_| !error.is_forbidden());
                }
            }
        }
    }

    async fn pause(&self, failures: u32) {
        let limit = Duration::from_secs(30);
        tokio::time::sleep(self.backoff.after(failures).min(limit)).await;
    }

    fn failed(&self, verb: &'static str, error: &ApiError, failures: u32) {
        self.metrics
            .watch_errors
            .get_or_create(&WatchLabels {
                resource: self.resource,
                verb,
            })
            .inc();
        let what = if error.is_forbidden() {
            format!(
                "may not {verb} {}: grant the verb {verb:?} to the operator ({error})",
                self.resource
            )
        } else {
            format!("cannot {verb} {}: {error}", self.resource)
        };
        // One cut connection is not worth a word; the state tells from the second on, or at once
        // where it cannot heal by itself or nothing was ever seen.
        let tells =
            failures > 1 || error.is_forbidden() || *self.state.borrow() == WatchState::Starting;
        if tells {
            let new = WatchState::Failing(what);
            let changed = self.state.send_if_modified(|state| {
                let differs = *state != new;
                *state = new.clone();
                differs
            });
            if changed && let WatchState::Failing(what) = &new {
                tracing::warn!("{what}");
            }
        }
    }

    async fn list(
        &self,
        each: &mut (impl FnMut(Change<S::Object>) + Send),
    ) -> Result<String, ApiError> {
        each(Change::Listing);
        let mut params = ListParams::default().limit(PAGE);
        if !self.labels.is_empty() {
            params = params.labels(self.labels);
        }
        loop {
            let page = within(
                self.deadline,
                "list",
                self.resource,
                self.source.list(&params),
            )
            .await?;
            // Page by page: never more than one page beside what is kept.
            page.items
                .into_iter()
                .for_each(|o| each(Change::Applied(o)));
            let ListMeta {
                continue_,
                resource_version,
                ..
            } = page.metadata;
            match continue_.filter(|token| !token.is_empty()) {
                Some(token) => params = params.continue_token(&token),
                None => {
                    each(Change::Listed);
                    return Ok(resource_version.unwrap_or_default());
                }
            }
        }
    }

    async fn watch(
        &self,
        from: String,
        each: &mut (impl FnMut(Change<S::Object>) + Send),
        failures: &mut u32,
    ) -> Ended {
        let seconds = u32::try_from(self.timeout.as_secs().max(1)).unwrap_or(60);
        let mut params = WatchParams::default().timeout(seconds);
        if !self.labels.is_empty() {
            params = params.labels(self.labels);
        }
        let opened = within(
            self.deadline,
            "watch",
            self.resource,
            self.source.watch(&params, &from),
        )
        .await;
        let mut stream = match opened {
            Ok(stream) => stream,
            Err(error) => return failed(error, from),
        };
        self.accepted();
        let started = Instant::now();
        let mut version = from;
        // The server ends a watch after `timeout`; one that stays silent for longer is dead.
        let silence = self.timeout + self.deadline;
        loop {
            let next = match tokio::time::timeout(silence, stream.try_next()).await {
                Ok(next) => next,
                Err(_) => {
                    tracing::debug!(resource = self.resource, "watch silent for too long");
                    return Ended::At(version);
                }
            };
            let event = match next {
                Ok(Some(event)) => event,
                Ok(None) => {
                    // Ended in peace, so it was a working watch; but not in a tight loop.
                    if started.elapsed() < Duration::from_secs(1) {
                        self.pause(1).await;
                    }
                    *failures = 0;
                    return Ended::At(version);
                }
                Err(source) => {
                    let error = ApiError::Call {
                        action: "watch",
                        what: self.resource.to_owned(),
                        source: Box::new(source),
                    };
                    return failed(error, version);
                }
            };
            match event {
                WatchEvent::Added(o) | WatchEvent::Modified(o) => {
                    version = S::version(&o).unwrap_or(version);
                    each(Change::Applied(o));
                }
                WatchEvent::Deleted(o) => {
                    version = S::version(&o).unwrap_or(version);
                    each(Change::Deleted(o));
                }
                WatchEvent::Bookmark(bookmark) => version = bookmark.metadata.resource_version,
                WatchEvent::Error(status) => {
                    let error = ApiError::Call {
                        action: "watch",
                        what: self.resource.to_owned(),
                        source: Box::new(kube::Error::Api(status)),
                    };
                    return failed(error, version);
                }
            }
            *failures = 0;
            self.accepted();
        }
    }

    fn accepted(&self) {
        self.state.send_if_modified(|state| {
            let differs = *state != WatchState::Watching;
            *state = WatchState::Watching;
            differs
        });
    }
}

fn failed(error: ApiError, version: String) -> Ended {
    if error.is_gone() {
        return Ended::Forgotten;
    }
    Ended::Failed {
        verb: "watch",
        error,
        resume: Some(version),
    }
}

#[cfg(test)]
#[path = "watch_tests.rs"]
mod tests;

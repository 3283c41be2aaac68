//! `GET /v1/watch`: the state first, then what changes.
//!
//! There is no queue of changes. Each client has the state that it was sent; when its connection
//! takes more, that is compared with the state now, and the difference is sent. A slow client
//! therefore costs one copy of the state, blocks nobody, and misses only what was undone before
//! it looked.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::time::Duration;

use axum::extract::State;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use egress_core::Uid;
use futures::Stream;
use http::HeaderValue;
use http::header::CACHE_CONTROL;
use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio::time::{Instant, MissedTickBehavior};

use crate::error::{ApiError, ErrorBody};
use crate::router::Shared;
use crate::wire::{Proxy, ProxyList, Removed};

/// Changes in quick succession are sent as one.
const SETTLE: Duration = Duration::from_millis(20);

struct Watcher {
    shared: Shared,
    changes: watch::Receiver<()>,
    ticks: tokio::time::Interval,
    /// None: nothing was sent yet.
    sent: Option<BTreeMap<String, Proxy>>,
    /// The lease counts that were looked at last.
    active: BTreeMap<Uid, usize>,
    unsent: VecDeque<Event>,
    _permit: OwnedSemaphorePermit,
    _gauge: crate::metrics::Watching,
}

impl Watcher {
    /// None: the operator is stopping.
    async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.unsent.pop_front() {
                return Some(event);
            }
            if self.sent.is_some() {
                self.change().await?;
            }
            self.compare();
        }
    }

    /// Something may have changed. None: the operator is stopping.
    async fn change(&mut self) -> Option<()> {
        loop {
            tokio::select! {
                () = self.shared.cancel.cancelled() => return None,
                changed = self.changes.changed() => {
                    changed.ok()?;
                    tokio::time::sleep(SETTLE).await;
                    return Some(());
                }
                // Leases come and go without the directory.
                _ = self.ticks.tick() => {
                    if self.shared.leases.active() != self.active {
                        return Some(());
                    }
                }
            }
        }
    }

    fn compare(&mut self) {
        // Before the look, not after: a change in between is looked at again.
        self.changes.borrow_and_update();
        self.active = self.shared.leases.active();
        let proxies = self.shared.all(&self.active);
        let now: BTreeMap<_, _> = proxies
            .iter()
            .map(|proxy| (proxy.id.clone(), proxy.clone()))
            .collect();
        match &self.sent {
            None => self.unsent.extend(event(
                "state",
                &ProxyList {
                    count: proxies.len(),
                    proxies,
                },
            )),
            Some(before) => {
                for id in before.keys().filter(|id| !now.contains_key(*id)) {
                    let gone = Removed { id: id.clone() };
                    self.unsent.extend(event("removed", &gone));
                }
                for (id, proxy) in &now {
                    let name = match before.get(id) {
                        None => "added",
                        Some(before) if before != proxy => "changed",
                        Some(_) => continue,
                    };
                    self.unsent.extend(event(name, proxy));
                }
            }
        }
        self.sent = Some(now);
    }
}

fn event(name: &str, data: &impl serde::Serialize) -> Option<Event> {
    Event::default()
        .event(name)
        .json_data(data)
        .inspect_err(|error| tracing::error!(%error, "an event cannot be written"))
        .ok()
}

fn events(watcher: Watcher) -> impl Stream<Item = Result<Event, Infallible>> {
    futures::stream::unfold(watcher, |mut watcher| async {
        let event = watcher.next().await?;
        Some((Ok(event), watcher))
    })
}

/// Follows the proxies.
///
/// Server-sent events: `state` with a whole list first (after a reconnect too), then `added` and
/// `changed` with a proxy each, and `removed` with its id. Comments keep the connection alive.
#[utoipa::path(
    get,
    path = "/v1/watch",
    operation_id = "watchProxies",
    tag = "proxies",
    responses(
        (status = 200, description = "Events named `state` (a ProxyList), `added`, `changed` (a \
          Proxy) and `removed` (a Removed)", content_type = "text/event-stream", body = String),
        (status = 401, description = "`unauthorized`", body = ErrorBody),
        (status = 503, description = "`not_ready`, `too_many_watchers`, `shutting_down`",
         body = ErrorBody),
    ),
)]
pub(crate) async fn watch(State(shared): State<Shared>) -> Result<Response, ApiError> {
    shared.ready()?;
    if shared.cancel.is_cancelled() {
        return Err(ApiError::ShuttingDown);
    }
    let permit = shared
        .watchers
        .clone()
        .try_acquire_owned()
        .map_err(|_| ApiError::TooManyWatchers(shared.limits.max_watchers))?;
    let every = shared.limits.watch_interval;
    let mut ticks = tokio::time::interval_at(Instant::now() + every, every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let keepalive = KeepAlive::new().interval(shared.limits.keepalive);
    let watcher = Watcher {
        changes: shared.directory.changes(),
        ticks,
        sent: None,
        active: BTreeMap::new(),
        unsent: VecDeque::new(),
        _permit: permit,
        _gauge: shared.metrics.watching(),
        shared,
    };
    let mut response = Sse::new(events(watcher))
        .keep_alive(keepalive)
        .into_response();
    response
        .headers_mut()
        .insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

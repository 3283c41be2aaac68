//! Kubernetes Events: told once per change, written by a task of their own, never in the way of a
//! reconcile. Repeats of the same words within ten minutes are left out.

use std::collections::HashMap;
use std::time::Duration;

use egress_api::Proxy;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::PostParams;
use kube::{Api, Client, Resource};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::kubernetes::within;
use crate::metrics::Metrics;

const CONTROLLER: &str = "crawl.example.com/egress-proxies-operator";
const REPEAT_AFTER: Duration = Duration::from_secs(600);
const QUEUE: usize = 512;
/// The API refuses a longer note.
const NOTE_LIMIT: usize = 1024;

/// One thing worth an Event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Notice {
    pub warning: bool,
    /// CamelCase, as listed in docs/reference/conditions.md.
    pub reason: &'static str,
    pub action: &'static str,
    pub note: String,
}

impl Notice {
    pub(crate) fn normal(
        reason: &'static str,
        action: &'static str,
        note: impl Into<String>,
    ) -> Self {
        Self {
            warning: false,
            reason,
            action,
            note: note.into(),
        }
    }

    pub(crate) fn warning(
        reason: &'static str,
        action: &'static str,
        note: impl Into<String>,
    ) -> Self {
        Self {
            warning: true,
            ..Self::normal(reason, action, note)
        }
    }
}

/// Takes notices without waiting.
#[derive(Clone)]
pub(crate) struct Events {
    queue: mpsc::Sender<(ObjectReference, Notice)>,
    metrics: Metrics,
}

/// Writes them.
pub(crate) struct Writer {
    queue: mpsc::Receiver<(ObjectReference, Notice)>,
    client: Client,
    instance: String,
    deadline: Duration,
    metrics: Metrics,
    told: HashMap<(String, &'static str, String), Instant>,
    sequence: u32,
}

pub(crate) fn channel(
    client: Client,
    instance: Option<&str>,
    deadline: Duration,
    metrics: Metrics,
) -> (Events, Writer) {
    let (sender, receiver) = mpsc::channel(QUEUE);
    let events = Events {
        queue: sender,
        metrics: metrics.clone(),
    };
    let writer = Writer {
        queue: receiver,
        client,
        instance: instance.unwrap_or("egress-proxies-operator").to_owned(),
        deadline,
        metrics,
        told: HashMap::new(),
        sequence: 0,
    };
    (events, writer)
}

impl Events {
    pub(crate) fn tell(&self, proxy: &Proxy, notice: Notice) {
        if self
            .queue
            .try_send((proxy.object_ref(&()), notice))
            .is_err()
        {
            self.metrics.events_dropped.inc();
        }
    }
}

impl Writer {
    /// Until `cancel`; what is queued by then is still written.
    pub(crate) async fn run(mut self, cancel: CancellationToken) {
        loop {
            tokio::select! {
                next = self.queue.recv() => match next {
                    Some((about, notice)) => self.write(about, notice).await,
                    None => return,
                },
                () = cancel.cancelled() => break,
            }
        }
        self.queue.close();
        while let Some((about, notice)) = self.queue.recv().await {
            self.write(about, notice).await;
        }
    }

    async fn write(&mut self, about: ObjectReference, notice: Notice) {
        let now = Instant::now();
        self.told
            .retain(|_, at| now.duration_since(*at) < REPEAT_AFTER);
        let key = (
            about.uid.clone().unwrap_or_default(),
            notice.reason,
            notice.note.clone(),
        );
        if self.told.contains_key(&key) {
            return;
        }
        let namespace = about.namespace.clone().unwrap_or_default();
        self.sequence = self.sequence.wrapping_add(1);
        let event = mk_event(
            about,
            &notice,
            &self.instance,
            self.sequence,
            Timestamp::now(),
        );
        let api: Api<Event> = Api::namespaced(self.client.clone(), &namespace);
        match within(
            self.deadline,
            "create",
            "event",
            api.create(&PostParams::default(), &event),
        )
        .await
        {
            Ok(_) => {
                self.told.insert(key, now);
            }
            Err(error) => {
                self.metrics.events_dropped.inc();
                tracing::debug!(%error, reason = notice.reason, "event not written");
            }
        }
    }
}

fn mk_event(
    about: ObjectReference,
    notice: &Notice,
    instance: &str,
    sequence: u32,
    now: Timestamp,
) -> Event {
    let mut note = notice.note.clone();
    if note.len() > NOTE_LIMIT {
        let end = note.floor_char_boundary(NOTE_LIMIT - 3);
        note.truncate(end);
        note.push_str("...");
    }
    Event {
        action: Some(notice.action.to_owned()),
        reason: Some(notice.reason.to_owned()),
        event_time: Some(MicroTime(now)),
        note: Some(note),
        type_: Some(if notice.warning { "Warning" } else { "Normal" }.to_owned()),
        reporting_controller: Some(CONTROLLER.to_owned()),
        reporting_instance: Some(instance.to_owned()),
        metadata: ObjectMeta {
            namespace: about.namespace.clone(),
            name: Some(format!(
                "{}.{:x}{sequence:04x}",
                about.name.as_deref().unwrap_or("proxy"),
                now.as_microsecond(),
            )),
            ..ObjectMeta::default()
        },
        regarding: Some(about),
        ..Event::default()
    }
}

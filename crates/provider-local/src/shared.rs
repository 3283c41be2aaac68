//! What is remembered of each instance, and the tasks that follow its process.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use egress_core::{Clock, ErrorClass, InstallationId, InstanceName, ProviderId};
use egress_provider::{Instance, InstanceEvent, InstanceState, Operation, ProviderError, Step};
use tokio::net::TcpStream;
use tokio::sync::broadcast;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use crate::child::remove_if_there;
use crate::config::{Builtin, LocalConfig};
use crate::record::{Record, RecordError, Records};
use crate::supervise::{Ended, Run, Supervisor};

/// Before the instance's name in an id.
const ID_PREFIX: &str = "processes/";
/// One look whether the process listens.
const LOOK: Duration = Duration::from_millis(300);
/// Between two looks, growing.
const LOOK_PAUSE: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(500));
/// Before a process that ended without ever listening is started again, growing.
const RETRY_PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// What is remembered of an instance while the operator runs.
#[derive(Debug, Default)]
pub(crate) struct Note {
    /// The run that was seen to listen.
    pub(crate) listens: Option<Run>,
    /// The run that is being looked at until it listens.
    pub(crate) looking: Option<Run>,
    pub(crate) stopping: bool,
    pub(crate) failure: Option<Failure>,
}

/// It ended before it ever listened.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) times: u32,
    pub(crate) not_before: Instant,
    pub(crate) message: String,
    /// `get` has said so once.
    pub(crate) told: bool,
}

/// What the provider and its background tasks share.
pub(crate) struct Shared {
    pub(crate) name: String,
    pub(crate) installation: InstallationId,
    pub(crate) config: LocalConfig,
    pub(crate) builtin: Builtin,
    pub(crate) records: Records,
    pub(crate) supervisor: Arc<dyn Supervisor>,
    pub(crate) notes: Mutex<BTreeMap<String, Note>>,
    /// Records come and go one at a time: an address is not given twice, and a create sees a
    /// delete of the same name either going on or done.
    pub(crate) records_change: tokio::sync::Mutex<()>,
    pub(crate) events: broadcast::Sender<InstanceEvent>,
    pub(crate) cancel: CancellationToken,
    pub(crate) clock: Arc<dyn Clock>,
}

pub(crate) fn id_of(name: &InstanceName) -> ProviderId {
    ProviderId::new(format!("{ID_PREFIX}{name}"))
}

/// Watches what runs already, so that its end is an event.
pub(crate) async fn take_over(shared: Arc<Shared>) {
    let records = match shared.own_records() {
        Ok(records) => records,
        Err(error) => {
            tracing::warn!(provider = shared.name, %error, "instances cannot be read");
            return;
        }
    };
    let mut running = 0usize;
    for record in &records {
        match shared.supervisor.running(record.name().as_str()).await {
            Ok(run) => running += usize::from(run.is_some()),
            Err(error) => {
                tracing::warn!(instance = %record.name(), %error, "cannot be looked at");
            }
        }
    }
    if !records.is_empty() {
        tracing::info!(
            provider = shared.name,
            instances = records.len(),
            running,
            "took over the instances of an earlier run"
        );
        // Whoever listens already looks at each of them.
        let _ = shared.events.send(InstanceEvent::All);
    }
}

pub(crate) async fn follow_ends(shared: Arc<Shared>, mut ends: broadcast::Receiver<Ended>) {
    loop {
        let end = tokio::select! {
            () = shared.cancel.cancelled() => return,
            end = ends.recv() => end,
        };
        match end {
            Ok(end) => shared.note_end(end).await,
            Err(broadcast::error::RecvError::Lagged(_)) => {
                let _ = shared.events.send(InstanceEvent::All);
            }
            Err(broadcast::error::RecvError::Closed) => return,
        }
    }
}

/// Looks until the run listens or has ended.
pub(crate) async fn follow_start(shared: Arc<Shared>, record: Record, run: Run) {
    let name = record.name();
    let mut pause = LOOK_PAUSE.0;
    loop {
        if shared.looks_listening(&record).await {
            shared.note_listens(name.as_str(), run);
            shared.tell(&name);
            break;
        }
        tokio::select! {
            () = shared.cancel.cancelled() => break,
            () = tokio::time::sleep(pause) => {}
        }
        pause = (pause * 2).min(LOOK_PAUSE.1);
        if !matches!(shared.supervisor.running(name.as_str()).await, Ok(Some(now)) if now == run) {
            break;
        }
    }
    shared.with_note(name.as_str(), |note| {
        if note.looking == Some(run) {
            note.looking = None;
        }
    });
}

impl Shared {
    pub(crate) fn notes(&self) -> MutexGuard<'_, BTreeMap<String, Note>> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn with_note<T>(&self, name: &str, f: impl FnOnce(&mut Note) -> T) -> T {
        f(self.notes().entry(name.to_owned()).or_default())
    }

    pub(crate) fn note_listens(&self, name: &str, run: Run) {
        self.with_note(name, |note| {
            note.listens = Some(run);
            note.failure = None;
        });
    }

    pub(crate) fn tell(&self, name: &InstanceName) {
        // Nobody listens: nobody needs to know.
        let _ = self.events.send(InstanceEvent::Instance(name.clone()));
    }

    pub(crate) fn error(
        &self,
        class: ErrorClass,
        operation: Operation,
        instance: &str,
        message: impl Into<String>,
    ) -> ProviderError {
        ProviderError::new(class, &self.name, operation, message).on(instance)
    }

    pub(crate) fn not_found(&self, operation: Operation, instance: &str) -> ProviderError {
        self.error(
            ErrorClass::NotFound,
            operation,
            instance,
            "no such instance",
        )
    }

    pub(crate) fn io(
        &self,
        operation: Operation,
        instance: &str,
        error: io::Error,
    ) -> ProviderError {
        self.error(
            ErrorClass::Transient,
            operation,
            instance,
            error.to_string(),
        )
        .caused_by(error)
    }

    pub(crate) fn record_error(
        &self,
        operation: Operation,
        instance: &str,
        error: RecordError,
    ) -> ProviderError {
        let class = match &error {
            RecordError::Io { source, .. } if source.kind() == io::ErrorKind::StorageFull => {
                ErrorClass::QuotaExceeded
            }
            RecordError::Io { .. } => ErrorClass::Transient,
            RecordError::Form { .. } => ErrorClass::Permanent,
        };
        self.error(class, operation, instance, error.to_string())
            .caused_by(error)
    }

    pub(crate) fn own_records(&self) -> Result<Vec<Record>, RecordError> {
        let mut records = self.records.all()?;
        records.retain(|record| record.installation == self.installation);
        Ok(records)
    }

    /// The record behind an id, if it is of this installation.
    pub(crate) fn record_of(
        &self,
        operation: Operation,
        id: &ProviderId,
    ) -> Result<Option<Record>, ProviderError> {
        let name = id.as_str().strip_prefix(ID_PREFIX).unwrap_or_default();
        // Part of a path: nothing but what instance names are made of.
        if name.is_empty() || !name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-') {
            return Ok(None);
        }
        let record = self
            .records
            .read(name)
            .map_err(|error| self.record_error(operation, name, error))?;
        Ok(record.filter(|record| {
            record.installation == self.installation && record.name().as_str() == name
        }))
    }

    pub(crate) async fn looks_listening(&self, record: &Record) -> bool {
        matches!(
            timeout(LOOK, TcpStream::connect(record.listen())).await,
            Ok(Ok(_))
        )
    }

    /// A run has ended: was it one that had worked?
    pub(crate) async fn note_end(&self, end: Ended) {
        let record = self.records.read(&end.name).ok().flatten();
        let words = self.supervisor.last_words(&end.name).await;
        let how = end.how.as_deref().unwrap_or("how is not known");
        let worked = self.with_note(&end.name, |note| note.listens == Some(end.run));
        if !end.asked {
            tracing::warn!(
                provider = self.name,
                instance = end.name,
                ended = how,
                last_words = words.as_deref(),
                "a proxy process ended"
            );
        }
        if !end.asked && !worked {
            let said = words.map(|w| format!(": {w}")).unwrap_or_default();
            let message = format!("the process ended before it listened ({how}){said}");
            self.with_note(&end.name, |note| {
                let times = note
                    .failure
                    .as_ref()
                    .map_or(1, |f| f.times.saturating_add(1));
                let pause = RETRY_PAUSE.0 * 2u32.saturating_pow(times - 1).min(64);
                note.failure = Some(Failure {
                    times,
                    not_before: Instant::now() + pause.min(RETRY_PAUSE.1),
                    message,
                    told: false,
                });
            });
        }
        if let Some(record) = record {
            self.tell(&record.name());
        }
    }

    /// Begins to look, unless somebody does.
    pub(crate) fn look(self: &Arc<Self>, record: &Record, run: Run) {
        let name = record.name();
        let begin = self.with_note(name.as_str(), |note| {
            let begin = note.listens != Some(run) && note.looking != Some(run);
            if begin {
                note.looking = Some(run);
            }
            begin
        });
        if begin {
            tokio::spawn(follow_start(Arc::clone(self), record.clone(), run));
        }
    }

    pub(crate) async fn instance(self: &Arc<Self>, record: &Record, run: Option<Run>) -> Instance {
        let name = record.name();
        let state = match run {
            None => InstanceState::Stopped,
            Some(run) => {
                let (stopping, known) = self.with_note(name.as_str(), |note| {
                    (note.stopping, note.listens == Some(run))
                });
                if stopping {
                    InstanceState::Stopped
                } else if known || self.looks_listening(record).await {
                    self.note_listens(name.as_str(), run);
                    InstanceState::Running {
                        address: record.address,
                        port: (record.port != record.requested_port).then_some(record.port),
                    }
                } else {
                    self.look(record, run);
                    InstanceState::Provisioning(Step::WaitingForAddress(format!(
                        "waiting for the proxy to listen on {}",
                        record.listen()
                    )))
                }
            }
        };
        Instance {
            id: id_of(&name),
            name,
            state,
            uid: record.uid.clone(),
            created_at: Some(record.created_at),
        }
    }

    /// Ends the process and removes all that is kept of it, the record last.
    pub(crate) async fn dispose(&self, name: &InstanceName) -> Result<(), ProviderError> {
        let text = name.as_str();
        let failed = |error| self.io(Operation::Delete, text, error);
        let ended = self.supervisor.stop(text).await.map_err(failed);
        let _one_change_at_a_time = self.records_change.lock().await;
        let removed = match ended {
            Ok(()) => self.remove(text).await,
            Err(error) => Err(error),
        };
        let mut notes = self.notes();
        if let Some(note) = notes.get_mut(text) {
            note.stopping = false;
            note.listens = None;
            // A row of failures goes on over the instance's replacement.
            if removed.is_ok() && note.failure.is_none() {
                notes.remove(text);
            }
        }
        removed
    }

    pub(crate) async fn remove(&self, name: &str) -> Result<(), ProviderError> {
        let failed = |error| self.io(Operation::Delete, name, error);
        self.supervisor.forget(name).await.map_err(failed)?;
        remove_if_there(&self.conf_path(name)).map_err(failed)?;
        self.records
            .remove(name)
            .map_err(|error| self.record_error(Operation::Delete, name, error))
    }
}

//! [`LocalProvider`]: an instance is a record, an address and a process.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use egress_core::{Clock, ErrorClass, ProviderId};
use egress_provider::config::BuildContext;
use egress_provider::{CreateRequest, Instance, InstanceEvent, Operation, Provider, ProviderError};
use futures::StreamExt;
use futures::stream::BoxStream;
use tokio::sync::broadcast;
use tokio::time::{Instant, timeout};
use tokio_stream::wrappers::BroadcastStream;
use tokio_stream::wrappers::errors::BroadcastStreamRecvError;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::child::Children;
use crate::config::{Builtin, LocalConfig, Program};
use crate::record::{Record, RecordError, Records};
use crate::shared::{Shared, follow_ends, id_of, take_over};
use crate::supervise::Supervisor;

/// How long `delete` waits before it answers while the process goes on ending.
const DELETE_WAIT: Duration = Duration::from_secs(2);
/// The `local` provider.
pub struct LocalProvider {
    shared: Arc<Shared>,
    /// Ends the background tasks with the provider; the processes live on.
    _ends: DropGuard,
}

impl LocalProvider {
    /// Takes over what an earlier operator left running.
    ///
    /// # Errors
    /// When the directory of the records cannot be made, or outside a runtime.
    pub(crate) fn new(
        config: LocalConfig,
        builtin: Builtin,
        context: BuildContext,
        clock: Arc<dyn Clock>,
    ) -> Result<Arc<Self>, ProviderError> {
        let failed = |error: RecordError| {
            ProviderError::new(
                ErrorClass::Transient,
                &context.name,
                Operation::Build,
                error.to_string(),
            )
        };
        if tokio::runtime::Handle::try_current().is_err() {
            return Err(ProviderError::new(
                ErrorClass::Permanent,
                context.name,
                Operation::Build,
                "must be built inside a tokio runtime",
            ));
        }
        if let Some(net) = config.allow_clients.iter().find(|net| net.is_everything()) {
            tracing::warn!(
                provider = context.name,
                allow_clients = %net,
                "open proxies: everybody who reaches them may use them; name the networks of \
                 your crawlers"
            );
        }
        let dir = context.state_dir.join("local").join(&context.name);
        let records = Records::open(dir.clone()).map_err(failed)?;
        let cancel = CancellationToken::new();
        let supervisor: Arc<dyn Supervisor> = Arc::new(Children::new(dir));
        let shared = Arc::new(Shared {
            name: context.name,
            installation: context.installation,
            config,
            builtin,
            records,
            supervisor,
            notes: Mutex::default(),
            records_change: tokio::sync::Mutex::default(),
            events: broadcast::channel(1024).0,
            cancel: cancel.clone(),
            clock,
        });
        tokio::spawn(follow_ends(Arc::clone(&shared), shared.supervisor.ended()));
        tokio::spawn(take_over(Arc::clone(&shared)));
        Ok(Arc::new(Self {
            shared,
            _ends: cancel.drop_guard(),
        }))
    }

    pub(crate) fn stops_on_exit(&self) -> bool {
        self.shared.config.stop_on_exit
    }

    /// Makes no more instances, ends the watching and, with `kill`, every process of this
    /// installation. The records stay: the next operator finds the instances, stopped.
    pub async fn shutdown(&self, kill: bool) {
        self.shared.cancel.cancel();
        // One that is just being made is made first, and then found.
        let _none_is_made = self.shared.records_change.lock().await;
        if !kill {
            return;
        }
        let records = match self.shared.own_records() {
            Ok(records) => records,
            Err(error) => {
                tracing::warn!(provider = self.shared.name, %error, "instances cannot be read");
                return;
            }
        };
        let stopping = records.iter().map(|record| async move {
            let name = record.name();
            if let Err(error) = self.shared.supervisor.stop(name.as_str()).await {
                tracing::warn!(instance = %name, %error, "a proxy process did not end");
            }
        });
        futures::future::join_all(stopping).await;
    }
}

#[async_trait]
impl Provider for LocalProvider {
    fn name(&self) -> &str {
        &self.shared.name
    }

    fn kind(&self) -> &'static str {
        "local"
    }

    async fn create(&self, request: &CreateRequest) -> Result<ProviderId, ProviderError> {
        let shared = &self.shared;
        let text = request.name.as_str();
        let _one_at_a_time = self.shared.records_change.lock().await;
        let refuse =
            |class, message: String| Err(shared.error(class, Operation::Create, text, message));
        if shared.cancel.is_cancelled() {
            return refuse(
                ErrorClass::Transient,
                "the provider is shut down".to_owned(),
            );
        }
        let (stopping, wait) = shared.with_note(text, |note| {
            let wait = note.failure.as_ref().and_then(|failure| {
                let left = failure.not_before.checked_duration_since(Instant::now())?;
                Some(format!(
                    "{}; started {} times, again in {} s",
                    failure.message,
                    failure.times,
                    left.as_secs() + 1
                ))
            });
            (note.stopping, wait)
        });
        if stopping {
            return refuse(
                ErrorClass::Transient,
                "the process of the same name is still ending".to_owned(),
            );
        }
        let found = shared
            .records
            .read(text)
            .map_err(|error| shared.record_error(Operation::Create, text, error))?;
        let record = match found {
            Some(record) if record.installation != shared.installation => {
                return refuse(
                    ErrorClass::Permanent,
                    format!(
                        "an instance of that name belongs to installation {}",
                        record.installation
                    ),
                );
            }
            Some(record) => {
                let io = |error| shared.io(Operation::Create, text, error);
                let running = shared.supervisor.running(text).await.map_err(io)?;
                if let Some(run) = running {
                    shared.look(&record, run);
                    return Ok(id_of(&request.name));
                }
                if shared.supervisor.was_started(text).await.map_err(io)? {
                    // It has had its process; `get` says Stopped.
                    return Ok(id_of(&request.name));
                }
                record
            }
            None => {
                if let Some(message) = wait {
                    return refuse(ErrorClass::Transient, message);
                }
                let records = shared
                    .records
                    .all()
                    .map_err(|error| shared.record_error(Operation::Create, text, error))?;
                let bind = shared.choose_bind(request, &records)?;
                let listen = shared.choose_listen(request, &records)?;
                let record = Record {
                    uid: request.uid.clone(),
                    proxy: request.key.to_string(),
                    installation: shared.installation.clone(),
                    created_at: shared.clock.now(),
                    address: listen.ip(),
                    port: listen.port(),
                    requested_port: request.port,
                    bind,
                };
                // Refused for good before anything is left behind.
                shared.proxy_config(&record)?;
                if let Program::Squid(path) = &shared.config.program {
                    shared.check_squid(path, text)?;
                }
                shared
                    .records
                    .write(&record)
                    .map_err(|error| shared.record_error(Operation::Create, text, error))?;
                record
            }
        };
        let command = shared.command(&record)?;
        let run = shared
            .supervisor
            .start(text, command)
            .await
            .map_err(|error| shared.io(Operation::Create, text, error))?;
        shared.look(&record, run);
        Ok(id_of(&request.name))
    }

    async fn get(&self, id: &ProviderId) -> Result<Instance, ProviderError> {
        let shared = &self.shared;
        let Some(record) = shared.record_of(Operation::Get, id)? else {
            return Err(shared.not_found(Operation::Get, id.as_str()));
        };
        let name = record.name();
        let run = shared
            .supervisor
            .running(name.as_str())
            .await
            .map_err(|error| shared.io(Operation::Get, name.as_str(), error))?;
        if run.is_none() {
            // Said once as an error, so that it is read; then Stopped, so that it is made anew.
            let untold = shared.with_note(name.as_str(), |note| {
                let failure = note.failure.as_mut().filter(|failure| !failure.told)?;
                failure.told = true;
                Some(failure.message.clone())
            });
            if let Some(message) = untold {
                return Err(shared.error(
                    ErrorClass::Transient,
                    Operation::Get,
                    name.as_str(),
                    message,
                ));
            }
        }
        Ok(shared.instance(&record, run).await)
    }

    async fn delete(&self, id: &ProviderId) -> Result<(), ProviderError> {
        let shared = Arc::clone(&self.shared);
        let Some(record) = shared.record_of(Operation::Delete, id)? else {
            return Ok(());
        };
        let name = record.name();
        let begin = shared.with_note(name.as_str(), |note| {
            !std::mem::replace(&mut note.stopping, true)
        });
        if !begin {
            return Ok(());
        }
        // A task of its own, so that it ends even if the caller goes away.
        let disposing = tokio::spawn(async move {
            let disposed = shared.dispose(&name).await;
            shared.tell(&name);
            disposed
        });
        match timeout(DELETE_WAIT, disposing).await {
            Ok(Ok(disposed)) => disposed,
            Ok(Err(error)) => Err(self.shared.error(
                ErrorClass::Transient,
                Operation::Delete,
                id.as_str(),
                error.to_string(),
            )),
            // It goes on; `get` says NotFound once it is gone.
            Err(_) => Ok(()),
        }
    }

    async fn list(&self) -> Result<Vec<Instance>, ProviderError> {
        let shared = &self.shared;
        let records = shared.own_records().map_err(|error| {
            ProviderError::new(
                ErrorClass::Transient,
                &shared.name,
                Operation::List,
                error.to_string(),
            )
        })?;
        let looking = records.iter().map(|record| async move {
            let name = record.name();
            let run = shared
                .supervisor
                .running(name.as_str())
                .await
                .map_err(|error| shared.io(Operation::List, name.as_str(), error))?;
            Ok(shared.instance(record, run).await)
        });
        futures::future::try_join_all(looking).await
    }

    fn events(&self) -> BoxStream<'static, InstanceEvent> {
        BroadcastStream::new(self.shared.events.subscribe())
            .map(|event| match event {
                Ok(event) => event,
                Err(BroadcastStreamRecvError::Lagged(_)) => InstanceEvent::All,
            })
            .boxed()
    }
}

//! One libvirt connection: its threads, and the deadline of each call.
//!
//! libvirt's calls block, so they run on threads that belong to the connection: a hypervisor that
//! hangs holds up nothing else. A call that passes its deadline ends the bridge under the
//! connection, which makes every call blocked in it return at once.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use egress_ssh::Bridge;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use tracing::Span;
use virt::connect::Connect;

use super::calls::Calls;
use super::error::{HostError, LibvirtError};
use super::events::{self, Registration, Sink};
use crate::metrics::Metrics;

/// libvirt pings the daemon so often, and closes the connection after so many missing answers.
const KEEPALIVE: (i32, u32) = (5, 5);
/// How long a connection may take to close before its bridge is ended under it.
const CLOSE_WITHIN: Duration = Duration::from_secs(5);

type Job = Box<dyn FnOnce(&Shared) + Send>;

/// What the threads of one connection share. The order of the fields is the order of their end.
struct Shared {
    _events: Option<Registration>,
    conn: Connect,
    _bridge: Option<Bridge>,
    host: String,
    metrics: Metrics,
    dead: CancellationToken,
}

/// A libvirt connection.
pub struct Session {
    host: String,
    jobs: Mutex<Sender<Job>>,
    /// Ends the bridge, and with it everything that waits.
    stop: CancellationToken,
    /// Cancelled when the connection is known to be of no use any more.
    dead: CancellationToken,
    ended: Option<CancellationToken>,
}

impl Session {
    /// Connects to the daemon behind `bridge` (or, without one, to what `uri` says).
    ///
    /// # Errors
    /// [`HostError`].
    pub async fn open(
        host: &str,
        uri: String,
        bridge: Option<Bridge>,
        threads: usize,
        within: Duration,
        sink: Option<Sink>,
        metrics: Metrics,
    ) -> Result<Self, HostError> {
        events::ensure_loop().map_err(|message| HostError::Open {
            host: host.to_owned(),
            socket: uri.clone(),
            error: LibvirtError::odd("virEventRegisterDefaultImpl", message),
        })?;
        let stop = bridge.as_ref().map(Bridge::stopper).unwrap_or_default();
        let ended = bridge.as_ref().map(Bridge::ended);
        let dead = CancellationToken::new();
        let (jobs, queue) = channel::<Job>();
        let queue = Arc::new(Mutex::new(queue));
        let (opened, answer) = oneshot::channel();
        let first = {
            let (host, uri, dead) = (host.to_owned(), uri.clone(), dead.clone());
            let queue = Arc::clone(&queue);
            move || {
                let conn = match Connect::open(Some(&uri)) {
                    Ok(conn) => conn,
                    Err(error) => {
                        let _ = opened.send(Err(LibvirtError::new("virConnectOpen", &error)));
                        return;
                    }
                };
                // On a slow line pings wait behind what an upload has queued, and a connection for
                // uploads has its own way to notice that nothing moves. Some drivers have no
                // keepalive: their connections cannot hang either.
                if sink.is_some() {
                    let _ = conn.set_keep_alive(KEEPALIVE.0, KEEPALIVE.1);
                }
                let shared = Arc::new(Shared {
                    _events: sink.as_ref().map(|sink| Registration::new(&conn, sink)),
                    conn,
                    _bridge: bridge,
                    host,
                    metrics,
                    dead,
                });
                if opened.send(Ok(Arc::downgrade(&shared))).is_ok() {
                    work(&shared, &queue);
                }
            }
        };
        spawn(host, 0, first)?;
        let answer = tokio::time::timeout(within, answer).await;
        let shared = match answer {
            Ok(Ok(Ok(shared))) => shared,
            Ok(Ok(Err(error))) => {
                return Err(HostError::Open {
                    host: host.to_owned(),
                    socket: uri,
                    error,
                });
            }
            Ok(Err(_)) => {
                return Err(HostError::Lost {
                    host: host.to_owned(),
                    rpc: "virConnectOpen",
                    reason: "its thread ended".to_owned(),
                });
            }
            Err(_) => {
                stop.cancel();
                return Err(HostError::Deadline {
                    host: host.to_owned(),
                    rpc: "virConnectOpen",
                    after: within,
                });
            }
        };
        for n in 1..threads {
            let queue = Arc::clone(&queue);
            if let Some(shared) = shared.upgrade() {
                spawn(host, n, move || work(&shared, &queue))?;
            }
        }
        Ok(Self {
            host: host.to_owned(),
            jobs: Mutex::new(jobs),
            stop,
            dead,
            ended,
        })
    }

    /// Whether calls may still be answered.
    pub fn is_alive(&self) -> bool {
        !self.dead.is_cancelled()
            && !self
                .ended
                .as_ref()
                .is_some_and(CancellationToken::is_cancelled)
    }

    /// Completes when the connection is of no use any more.
    pub async fn ended(&self) {
        match &self.ended {
            Some(ended) => tokio::select! {
                () = ended.cancelled() => {}
                () = self.dead.cancelled() => {}
            },
            None => self.dead.cancelled().await,
        }
    }

    /// Drops the connection under whatever is blocked in it.
    pub fn abort(&self) {
        self.dead.cancel();
        self.stop.cancel();
    }

    /// Runs a job on one of the connection's threads. `within` counts from when it begins; what
    /// has not begun by then is given up without harm to the connection.
    ///
    /// # Errors
    /// libvirt's own error, or why there was no answer.
    pub async fn run<T, E>(
        &self,
        rpc: &'static str,
        within: Duration,
        job: impl FnOnce(&Calls<'_>) -> Result<T, E> + Send + 'static,
    ) -> Result<Result<T, E>, HostError>
    where
        T: Send + 'static,
        E: Send + 'static,
    {
        let (answer, mut answered) = oneshot::channel();
        let begun = Arc::new(AtomicBool::new(false));
        let span = Span::current();
        let work: Job = {
            let begun = Arc::clone(&begun);
            Box::new(move |shared| {
                // Nobody waits any more: nothing to do.
                if answer.is_closed() {
                    return;
                }
                begun.store(true, Ordering::Release);
                let calls = Calls {
                    conn: &shared.conn,
                    host: &shared.host,
                    metrics: &shared.metrics,
                };
                let result = span.in_scope(|| job(&calls));
                let alive = result.is_ok() || shared.conn.is_alive().unwrap_or(false);
                if !alive {
                    shared.dead.cancel();
                }
                let _ = answer.send((result, alive));
            })
        };
        let lost = |reason: &str| HostError::Lost {
            host: self.host.clone(),
            rpc,
            reason: reason.to_owned(),
        };
        self.jobs
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .send(work)
            .map_err(|_| lost("its threads ended"))?;
        // Twice at most: once while it waits for a thread, once more when it began late.
        for _ in 0..2 {
            match tokio::time::timeout(within, &mut answered).await {
                Ok(Ok((result, true))) => return Ok(result),
                Ok(Ok((result, false))) => {
                    return match result {
                        Ok(value) => Ok(Ok(value)),
                        Err(_) => Err(lost("it was closed")),
                    };
                }
                Ok(Err(_)) => return Err(lost("its thread ended")),
                Err(_) if !begun.load(Ordering::Acquire) => {
                    return Err(HostError::Busy {
                        host: self.host.clone(),
                        rpc,
                        after: within,
                    });
                }
                Err(_) => {}
            }
        }
        self.abort();
        Err(HostError::Deadline {
            host: self.host.clone(),
            rpc,
            after: within,
        })
    }
}

impl Drop for Session {
    /// The threads end when the queue does, and the last one closes the connection. A daemon that
    /// hangs would not answer that either, so the bridge goes after a while in any case.
    fn drop(&mut self) {
        let stop = self.stop.clone();
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => {
                // Bounded by its own timer.
                drop(runtime.spawn(async move {
                    tokio::time::sleep(CLOSE_WITHIN).await;
                    stop.cancel();
                }));
            }
            Err(_) => stop.cancel(),
        }
    }
}

fn spawn(host: &str, number: usize, body: impl FnOnce() + Send + 'static) -> Result<(), HostError> {
    std::thread::Builder::new()
        .name(format!("libvirt-{host}-{number}"))
        .spawn(body)
        .map(drop)
        .map_err(|error| HostError::Thread {
            host: host.to_owned(),
            error: Arc::new(error),
        })
}

fn work(shared: &Shared, queue: &Mutex<Receiver<Job>>) {
    loop {
        let job = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(job) = job else {
            return;
        };
        // A job that panics must not take the connection's other threads' work with it: its
        // caller sees the answer missing.
        let _ = catch_unwind(AssertUnwindSafe(|| job(shared)));
    }
}

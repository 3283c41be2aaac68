//! The thread that owns the database.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::mpsc::{Receiver, Sender, channel};

use tokio::sync::{oneshot, watch};

use super::database::Database;
use super::recent::Recent;
use super::{Record, StoreError, Write, WriteError};

/// Writes that share one transaction at most.
const BATCH: usize = 256;

pub(super) type WriteReply = oneshot::Sender<Result<Record, WriteError>>;

pub(super) enum Job {
    Write(Box<Write>, WriteReply),
    Ask(Box<dyn FnOnce(&mut Database) + Send>),
    Close(oneshot::Sender<()>),
}

#[derive(Clone)]
pub(super) struct Worker {
    /// None once closed.
    jobs: Arc<Mutex<Option<Sender<Job>>>>,
}

impl Worker {
    pub fn start(
        database: Database,
        recent: Arc<Recent>,
        publish: watch::Sender<u64>,
        now: Arc<dyn Fn() -> i64 + Send + Sync>,
    ) -> Result<Self, StoreError> {
        let (jobs, queue) = channel();
        // Ends when the last handle is dropped or by `Job::Close`.
        std::thread::Builder::new()
            .name("control-plane-db".to_owned())
            .spawn(move || run(database, &queue, &recent, &publish, now.as_ref()))
            .map_err(StoreError::Thread)?;
        Ok(Self {
            jobs: Arc::new(Mutex::new(Some(jobs))),
        })
    }

    pub fn submit(&self, job: Job) -> Result<(), StoreError> {
        let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        jobs.as_ref()
            .and_then(|jobs| jobs.send(job).ok())
            .ok_or(StoreError::Closed)
    }

    pub async fn close(&self) {
        let (reply, answer) = oneshot::channel();
        let jobs = self
            .jobs
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let sent = jobs.is_some_and(|jobs| jobs.send(Job::Close(reply)).is_ok());
        if sent {
            // An error means that the thread has ended already.
            let _ = answer.await;
        }
    }
}

fn run(
    mut database: Database,
    queue: &Receiver<Job>,
    recent: &Recent,
    publish: &watch::Sender<u64>,
    now: &(dyn Fn() -> i64 + Send + Sync),
) {
    while let Ok(first) = queue.recv() {
        let mut writes = Vec::new();
        let mut questions = Vec::new();
        let mut close = None;
        let mut job = Some(first);
        while let Some(next) = job.take() {
            match next {
                Job::Write(write, reply) => writes.push((*write, reply)),
                Job::Ask(question) => questions.push(question),
                Job::Close(reply) => close = Some(reply),
            }
            if writes.len() < BATCH && close.is_none() {
                job = queue.try_recv().ok();
            }
        }
        if !writes.is_empty() {
            commit(&mut database, writes, recent, publish, now());
        }
        // After the commit: a question never sees what may still be rolled back.
        for question in questions {
            question(&mut database);
        }
        if let Some(reply) = close {
            // Before the answer, so that whoever waits for it can open the store again.
            database.close();
            let _ = reply.send(());
            return;
        }
    }
    database.close();
}

fn commit(
    database: &mut Database,
    writes: Vec<(Write, WriteReply)>,
    recent: &Recent,
    publish: &watch::Sender<u64>,
    now: i64,
) {
    let (writes, replies): (Vec<_>, Vec<_>) = writes.into_iter().unzip();
    match database.write_all(writes, now) {
        Ok(answers) => {
            let done: Vec<Record> = answers
                .iter()
                .filter_map(|answer| answer.as_ref().ok().cloned())
                .collect();
            if let Some(last) = done.last() {
                recent.push(&done);
                publish.send_replace(last.revision);
            }
            for (reply, answer) in replies.into_iter().zip(answers) {
                // Nobody waits any more: the write has happened all the same.
                let _ = reply.send(answer.map(|mut record| {
                    record.previous = None;
                    record
                }));
            }
        }
        Err(error) => {
            // The whole transaction was rolled back; each is told.
            let text = error.to_string();
            tracing::error!("a write to the control plane's database failed: {text}");
            let mut error = Some(error);
            for reply in replies {
                let error = error.take().unwrap_or_else(|| {
                    StoreError::Database(rusqlite::Error::SqliteFailure(
                        rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_ABORT),
                        Some(text.clone()),
                    ))
                });
                let _ = reply.send(Err(WriteError::Store(error)));
            }
        }
    }
}

//! The store: every object of every kind in one revision log on SQLite.
//!
//! One number grows by one with each write, over all kinds: the `resourceVersion`. A row of the log
//! is one object at one revision; the row that superseded it is known (`next`), so that the state at
//! any revision that is still kept can be listed, which is what makes pages of a list consistent and
//! a watch complete. Compaction drops what is older; who asks for it gets [`StoreError::Compacted`].
//!
//! One thread owns the database. Writes that wait at the same time share one transaction and one
//! flush to disk; each is answered only after that. Watchers do not hold queues: they keep the
//! revision they have seen and read on from it, from memory for recent revisions and from the log
//! otherwise, so that none is lost, none comes twice, and a slow one costs nothing.

mod database;
mod directory;
mod recent;
mod worker;

use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use serde_json::Value;
use tokio::sync::{oneshot, watch};

use recent::Recent;
use worker::{Job, Worker};

/// Where objects are kept.
#[derive(Debug, Clone)]
pub enum Storage {
    /// For tests and throwaway use; gone with the process.
    Memory,
    /// A directory of our own; made (0700) when missing.
    Directory(PathBuf),
}

/// Names one object of one resource.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Key {
    /// `proxies.crawl.example.com`, `secrets`.
    pub resource: Arc<str>,
    /// Empty for cluster-scoped resources.
    pub namespace: String,
    pub name: String,
}

/// One object as one write left it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Record {
    pub key: Key,
    pub revision: u64,
    /// The first revision of this object.
    pub created: bool,
    /// A deletion: `value` is the last state, with the revision of the deletion.
    pub deleted: bool,
    /// JSON with `metadata.resourceVersion`.
    pub value: Bytes,
    /// The state before; only in events.
    pub previous: Option<Bytes>,
}

impl Record {
    /// # Errors
    /// When the stored bytes are no JSON: a damaged database.
    pub fn object(&self) -> Result<Value, StoreError> {
        parse(&self.key, &self.value)
    }
}

pub(crate) fn parse(key: &Key, bytes: &[u8]) -> Result<Value, StoreError> {
    serde_json::from_slice(bytes).map_err(|source| StoreError::Damaged {
        what: format!("{} {}/{}", key.resource, key.namespace, key.name),
        source,
    })
}

/// What must hold for a write to happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Expect {
    Absent,
    Revision(u64),
}

/// One write.
#[derive(Debug, Clone)]
pub(crate) struct Write {
    pub key: Key,
    pub expect: Expect,
    pub object: Value,
    pub delete: bool,
    /// Another object that must still be at this revision: the namespace that an object is created
    /// into, so that nothing slips into one that is being emptied.
    pub guard: Option<(Key, u64)>,
}

/// One page of a list.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Page {
    pub records: Vec<Record>,
    /// The revision that the page shows.
    pub revision: u64,
    /// Whether more follow.
    pub more: bool,
}

/// What to list.
#[derive(Debug, Clone)]
pub(crate) struct Range {
    pub resource: Arc<str>,
    /// None: all.
    pub namespace: Option<String>,
    /// Only keys after this `(namespace, name)`.
    pub after: Option<(String, String)>,
    pub limit: usize,
    /// None: the newest.
    pub revision: Option<u64>,
}

/// Why the store could not answer.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error(
        "{path}: another process is using this state directory; end it first, or give this one a directory of its own"
    )]
    InUse { path: PathBuf },
    #[error("cannot prepare the state directory {path}")]
    Directory {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error(
        "the database {path} cannot be opened: {source}; it is left as it is: restore a copy, or move it away to start empty"
    )]
    Open {
        path: PathBuf,
        source: rusqlite::Error,
    },
    #[error(
        "the database {path} was written by a newer version (format {found}, this program knows {known})"
    )]
    Newer {
        path: PathBuf,
        found: i64,
        known: i64,
    },
    #[error("the database refused: {0}")]
    Database(#[from] rusqlite::Error),
    #[error("a stored object is damaged: {what}")]
    Damaged {
        what: String,
        source: serde_json::Error,
    },
    #[error("the required revision {asked} has been compacted (oldest: {oldest})")]
    Compacted { asked: u64, oldest: u64 },
    #[error("revision {asked} does not exist yet (newest: {newest})")]
    Future { asked: u64, newest: u64 },
    #[error("the database thread could not be started")]
    Thread(#[source] std::io::Error),
    #[error("the store is closed")]
    Closed,
}

/// Why a write did not happen.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WriteError {
    /// The object is not at the expected revision; what is there now.
    #[error("the object is not at the expected revision")]
    Changed(Option<Box<Record>>),
    /// The guard is not at the expected revision.
    #[error("the guarding object changed")]
    Guard,
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Handle of the store; cheap to clone.
#[derive(Clone)]
pub(crate) struct Store {
    worker: Worker,
    recent: Arc<Recent>,
    revision: watch::Receiver<u64>,
}

impl Store {
    /// Opens the store and starts its thread. `now` gives milliseconds since 1970, to know how old
    /// a revision is.
    pub fn open(
        storage: &Storage,
        now: Arc<dyn Fn() -> i64 + Send + Sync>,
    ) -> Result<Self, StoreError> {
        let database = database::Database::open(storage)?;
        let newest = database.revision();
        let recent = Arc::new(Recent::new(newest));
        let (publish, revision) = watch::channel(newest);
        let worker = Worker::start(database, Arc::clone(&recent), publish, now)?;
        Ok(Self {
            worker,
            recent,
            revision,
        })
    }

    /// The newest revision.
    pub fn revision(&self) -> u64 {
        *self.revision.borrow()
    }

    /// Tells of each new revision.
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.revision.clone()
    }

    /// Does the write; it is on disk when this returns.
    pub async fn write(&self, write: Write) -> Result<Record, WriteError> {
        let (reply, answer) = oneshot::channel();
        self.worker
            .submit(Job::Write(Box::new(write), reply))
            .map_err(WriteError::Store)?;
        answer
            .await
            .unwrap_or(Err(WriteError::Store(StoreError::Closed)))
    }

    async fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&mut database::Database) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (reply, answer) = oneshot::channel();
        self.worker.submit(Job::Ask(Box::new(move |database| {
            // Nobody waits any more: the request was cancelled.
            let _ = reply.send(question(database));
        })))?;
        answer.await.unwrap_or(Err(StoreError::Closed))
    }

    pub async fn get(&self, key: &Key) -> Result<Option<Record>, StoreError> {
        let key = key.clone();
        self.ask(move |database| database.get(&key)).await
    }

    pub async fn list(&self, range: Range) -> Result<Page, StoreError> {
        self.ask(move |database| database.list(&range)).await
    }

    /// How many objects follow after a page, at the page's revision.
    pub async fn count(&self, range: Range) -> Result<u64, StoreError> {
        self.ask(move |database| database.count(&range)).await
    }

    /// Events of a resource after a revision, in order, at most `limit`, with the revision up to
    /// which the answer is complete.
    pub async fn events(
        &self,
        resource: Option<&Arc<str>>,
        after: u64,
        limit: usize,
    ) -> Result<(Vec<Arc<Record>>, u64), StoreError> {
        if let Some(answer) = self.recent.after(resource, after, limit) {
            return Ok(answer);
        }
        let resource = resource.cloned();
        self.ask(move |database| database.events(resource.as_deref(), after, limit))
            .await
    }

    /// Objects that name `owner` (a uid) in their ownerReferences.
    pub async fn dependents(&self, owner: &str) -> Result<Vec<Key>, StoreError> {
        let owner = owner.to_owned();
        self.ask(move |database| database.dependents(&owner)).await
    }

    /// Uids that are named as owners and belong to no object.
    pub async fn missing_owners(&self) -> Result<Vec<String>, StoreError> {
        self.ask(|database| database.missing_owners()).await
    }

    /// Whether an object with this uid exists.
    pub async fn uid_exists(&self, uid: &str) -> Result<bool, StoreError> {
        self.by_uid(uid).await.map(|key| key.is_some())
    }

    /// The object with this uid.
    pub async fn by_uid(&self, uid: &str) -> Result<Option<Key>, StoreError> {
        let uid = uid.to_owned();
        self.ask(move |database| database.by_uid(&uid)).await
    }

    /// All objects with a deletionTimestamp.
    pub async fn deleting(&self) -> Result<Vec<Key>, StoreError> {
        self.ask(|database| database.deleting()).await
    }

    /// Objects of a resource that were last written before `cutoff` (ms since 1970).
    pub async fn written_before(
        &self,
        resource: &Arc<str>,
        cutoff: i64,
    ) -> Result<Vec<Key>, StoreError> {
        let resource = Arc::clone(resource);
        self.ask(move |database| database.written_before(&resource, cutoff))
            .await
    }

    /// Forgets what only revisions before `revision` show. Returns the oldest revision kept.
    pub async fn compact(&self, revision: u64) -> Result<u64, StoreError> {
        let recent = Arc::clone(&self.recent);
        self.ask(move |database| {
            let oldest = database.compact(revision)?;
            recent.compact(oldest);
            Ok(oldest)
        })
        .await
    }

    /// Ends the thread after what was submitted before. Later calls answer
    /// [`StoreError::Closed`].
    pub async fn close(&self) {
        self.worker.close().await;
    }
}

#[cfg(test)]
mod tests;

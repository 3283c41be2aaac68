//! The tables and the queries. Everything here runs on the database thread.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use rusqlite::{Connection, OptionalExtension, Row, params};
use serde_json::Value;

use super::directory::{lock, private_file};
use super::{Expect, Key, Page, Range, Record, Storage, StoreError, Write, WriteError};

const FORMAT: i64 = 1;
const DATABASE_FILE: &str = "control-plane.db";

/// `next` is the revision that superseded the row; NULL: the row is current (or a tombstone that
/// nothing followed). Revisions start at 1, so that 0 keeps its meaning "any" in the API.
const SCHEMA: &str = "
CREATE TABLE IF NOT EXISTS log (
  rev       INTEGER PRIMARY KEY,
  resource  TEXT NOT NULL,
  namespace TEXT NOT NULL,
  name      TEXT NOT NULL,
  uid       TEXT NOT NULL,
  created   INTEGER NOT NULL,
  deleted   INTEGER NOT NULL,
  prev      INTEGER,
  next      INTEGER,
  at        INTEGER NOT NULL,
  value     BLOB NOT NULL
) STRICT;
CREATE UNIQUE INDEX IF NOT EXISTS log_current ON log (resource, namespace, name) WHERE next IS NULL;
CREATE INDEX IF NOT EXISTS log_history ON log (resource, namespace, name, rev);
CREATE INDEX IF NOT EXISTS log_superseded ON log (next) WHERE next IS NOT NULL;
CREATE INDEX IF NOT EXISTS log_deleted ON log (rev) WHERE deleted = 1;
CREATE INDEX IF NOT EXISTS log_uid ON log (uid) WHERE next IS NULL;
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS owners (
  owner     TEXT NOT NULL,
  resource  TEXT NOT NULL,
  namespace TEXT NOT NULL,
  name      TEXT NOT NULL,
  PRIMARY KEY (owner, resource, namespace, name)
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS owners_object ON owners (resource, namespace, name);
";

pub(super) struct Database {
    connection: Connection,
    revision: u64,
    /// Every state at this revision or later can be shown.
    oldest: u64,
    /// Held for its lock.
    _lock: Option<File>,
}

impl Database {
    pub fn open(storage: &Storage) -> Result<Self, StoreError> {
        match storage {
            Storage::Memory => {
                Self::prepare(Connection::open_in_memory()?, Path::new(":memory:"), None)
            }
            Storage::Directory(directory) => {
                let lock = lock(directory)?;
                let path = directory.join(DATABASE_FILE);
                let connection = private_file(&path)
                    .map_err(|source| StoreError::Directory {
                        path: path.clone(),
                        source,
                    })
                    .and_then(|()| {
                        Connection::open(&path).map_err(|source| StoreError::Open {
                            path: path.clone(),
                            source,
                        })
                    })?;
                Self::prepare(connection, &path, Some(lock))
            }
        }
    }

    fn prepare(
        connection: Connection,
        path: &Path,
        lock: Option<File>,
    ) -> Result<Self, StoreError> {
        let opened = |source| StoreError::Open {
            path: path.to_owned(),
            source,
        };
        let found: i64 = connection
            .query_row("PRAGMA user_version", [], |row| row.get(0))
            .map_err(opened)?;
        if found > FORMAT {
            return Err(StoreError::Newer {
                path: path.to_owned(),
                found,
                known: FORMAT,
            });
        }
        if found == 0 {
            // Turning an empty file into a WAL database is four flushes when SQLite does it; it is
            // flushed once, below, before anything is written.
            connection
                .execute_batch("PRAGMA synchronous = OFF; PRAGMA journal_mode = WAL;")
                .map_err(opened)?;
            if let Some(directory) = path.parent().filter(|_| lock.is_some()) {
                for file in [path, directory] {
                    File::open(file)
                        .and_then(|f| f.sync_all())
                        .map_err(|source| StoreError::Directory {
                            path: file.to_owned(),
                            source,
                        })?;
                }
            }
        }
        // FULL: a commit is on the disk before it is answered, power loss included.
        connection
            .execute_batch(
                "PRAGMA journal_mode = WAL;
                 PRAGMA synchronous = FULL;
                 PRAGMA cache_size = -2048;
                 PRAGMA wal_autocheckpoint = 400;
                 PRAGMA journal_size_limit = 4194304;",
            )
            .map_err(opened)?;
        if found != FORMAT {
            // In one transaction: one flush, and all of it or nothing.
            connection
                .execute_batch(&format!(
                    "BEGIN; {SCHEMA} PRAGMA user_version = {FORMAT}; COMMIT;"
                ))
                .map_err(opened)?;
        }
        let oldest = meta(&connection, "oldest").map_err(opened)?.unwrap_or(0);
        let logged: Option<i64> = connection
            .query_row("SELECT max(rev) FROM log", [], |row| row.get(0))
            .map_err(opened)?;
        connection.set_prepared_statement_cache_capacity(32);
        Ok(Self {
            connection,
            // 1 and not 0: to a client a list at 0 would mean "any revision".
            revision: to_u64(logged.unwrap_or(0)).max(oldest).max(1),
            oldest,
            _lock: lock,
        })
    }

    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// Checkpoints the write-ahead log, so that one file is left.
    pub fn close(self) {
        if let Err(error) = self
            .connection
            .execute_batch("PRAGMA wal_checkpoint(TRUNCATE)")
        {
            tracing::warn!("the control plane's database was closed without a checkpoint: {error}");
        }
    }

    /// All writes in one transaction: all that can happen have happened, and are on disk, or none.
    pub fn write_all(
        &mut self,
        writes: Vec<Write>,
        now: i64,
    ) -> Result<Vec<Result<Record, WriteError>>, StoreError> {
        let before = self.revision;
        let result = self.write_in_transaction(writes, now);
        if result.is_err() {
            self.revision = before;
            if !self.connection.is_autocommit() {
                // The statement that failed says more than a failing rollback would.
                let _ = self.connection.execute_batch("ROLLBACK");
            }
        }
        result
    }

    fn write_in_transaction(
        &mut self,
        writes: Vec<Write>,
        now: i64,
    ) -> Result<Vec<Result<Record, WriteError>>, StoreError> {
        self.connection.execute_batch("BEGIN IMMEDIATE")?;
        let mut answers = Vec::with_capacity(writes.len());
        for write in writes {
            answers.push(match self.write_one(write, now) {
                Err(WriteError::Store(error)) => return Err(error),
                answer => answer,
            });
        }
        self.connection.execute_batch("COMMIT")?;
        Ok(answers)
    }

    fn write_one(&mut self, write: Write, now: i64) -> Result<Record, WriteError> {
        if let Some((guard, revision)) = &write.guard {
            let there = self.get(guard)?;
            if there.is_none_or(|r| r.revision != *revision) {
                return Err(WriteError::Guard);
            }
        }
        let current = self.current_row(&write.key)?;
        let live = current.as_ref().filter(|r| !r.deleted);
        let fits = match write.expect {
            Expect::Absent => live.is_none(),
            Expect::Revision(revision) => live.is_some_and(|r| r.revision == revision),
        };
        if !fits {
            return Err(WriteError::Changed(
                current.filter(|r| !r.deleted).map(Box::new),
            ));
        }
        let created = live.is_none();
        let revision = self.revision + 1;
        let mut write = write;
        let mut object = write.object.take();
        let (uid, owners) = identity(&object);
        if let Some(Value::Object(metadata)) = object.get_mut("metadata") {
            metadata.insert("resourceVersion".to_owned(), revision.to_string().into());
        }
        let value = Bytes::from(object.to_string());
        self.insert(&write, &current, revision, created, &uid, now, &value)
            .map_err(StoreError::Database)?;
        self.own(&write.key, &owners, write.delete)
            .map_err(StoreError::Database)?;
        self.revision = revision;
        Ok(Record {
            key: write.key,
            revision,
            created,
            deleted: write.delete,
            value,
            previous: current.filter(|r| !r.deleted).map(|r| r.value),
        })
    }

    #[allow(clippy::too_many_arguments, reason = "the columns of one row")]
    fn insert(
        &self,
        write: &Write,
        current: &Option<Record>,
        revision: u64,
        created: bool,
        uid: &str,
        now: i64,
        value: &[u8],
    ) -> rusqlite::Result<()> {
        let key = &write.key;
        let prev = current.as_ref().map(|r| to_i64(r.revision));
        if let Some(prev) = prev {
            self.connection
                .prepare_cached("UPDATE log SET next = ?2 WHERE rev = ?1")?
                .execute(params![prev, to_i64(revision)])?;
        }
        self.connection
            .prepare_cached(
                "INSERT INTO log (rev, resource, namespace, name, uid, created, deleted, prev, at, value)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)",
            )?
            .execute(params![
                to_i64(revision),
                &*key.resource,
                key.namespace,
                key.name,
                uid,
                created,
                write.delete,
                prev,
                now,
                value
            ])?;
        Ok(())
    }

    fn own(&self, key: &Key, owners: &[String], deleted: bool) -> rusqlite::Result<()> {
        self.connection
            .prepare_cached(
                "DELETE FROM owners WHERE resource = ?1 AND namespace = ?2 AND name = ?3",
            )?
            .execute(params![&*key.resource, key.namespace, key.name])?;
        if deleted {
            return Ok(());
        }
        for owner in owners {
            self.connection
                .prepare_cached("INSERT OR IGNORE INTO owners VALUES (?1, ?2, ?3, ?4)")?
                .execute(params![owner, &*key.resource, key.namespace, key.name])?;
        }
        Ok(())
    }

    fn current_row(&self, key: &Key) -> Result<Option<Record>, StoreError> {
        Ok(self
            .connection
            .prepare_cached(
                "SELECT rev, resource, namespace, name, created, deleted, value FROM log
                 WHERE resource = ?1 AND namespace = ?2 AND name = ?3 AND next IS NULL",
            )?
            .query_row(params![&*key.resource, key.namespace, key.name], record)
            .optional()?)
    }

    pub fn get(&self, key: &Key) -> Result<Option<Record>, StoreError> {
        Ok(self.current_row(key)?.filter(|r| !r.deleted))
    }

    fn shown(&self, asked: Option<u64>) -> Result<u64, StoreError> {
        let revision = asked.unwrap_or(self.revision);
        if revision > self.revision {
            return Err(StoreError::Future {
                asked: revision,
                newest: self.revision,
            });
        }
        if revision < self.oldest {
            return Err(StoreError::Compacted {
                asked: revision,
                oldest: self.oldest,
            });
        }
        Ok(revision)
    }

    /// The rows of a range, as the part of a query after FROM. The newest state and that of one
    /// namespace have indexes of their own.
    fn rows(&self, range: &Range, revision: u64) -> String {
        // Within one namespace a page goes on by the name alone.
        let keys = match range.namespace {
            Some(_) => "namespace = ?2 AND name > ?4",
            None => "?2 IS NULL AND (namespace, name) > (?3, ?4)",
        };
        let at = if revision == self.revision {
            "next IS NULL AND rev <= ?5"
        } else {
            "rev <= ?5 AND (next IS NULL OR next > ?5)"
        };
        format!("log WHERE resource = ?1 AND {keys} AND {at} AND deleted = 0")
    }

    pub fn list(&self, range: &Range) -> Result<Page, StoreError> {
        let revision = self.shown(range.revision)?;
        let (namespace, name) = range.after.clone().unwrap_or_default();
        // One more than asked for tells whether more follow.
        let limit = i64::try_from(range.limit.saturating_add(1)).unwrap_or(i64::MAX);
        let mut records = self
            .connection
            .prepare_cached(&format!(
                "SELECT rev, resource, namespace, name, created, deleted, value FROM {}
                 ORDER BY namespace, name LIMIT ?6",
                self.rows(range, revision)
            ))?
            .query_map(
                params![
                    &*range.resource,
                    range.namespace,
                    namespace,
                    name,
                    to_i64(revision),
                    limit
                ],
                record,
            )?
            .collect::<rusqlite::Result<Vec<_>>>()?;
        let more = records.len() > range.limit;
        records.truncate(range.limit);
        Ok(Page {
            records,
            revision,
            more,
        })
    }

    pub fn count(&self, range: &Range) -> Result<u64, StoreError> {
        let revision = self.shown(range.revision)?;
        let (namespace, name) = range.after.clone().unwrap_or_default();
        let count: i64 = self
            .connection
            .prepare_cached(&format!(
                "SELECT count(*) FROM {}",
                self.rows(range, revision)
            ))?
            .query_row(
                params![
                    &*range.resource,
                    range.namespace,
                    namespace,
                    name,
                    to_i64(revision)
                ],
                |row| row.get(0),
            )?;
        Ok(to_u64(count))
    }

    pub fn events(
        &self,
        resource: Option<&str>,
        after: u64,
        limit: usize,
    ) -> Result<(Vec<Arc<Record>>, u64), StoreError> {
        if after < self.oldest {
            return Err(StoreError::Compacted {
                asked: after,
                oldest: self.oldest,
            });
        }
        let limit_rows = i64::try_from(limit).unwrap_or(i64::MAX);
        let events = self
            .connection
            .prepare_cached(
                "SELECT e.rev, e.resource, e.namespace, e.name, e.created, e.deleted, e.value, p.value
                 FROM log e LEFT JOIN log p ON p.rev = e.prev AND p.deleted = 0
                 WHERE e.rev > ?1 AND (?2 IS NULL OR e.resource = ?2)
                 ORDER BY e.rev LIMIT ?3",
            )?
            .query_map(params![to_i64(after), resource, limit_rows], |row| {
                let mut event = record(row)?;
                event.previous = row.get::<_, Option<Vec<u8>>>(7)?.map(Bytes::from);
                Ok(Arc::new(event))
            })?
            .collect::<rusqlite::Result<Vec<_>>>()?;
        let complete = match events.last() {
            Some(last) if events.len() >= limit => last.revision,
            _ => self.revision.max(after),
        };
        Ok((events, complete))
    }

    pub fn dependents(&self, owner: &str) -> Result<Vec<Key>, StoreError> {
        Ok(self
            .connection
            .prepare_cached(
                "SELECT resource, namespace, name FROM owners WHERE owner = ?1
                 ORDER BY resource, namespace, name",
            )?
            .query_map([owner], key)?
            .collect::<rusqlite::Result<_>>()?)
    }

    pub fn missing_owners(&self) -> Result<Vec<String>, StoreError> {
        Ok(self
            .connection
            .prepare_cached(
                "SELECT DISTINCT owner FROM owners WHERE owner NOT IN
                 (SELECT uid FROM log WHERE next IS NULL AND deleted = 0)",
            )?
            .query_map([], |row| row.get(0))?
            .collect::<rusqlite::Result<_>>()?)
    }

    pub fn by_uid(&self, uid: &str) -> Result<Option<Key>, StoreError> {
        Ok(self
            .connection
            .prepare_cached(
                "SELECT resource, namespace, name FROM log
                 WHERE uid = ?1 AND next IS NULL AND deleted = 0",
            )?
            .query_row([uid], key)
            .optional()?)
    }

    /// Asked once at start; a rare word in the text is enough to find candidates.
    pub fn deleting(&self) -> Result<Vec<Key>, StoreError> {
        Ok(self
            .connection
            .prepare(
                "SELECT resource, namespace, name FROM log
                 WHERE next IS NULL AND deleted = 0
                   AND instr(value, CAST('\"deletionTimestamp\"' AS BLOB)) > 0",
            )?
            .query_map([], key)?
            .collect::<rusqlite::Result<_>>()?)
    }

    pub fn written_before(&self, resource: &str, cutoff: i64) -> Result<Vec<Key>, StoreError> {
        Ok(self
            .connection
            .prepare_cached(
                "SELECT resource, namespace, name FROM log
                 WHERE resource = ?1 AND next IS NULL AND deleted = 0 AND at < ?2",
            )?
            .query_map(params![resource, cutoff], key)?
            .collect::<rusqlite::Result<_>>()?)
    }

    /// Lets the database grow no further, as on a full disk.
    #[cfg(test)]
    pub fn limit_pages(&self) -> Result<(), StoreError> {
        let pages: i64 = self
            .connection
            .query_row("PRAGMA page_count", [], |row| row.get(0))?;
        self.connection
            .pragma_update_and_check(None, "max_page_count", pages + 8, |_| Ok(()))?;
        Ok(())
    }

    pub fn compact(&mut self, revision: u64) -> Result<u64, StoreError> {
        let oldest = revision.min(self.revision);
        if oldest <= self.oldest {
            return Ok(self.oldest);
        }
        let transaction = self.connection.transaction()?;
        // Two statements, each with an index of its own.
        for old in [
            "DELETE FROM log WHERE next <= ?1",
            "DELETE FROM log WHERE deleted = 1 AND rev <= ?1",
        ] {
            transaction.execute(old, [to_i64(oldest)])?;
        }
        transaction.execute(
            "INSERT INTO meta VALUES ('oldest', ?1)
             ON CONFLICT (key) DO UPDATE SET value = excluded.value",
            [to_i64(oldest)],
        )?;
        transaction.commit()?;
        self.oldest = oldest;
        Ok(oldest)
    }
}

/// Uid and owners' uids of an object.
fn identity(object: &Value) -> (String, Vec<String>) {
    let metadata = &object["metadata"];
    let uid = metadata["uid"].as_str().unwrap_or_default().to_owned();
    let owners = metadata["ownerReferences"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|r| r["uid"].as_str().map(str::to_owned))
        .collect();
    (uid, owners)
}

fn record(row: &Row<'_>) -> rusqlite::Result<Record> {
    let resource: String = row.get(1)?;
    Ok(Record {
        key: Key {
            resource: resource.into(),
            namespace: row.get(2)?,
            name: row.get(3)?,
        },
        revision: to_u64(row.get(0)?),
        created: row.get(4)?,
        deleted: row.get(5)?,
        value: Bytes::from(row.get::<_, Vec<u8>>(6)?),
        previous: None,
    })
}

fn key(row: &Row<'_>) -> rusqlite::Result<Key> {
    let resource: String = row.get(0)?;
    Ok(Key {
        resource: resource.into(),
        namespace: row.get(1)?,
        name: row.get(2)?,
    })
}

fn meta(connection: &Connection, name: &str) -> rusqlite::Result<Option<u64>> {
    connection
        .query_row("SELECT value FROM meta WHERE key = ?1", [name], |row| {
            row.get(0)
        })
        .optional()
        .map(|v| v.map(to_u64))
}

/// SQLite's integers are signed; a revision never leaves their range.
fn to_i64(revision: u64) -> i64 {
    i64::try_from(revision).unwrap_or(i64::MAX)
}

fn to_u64(value: i64) -> u64 {
    u64::try_from(value).unwrap_or(0)
}

//! The database: its schema, loading it at a start, writing a batch of changes.
//!
//! Write-ahead log with `synchronous=FULL`: when a transaction has been committed it is on the
//! disk (<https://sqlite.org/pragma.html#pragma_synchronous>). The connection holds the file
//! exclusively, so that two operators never share one state directory by mistake.

use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use egress_core::target::Target;
use egress_core::{ProxyKey, Uid};
use jiff::Timestamp;
use rusqlite::{Connection, ErrorCode, Row, Statement, params};

use crate::config::Config;
use crate::contract::{Lease, LeaseId, StoreFailure};
use crate::index::{Change, Cooldown, EndReason, Ended, Entry, Held, IdempotencyKey};
use crate::policy::State;
use crate::time::{Mono, Now, millis, remaining_ms};

/// `PRAGMA application_id`: "EgLs", so that `file` and we know what a file is.
const APPLICATION_ID: i32 = 0x4567_4c73;

/// `PRAGMA user_version`. Each migration takes one version to the next.
const MIGRATIONS: [&str; 1] = [SCHEMA_1];

const SCHEMA_1: &str = "
    CREATE TABLE leases (
        id              TEXT PRIMARY KEY,
        namespace       TEXT NOT NULL,
        name            TEXT NOT NULL,
        uid             TEXT NOT NULL,
        target          TEXT,
        granted_ms      INTEGER NOT NULL,
        expires_ms      INTEGER NOT NULL,
        ttl_ms          INTEGER NOT NULL,
        idempotency_key TEXT,
        body_digest     BLOB,
        -- By the boot-time clock: when it ends; when it has, until when it is remembered.
        deadline_ms     INTEGER NOT NULL,
        ended_ms        INTEGER,
        end_reason      TEXT CHECK (end_reason IN ('expired', 'released', 'proxy_gone')),
        CHECK ((ended_ms IS NULL) = (end_reason IS NULL)),
        CHECK ((idempotency_key IS NULL) = (body_digest IS NULL))
    ) STRICT, WITHOUT ROWID;
    -- One live lease a key, whatever a bug does.
    CREATE UNIQUE INDEX leases_by_key ON leases (idempotency_key)
        WHERE idempotency_key IS NOT NULL AND ended_ms IS NULL;
    -- An empty target is every target.
    CREATE TABLE cooldowns (
        uid         TEXT NOT NULL,
        target      TEXT NOT NULL,
        started_ms  INTEGER NOT NULL,
        until_ms    INTEGER NOT NULL,
        deadline_ms INTEGER NOT NULL,
        PRIMARY KEY (uid, target)
    ) STRICT, WITHOUT ROWID;
    -- The latest wall-clock instant that a write has seen, and which boot's clock the deadlines
    -- are of.
    CREATE TABLE clock (
        one     INTEGER PRIMARY KEY CHECK (one = 1),
        seen_ms INTEGER NOT NULL,
        boot    TEXT NOT NULL
    ) STRICT;
    INSERT INTO clock VALUES (1, 0, '');
";

/// The lease database cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error(
        "cannot make the lease database {}: {source}; does the directory exist, and may this user \
         write to it?",
        path.display()
    )]
    Create {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error(
        "cannot open the lease database {}: {source}; does the directory exist, and may this user \
         write to it?",
        path.display()
    )]
    Open {
        path: PathBuf,
        source: rusqlite::Error,
    },
    #[error(
        "the lease database {} is in use by another process: is another operator running with \
         this state directory?",
        path.display()
    )]
    InUse { path: PathBuf },
    #[error(
        "{} is not a lease database of this operator: move it away, or choose another state \
         directory",
        path.display()
    )]
    Foreign { path: PathBuf },
    #[error(
        "the lease database {} has schema version {found}, this operator knows up to {known}: \
         start the newer operator that wrote it, or move the file away (active leases are lost)",
        path.display()
    )]
    TooNew {
        path: PathBuf,
        found: i64,
        known: i64,
    },
    #[error(
        "cannot {action} the lease database {}: {source}; if it is damaged, move it away (active \
         leases are lost)",
        path.display()
    )]
    Unusable {
        path: PathBuf,
        action: &'static str,
        source: rusqlite::Error,
    },
    #[error("the lease database {}: lease {id} has a bad {column}", path.display())]
    BadRow {
        path: PathBuf,
        id: String,
        column: &'static str,
    },
    #[error("cannot start the thread that writes the lease database: {0}")]
    Thread(#[source] std::io::Error),
}

#[derive(Debug)]
pub(crate) struct Db {
    connection: Connection,
}

impl Db {
    pub fn open(path: &Path) -> Result<Self, OpenError> {
        let unusable = |action| {
            move |source: rusqlite::Error| match source.sqlite_error_code() {
                Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => {
                    OpenError::InUse { path: path.into() }
                }
                Some(ErrorCode::NotADatabase) => OpenError::Foreign { path: path.into() },
                _ => OpenError::Unusable {
                    path: path.into(),
                    action,
                    source,
                },
            }
        };
        // Whoever knows a lease's id can end it: for our user only. SQLite gives its other files
        // the mode of this one.
        std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .mode(0o600)
            .open(path)
            .map_err(|source| OpenError::Create {
                path: path.into(),
                source,
            })?;
        let mut connection = Connection::open(path).map_err(|source| OpenError::Open {
            path: path.into(),
            source,
        })?;
        // A predecessor that is just stopping may still hold it.
        connection
            .busy_timeout(Duration::from_secs(2))
            .and_then(|()| connection.pragma_update(None, "locking_mode", "EXCLUSIVE"))
            .map_err(unusable("configure"))?;
        let (id, version, empty) = connection
            .query_row(
                "SELECT (SELECT application_id FROM pragma_application_id),
                        (SELECT user_version FROM pragma_user_version),
                        NOT EXISTS (SELECT 1 FROM sqlite_schema)",
                [],
                |row| {
                    Ok((
                        row.get::<_, i32>(0)?,
                        row.get::<_, i64>(1)?,
                        row.get::<_, bool>(2)?,
                    ))
                },
            )
            .map_err(unusable("read"))?;
        if id != APPLICATION_ID && !empty {
            return Err(OpenError::Foreign { path: path.into() });
        }
        let known = MIGRATIONS.len() as i64;
        if version > known {
            return Err(OpenError::TooNew {
                path: path.into(),
                found: version,
                known,
            });
        }
        connection
            .pragma_update(None, "journal_mode", "WAL")
            .and_then(|()| connection.pragma_update(None, "synchronous", "FULL"))
            .map_err(unusable("configure"))?;
        migrate(&mut connection, version).map_err(unusable("set up"))?;
        Ok(Self { connection })
    }

    /// What the database holds. `boot` names the boot whose clock `now` is of: deadlines of an
    /// earlier one are translated, and written back.
    pub fn load(
        &mut self,
        path: &Path,
        config: Config,
        now: Now,
        boot: &str,
    ) -> Result<State, OpenError> {
        let mut changes = Vec::new();
        let same_boot =
            self.read(&config, now, boot, &mut changes)
                .map_err(|error| match error {
                    ReadError::Sqlite(source) => OpenError::Unusable {
                        path: path.into(),
                        action: "read",
                        source,
                    },
                    ReadError::Bad { id, column } => OpenError::BadRow {
                        path: path.into(),
                        id,
                        column,
                    },
                })?;
        if !same_boot {
            self.rewrite(&changes, now, boot)
                .map_err(|source| OpenError::Unusable {
                    path: path.into(),
                    action: "write",
                    source,
                })?;
        }
        let mut state = State::new(config);
        for change in &changes {
            state.apply(change);
        }
        Ok(state)
    }

    fn read(
        &self,
        config: &Config,
        now: Now,
        boot: &str,
        changes: &mut Vec<Change>,
    ) -> Result<bool, ReadError> {
        let (seen, of_boot) =
            self.connection
                .query_row("SELECT seen_ms, boot FROM clock", [], |row| {
                    Ok((row.get::<_, i64>(0)?, row.get::<_, String>(1)?))
                })?;
        let same_boot = !boot.is_empty() && of_boot == boot;
        let wall = now.wall.as_millisecond();
        if seen > wall {
            tracing::warn!(
                seconds = (seen - wall) / 1000,
                "the clock is behind what the lease database has seen"
            );
        }
        let left = Left {
            now: now.mono,
            reference: seen.max(wall),
            same_boot,
        };
        let mut statement = self.connection.prepare("SELECT * FROM leases")?;
        let mut rows = statement.query([])?;
        while let Some(row) = rows.next()? {
            changes.push(lease(row, config, &left)?);
        }
        let mut statement = self.connection.prepare("SELECT * FROM cooldowns")?;
        let mut rows = statement.query([])?;
        while let Some(row) = rows.next()? {
            changes.push(cooldown(row, &left)?);
        }
        Ok(same_boot)
    }

    fn rewrite(&mut self, changes: &[Change], now: Now, boot: &str) -> rusqlite::Result<()> {
        let transaction = self.connection.transaction()?;
        write_all(&transaction, changes, now)?;
        transaction.execute("UPDATE clock SET boot = ?1", [boot])?;
        transaction.commit()
    }

    /// All of it or nothing; durable when this returns.
    pub fn write(&mut self, changes: &[Change], now: Now) -> Result<(), StoreFailure> {
        let failed = |action| {
            move |error: rusqlite::Error| StoreFailure {
                action,
                message: error.to_string(),
            }
        };
        let transaction = self.connection.transaction().map_err(failed("begin"))?;
        write_all(&transaction, changes, now).map_err(failed("write"))?;
        transaction.commit().map_err(failed("commit"))
    }

    #[cfg(test)]
    pub fn raw(&self) -> &Connection {
        &self.connection
    }
}

fn write_all(connection: &Connection, changes: &[Change], now: Now) -> rusqlite::Result<()> {
    let mut statements = Statements::new(connection)?;
    for change in changes {
        statements.write(change)?;
    }
    connection.execute(
        "UPDATE clock SET seen_ms = max(seen_ms, ?1)",
        [now.wall.as_millisecond()],
    )?;
    Ok(())
}

/// Translates what is stored of a time into the clock of now.
struct Left {
    now: Mono,
    reference: i64,
    same_boot: bool,
}

impl Left {
    /// `whole` is the length of the thing, `until` its end by the wall clock. A clock that was
    /// set back must not make it longer than it ever was.
    fn deadline(&self, row: &Row<'_>, until: i64, whole: i64) -> rusqlite::Result<Mono> {
        let longest = self.now.after(whole.max(0));
        Ok(if self.same_boot {
            Mono(row.get("deadline_ms")?).min(longest)
        } else {
            self.now.after(remaining_ms(until, self.reference, whole))
        })
    }
}

fn migrate(connection: &mut Connection, from: i64) -> rusqlite::Result<()> {
    let from = usize::try_from(from).unwrap_or(0);
    // The exclusive lock is taken by the first write, so there is one even without migrations.
    let transaction =
        connection.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
    for (step, sql) in MIGRATIONS.iter().enumerate().skip(from) {
        transaction.execute_batch(sql)?;
        transaction.pragma_update(None, "user_version", step as i64 + 1)?;
    }
    transaction.pragma_update(None, "application_id", APPLICATION_ID)?;
    transaction.commit()
}

#[derive(Debug, thiserror::Error)]
enum ReadError {
    #[error(transparent)]
    Sqlite(#[from] rusqlite::Error),
    #[error("lease {id}: bad {column}")]
    Bad { id: String, column: &'static str },
}

fn lease(row: &Row<'_>, config: &Config, left: &Left) -> Result<Change, ReadError> {
    let id: String = row.get("id")?;
    let bad = |column| ReadError::Bad {
        id: id.clone(),
        column,
    };
    let instant = |column: &'static str| -> Result<Timestamp, ReadError> {
        Timestamp::from_millisecond(row.get(column)?).map_err(|_| bad(column))
    };
    let uid = Uid::new(row.get::<_, String>("uid")?);
    let target = row
        .get::<_, Option<String>>("target")?
        .map(|text| Target::parse(&text).map_err(|_| bad("target")))
        .transpose()?;
    let entry = if let Some(reason) = row.get::<_, Option<String>>("end_reason")? {
        let at = instant("ended_ms")?;
        let window = millis(config.cooldown);
        let until = at.as_millisecond().saturating_add(window);
        Entry::Ended(Arc::new(Ended {
            uid,
            target,
            reason: EndReason::parse(&reason).ok_or_else(|| bad("end_reason"))?,
            at,
            forget: left.deadline(row, until, window)?,
        }))
    } else {
        let ttl_ms: i64 = row.get("ttl_ms")?;
        let expires_at = instant("expires_ms")?;
        let key = row
            .get::<_, Option<String>>("idempotency_key")?
            .map(|text| {
                let body = row.get::<_, Vec<u8>>("body_digest")?;
                let body = body.try_into().map_err(|_| bad("body_digest"))?;
                Ok::<_, ReadError>(IdempotencyKey { text, body })
            })
            .transpose()?;
        Entry::Active(Arc::new(Held {
            lease: Lease {
                id: LeaseId(id.clone()),
                proxy: ProxyKey::new(
                    row.get::<_, String>("namespace")?,
                    row.get::<_, String>("name")?,
                ),
                uid,
                target,
                granted_at: instant("granted_ms")?,
                expires_at,
                ttl: Duration::from_millis(u64::try_from(ttl_ms).map_err(|_| bad("ttl_ms"))?),
            },
            deadline: left.deadline(row, expires_at.as_millisecond(), ttl_ms)?,
            key,
        }))
    };
    Ok(Change::Lease {
        id: LeaseId(id),
        before: None,
        after: Some(entry),
    })
}

fn cooldown(row: &Row<'_>, left: &Left) -> Result<Change, ReadError> {
    let uid: String = row.get("uid")?;
    let bad = |column| ReadError::Bad {
        id: uid.clone(),
        column,
    };
    let text: String = row.get("target")?;
    let target = match text.as_str() {
        "" => None,
        text => Some(Target::parse(text).map_err(|_| bad("target"))?),
    };
    let started: i64 = row.get("started_ms")?;
    let until: i64 = row.get("until_ms")?;
    let instant = |ms, column| Timestamp::from_millisecond(ms).map_err(|_| bad(column));
    Ok(Change::Cooldown {
        key: (Uid::new(&uid), target),
        before: None,
        after: Some(Cooldown {
            started: instant(started, "started_ms")?,
            until: instant(until, "until_ms")?,
            deadline: left.deadline(row, until, until.saturating_sub(started))?,
        }),
    })
}

struct Statements<'c> {
    put: Statement<'c>,
    end: Statement<'c>,
    forget: Statement<'c>,
    cool: Statement<'c>,
    thaw: Statement<'c>,
}

impl<'c> Statements<'c> {
    fn new(connection: &'c Connection) -> rusqlite::Result<Self> {
        Ok(Self {
            put: connection.prepare(
                "INSERT OR REPLACE INTO leases VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, \
                 ?11, NULL, NULL)",
            )?,
            end: connection.prepare(
                "UPDATE leases SET ended_ms = ?2, end_reason = ?3, deadline_ms = ?4, \
                 idempotency_key = NULL, body_digest = NULL WHERE id = ?1",
            )?,
            forget: connection.prepare("DELETE FROM leases WHERE id = ?1")?,
            cool: connection
                .prepare("INSERT OR REPLACE INTO cooldowns VALUES (?1, ?2, ?3, ?4, ?5)")?,
            thaw: connection.prepare("DELETE FROM cooldowns WHERE uid = ?1 AND target = ?2")?,
        })
    }

    fn write(&mut self, change: &Change) -> rusqlite::Result<()> {
        match change {
            Change::Lease {
                id,
                after: Some(Entry::Active(held)),
                ..
            } => {
                let lease = &held.lease;
                self.put.execute(params![
                    id.0,
                    lease.proxy.namespace,
                    lease.proxy.name,
                    lease.uid.as_str(),
                    lease.target.as_ref().map(Target::as_str),
                    lease.granted_at.as_millisecond(),
                    lease.expires_at.as_millisecond(),
                    millis(lease.ttl),
                    held.key.as_ref().map(|key| &key.text),
                    held.key.as_ref().map(|key| key.body.as_slice()),
                    held.deadline.0,
                ])?;
            }
            Change::Lease {
                id,
                after: Some(Entry::Ended(ended)),
                ..
            } => {
                self.end.execute(params![
                    id.0,
                    ended.at.as_millisecond(),
                    ended.reason.as_str(),
                    ended.forget.0,
                ])?;
            }
            Change::Lease {
                id, after: None, ..
            } => {
                self.forget.execute([&id.0])?;
            }
            Change::Cooldown {
                key: (uid, target),
                after,
                ..
            } => {
                let target = target.as_ref().map_or("", Target::as_str);
                match after {
                    Some(cooldown) => self.cool.execute(params![
                        uid.as_str(),
                        target,
                        cooldown.started.as_millisecond(),
                        cooldown.until.as_millisecond(),
                        cooldown.deadline.0,
                    ])?,
                    None => self.thaw.execute([uid.as_str(), target])?,
                };
            }
        }
        Ok(())
    }
}

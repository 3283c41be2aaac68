//! watch: a stream of JSON events.
//!
//! A watch holds no queue. It remembers the revision it has sent and reads on from there whenever
//! the store tells of a newer one, so that its order is that of the log and a slow client costs
//! nothing but its own lag. When the log has been compacted past it, it ends with 410.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::{Bytes, BytesMut};
use futures::Stream;
use http::StatusCode;
use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::Instant;

use super::read::Selection;
use super::{Call, internal};
use crate::error::{ApiError, ApiResult, FieldError};
use crate::registry::Kind;
use crate::request::Form;
use crate::server::Server;
use crate::storage::{Record, parse};
use crate::table::{self, IncludeObject};

/// Events that are read and sent in one turn.
const BATCH: usize = 128;
/// How often a client that takes bookmarks hears of the revision when nothing else happens.
const BOOKMARK_EVERY: Duration = Duration::from_secs(60);
/// How long a watch lasts that names no timeout.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30 * 60);
/// Marks the bookmark after the initial events.
const INITIAL_EVENTS_END: &str = "k8s.io/initial-events-end";

struct State {
    server: Server,
    kind: Arc<Kind>,
    namespace: Option<String>,
    selection: Selection,
    form: Form,
    include: IncludeObject,
    bookmarks: bool,
    /// Everything up to here has been sent.
    sent: u64,
    revisions: watch::Receiver<u64>,
    deadline: Instant,
    next_bookmark: Instant,
    /// Still to send before anything else.
    initial: std::vec::IntoIter<Value>,
    /// The bookmark that ends the initial events is still to send.
    end_of_initial: bool,
    /// Tables carry their columns once.
    columns_sent: bool,
    ended: bool,
}

impl Call<'_> {
    pub(super) async fn watch(&self) -> ApiResult<Response> {
        let selection = self.selection()?;
        let asked = self
            .query
            .revision()
            .map_err(|e| ApiError::untyped(e.message))?;
        let send_initial = self.query.get("sendInitialEvents").map(|v| v == "true");
        self.check_initial(send_initial)?;
        let bookmarks = self.query.flag("allowWatchBookmarks");
        let newest = self.server.store.revision();
        if let Some(asked) = asked.filter(|asked| *asked > newest) {
            return Err(ApiError::too_large_resource_version(asked, newest));
        }
        let with_state = match send_initial {
            Some(wanted) => wanted,
            // Without a revision, or from "any": first what there is.
            None => asked.is_none_or(|r| r == 0),
        };
        let (initial, sent) = if with_state {
            let listed = self.state().await?;
            (listed.0, listed.1)
        } else {
            (Vec::new(), asked.filter(|r| *r > 0).unwrap_or(newest))
        };
        let timeout = self
            .query
            .number("timeoutSeconds")?
            .filter(|s| *s > 0)
            .map_or(DEFAULT_TIMEOUT, Duration::from_secs);
        let now = Instant::now();
        let state = State {
            server: self.server.clone(),
            kind: Arc::clone(self.kind),
            namespace: self.path.namespace.clone(),
            selection,
            form: self.answer.form,
            include: self.include(),
            bookmarks,
            sent,
            revisions: self.server.store.subscribe(),
            deadline: now + timeout,
            next_bookmark: now + BOOKMARK_EVERY,
            initial: initial.into_iter(),
            end_of_initial: send_initial == Some(true),
            columns_sent: false,
            ended: false,
        };
        Ok((
            StatusCode::OK,
            [
                (CONTENT_TYPE, "application/json"),
                (CACHE_CONTROL, "no-cache, private"),
            ],
            Body::from_stream(events(state)),
        )
            .into_response())
    }

    fn check_initial(&self, send_initial: Option<bool>) -> ApiResult<()> {
        let matching = self.query.get("resourceVersionMatch");
        let fault = |field: &str, detail: &str| {
            Err(ApiError::invalid(
                "meta.k8s.io",
                "ListOptions",
                "",
                &[FieldError::forbidden(field, detail)],
            ))
        };
        let token = self.query.get("continue");
        let paged = token.is_some_and(|token| !token.is_empty());
        match (send_initial, matching) {
            // Pages are of lists; the sentence is that of a real API server, with or without a match.
            _ if paged => fault(
                "resourceVersionMatch",
                "resourceVersionMatch is forbidden when continue is provided",
            ),
            (None, Some(_)) => fault(
                "resourceVersionMatch",
                "resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided",
            ),
            (Some(_), other) if other != Some("NotOlderThan") => fault(
                "resourceVersionMatch",
                "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan",
            ),
            _ => Ok(()),
        }
    }

    /// What there is now.
    async fn state(&self) -> ApiResult<(Vec<Value>, u64)> {
        let query = self.query.clone().without(&[
            "limit",
            "continue",
            "resourceVersion",
            "resourceVersionMatch",
        ]);
        let call = Call {
            server: self.server,
            kind: self.kind,
            path: self.path.clone(),
            query,
            headers: self.headers.clone(),
            answer: self.answer,
        };
        let listed = call.listed().await?;
        Ok((listed.items, listed.revision))
    }
}

fn events(state: State) -> impl Stream<Item = Result<Bytes, Infallible>> {
    futures::stream::unfold(state, |mut state| async move {
        let bytes = state.next().await?;
        Some((Ok(bytes), state))
    })
}

impl State {
    /// The next bytes; None: the watch is over.
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if self.ended {
                return None;
            }
            if let Some(bytes) = self.initial_events() {
                return Some(bytes);
            }
            // Marks the newest revision as seen before the log is read: what comes later wakes.
            let newest = *self.revisions.borrow_and_update();
            if newest > self.sent {
                match self.read().await {
                    Ok(Some(bytes)) => return Some(bytes),
                    // Other kinds were written; perhaps there is more.
                    Ok(None) => continue,
                    Err(error) => {
                        self.ended = true;
                        return Some(line("ERROR", &error.status()));
                    }
                }
            }
            tokio::select! {
                changed = self.revisions.changed() => {
                    if changed.is_err() {
                        return None;
                    }
                }
                () = self.server.stopping.cancelled() => return None,
                () = tokio::time::sleep_until(self.deadline) => {
                    self.ended = true;
                    return self.bookmarks.then(|| self.bookmark(false));
                }
                () = tokio::time::sleep_until(self.next_bookmark), if self.bookmarks => {
                    self.next_bookmark += BOOKMARK_EVERY;
                    return Some(self.bookmark(false));
                }
            }
        }
    }

    fn initial_events(&mut self) -> Option<Bytes> {
        let batch: Vec<Value> = self.initial.by_ref().take(BATCH).collect();
        if !batch.is_empty() {
            let mut bytes = BytesMut::new();
            for object in batch {
                bytes.extend_from_slice(&self.event("ADDED", object));
            }
            return Some(bytes.freeze());
        }
        if std::mem::take(&mut self.end_of_initial) && self.bookmarks {
            return Some(self.bookmark(true));
        }
        None
    }

    async fn read(&mut self) -> ApiResult<Option<Bytes>> {
        let (records, complete) = self
            .server
            .store
            .events(Some(&self.kind.resource), self.sent, BATCH)
            .await
            .map_err(internal)?;
        let mut bytes = BytesMut::new();
        let as_stored =
            self.form == Form::Object && self.kind.view.is_none() && self.selection.is_everything();
        for record in &records {
            if as_stored {
                if self.is_here(record) {
                    stored_line(&mut bytes, record);
                }
            } else if let Some((type_, object)) = self.seen(record)? {
                bytes.extend_from_slice(&self.event(type_, object));
            }
        }
        self.sent = self.sent.max(complete);
        Ok((!bytes.is_empty()).then(|| bytes.freeze()))
    }

    fn is_here(&self, record: &Record) -> bool {
        self.namespace
            .as_ref()
            .is_none_or(|n| *n == record.key.namespace)
    }

    /// What a change is to this watch: objects come and go also by what the selectors say.
    fn seen(&self, record: &Record) -> ApiResult<Option<(&'static str, Value)>> {
        if !self.is_here(record) {
            return Ok(None);
        }
        let shown = |bytes: &[u8]| -> ApiResult<Value> {
            let mut object = parse(&record.key, bytes).map_err(internal)?;
            if let Some(view) = &self.kind.view {
                (view.show)(&mut object);
            }
            Ok(object)
        };
        let object = shown(&record.value)?;
        if self.selection.is_everything() {
            return Ok(Some((type_of(record), object)));
        }
        let before = match &record.previous {
            Some(bytes) => Some(shown(bytes)?),
            None => None,
        };
        let matched = before.as_ref().is_some_and(|o| self.selection.matches(o));
        let matches = !record.deleted && self.selection.matches(&object);
        Ok(match (matched, matches) {
            (false, true) => Some(("ADDED", object)),
            (true, true) => Some(("MODIFIED", object)),
            (true, false) => {
                // The last state that this watch has seen, with the revision of its leaving.
                let mut last = before.unwrap_or(object);
                crate::meta::metadata(&mut last).insert(
                    "resourceVersion".to_owned(),
                    record.revision.to_string().into(),
                );
                Some(("DELETED", last))
            }
            (false, false) => None,
        })
    }

    fn event(&mut self, type_: &str, object: Value) -> Bytes {
        let shown = match self.form {
            Form::Object => object,
            Form::Partial => table::partial(&object),
            Form::Table => {
                let metadata = json!({"resourceVersion": object["metadata"]["resourceVersion"]});
                let first = !std::mem::replace(&mut self.columns_sent, true);
                table::table(
                    &self.kind,
                    std::iter::once(&object),
                    &metadata,
                    self.include,
                    self.server.now(),
                    first,
                )
            }
        };
        line(type_, &shown)
    }

    fn bookmark(&mut self, end_of_initial: bool) -> Bytes {
        let mut object = json!({
            "kind": self.kind.kind,
            "apiVersion": self.kind.api_version(),
            "metadata": {"resourceVersion": self.sent.to_string()},
        });
        if end_of_initial {
            object["metadata"]["annotations"][INITIAL_EVENTS_END] = "true".into();
        }
        self.event("BOOKMARK", object)
    }
}

fn type_of(record: &Record) -> &'static str {
    match (record.created, record.deleted) {
        (_, true) => "DELETED",
        (true, false) => "ADDED",
        (false, false) => "MODIFIED",
    }
}

/// An event without its object being read.
fn stored_line(bytes: &mut BytesMut, record: &Record) {
    bytes.extend_from_slice(b"{\"type\":\"");
    bytes.extend_from_slice(type_of(record).as_bytes());
    bytes.extend_from_slice(b"\",\"object\":");
    bytes.extend_from_slice(&record.value);
    bytes.extend_from_slice(b"}\n");
}

fn line(type_: &str, object: &Value) -> Bytes {
    Bytes::from(format!("{{\"type\":\"{type_}\",\"object\":{object}}}\n"))
}

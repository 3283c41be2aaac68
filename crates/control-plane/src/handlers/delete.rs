//! delete and deletecollection.

use axum::response::Response;
use http::StatusCode;
use serde_json::{Value, json};

use super::read::items as shown_items;
use super::{Call, encode, internal};
use crate::decode;
use crate::error::{ApiError, ApiResult, Fault, FieldError};
use crate::meta::{self, FOREGROUND, ORPHAN};
use crate::registry::Kind;
use crate::server::Server;
use crate::storage::{Expect, Key, Record, Write, WriteError};

/// Tries again when another write came between.
const RETRIES: usize = 16;

/// Namespaces that are always there.
const IMMORTAL: &[&str] = &["default"];

/// What happens to dependents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Propagation {
    Background,
    Foreground,
    Orphan,
}

/// DeleteOptions, from the body and the query.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Options {
    propagation: Option<Propagation>,
    uid: Option<String>,
    revision: Option<String>,
    dry_run: bool,
}

impl Call<'_> {
    fn delete_options(&self, bytes: &[u8]) -> ApiResult<Options> {
        let mut options = if bytes.is_empty() {
            Value::Null
        } else {
            decode::object(&self.headers, bytes)?.value
        };
        let given = options["kind"].as_str().unwrap_or_default();
        if !given.is_empty() && given != "DeleteOptions" {
            return Err(ApiError::bad_request(format!(
                "no kind {given:?} is registered for version {:?} in scheme \"pkg/runtime/scheme.go:111\"",
                options["apiVersion"].as_str().unwrap_or_default()
            )));
        }
        check_options(&options)?;
        let policy = options["propagationPolicy"]
            .as_str()
            .or_else(|| self.query.get("propagationPolicy"));
        let propagation = match policy {
            None => match options["orphanDependents"].as_bool() {
                Some(true) => Some(Propagation::Orphan),
                Some(false) => Some(Propagation::Background),
                None => None,
            },
            Some("Background") => Some(Propagation::Background),
            Some("Foreground") => Some(Propagation::Foreground),
            Some("Orphan") => Some(Propagation::Orphan),
            Some(other) => {
                return Err(ApiError::invalid(
                    "meta.k8s.io",
                    "DeleteOptions",
                    "",
                    &[FieldError::new(
                        "propagationPolicy",
                        Fault::NotSupported,
                        Some(other.into()),
                        "supported values: \"Foreground\", \"Background\", \"Orphan\", \"nil\"",
                    )],
                ));
            }
        };
        let dry_run = self.query.dry_run("DeleteOptions")?
            || options["dryRun"]
                .as_array()
                .is_some_and(|all| all.iter().any(|v| v == "All"));
        let preconditions = options["preconditions"].take();
        let condition = |field: &str| preconditions[field].as_str().map(str::to_owned);
        Ok(Options {
            propagation,
            uid: condition("uid"),
            revision: condition("resourceVersion"),
            dry_run,
        })
    }

    pub(super) async fn delete(&self, name: &str, bytes: &[u8]) -> ApiResult<Response> {
        let options = self.delete_options(bytes)?;
        let (object, gone) = self.delete_one(&self.key(name), &options).await?;
        if !gone {
            return Ok(self.reply(StatusCode::OK, object, &[]));
        }
        let mut details = crate::error::resource_details(self.kind, name);
        details["uid"] = meta::uid(&object).into();
        let status = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {},
            "status": "Success", "details": details,
        });
        Ok(encode(StatusCode::OK, &status, self.answer.encoding))
    }

    /// Deletes, or marks for deletion; what it is then, and whether it is gone.
    async fn delete_one(&self, key: &Key, options: &Options) -> ApiResult<(Value, bool)> {
        for _ in 0..RETRIES {
            let record = self.find(key).await?;
            let object = record.object().map_err(internal)?;
            self.check_preconditions(&object, options)?;
            match mark(
                self.server,
                self.kind,
                &record,
                object,
                options.propagation,
                options.dry_run,
            )
            .await
            {
                Err(e) if e.reason == "Conflict" && options.revision.is_none() => {}
                other => {
                    let (mut object, gone) = other?;
                    if let Some(view) = &self.kind.view {
                        (view.show)(&mut object);
                    }
                    return Ok((object, gone));
                }
            }
        }
        Err(ApiError::modified(self.kind, &key.name))
    }

    fn check_preconditions(&self, object: &Value, options: &Options) -> ApiResult<()> {
        let name = meta::name(object);
        let (uid, revision) = (meta::uid(object), meta::text(object, "resourceVersion"));
        if let Some(wanted) = options.uid.as_deref().filter(|w| *w != uid) {
            return Err(ApiError::precondition(
                self.kind,
                name,
                format!(
                    "the UID in the precondition ({wanted}) does not match the UID in record ({uid}). The object might have been deleted and then recreated"
                ),
            ));
        }
        if let Some(wanted) = options.revision.as_deref().filter(|w| *w != revision) {
            return Err(ApiError::precondition(
                self.kind,
                name,
                format!(
                    "the ResourceVersion in the precondition ({wanted}) does not match the ResourceVersion in record ({revision}). The object might have been modified"
                ),
            ));
        }
        Ok(())
    }

    pub(super) async fn delete_collection(&self, bytes: &[u8]) -> ApiResult<Response> {
        if self.kind.namespaced && self.path.namespace.is_none() {
            return Err(ApiError::method_not_allowed_here());
        }
        if self.kind.plural == "namespaces" {
            return Err(ApiError::method_not_allowed(self.kind, "deletecollection"));
        }
        let options = self.delete_options(bytes)?;
        let listed = self.listed().await?;
        let metadata = self.list_metadata(&listed);
        let mut items = Vec::with_capacity(listed.items.len());
        // The answer shows them as they were.
        for object in listed.items {
            let key = self.key(meta::name(&object));
            match self.delete_one(&key, &options).await {
                Ok(_) => items.push(object),
                // Gone already: what was wanted.
                Err(e) if e.code == 404 => {}
                Err(e) => return Err(e),
            }
        }
        let list = json!({
            "kind": self.kind.list_kind,
            "apiVersion": self.kind.api_version(),
            "metadata": metadata,
            "items": shown_items(items, self.kind.custom),
        });
        Ok(encode(StatusCode::OK, &list, self.answer.encoding))
    }
}

/// The rules of DeleteOptions: what cannot be meant must not delete anything.
fn check_options(options: &Value) -> ApiResult<()> {
    let mut faults = Vec::new();
    if !options["propagationPolicy"].is_null() && !options["orphanDependents"].is_null() {
        faults.push(FieldError::invalid(
            "propagationPolicy",
            options["propagationPolicy"].clone(),
            "orphanDependents and deletionPropagation cannot be both set",
        ));
    }
    let dry_run = options["dryRun"].as_array();
    if dry_run.is_some_and(|all| all.iter().any(|v| v != "All")) {
        faults.push(FieldError::new(
            "dryRun",
            Fault::NotSupported,
            Some(options["dryRun"].clone()),
            "supported values: \"All\"",
        ));
    }
    if faults.is_empty() {
        Ok(())
    } else {
        Err(ApiError::invalid(
            "meta.k8s.io",
            "DeleteOptions",
            "",
            &faults,
        ))
    }
}

/// Removes an object at once when nothing holds it, or gives it a deletionTimestamp. `object` is in
/// the stored form.
pub(crate) async fn mark(
    server: &Server,
    kind: &Kind,
    record: &Record,
    mut object: Value,
    propagation: Option<Propagation>,
    dry_run: bool,
) -> ApiResult<(Value, bool)> {
    let before = object.clone();
    let mut finalizers: Vec<String> = meta::finalizers(&object)
        .into_iter()
        .map(str::to_owned)
        .collect();
    if let Some(propagation) = propagation {
        finalizers.retain(|f| f != FOREGROUND && f != ORPHAN);
        match propagation {
            Propagation::Background => {}
            Propagation::Foreground => finalizers.push(FOREGROUND.to_owned()),
            Propagation::Orphan => finalizers.push(ORPHAN.to_owned()),
        }
    }
    let names: Vec<&str> = finalizers.iter().map(String::as_str).collect();
    meta::set_finalizers(&mut object, &names);
    // A namespace stays until its content is gone.
    let holds_content = kind.plural == "namespaces" && kind.group.is_empty();
    if holds_content && IMMORTAL.contains(&record.key.name.as_str()) {
        return Err(ApiError::forbidden(
            kind,
            &record.key.name,
            "this namespace may not be deleted",
        ));
    }
    if names.is_empty() && !holds_content {
        if dry_run {
            return Ok((object, true));
        }
        let gone = remove(server, kind, &record.key, record.revision, object).await?;
        return Ok((gone.object().map_err(internal)?, true));
    }
    if !meta::is_deleting(&object) {
        let now = meta::time(server.now());
        let metadata = meta::metadata(&mut object);
        metadata.insert("deletionTimestamp".to_owned(), now);
        metadata.insert("deletionGracePeriodSeconds".to_owned(), 0.into());
        if let Some(generation) = metadata.get("generation").and_then(Value::as_i64) {
            metadata.insert("generation".to_owned(), (generation + 1).into());
        }
        if holds_content {
            let metadata = meta::metadata(&mut object);
            metadata.remove("deletionGracePeriodSeconds");
            object["status"]["phase"] = "Terminating".into();
        }
    }
    if object == before || dry_run {
        return Ok((object, false));
    }
    let write = Write {
        key: record.key.clone(),
        expect: Expect::Revision(record.revision),
        object,
        delete: false,
        guard: None,
    };
    let stored = server
        .store
        .write(write)
        .await
        .map_err(|e| refused(kind, &record.key, e))?;
    Ok((stored.object().map_err(internal)?, false))
}

/// Takes an object out of the store.
pub(crate) async fn remove(
    server: &Server,
    kind: &Kind,
    key: &Key,
    revision: u64,
    object: Value,
) -> ApiResult<Record> {
    let write = Write {
        key: key.clone(),
        expect: Expect::Revision(revision),
        object,
        delete: true,
        guard: None,
    };
    server
        .store
        .write(write)
        .await
        .map_err(|e| refused(kind, key, e))
}

fn refused(kind: &Kind, key: &Key, error: WriteError) -> ApiError {
    match error {
        WriteError::Changed(None) => ApiError::not_found(kind, &key.name),
        WriteError::Changed(Some(_)) | WriteError::Guard => ApiError::modified(kind, &key.name),
        WriteError::Store(e) => internal(e),
    }
}

//! create, update and patch.

use std::sync::Arc;

use axum::response::Response;
use http::StatusCode;
use serde_json::Value;

use super::{Call, internal};
use crate::admission;
use crate::apply;
use crate::decode;
use crate::error::{ApiError, ApiResult, FieldError};
use crate::managed::{self, Operation, Writer};
use crate::meta;
use crate::patch::{self, Patch};
use crate::registry::Kind;
use crate::request::{FieldValidation, manager};
use crate::storage::{Expect, Key, Record, Write, WriteError};

/// Tries again when another write came between, for writes that name no revision.
const RETRIES: usize = 16;
/// Generated names that are taken are replaced so often.
const NAME_RETRIES: usize = 8;

/// An update, worked out.
pub(super) struct Updated {
    pub object: Value,
    pub warnings: Vec<String>,
}

impl Call<'_> {
    pub(super) async fn create(&self, bytes: &[u8]) -> ApiResult<Response> {
        self.query.check_write("CreateOptions", false)?;
        let dry_run = self.query.dry_run("CreateOptions")?;
        let validation = self.query.field_validation("CreateOptions")?;
        let (mut object, duplicates) = self.decode(bytes)?;
        let mut warnings =
            admission::shape(self.kind, &mut object, &duplicates, validation, false)?;
        warnings.extend(meta::drop_repeated_owners(&mut object));
        let writer = self.writer(Operation::Update, false);
        let (object, more) = self
            .create_object(object, &writer, dry_run)
            .await
            .map_err(|e| e.with_warnings(&warnings))?;
        warnings.extend(more);
        Ok(self.reply(StatusCode::CREATED, object, &warnings))
    }

    /// A whole object of this kind, and what came twice in it.
    fn decode(&self, bytes: &[u8]) -> ApiResult<(Value, Vec<String>)> {
        let body = decode::object(&self.headers, bytes).map_err(|e| {
            if e.message.starts_with("couldn't get version/kind") {
                admission::unrecognized(self.kind, &e.message, bytes)
            } else {
                e
            }
        })?;
        let mut object = body.value;
        if object.is_object() {
            admission::check_kind(self.kind, &object, bytes)?;
        }
        admission::type_meta(self.kind, &mut object)?;
        Ok((object, body.duplicates))
    }

    pub(super) fn writer(&self, operation: Operation, status: bool) -> Writer {
        Writer {
            manager: manager(&self.query, &self.headers),
            operation,
            api_version: self.kind.api_version(),
            subresource: status.then(|| "status".to_owned()),
            time: self.server.now(),
        }
    }

    /// Creates a shaped object; what was stored, and warnings.
    async fn create_object(
        &self,
        mut object: Value,
        writer: &Writer,
        dry_run: bool,
    ) -> ApiResult<(Value, Vec<String>)> {
        if !meta::text(&object, "resourceVersion").is_empty() {
            return Err(ApiError::untyped(
                "resourceVersion should not be set on objects to be created",
            ));
        }
        let given = meta::namespace(&object).to_owned();
        meta::wipe_system_fields(&mut object);
        if self.kind.namespaced {
            let namespace = self
                .path
                .namespace
                .as_deref()
                .ok_or_else(ApiError::method_not_allowed_here)?;
            if !given.is_empty() && given != namespace {
                return Err(ApiError::bad_request(
                    "the namespace of the provided object does not match the namespace sent on the request",
                ));
            }
            meta::metadata(&mut object).insert("namespace".to_owned(), namespace.into());
        } else {
            meta::metadata(&mut object).remove("namespace");
        }
        let generate = meta::text(&object, "generateName").to_owned();
        let generated = meta::name(&object).is_empty() && !generate.is_empty();
        let mut tries = 0;
        loop {
            let mut attempt = object.clone();
            if generated {
                let name = meta::generated_name(&generate);
                meta::metadata(&mut attempt).insert("name".to_owned(), name.into());
            }
            let result = self.create_once(attempt, writer, dry_run).await;
            tries += 1;
            match result {
                Err(e) if e.reason == "AlreadyExists" && generated && tries < NAME_RETRIES => {}
                other => return other,
            }
        }
    }

    async fn create_once(
        &self,
        mut object: Value,
        writer: &Writer,
        dry_run: bool,
    ) -> ApiResult<(Value, Vec<String>)> {
        let kind = self.kind;
        let guard = self.namespace_guard(&object).await?;
        admission::fill_defaults(kind, &mut object);
        if kind.status
            && kind.custom
            && let Value::Object(map) = &mut object
        {
            map.remove("status");
        }
        meta::fill_system_fields(kind, &mut object, self.server.now());
        (kind.strategy.prepare)(&mut object, None);
        managed::track(kind, None, &mut object, writer);
        let faults = meta::validate(kind, &object);
        let (faults, warnings) = admission::validate(kind, &object, None, faults);
        if !faults.is_empty() {
            return Err(ApiError::invalid(
                &kind.group,
                &kind.kind,
                meta::name(&object),
                &faults,
            ));
        }
        let key = self.key(meta::name(&object));
        if dry_run {
            return match self.server.store.get(&key).await.map_err(internal)? {
                Some(_) => Err(ApiError::already_exists(kind, &key.name)),
                None => Ok((object, warnings)),
            };
        }
        match self.store(&key, Expect::Absent, object, guard).await {
            Ok(record) => Ok((self.shown(&record)?, warnings)),
            Err(mut e) if e.reason == "AlreadyExists" => {
                let there = self.server.store.get(&key).await.map_err(internal)?;
                let going = there
                    .and_then(|r| r.object().ok())
                    .is_some_and(|o| meta::is_deleting(&o));
                if going {
                    e.message = format!("object is being deleted: {}", e.message);
                }
                Err(e)
            }
            Err(e) => Err(e),
        }
    }

    /// Writes an object in its stored form.
    async fn store(
        &self,
        key: &Key,
        expect: Expect,
        mut object: Value,
        guard: Option<(Key, u64)>,
    ) -> ApiResult<Record> {
        if let Some(view) = &self.kind.view {
            (view.store)(&mut object);
        }
        let write = Write {
            key: key.clone(),
            expect,
            object,
            delete: false,
            guard,
        };
        self.server.store.write(write).await.map_err(|e| match e {
            WriteError::Changed(Some(_)) if expect == Expect::Absent => {
                ApiError::already_exists(self.kind, &key.name)
            }
            WriteError::Changed(Some(_)) => ApiError::modified(self.kind, &key.name),
            WriteError::Changed(None) => ApiError::not_found(self.kind, &key.name),
            WriteError::Guard => ApiError::namespace_not_found(&key.namespace),
            WriteError::Store(e) => internal(e),
        })
    }

    /// The namespace that an object is created into, which must exist and stay until it is written.
    async fn namespace_guard(&self, object: &Value) -> ApiResult<Option<(Key, u64)>> {
        if !self.kind.namespaced {
            return Ok(None);
        }
        let namespace = self.namespace();
        let key = Key {
            resource: "namespaces".into(),
            namespace: String::new(),
            name: namespace.to_owned(),
        };
        let record = self
            .server
            .store
            .get(&key)
            .await
            .map_err(internal)?
            .ok_or_else(|| ApiError::namespace_not_found(namespace))?;
        if meta::is_deleting(&record.object().map_err(internal)?) {
            return Err(ApiError::namespace_terminating(
                self.kind,
                meta::name(object),
                namespace,
            ));
        }
        Ok(Some((key, record.revision)))
    }

    pub(super) async fn put(&self, name: &str, status: bool, bytes: &[u8]) -> ApiResult<Response> {
        self.query.check_write("UpdateOptions", false)?;
        let dry_run = self.query.dry_run("UpdateOptions")?;
        let validation = self.query.field_validation("UpdateOptions")?;
        let (mut object, duplicates) = self.decode(bytes)?;
        let mut warnings =
            admission::shape(self.kind, &mut object, &duplicates, validation, false)?;
        warnings.extend(meta::drop_repeated_owners(&mut object));
        self.check_named(name, &mut object)?;
        let writer = self.writer(Operation::Update, status);
        let unconditional = meta::text(&object, "resourceVersion").is_empty();
        let result = self
            .update(name, status, &writer, dry_run, unconditional, |_| {
                Ok((object.clone(), Vec::new()))
            })
            .await
            .map_err(|e| e.with_warnings(&warnings))?;
        let mut all = warnings;
        all.extend(result.warnings);
        Ok(self.reply(StatusCode::OK, result.object, &all))
    }

    /// As [`Self::check_identity`], where the body must say its name.
    fn check_named(&self, name: &str, object: &mut Value) -> ApiResult<()> {
        if meta::name(object).is_empty() {
            return Err(ApiError::bad_request(format!(
                "the name of the object ({name} based on URL) was undeterminable: name must be provided"
            )));
        }
        self.check_identity(name, object)
    }

    /// Name and namespace of the body must be those of the path.
    fn check_identity(&self, name: &str, object: &mut Value) -> ApiResult<()> {
        let own = meta::name(object).to_owned();
        if own.is_empty() {
            meta::metadata(object).insert("name".to_owned(), name.into());
        } else if own != name {
            return Err(ApiError::bad_request(format!(
                "the name of the object ({own}) does not match the name on the URL ({name})"
            )));
        }
        let namespace = meta::namespace(object).to_owned();
        if self.kind.namespaced {
            if namespace.is_empty() {
                let namespace = self.namespace();
                meta::metadata(object).insert("namespace".to_owned(), namespace.into());
            } else if namespace != self.namespace() {
                return Err(ApiError::bad_request(
                    "the namespace of the provided object does not match the namespace sent on the request",
                ));
            }
        } else {
            meta::metadata(object).remove("namespace");
        }
        Ok(())
    }

    pub(super) async fn patch(
        &self,
        name: &str,
        status: bool,
        bytes: &[u8],
    ) -> ApiResult<Response> {
        let apply = decode::media_type(&self.headers) == patch::APPLY_YAML;
        self.query.check_write("PatchOptions", apply)?;
        let dry_run = self.query.dry_run("PatchOptions")?;
        let validation = self.query.field_validation("PatchOptions")?;
        let kind = self.kind;
        let accepted = if kind.strategy.strategic_patch {
            "application/json-patch+json, application/merge-patch+json, application/strategic-merge-patch+json, application/apply-patch+yaml"
        } else {
            "application/json-patch+json, application/merge-patch+json, application/apply-patch+yaml"
        };
        let mut duplicates = Vec::new();
        let mut decoded = || -> ApiResult<Value> {
            let body = patch::document(bytes)?;
            duplicates = body.duplicates;
            Ok(body.value)
        };
        let patch = match decode::media_type(&self.headers) {
            patch::JSON_PATCH => patch::json(bytes)?,
            patch::MERGE_PATCH => Patch::Merge(decoded()?),
            patch::STRATEGIC_PATCH if kind.strategy.strategic_patch => Patch::Strategic(decoded()?),
            patch::APPLY_YAML => return self.apply(name, status, bytes, dry_run, validation).await,
            _ => return Err(ApiError::unsupported_media_type(accepted)),
        };
        let writer = self.writer(Operation::Update, status);
        let result = self
            .update(name, status, &writer, dry_run, true, |current| {
                let mut object = current.clone();
                patch.apply(&mut object, kind.schema())?;
                admission::type_meta(kind, &mut object)?;
                let mut warnings =
                    admission::shape(kind, &mut object, &duplicates, validation, true)?;
                warnings.extend(meta::drop_repeated_owners(&mut object));
                self.check_named(name, &mut object)?;
                same_uid(kind, &object, current)?;
                Ok((object, warnings))
            })
            .await?;
        Ok(self.reply(StatusCode::OK, result.object, &result.warnings))
    }

    /// Server-side apply: creates or updates.
    async fn apply(
        &self,
        name: &str,
        status: bool,
        bytes: &[u8],
        dry_run: bool,
        validation: FieldValidation,
    ) -> ApiResult<Response> {
        let kind = self.kind;
        let body = decode::yaml(bytes)?;
        let mut applied = body.value;
        if kind.custom && applied["kind"].is_null() {
            return Err(ApiError::bad_request(format!(
                "invalid object type: {}, Kind=",
                applied["apiVersion"].as_str().unwrap_or_default()
            )));
        }
        let given_namespace = meta::namespace(&applied).to_owned();
        admission::type_meta(kind, &mut applied)?;
        self.check_identity(name, &mut applied)?;
        apply::check_typed(kind, &applied, &given_namespace)?;
        let writer = Writer {
            manager: self
                .query
                .get("fieldManager")
                .ok_or_else(apply::manager_missing)?
                .to_owned(),
            ..self.writer(Operation::Apply, status)
        };
        let force = self.query.flag("force");
        let warnings = admission::shape(kind, &mut applied, &body.duplicates, validation, true)?;
        apply::check(&applied)?;
        for _ in 0..RETRIES {
            let exists = self
                .server
                .store
                .get(&self.key(name))
                .await
                .map_err(internal)?
                .is_some();
            if !exists {
                if status {
                    return Err(ApiError::not_found(kind, name));
                }
                let uid = meta::uid(&applied);
                if !uid.is_empty() {
                    return Err(ApiError::conflict(
                        kind,
                        name,
                        format!(
                            "uid mismatch: the provided object specified uid {uid}, and no existing object was found"
                        ),
                    ));
                }
                let nothing = serde_json::json!({});
                let mut object = apply::merge(kind, &nothing, &applied, &writer, force)?;
                // There is nothing that it could be the revision of.
                meta::metadata(&mut object).remove("resourceVersion");
                match self.create_object(object, &writer, dry_run).await {
                    // Somebody else was first: it is an update now.
                    Err(e) if e.reason == "AlreadyExists" => continue,
                    Err(e) => return Err(e),
                    Ok((object, more)) => {
                        let all: Vec<String> = warnings.into_iter().chain(more).collect();
                        return Ok(self.reply(StatusCode::CREATED, object, &all));
                    }
                }
            }
            let result = self
                .update(name, status, &writer, dry_run, true, |current| {
                    let merged = apply::merge(kind, current, &applied, &writer, force)?;
                    Ok((merged, Vec::new()))
                })
                .await;
            match result {
                Err(e) if e.code == 404 => {}
                Err(e) => return Err(e),
                Ok(result) => {
                    let all: Vec<String> = warnings.into_iter().chain(result.warnings).collect();
                    return Ok(self.reply(StatusCode::OK, result.object, &all));
                }
            }
        }
        Err(ApiError::modified(kind, name))
    }

    /// Reads, changes and writes; again when another write came between and `retry` allows it.
    pub(super) async fn update(
        &self,
        name: &str,
        status: bool,
        writer: &Writer,
        dry_run: bool,
        retry: bool,
        change: impl Fn(&Value) -> ApiResult<(Value, Vec<String>)>,
    ) -> ApiResult<Updated> {
        let key = self.key(name);
        for _ in 0..RETRIES {
            let record = self.find(&key).await?;
            let old = self.shown(&record)?;
            let (object, mut warnings) = change(&old)?;
            let (object, more) = self.settle(object, &old, status, writer)?;
            warnings.extend(more);
            let unchanged = managed::same(&object, &old);
            if unchanged {
                return Ok(Updated {
                    object: old,
                    warnings,
                });
            }
            let gone = meta::is_deleting(&object) && meta::finalizers(&object).is_empty();
            if dry_run {
                return Ok(Updated { object, warnings });
            }
            let result = if gone {
                // Who watches sees the object that goes as it was; who released it sees its change.
                match self.store_deletion(&key, record.revision, old).await {
                    Ok(_) => return Ok(Updated { object, warnings }),
                    Err(e) => Err(e),
                }
            } else {
                self.store(&key, Expect::Revision(record.revision), object, None)
                    .await
            };
            match result {
                Ok(record) => {
                    return Ok(Updated {
                        object: self.shown(&record)?,
                        warnings,
                    });
                }
                Err(e) if e.reason == "Conflict" && retry => {}
                Err(e) => return Err(e),
            }
        }
        Err(ApiError::modified(self.kind, name))
    }

    async fn store_deletion(
        &self,
        key: &Key,
        revision: u64,
        mut object: Value,
    ) -> ApiResult<Record> {
        if let Some(view) = &self.kind.view {
            (view.store)(&mut object);
        }
        super::remove(self.server, self.kind, key, revision, object).await
    }

    /// From what was asked for to what is stored, by the rules of updates.
    fn settle(
        &self,
        mut object: Value,
        old: &Value,
        status: bool,
        writer: &Writer,
    ) -> ApiResult<(Value, Vec<String>)> {
        let kind: &Arc<_> = self.kind;
        let name = meta::name(old).to_owned();
        let uid = meta::uid(&object).to_owned();
        if !uid.is_empty() && uid != meta::uid(old) {
            return Err(ApiError::conflict(
                kind,
                &name,
                format!(
                    "StorageError: invalid object, Code: 4, Key: /registry/{}/{}/{name}, ResourceVersion: 0, AdditionalErrorMsg: Precondition failed: UID in precondition: {uid}, UID in object meta: {}",
                    if kind.group.is_empty() {
                        kind.plural.clone()
                    } else {
                        format!("{}/{}", kind.group, kind.plural)
                    },
                    self.namespace(),
                    meta::uid(old)
                ),
            ));
        }
        let revision = meta::text(&object, "resourceVersion").to_owned();
        if !revision.is_empty() && revision.parse::<u64>().is_err() {
            return Err(ApiError::untyped(format!(
                "strconv.ParseUint: parsing {revision:?}: invalid syntax"
            )));
        }
        if revision.is_empty() || revision == "0" {
            if !kind.strategy.unconditional_update && writer.operation == Operation::Update {
                // kube-apiserver names the resource here, and not the kind.
                return Err(ApiError::invalid(
                    &kind.group,
                    &kind.plural,
                    &name,
                    &[FieldError::invalid(
                        "metadata.resourceVersion",
                        0,
                        "must be specified for an update",
                    )],
                ));
            }
        } else if revision != meta::text(old, "resourceVersion") {
            return Err(ApiError::modified(kind, &name));
        }
        meta::metadata(&mut object).insert(
            "resourceVersion".to_owned(),
            old["metadata"]["resourceVersion"].clone(),
        );
        meta::carry_over(&mut object, old);
        if status {
            object = status_only(object, old);
        } else if kind.status {
            keep(&mut object, old, "status");
        }
        admission::fill_defaults(kind, &mut object);
        if !status {
            (kind.strategy.prepare)(&mut object, Some(old));
            if kind.strategy.generation {
                meta::count_generation(&mut object, old);
            }
        }
        managed::track(kind, Some(old), &mut object, writer);
        let faults = meta::validate_update(kind, &object, old);
        let (faults, warnings) = admission::validate(kind, &object, Some(old), faults);
        if faults.is_empty() {
            Ok((object, warnings))
        } else {
            Err(ApiError::invalid(&kind.group, &kind.kind, &name, &faults))
        }
    }
}

/// A patch cannot make an object another one.
fn same_uid(kind: &Kind, object: &Value, old: &Value) -> ApiResult<()> {
    let uid = meta::uid(object);
    if uid.is_empty() || uid == meta::uid(old) {
        return Ok(());
    }
    let fault = FieldError::invalid("metadata.uid", uid, "field is immutable");
    Err(ApiError::invalid(
        &kind.group,
        &kind.kind,
        meta::name(old),
        // kube-apiserver finds it twice, by the rules of metadata and by those of the kind.
        &[fault.clone(), fault],
    ))
}

/// A status update changes the status, and who manages it, and nothing else.
fn status_only(object: Value, old: &Value) -> Value {
    let mut kept = old.clone();
    let managed = object["metadata"].get("managedFields").cloned();
    if let (Value::Object(kept), Value::Object(mut object)) = (&mut kept, object) {
        match object.remove("status") {
            Some(status) => kept.insert("status".to_owned(), status),
            None => kept.remove("status"),
        };
    }
    let metadata = meta::metadata(&mut kept);
    match managed {
        Some(managed) => metadata.insert("managedFields".to_owned(), managed),
        None => metadata.remove("managedFields"),
    };
    kept
}

fn keep(object: &mut Value, old: &Value, field: &str) {
    if let Value::Object(map) = object {
        match old.get(field) {
            Some(value) => map.insert(field.to_owned(), value.clone()),
            None => map.remove(field),
        };
    }
}

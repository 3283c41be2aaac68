//! What a cluster's controllers would do: dependents follow their owners, namespaces are emptied,
//! Events expire, history is forgotten.
//!
//! One task follows the revision log, the same way a watch does; another ticks.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::time::MissedTickBehavior;

use crate::error::{ApiError, ApiResult};
use crate::handlers::{Propagation, internal, mark, remove};
use crate::meta::{self, FOREGROUND, ORPHAN};
use crate::registry::Kind;
use crate::server::Server;
use crate::storage::{Expect, Key, Range, Record, StoreError, Write, WriteError, parse};

const BATCH: usize = 256;
/// Tries again when another write came between.
const RETRIES: usize = 16;
/// Pause after a fault of the store.
const PAUSE: Duration = Duration::from_secs(1);

/// Follows the log until the server stops.
pub(crate) async fn follow(server: Server, mut seen: u64) {
    let mut revisions = server.store.subscribe();
    if let Err(error) = catch_up(&server).await {
        tracing::warn!("what was left to collect from before could not be looked up: {error}");
    }
    loop {
        let newest = *revisions.borrow_and_update();
        if newest > seen {
            match server.store.events(None, seen, BATCH).await {
                Ok((records, complete)) => {
                    for record in &records {
                        if let Err(error) = collect(&server, record).await {
                            tracing::warn!(
                                resource = &*record.key.resource,
                                namespace = record.key.namespace,
                                name = record.key.name,
                                "dependents could not be collected: {error}"
                            );
                        }
                    }
                    seen = complete;
                    continue;
                }
                Err(StoreError::Closed) => return,
                Err(StoreError::Compacted { .. }) => {
                    // Too far behind to read on: look at everything instead.
                    seen = newest;
                    if let Err(error) = catch_up(&server).await {
                        tracing::warn!("collection failed: {error}");
                    }
                    continue;
                }
                Err(error) => {
                    tracing::warn!("the revision log could not be read: {error}");
                    tokio::select! {
                        () = server.stopping.cancelled() => return,
                        () = tokio::time::sleep(PAUSE) => continue,
                    }
                }
            }
        }
        tokio::select! {
            () = server.stopping.cancelled() => return,
            changed = revisions.changed() => if changed.is_err() { return },
        }
    }
}

/// What an earlier run has left undone.
async fn catch_up(server: &Server) -> ApiResult<()> {
    for uid in server.store.missing_owners().await.map_err(internal)? {
        release_dependents(server, &uid).await?;
    }
    for key in server.store.deleting().await.map_err(internal)? {
        if let Some(record) = server.store.get(&key).await.map_err(internal)? {
            let object = record.object().map_err(internal)?;
            being_deleted(server, &key, &object).await?;
        }
    }
    Ok(())
}

async fn collect(server: &Server, record: &Record) -> ApiResult<()> {
    let object = parse(&record.key, &record.value).map_err(internal)?;
    if record.deleted {
        release_dependents(server, meta::uid(&object)).await?;
        for owner in owners(&object) {
            if let Some(key) = server.store.by_uid(owner).await.map_err(internal)?
                && let Some(owner) = server.store.get(&key).await.map_err(internal)?
            {
                let owner = owner.object().map_err(internal)?;
                being_deleted(server, &key, &owner).await?;
            }
        }
        if !record.key.namespace.is_empty() {
            empty_namespace(server, &record.key.namespace).await?;
        }
        return Ok(());
    }
    if meta::is_deleting(&object) {
        return being_deleted(server, &record.key, &object).await;
    }
    let changed = record
        .previous
        .as_ref()
        .and_then(|p| parse(&record.key, p).ok())
        .is_none_or(|p| p["metadata"]["ownerReferences"] != object["metadata"]["ownerReferences"]);
    if changed && !owners(&object).is_empty() {
        check_owners(server, &record.key).await?;
    }
    Ok(())
}

fn owners(object: &Value) -> Vec<&str> {
    object["metadata"]["ownerReferences"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|r| r["uid"].as_str())
        .collect()
}

/// An object with a deletionTimestamp: empties a namespace, and works off the finalizers that are
/// the collector's.
async fn being_deleted(server: &Server, key: &Key, object: &Value) -> ApiResult<()> {
    if !meta::is_deleting(object) {
        return Ok(());
    }
    if &*key.resource == "namespaces" {
        return empty_namespace(server, &key.name).await;
    }
    let finalizers = meta::finalizers(object);
    let uid = meta::uid(object);
    if finalizers.contains(&ORPHAN) {
        for dependent in server.store.dependents(uid).await.map_err(internal)? {
            change(server, &dependent, |object| {
                drop_owner(object, uid);
                true
            })
            .await?;
        }
        return drop_finalizer(server, key, ORPHAN).await;
    }
    if finalizers.contains(&FOREGROUND) {
        let mut blocking = false;
        for dependent in server.store.dependents(uid).await.map_err(internal)? {
            let Some(record) = server.store.get(&dependent).await.map_err(internal)? else {
                continue;
            };
            let object = record.object().map_err(internal)?;
            blocking |= object["metadata"]["ownerReferences"]
                .as_array()
                .into_iter()
                .flatten()
                .any(|r| r["uid"] == uid && r["blockOwnerDeletion"] == true);
            delete(server, &dependent, Propagation::Foreground).await?;
        }
        let left = !server
            .store
            .dependents(uid)
            .await
            .map_err(internal)?
            .is_empty();
        if !(blocking && left) {
            return drop_finalizer(server, key, FOREGROUND).await;
        }
    }
    Ok(())
}

/// The owner with this uid is gone.
async fn release_dependents(server: &Server, uid: &str) -> ApiResult<()> {
    for key in server.store.dependents(uid).await.map_err(internal)? {
        check_owners(server, &key).await?;
    }
    Ok(())
}

/// Deletes an object none of whose owners exist; drops references to those that do not.
async fn check_owners(server: &Server, key: &Key) -> ApiResult<()> {
    let Some(record) = server.store.get(key).await.map_err(internal)? else {
        return Ok(());
    };
    let object = record.object().map_err(internal)?;
    let mut missing = Vec::new();
    let mut present = false;
    for reference in object["metadata"]["ownerReferences"]
        .as_array()
        .into_iter()
        .flatten()
    {
        let uid = reference["uid"].as_str().unwrap_or_default();
        // An owner of a kind that is not served may live anywhere; it is nothing to judge.
        let served = server
            .registry
            .by_kind(
                reference["apiVersion"].as_str().unwrap_or_default(),
                reference["kind"].as_str().unwrap_or_default(),
            )
            .is_some();
        if !served || server.store.uid_exists(uid).await.map_err(internal)? {
            present = true;
        } else {
            missing.push(uid.to_owned());
        }
    }
    if missing.is_empty() {
        return Ok(());
    }
    if present {
        return change(server, key, |object| {
            for uid in &missing {
                drop_owner(object, uid);
            }
            true
        })
        .await;
    }
    tracing::debug!(
        resource = &*key.resource,
        namespace = key.namespace,
        name = key.name,
        "deleted with its owner"
    );
    delete(server, key, Propagation::Background).await
}

fn drop_owner(object: &mut Value, uid: &str) {
    let metadata = meta::metadata(object);
    if let Some(Value::Array(owners)) = metadata.get_mut("ownerReferences") {
        owners.retain(|o| o["uid"] != uid);
        if owners.is_empty() {
            metadata.remove("ownerReferences");
        }
    }
}

async fn drop_finalizer(server: &Server, key: &Key, finalizer: &str) -> ApiResult<()> {
    change(server, key, |object| {
        let left: Vec<String> = meta::finalizers(object)
            .into_iter()
            .filter(|f| *f != finalizer)
            .map(str::to_owned)
            .collect();
        let left: Vec<&str> = left.iter().map(String::as_str).collect();
        meta::set_finalizers(object, &left);
        true
    })
    .await
}

/// Deletes what a namespace that is being deleted holds, and then the namespace.
async fn empty_namespace(server: &Server, namespace: &str) -> ApiResult<()> {
    let key = Key {
        resource: "namespaces".into(),
        namespace: String::new(),
        name: namespace.to_owned(),
    };
    let Some(record) = server.store.get(&key).await.map_err(internal)? else {
        return Ok(());
    };
    let object = record.object().map_err(internal)?;
    if !meta::is_deleting(&object) {
        return Ok(());
    }
    let mut left = 0;
    let kinds: Vec<Arc<Kind>> = server
        .registry
        .iter()
        .filter(|k| k.namespaced && k.view.is_none())
        .cloned()
        .collect();
    for kind in kinds {
        let mut after = None;
        loop {
            let page = server
                .store
                .list(Range {
                    resource: Arc::clone(&kind.resource),
                    namespace: Some(namespace.to_owned()),
                    after: after.take(),
                    limit: BATCH,
                    revision: None,
                })
                .await
                .map_err(internal)?;
            for record in &page.records {
                delete(server, &record.key, Propagation::Background).await?;
                if server
                    .store
                    .get(&record.key)
                    .await
                    .map_err(internal)?
                    .is_some()
                {
                    left += 1;
                }
            }
            match page.records.last() {
                Some(last) if page.more => {
                    after = Some((last.key.namespace.clone(), last.key.name.clone()));
                }
                _ => break,
            }
        }
    }
    // Objects with finalizers: each one's end brings us here again.
    if left > 0 || !meta::finalizers(&object).is_empty() {
        return Ok(());
    }
    let kind = kind_of(server, &key)?;
    match remove(server, &kind, &key, record.revision, object).await {
        Ok(_) => Ok(()),
        Err(e) if matches!(e.code, 404 | 409) => Ok(()),
        Err(e) => Err(e),
    }
}

fn kind_of(server: &Server, key: &Key) -> ApiResult<Arc<Kind>> {
    server
        .registry
        .by_resource(&key.resource)
        .cloned()
        // Stored by an earlier version that served the kind.
        .ok_or_else(|| ApiError::internal(format!("{} is not served", key.resource)))
}

async fn delete(server: &Server, key: &Key, propagation: Propagation) -> ApiResult<()> {
    let kind = kind_of(server, key)?;
    for _ in 0..RETRIES {
        let Some(record) = server.store.get(key).await.map_err(internal)? else {
            return Ok(());
        };
        let object = record.object().map_err(internal)?;
        if meta::is_deleting(&object) {
            return Ok(());
        }
        match mark(server, &kind, &record, object, Some(propagation), false).await {
            Ok(_) => return Ok(()),
            Err(e) if e.code == 404 => return Ok(()),
            Err(e) if e.reason == "Conflict" => {}
            Err(e) => return Err(e),
        }
    }
    Err(ApiError::modified(&kind, &key.name))
}

/// Changes an object; one whose last finalizer goes while it is being deleted is removed.
async fn change(server: &Server, key: &Key, edit: impl Fn(&mut Value) -> bool) -> ApiResult<()> {
    let kind = kind_of(server, key)?;
    for _ in 0..RETRIES {
        let Some(record) = server.store.get(key).await.map_err(internal)? else {
            return Ok(());
        };
        let old = record.object().map_err(internal)?;
        let mut object = old.clone();
        if !edit(&mut object) || object == old {
            return Ok(());
        }
        let gone = meta::is_deleting(&object) && meta::finalizers(&object).is_empty();
        let write = Write {
            key: key.clone(),
            expect: Expect::Revision(record.revision),
            // Who watches sees the object that goes as it was.
            object: if gone { old } else { object },
            delete: gone,
            guard: None,
        };
        match server.store.write(write).await {
            Ok(_) | Err(WriteError::Changed(None)) => return Ok(()),
            Err(WriteError::Changed(Some(_)) | WriteError::Guard) => {}
            Err(WriteError::Store(e)) => return Err(internal(e)),
        }
    }
    Err(ApiError::modified(&kind, &key.name))
}

/// Forgets history and expired objects, until the server stops.
pub(crate) async fn tick(server: Server, every: Duration) {
    let mut ticks = tokio::time::interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // The first tick comes at once.
    ticks.tick().await;
    let mut last = server.store.revision();
    loop {
        tokio::select! {
            () = server.stopping.cancelled() => return,
            _ = ticks.tick() => {}
        }
        if let Err(error) = expire(&server).await {
            tracing::warn!("expired objects could not be removed: {error}");
        }
        // What was the newest revision one tick ago stays the oldest that can be asked for, so that
        // clients have at least one tick to read on.
        let newest = server.store.revision();
        match server.store.compact(last).await {
            Ok(_) => last = newest,
            Err(StoreError::Closed) => return,
            Err(error) => tracing::warn!("history could not be compacted: {error}"),
        }
    }
}

/// Removes objects whose kind has a time to live and that were not written for so long.
pub(crate) async fn expire(server: &Server) -> ApiResult<()> {
    for kind in server.registry.iter().filter(|k| k.view.is_none()) {
        let Some(ttl) = kind.strategy.ttl else {
            continue;
        };
        let ttl = i64::try_from(ttl.as_millis()).unwrap_or(i64::MAX);
        let cutoff = server.now().as_millisecond().saturating_sub(ttl);
        let keys = server
            .store
            .written_before(&kind.resource, cutoff)
            .await
            .map_err(internal)?;
        for key in keys {
            delete(server, &key, Propagation::Background).await?;
        }
    }
    Ok(())
}

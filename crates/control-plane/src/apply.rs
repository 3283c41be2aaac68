//! Server-side apply: an object says what its manager wants, and nothing of the rest.

use serde_json::{Map, Value, json};

use crate::error::{ApiError, ApiResult, FieldError};
use crate::fields::{self, Fields, Shape, field, item_element, shape};
use crate::managed::{self, Entry, Operation, Writer};
use crate::meta;
use crate::registry::Kind;
use crate::schema::Schema;

/// Owner of what was there before anything was tracked.
const BEFORE_FIRST_APPLY: &str = "before-first-apply";

pub(crate) fn manager_missing() -> ApiError {
    ApiError::invalid(
        "meta.k8s.io",
        "PatchOptions",
        "",
        &[FieldError::required(
            "fieldManager",
            "is required for apply patch",
        )],
    )
}

/// What must not be applied.
pub(crate) fn check(applied: &Value) -> ApiResult<()> {
    if applied["metadata"].get("managedFields").is_some() {
        return Err(ApiError::bad_request("metadata.managedFields must be nil"));
    }
    Ok(())
}

/// What is applied must have the type of the kind: what the schema does not know could not be managed,
/// and an item that comes twice would have no key.
pub(crate) fn check_typed(kind: &Kind, applied: &Value, namespace: &str) -> ApiResult<()> {
    let schema = kind.schema();
    let mut whole = applied.clone();
    let mut problems: Vec<String> = schema
        .prune(&mut whole, true)
        .into_iter()
        .map(|path| format!(".{path}: field not declared in schema"))
        .collect();
    for fault in schema.duplicates(applied, "") {
        if let (Some((list, _)), Some(Value::Object(key))) =
            (fault.field.rsplit_once('['), &fault.value)
        {
            let shown: Vec<String> = key.iter().map(|(k, v)| format!("{k}={v}")).collect();
            problems.push(format!(
                ".{list}: duplicate entries for key [{}]",
                shown.join(",")
            ));
        }
    }
    let all = match problems.as_slice() {
        [] => return Ok(()),
        [one] => one.clone(),
        many => format!("errors:\n  {}", many.join("\n  ")),
    };
    Err(ApiError::untyped(format!(
        "failed to create typed patch object ({namespace}/{}; {}, Kind={}): {all}",
        meta::name(applied),
        kind.api_version(),
        kind.kind
    )))
}

/// The live object (or `{}`) with what is applied, `managedFields` included.
pub(crate) fn merge(
    kind: &Kind,
    live: &Value,
    applied: &Value,
    writer: &Writer,
    force: bool,
) -> ApiResult<Value> {
    let schema = kind.schema();
    let mut config = applied.clone();
    // Only the identity of the object is said by these, and optimistic locking.
    let revision = meta::metadata(&mut config).remove("resourceVersion");
    for field in ["uid", "creationTimestamp", "generation", "selfLink"] {
        meta::metadata(&mut config).remove(field);
    }
    keep_endpoint(kind, &mut config, writer);
    let mut entries = managed::entries(live);
    if entries.is_empty() && live.as_object().is_some_and(|o| !o.is_empty()) {
        entries.push(Entry {
            manager: BEFORE_FIRST_APPLY.to_owned(),
            operation: Operation::Update,
            api_version: writer.api_version.clone(),
            subresource: None,
            time: meta::time(writer.time),
            fields: fields::of(schema, live),
        });
    }
    let wanted = fields::of(schema, &config);
    let mut last = Fields::default();
    let mut found = false;
    for entry in &mut entries {
        if entry.is_of(writer) {
            found = true;
            last = std::mem::replace(&mut entry.fields, wanted.clone());
            if last != wanted {
                entry.time = meta::time(writer.time);
                entry.api_version.clone_from(&writer.api_version);
            }
        }
    }
    if !found {
        entries.push(Entry {
            manager: writer.manager.clone(),
            operation: Operation::Apply,
            api_version: writer.api_version.clone(),
            subresource: writer.subresource.clone(),
            time: meta::time(writer.time),
            fields: wanted,
        });
    }
    let mut merged = live.clone();
    overlay(Some(schema), &mut merged, &config, true);
    let owned = entries
        .iter()
        .fold(Fields::default(), |all, e| all.union(&e.fields));
    take_away(Some(schema), &mut merged, &last, &owned, true);
    let difference = fields::compare(schema, live, &merged);
    let mut conflicts = Vec::new();
    for entry in entries.iter_mut().filter(|e| !e.is_of(writer)) {
        let clash = entry.fields.intersection(&difference.changed);
        if !clash.is_empty() {
            conflicts.push((entry.shown(), clash.paths()));
            entry.fields = entry.fields.difference(&clash);
        }
        entry.fields = entry.fields.difference(&difference.removed);
    }
    if !conflicts.is_empty() && !force {
        return Err(conflict(&conflicts));
    }
    managed::set_entries(&mut merged, entries);
    if let Some(revision) = revision {
        meta::metadata(&mut merged).insert("resourceVersion".to_owned(), revision);
    }
    Ok(merged)
}

/// The status is applied through its own endpoint, and only it.
fn keep_endpoint(kind: &Kind, config: &mut Value, writer: &Writer) {
    let Value::Object(map) = config else { return };
    if writer.subresource.is_some() {
        map.retain(|name, _| {
            matches!(name.as_str(), "apiVersion" | "kind" | "metadata" | "status")
        });
        if let Some(Value::Object(metadata)) = map.get_mut("metadata") {
            metadata.retain(|name, _| matches!(name.as_str(), "name" | "namespace"));
        }
    } else if kind.status {
        map.remove("status");
    }
}

fn conflict(conflicts: &[(String, Vec<String>)]) -> ApiError {
    let causes: Vec<Value> = conflicts
        .iter()
        .flat_map(|(manager, paths)| {
            paths.iter().map(move |path| {
                json!({
                    "reason": "FieldManagerConflict",
                    "message": format!("conflict with {manager}"),
                    "field": path,
                })
            })
        })
        .collect();
    let message = match conflicts {
        [(manager, paths)] if paths.len() == 1 => format!(
            "Apply failed with 1 conflict: conflict with {manager}: {}",
            paths.concat()
        ),
        many => {
            let lines: Vec<String> = many
                .iter()
                .flat_map(|(manager, paths)| {
                    std::iter::once(format!("conflicts with {manager}:"))
                        .chain(paths.iter().map(|path| format!("- {path}")))
                })
                .collect();
            format!(
                "Apply failed with {} conflicts: {}",
                causes.len(),
                lines.join("\n")
            )
        }
    };
    ApiError::apply_conflict(message, &causes)
}

/// Puts what is applied over what there is.
fn overlay(schema: Option<&Schema>, target: &mut Value, applied: &Value, root: bool) {
    match (shape(schema, applied), applied) {
        (Shape::Map(schema), Value::Object(applied)) if target.is_object() || root => {
            if !target.is_object() {
                *target = Value::Object(Map::new());
            }
            let Value::Object(target) = target else {
                return;
            };
            for (name, value) in applied {
                match target.get_mut(name) {
                    Some(slot) => overlay(field(schema, root, name), slot, value, false),
                    None => {
                        target.insert(name.clone(), value.clone());
                    }
                }
            }
        }
        (Shape::List(schema), Value::Array(applied)) if target.is_array() => {
            let Value::Array(target) = target else { return };
            for item in applied {
                let element = item_element(schema, item);
                let there = target
                    .iter_mut()
                    .find(|t| item_element(schema, t) == element);
                match there {
                    Some(slot) => overlay(schema.items.as_deref(), slot, item, false),
                    None => target.push(item.clone()),
                }
            }
        }
        _ => *target = applied.clone(),
    }
}

/// Removes what the manager applied last time and nobody owns any more. True: the value itself is to
/// go.
fn take_away(
    schema: Option<&Schema>,
    value: &mut Value,
    last: &Fields,
    owned: &Fields,
    root: bool,
) -> bool {
    let nobody = Fields::default();
    let mut emptied = false;
    match (shape(schema, value), &mut *value) {
        (Shape::Map(schema), Value::Object(map)) => {
            let before = map.len();
            map.retain(|name, value| {
                let element = format!("f:{name}");
                let Some(last) = last.children.get(&element) else {
                    return true;
                };
                let owned = owned.children.get(&element).unwrap_or(&nobody);
                !take_away(field(schema, root, name), value, last, owned, false)
            });
            emptied = map.is_empty() && before > 0;
        }
        (Shape::List(schema), Value::Array(items)) => {
            let before = items.len();
            items.retain_mut(|item| {
                let element = item_element(schema, item);
                let Some(last) = last.children.get(&element) else {
                    return true;
                };
                let owned = owned.children.get(&element).unwrap_or(&nobody);
                !take_away(schema.items.as_deref(), item, last, owned, false)
            });
            emptied = items.is_empty() && before > 0;
        }
        _ => {}
    }
    !root && owned.is_empty() && (last.own || emptied)
}

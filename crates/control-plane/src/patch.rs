//! JSON merge patch, JSON patch and strategic merge patch.

use serde_json::{Map, Value};

use crate::decode::{self, Body};
use crate::error::{ApiError, ApiResult};
use crate::schema::Schema;

pub(crate) const JSON_PATCH: &str = "application/json-patch+json";
pub(crate) const MERGE_PATCH: &str = "application/merge-patch+json";
pub(crate) const STRATEGIC_PATCH: &str = "application/strategic-merge-patch+json";
pub(crate) const APPLY_YAML: &str = "application/apply-patch+yaml";

/// The most operations that a JSON patch may have, as in kube-apiserver.
const MAX_OPERATIONS: usize = 10_000;

/// A patch, decoded.
#[derive(Debug, Clone)]
pub(crate) enum Patch {
    Json(json_patch::Patch),
    Merge(Value),
    Strategic(Value),
}

impl Patch {
    pub fn apply(&self, object: &mut Value, schema: &Schema) -> ApiResult<()> {
        match self {
            Self::Json(patch) => {
                for operation in &patch.0 {
                    step(object, operation)?;
                }
                Ok(())
            }
            Self::Merge(patch) => {
                merge(object, patch);
                Ok(())
            }
            Self::Strategic(patch) => strategic(object, patch, Some(schema)),
        }
    }
}

/// Decodes a JSON patch.
pub(crate) fn json(bytes: &[u8]) -> ApiResult<Patch> {
    let patch: json_patch::Patch = serde_json::from_slice(bytes).map_err(|e| {
        let text = e.to_string();
        if text.starts_with("unknown variant") {
            return ApiError::rejected();
        }
        ApiError::bad_request(format!("error decoding patch: {text}"))
    })?;
    if patch.0.len() > MAX_OPERATIONS {
        return Err(ApiError::new(
            413,
            "RequestEntityTooLarge",
            format!(
                "The allowed maximum operations in a JSON patch is {MAX_OPERATIONS}, got {}",
                patch.0.len()
            ),
        ));
    }
    Ok(Patch::Json(patch))
}

/// Decodes a merge patch, which is an object.
pub(crate) fn document(bytes: &[u8]) -> ApiResult<Body> {
    let body = decode::json(bytes).map_err(|e| {
        let text = e.message.rsplit_once("json parse error: ");
        ApiError::bad_request(format!(
            "error decoding patch: {}",
            text.map_or(e.message.as_str(), |(_, text)| text)
        ))
    })?;
    let found = match &body.value {
        Value::Object(_) => return Ok(body),
        Value::Null => return Err(ApiError::bad_request("Invalid JSON Patch")),
        Value::Bool(_) => "bool",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
    };
    Err(ApiError::bad_request(format!(
        "error decoding patch: json: cannot unmarshal {found} into Go value of type map[string]interface {{}}"
    )))
}

/// One operation. `replace` of a key that is not there sets it, where there is an object to hold it:
/// kube-apiserver's library does the same.
fn step(object: &mut Value, operation: &json_patch::PatchOperation) -> ApiResult<()> {
    let mut operation = operation.clone();
    if let json_patch::PatchOperation::Replace(replace) = &operation {
        let path = replace.path.as_str();
        let held = path
            .rsplit_once('/')
            .and_then(|(parent, _)| object.pointer(parent))
            .is_some_and(Value::is_object);
        if held && object.pointer(path).is_none() {
            operation = json_patch::PatchOperation::Add(json_patch::AddOperation {
                path: replace.path.clone(),
                value: replace.value.clone(),
            });
        }
    }
    json_patch::patch(object, &[operation]).map_err(|_| ApiError::rejected())
}

/// RFC 7386.
pub(crate) fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    if let Value::Object(target) = target {
        for (key, value) in patch {
            if value.is_null() {
                target.remove(key);
            } else {
                merge(target.entry(key.clone()).or_insert(Value::Null), value);
            }
        }
    }
}

/// Kubernetes' own merge: lists that have a merge key are merged item by item, and directives delete
/// or replace (`k8s.io/apimachinery/pkg/util/strategicpatch`).
fn strategic(target: &mut Value, patch: &Value, schema: Option<&Schema>) -> ApiResult<()> {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return Ok(());
    };
    match patch.get("$patch").and_then(Value::as_str) {
        Some("replace") => {
            let mut whole = patch.clone();
            whole.remove("$patch");
            *target = Value::Object(whole);
            return Ok(());
        }
        Some("delete") => {
            *target = Value::Object(Map::new());
            return Ok(());
        }
        Some("merge") | None => {}
        Some(other) => {
            return Err(ApiError::bad_request(format!(
                "Unknown patch type: {other}"
            )));
        }
    }
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    let Value::Object(target) = target else {
        return Ok(());
    };
    for (key, value) in patch {
        if key == "$patch" || key.starts_with("$setElementOrder/") {
            continue;
        }
        if key == "$retainKeys" {
            let keep: Vec<&str> = value
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(Value::as_str)
                .collect();
            target.retain(|name, _| keep.contains(&name.as_str()));
            continue;
        }
        if let Some(list) = key.strip_prefix("$deleteFromPrimitiveList/") {
            let gone = value.as_array().cloned().unwrap_or_default();
            if let Some(Value::Array(items)) = target.get_mut(list) {
                items.retain(|item| !gone.contains(item));
            }
            continue;
        }
        let next = schema.and_then(|s| s.property(key));
        match value {
            Value::Null => {
                target.remove(key);
            }
            Value::Object(_) => {
                let slot = target.entry(key.clone()).or_insert(Value::Null);
                strategic(slot, value, next)?;
            }
            Value::Array(items) => {
                let slot = target
                    .entry(key.clone())
                    .or_insert_with(|| Value::Array(Vec::new()));
                strategic_list(slot, items, next)?;
            }
            scalar => {
                target.insert(key.clone(), scalar.clone());
            }
        }
    }
    Ok(())
}

fn strategic_list(target: &mut Value, patch: &[Value], schema: Option<&Schema>) -> ApiResult<()> {
    let merge_key = schema.and_then(|s| s.merge_key.as_deref());
    let is_set = schema.is_some_and(|s| s.list == crate::schema::ListType::Set);
    let Value::Array(items) = target else {
        *target = Value::Array(patch.to_vec());
        return Ok(());
    };
    if is_set {
        for item in patch {
            if !items.contains(item) {
                items.push(item.clone());
            }
        }
        return Ok(());
    }
    let Some(merge_key) = merge_key else {
        *items = patch.to_vec();
        return Ok(());
    };
    if patch.iter().any(|p| p["$patch"] == "replace") {
        *items = patch
            .iter()
            .filter(|p| p.get("$patch").is_none())
            .cloned()
            .collect();
        return Ok(());
    }
    for change in patch {
        let key = &change[merge_key];
        if key.is_null() {
            return Err(ApiError::bad_request(format!(
                "map: {change} does not contain declared merge key: {merge_key}"
            )));
        }
        let at = items.iter().position(|i| i[merge_key] == *key);
        match (change["$patch"] == "delete", at) {
            (true, Some(at)) => {
                items.remove(at);
            }
            (true, None) => {}
            (false, Some(at)) => {
                strategic(
                    &mut items[at],
                    change,
                    schema.and_then(|s| s.items.as_deref()),
                )?;
            }
            (false, None) => items.push(change.clone()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_merge_patch_follows_the_rfc() {
        let mut object = json!({"a": {"b": 1, "c": 2}, "l": [1]});
        merge(
            &mut object,
            &json!({"a": {"b": null, "d": {"e": null, "f": 1}}, "l": [2]}),
        );
        assert_eq!(object, json!({"a": {"c": 2, "d": {"f": 1}}, "l": [2]}));
    }

    #[test]
    fn a_strategic_patch_merges_lists_by_their_key() {
        let schema = crate::kinds::metadata_schema();
        let mut metadata = json!({
            "finalizers": ["a"],
            "ownerReferences": [{"uid": "1", "name": "x"}, {"uid": "2", "name": "y"}],
            "labels": {"a": "1", "b": "2"}
        });
        let patch = json!({
            "finalizers": ["b"],
            "$deleteFromPrimitiveList/finalizers": ["a"],
            "ownerReferences": [{"uid": "1", "name": "z"}, {"uid": "2", "$patch": "delete"}, {"uid": "3"}],
            "labels": {"a": null}
        });
        strategic(&mut metadata, &patch, Some(schema)).unwrap();
        assert_eq!(
            metadata,
            json!({
                "finalizers": ["b"],
                "ownerReferences": [{"uid": "1", "name": "z"}, {"uid": "3"}],
                "labels": {"b": "2"}
            })
        );
    }
}

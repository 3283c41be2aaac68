//! The rules of `metadata`, the same for every kind.

use jiff::Timestamp;
use serde_json::{Map, Value, json};

use crate::error::FieldError;
use crate::kinds::metadata_schema;
use crate::names;
use crate::registry::{Kind, NameRule};

/// Finalizer that keeps an owner until its dependents are gone.
pub(crate) const FOREGROUND: &str = "foregroundDeletion";
/// Finalizer that lets dependents go free before the owner is removed.
pub(crate) const ORPHAN: &str = "orphan";

const MAX_ANNOTATIONS: usize = 256 * 1024;
/// What a generated name keeps of its base: 63 less five random characters.
const MAX_GENERATED_BASE: usize = 58;
/// No vowels, so that no words come out (`k8s.io/apimachinery/pkg/util/rand`).
const SUFFIX: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";

pub(crate) fn name(object: &Value) -> &str {
    text(object, "name")
}

pub(crate) fn namespace(object: &Value) -> &str {
    text(object, "namespace")
}

pub(crate) fn uid(object: &Value) -> &str {
    text(object, "uid")
}

pub(crate) fn text<'a>(object: &'a Value, field: &str) -> &'a str {
    object["metadata"][field].as_str().unwrap_or_default()
}

pub(crate) fn is_deleting(object: &Value) -> bool {
    !object["metadata"]["deletionTimestamp"].is_null()
}

pub(crate) fn finalizers(object: &Value) -> Vec<&str> {
    object["metadata"]["finalizers"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect()
}

pub(crate) fn set_finalizers(object: &mut Value, finalizers: &[&str]) {
    let metadata = metadata(object);
    if finalizers.is_empty() {
        metadata.remove("finalizers");
    } else {
        metadata.insert("finalizers".to_owned(), json!(finalizers));
    }
}

/// `metadata`, made when missing.
pub(crate) fn metadata(object: &mut Value) -> &mut Map<String, Value> {
    if !object.is_object() {
        *object = json!({});
    }
    let metadata = &mut object["metadata"];
    if !metadata.is_object() {
        *metadata = json!({});
    }
    match metadata {
        Value::Object(map) => map,
        // Just made an object.
        _ => unreachable!("metadata is an object"),
    }
}

/// A time as the API keeps it: whole seconds.
pub(crate) fn time(now: Timestamp) -> Value {
    Timestamp::from_second(now.as_second())
        .unwrap_or(now)
        .to_string()
        .into()
}

/// Shapes metadata by its schema: unknown fields go (and are named), wrong types are told, nulls and
/// empty values vanish.
pub(crate) fn normalize(object: &mut Value) -> (Vec<String>, Vec<FieldError>) {
    let schema = metadata_schema();
    metadata(object);
    let mut value = object["metadata"].take();
    let unknown = schema
        .prune(&mut value, false)
        .into_iter()
        .map(|u| format!("metadata.{u}"))
        .collect();
    if let Value::Object(map) = &mut value {
        map.retain(|_, v| !is_empty(v));
    }
    let mut faults = schema.validate(&value, None, "metadata");
    // An absent field is an empty one, which the rules of owners refuse in their own words.
    faults.retain(|f| {
        !(f.kind == crate::error::Fault::Required
            && f.field.starts_with("metadata.ownerReferences"))
    });
    object["metadata"] = value;
    (unknown, faults)
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(s) => s.is_empty(),
        Value::Array(a) => a.is_empty(),
        Value::Object(m) => m.is_empty(),
        _ => false,
    }
}

/// Takes away what only the server sets.
pub(crate) fn wipe_system_fields(object: &mut Value) {
    let metadata = metadata(object);
    for field in [
        "uid",
        "creationTimestamp",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "selfLink",
        "generation",
        "resourceVersion",
    ] {
        metadata.remove(field);
    }
}

/// The system's fields of a new object.
pub(crate) fn fill_system_fields(kind: &Kind, object: &mut Value, now: Timestamp) {
    let generation = kind.strategy.generation;
    let metadata = metadata(object);
    metadata.insert("uid".to_owned(), uuid::Uuid::new_v4().to_string().into());
    metadata.insert("creationTimestamp".to_owned(), time(now));
    if generation {
        metadata.insert("generation".to_owned(), 1.into());
    }
}

/// A name from `generateName`.
pub(crate) fn generated_name(base: &str) -> String {
    let kept: String = base.chars().take(MAX_GENERATED_BASE).collect();
    let suffix: String = (0..5)
        .map(|_| {
            let at = rand::random_range(0..SUFFIX.len());
            char::from(SUFFIX[at])
        })
        .collect();
    kept + &suffix
}

/// What an update cannot change comes from the old object.
pub(crate) fn carry_over(object: &mut Value, old: &Value) {
    let old = &old["metadata"];
    let metadata = metadata(object);
    metadata.remove("selfLink");
    for field in [
        "generation",
        "creationTimestamp",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
    ] {
        match old.get(field) {
            Some(value) => metadata.insert(field.to_owned(), value.clone()),
            None => metadata.remove(field),
        };
    }
    for field in ["uid", "name", "namespace"] {
        if !metadata.contains_key(field)
            && let Some(value) = old.get(field)
        {
            metadata.insert(field.to_owned(), value.clone());
        }
    }
}

/// Raises the generation when something outside of metadata changed.
pub(crate) fn count_generation(object: &mut Value, old: &Value) {
    let without = |o: &Value| {
        let mut map = o.as_object().cloned().unwrap_or_default();
        map.remove("metadata");
        map
    };
    if without(object) != without(old) {
        let generation = old["metadata"]["generation"].as_i64().unwrap_or(0) + 1;
        metadata(object).insert("generation".to_owned(), generation.into());
    }
}

/// The rules of metadata for a new object.
pub(crate) fn validate(kind: &Kind, object: &Value) -> Vec<FieldError> {
    let mut faults = Vec::new();
    let own = name(object);
    if own.is_empty() {
        faults.push(FieldError::required(
            "metadata.name",
            "name or generateName is required",
        ));
    } else {
        let problems = match kind.strategy.names {
            NameRule::Subdomain => names::subdomain(own),
            NameRule::Label => names::label(own),
        };
        faults.extend(
            problems
                .into_iter()
                .map(|p| FieldError::invalid("metadata.name", own, p)),
        );
    }
    if !kind.namespaced && !namespace(object).is_empty() {
        faults.push(FieldError::forbidden(
            "metadata.namespace",
            "not allowed on this type",
        ));
    }
    faults.extend(common(object));
    faults.extend(finalizer_faults(object));
    faults
}

/// The rules of metadata for an update.
pub(crate) fn validate_update(kind: &Kind, object: &Value, old: &Value) -> Vec<FieldError> {
    let mut faults = Vec::new();
    let new = &object["metadata"];
    if is_deleting(old) {
        let before = finalizers(old);
        let extra: Vec<String> = finalizers(object)
            .into_iter()
            .filter(|f| !before.contains(f))
            .map(|f| format!("{f:?}"))
            .collect();
        if !extra.is_empty() {
            faults.push(FieldError::forbidden(
                "metadata.finalizers",
                format!(
                    "no new finalizers can be added if the object is being deleted, found new finalizers []string{{{}}}",
                    extra.join(", ")
                ),
            ));
        }
    }
    if text(object, "resourceVersion").is_empty() && !kind.strategy.unconditional_update {
        faults.push(FieldError::invalid(
            "metadata.resourceVersion",
            "",
            "must be specified for an update",
        ));
    }
    for field in ["name", "namespace", "uid"] {
        if new.get(field) != old["metadata"].get(field) {
            faults.push(FieldError::invalid(
                format!("metadata.{field}"),
                new[field].clone(),
                "field is immutable",
            ));
        }
    }
    faults.extend(common(object));
    faults.extend(finalizer_faults(object));
    faults
}

fn common(object: &Value) -> Vec<FieldError> {
    let mut faults = Vec::new();
    let metadata = &object["metadata"];
    for (key, value) in metadata["labels"].as_object().into_iter().flatten() {
        if let Some(problem) = names::qualified_name(key) {
            faults.push(FieldError::invalid(
                "metadata.labels",
                key.as_str(),
                problem,
            ));
        }
        let value = value.as_str().unwrap_or_default();
        if let Some(problem) = names::label_value(value) {
            faults.push(FieldError::invalid("metadata.labels", value, problem));
        }
    }
    let mut size = 0;
    for (key, value) in metadata["annotations"].as_object().into_iter().flatten() {
        size += key.len() + value.as_str().map_or(0, str::len);
        if let Some(problem) = names::qualified_name(&key.to_lowercase()) {
            faults.push(FieldError::invalid(
                "metadata.annotations",
                key.as_str(),
                problem,
            ));
        }
    }
    if size > MAX_ANNOTATIONS {
        faults.push(FieldError::new(
            "metadata.annotations",
            crate::error::Fault::TooLong,
            None,
            format!("may not be more than {MAX_ANNOTATIONS} bytes"),
        ));
    }
    faults.extend(owner_faults(&metadata["ownerReferences"]));
    faults
}

/// The rules of ownerReferences (`k8s.io/apimachinery/pkg/api/validation`), which name no index.
fn owner_faults(owners: &Value) -> Vec<FieldError> {
    let mut faults = Vec::new();
    let mut controller: Option<String> = None;
    for owner in owners.as_array().into_iter().flatten() {
        let text = |field: &str| owner[field].as_str().unwrap_or_default();
        let version = match text("apiVersion").split('/').collect::<Vec<_>>()[..] {
            [version] | [_, version] => version,
            _ => "",
        };
        if version.is_empty() {
            faults.push(FieldError::invalid(
                "metadata.ownerReferences.apiVersion",
                text("apiVersion"),
                "version must not be empty",
            ));
        }
        for field in ["kind", "name", "uid"] {
            if text(field).is_empty() {
                faults.push(FieldError::invalid(
                    format!("metadata.ownerReferences.{field}"),
                    "",
                    "must not be empty",
                ));
            }
        }
        if text("apiVersion") == "v1" && text("kind") == "Event" {
            faults.push(FieldError::invalid(
                "metadata.ownerReferences",
                owner.clone(),
                "/v1, Kind=Event is disallowed from being an owner",
            ));
        }
        if owner["controller"] == true {
            let own = format!("{}/{}", text("kind"), text("name"));
            if let Some(first) = &controller {
                faults.push(FieldError::invalid(
                    "metadata.ownerReferences",
                    owners.clone(),
                    format!(
                        "Only one reference can have Controller set to true. Found \"true\" in references for {first} and {own}"
                    ),
                ));
            } else {
                controller = Some(own);
            }
        }
    }
    faults
}

/// Drops owners that are given more than once; what to warn of.
pub(crate) fn drop_repeated_owners(object: &mut Value) -> Option<String> {
    let Some(Value::Array(owners)) = metadata(object).get_mut("ownerReferences") else {
        return None;
    };
    let mut kept: Vec<Value> = Vec::with_capacity(owners.len());
    let mut repeated: Vec<String> = Vec::new();
    for owner in std::mem::take(owners) {
        if kept.contains(&owner) {
            repeated.push(owner["uid"].as_str().unwrap_or_default().to_owned());
        } else {
            kept.push(owner);
        }
    }
    *owners = kept;
    (!repeated.is_empty()).then(|| {
        format!(
            ".metadata.ownerReferences contains duplicate entries; API server dedups owner references in 1.20+, and may reject such requests as early as 1.24; please fix your requests; duplicate UID(s) observed: {}",
            repeated.join(", ")
        )
    })
}

/// New finalizers without a domain may be somebody else's too.
pub(crate) fn finalizer_warnings(object: &Value, old: Option<&Value>) -> Vec<String> {
    let before = old.map(finalizers).unwrap_or_default();
    finalizers(object)
        .into_iter()
        .filter(|f| !f.contains('/') && ![FOREGROUND, ORPHAN].contains(f) && !before.contains(f))
        .map(|f| {
            format!(
                "metadata.finalizers: {f:?}: prefer a domain-qualified finalizer name to avoid accidental conflicts with other finalizer writers"
            )
        })
        .collect()
}

fn finalizer_faults(object: &Value) -> Vec<FieldError> {
    let finalizers = finalizers(object);
    let mut faults: Vec<FieldError> = finalizers
        .iter()
        .filter_map(|f| {
            names::qualified_name(f).map(|p| FieldError::invalid("metadata.finalizers", *f, p))
        })
        .collect();
    if finalizers.contains(&FOREGROUND) && finalizers.contains(&ORPHAN) {
        faults.push(FieldError::invalid(
            "metadata.finalizers",
            json!(finalizers),
            format!("finalizer {ORPHAN} and {FOREGROUND} cannot be both set"),
        ));
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generated_names_fit_a_label() {
        let name = generated_name(&"a".repeat(100));
        assert_eq!(name.len(), 63);
        assert_ne!(generated_name("a-"), generated_name("a-"));
        assert!(names::label(&generated_name("a-")).is_empty());
    }

    #[test]
    fn metadata_takes_the_shape_of_its_schema() {
        let mut object = json!({"metadata": {"name": "a", "lables": {}, "labels": {}, "creationTimestamp": null}});
        let (unknown, faults) = normalize(&mut object);
        assert_eq!(unknown, ["metadata.lables"]);
        assert_eq!(faults, []);
        assert_eq!(object["metadata"], json!({"name": "a"}));
        let mut object = json!({"metadata": {"name": 1, "labels": {"a": true}}});
        let (_, faults) = normalize(&mut object);
        assert_eq!(faults.len(), 2);
    }

    #[test]
    fn the_generation_counts_changes_outside_of_metadata() {
        let old = json!({"metadata": {"generation": 3}, "spec": {"a": 1}});
        let mut same =
            json!({"metadata": {"labels": {"x": "y"}, "generation": 3}, "spec": {"a": 1}});
        count_generation(&mut same, &old);
        assert_eq!(same["metadata"]["generation"], 3);
        let mut changed = json!({"metadata": {}, "spec": {"a": 2}});
        count_generation(&mut changed, &old);
        assert_eq!(changed["metadata"]["generation"], 4);
    }
}

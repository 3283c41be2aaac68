//! Sets of fields, as `metadata.managedFields` keeps them (FieldsV1).
//!
//! A set is a tree of path elements: `f:name` a field, `k:{...}` an item of a list by its keys,
//! `v:...` an item of a set by its value. The rules which field belongs to whom follow
//! `sigs.k8s.io/structured-merge-diff`.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::kinds::metadata_schema;
use crate::schema::{Additional, ListType, Schema};

/// A node of the tree.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Fields {
    /// The element itself is in the set.
    pub own: bool,
    pub children: BTreeMap<String, Fields>,
}

impl Fields {
    pub fn is_empty(&self) -> bool {
        !self.own && self.children.is_empty()
    }

    fn leaf() -> Self {
        Self {
            own: true,
            children: BTreeMap::new(),
        }
    }

    pub fn from_json(json: &Value) -> Self {
        let Some(map) = json.as_object() else {
            return Self::default();
        };
        if map.is_empty() {
            return Self::leaf();
        }
        Self {
            own: map.contains_key("."),
            children: map
                .iter()
                .filter(|(name, _)| *name != ".")
                .map(|(name, child)| (name.clone(), Self::from_json(child)))
                .collect(),
        }
    }

    pub fn to_json(&self) -> Value {
        let mut map = Map::new();
        if self.own && !self.children.is_empty() {
            map.insert(".".to_owned(), json!({}));
        }
        for (name, child) in &self.children {
            map.insert(name.clone(), child.to_json());
        }
        Value::Object(map)
    }

    pub fn union(&self, other: &Self) -> Self {
        let mut all = self.clone();
        all.own |= other.own;
        for (name, child) in &other.children {
            let merged = match all.children.get(name) {
                Some(own) => own.union(child),
                None => child.clone(),
            };
            all.children.insert(name.clone(), merged);
        }
        all
    }

    /// Without what is in the other.
    pub fn difference(&self, other: &Self) -> Self {
        self.combine(other, |a, b| a && !b, true)
    }

    pub fn intersection(&self, other: &Self) -> Self {
        self.combine(other, |a, b| a && b, false)
    }

    fn combine(&self, other: &Self, keep: fn(bool, bool) -> bool, keep_alone: bool) -> Self {
        let mut result = Self {
            own: keep(self.own, other.own),
            children: BTreeMap::new(),
        };
        for (name, child) in &self.children {
            let left = match other.children.get(name) {
                Some(theirs) => child.combine(theirs, keep, keep_alone),
                None if keep_alone => child.clone(),
                None => continue,
            };
            if !left.is_empty() {
                result.children.insert(name.clone(), left);
            }
        }
        result
    }

    /// The paths of the set, as kubectl prints them.
    pub fn paths(&self) -> Vec<String> {
        let mut paths = Vec::new();
        self.walk(String::new(), &mut paths);
        paths
    }

    fn walk(&self, path: String, paths: &mut Vec<String>) {
        for (name, child) in &self.children {
            child.walk(path.clone() + &shown(name), paths);
        }
        if self.own {
            paths.push(path);
        }
    }

    /// Without what no manager tracks: identity and what the server sets.
    fn without_system_fields(mut self) -> Self {
        self.children.remove("f:apiVersion");
        self.children.remove("f:kind");
        if let Some(metadata) = self.children.get_mut("f:metadata") {
            metadata.own = false;
            for field in [
                "f:name",
                "f:namespace",
                "f:creationTimestamp",
                "f:selfLink",
                "f:uid",
                "f:generation",
                "f:managedFields",
                "f:resourceVersion",
                "f:deletionTimestamp",
                "f:deletionGracePeriodSeconds",
            ] {
                metadata.children.remove(field);
            }
            if metadata.is_empty() {
                self.children.remove("f:metadata");
            }
        }
        self
    }
}

fn shown(element: &str) -> String {
    match element.split_at_checked(2) {
        Some(("f:", name)) => format!(".{name}"),
        Some(("v:", value)) => format!("[={value}]"),
        Some(("k:", keys)) => {
            let keys: Map<String, Value> = serde_json::from_str(keys).unwrap_or_default();
            let parts: Vec<String> = keys.iter().map(|(k, v)| format!("{k}={v}")).collect();
            format!("[{}]", parts.join(","))
        }
        _ => element.to_owned(),
    }
}

/// How a node is merged: as a whole, field by field, or item by item.
#[derive(Clone, Copy)]
pub(crate) enum Shape<'a> {
    Atomic,
    Map(Option<&'a Schema>),
    List(&'a Schema),
}

/// The shape of a value by its schema. What no schema describes is merged field by field, its lists
/// as a whole.
pub(crate) fn shape<'a>(schema: Option<&'a Schema>, value: &Value) -> Shape<'a> {
    match (value, schema) {
        (Value::Object(_), Some(schema)) if schema.atomic_map => Shape::Atomic,
        (Value::Object(_), schema) => Shape::Map(schema),
        (Value::Array(_), Some(schema)) if schema.list != ListType::Atomic => Shape::List(schema),
        _ => Shape::Atomic,
    }
}

/// The schema of a field; `metadata` of the root is the same for all kinds.
pub(crate) fn field<'a>(schema: Option<&'a Schema>, root: bool, name: &str) -> Option<&'a Schema> {
    if root && name == "metadata" {
        return Some(metadata_schema());
    }
    schema?.property(name)
}

/// Whether the schema names the field, rather than allowing any.
fn is_declared(schema: Option<&Schema>, root: bool, name: &str) -> bool {
    (root && matches!(name, "metadata" | "apiVersion" | "kind"))
        || schema.is_some_and(|s| {
            s.properties.contains_key(name)
                || !(matches!(s.additional, Some(Additional::Any | Additional::Schema(_)))
                    || s.preserve_unknown)
        })
}

/// The element that names an item of a list that is a set or a map.
pub(crate) fn item_element(schema: &Schema, item: &Value) -> String {
    match &schema.list {
        ListType::Map(keys) => {
            let own: Map<String, Value> = keys
                .iter()
                .filter_map(|key| {
                    let default = schema
                        .items
                        .as_ref()
                        .and_then(|i| i.properties.get(key))
                        .and_then(|p| p.default.as_ref());
                    item.get(key).or(default).map(|v| (key.clone(), v.clone()))
                })
                .collect();
            format!("k:{}", Value::Object(own))
        }
        _ => format!("v:{item}"),
    }
}

/// The fields that an applied object sets.
pub(crate) fn of(schema: &Schema, object: &Value) -> Fields {
    set_of(Some(schema), object, true).without_system_fields()
}

fn set_of(schema: Option<&Schema>, value: &Value, root: bool) -> Fields {
    match (shape(schema, value), value) {
        (Shape::Map(schema), Value::Object(map)) if !map.is_empty() => {
            let mut fields = Fields::default();
            for (name, value) in map {
                let mut child = set_of(field(schema, root, name), value, false);
                if value.is_null() || !is_declared(schema, root, name) {
                    child.own = true;
                }
                fields.children.insert(format!("f:{name}"), child);
            }
            fields
        }
        (Shape::List(schema), Value::Array(items)) if !items.is_empty() => {
            let mut fields = Fields::default();
            for item in items {
                let mut child = if matches!(schema.list, ListType::Map(_)) {
                    set_of(schema.items.as_deref(), item, false)
                } else {
                    Fields::leaf()
                };
                child.own = true;
                fields.children.insert(item_element(schema, item), child);
            }
            fields
        }
        _ => Fields::leaf(),
    }
}

/// What differs between two objects.
#[derive(Debug, Default)]
pub(crate) struct Difference {
    /// Added or changed.
    pub changed: Fields,
    pub removed: Fields,
}

pub(crate) fn compare(schema: &Schema, old: &Value, new: &Value) -> Difference {
    let mut difference = Difference::default();
    both(Some(schema), old, new, true, &mut difference);
    difference.changed = difference.changed.without_system_fields();
    difference.removed = difference.removed.without_system_fields();
    difference
}

fn both(schema: Option<&Schema>, old: &Value, new: &Value, root: bool, found: &mut Difference) {
    if old == new {
        return;
    }
    match (shape(schema, new), old, new) {
        (Shape::Map(schema), Value::Object(before), Value::Object(after)) => {
            for (name, value) in after {
                let schema = field(schema, root, name);
                let element = format!("f:{name}");
                pair(schema, element, before.get(name), Some(value), found);
            }
            for (name, value) in before.iter().filter(|(n, _)| !after.contains_key(*n)) {
                let schema = field(schema, root, name);
                pair(schema, format!("f:{name}"), Some(value), None, found);
            }
        }
        (Shape::List(schema), Value::Array(before), Value::Array(after)) => {
            let index = |items: &[Value]| -> BTreeMap<String, Value> {
                items
                    .iter()
                    .map(|i| (item_element(schema, i), i.clone()))
                    .collect()
            };
            let (before, after) = (index(before), index(after));
            for (element, value) in &after {
                let old = before.get(element);
                pair(
                    schema.items.as_deref(),
                    element.clone(),
                    old,
                    Some(value),
                    found,
                );
            }
            for (element, value) in before.iter().filter(|(e, _)| !after.contains_key(*e)) {
                pair(
                    schema.items.as_deref(),
                    element.clone(),
                    Some(value),
                    None,
                    found,
                );
            }
        }
        _ => found.changed.own = true,
    }
}

fn pair(
    schema: Option<&Schema>,
    element: String,
    old: Option<&Value>,
    new: Option<&Value>,
    found: &mut Difference,
) {
    let mut inner = Difference::default();
    match (old, new) {
        (Some(old), Some(new)) => both(schema, old, new, false, &mut inner),
        (None, Some(new)) => inner.changed = everything(schema, new),
        (Some(old), None) => inner.removed = everything(schema, old),
        (None, None) => {}
    }
    if !inner.changed.is_empty() {
        found
            .changed
            .children
            .insert(element.clone(), inner.changed);
    }
    if !inner.removed.is_empty() {
        found.removed.children.insert(element, inner.removed);
    }
}

/// A value that came or went, with each of its parts.
fn everything(schema: Option<&Schema>, value: &Value) -> Fields {
    let mut fields = Fields::leaf();
    match (shape(schema, value), value) {
        (Shape::Map(schema), Value::Object(map)) => {
            for (name, value) in map {
                let child = everything(field(schema, false, name), value);
                fields.children.insert(format!("f:{name}"), child);
            }
        }
        (Shape::List(schema), Value::Array(items)) => {
            for item in items {
                let child = everything(schema.items.as_deref(), item);
                fields.children.insert(item_element(schema, item), child);
            }
        }
        _ => {}
    }
    fields
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schema() -> Schema {
        Schema::parse(
            &json!({"type": "object", "properties": {
                "spec": {"type": "object", "properties": {
                    "host": {"type": "string"},
                    "attributes": {"type": "object", "additionalProperties": {"type": "string"}},
                    "plain": {"type": "array", "items": {"type": "string"}}
                }},
                "status": {"type": "object", "properties": {"conditions": {
                    "type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"],
                    "items": {"type": "object", "properties": {"type": {"type": "string"}, "status": {"type": "string"}}}
                }}}
            }}),
            &Value::Null,
        )
    }

    #[test]
    fn a_set_survives_its_json() {
        let json = json!({"f:spec": {".": {}, "f:host": {}}, "f:status": {"f:conditions": {"k:{\"type\":\"A\"}": {".": {}, "f:type": {}}}}});
        let fields = Fields::from_json(&json);
        assert_eq!(fields.to_json(), json);
        assert_eq!(
            fields.paths(),
            [
                ".spec.host",
                ".spec",
                ".status.conditions[type=\"A\"].type",
                ".status.conditions[type=\"A\"]"
            ]
        );
    }

    #[test]
    fn what_is_applied_is_owned_by_its_leaves() {
        let object = json!({
            "apiVersion": "v1", "kind": "K",
            "metadata": {"name": "a", "labels": {"x": "y"}},
            "spec": {"host": "h", "attributes": {"geo": "de"}, "plain": ["a", "b"]},
            "status": {"conditions": [{"type": "A", "status": "True"}]}
        });
        assert_eq!(
            of(&schema(), &object).to_json(),
            json!({
                "f:metadata": {"f:labels": {"f:x": {}}},
                "f:spec": {"f:host": {}, "f:attributes": {"f:geo": {}}, "f:plain": {}},
                "f:status": {"f:conditions": {"k:{\"type\":\"A\"}": {".": {}, "f:type": {}, "f:status": {}}}}
            })
        );
    }

    #[test]
    fn a_comparison_names_what_came_changed_and_went() {
        let old = json!({"spec": {"host": "h", "attributes": {"a": "1"}}, "status": {"conditions": [{"type": "A", "status": "True"}]}});
        let new = json!({"metadata": {"labels": {"l": "1"}}, "spec": {"host": "i"}, "status": {"conditions": [{"type": "A", "status": "False"}]}});
        let found = compare(&schema(), &old, &new);
        assert_eq!(
            found.changed.to_json(),
            json!({
                "f:metadata": {"f:labels": {".": {}, "f:l": {}}},
                "f:spec": {"f:host": {}},
                "f:status": {"f:conditions": {"k:{\"type\":\"A\"}": {"f:status": {}}}}
            })
        );
        assert_eq!(
            found.removed.to_json(),
            json!({"f:spec": {"f:attributes": {".": {}, "f:a": {}}}})
        );
    }

    #[test]
    fn sets_are_added_and_taken_away() {
        let a = Fields::from_json(&json!({"f:a": {}, "f:b": {".": {}, "f:c": {}}}));
        let b = Fields::from_json(&json!({"f:b": {"f:c": {}}, "f:d": {}}));
        assert_eq!(
            a.union(&b).to_json(),
            json!({"f:a": {}, "f:b": {".": {}, "f:c": {}}, "f:d": {}})
        );
        assert_eq!(a.difference(&b).to_json(), json!({"f:a": {}, "f:b": {}}));
        assert_eq!(a.intersection(&b).to_json(), json!({"f:b": {"f:c": {}}}));
    }
}

//! Pruning and defaulting.

use serde_json::Value;

use super::{Additional, Schema, Type, child};

/// A field that the schema does not know; its path.
pub(crate) type Unknown = String;

impl Schema {
    /// Removes what the schema does not know, and says what that was. `metadata`, `apiVersion` and
    /// `kind` of the root are left to the caller.
    pub fn prune(&self, object: &mut Value, root: bool) -> Vec<Unknown> {
        let mut unknown = Vec::new();
        prune(
            self,
            object,
            "",
            root || self.embedded_resource,
            &mut unknown,
        );
        unknown
    }

    /// Fills in defaults; nulls that a default stands in for, and that are not allowed, go first.
    pub fn fill(&self, value: &mut Value) {
        match value {
            Value::Object(map) => {
                for (name, schema) in &self.properties {
                    let Some(default) = &schema.default else {
                        continue;
                    };
                    let absent = match map.get(name) {
                        None => true,
                        Some(Value::Null) => !schema.nullable,
                        Some(_) => false,
                    };
                    if absent {
                        map.insert(name.clone(), default.clone());
                    }
                }
                for (name, value) in map.iter_mut() {
                    if let Some(schema) = self.property(name) {
                        schema.fill(value);
                    }
                }
            }
            Value::Array(list) => {
                if let Some(items) = &self.items {
                    for item in list {
                        items.fill(item);
                    }
                }
            }
            _ => {}
        }
    }

    /// Drops nulls of properties that are not nullable: kube-apiserver prunes them when it defaults,
    /// so that an explicit null and an absent field are the same.
    pub fn drop_nulls(&self, value: &mut Value) {
        match value {
            Value::Object(map) => {
                map.retain(|name, value| {
                    !value.is_null() || self.properties.get(name).is_none_or(|s| s.nullable)
                });
                for (name, value) in map.iter_mut() {
                    if let Some(schema) = self.property(name) {
                        schema.drop_nulls(value);
                    }
                }
            }
            Value::Array(list) => {
                if let Some(items) = &self.items {
                    for item in list {
                        items.drop_nulls(item);
                    }
                }
            }
            _ => {}
        }
    }
}

fn prune(
    schema: &Schema,
    value: &mut Value,
    path: &str,
    resource: bool,
    unknown: &mut Vec<Unknown>,
) {
    match value {
        Value::Object(map) => {
            if schema.properties.is_empty() && schema.open() {
                return;
            }
            let structured = !schema.properties.is_empty()
                || schema.additional.is_some()
                || schema.type_ == Some(Type::Object);
            if !structured {
                return;
            }
            let known = |name: &str| {
                (resource && matches!(name, "apiVersion" | "kind" | "metadata"))
                    || schema.properties.contains_key(name)
                    || schema.additional.is_some()
                    || schema.preserve_unknown
            };
            map.retain(|name, _| {
                let keep = known(name);
                if !keep {
                    unknown.push(child(path, name));
                }
                keep
            });
            for (name, value) in map.iter_mut() {
                if resource && matches!(name.as_str(), "apiVersion" | "kind" | "metadata") {
                    continue;
                }
                let next = match schema.properties.get(name) {
                    Some(next) => Some(next),
                    None => match &schema.additional {
                        Some(Additional::Schema(next)) => Some(&**next),
                        _ => None,
                    },
                };
                if let Some(next) = next {
                    let path = child(path, name);
                    prune(next, value, &path, next.embedded_resource, unknown);
                }
            }
        }
        Value::Array(list) => {
            if let Some(items) = &schema.items {
                for (index, item) in list.iter_mut().enumerate() {
                    let path = format!("{path}[{index}]");
                    prune(items, item, &path, items.embedded_resource, unknown);
                }
            }
        }
        _ => {}
    }
}

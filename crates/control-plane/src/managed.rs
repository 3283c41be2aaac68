//! `metadata.managedFields`: who set which field.

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::fields::{self, Fields};
use crate::meta;
use crate::registry::Kind;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Operation {
    Apply,
    Update,
}

impl Operation {
    fn as_str(self) -> &'static str {
        match self {
            Self::Apply => "Apply",
            Self::Update => "Update",
        }
    }
}

/// Who writes, and how.
#[derive(Debug, Clone)]
pub(crate) struct Writer {
    pub manager: String,
    pub operation: Operation,
    pub api_version: String,
    pub subresource: Option<String>,
    pub time: Timestamp,
}

/// One entry of managedFields.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Entry {
    pub manager: String,
    pub operation: Operation,
    pub api_version: String,
    pub subresource: Option<String>,
    pub time: Value,
    pub fields: Fields,
}

impl Entry {
    pub fn is_of(&self, writer: &Writer) -> bool {
        self.manager == writer.manager
            && self.operation == writer.operation
            && self.subresource == writer.subresource
            // Appliers are one over all versions.
            && (writer.operation == Operation::Apply || self.api_version == writer.api_version)
    }

    /// As kubectl prints it in a conflict.
    pub fn shown(&self) -> String {
        let mut shown = format!("{:?}", self.manager);
        if let Some(subresource) = &self.subresource {
            shown = format!("{shown} with subresource {subresource:?}");
        }
        match self.operation {
            Operation::Update => format!("{shown} using {}", self.api_version),
            Operation::Apply => shown,
        }
    }
}

/// The entries of an object; what cannot be read is left out.
pub(crate) fn entries(object: &Value) -> Vec<Entry> {
    object["metadata"]["managedFields"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|entry| {
            let operation = match entry["operation"].as_str()? {
                "Apply" => Operation::Apply,
                "Update" => Operation::Update,
                _ => return None,
            };
            Some(Entry {
                manager: entry["manager"].as_str().unwrap_or_default().to_owned(),
                operation,
                api_version: entry["apiVersion"].as_str().unwrap_or_default().to_owned(),
                subresource: entry["subresource"].as_str().map(str::to_owned),
                time: entry["time"].clone(),
                fields: Fields::from_json(&entry["fieldsV1"]),
            })
        })
        .collect()
}

/// Writes the entries into an object, those without fields left out.
pub(crate) fn set_entries(object: &mut Value, mut entries: Vec<Entry>) {
    entries.retain(|e| !e.fields.is_empty());
    entries.sort_by(|a, b| {
        let key = |e: &Entry| {
            (
                e.operation,
                e.time.as_str().unwrap_or_default().to_owned(),
                e.manager.clone(),
                e.api_version.clone(),
            )
        };
        key(a).cmp(&key(b))
    });
    let list: Vec<Value> = entries
        .iter()
        .map(|e| {
            let mut entry = json!({
                "manager": e.manager,
                "operation": e.operation.as_str(),
                "apiVersion": e.api_version,
                "time": e.time,
                "fieldsType": "FieldsV1",
                "fieldsV1": e.fields.to_json(),
            });
            if let Some(subresource) = &e.subresource {
                entry["subresource"] = subresource.as_str().into();
            }
            entry
        })
        .collect();
    let metadata = meta::metadata(object);
    if list.is_empty() {
        metadata.remove("managedFields");
    } else {
        metadata.insert("managedFields".to_owned(), list.into());
    }
}

/// Notes what an update changed. Applies have done so themselves.
pub(crate) fn track(kind: &Kind, old: Option<&Value>, object: &mut Value, writer: &Writer) {
    if writer.operation == Operation::Apply {
        return;
    }
    // `managedFields: [{}]` forgets what there was.
    let reset = object["metadata"]["managedFields"]
        .as_array()
        .is_some_and(|list| list.len() == 1 && list[0] == json!({}));
    let nothing = json!({});
    let mut entries = match old {
        Some(old) if !reset => entries(old),
        _ => Vec::new(),
    };
    let found = fields::compare(kind.schema(), old.unwrap_or(&nothing), object);
    let mut own = false;
    for entry in &mut entries {
        let before = entry.fields.clone();
        entry.fields = entry.fields.difference(&found.removed);
        if entry.is_of(writer) {
            own = true;
            entry.fields = entry.fields.union(&found.changed);
            if entry.fields != before {
                entry.time = meta::time(writer.time);
            }
        } else {
            entry.fields = entry.fields.difference(&found.changed);
        }
    }
    if !own {
        entries.push(Entry {
            manager: writer.manager.clone(),
            operation: writer.operation,
            api_version: writer.api_version.clone(),
            subresource: writer.subresource.clone(),
            time: meta::time(writer.time),
            fields: found.changed,
        });
    }
    set_entries(object, entries);
}

/// Whether a write would change nothing.
pub(crate) fn same(object: &Value, old: &Value) -> bool {
    object == old
}

//! Server-side printing: `meta.k8s.io/v1` Tables.

pub(crate) mod builtin;

use jiff::Timestamp;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceColumnDefinition;
use serde_json::{Value, json};

use crate::jsonpath::{JsonPath, PathError};
use crate::registry::Kind;

/// How a kind prints.
pub(crate) enum Columns {
    Crd(Vec<Column>),
    Builtin(&'static Printer),
}

/// A column of a CRD.
pub(crate) struct Column {
    name: String,
    type_: String,
    format: String,
    description: String,
    priority: i32,
    path: JsonPath,
}

/// The printer of a built-in kind.
pub(crate) struct Printer {
    /// Name, type, format, description, priority.
    pub columns: &'static [(&'static str, &'static str, &'static str, &'static str, i32)],
    pub cells: fn(&Value, Timestamp) -> Vec<Value>,
}

const NAME: &str = "Name must be unique within a namespace. Is required when creating resources, although some resources may allow a client to request the generation of an appropriate name automatically. Name is primarily intended for creation idempotence and configuration definition. Cannot be updated. More info: https://kubernetes.io/docs/concepts/overview/working-with-objects/names#names";
const CREATED: &str = "CreationTimestamp is a timestamp representing the server time when this object was created. It is not guaranteed to be set in happens-before order across separate operations. Clients may not set this value. It is represented in RFC3339 form and is in UTC.\n\nPopulated by the system. Read-only. Null for lists. More info: https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md#metadata";

impl Columns {
    pub fn from_crd(columns: &[CustomResourceColumnDefinition]) -> Result<Self, PathError> {
        if columns.is_empty() {
            return Ok(Self::Crd(vec![Column {
                name: "Age".to_owned(),
                type_: "date".to_owned(),
                format: String::new(),
                description: CREATED.to_owned(),
                priority: 0,
                path: ".metadata.creationTimestamp".parse()?,
            }]));
        }
        columns
            .iter()
            .map(|c| {
                let description = c.description.clone().unwrap_or_else(|| {
                    format!(
                        "Custom resource definition column (in JSONPath format): {}",
                        c.json_path
                    )
                });
                Ok(Column {
                    name: c.name.clone(),
                    type_: c.type_.clone(),
                    format: c.format.clone().unwrap_or_default(),
                    description,
                    priority: c.priority.unwrap_or(0),
                    path: c.json_path.parse()?,
                })
            })
            .collect::<Result<_, _>>()
            .map(Self::Crd)
    }

    fn definitions(&self) -> Vec<Value> {
        let definition =
            |name: &str, type_: &str, format: &str, description: &str, priority: i32| {
                json!({
                    "name": name, "type": type_, "format": format,
                    "description": description, "priority": priority,
                })
            };
        match self {
            Self::Crd(columns) => {
                let mut all = vec![definition("Name", "string", "name", NAME, 0)];
                all.extend(
                    columns.iter().map(|c| {
                        definition(&c.name, &c.type_, &c.format, &c.description, c.priority)
                    }),
                );
                all
            }
            Self::Builtin(printer) => printer
                .columns
                .iter()
                .map(|(name, type_, format, description, priority)| {
                    let description = match *description {
                        "" if *name == "Name" => NAME,
                        "" if *name == "Age" => CREATED,
                        text => text,
                    };
                    definition(name, type_, format, description, *priority)
                })
                .collect(),
        }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        match self {
            Self::Crd(columns) => {
                let mut cells = vec![object["metadata"]["name"].clone()];
                cells.extend(columns.iter().map(|c| c.cell(object, now)));
                cells
            }
            Self::Builtin(printer) => (printer.cells)(object, now),
        }
    }
}

impl Column {
    fn cell(&self, object: &Value, now: Timestamp) -> Value {
        let Some(value) = self.path.first(object) else {
            return Value::Null;
        };
        match (self.type_.as_str(), value) {
            (_, Value::Null) => Value::Null,
            ("integer", Value::Number(n)) => n
                .as_i64()
                .or_else(|| n.as_f64().map(|f| f as i64))
                .map_or(Value::Null, Value::from),
            ("number", Value::Number(_)) | ("boolean", Value::Bool(_)) => value.clone(),
            ("string", Value::String(_)) => value.clone(),
            ("string", other) => other.to_string().into(),
            ("date", Value::String(text)) => match text.parse::<Timestamp>() {
                Ok(at) => age(at, now).into(),
                Err(_) => "<invalid>".into(),
            },
            _ => Value::Null,
        }
    }
}

/// What a row carries of its object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IncludeObject {
    Nothing,
    Metadata,
    Object,
}

/// A Table of objects. Without `definitions` it is a later object of a watch.
pub(crate) fn table<'a>(
    kind: &Kind,
    objects: impl Iterator<Item = &'a Value>,
    list_metadata: &Value,
    include: IncludeObject,
    now: Timestamp,
    definitions: bool,
) -> Value {
    let rows: Vec<Value> = objects
        .map(|object| {
            let shown = match include {
                IncludeObject::Nothing => Value::Null,
                IncludeObject::Metadata => partial(object),
                IncludeObject::Object => object.clone(),
            };
            json!({"cells": kind.columns.cells(object, now), "object": shown})
        })
        .collect();
    json!({
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": list_metadata,
        "columnDefinitions": if definitions { kind.columns.definitions().into() } else { Value::Null },
        "rows": rows,
    })
}

/// Only the metadata of an object.
pub(crate) fn partial(object: &Value) -> Value {
    json!({
        "kind": "PartialObjectMetadata",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": object["metadata"],
    })
}

/// The age of a stored time, as a cell.
pub(crate) fn age_of(value: &Value, now: Timestamp) -> Value {
    match value.as_str().map(str::parse::<Timestamp>) {
        Some(Ok(at)) => age(at, now).into(),
        _ => "<unknown>".into(),
    }
}

/// How kubectl prints a duration: `duration.HumanDuration` of k8s.io/apimachinery.
pub(crate) fn age(at: Timestamp, now: Timestamp) -> String {
    human(now.as_second() - at.as_second())
}

fn human(seconds: i64) -> String {
    let (minutes, hours) = (seconds / 60, seconds / 3600);
    match seconds {
        s if s < -1 => "<invalid>".to_owned(),
        s if s < 0 => "0s".to_owned(),
        s if s < 120 => format!("{s}s"),
        s if minutes < 10 => two(minutes, 'm', s % 60, 's'),
        _ if minutes < 180 => format!("{minutes}m"),
        _ if hours < 8 => two(hours, 'h', minutes % 60, 'm'),
        _ if hours < 48 => format!("{hours}h"),
        _ if hours < 192 => two(hours / 24, 'd', hours % 24, 'h'),
        _ if hours < 24 * 365 * 2 => format!("{}d", hours / 24),
        _ if hours < 24 * 365 * 8 => two(hours / 24 / 365, 'y', hours / 24 % 365, 'd'),
        _ => format!("{}y", hours / 24 / 365),
    }
}

fn two(big: i64, big_unit: char, small: i64, small_unit: char) -> String {
    if small == 0 {
        format!("{big}{big_unit}")
    } else {
        format!("{big}{big_unit}{small}{small_unit}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_read_as_kubectl_prints_them() {
        for (seconds, text) in [
            (-5, "<invalid>"),
            (0, "0s"),
            (119, "119s"),
            (120, "2m"),
            (125, "2m5s"),
            (600, "10m"),
            (10_800, "3h"),
            (11_100, "3h5m"),
            (8 * 3600, "8h"),
            (47 * 3600, "47h"),
            (50 * 3600, "2d2h"),
            (10 * 86_400, "10d"),
            (800 * 86_400, "2y70d"),
            (9 * 365 * 86_400, "9y"),
        ] {
            assert_eq!(human(seconds), text, "{seconds}");
        }
    }
}

//! How the built-in kinds print (`k8s.io/kubernetes/pkg/printers/internalversion`).

use jiff::Timestamp;
use serde_json::Value;

use super::{Printer, age, age_of};

const NAME: (&str, &str, &str, &str, i32) = ("Name", "string", "name", "", 0);
const AGE: (&str, &str, &str, &str, i32) = ("Age", "string", "", "", 0);

fn count(value: &Value) -> i64 {
    value
        .as_object()
        .and_then(|m| i64::try_from(m.len()).ok())
        .unwrap_or(0)
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

pub(crate) static CONFIG_MAPS: Printer = Printer {
    columns: &[
        NAME,
        (
            "Data",
            "string",
            "",
            "Data contains the configuration data. Each key must consist of alphanumeric characters, '-', '_' or '.'. Values with non-UTF-8 byte sequences must use the BinaryData field. The keys stored in Data must not overlap with the keys in the BinaryData field, this is enforced during validation process.",
            0,
        ),
        AGE,
    ],
    cells: |object, now| {
        vec![
            object["metadata"]["name"].clone(),
            (count(&object["data"]) + count(&object["binaryData"])).into(),
            age_of(&object["metadata"]["creationTimestamp"], now),
        ]
    },
};

pub(crate) static SECRETS: Printer = Printer {
    columns: &[
        NAME,
        (
            "Type",
            "string",
            "",
            "Used to facilitate programmatic handling of secret data. More info: https://kubernetes.io/docs/concepts/configuration/secret/#secret-types",
            0,
        ),
        (
            "Data",
            "string",
            "",
            "Data contains the secret data. Each key must consist of alphanumeric characters, '-', '_' or '.'. The serialized form of the secret data is a base64 encoded string, representing the arbitrary (possibly non-string) data value here. Described in https://tools.ietf.org/html/rfc4648#section-4",
            0,
        ),
        AGE,
    ],
    cells: |object, now| {
        vec![
            object["metadata"]["name"].clone(),
            object["type"].clone(),
            count(&object["data"]).into(),
            age_of(&object["metadata"]["creationTimestamp"], now),
        ]
    },
};

pub(crate) static NAMESPACES: Printer = Printer {
    columns: &[
        NAME,
        ("Status", "string", "", "The status of the namespace", 0),
        AGE,
    ],
    cells: |object, now| {
        vec![
            object["metadata"]["name"].clone(),
            object["status"]["phase"].clone(),
            age_of(&object["metadata"]["creationTimestamp"], now),
        ]
    },
};

pub(crate) static EVENTS: Printer = Printer {
    columns: &[
        (
            "Last Seen",
            "string",
            "",
            "The time at which the most recent occurrence of this event was recorded.",
            0,
        ),
        (
            "Type",
            "string",
            "",
            "Type of this event (Normal, Warning), new types could be added in the future",
            0,
        ),
        (
            "Reason",
            "string",
            "",
            "This should be a short, machine understandable string that gives the reason for the transition into the object's current status.",
            0,
        ),
        (
            "Object",
            "string",
            "",
            "The object that this event is about.",
            0,
        ),
        (
            "Subobject",
            "string",
            "",
            "If referring to a piece of an object instead of an entire object, this should contain a valid JSON/Go field access statement.",
            1,
        ),
        (
            "Source",
            "string",
            "",
            "The component reporting this event. Should be a short machine understandable string.",
            1,
        ),
        (
            "Message",
            "string",
            "",
            "A human-readable description of the status of this operation.",
            0,
        ),
        (
            "First Seen",
            "string",
            "",
            "The time at which the event was first recorded. (Time of server receipt is in TypeMeta.)",
            1,
        ),
        (
            "Count",
            "string",
            "",
            "The number of times this event has occurred.",
            1,
        ),
        ("Name", "string", "name", "", 1),
    ],
    cells: event_cells,
};

/// Of either form of an Event.
fn event_cells(object: &Value, now: Timestamp) -> Vec<Value> {
    let either = |core: &str, grouped: &str| {
        let value = &object[core];
        if value.is_null() {
            &object[grouped]
        } else {
            value
        }
    };
    let first = either("firstTimestamp", "deprecatedFirstTimestamp");
    let last = either("lastTimestamp", "deprecatedLastTimestamp");
    let event_time = &object["eventTime"];
    let ago = |value: &Value| match text(value).parse::<Timestamp>() {
        Ok(at) => age(at, now),
        Err(_) => "<unknown>".to_owned(),
    };
    let first_seen = if first.is_null() {
        ago(event_time)
    } else {
        ago(first)
    };
    let last_seen = if !object["series"].is_null() {
        ago(&object["series"]["lastObservedTime"])
    } else if last.is_null() {
        first_seen.clone()
    } else {
        ago(last)
    };
    let count = if object["series"].is_null() {
        either("count", "deprecatedCount")
            .as_i64()
            .unwrap_or(1)
            .max(1)
    } else {
        object["series"]["count"].as_i64().unwrap_or(1)
    };
    let about = either("involvedObject", "regarding");
    let source = either("source", "deprecatedSource");
    let component = match text(&source["component"]) {
        "" => text(either("reportingComponent", "reportingController")),
        named => named,
    };
    let source = match text(&source["host"]) {
        "" => match text(&object["reportingInstance"]) {
            "" => component.to_owned(),
            instance => format!("{component}, {instance}"),
        },
        host => format!("{component}, {host}"),
    };
    let subject = format!(
        "{}/{}",
        text(&about["kind"]).to_lowercase(),
        text(&about["name"])
    );
    vec![
        last_seen.into(),
        object["type"].clone(),
        object["reason"].clone(),
        subject.into(),
        text(&about["fieldPath"]).into(),
        source.into(),
        text(either("message", "note")).trim().into(),
        first_seen.into(),
        count.into(),
        object["metadata"]["name"].clone(),
    ]
}

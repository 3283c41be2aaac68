//! Bodies in Kubernetes' protobuf, decoded into the JSON they stand for.
//!
//! kubectl's typed commands (`kubectl create secret`, `create namespace`) send protobuf since 1.33
//! and take no for an answer badly: there is no falling back to JSON. Only what such commands send
//! for the built-in kinds is known here; answers are always JSON, which they accept. Field numbers
//! are those of `generated.proto` in `k8s.io/api` and `k8s.io/apimachinery`.

use data_encoding::BASE64;
use jiff::Timestamp;
use serde_json::{Map, Value, json};

use crate::error::{ApiError, ApiResult};

pub(crate) const MEDIA_TYPE: &str = "application/vnd.kubernetes.protobuf";

/// Stands before every message.
const MAGIC: &[u8] = b"k8s\0";

/// What a field holds. Zero values of `Text` and `Number` are left out, as Go's `omitempty` does;
/// the `Optional` ones come only when they were set.
#[derive(Clone, Copy)]
enum Type {
    Text,
    Texts,
    Number,
    Optional,
    Flag,
    /// RFC 3339 in whole seconds, or in microseconds.
    Time,
    MicroTime,
    /// JSON in bytes, in a message of its own.
    Raw,
    Message(&'static Message),
    Messages(&'static Message),
    TextMap,
    BytesMap,
}

/// Number, name and type of each field.
type Message = [(u64, &'static str, Type)];

static OWNER: &Message = &[
    (1, "kind", Type::Text),
    (3, "name", Type::Text),
    (4, "uid", Type::Text),
    (5, "apiVersion", Type::Text),
    (6, "controller", Type::Flag),
    (7, "blockOwnerDeletion", Type::Flag),
];

static MANAGED: &Message = &[
    (1, "manager", Type::Text),
    (2, "operation", Type::Text),
    (3, "apiVersion", Type::Text),
    (4, "time", Type::Time),
    (6, "fieldsType", Type::Text),
    (7, "fieldsV1", Type::Raw),
    (8, "subresource", Type::Text),
];

static METADATA: &Message = &[
    (1, "name", Type::Text),
    (2, "generateName", Type::Text),
    (3, "namespace", Type::Text),
    (4, "selfLink", Type::Text),
    (5, "uid", Type::Text),
    (6, "resourceVersion", Type::Text),
    (7, "generation", Type::Number),
    (8, "creationTimestamp", Type::Time),
    (9, "deletionTimestamp", Type::Time),
    (10, "deletionGracePeriodSeconds", Type::Optional),
    (11, "labels", Type::TextMap),
    (12, "annotations", Type::TextMap),
    (13, "ownerReferences", Type::Messages(OWNER)),
    (14, "finalizers", Type::Texts),
    (17, "managedFields", Type::Messages(MANAGED)),
];

static REFERENCE: &Message = &[
    (1, "kind", Type::Text),
    (2, "namespace", Type::Text),
    (3, "name", Type::Text),
    (4, "uid", Type::Text),
    (5, "apiVersion", Type::Text),
    (6, "resourceVersion", Type::Text),
    (7, "fieldPath", Type::Text),
];

static SOURCE: &Message = &[(1, "component", Type::Text), (2, "host", Type::Text)];

static SERIES: &Message = &[
    (1, "count", Type::Number),
    (2, "lastObservedTime", Type::MicroTime),
];

/// The messages by apiVersion and kind.
static KINDS: &[(&str, &str, &Message)] = &[
    (
        "v1",
        "Secret",
        &[
            (1, "metadata", Type::Message(METADATA)),
            (2, "data", Type::BytesMap),
            (3, "type", Type::Text),
            (4, "stringData", Type::TextMap),
            (5, "immutable", Type::Flag),
        ],
    ),
    (
        "v1",
        "ConfigMap",
        &[
            (1, "metadata", Type::Message(METADATA)),
            (2, "data", Type::TextMap),
            (3, "binaryData", Type::BytesMap),
            (4, "immutable", Type::Flag),
        ],
    ),
    (
        "v1",
        "Namespace",
        &[
            (1, "metadata", Type::Message(METADATA)),
            (2, "spec", Type::Message(&[(1, "finalizers", Type::Texts)])),
            (3, "status", Type::Message(&[(1, "phase", Type::Text)])),
        ],
    ),
    (
        "v1",
        "Event",
        &[
            (1, "metadata", Type::Message(METADATA)),
            (2, "involvedObject", Type::Message(REFERENCE)),
            (3, "reason", Type::Text),
            (4, "message", Type::Text),
            (5, "source", Type::Message(SOURCE)),
            (6, "firstTimestamp", Type::Time),
            (7, "lastTimestamp", Type::Time),
            (8, "count", Type::Number),
            (9, "type", Type::Text),
            (10, "eventTime", Type::MicroTime),
            (11, "series", Type::Message(SERIES)),
            (12, "action", Type::Text),
            (13, "related", Type::Message(REFERENCE)),
            (14, "reportingComponent", Type::Text),
            (15, "reportingInstance", Type::Text),
        ],
    ),
    (
        "events.k8s.io/v1",
        "Event",
        &[
            (1, "metadata", Type::Message(METADATA)),
            (2, "eventTime", Type::MicroTime),
            (3, "series", Type::Message(SERIES)),
            (4, "reportingController", Type::Text),
            (5, "reportingInstance", Type::Text),
            (6, "action", Type::Text),
            (7, "reason", Type::Text),
            (8, "regarding", Type::Message(REFERENCE)),
            (9, "related", Type::Message(REFERENCE)),
            (10, "note", Type::Text),
            (11, "type", Type::Text),
            (12, "deprecatedSource", Type::Message(SOURCE)),
            (13, "deprecatedFirstTimestamp", Type::Time),
            (14, "deprecatedLastTimestamp", Type::Time),
            (15, "deprecatedCount", Type::Number),
        ],
    ),
    (
        "",
        "DeleteOptions",
        &[
            (1, "gracePeriodSeconds", Type::Optional),
            (
                2,
                "preconditions",
                Type::Message(&[(1, "uid", Type::Text), (2, "resourceVersion", Type::Text)]),
            ),
            (3, "orphanDependents", Type::Flag),
            (4, "propagationPolicy", Type::Text),
            (5, "dryRun", Type::Texts),
        ],
    ),
];

/// Decodes a body.
pub(crate) fn decode(bytes: &[u8]) -> ApiResult<Value> {
    let malformed = || ApiError::bad_request("the body is no Kubernetes protobuf message");
    let unknown = bytes.strip_prefix(MAGIC).ok_or_else(malformed)?;
    // runtime.Unknown: 1 typeMeta, 2 raw.
    let (mut api_version, mut kind, mut raw) = (String::new(), String::new(), &[][..]);
    for part in parts(unknown).ok_or_else(malformed)? {
        match part {
            (1, Part::Bytes(meta)) => {
                for part in parts(meta).ok_or_else(malformed)? {
                    match part {
                        (1, Part::Bytes(text)) => api_version = lossy(text),
                        (2, Part::Bytes(text)) => kind = lossy(text),
                        _ => {}
                    }
                }
            }
            (2, Part::Bytes(bytes)) => raw = bytes,
            _ => {}
        }
    }
    let message = KINDS
        .iter()
        .find(|(v, k, _)| *k == kind && (v.is_empty() || *v == api_version))
        .map(|(_, _, message)| *message)
        // Custom resources have no protobuf form in any Kubernetes.
        .ok_or_else(|| ApiError::unsupported_media_type(crate::decode::ACCEPTED))?;
    let mut object = self::message(message, raw).ok_or_else(malformed)?;
    object.insert("apiVersion".to_owned(), api_version.into());
    object.insert("kind".to_owned(), kind.into());
    Ok(Value::Object(object))
}

enum Part<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

/// The fields of a message, in order; None: malformed.
fn parts(mut bytes: &[u8]) -> Option<Vec<(u64, Part<'_>)>> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let tag = varint(&mut bytes)?;
        let part = match tag & 7 {
            0 => Part::Number(varint(&mut bytes)?),
            2 => {
                let length = usize::try_from(varint(&mut bytes)?).ok()?;
                let (inner, rest) = bytes.split_at_checked(length)?;
                bytes = rest;
                Part::Bytes(inner)
            }
            // Fixed-size numbers occur in none of the kinds.
            _ => return None,
        };
        found.push((tag >> 3, part));
    }
    Some(found)
}

fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0_u64;
    for shift in (0..64).step_by(7) {
        let (first, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(first & 0x7f) << shift;
        if first & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn message(fields: &Message, bytes: &[u8]) -> Option<Map<String, Value>> {
    let mut map = Map::new();
    for (number, part) in parts(bytes)? {
        let Some((_, name, type_)) = fields.iter().find(|(n, _, _)| *n == number) else {
            continue;
        };
        let append = |map: &mut Map<String, Value>, value: Value| {
            if let Value::Array(list) = map.entry(*name).or_insert_with(|| json!([])) {
                list.push(value);
            }
        };
        let set = |map: &mut Map<String, Value>, value: Value| {
            map.insert((*name).to_owned(), value);
        };
        match (type_, part) {
            (Type::Text, Part::Bytes(text)) if !text.is_empty() => {
                set(&mut map, lossy(text).into());
            }
            (Type::Texts, Part::Bytes(text)) => append(&mut map, lossy(text).into()),
            (Type::Number, Part::Number(n)) if n != 0 => set(&mut map, signed(n).into()),
            (Type::Optional, Part::Number(n)) => set(&mut map, signed(n).into()),
            (Type::Flag, Part::Number(n)) => set(&mut map, (n != 0).into()),
            (Type::Time, Part::Bytes(bytes)) => {
                if let Some(at) = time(bytes)? {
                    set(&mut map, at.to_string().into());
                }
            }
            (Type::MicroTime, Part::Bytes(bytes)) => {
                if let Some(at) = time(bytes)? {
                    set(&mut map, format!("{at:.6}").into());
                }
            }
            (Type::Raw, Part::Bytes(bytes)) => {
                for part in parts(bytes)? {
                    if let (1, Part::Bytes(json)) = part {
                        set(&mut map, serde_json::from_slice(json).ok()?);
                    }
                }
            }
            (Type::Message(inner), Part::Bytes(bytes)) => {
                let inner = message(inner, bytes)?;
                if !inner.is_empty() {
                    set(&mut map, inner.into());
                }
            }
            (Type::Messages(inner), Part::Bytes(bytes)) => {
                append(&mut map, message(inner, bytes)?.into());
            }
            (Type::TextMap | Type::BytesMap, Part::Bytes(bytes)) => {
                let (key, value) = entry(bytes)?;
                let value = match type_ {
                    Type::TextMap => lossy(value),
                    _ => BASE64.encode(value),
                };
                if let Value::Object(entries) = map.entry(*name).or_insert_with(|| json!({})) {
                    entries.insert(key, value.into());
                }
            }
            (Type::Text | Type::Number, Part::Bytes(_) | Part::Number(_)) => {}
            _ => return None,
        }
    }
    Some(map)
}

/// Numbers are two's complement in 64 bits.
fn signed(n: u64) -> i64 {
    n.cast_signed()
}

fn entry(bytes: &[u8]) -> Option<(String, &[u8])> {
    let (mut key, mut value) = (String::new(), &[][..]);
    for part in parts(bytes)? {
        match part {
            (1, Part::Bytes(text)) => key = lossy(text),
            (2, Part::Bytes(bytes)) => value = bytes,
            _ => return None,
        }
    }
    Some((key, value))
}

/// None inside: the zero time.
fn time(bytes: &[u8]) -> Option<Option<Timestamp>> {
    let (mut seconds, mut nanos) = (0, 0);
    let mut set = false;
    for part in parts(bytes)? {
        set = true;
        match part {
            (1, Part::Number(n)) => seconds = signed(n),
            (2, Part::Number(n)) => nanos = i32::try_from(signed(n)).ok()?,
            _ => return None,
        }
    }
    // Go's zero time is the year 1.
    if !set || seconds <= 0 {
        return Some(None);
    }
    Timestamp::new(seconds, nanos).ok().map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
        let mut out = vec![number << 3 | 2, u8::try_from(bytes.len()).unwrap()];
        out.extend_from_slice(bytes);
        out
    }

    #[test]
    fn a_secret_becomes_what_its_json_would_be() {
        let labels = field(11, &[field(1, b"a"), field(2, b"b")].concat());
        let metadata = [field(1, b"s"), field(2, b""), labels, field(8, b"")].concat();
        let data = [field(1, b"k"), field(2, &[0, 255])].concat();
        let secret = [field(1, &metadata), field(2, &data), vec![5 << 3, 1]].concat();
        let type_meta = [field(1, b"v1"), field(2, b"Secret")].concat();
        let body = [
            MAGIC.to_vec(),
            field(1, &type_meta),
            field(2, &secret),
            field(3, b""),
        ]
        .concat();
        assert_eq!(
            decode(&body).unwrap(),
            json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s", "labels": {"a": "b"}},
                   "data": {"k": "AP8="}, "immutable": true})
        );
        // Cut anywhere it is refused or misses its end, but nothing worse.
        for end in 0..body.len() {
            let _ = decode(&body[..end]);
        }
    }
}

//! Validation against a schema, with the sentences and causes of kube-apiserver
//! (`k8s.io/kube-openapi/pkg/validation/{errors,validate}`).

use serde_json::{Number, Value};

use super::{Additional, Bound, ListType, Schema, Type, child, type_name};
use crate::error::{Fault, FieldError};

impl Schema {
    /// All faults of `value`. With `old`, what did not change is not complained of again: an object
    /// that was valid under an earlier schema can still be worked with.
    pub fn validate(&self, value: &Value, old: Option<&Value>, path: &str) -> Vec<FieldError> {
        let mut faults = Vec::new();
        node(self, value, old, path, &mut faults);
        faults
    }

    /// Duplicates in lists that are sets or maps.
    pub fn duplicates(&self, value: &Value, path: &str) -> Vec<FieldError> {
        let mut faults = Vec::new();
        duplicates(self, value, path, &mut faults);
        faults
    }
}

fn node(
    schema: &Schema,
    value: &Value,
    old: Option<&Value>,
    path: &str,
    faults: &mut Vec<FieldError>,
) {
    if old == Some(value) {
        return;
    }
    if let Some(fault) = wrong_type(schema, value, path) {
        faults.push(fault);
        return;
    }
    match value {
        Value::Null | Value::Bool(_) => {}
        Value::Number(number) => numbers(schema, number, value, path, faults),
        Value::String(text) => strings(schema, text, path, faults),
        Value::Array(list) => arrays(schema, list, old, path, faults),
        Value::Object(map) => objects(schema, map, old, path, faults),
    }
    if let Some(allowed) = &schema.allowed
        && !(value.is_null() && schema.nullable)
        && !allowed.contains(value)
    {
        let shown: Vec<String> = allowed
            .iter()
            .map(|v| match v {
                Value::String(s) => format!("{s:?}"),
                other => format!("{:?}", other.to_string()),
            })
            .collect();
        faults.push(FieldError::new(
            path,
            Fault::NotSupported,
            Some(value.clone()),
            format!("supported values: {}", shown.join(", ")),
        ));
    }
    combinations(schema, value, path, faults);
}

fn wrong_type(schema: &Schema, value: &Value, path: &str) -> Option<FieldError> {
    let found = type_name(value);
    if value.is_null() {
        if schema.nullable || (schema.type_.is_none() && !schema.int_or_string) {
            return None;
        }
    } else if schema.int_or_string {
        if matches!(found, "integer" | "string") {
            return None;
        }
    } else {
        let fits = match schema.type_ {
            None => true,
            Some(Type::Number) => matches!(found, "number" | "integer"),
            Some(Type::Integer) => {
                found == "integer" || value.as_f64().is_some_and(|n| n.fract() == 0.0)
            }
            Some(wanted) => wanted.as_str() == found,
        };
        if fits {
            return None;
        }
    }
    let wanted = if schema.int_or_string {
        "integer,string"
    } else {
        schema.type_.map_or("", Type::as_str)
    };
    Some(FieldError::new(
        path,
        Fault::TypeInvalid,
        Some(found.into()),
        format!("{path} in body must be of type {wanted}: \"{found}\""),
    ))
}

fn invalid(path: &str, value: &Value, what: &str) -> FieldError {
    FieldError::invalid(path, value.clone(), format!("{path} in body {what}"))
}

fn numbers(
    schema: &Schema,
    number: &Number,
    value: &Value,
    path: &str,
    faults: &mut Vec<FieldError>,
) {
    if let Some(bound) = &schema.maximum
        && beyond(number, bound, std::cmp::Ordering::Greater)
    {
        let word = if bound.exclusive {
            "less than"
        } else {
            "less than or equal to"
        };
        faults.push(invalid(
            path,
            value,
            &format!("should be {word} {}", bound.value),
        ));
    }
    if let Some(bound) = &schema.minimum
        && beyond(number, bound, std::cmp::Ordering::Less)
    {
        let word = if bound.exclusive {
            "greater than"
        } else {
            "greater than or equal to"
        };
        faults.push(invalid(
            path,
            value,
            &format!("should be {word} {}", bound.value),
        ));
    }
    if let (Some(factor), Some(n)) = (schema.multiple_of, number.as_f64())
        && factor > 0.0
        && (n / factor).fract() != 0.0
    {
        faults.push(invalid(
            path,
            value,
            &format!("should be a multiple of {factor}"),
        ));
    }
    let range = match schema.format.as_deref() {
        Some("int32") => Some((i64::from(i32::MIN), i64::from(i32::MAX))),
        _ => None,
    };
    if let (Some((low, high)), Some(n)) = (range, number.as_i64())
        && !(low..=high).contains(&n)
    {
        faults.push(FieldError::invalid(
            path,
            value.clone(),
            format!("{path} in body must be of type int32: \"{n}\""),
        ));
    }
}

fn beyond(number: &Number, bound: &Bound, direction: std::cmp::Ordering) -> bool {
    let order = match (number.as_i64(), bound.value.as_i64()) {
        (Some(a), Some(b)) => Some(a.cmp(&b)),
        _ => number
            .as_f64()
            .zip(bound.value.as_f64())
            .and_then(|(a, b)| a.partial_cmp(&b)),
    };
    order.is_some_and(|o| o == direction || (bound.exclusive && o == std::cmp::Ordering::Equal))
}

fn strings(schema: &Schema, text: &str, path: &str, faults: &mut Vec<FieldError>) {
    let length = text.chars().count() as u64;
    let value = Value::from(text);
    if let Some(max) = schema.max_length.filter(|max| length > *max) {
        faults.push(FieldError::new(
            path,
            Fault::TooLong,
            None,
            format!("may not be more than {max} bytes"),
        ));
    }
    if let Some(min) = schema.min_length.filter(|min| length < *min) {
        faults.push(invalid(
            path,
            &value,
            &format!("should be at least {min} chars long"),
        ));
    }
    if let Some(pattern) = &schema.pattern
        && !pattern.matches(text)
    {
        faults.push(invalid(
            path,
            &value,
            &format!("should match '{}'", pattern.text),
        ));
    }
    let wrong_format = match schema.format.as_deref() {
        Some("date-time") => text.parse::<jiff::Timestamp>().is_err(),
        Some("date") => text.parse::<jiff::civil::Date>().is_err(),
        Some("byte") => data_encoding::BASE64.decode(text.as_bytes()).is_err(),
        Some("ipv4") => text.parse::<std::net::Ipv4Addr>().is_err(),
        Some("ipv6") => text.parse::<std::net::Ipv6Addr>().is_err(),
        Some("uuid") => text.parse::<uuid::Uuid>().is_err(),
        Some("uri") => url::Url::parse(text).is_err(),
        _ => false,
    };
    if wrong_format {
        let format = schema.format.as_deref().unwrap_or_default();
        faults.push(invalid(
            path,
            &value,
            &format!("must be of type {format}: {value}"),
        ));
    }
}

fn arrays(
    schema: &Schema,
    list: &[Value],
    old: Option<&Value>,
    path: &str,
    faults: &mut Vec<FieldError>,
) {
    let length = list.len() as u64;
    if let Some(max) = schema.max_items.filter(|max| length > *max) {
        faults.push(too_many(path, length, max));
    }
    if let Some(min) = schema.min_items.filter(|min| length < *min) {
        faults.push(FieldError::invalid(
            path,
            length,
            format!("{path} in body should have at least {min} items"),
        ));
    }
    if schema.unique_items && (1..list.len()).any(|i| list[..i].contains(&list[i])) {
        faults.push(FieldError::invalid(
            path,
            Value::from(list.to_vec()),
            format!("{path} in body shouldn't contain duplicates"),
        ));
    }
    if let Some(items) = &schema.items {
        for (index, item) in list.iter().enumerate() {
            let before = old.and_then(|o| previous_item(schema, o, item, index));
            node(items, item, before, &format!("{path}[{index}]"), faults);
        }
    }
}

fn too_many(path: &str, actual: u64, max: u64) -> FieldError {
    let items = if max == 1 { "item" } else { "items" };
    FieldError::new(
        path,
        Fault::TooMany,
        Some(actual.into()),
        format!("must have at most {max} {items}"),
    )
}

/// The item of the old list that this one continues: by key in a list that is a map. Items of other
/// lists cannot be told apart.
fn previous_item<'a>(
    schema: &Schema,
    old: &'a Value,
    item: &Value,
    _index: usize,
) -> Option<&'a Value> {
    let ListType::Map(keys) = &schema.list else {
        return None;
    };
    old.as_array()?
        .iter()
        .find(|o| keys.iter().all(|k| o.get(k) == item.get(k)))
}

fn objects(
    schema: &Schema,
    map: &serde_json::Map<String, Value>,
    old: Option<&Value>,
    path: &str,
    faults: &mut Vec<FieldError>,
) {
    let length = map.len() as u64;
    if let Some(max) = schema.max_properties.filter(|max| length > *max) {
        faults.push(too_many(path, length, max));
    }
    if let Some(min) = schema.min_properties.filter(|min| length < *min) {
        faults.push(FieldError::invalid(
            path,
            length,
            format!("{path} in body should have at least {min} properties"),
        ));
    }
    for (name, value) in map {
        let next = match schema.properties.get(name) {
            Some(next) => Some(next),
            None => match &schema.additional {
                Some(Additional::Schema(next)) => Some(&**next),
                _ => None,
            },
        };
        if let Some(next) = next {
            let before = old.and_then(|o| o.get(name));
            node(next, value, before, &child(path, name), faults);
        }
    }
    for name in &schema.required {
        if !map.contains_key(name) {
            faults.push(FieldError::required(child(path, name), ""));
        }
    }
}

fn combinations(schema: &Schema, value: &Value, path: &str, faults: &mut Vec<FieldError>) {
    let fits = |s: &Schema| s.validate(value, None, path).is_empty();
    let shown = if path.is_empty() { "<nil>" } else { path };
    if !schema.any_of.is_empty() && !schema.int_or_string && !schema.any_of.iter().any(fits) {
        faults.push(FieldError::invalid(
            path,
            "",
            format!("{shown:?} must validate at least one schema (anyOf)"),
        ));
    }
    if !schema.one_of.is_empty() {
        let count = schema.one_of.iter().filter(|s| fits(s)).count();
        if count != 1 {
            let found = if count == 0 {
                "Found none valid".to_owned()
            } else {
                format!("Found {count} valid alternatives")
            };
            faults.push(FieldError::invalid(
                path,
                "",
                format!("{shown:?} must validate one and only one schema (oneOf). {found}"),
            ));
        }
    }
    if !schema.all_of.is_empty() && !schema.all_of.iter().all(fits) {
        for part in &schema.all_of {
            faults.extend(part.validate(value, None, path));
        }
        faults.push(FieldError::invalid(
            path,
            "",
            format!("{shown:?} must validate all the schemas (allOf)"),
        ));
    }
    if schema.not.as_deref().is_some_and(fits) {
        faults.push(FieldError::invalid(
            path,
            "",
            format!("{shown:?} must not validate the schema (not)"),
        ));
    }
}

fn duplicates(schema: &Schema, value: &Value, path: &str, faults: &mut Vec<FieldError>) {
    match value {
        Value::Object(map) => {
            for (name, value) in map {
                if let Some(next) = schema.property(name) {
                    duplicates(next, value, &child(path, name), faults);
                }
            }
        }
        Value::Array(list) => {
            for (index, item) in list.iter().enumerate() {
                let again = match &schema.list {
                    ListType::Atomic => None,
                    ListType::Set => list[..index].contains(item).then(|| item.clone()),
                    ListType::Map(keys) => {
                        let key = |v: &Value| -> serde_json::Map<String, Value> {
                            keys.iter()
                                .filter_map(|k| v.get(k).map(|x| (k.clone(), x.clone())))
                                .collect()
                        };
                        let own = key(item);
                        list[..index]
                            .iter()
                            .any(|other| key(other) == own)
                            .then_some(Value::Object(own))
                    }
                };
                if let Some(shown) = again {
                    faults.push(FieldError::new(
                        format!("{path}[{index}]"),
                        Fault::Duplicate,
                        Some(shown),
                        "",
                    ));
                }
                if let Some(items) = &schema.items {
                    duplicates(items, item, &format!("{path}[{index}]"), faults);
                }
            }
        }
        _ => {}
    }
}

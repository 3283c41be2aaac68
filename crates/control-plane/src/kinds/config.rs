//! ConfigMaps and Secrets.

use data_encoding::BASE64;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use serde_json::{Map, Value};

use super::generate;
use crate::error::{Fault, FieldError};
use crate::registry::{Kind, NameRule, Strategy, builtin_kind};
use crate::table::{Columns, builtin};

/// The most that a ConfigMap or Secret may hold.
const MAX_BYTES: usize = 1024 * 1024;

pub(super) fn config_maps() -> Kind {
    let mut kind = builtin_kind(
        "",
        "ConfigMap",
        "configmaps",
        generate::<ConfigMap>,
        Columns::Builtin(&builtin::CONFIG_MAPS),
        strategy(|_, _| {}, validate_config_map, &[]),
    );
    kind.short_names = vec!["cm".to_owned()];
    kind
}

pub(super) fn secrets() -> Kind {
    builtin_kind(
        "",
        "Secret",
        "secrets",
        generate::<Secret>,
        Columns::Builtin(&builtin::SECRETS),
        strategy(prepare_secret, validate_secret, &[("type", "type")]),
    )
}

fn strategy(
    prepare: fn(&mut Value, Option<&Value>),
    validate: fn(&Value, Option<&Value>) -> Vec<FieldError>,
    fields: &'static [(&'static str, &'static str)],
) -> Strategy {
    Strategy {
        names: NameRule::Subdomain,
        generation: false,
        unconditional_update: true,
        strategic_patch: true,
        prepare,
        validate,
        fields,
        ttl: None,
    }
}

/// `stringData` is merged into `data` and never shown; the type defaults to Opaque.
fn prepare_secret(object: &mut Value, _old: Option<&Value>) {
    let Some(map) = object.as_object_mut() else {
        return;
    };
    if let Some(Value::Object(strings)) = map.remove("stringData") {
        let data = map
            .entry("data")
            .or_insert_with(|| Value::Object(Map::new()));
        if !data.is_object() {
            *data = Value::Object(Map::new());
        }
        if let Some(data) = data.as_object_mut() {
            for (key, value) in strings {
                let text = value.as_str().unwrap_or_default();
                data.insert(key, BASE64.encode(text.as_bytes()).into());
            }
        }
    }
    if map
        .get("type")
        .and_then(Value::as_str)
        .unwrap_or_default()
        .is_empty()
    {
        map.insert("type".to_owned(), "Opaque".into());
    }
}

fn validate_secret(object: &Value, old: Option<&Value>) -> Vec<FieldError> {
    let mut faults = keys(object, "data");
    let size: usize = entries(object, "data")
        .filter_map(|(_, v)| BASE64.decode(v.as_bytes()).ok())
        .map(|v| v.len())
        .sum();
    if size > MAX_BYTES {
        faults.push(too_large("data"));
    }
    faults.extend(keys_of_type(object));
    if let Some(old) = old {
        if object["type"] != old["type"] {
            faults.push(immutable("type", &object["type"]));
        }
        frozen(object, old, &["data"], &mut faults);
    }
    faults
}

/// Some types promise keys.
fn keys_of_type(object: &Value) -> Vec<FieldError> {
    let has = |key: &str| object["data"].get(key).is_some();
    let wanted: &[&str] = match object["type"].as_str().unwrap_or_default() {
        "kubernetes.io/tls" => &["tls.crt", "tls.key"],
        "kubernetes.io/ssh-auth" => &["ssh-privatekey"],
        "kubernetes.io/dockercfg" => &[".dockercfg"],
        "kubernetes.io/dockerconfigjson" => &[".dockerconfigjson"],
        // One of the two is enough.
        "kubernetes.io/basic-auth" if !has("username") && !has("password") => {
            &["username", "password"]
        }
        _ => &[],
    };
    wanted
        .iter()
        .filter(|key| !has(key))
        .map(|key| FieldError::required(format!("data[{key}]"), ""))
        .collect()
}

fn validate_config_map(object: &Value, old: Option<&Value>) -> Vec<FieldError> {
    let mut faults = keys(object, "data");
    for fault in keys(object, "binaryData") {
        faults.push(fault);
    }
    for (key, _) in entries(object, "binaryData") {
        if object["data"].get(key).is_some() {
            faults.push(FieldError::invalid(
                format!("data[{key}]"),
                key,
                "duplicate of key present in binaryData",
            ));
        }
    }
    let size: usize = entries(object, "data").map(|(_, v)| v.len()).sum::<usize>()
        + entries(object, "binaryData")
            .filter_map(|(_, v)| BASE64.decode(v.as_bytes()).ok())
            .map(|v| v.len())
            .sum::<usize>();
    if size > MAX_BYTES {
        faults.push(too_large(""));
    }
    if let Some(old) = old {
        frozen(object, old, &["data", "binaryData"], &mut faults);
    }
    faults
}

fn entries<'a>(object: &'a Value, field: &str) -> impl Iterator<Item = (&'a str, &'a str)> {
    object[field]
        .as_object()
        .into_iter()
        .flatten()
        .filter_map(|(k, v)| v.as_str().map(|v| (k.as_str(), v)))
}

fn keys(object: &Value, field: &str) -> Vec<FieldError> {
    let mut faults = Vec::new();
    for (key, _) in object[field].as_object().into_iter().flatten() {
        let path = format!("{field}[{key}]");
        if key.len() > 253 {
            faults.push(FieldError::invalid(
                &path,
                key.as_str(),
                "must be no more than 253 characters",
            ));
        }
        if key.is_empty()
            || !key
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
        {
            faults.push(FieldError::invalid(
                &path,
                key.as_str(),
                "a valid config key must consist of alphanumeric characters, '-', '_' or '.' (e.g. 'key.name',  or 'KEY_NAME',  or 'key-name', regex used for validation is '[-._a-zA-Z0-9]+')",
            ));
        }
        if key == "." || key == ".." || key.starts_with("..") {
            faults.push(FieldError::invalid(
                &path,
                key.as_str(),
                "must not start with '..'",
            ));
        }
    }
    faults
}

fn too_large(field: &str) -> FieldError {
    FieldError::new(
        field,
        Fault::TooLong,
        None,
        format!("may not be more than {MAX_BYTES} bytes"),
    )
}

fn immutable(field: &str, value: &Value) -> FieldError {
    FieldError::invalid(field, value.clone(), "field is immutable")
}

/// `immutable: true` can neither be taken back nor its content changed.
fn frozen(object: &Value, old: &Value, fields: &[&str], faults: &mut Vec<FieldError>) {
    if old["immutable"] != true {
        return;
    }
    if object["immutable"] != true {
        faults.push(FieldError::forbidden(
            "immutable",
            "field is immutable when `immutable` is set",
        ));
    }
    for field in fields {
        if object[*field] != old[*field] {
            faults.push(FieldError::forbidden(
                *field,
                "field is immutable when `immutable` is set",
            ));
        }
    }
}

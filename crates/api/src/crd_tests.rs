//! The generated CRD: its shape, and each rule with what it accepts and what it refuses.

#![allow(
    clippy::needless_pass_by_value,
    reason = "json!() literals read better without a borrow"
)]

use kube::core::cel::Validator;
use serde_json::{Value, json};

use super::*;

fn schema() -> Value {
    let crd = serde_json::to_value(crd()).unwrap();
    crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"].clone()
}

/// A whole object as an API server sees it: the defaults are in.
fn object(spec: Value) -> Value {
    let raw = json!({
        "apiVersion": "crawl.example.com/v1alpha1",
        "kind": "Proxy",
        "metadata": {"name": "p1", "namespace": "default"},
        "spec": spec,
    });
    let typed: Proxy = serde_json::from_value(raw).unwrap();
    serde_json::to_value(typed).unwrap()
}

fn refusals(new: Value, old: Option<Value>) -> Vec<String> {
    let old = old.map(object);
    match Validator::new().validate(&schema(), &object(new), old.as_ref()) {
        Ok(()) => Vec::new(),
        Err(errors) => errors.into_vec().into_iter().map(|e| e.message).collect(),
    }
}

#[track_caller]
fn accepted(spec: Value) {
    let said = refusals(spec.clone(), None);
    assert!(said.is_empty(), "{spec} was refused: {said:?}");
}

#[track_caller]
fn refused(spec: Value, message: &str) {
    let said = refusals(spec.clone(), None);
    assert!(
        said.len() == 1 && said[0].contains(message),
        "{spec}: {said:?}"
    );
}

fn managed(more: Value) -> Value {
    let mut spec = json!({"mode": "Managed", "provider": "kvm-home"});
    spec.as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    spec
}

fn external(more: Value) -> Value {
    let mut spec = json!({"mode": "External", "endpoint": {"host": "2001:db8::1"}});
    spec.as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    spec
}

#[test]
fn plain_objects_are_accepted() {
    accepted(managed(json!({})));
    accepted(external(json!({})));
    accepted(managed(json!({"maxLeases": 0, "port": 65535})));
    accepted(managed(
        json!({"placement": {"zone": "nas1", "image": "debian-13"}}),
    ));
}

#[test]
fn managed_needs_a_provider_and_no_endpoint() {
    refused(json!({"mode": "Managed"}), "needs spec.provider");
    refused(
        managed(json!({"endpoint": {"host": "192.0.2.1"}})),
        "must not have spec.endpoint",
    );
}

#[test]
fn external_needs_an_endpoint_and_nothing_of_managed() {
    refused(json!({"mode": "External"}), "needs spec.endpoint.host");
    refused(
        external(json!({"provider": "x"})),
        "must not have spec.provider",
    );
    refused(
        external(json!({"placement": {"zone": "x"}})),
        "must not have spec.placement",
    );
    refused(
        external(json!({"cloudInit": {"inline": "x"}})),
        "must not have spec.cloudInit",
    );
}

#[test]
fn cloud_init_is_exactly_one_source() {
    accepted(managed(json!({"cloudInit": {"inline": ""}})));
    accepted(managed(json!({"cloudInit": {"secretRef": {"name": "s"}}})));
    refused(managed(json!({"cloudInit": {}})), "exactly one of inline");
    refused(
        managed(json!({"cloudInit": {"inline": "x", "secretRef": {"name": "s"}}})),
        "exactly one of inline",
    );
}

#[test]
fn the_timeout_fits_into_the_interval() {
    accepted(managed(
        json!({"healthCheck": {"intervalSeconds": 5, "timeoutSeconds": 5}}),
    ));
    refused(
        managed(json!({"healthCheck": {"intervalSeconds": 5, "timeoutSeconds": 6}})),
        "timeoutSeconds must not be more than intervalSeconds",
    );
    // Only one given: the default of the other counts.
    refused(
        managed(json!({"healthCheck": {"timeoutSeconds": 11}})),
        "timeoutSeconds must not be more than intervalSeconds",
    );
}

#[test]
fn the_health_url_is_absolute_http() {
    for good in [
        "http://127.0.0.1:8080/x",
        "https://[2001:db8::1]/",
        "https://www.gstatic.com/generate_204",
    ] {
        accepted(managed(json!({"healthCheck": {"url": good}})));
    }
    for bad in [
        "/generate_204",
        "ftp://example.com/",
        "example.com",
        "",
        "http://",
    ] {
        refused(
            managed(json!({"healthCheck": {"url": bad}})),
            "must be an absolute http or https URL",
        );
    }
}

#[test]
fn the_mode_cannot_be_changed() {
    let said = refusals(external(json!({})), Some(managed(json!({}))));
    assert_eq!(
        said,
        ["spec.mode cannot be changed: delete the Proxy and create another"]
    );
    assert!(refusals(managed(json!({"port": 1})), Some(managed(json!({})))).is_empty());
}

/// What a real API server refuses to take as a CRD: unsigned formats, null in an enum; and what
/// makes an explicit null slip past `has()`.
#[test]
fn the_schema_is_structural_and_plain() {
    fn walk(path: &str, node: &Value, seen: &mut Vec<String>) {
        match node {
            Value::Object(map) => {
                if let Some(format) = map.get("format").and_then(Value::as_str)
                    && !["int32", "int64", "date-time"].contains(&format)
                {
                    seen.push(format!("{path}: format {format}"));
                }
                if map.get("nullable") == Some(&json!(true)) {
                    seen.push(format!("{path}: nullable"));
                }
                if map
                    .get("enum")
                    .and_then(Value::as_array)
                    .is_some_and(|e| e.contains(&Value::Null))
                {
                    seen.push(format!("{path}: null in an enum"));
                }
                for (key, value) in map {
                    if ["$ref", "anyOf", "oneOf", "allOf", "definitions"].contains(&key.as_str()) {
                        seen.push(format!("{path}: {key}"));
                    }
                    walk(&format!("{path}.{key}"), value, seen);
                }
            }
            Value::Array(list) => list.iter().for_each(|v| walk(path, v, seen)),
            _ => {}
        }
    }
    let mut seen = Vec::new();
    walk("", &schema(), &mut seen);
    assert_eq!(seen, Vec::<String>::new());
}

/// Every field says what it is, for `kubectl explain`.
#[test]
fn every_field_is_described() {
    fn walk(path: &str, node: &Value, bare: &mut Vec<String>) {
        for (name, property) in node["properties"].as_object().into_iter().flatten() {
            let path = format!("{path}.{name}");
            if property["description"].as_str().is_none_or(str::is_empty) {
                bare.push(path.clone());
            }
            walk(&path, property, bare);
        }
    }
    let mut bare = Vec::new();
    walk("", &schema(), &mut bare);
    assert_eq!(bare, Vec::<String>::new());
}

#[test]
fn names_and_columns_are_as_documented() {
    let crd = crd();
    assert_eq!(
        crd.spec.names.short_names.as_deref(),
        Some(&["px".to_owned()][..])
    );
    assert_eq!(
        crd.spec.names.categories.as_deref(),
        Some(&["crawl".to_owned()][..])
    );
    let version = &crd.spec.versions[0];
    let columns = version.additional_printer_columns.as_deref().unwrap();
    let names = |wide: bool| -> Vec<&str> {
        columns
            .iter()
            .filter(|c| wide || c.priority.unwrap_or(0) == 0)
            .map(|c| c.name.as_str())
            .collect()
    };
    assert_eq!(
        names(false),
        ["Mode", "Provider", "Phase", "IP", "Healthy", "Age"]
    );
    assert!(names(true).contains(&"ProviderID") && names(true).contains(&"Latency"));
    assert!(version.subresources.as_ref().unwrap().status.is_some());
    let schema = schema();
    let conditions = &schema["properties"]["status"]["properties"]["conditions"];
    assert_eq!(conditions["x-kubernetes-list-type"], "map");
    assert_eq!(conditions["x-kubernetes-list-map-keys"], json!(["type"]));
}

#[test]
fn defaults_are_in_the_schema_at_every_level() {
    let schema = schema();
    let spec = &schema["properties"]["spec"]["properties"];
    assert_eq!(spec["port"]["default"], 3128);
    assert_eq!(spec["maxLeases"]["default"], 5);
    let check = &spec["healthCheck"];
    for (field, value) in [
        ("url", json!(DEFAULT_HEALTH_URL)),
        ("intervalSeconds", json!(10)),
        ("timeoutSeconds", json!(5)),
        ("successThreshold", json!(1)),
        ("failureThreshold", json!(3)),
        ("expectedStatus", json!(204)),
    ] {
        assert_eq!(check["properties"][field]["default"], value, "{field}");
        assert_eq!(check["default"][field], value, "default.{field}");
    }
    assert_eq!(
        spec["cloudInit"]["properties"]["secretRef"]["properties"]["key"]["default"],
        DEFAULT_USER_DATA_KEY
    );
}

/// The rules of the CRD and [`validate()`] agree on what they both look at.
#[test]
fn validation_in_rust_agrees_with_the_rules() {
    for (spec, good) in [
        (managed(json!({})), true),
        (external(json!({})), true),
        (json!({"mode": "Managed"}), false),
        (json!({"mode": "External"}), false),
        (managed(json!({"cloudInit": {}})), false),
        (managed(json!({"healthCheck": {"url": "x"}})), false),
        (
            managed(json!({"healthCheck": {"timeoutSeconds": 11}})),
            false,
        ),
        (external(json!({"provider": "x"})), false),
        (managed(json!({"endpoint": {"host": "h"}})), false),
    ] {
        let by_rule = refusals(spec.clone(), None).is_empty();
        let typed: Proxy = serde_json::from_value(object(spec.clone())).unwrap();
        let by_code = validate(&typed);
        assert_eq!(by_rule, good, "{spec}");
        assert_eq!(by_code.is_ok(), good, "{spec}: {by_code:?}");
    }
}

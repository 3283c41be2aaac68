use serde_json::{Value, json};

use super::*;

fn schema(json: &Value) -> Schema {
    Schema::parse(json, &Value::Null)
}

#[track_caller]
fn faults(schema: &Schema, value: &Value) -> Vec<String> {
    schema
        .validate(value, None, "")
        .iter()
        .map(ToString::to_string)
        .collect()
}

fn sample() -> Schema {
    schema(&json!({
        "type": "object",
        "required": ["spec"],
        "properties": {
            "spec": {
                "type": "object",
                "required": ["mode"],
                "properties": {
                    "mode": {"type": "string", "enum": ["Managed", "External"]},
                    "port": {"type": "integer", "format": "int32", "minimum": 1.0, "maximum": 65535.0, "default": 3128},
                    "provider": {"type": "string", "minLength": 1, "maxLength": 3, "nullable": true},
                    "name": {"type": "string", "pattern": "^[a-z]+$"},
                    "attributes": {"type": "object", "additionalProperties": {"type": "string"}},
                    "check": {"type": "object", "default": {}, "properties": {"url": {"type": "string", "default": "x"}}},
                    "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": true},
                    "list": {
                        "type": "array", "maxItems": 2,
                        "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"],
                        "items": {"type": "object", "properties": {"type": {"type": "string"}}}
                    }
                }
            }
        }
    }))
}

#[test]
fn faults_read_as_those_of_a_real_server() {
    let s = sample();
    assert_eq!(faults(&s, &json!({})), ["spec: Required value"]);
    assert_eq!(
        faults(&s, &json!({"spec": {"mode": "Foo", "port": 0}})),
        [
            "spec.mode: Unsupported value: \"Foo\": supported values: \"Managed\", \"External\"",
            "spec.port: Invalid value: 0: spec.port in body should be greater than or equal to 1"
        ]
    );
    assert_eq!(
        faults(&s, &json!({"spec": {"mode": "Managed", "port": "x"}})),
        [
            "spec.port: Invalid value: \"string\": spec.port in body must be of type integer: \"string\""
        ]
    );
    assert_eq!(
        faults(&s, &json!({"spec": {"mode": "Managed", "provider": ""}})),
        [
            "spec.provider: Invalid value: \"\": spec.provider in body should be at least 1 chars long"
        ]
    );
    assert_eq!(
        faults(
            &s,
            &json!({"spec": {"mode": "Managed", "provider": "long"}})
        ),
        ["spec.provider: Too long: may not be more than 3 bytes"]
    );
    assert_eq!(
        faults(&s, &json!({"spec": {"mode": "Managed", "name": "A"}})),
        ["spec.name: Invalid value: \"A\": spec.name in body should match '^[a-z]+$'"]
    );
    assert_eq!(
        faults(
            &s,
            &json!({"spec": {"mode": "Managed", "list": [{}, {}, {}]}})
        ),
        ["spec.list: Too many: 3: must have at most 2 items"]
    );
    assert_eq!(
        faults(&s, &json!({"spec": {"mode": "Managed", "provider": null}})),
        [""; 0]
    );
}

#[test]
fn unknown_fields_go_and_are_named() {
    let s = sample();
    let mut object = json!({
        "apiVersion": "v1", "kind": "K", "metadata": {"name": "a"}, "top": 1,
        "spec": {"mode": "Managed", "prot": 1, "free": {"any": {"thing": 1}}, "attributes": {"a": "b"},
                 "list": [{"type": "x", "no": 1}]}
    });
    let unknown = s.prune(&mut object, true);
    assert_eq!(unknown, ["top", "spec.prot", "spec.list[0].no"]);
    assert_eq!(object["spec"]["free"]["any"]["thing"], 1);
    assert_eq!(object["metadata"]["name"], "a");
}

#[test]
fn defaults_reach_into_defaulted_objects() {
    let s = sample();
    let mut object = json!({"spec": {"mode": "Managed", "port": null}});
    s.fill(&mut object);
    assert_eq!(object["spec"]["port"], 3128);
    assert_eq!(object["spec"]["check"]["url"], "x");
}

#[test]
fn what_did_not_change_is_not_complained_of() {
    let s = sample();
    let old = json!({"spec": {"mode": "Old", "port": 1}});
    let new = json!({"spec": {"mode": "Old", "port": 0}});
    let faults = s.validate(&new, Some(&old), "");
    assert_eq!(faults.len(), 1);
    assert_eq!(faults[0].field, "spec.port");
}

#[test]
fn a_list_that_is_a_map_has_each_key_once() {
    let s = sample();
    let object = json!({"spec": {"list": [{"type": "a"}, {"type": "a"}]}});
    let faults = s.duplicates(&object, "");
    assert_eq!(
        faults[0].to_string(),
        "spec.list[1]: Duplicate value: {\"type\":\"a\"}"
    );
}

//! Structural schemas: what a CRD says of its objects, and what the built-in kinds say of theirs.
//!
//! [`Schema`] is parsed once from JSON; pruning and defaulting are in `shape`, validation with the
//! sentences of kube-apiserver in `validate`.

mod shape;
mod validate;

use std::collections::BTreeMap;
use std::sync::OnceLock;

use regex::Regex;
use serde_json::Value;

/// A node of a structural schema.
#[derive(Debug, Default)]
pub(crate) struct Schema {
    pub type_: Option<Type>,
    pub format: Option<String>,
    pub nullable: bool,
    pub int_or_string: bool,
    pub preserve_unknown: bool,
    pub embedded_resource: bool,
    pub properties: BTreeMap<String, Schema>,
    pub additional: Option<Additional>,
    pub items: Option<Box<Schema>>,
    pub required: Vec<String>,
    pub default: Option<Value>,
    pub allowed: Option<Vec<Value>>,
    pub minimum: Option<Bound>,
    pub maximum: Option<Bound>,
    pub multiple_of: Option<f64>,
    pub min_length: Option<u64>,
    pub max_length: Option<u64>,
    pub pattern: Option<Pattern>,
    pub min_items: Option<u64>,
    pub max_items: Option<u64>,
    pub min_properties: Option<u64>,
    pub max_properties: Option<u64>,
    pub unique_items: bool,
    pub list: ListType,
    /// `x-kubernetes-map-type: atomic`.
    pub atomic_map: bool,
    /// `x-kubernetes-patch-merge-key`, of built-in kinds.
    pub merge_key: Option<String>,
    pub all_of: Vec<Schema>,
    pub any_of: Vec<Schema>,
    pub one_of: Vec<Schema>,
    pub not: Option<Box<Schema>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Type {
    Object,
    Array,
    String,
    Integer,
    Number,
    Boolean,
}

impl Type {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Object => "object",
            Self::Array => "array",
            Self::String => "string",
            Self::Integer => "integer",
            Self::Number => "number",
            Self::Boolean => "boolean",
        }
    }
}

#[derive(Debug)]
pub(crate) enum Additional {
    /// `true`: anything goes.
    Any,
    Schema(Box<Schema>),
}

/// How a list is merged by server-side apply and what must be unique in it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) enum ListType {
    #[default]
    Atomic,
    Set,
    Map(Vec<String>),
}

#[derive(Debug, Clone)]
pub(crate) struct Bound {
    pub value: serde_json::Number,
    pub exclusive: bool,
}

/// A regular expression, compiled when first needed.
#[derive(Debug)]
pub(crate) struct Pattern {
    pub text: String,
    compiled: OnceLock<Option<Regex>>,
}

impl Pattern {
    fn new(text: &str) -> Self {
        Self {
            text: text.to_owned(),
            compiled: OnceLock::new(),
        }
    }

    /// A pattern that cannot be compiled matches nothing: refuse rather than let through.
    pub fn matches(&self, text: &str) -> bool {
        self.compiled
            .get_or_init(|| Regex::new(&self.text).ok())
            .as_ref()
            .is_some_and(|r| r.is_match(text))
    }
}

impl Schema {
    /// Parses a schema; `definitions` resolves `$ref` by the last part of its pointer.
    pub fn parse(json: &Value, definitions: &Value) -> Self {
        parse(json, definitions, 0)
    }

    /// The schema of a property, additional properties included.
    pub fn property(&self, name: &str) -> Option<&Schema> {
        self.properties.get(name).or(match &self.additional {
            Some(Additional::Schema(schema)) => Some(schema),
            _ => None,
        })
    }

    /// Whether objects of this node may have properties the schema does not name.
    fn open(&self) -> bool {
        self.preserve_unknown || matches!(self.additional, Some(Additional::Any))
    }
}

/// Deeper schemas are cut off; what lies below is then taken as it comes.
const MAX_DEPTH: usize = 64;

fn parse(json: &Value, definitions: &Value, depth: usize) -> Schema {
    if depth > MAX_DEPTH {
        return Schema {
            preserve_unknown: true,
            ..Schema::default()
        };
    }
    // A reference stands alone, or in an allOf of one beside a description.
    let reference = match (&json["$ref"], &json["allOf"]) {
        (Value::String(reference), _) => Some(reference),
        (_, Value::Array(all)) if all.len() == 1 && json["type"].is_null() => match &all[0]["$ref"]
        {
            Value::String(reference) => Some(reference),
            _ => None,
        },
        _ => None,
    };
    let resolved = reference
        .and_then(|r| r.rsplit('/').next())
        .map(|name| &definitions[name]);
    let json = resolved.unwrap_or(json);
    let sub = |v: &Value| parse(v, definitions, depth + 1);
    let list = |name: &str| -> Vec<Schema> {
        json[name]
            .as_array()
            .into_iter()
            .flatten()
            .map(sub)
            .collect()
    };
    let flag = |name: &str| json[name].as_bool().unwrap_or(false);
    let number = |name: &str| json[name].as_u64();
    let bound = |name: &str, exclusive: &str| match (&json[name], &json[exclusive]) {
        (Value::Number(value), flag) => Some(Bound {
            value: whole(value),
            exclusive: flag.as_bool().unwrap_or(false),
        }),
        _ => None,
    };
    let additional = match &json["additionalProperties"] {
        Value::Bool(true) => Some(Additional::Any),
        schema @ Value::Object(_) => Some(Additional::Schema(Box::new(sub(schema)))),
        _ => None,
    };
    let list_type = match json["x-kubernetes-list-type"].as_str() {
        Some("set") => ListType::Set,
        Some("map") => ListType::Map(strings(&json["x-kubernetes-list-map-keys"])),
        _ => ListType::Atomic,
    };
    Schema {
        type_: type_of(&json["type"]),
        format: json["format"].as_str().map(str::to_owned),
        nullable: flag("nullable"),
        int_or_string: flag("x-kubernetes-int-or-string"),
        preserve_unknown: flag("x-kubernetes-preserve-unknown-fields"),
        embedded_resource: flag("x-kubernetes-embedded-resource"),
        properties: json["properties"]
            .as_object()
            .into_iter()
            .flatten()
            .map(|(name, schema)| (name.clone(), sub(schema)))
            .collect(),
        additional,
        items: json["items"]
            .is_object()
            .then(|| Box::new(sub(&json["items"]))),
        required: strings(&json["required"]),
        default: json.get("default").cloned(),
        allowed: json["enum"].as_array().cloned(),
        minimum: bound("minimum", "exclusiveMinimum"),
        maximum: bound("maximum", "exclusiveMaximum"),
        multiple_of: json["multipleOf"].as_f64(),
        min_length: number("minLength"),
        max_length: number("maxLength"),
        pattern: json["pattern"].as_str().map(Pattern::new),
        min_items: number("minItems"),
        max_items: number("maxItems"),
        min_properties: number("minProperties"),
        max_properties: number("maxProperties"),
        unique_items: flag("uniqueItems"),
        list: list_type,
        atomic_map: json["x-kubernetes-map-type"] == "atomic",
        merge_key: json["x-kubernetes-patch-merge-key"]
            .as_str()
            .map(str::to_owned),
        all_of: list("allOf"),
        any_of: list("anyOf"),
        one_of: list("oneOf"),
        not: json["not"].is_object().then(|| Box::new(sub(&json["not"]))),
    }
}

/// CRDs hold bounds as floats; whole ones are shown and compared as integers.
fn whole(number: &serde_json::Number) -> serde_json::Number {
    match number.as_f64() {
        Some(f) if number.is_f64() && f.fract() == 0.0 && f.abs() < 9e15 => (f as i64).into(),
        _ => number.clone(),
    }
}

fn strings(json: &Value) -> Vec<String> {
    json.as_array()
        .into_iter()
        .flatten()
        .filter_map(|v| v.as_str().map(str::to_owned))
        .collect()
}

fn type_of(json: &Value) -> Option<Type> {
    match json.as_str()? {
        "object" => Some(Type::Object),
        "array" => Some(Type::Array),
        "string" => Some(Type::String),
        "integer" => Some(Type::Integer),
        "number" => Some(Type::Number),
        "boolean" => Some(Type::Boolean),
        _ => None,
    }
}

/// The type of a JSON value, by its name in messages.
pub(crate) fn type_name(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(n) if n.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// `a` and `b` to `a.b`.
pub(crate) fn child(path: &str, name: &str) -> String {
    if path.is_empty() {
        name.to_owned()
    } else {
        format!("{path}.{name}")
    }
}

#[cfg(test)]
mod tests;

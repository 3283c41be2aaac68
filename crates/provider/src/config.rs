//! The providers file: `providers: [{name, type, <type>: {...}}]`, parsed strictly, with all
//! faults of a file reported together.
//!
//! Each backend implements [`ProviderType`]; it reads its block through [`Fields`], which collects
//! faults instead of stopping at the first, and refuses what it was never asked for.

use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use egress_core::InstallationId;
use serde_json::{Map, Value};

use crate::contract::{Provider, ProviderError};

/// One fault: where it is and what is wrong, e.g.
/// `providers[1] "kvm-home": kvm.hosts[0]: address is required`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    pub path: String,
    pub message: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.path.is_empty() {
            f.write_str(&self.message)
        } else {
            write!(f, "{}: {}", self.path, self.message)
        }
    }
}

/// All faults of one file, in the order of the file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Faults(Vec<Fault>);

impl Faults {
    pub fn add(&mut self, path: impl Into<String>, message: impl Into<String>) {
        self.0.push(Fault {
            path: path.into(),
            message: message.into(),
        });
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = &Fault> {
        self.0.iter()
    }
}

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, fault) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str("\n")?;
            }
            write!(f, "{fault}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Faults {}

/// What a provider is built with, beside its own block.
#[derive(Debug, Clone)]
pub struct BuildContext {
    /// The configured name.
    pub name: String,
    pub installation: InstallationId,
    /// Survives restarts.
    pub state_dir: PathBuf,
    /// Emptied at a reboot; mode 0700.
    pub runtime_dir: PathBuf,
    /// May be emptied at any time.
    pub cache_dir: PathBuf,
}

/// A backend's type: knows how to read its block.
pub trait ProviderType: Send + Sync {
    /// `type:` and the name of the block.
    fn type_name(&self) -> &'static str;

    /// Reads the block; faults go through `fields`. None when it could not be read well enough.
    fn read(&self, fields: &mut Fields<'_>) -> Option<Box<dyn ProviderBlueprint>>;
}

/// A block that was read without faults: builds the provider. Building does not reach the backend
/// (one that cannot be reached must not stop the others).
pub trait ProviderBlueprint: Send + Sync {
    /// # Errors
    /// When something local is missing; the class tells whether it may heal by itself.
    fn build(&self, context: BuildContext) -> Result<Arc<dyn Provider>, ProviderError>;
}

/// One configured provider instance.
pub struct NamedBlueprint {
    pub name: String,
    pub type_name: &'static str,
    /// The block as it was read: equal before and after a reload means unchanged.
    pub block: Value,
    pub blueprint: Box<dyn ProviderBlueprint>,
}

/// Reads a whole providers file.
///
/// # Errors
/// All faults together.
pub fn parse(text: &str, types: &[&dyn ProviderType]) -> Result<Vec<NamedBlueprint>, Faults> {
    let mut faults = Faults::default();
    let root: Value = match serde_saphyr::from_str(text) {
        Ok(Value::Null) => Value::Object(Map::new()),
        Ok(value) => value,
        Err(error) => {
            faults.add("", format!("not valid YAML: {error}"));
            return Err(faults);
        }
    };
    let mut found = Vec::new();
    let mut top = Fields::new(&root, "", &mut faults);
    let list: Vec<Value> = match top.take("providers") {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(list)) => list,
        Some(other) => {
            top.fault(
                "providers",
                format!("must be a list, not {}", kind_of(&other)),
            );
            Vec::new()
        }
    };
    top.finish();
    let mut names = BTreeSet::new();
    for (i, entry) in list.iter().enumerate() {
        if let Some(one) = read_entry(i, entry, types, &mut names, &mut faults) {
            found.push(one);
        }
    }
    if faults.is_empty() {
        Ok(found)
    } else {
        Err(faults)
    }
}

fn read_entry(
    i: usize,
    entry: &Value,
    types: &[&dyn ProviderType],
    names: &mut BTreeSet<String>,
    faults: &mut Faults,
) -> Option<NamedBlueprint> {
    let shown = entry
        .get("name")
        .and_then(Value::as_str)
        .unwrap_or_default();
    let path = if shown.is_empty() {
        format!("providers[{i}]")
    } else {
        format!("providers[{i}] {shown:?}")
    };
    let mut fields = Fields::new(entry, &path, faults);
    let name = fields.required_str("name");
    if let Some(name) = &name {
        if !is_plain_name(name) {
            fields.fault("", format!("name {name:?} may hold only letters, digits, dot, dash and underscore, and starts with a letter or digit"));
        } else if !names.insert(name.clone()) {
            fields.fault(
                "",
                format!("duplicate name {name:?}: each provider needs a name of its own"),
            );
        }
    }
    let type_name = fields.required_str("type");
    let known: Vec<&str> = types.iter().map(|t| t.type_name()).collect();
    let wanted = type_name.and_then(|wanted| {
        let found = types.iter().find(|t| t.type_name() == wanted);
        if found.is_none() {
            fields.fault(
                "",
                format!(
                    "unknown type {wanted:?}: it must be one of {}",
                    known.join(", ")
                ),
            );
        }
        found
    });
    // A block of another known type is a mismatch, not an unknown field.
    let mut block = Value::Object(Map::new());
    for known in &known {
        if let Some(value) = fields.take(known) {
            match &wanted {
                Some(wanted) if wanted.type_name() == *known => block = value,
                Some(wanted) => fields.fault(
                    "",
                    format!("the block {known:?} does not match type {:?}: rename it or change the type", wanted.type_name()),
                ),
                None => {}
            }
        }
    }
    fields.finish();
    let wanted = wanted?;
    if block.is_null() {
        block = Value::Object(Map::new());
    }
    let block_path = format!("{path}: {}", wanted.type_name());
    let before = faults.0.len();
    let mut block_fields = Fields::new(&block, &block_path, faults);
    let blueprint = wanted.read(&mut block_fields);
    block_fields.finish();
    if faults.0.len() > before {
        return None;
    }
    Some(NamedBlueprint {
        name: name?,
        type_name: wanted.type_name(),
        blueprint: blueprint?,
        block,
    })
}

/// Letters, digits, dot, dash, underscore, starting with a letter or digit: such names become part
/// of ids, file names and volume names.
pub fn is_plain_name(name: &str) -> bool {
    name.chars()
        .next()
        .is_some_and(|c| c.is_ascii_alphanumeric())
        && name.len() <= 63
        && name
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_'))
}

/// Reads the fields of one object, collects faults, and at the end refuses those nobody took.
pub struct Fields<'f> {
    map: Map<String, Value>,
    path: String,
    known: BTreeSet<String>,
    faults: &'f mut Faults,
}

impl<'f> Fields<'f> {
    pub fn new(value: &Value, path: &str, faults: &'f mut Faults) -> Self {
        let map = match value {
            Value::Object(map) => map.clone(),
            other => {
                faults.add(path, format!("must be a mapping, not {}", kind_of(other)));
                Map::new()
            }
        };
        Self {
            map,
            path: path.to_owned(),
            known: BTreeSet::new(),
            faults,
        }
    }

    /// Where this object is in the file.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Adds a fault at `field` of this object (empty: at the object itself).
    pub fn fault(&mut self, field: &str, message: impl Into<String>) {
        let path = self.path_of(field);
        self.faults.add(path, message);
    }

    fn path_of(&self, field: &str) -> String {
        match (self.path.is_empty(), field.is_empty()) {
            (_, true) => self.path.clone(),
            (true, false) => field.to_owned(),
            // `providers[1] "kvm-home"` and `kvm` are joined by a colon, fields below by a dot.
            (false, false) if self.path.starts_with("providers[") && !self.path.contains(": ") => {
                format!("{}: {field}", self.path)
            }
            (false, false) => format!("{}.{field}", self.path),
        }
    }

    /// The raw value, marked as known.
    pub fn take(&mut self, field: &str) -> Option<Value> {
        self.known.insert(field.to_owned());
        self.map.remove(field)
    }

    /// A value of any type serde reads.
    pub fn optional<T: serde::de::DeserializeOwned>(&mut self, field: &str) -> Option<T> {
        let value = self.take(field)?;
        if value.is_null() {
            return None;
        }
        match serde_json::from_value(value.clone()) {
            Ok(read) => Some(read),
            Err(error) => {
                self.fault(field, format!("{} does not fit: {error}", kind_of(&value)));
                None
            }
        }
    }

    pub fn optional_str(&mut self, field: &str) -> Option<String> {
        match self.take(field)? {
            Value::Null => None,
            Value::String(text) if text.is_empty() => {
                self.fault(field, "must not be empty");
                None
            }
            Value::String(text) => Some(text),
            other => {
                self.fault(field, format!("must be a string, not {}", kind_of(&other)));
                None
            }
        }
    }

    pub fn required_str(&mut self, field: &str) -> Option<String> {
        if !self.map.contains_key(field) || self.map[field].is_null() {
            self.take(field);
            self.fault("", format!("{field} is required"));
            return None;
        }
        self.optional_str(field)
    }

    /// A whole number within a range, ends included.
    pub fn optional_int(
        &mut self,
        field: &str,
        range: std::ops::RangeInclusive<u64>,
    ) -> Option<u64> {
        let value = self.take(field)?;
        if value.is_null() {
            return None;
        }
        match value.as_u64() {
            Some(n) if range.contains(&n) => Some(n),
            _ => {
                self.fault(
                    field,
                    format!(
                        "must be a whole number from {} to {}, not {value}",
                        range.start(),
                        range.end()
                    ),
                );
                None
            }
        }
    }

    pub fn optional_bool(&mut self, field: &str) -> Option<bool> {
        match self.take(field)? {
            Value::Null => None,
            Value::Bool(b) => Some(b),
            other => {
                self.fault(
                    field,
                    format!("must be true or false, not {}", kind_of(&other)),
                );
                None
            }
        }
    }

    /// A list; each element is read by `read` with its own path (`field[3]`). Missing: empty.
    pub fn list<T>(
        &mut self,
        field: &str,
        mut read: impl FnMut(&Value, &str, &mut Faults) -> Option<T>,
    ) -> Vec<T> {
        let list = match self.take(field) {
            None | Some(Value::Null) => return Vec::new(),
            Some(Value::Array(list)) => list,
            Some(other) => {
                self.fault(field, format!("must be a list, not {}", kind_of(&other)));
                return Vec::new();
            }
        };
        let path = self.path_of(field);
        list.iter()
            .enumerate()
            .filter_map(|(i, v)| read(v, &format!("{path}[{i}]"), self.faults))
            .collect()
    }

    /// A mapping with keys of the user's choice, in their order. Missing: empty.
    pub fn map<T>(
        &mut self,
        field: &str,
        mut read: impl FnMut(&str, &Value, &str, &mut Faults) -> Option<T>,
    ) -> Vec<(String, T)> {
        let map = match self.take(field) {
            None | Some(Value::Null) => return Vec::new(),
            Some(Value::Object(map)) => map,
            Some(other) => {
                self.fault(field, format!("must be a mapping, not {}", kind_of(&other)));
                return Vec::new();
            }
        };
        let path = self.path_of(field);
        map.iter()
            .filter_map(|(k, v)| {
                read(k, v, &format!("{path}.{k}"), self.faults).map(|t| (k.clone(), t))
            })
            .collect()
    }

    /// Refuses the fields nobody took. Call it last.
    pub fn finish(self) {
        for field in self.map.keys() {
            let path = self.path_of(field);
            let known: Vec<&str> = self.known.iter().map(String::as_str).collect();
            self.faults.add(
                path,
                format!("unknown field; known here: {}", known.join(", ")),
            );
        }
    }
}

/// The kind of a value, for messages: its content may be a secret put in the wrong place.
fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "nothing",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "a mapping",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Toy;

    impl ProviderType for Toy {
        fn type_name(&self) -> &'static str {
            "toy"
        }

        fn read(&self, fields: &mut Fields<'_>) -> Option<Box<dyn ProviderBlueprint>> {
            let _ = fields.required_str("colour");
            let _ = fields.optional_int("size", 1..=10);
            let _ = fields.list("hosts", |value, path, faults| {
                let mut host = Fields::new(value, path, faults);
                let address = host.required_str("address");
                host.finish();
                address
            });
            Some(Box::new(Toy))
        }
    }

    impl ProviderBlueprint for Toy {
        fn build(&self, _: BuildContext) -> Result<Arc<dyn Provider>, ProviderError> {
            unreachable!("the tests only read")
        }
    }

    struct Other;

    impl ProviderType for Other {
        fn type_name(&self) -> &'static str {
            "other"
        }

        fn read(&self, _: &mut Fields<'_>) -> Option<Box<dyn ProviderBlueprint>> {
            Some(Box::new(Toy))
        }
    }

    #[track_caller]
    fn faults(text: &str) -> Vec<String> {
        match parse(text, &[&Toy, &Other]) {
            Ok(_) => Vec::new(),
            Err(faults) => faults.iter().map(ToString::to_string).collect(),
        }
    }

    #[test]
    fn all_faults_of_a_file_at_once_each_with_its_path() {
        let text = "
providers:
  - {name: a, type: toy, toy: {colour: red, size: 11, hosts: [{}, {address: x, prot: 1}]}}
  - {name: a, type: toy, toy: {colour: red}}
  - {name: c, type: tyo}
  - {name: d, type: toy, other: {}}
  - {type: other, extra: 1}
prviders: []
";
        assert_eq!(
            faults(text),
            [
                "prviders: unknown field; known here: providers",
                "providers[0] \"a\": toy.size: must be a whole number from 1 to 10, not 11",
                "providers[0] \"a\": toy.hosts[0]: address is required",
                "providers[0] \"a\": toy.hosts[1].prot: unknown field; known here: address",
                "providers[1] \"a\": duplicate name \"a\": each provider needs a name of its own",
                "providers[2] \"c\": unknown type \"tyo\": it must be one of toy, other",
                "providers[3] \"d\": the block \"other\" does not match type \"toy\": rename it or change the type",
                "providers[3] \"d\": toy: colour is required",
                "providers[4]: name is required",
                "providers[4]: extra: unknown field; known here: name, other, toy, type",
            ]
        );
    }

    #[test]
    fn an_empty_file_has_no_providers_and_broken_yaml_says_so() {
        assert!(parse("", &[&Toy]).unwrap().is_empty());
        assert!(parse("providers:\n", &[&Toy]).unwrap().is_empty());
        assert!(faults("providers: [")[0].starts_with("not valid YAML"));
        assert_eq!(
            faults("providers: 3")[0],
            "providers: must be a list, not a number"
        );
        assert_eq!(faults("- 1")[0], "must be a mapping, not a list");
        assert!(
            faults("providers: []\nproviders: []")[0].contains("duplicate"),
            "duplicate keys are refused"
        );
    }
}

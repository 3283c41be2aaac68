//! Label and field selectors.

use serde_json::Value;

use crate::error::{ApiError, ApiResult};
use crate::registry::Kind;

#[derive(Debug, Clone, PartialEq)]
enum Requirement {
    In(String, Vec<String>),
    /// True also where the label is absent.
    NotIn(String, Vec<String>),
    Exists(String),
    Absent(String),
    Greater(String, i64),
    Less(String, i64),
}

/// A parsed label selector; the empty one selects everything.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct LabelSelector(Vec<Requirement>);

impl LabelSelector {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn matches(&self, object: &Value) -> bool {
        let labels = &object["metadata"]["labels"];
        let label = |key: &str| labels.get(key).and_then(Value::as_str);
        self.0.iter().all(|requirement| match requirement {
            Requirement::In(key, values) => {
                label(key).is_some_and(|v| values.iter().any(|w| w == v))
            }
            Requirement::NotIn(key, values) => {
                label(key).is_none_or(|v| values.iter().all(|w| w != v))
            }
            Requirement::Exists(key) => label(key).is_some(),
            Requirement::Absent(key) => label(key).is_none(),
            Requirement::Greater(key, n) => number(label(key)).is_some_and(|v| v > *n),
            Requirement::Less(key, n) => number(label(key)).is_some_and(|v| v < *n),
        })
    }

    pub fn parse(text: &str) -> ApiResult<Self> {
        let fault = |problem: String| {
            ApiError::bad_request(format!(
                "unable to parse requirement in labelSelector {text:?}: {problem}"
            ))
        };
        let mut requirements = Vec::new();
        for part in split(text) {
            let part = part.trim();
            if part.is_empty() {
                if text.trim().is_empty() {
                    continue;
                }
                return Err(fault("an empty requirement".to_owned()));
            }
            requirements.push(requirement(part).map_err(fault)?);
        }
        Ok(Self(requirements))
    }
}

fn number(text: Option<&str>) -> Option<i64> {
    text.and_then(|t| t.parse().ok())
}

/// At the commas outside of parentheses.
fn split(text: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    let (mut depth, mut start) = (0_usize, 0);
    for (at, c) in text.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            ',' if depth == 0 => {
                parts.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    parts
}

fn requirement(part: &str) -> Result<Requirement, String> {
    if let Some(key) = part.strip_prefix('!') {
        return Ok(Requirement::Absent(checked_key(key)?));
    }
    for (operator, equal) in [("!=", false), ("==", true), ("=", true)] {
        if let Some((key, value)) = part.split_once(operator) {
            let key = checked_key(key)?;
            let values = vec![checked_value(value)?];
            return Ok(if equal {
                Requirement::In(key, values)
            } else {
                Requirement::NotIn(key, values)
            });
        }
    }
    for (operator, greater) in [('>', true), ('<', false)] {
        if let Some((key, value)) = part.split_once(operator) {
            let key = checked_key(key)?;
            let value = value.trim().parse().map_err(|_| {
                format!("for 'Gt', 'Lt' operators, the value must be an integer, not {value:?}")
            })?;
            return Ok(if greater {
                Requirement::Greater(key, value)
            } else {
                Requirement::Less(key, value)
            });
        }
    }
    if let Some((head, values)) = part.split_once('(') {
        let values = values
            .trim_end()
            .strip_suffix(')')
            .ok_or("a ')' is missing")?
            .split(',')
            .map(checked_value)
            .collect::<Result<Vec<_>, _>>()?;
        let mut words = head.split_whitespace();
        return match (words.next(), words.next(), words.next()) {
            (Some(key), Some("in"), None) => Ok(Requirement::In(checked_key(key)?, values)),
            (Some(key), Some("notin"), None) => Ok(Requirement::NotIn(checked_key(key)?, values)),
            _ => Err("only 'KEY in (...)' and 'KEY notin (...)' take a set".to_owned()),
        };
    }
    Ok(Requirement::Exists(checked_key(part)?))
}

fn checked_key(key: &str) -> Result<String, String> {
    let key = key.trim();
    match crate::names::qualified_name(key) {
        Some(problem) => Err(format!("key: Invalid value: {key:?}: {problem}")),
        None => Ok(key.to_owned()),
    }
}

fn checked_value(value: &str) -> Result<String, String> {
    let value = value.trim();
    match crate::names::label_value(value) {
        Some(problem) => Err(format!("values: Invalid value: {value:?}: {problem}")),
        None => Ok(value.to_owned()),
    }
}

/// A parsed field selector.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct FieldSelector(Vec<(String, bool, String)>);

impl FieldSelector {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn parse(text: &str, kind: &Kind) -> ApiResult<Self> {
        let mut parts = Vec::new();
        for part in text.split(',').filter(|p| !p.is_empty()) {
            let (field, equal, value) = [("!=", false), ("==", true), ("=", true)]
                .iter()
                .find_map(|(op, equal)| part.split_once(op).map(|(f, v)| (f, *equal, v)))
                .ok_or_else(|| {
                    ApiError::bad_request(format!(
                        "invalid selector: '{text}'; can't understand '{part}'"
                    ))
                })?;
            let path = path_of(field.trim(), kind).ok_or_else(|| {
                ApiError::bad_request(format!("field label not supported: {field}"))
            })?;
            parts.push((path, equal, value.to_owned()));
        }
        Ok(Self(parts))
    }

    pub fn matches(&self, object: &Value) -> bool {
        self.0
            .iter()
            .all(|(path, equal, wanted)| (read(object, path) == *wanted) == *equal)
    }
}

fn path_of(field: &str, kind: &Kind) -> Option<String> {
    let common = match field {
        "metadata.name" => true,
        "metadata.namespace" => kind.namespaced || kind.custom,
        _ => false,
    };
    if common || kind.selectable.iter().any(|s| s == field) {
        return Some(field.to_owned());
    }
    kind.strategy
        .fields
        .iter()
        .find(|(name, _)| *name == field)
        .map(|(_, path)| (*path).to_owned())
}

fn read(object: &Value, path: &str) -> String {
    let mut value = object;
    for name in path.split('.') {
        value = &value[name];
    }
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[track_caller]
    fn selects(selector: &str) -> bool {
        let object = json!({"metadata": {"labels": {"a": "1", "tier": "front"}}});
        LabelSelector::parse(selector).unwrap().matches(&object)
    }

    #[test]
    fn label_selectors() {
        assert!(selects(""));
        assert!(selects("a=1"));
        assert!(selects("a==1,tier!=back"));
        assert!(!selects("a=2"));
        assert!(selects("b!=2"), "absent labels are not equal");
        assert!(selects("tier in (front, back)"));
        assert!(!selects("tier notin (front)"));
        assert!(selects("b notin (x)"));
        assert!(selects("tier,!b"));
        assert!(selects("a>0,a<2"));
    }

    #[test]
    fn bad_selectors_are_refused() {
        for text in ["a=1,", "=", "a in (", "a foo (b)", "a=b=c!", "-a"] {
            assert!(LabelSelector::parse(text).is_err(), "{text}");
        }
    }
}

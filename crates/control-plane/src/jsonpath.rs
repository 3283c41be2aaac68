//! The part of kubectl's JSONPath that printer columns use: fields, indices, `[*]` and filters such
//! as `[?(@.type=="Ready")]`.

use std::str::FromStr;

use serde_json::Value;

/// A parsed path.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct JsonPath(Vec<Step>);

#[derive(Debug, Clone, PartialEq)]
enum Step {
    Field(String),
    Index(i64),
    All,
    /// Items whose value at the path compares so.
    Filter {
        path: JsonPath,
        /// None: it only has to exist.
        compare: Option<(bool, Value)>,
    },
}

/// What is wrong with a path.
#[derive(Debug, thiserror::Error, PartialEq)]
#[error("{path:?} is no JSONPath that is understood: {problem}")]
pub(crate) struct PathError {
    path: String,
    problem: &'static str,
}

impl FromStr for JsonPath {
    type Err = PathError;

    fn from_str(text: &str) -> Result<Self, PathError> {
        parse(text).map_err(|problem| PathError {
            path: text.to_owned(),
            problem,
        })
    }
}

fn parse(text: &str) -> Result<JsonPath, &'static str> {
    let mut rest = text.trim();
    let mut steps = Vec::new();
    while !rest.is_empty() {
        if let Some(after) = rest.strip_prefix('[') {
            let end = closing(after)?;
            steps.push(bracket(after[..end].trim())?);
            rest = &after[end + 1..];
        } else {
            let after = rest.strip_prefix('.').unwrap_or(rest);
            if after.starts_with('.') {
                return Err("'..' is not supported");
            }
            let (name, end) = field_name(after);
            if !name.is_empty() {
                steps.push(if name == "*" {
                    Step::All
                } else {
                    Step::Field(name)
                });
            } else if !after.starts_with('[') {
                return Err("a field name is missing");
            }
            rest = &after[end..];
        }
    }
    Ok(JsonPath(steps))
}

/// A field name, with `\.` for a dot in it.
fn field_name(text: &str) -> (String, usize) {
    let mut name = String::new();
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '.' | '[' => return (name, at),
            '\\' => {
                if let Some((_, escaped)) = chars.next() {
                    name.push(escaped);
                }
            }
            c => name.push(c),
        }
    }
    (name, text.len())
}

/// The bracket that closes, outside of quotes and inner brackets.
fn closing(text: &str) -> Result<usize, &'static str> {
    let mut depth = 0_usize;
    let mut quote = None;
    for (at, c) in text.char_indices() {
        match (quote, c) {
            (Some(q), c) if c == q => quote = None,
            (Some(_), _) => {}
            (None, '"' | '\'') => quote = Some(c),
            (None, '[') => depth += 1,
            (None, ']') if depth == 0 => return Ok(at),
            (None, ']') => depth -= 1,
            _ => {}
        }
    }
    Err("a ']' is missing")
}

fn bracket(inner: &str) -> Result<Step, &'static str> {
    if inner == "*" {
        return Ok(Step::All);
    }
    if let Some(filter) = inner.strip_prefix("?(").and_then(|f| f.strip_suffix(')')) {
        return filter_step(filter);
    }
    if let Some(name) = unquote(inner) {
        return Ok(Step::Field(name));
    }
    inner
        .parse()
        .map(Step::Index)
        .map_err(|_| "only an index, '*', a quoted name or a filter may stand in brackets")
}

fn filter_step(filter: &str) -> Result<Step, &'static str> {
    for (operator, equal) in [("==", true), ("!=", false)] {
        if let Some((left, right)) = filter.split_once(operator) {
            let right = right.trim();
            let value = match unquote(right) {
                Some(text) => Value::from(text),
                None => serde_json::from_str(right)
                    .map_err(|_| "the right side of a filter is neither quoted nor a number")?,
            };
            return Ok(Step::Filter {
                path: relative(left)?,
                compare: Some((equal, value)),
            });
        }
    }
    Ok(Step::Filter {
        path: relative(filter)?,
        compare: None,
    })
}

fn relative(text: &str) -> Result<JsonPath, &'static str> {
    let path = text
        .trim()
        .strip_prefix('@')
        .ok_or("the left side of a filter must start with '@'")?;
    parse(path)
}

fn unquote(text: &str) -> Option<String> {
    ['"', '\''].into_iter().find_map(|q| {
        text.strip_prefix(q)
            .and_then(|t| t.strip_suffix(q))
            .map(str::to_owned)
    })
}

impl JsonPath {
    /// All values that the path names.
    pub fn find<'a>(&self, root: &'a Value) -> Vec<&'a Value> {
        let mut found = vec![root];
        for step in &self.0 {
            let mut next = Vec::new();
            for value in found {
                step.walk(value, &mut next);
            }
            found = next;
        }
        found
    }

    /// The first value that the path names.
    pub fn first<'a>(&self, root: &'a Value) -> Option<&'a Value> {
        self.find(root).into_iter().next()
    }
}

impl Step {
    fn walk<'a>(&self, value: &'a Value, found: &mut Vec<&'a Value>) {
        match (self, value) {
            (Self::Field(name), Value::Object(map)) => found.extend(map.get(name)),
            (Self::Index(index), Value::Array(list)) => {
                let at = if *index < 0 {
                    usize::try_from(index.unsigned_abs())
                        .ok()
                        .and_then(|back| list.len().checked_sub(back))
                } else {
                    usize::try_from(*index).ok()
                };
                found.extend(at.and_then(|at| list.get(at)));
            }
            (Self::All, Value::Array(list)) => found.extend(list),
            (Self::All, Value::Object(map)) => found.extend(map.values()),
            (Self::Filter { path, compare }, Value::Array(list)) => {
                found.extend(
                    list.iter()
                        .filter(|item| match (path.first(item), compare) {
                            (Some(_), None) => true,
                            (Some(value), Some((equal, wanted))) => (value == wanted) == *equal,
                            (None, _) => false,
                        }),
                );
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[track_caller]
    fn first(path: &str) -> Value {
        let object = json!({
            "metadata": {"name": "a", "annotations": {"x.y/z": "q"}},
            "status": {"conditions": [
                {"type": "Ready", "status": "False"},
                {"type": "Healthy", "status": "True"}
            ], "ips": ["1", "2"]}
        });
        let path: JsonPath = path.parse().unwrap();
        path.first(&object).cloned().unwrap_or(Value::Null)
    }

    #[test]
    fn paths_of_printer_columns() {
        assert_eq!(first(".metadata.name"), "a");
        assert_eq!(
            first(".status.conditions[?(@.type==\"Healthy\")].status"),
            "True"
        );
        assert_eq!(
            first(".status.conditions[?(@.type=='Ready')].status"),
            "False"
        );
        assert_eq!(
            first(".status.conditions[?(@.type!='Ready')].type"),
            "Healthy"
        );
        assert_eq!(first(".status.ips[1]"), "2");
        assert_eq!(first(".status.ips[-1]"), "2");
        assert_eq!(first(".status.ips[*]"), "1");
        assert_eq!(first(".metadata.annotations['x.y/z']"), "q");
        assert_eq!(first(".metadata.annotations.x\\.y/z"), "q");
        assert_eq!(first(".spec.none"), Value::Null);
    }

    #[test]
    fn what_is_not_understood_is_refused() {
        for path in [".a[", ".a[x]", "..a", ".a[?(type==1)]"] {
            assert!(path.parse::<JsonPath>().is_err(), "{path}");
        }
    }
}

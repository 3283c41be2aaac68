//! Two servers' answers, made comparable and compared field by field.
//!
//! What must differ from one server to the next (uids, times, revisions, generated names, the
//! server's address) is replaced by what it means: the second uid that an object named `a` had is `<uid 2 of a>`,
//! the third revision of that object `<rv 3 of <uid 2 of a>>`. So it is still seen when an object keeps its
//! uid where it should get a new one, or when a write that changes nothing makes a revision.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

/// What one call answered, as the comparison sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    /// `area/what`, the same on every server.
    pub call: String,
    pub answer: Value,
}

/// One field that differs.
#[derive(Debug, Clone, PartialEq)]
pub struct Difference {
    pub call: String,
    /// Such as `body.details.causes[0].message`.
    pub field: String,
    /// None: the field is not there.
    pub real: Option<Value>,
    pub ours: Option<Value>,
}

/// Makes one server's answers comparable; remembers what it saw before.
#[derive(Debug, Default)]
pub struct Normaliser {
    /// Each uid with what it means.
    uids: BTreeMap<String, String>,
    /// Of each uid, its revisions in the order in which they were seen.
    revisions: BTreeMap<String, Vec<String>>,
    /// Literal replacements, such as the server's address.
    literals: Vec<(String, String)>,
}

impl Normaliser {
    /// Replaces `text` by `token` wherever it appears from now on.
    pub fn literal(&mut self, text: impl Into<String>, token: impl Into<String>) {
        self.literals.push((text.into(), token.into()));
    }

    /// Learns identities from an answer that is not compared itself.
    pub fn see(&mut self, answer: &Value) {
        self.learn(answer);
    }

    pub fn normalise(&mut self, answer: &Value) -> Value {
        self.learn(answer);
        self.rewrite(answer)
    }

    /// Finds uids, revisions and generated names before any text that mentions them is rewritten.
    fn learn(&mut self, value: &Value) {
        match value {
            Value::Object(map) => {
                let text = |key: &str| map.get(key).and_then(Value::as_str);
                if let (Some(prefix), Some(name)) = (text("generateName"), text("name"))
                    // A long prefix is cut, so that five characters fit after it.
                    && name.starts_with(&prefix[..prefix.len().min(58)])
                {
                    self.literal(name, format!("{prefix}<generated>"));
                }
                if let Some(uid) = text("uid") {
                    self.learn_uid(uid, text("name"));
                    if let Some(revision) = text("resourceVersion") {
                        let seen = self.revisions.entry(uid.to_owned()).or_default();
                        if !seen.iter().any(|old| old == revision) {
                            seen.push(revision.to_owned());
                        }
                    }
                }
                map.values().for_each(|inner| self.learn(inner));
            }
            Value::Array(list) => list.iter().for_each(|inner| self.learn(inner)),
            _ => {}
        }
    }

    fn learn_uid(&mut self, uid: &str, name: Option<&str>) {
        // Fixtures that stand for nobody are compared as they are.
        if self.uids.contains_key(uid) || uid.len() != 36 || uid.starts_with("11111111") {
            return;
        }
        let name = self.rewrite_text(name.unwrap_or("?"));
        let before = self
            .uids
            .values()
            .filter(|token| is_uid_of(token, &name))
            .count();
        self.uids
            .insert(uid.to_owned(), format!("<uid {} of {name}>", before + 1));
    }

    fn rewrite(&self, value: &Value) -> Value {
        match value {
            Value::Object(map) => Value::Object(self.rewrite_object(map)),
            Value::Array(list) => Value::Array(list.iter().map(|v| self.rewrite(v)).collect()),
            Value::String(text) => Value::String(self.rewrite_text(text)),
            other => other.clone(),
        }
    }

    fn rewrite_object(&self, map: &Map<String, Value>) -> Map<String, Value> {
        let owner = map
            .get("uid")
            .and_then(Value::as_str)
            .and_then(|uid| Some((self.revisions.get(uid)?, self.uids.get(uid)?)));
        let mut out = map
            .iter()
            .map(|(key, value)| {
                let new = match (key.as_str(), value.as_str()) {
                    ("resourceVersion", Some("" | "0")) => value.clone(),
                    ("resourceVersion", Some(revision)) => Value::String(match owner {
                        Some((seen, uid)) => {
                            let nth = seen.iter().position(|old| old == revision);
                            format!("<rv {} of {uid}>", nth.map_or(0, |nth| nth + 1))
                        }
                        None => "<rv>".to_owned(),
                    }),
                    ("continue", Some(token)) if !token.is_empty() => {
                        Value::String("<continue>".to_owned())
                    }
                    _ => self.rewrite(value),
                };
                (self.rewrite_text(key), new)
            })
            .collect::<Map<String, Value>>();
        without_order(&mut out);
        if let Some(Value::Array(entries)) = out.get_mut("managedFields") {
            without_seconds(entries);
        }
        out
    }

    fn rewrite_text(&self, text: &str) -> String {
        let mut out = text.to_owned();
        for (literal, token) in &self.literals {
            out = out.replace(literal, token);
        }
        for (uid, token) in &self.uids {
            if out.contains(uid.as_str()) {
                out = out.replace(uid, token);
            }
        }
        without_times(&without_uids(&without_fingerprints(&without_revisions(
            &out,
        ))))
    }
}

/// A real server finds the faults of an object in the order of Go's maps: another one each time. So
/// causes are compared as a set, and a message that lists them names them by that.
fn without_order(status: &mut Map<String, Value>) {
    const STRICT: &str = "strict decoding error: ";
    if let Some(Value::String(message)) = status.get_mut("message")
        && let Some((before, after)) = message.split_once(STRICT)
    {
        let mut faults: Vec<&str> = after.split(", ").collect();
        faults.sort_unstable();
        *message = format!("{before}{STRICT}{}", faults.join(", "));
    }
    let Some(causes) = status
        .get_mut("details")
        .and_then(|details| details.get_mut("causes"))
        .and_then(Value::as_array_mut)
        .filter(|causes| causes.len() > 1)
    else {
        return;
    };
    let text = |cause: &Value, key: &str| cause[key].as_str().unwrap_or_default().to_owned();
    let mut told: Vec<String> = Vec::new();
    for cause in causes.iter() {
        let one = format!("{}: {}", text(cause, "field"), text(cause, "message"));
        // A message names each fault once, the causes may name it twice.
        if !told.contains(&one) {
            told.push(one);
        }
    }
    causes.sort_by_key(|cause| (text(cause, "field"), text(cause, "message")));
    if let Some(Value::String(message)) = status.get_mut("message") {
        *message = message.replace(&told.join(", "), "<the causes>");
    }
}

/// Managed fields are sorted by operation, then by time in whole seconds, then by manager: two writes
/// change places when a second ends between them. So among the entries of one operation the time
/// does not count; that the operations are in their order is still compared.
fn without_seconds(entries: &mut [Value]) {
    let text = |entry: &Value, key: &str| entry[key].as_str().unwrap_or_default().to_owned();
    for run in entries.chunk_by_mut(|a, b| a["operation"] == b["operation"]) {
        run.sort_by_cached_key(|entry| {
            ["manager", "apiVersion", "subresource"].map(|key| text(entry, key))
        });
    }
}

fn is_uid_of(token: &str, name: &str) -> bool {
    token
        .split_once(" of ")
        .is_some_and(|(_, of)| of.strip_suffix('>') == Some(name))
}

/// `too old resource version: 7 (19)` and `resourceVersion: "12"`, in messages and in YAML.
fn without_revisions(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    const MARKS: [&str; 7] = [
        "esource version: ",
        "esource Version: ",
        "resourceVersion: \"",
        "resourceVersion\":\"",
        // Of an object that a message quotes.
        r#"resourceVersion\":\""#,
        "current: ",
        "in record (",
    ];
    while let Some((at, mark)) = MARKS
        .iter()
        .filter_map(|mark| rest.find(mark).map(|at| (at, *mark)))
        .min_by_key(|(at, _)| *at)
    {
        let (before, after) = rest.split_at(at + mark.len());
        out.push_str(before);
        let digits = after.bytes().take_while(u8::is_ascii_digit).count();
        rest = &after[digits..];
        if digits > 0 {
            out.push_str("<rv>");
        }
        if let Some(inner) = rest.strip_prefix(" (") {
            let digits = inner.bytes().take_while(u8::is_ascii_digit).count();
            if digits > 0 {
                out.push_str(" (<rv>");
                rest = &inner[digits..];
            }
        }
    }
    out.push_str(rest);
    out
}

/// Which certificate a user showed.
fn without_fingerprints(text: &str) -> String {
    const MARK: &str = "X509SHA256=";
    let Some((before, after)) = text.split_once(MARK) else {
        return text.to_owned();
    };
    let rest = after.trim_start_matches(|c: char| c.is_ascii_hexdigit());
    format!("{before}{MARK}<fingerprint>{rest}")
}

/// Uids that were seen in no object, such as those of a dry run.
fn without_uids(text: &str) -> String {
    without_shape(
        text,
        b"xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx",
        "<uid>",
        |uid| !uid.starts_with(b"11111111"),
    )
}

/// Instants of this century's later years: the fixtures use 2001, so that theirs are compared.
fn without_times(text: &str) -> String {
    let without = without_shape(text, b"dddd-dd-ddTdd:dd:dd", "<time", |time| {
        time.starts_with(b"20") && time[2] >= b'2'
    });
    let mut out = String::with_capacity(without.len());
    for (n, part) in without.split("<time").enumerate() {
        if n > 0 {
            out.push_str("<time>");
            out.push_str(
                part.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.' || c == 'Z'),
            );
        } else {
            out.push_str(part);
        }
    }
    out
}

/// Replaces what looks like `shape`: `d` stands for a digit, `x` for a hexadecimal one.
fn without_shape(text: &str, shape: &[u8], token: &str, also: impl Fn(&[u8]) -> bool) -> String {
    let bytes = text.as_bytes();
    let fits = |at: usize| {
        bytes.get(at..at + shape.len()).is_some_and(|part| {
            part.iter().zip(shape).all(|(byte, wanted)| match wanted {
                b'd' => byte.is_ascii_digit(),
                b'x' => byte.is_ascii_hexdigit(),
                other => byte == other,
            }) && also(part)
        })
    };
    let mut out = String::with_capacity(text.len());
    let (mut at, mut copied) = (0, 0);
    while at < bytes.len() {
        if fits(at) {
            // Both ends are ASCII, so these are borders of characters.
            out.push_str(&text[copied..at]);
            out.push_str(token);
            at += shape.len();
            copied = at;
        } else {
            at += 1;
        }
    }
    out.push_str(&text[copied..]);
    out
}

/// What people read: ages become `<age>`, and the width of columns does not count.
pub fn plain_text(text: &str) -> Value {
    let mut lines: Vec<&str> = text
        .lines()
        .filter(|line| !is_race_of_kubectl(line))
        .collect();
    // kubectl lists the causes of a refusal in the server's order, which means nothing.
    for run in lines.chunk_by_mut(|a, b| a.starts_with("* ") && b.starts_with("* ")) {
        run.sort_unstable();
    }
    Value::Array(
        lines
            .into_iter()
            .map(|line| {
                let indent = line.len() - line.trim_start().len();
                let words: Vec<&str> = line
                    .split_whitespace()
                    .map(|w| if is_age(w) { "<age>" } else { w })
                    .collect();
                Value::String(format!("{}{}", &line[..indent], words.join(" ")))
            })
            .collect(),
    )
}

/// When kubectl's own `--timeout` ends a watch, its library sees either its timer or the closed stream
/// first, by chance; in the second case it logs this. (That a server keeps watches open is compared
/// by the calls that watch.)
fn is_race_of_kubectl(line: &str) -> bool {
    line.contains("] \"Warning: watch ended with error\" reflector=")
        && line.contains("err=\"very short watch: ")
}

fn is_age(word: &str) -> bool {
    let word = word.trim_matches(['(', ')']);
    let mut digits = 0;
    let mut units = 0;
    for c in word.chars() {
        match c {
            '0'..='9' => digits += 1,
            's' | 'm' | 'h' | 'd' | 'y' if digits > 0 => {
                units += 1;
                digits = 0;
            }
            _ => return false,
        }
    }
    word == "<unknown>" || (units > 0 && digits == 0)
}

/// Every field that differs. `fields` counts what was compared.
pub fn compare(call: &str, real: &Value, ours: &Value, fields: &mut usize) -> Vec<Difference> {
    let mut found = Vec::new();
    walk(
        call,
        String::new(),
        Some(real),
        Some(ours),
        fields,
        &mut found,
    );
    found
}

fn walk(
    call: &str,
    field: String,
    real: Option<&Value>,
    ours: Option<&Value>,
    fields: &mut usize,
    found: &mut Vec<Difference>,
) {
    let inner = |name: &str| {
        if field.is_empty() {
            name.to_owned()
        } else {
            format!("{field}.{name}")
        }
    };
    match (real, ours) {
        (Some(Value::Object(a)), Some(Value::Object(b))) => {
            for key in a.keys() {
                walk(call, inner(key), a.get(key), b.get(key), fields, found);
            }
            for key in b.keys().filter(|key| !a.contains_key(*key)) {
                walk(call, inner(key), None, b.get(key), fields, found);
            }
        }
        (Some(Value::Array(a)), Some(Value::Array(b))) => {
            for at in 0..a.len().max(b.len()) {
                walk(
                    call,
                    format!("{field}[{at}]"),
                    a.get(at),
                    b.get(at),
                    fields,
                    found,
                );
            }
        }
        _ => {
            *fields += 1;
            if real != ours {
                found.push(Difference {
                    call: call.to_owned(),
                    field,
                    real: real.cloned(),
                    ours: ours.cloned(),
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn identities_become_ordinals() {
        let mut normaliser = Normaliser::default();
        let uid = |n: u8| format!("{n:08x}-0000-4000-8000-000000000000");
        let object = |n: u8, revision: &str| json!({"metadata": {"name": "a", "uid": uid(n), "resourceVersion": revision}});
        let first = normaliser.normalise(&object(1, "7"));
        assert_eq!(
            first["metadata"],
            json!({"name": "a", "uid": "<uid 1 of a>", "resourceVersion": "<rv 1 of <uid 1 of a>>"})
        );
        let changed = normaliser.normalise(&object(1, "9"));
        assert_eq!(
            changed["metadata"]["resourceVersion"],
            "<rv 2 of <uid 1 of a>>"
        );
        assert_eq!(normaliser.normalise(&object(1, "9")), changed);
        let made_again = normaliser.normalise(&object(2, "12"));
        assert_eq!(made_again["metadata"]["uid"], "<uid 2 of a>");
        let told = normaliser.normalise(&json!({"message": format!("uid {}", uid(1))}));
        assert_eq!(told["message"], "uid <uid 1 of a>");
        let time = normaliser
            .normalise(&json!({"at": "2026-01-02T03:04:05Z", "fixed": "2001-01-02T03:04:05Z"}));
        assert_eq!(
            time,
            json!({"at": "<time>", "fixed": "2001-01-02T03:04:05Z"})
        );
    }

    #[test]
    fn revisions_in_messages_and_generated_names_are_replaced() {
        let mut normaliser = Normaliser::default();
        let answer = json!({
            "message": "too old resource version: 1 (234)",
            "metadata": {"generateName": "px-", "name": "px-x7k2p"},
            "about": "px-x7k2p",
        });
        let answer = normaliser.normalise(&answer);
        assert_eq!(answer["message"], "too old resource version: <rv> (<rv>)");
        assert_eq!(answer["about"], "px-<generated>");
    }

    #[test]
    fn the_order_of_causes_means_nothing() {
        let cause = |field: &str| json!({"field": field, "message": "bad", "reason": "R"});
        let refusal = |first: &str, second: &str| {
            json!({
                "message": format!("P is invalid: [{first}: bad, {second}: bad]"),
                "details": {"causes": [cause(first), cause(second)]},
            })
        };
        let mut normaliser = Normaliser::default();
        let one = normaliser.normalise(&refusal("a", "b"));
        assert_eq!(one, normaliser.normalise(&refusal("b", "a")));
        assert_eq!(one["message"], "P is invalid: [<the causes>]");
    }

    #[test]
    fn the_second_of_a_write_does_not_order_managed_fields() {
        let entry = |operation: &str, manager: &str, subresource: Option<&str>| json!({"operation": operation, "manager": manager, "subresource": subresource});
        let normalised = |entries: &[&Value]| {
            Normaliser::default().normalise(&json!({"metadata": {"managedFields": entries}}))
        };
        let (apply, a, b) = (
            entry("Apply", "z", None),
            entry("Update", "a", None),
            entry("Update", "a", Some("status")),
        );
        let wanted = normalised(&[&apply, &a, &b]);
        assert_eq!(wanted, normalised(&[&apply, &b, &a]));
        assert_ne!(wanted, normalised(&[&a, &apply, &b]));
        assert_ne!(wanted, normalised(&[&apply, &a, &a]));
    }

    #[test]
    fn ages_and_widths_do_not_count() {
        assert_eq!(
            plain_text("NAME   AGE\nsome   2m5s\n"),
            json!(["NAME AGE", "some <age>"])
        );
        assert_eq!(plain_text("  5 items"), json!(["  5 items"]));
        let raced = "I1201 16:24:42.930201 15140 reflector.go:664] \"Warning: watch ended with error\" \
                     reflector=\"r.go:343\" err=\"very short watch: r.go:343: Unexpected watch close\"\n\
                     error: timed out\n";
        assert_eq!(plain_text(raced), json!(["error: timed out"]));
    }

    #[test]
    fn every_differing_field_is_named() {
        let mut fields = 0;
        let real = json!({"a": 1, "b": [1, 2], "c": {"d": "x"}});
        let ours = json!({"a": 1, "b": [1], "c": {"d": "y"}, "e": true});
        let found = compare("call", &real, &ours, &mut fields);
        let named: Vec<&str> = found.iter().map(|d| d.field.as_str()).collect();
        assert_eq!(named, ["b[1]", "c.d", "e"]);
        assert_eq!(fields, 5);
    }
}

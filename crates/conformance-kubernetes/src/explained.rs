//! The list of differences that are meant, and why: `differences.yaml`.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde::Deserialize;

use crate::compare::Difference;

/// One reason, and the differences that it explains.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reason {
    /// A short name of what differs, for people.
    pub what: String,
    /// Why it is meant to, in a sentence or two.
    pub why: String,
    /// Not meant: to be put right in the embedded control plane.
    #[serde(default)]
    pub open: bool,
    pub covers: Vec<Cover>,
}

/// Which differences: `*` stands for anything.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cover {
    pub calls: Vec<String>,
    pub fields: Vec<String>,
    /// Only where the real server's value looks like this (`null`: the field is not there).
    #[serde(default)]
    pub real: Option<String>,
    /// Only where ours looks like this.
    #[serde(default)]
    pub ours: Option<String>,
}

/// The checked-in list.
///
/// # Errors
/// When it cannot be read.
pub fn load() -> anyhow::Result<Vec<Reason>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("differences.yaml");
    let text = std::fs::read_to_string(&path)
        .with_context(|| format!("cannot read {}", path.display()))?;
    serde_saphyr::from_str(&text).with_context(|| format!("{} is not good", path.display()))
}

impl Cover {
    fn covers(&self, difference: &Difference) -> bool {
        let any = |patterns: &[String], text: &str| patterns.iter().any(|p| matches(p, text));
        let value = |pattern: &Option<String>, value: &Option<serde_json::Value>| {
            pattern.as_ref().is_none_or(|pattern| {
                let text = match value {
                    None => "null".to_owned(),
                    Some(serde_json::Value::String(text)) => text.clone(),
                    Some(other) => other.to_string(),
                };
                matches(pattern, &text)
            })
        };
        any(&self.calls, &difference.call)
            && any(&self.fields, &difference.field)
            && value(&self.real, &difference.real)
            && value(&self.ours, &difference.ours)
    }
}

/// Differences, sorted.
#[derive(Debug, Default)]
pub struct Sorted<'a> {
    /// With the reason of each.
    pub explained: Vec<(&'a Difference, &'a Reason)>,
    pub others: Vec<&'a Difference>,
    /// Reasons that explain nothing: out of date.
    pub idle: Vec<&'a Reason>,
    /// Patterns of calls that match no difference, each with its reason: out of date as well.
    pub idle_calls: Vec<(&'a Reason, &'a str)>,
}

/// Finds the first reason for each difference.
pub fn sort<'a>(differences: &'a [Difference], reasons: &'a [Reason]) -> Sorted<'a> {
    let mut sorted = Sorted::default();
    let mut used = BTreeSet::new();
    let mut used_calls = BTreeSet::new();
    for difference in differences {
        let found = reasons
            .iter()
            .position(|reason| reason.covers.iter().any(|cover| cover.covers(difference)));
        match found {
            Some(index) => {
                used.insert(index);
                let covers = reasons[index].covers.iter();
                used_calls.extend(
                    covers
                        .filter(|cover| cover.covers(difference))
                        .flat_map(|cover| &cover.calls)
                        .filter(|pattern| matches(pattern, &difference.call))
                        .map(|pattern| (index, pattern.as_str())),
                );
                sorted.explained.push((difference, &reasons[index]));
            }
            None => sorted.others.push(difference),
        }
    }
    let idle = reasons
        .iter()
        .enumerate()
        .filter(|(index, _)| !used.contains(index));
    sorted.idle = idle.map(|(_, reason)| reason).collect();
    for (index, reason) in reasons.iter().enumerate() {
        let calls = reason.covers.iter().flat_map(|cover| &cover.calls);
        let idle = calls.filter(|call| !used_calls.contains(&(index, call.as_str())));
        let idle = idle.map(|call| (reason, call.as_str()));
        sorted.idle_calls.extend(idle);
    }
    sorted
}

/// `*` matches any text, also none.
fn matches(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = text.strip_prefix(first) else {
        return false;
    };
    let mut parts: Vec<&str> = parts.collect();
    let Some(last) = parts.pop() else {
        return rest.is_empty();
    };
    for part in parts {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

/// Where the page for people is.
pub fn page_path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/control-plane-differences.md")
}

/// The page for people: what differs and why.
pub fn page(reasons: &[Reason]) -> String {
    let mut out = String::from(
        "# The embedded control plane and a real API server\n\n\
         <!-- Generated from crates/conformance-kubernetes/differences.yaml; EGRESS_UPDATE=1 cargo test -p egress-kube-suite --lib writes it. -->\n\n\
         One suite of kubectl and raw HTTP calls runs against a real kube-apiserver and against the\n\
         embedded control plane (`cargo xtask test kubernetes`), and the answers are compared field by\n\
         field. What must differ anyway (uids, times, revisions, generated names, addresses) is\n\
         replaced by its meaning first, and what has no order (the causes of a refusal, warnings, the\n\
         managed fields of one operation) is sorted. The differences that are left:\n",
    );
    for (open, head) in [(false, "# Meant"), (true, "# Not as in a cluster yet")] {
        if reasons.iter().any(|reason| reason.open == open) {
            let _ = write!(out, "\n#{head}\n");
        }
        for reason in reasons.iter().filter(|reason| reason.open == open) {
            let _ = write!(out, "\n### {}\n\n{}\n", reason.what, reason.why.trim());
            let calls: BTreeSet<&str> = reason
                .covers
                .iter()
                .flat_map(|c| c.calls.iter().map(String::as_str))
                .collect();
            let calls: Vec<String> = calls.iter().map(|call| format!("`{call}`")).collect();
            let _ = write!(out, "\nIn the suite: {}.\n", calls.join(", "));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stands_for_anything() {
        for (pattern, text, wanted) in [
            ("a/b", "a/b", true),
            ("a/b", "a/bc", false),
            ("a/*", "a/", true),
            ("*.message", "body.message", true),
            ("*.message", "body.messages", false),
            ("a*b*c", "a-b-b-c", true),
            ("a*b*c", "acb", false),
            ("*", "", true),
        ] {
            assert_eq!(matches(pattern, text), wanted, "{pattern} {text}");
        }
    }

    #[test]
    fn a_reason_that_explains_nothing_is_named() {
        let reasons: Vec<Reason> = serde_saphyr::from_str(
            "- {what: one, why: w, covers: [{calls: ['a/*', 'c/*'], fields: [x], real: '4*'}]}\n\
             - {what: two, why: w, covers: [{calls: ['b/*'], fields: [x]}]}\n",
        )
        .unwrap();
        let difference = |call: &str, real: i32| Difference {
            call: call.to_owned(),
            field: "x".to_owned(),
            real: Some(real.into()),
            ours: None,
        };
        let all = [difference("a/1", 404), difference("a/2", 500)];
        let sorted = sort(&all, &reasons);
        assert_eq!(sorted.explained.len(), 1);
        assert_eq!(sorted.others, [&all[1]]);
        assert_eq!(sorted.idle.len(), 1);
        assert_eq!(sorted.idle[0].what, "two");
        let calls: Vec<&str> = sorted.idle_calls.iter().map(|(_, call)| *call).collect();
        assert_eq!(calls, ["c/*", "b/*"]);
    }

    #[test]
    fn the_page_is_up_to_date() {
        let wanted = page(&load().unwrap());
        if std::env::var_os("EGRESS_UPDATE").is_some() {
            std::fs::write(page_path(), &wanted).unwrap();
        }
        let now = std::fs::read_to_string(page_path()).unwrap_or_default();
        assert!(
            now == wanted,
            "{} differs: run EGRESS_UPDATE=1 cargo test -p egress-kube-suite --lib",
            page_path().display()
        );
    }
}

//! What a request asks for: the path, the query, and the form of the answer.

use std::collections::BTreeMap;

use http::HeaderMap;
use http::header::{ACCEPT, USER_AGENT};
use serde_json::Value;

use crate::error::{ApiError, ApiResult, Fault, FieldError};
use crate::table::IncludeObject;

/// The parts of a resource path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Path {
    pub group: String,
    pub version: String,
    pub namespace: Option<String>,
    pub plural: String,
    pub name: Option<String>,
    pub subresource: Option<String>,
}

impl Path {
    /// Parses `/api/v1/...` and `/apis/GROUP/VERSION/...` below the version.
    pub fn parse(group: &str, version: &str, rest: &[&str]) -> Option<Self> {
        let part = |s: &str| {
            percent_encoding::percent_decode_str(s)
                .decode_utf8()
                .ok()
                .map(std::borrow::Cow::into_owned)
        };
        let (namespace, rest) = match rest {
            // `/namespaces/x` and its subresources are the object, not a scope.
            ["namespaces", namespace, plural, ..]
                if !(group.is_empty() && matches!(*plural, "status" | "finalize")) =>
            {
                (Some(part(namespace)?), &rest[2..])
            }
            _ => (None, rest),
        };
        let (plural, name, subresource) = match rest {
            [plural] => (plural, None, None),
            [plural, name] => (plural, Some(part(name)?), None),
            [plural, name, sub] => (plural, Some(part(name)?), Some(part(sub)?)),
            _ => return None,
        };
        Some(Self {
            group: group.to_owned(),
            version: version.to_owned(),
            namespace,
            plural: part(plural)?,
            name,
            subresource,
        })
    }
}

/// How unknown and duplicate fields are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FieldValidation {
    Ignore,
    Warn,
    Strict,
}

/// The query, decoded; the last of a repeated parameter counts.
#[derive(Debug, Clone, Default)]
pub(crate) struct Query(BTreeMap<String, String>);

impl Query {
    pub fn parse(query: Option<&str>) -> Self {
        Self(
            url::form_urlencoded::parse(query.unwrap_or_default().as_bytes())
                .map(|(k, v)| (k.into_owned(), v.into_owned()))
                .collect(),
        )
    }

    pub fn get(&self, name: &str) -> Option<&str> {
        self.0
            .get(name)
            .map(String::as_str)
            .filter(|v| !v.is_empty())
    }

    /// The same without some parameters.
    pub fn without(mut self, names: &[&str]) -> Self {
        self.0.retain(|name, _| !names.contains(&name.as_str()));
        self
    }

    pub fn flag(&self, name: &str) -> bool {
        matches!(
            self.get(name),
            Some("true" | "1" | "True" | "TRUE" | "t" | "T")
        )
    }

    /// A number; None when it is not given or below zero, which says nothing.
    pub fn number(&self, name: &str) -> ApiResult<Option<u64>> {
        let Some(v) = self.get(name) else {
            return Ok(None);
        };
        let number: i64 = v.parse().map_err(|_| {
            ApiError::bad_request(format!("strconv.ParseInt: parsing {v:?}: invalid syntax"))
        })?;
        Ok(u64::try_from(number).ok())
    }

    /// A resourceVersion: None when not given, Some(0) for "any".
    pub fn revision(&self) -> ApiResult<Option<u64>> {
        self.get("resourceVersion")
            .map(|v| {
                v.parse().map_err(|_| {
                    ApiError::bad_request(format!("resourceVersion: Invalid value: {v:?}: strconv.ParseUint: parsing {v:?}: invalid syntax"))
                })
            })
            .transpose()
    }

    pub fn dry_run(&self, options: &'static str) -> ApiResult<bool> {
        match self.get("dryRun") {
            None => Ok(false),
            Some("All") => Ok(true),
            Some(other) => Err(ApiError::invalid(
                "meta.k8s.io",
                options,
                "",
                &[FieldError::new(
                    "dryRun",
                    Fault::NotSupported,
                    Some(Value::from(vec![other])),
                    "supported values: \"All\"",
                )],
            )),
        }
    }

    /// Warn is what kube-apiserver does when nothing is said.
    pub fn field_validation(&self, options: &'static str) -> ApiResult<FieldValidation> {
        match self.get("fieldValidation") {
            None | Some("Warn") => Ok(FieldValidation::Warn),
            Some("Ignore") => Ok(FieldValidation::Ignore),
            Some("Strict") => Ok(FieldValidation::Strict),
            Some(other) => Err(ApiError::invalid(
                "meta.k8s.io",
                options,
                "",
                &[FieldError::new(
                    "fieldValidation",
                    Fault::NotSupported,
                    Some(other.into()),
                    "supported values: \"\", \"Ignore\", \"Strict\", \"Warn\"",
                )],
            )),
        }
    }

    /// `fieldManager` has a most, and `force` is for apply alone.
    pub fn check_write(&self, options: &'static str, apply: bool) -> ApiResult<()> {
        let mut faults = Vec::new();
        if options == "PatchOptions" && !apply && self.get("force").is_some() {
            faults.push(FieldError::forbidden(
                "force",
                "may not be specified for non-apply patch",
            ));
        }
        if self.get("fieldManager").is_some_and(|m| m.len() > 128) {
            faults.push(FieldError::new(
                "fieldManager",
                Fault::TooLong,
                None,
                "may not be more than 128 bytes",
            ));
        }
        if faults.is_empty() {
            Ok(())
        } else {
            Err(ApiError::invalid("meta.k8s.io", options, "", &faults))
        }
    }

    /// A table holds what `includeObject` says, and it must say something known.
    pub fn check_include(&self, form: Form) -> ApiResult<()> {
        match self.get("includeObject") {
            None | Some("None" | "Object" | "Metadata") => Ok(()),
            Some(other) if form == Form::Table => Err(ApiError::bad_request(format!(
                "Unable to convert to Table as requested: includeObject: Invalid value: {other:?}: must be 'Metadata', 'Object', 'None', or empty"
            ))),
            Some(_) => Ok(()),
        }
    }

    pub fn include_object(&self) -> IncludeObject {
        match self.get("includeObject") {
            Some("None") => IncludeObject::Nothing,
            Some("Object") => IncludeObject::Object,
            _ => IncludeObject::Metadata,
        }
    }
}

/// What the answer is to look like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    Object,
    Table,
    Partial,
}

/// How the answer is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Encoding {
    Json,
    Yaml,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Answer {
    pub form: Form,
    pub encoding: Encoding,
    /// The metadata of one object, and not of a list, was asked for.
    pub single: bool,
}

/// Takes the first acceptable media type of `Accept`, as kube-apiserver does.
pub(crate) fn negotiate(headers: &HeaderMap) -> ApiResult<Answer> {
    let plain = Answer {
        form: Form::Object,
        encoding: Encoding::Json,
        single: false,
    };
    let Some(accept) = headers.get(ACCEPT).and_then(|v| v.to_str().ok()) else {
        return Ok(plain);
    };
    if accept.trim().is_empty() {
        return Ok(plain);
    }
    for range in by_quality(accept) {
        let mut parts = range.split(';').map(str::trim);
        let encoding = match parts.next() {
            Some("application/json" | "*/*" | "application/*") => Encoding::Json,
            Some("application/yaml") => Encoding::Yaml,
            _ => continue,
        };
        let parameters: BTreeMap<&str, &str> = parts.filter_map(|p| p.split_once('=')).collect();
        let known = parameters.get("g").is_none_or(|g| *g == "meta.k8s.io")
            && parameters.get("v").is_none_or(|v| *v == "v1");
        let form = match parameters.get("as") {
            None => Form::Object,
            Some(&"Table") if known => Form::Table,
            Some(&("PartialObjectMetadata" | "PartialObjectMetadataList")) if known => {
                Form::Partial
            }
            Some(_) => continue,
        };
        let single = parameters.get("as") == Some(&"PartialObjectMetadata");
        return Ok(Answer {
            form,
            encoding,
            single,
        });
    }
    Err(ApiError::not_acceptable(crate::decode::ACCEPTED))
}

/// The media ranges, the most wanted first; equals stay in their order.
fn by_quality(accept: &str) -> Vec<&str> {
    let quality = |range: &str| {
        range
            .split(';')
            .find_map(|p| p.trim().strip_prefix("q="))
            .and_then(|q| q.parse::<f32>().ok())
            .unwrap_or(1.0)
    };
    let mut ranges: Vec<&str> = accept.split(',').collect();
    ranges.sort_by(|a, b| quality(b).total_cmp(&quality(a)));
    ranges
}

/// Who writes: the `fieldManager` parameter, or the first part of the user agent.
pub(crate) fn manager(query: &Query, headers: &HeaderMap) -> String {
    query.get("fieldManager").map_or_else(
        || {
            let agent = headers
                .get(USER_AGENT)
                .and_then(|v| v.to_str().ok())
                .unwrap_or_default();
            let name: String = agent.chars().take_while(|c| *c != '/').take(128).collect();
            if name.is_empty() {
                "unknown".to_owned()
            } else {
                name
            }
        },
        str::to_owned,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn path(text: &str) -> Path {
        let parts: Vec<&str> = text.split('/').collect();
        Path::parse("", "v1", &parts).unwrap()
    }

    #[test]
    fn paths() {
        let list = path("secrets");
        assert_eq!(
            (list.plural.as_str(), list.namespace, list.name),
            ("secrets", None, None)
        );
        let one = path("namespaces/default/secrets/a%2Db");
        assert_eq!(one.namespace.as_deref(), Some("default"));
        assert_eq!(one.name.as_deref(), Some("a-b"));
        let namespace = path("namespaces/default");
        assert_eq!(namespace.plural, "namespaces");
        assert_eq!(namespace.name.as_deref(), Some("default"));
        let status = path("namespaces/default/status");
        assert_eq!(status.subresource.as_deref(), Some("status"));
    }

    #[test]
    fn the_first_acceptable_form_is_taken() {
        let form = |accept: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(ACCEPT, accept.parse().unwrap());
            negotiate(&headers)
        };
        let table = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json;as=Table;v=v1beta1;g=meta.k8s.io,application/json";
        assert_eq!(form(table).unwrap().form, Form::Table);
        let old = "application/json;as=Table;v=v1beta1;g=meta.k8s.io,application/json";
        assert_eq!(form(old).unwrap().form, Form::Object);
        let typed = "application/vnd.kubernetes.protobuf,application/json";
        assert_eq!(form(typed).unwrap().form, Form::Object);
        assert_eq!(
            form("application/vnd.kubernetes.protobuf")
                .unwrap_err()
                .code,
            406
        );
        assert_eq!(form("application/yaml").unwrap().encoding, Encoding::Yaml);
        let less = "application/yaml;q=0.1, application/json;q=0.9";
        assert_eq!(form(less).unwrap().encoding, Encoding::Json);
    }
}

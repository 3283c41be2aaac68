//! Events: stored once, in the core/v1 form, shown as core/v1 and as events.k8s.io/v1.

use std::time::Duration;

use serde_json::{Map, Value};

use super::generate;
use crate::error::FieldError;
use crate::registry::{Kind, NameRule, Strategy, View, builtin_kind};
use crate::table::{Columns, builtin};

/// How long kube-apiserver keeps an Event that is not repeated (`--event-ttl`).
const TTL: Duration = Duration::from_secs(3600);

/// The most bytes of an action, a reason and an instance.
const MAX_WORD: usize = 128;
/// The most bytes of a note.
const MAX_NOTE: usize = 1024;

/// What a fieldSelector may name in core/v1.
const CORE_FIELDS: &[(&str, &str)] = &[
    ("involvedObject.kind", "involvedObject.kind"),
    ("involvedObject.namespace", "involvedObject.namespace"),
    ("involvedObject.name", "involvedObject.name"),
    ("involvedObject.uid", "involvedObject.uid"),
    ("involvedObject.apiVersion", "involvedObject.apiVersion"),
    (
        "involvedObject.resourceVersion",
        "involvedObject.resourceVersion",
    ),
    ("involvedObject.fieldPath", "involvedObject.fieldPath"),
    ("reason", "reason"),
    ("reportingComponent", "reportingComponent"),
    ("source", "source.component"),
    ("type", "type"),
];

const GROUPED_FIELDS: &[(&str, &str)] = &[
    ("regarding.kind", "regarding.kind"),
    ("regarding.namespace", "regarding.namespace"),
    ("regarding.name", "regarding.name"),
    ("regarding.uid", "regarding.uid"),
    ("regarding.apiVersion", "regarding.apiVersion"),
    ("regarding.resourceVersion", "regarding.resourceVersion"),
    ("regarding.fieldPath", "regarding.fieldPath"),
    ("reason", "reason"),
    ("reportingController", "reportingController"),
    ("type", "type"),
];

/// Stored name and name in events.k8s.io/v1.
const RENAMED: &[(&str, &str)] = &[
    ("involvedObject", "regarding"),
    ("message", "note"),
    ("reportingComponent", "reportingController"),
    ("source", "deprecatedSource"),
    ("firstTimestamp", "deprecatedFirstTimestamp"),
    ("lastTimestamp", "deprecatedLastTimestamp"),
    ("count", "deprecatedCount"),
];

pub(super) fn core_events() -> Kind {
    let mut kind = builtin_kind(
        "",
        "Event",
        "events",
        generate::<k8s_openapi::api::core::v1::Event>,
        Columns::Builtin(&builtin::EVENTS),
        strategy(CORE_FIELDS),
    );
    kind.short_names = vec!["ev".to_owned()];
    kind
}

pub(super) fn grouped_events() -> Kind {
    let mut kind = builtin_kind(
        "events.k8s.io",
        "Event",
        "events",
        generate::<k8s_openapi::api::events::v1::Event>,
        Columns::Builtin(&builtin::EVENTS),
        Strategy {
            validate: validate_grouped,
            ..strategy(GROUPED_FIELDS)
        },
    );
    kind.short_names = vec!["ev".to_owned()];
    kind.view = Some(View {
        show: |object| rename(object, RENAMED.iter().copied(), "events.k8s.io/v1"),
        store: |object| rename(object, RENAMED.iter().map(|(a, b)| (*b, *a)), "v1"),
    });
    kind
}

fn strategy(fields: &'static [(&'static str, &'static str)]) -> Strategy {
    Strategy {
        names: NameRule::Subdomain,
        generation: false,
        unconditional_update: true,
        strategic_patch: true,
        prepare: |_, _| {},
        validate,
        fields,
        ttl: Some(TTL),
    }
}

/// A new Event of events.k8s.io/v1 says who reports what; those of core/v1 are older than the rules.
fn validate_grouped(object: &Value, old: Option<&Value>) -> Vec<FieldError> {
    let mut faults = validate(object, old);
    if old.is_some() {
        return faults;
    }
    let text = |field: &str| object[field].as_str().unwrap_or_default();
    if object["eventTime"].is_null() {
        faults.push(FieldError::required("eventTime", ""));
    }
    let controller = text("reportingController");
    if controller.is_empty() {
        faults.push(FieldError::required("reportingController", ""));
    }
    if let Some(problem) = crate::names::qualified_name(controller) {
        faults.push(FieldError::invalid(
            "reportingController",
            controller,
            problem,
        ));
    }
    for field in ["reportingInstance", "action", "reason"] {
        let given = text(field);
        if given.is_empty() {
            faults.push(FieldError::required(field, ""));
        } else if given.len() > MAX_WORD {
            faults.push(FieldError::invalid(
                field,
                "",
                format!("can have at most {MAX_WORD} characters"),
            ));
        }
    }
    if text("note").len() > MAX_NOTE {
        faults.push(FieldError::invalid(
            // kube-apiserver names the field as it is stored.
            "message",
            "",
            format!("can have at most {MAX_NOTE} characters"),
        ));
    }
    if !matches!(text("type"), "Normal" | "Warning") {
        faults.push(FieldError::invalid(
            "type",
            "",
            format!("has invalid value: {}", text("type")),
        ));
    }
    faults
}

fn rename<'a>(
    object: &mut Value,
    names: impl Iterator<Item = (&'a str, &'a str)>,
    api_version: &str,
) {
    let Some(map) = object.as_object_mut() else {
        return;
    };
    let moved: Map<String, Value> = names
        .filter_map(|(from, to)| map.remove(from).map(|v| (to.to_owned(), v)))
        .collect();
    map.extend(moved);
    map.insert("apiVersion".to_owned(), api_version.into());
}

/// An Event lives in the namespace of what it is about; without one, in `default`.
fn validate(object: &Value, _old: Option<&Value>) -> Vec<FieldError> {
    let (subject, path) = if object.get("regarding").is_some() {
        (&object["regarding"], "regarding.namespace")
    } else {
        (&object["involvedObject"], "involvedObject.namespace")
    };
    let about = subject["namespace"].as_str().unwrap_or_default();
    let namespace = object["metadata"]["namespace"].as_str().unwrap_or_default();
    let fits = if about.is_empty() {
        matches!(namespace, "default" | "kube-system")
    } else {
        about == namespace
    };
    if fits {
        return Vec::new();
    }
    vec![FieldError::invalid(
        path,
        about,
        "does not match event.namespace",
    )]
}

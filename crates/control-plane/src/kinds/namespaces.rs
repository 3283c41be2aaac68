//! Namespaces.

use k8s_openapi::api::core::v1::Namespace;
use serde_json::{Value, json};

use super::generate;
use crate::registry::{Kind, NameRule, Strategy, builtin_kind};
use crate::table::{Columns, builtin};

/// In `spec.finalizers` of a namespace: its content is not yet gone.
const CONTENT: &str = "kubernetes";

pub(super) fn namespaces() -> Kind {
    let mut kind = builtin_kind(
        "",
        "Namespace",
        "namespaces",
        generate::<Namespace>,
        Columns::Builtin(&builtin::NAMESPACES),
        Strategy {
            names: NameRule::Label,
            generation: false,
            unconditional_update: true,
            strategic_patch: true,
            prepare,
            validate: |_, _| Vec::new(),
            fields: &[("status.phase", "status.phase"), ("name", "metadata.name")],
            ttl: None,
        },
    );
    kind.namespaced = false;
    kind.status = true;
    kind.short_names = vec!["ns".to_owned()];
    kind
}

fn prepare(object: &mut Value, old: Option<&Value>) {
    match old {
        None => {
            object["spec"] = json!({"finalizers": [CONTENT]});
            object["status"] = json!({"phase": "Active"});
            if let Some(name) = object["metadata"]["name"].as_str().map(str::to_owned) {
                object["metadata"]["labels"]["kubernetes.io/metadata.name"] = name.into();
            }
        }
        Some(old) => {
            // The content's finalizer is taken off by whoever empties the namespace, not by updates.
            object["spec"] = old["spec"].clone();
            if let Some(name) = old["metadata"]["name"].as_str() {
                if !object["metadata"]["labels"].is_object() {
                    object["metadata"]["labels"] = json!({});
                }
                object["metadata"]["labels"]["kubernetes.io/metadata.name"] = name.into();
            }
        }
    }
}

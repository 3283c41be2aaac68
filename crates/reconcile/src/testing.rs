//! Builders for tests.

use egress_api::Proxy;
use serde_json::json;

pub(crate) fn mk_managed(name: &str, provider: &str) -> Proxy {
    mk(name, &json!({"mode": "Managed", "provider": provider}))
}

pub(crate) fn mk_external(name: &str, host: &str) -> Proxy {
    mk(
        name,
        &json!({"mode": "External", "endpoint": {"host": host}}),
    )
}

/// As it is after it was stored.
pub(crate) fn mk(name: &str, spec: &serde_json::Value) -> Proxy {
    serde_json::from_value(json!({
        "apiVersion": "crawl.example.com/v1alpha1",
        "kind": "Proxy",
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": format!("uid-of-{name}"),
            "generation": 1,
            "resourceVersion": "1",
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": spec,
    }))
    .unwrap()
}

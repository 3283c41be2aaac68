//! Objects that the CRD refuses, with the messages, and what it fills in.

use serde_json::{Value, json};

use super::{Session, external, managed, with};

pub async fn ask(s: &mut Session) -> anyhow::Result<()> {
    refused(s).await?;
    filled_in(s).await?;
    transitions(s).await
}

async fn refused(s: &mut Session) -> anyhow::Result<()> {
    let proxies = s.proxies();
    let e = |change: Value| with(external("bad"), &json!({"spec": change}));
    let m = |change: Value| with(managed("bad"), &json!({"spec": change}));
    let spec = |value: Value| {
        let mut body = external("bad");
        body["spec"] = value;
        body
    };
    let inline = json!({"inline": "#cloud-config\n"});
    for (what, body) in [
        ("external-provider", e(json!({"provider": "local"}))),
        ("external-no-endpoint", e(json!({"endpoint": null}))),
        ("external-placement", e(json!({"placement": {"zone": "a"}}))),
        ("external-cloud-init", e(json!({"cloudInit": inline}))),
        (
            "external-everything",
            e(json!({"provider": "p", "placement": {}, "cloudInit": inline, "endpoint": null})),
        ),
        ("managed-no-provider", m(json!({"provider": null}))),
        (
            "managed-endpoint",
            m(json!({"endpoint": {"host": "192.0.2.1"}})),
        ),
        (
            "cloud-init-both",
            m(json!({"cloudInit": {"inline": "x", "secretRef": {"name": "s"}}})),
        ),
        ("cloud-init-neither", m(json!({"cloudInit": {}}))),
        (
            "cloud-init-no-name",
            m(json!({"cloudInit": {"secretRef": {"key": "k"}}})),
        ),
        (
            "cloud-init-empty-name",
            m(json!({"cloudInit": {"secretRef": {"name": ""}}})),
        ),
        ("cloud-init-string", m(json!({"cloudInit": "x"}))),
        ("port-0", e(json!({"port": 0}))),
        ("port-negative", e(json!({"port": -1}))),
        ("port-65536", e(json!({"port": 65536}))),
        ("port-string", e(json!({"port": "3128"}))),
        ("port-fraction", e(json!({"port": 31.5}))),
        ("port-whole-float", e(json!({"port": 3128.0}))),
        ("port-huge", e(json!({"port": 99_999_999_999_i64}))),
        ("port-bool", e(json!({"port": true}))),
        ("leases-negative", e(json!({"maxLeases": -1}))),
        ("leases-many", e(json!({"maxLeases": 1_000_001}))),
        ("mode-unknown", e(json!({"mode": "Mixed"}))),
        ("mode-missing", e(json!({"mode": null}))),
        ("mode-number", e(json!({"mode": 1}))),
        ("mode-lower", e(json!({"mode": "external"}))),
        ("url-relative", e(json!({"healthCheck": {"url": "/here"}}))),
        (
            "url-ftp",
            e(json!({"healthCheck": {"url": "ftp://example.com/"}})),
        ),
        ("url-words", e(json!({"healthCheck": {"url": "not a url"}}))),
        (
            "url-no-host",
            e(json!({"healthCheck": {"url": "http:///path"}})),
        ),
        (
            "url-long",
            e(json!({"healthCheck": {"url": format!("http://a/{}", "x".repeat(2048))}})),
        ),
        (
            "timeout-over-interval",
            e(json!({"healthCheck": {"timeoutSeconds": 20}})),
        ),
        (
            "timeout-zero",
            e(json!({"healthCheck": {"timeoutSeconds": 0}})),
        ),
        (
            "expected-status",
            e(json!({"healthCheck": {"expectedStatus": 600}})),
        ),
        (
            "thresholds",
            e(json!({"healthCheck": {"successThreshold": 0, "failureThreshold": 1001}})),
        ),
        ("attribute-number", e(json!({"attributes": {"geo": 7}}))),
        ("attributes-list", e(json!({"attributes": ["geo"]}))),
        ("provider-empty", m(json!({"provider": ""}))),
        ("provider-long", m(json!({"provider": "p".repeat(64)}))),
        ("host-empty", e(json!({"endpoint": {"host": ""}}))),
        ("host-missing", e(json!({"endpoint": {"port": 1}}))),
        (
            "host-long",
            e(json!({"endpoint": {"host": "h".repeat(254)}})),
        ),
        (
            "several-faults",
            e(json!({"port": 0, "maxLeases": -5, "mode": "Odd", "provider": ""})),
        ),
        ("spec-null", spec(Value::Null)),
        ("spec-empty", spec(json!({}))),
        ("spec-string", spec(json!("x"))),
        ("spec-list", spec(json!([]))),
        (
            "spec-missing",
            with(external("bad"), &json!({"spec": null})),
        ),
        (
            "status-wrong",
            with(
                external("bad-status"),
                &json!({"status": {"latencyMillis": "x"}}),
            ),
        ),
    ] {
        // A name of its own: what one server takes by mistake is not in the way of the next.
        let body = with(body, &json!({"metadata": {"name": format!("r-{what}")}}));
        s.post(&format!("refused/{what}"), &proxies, &body).await?;
    }
    Ok(())
}

async fn filled_in(s: &mut Session) -> anyhow::Result<()> {
    let proxies = s.proxies();
    let null = |pointer: &str, base: Value| {
        let mut body = base;
        let mut at = &mut body;
        for part in pointer.split('.') {
            at = &mut at[part];
        }
        *at = Value::Null;
        body
    };
    let health = |change: Value| {
        with(
            external("filled"),
            &json!({"spec": {"healthCheck": change}}),
        )
    };
    for (what, body) in [
        ("external", external("filled")),
        ("managed", managed("filled")),
        ("health-empty", health(json!({}))),
        ("health-part", health(json!({"intervalSeconds": 60}))),
        ("health-null", null("spec.healthCheck", external("filled"))),
        ("port-null", null("spec.port", external("filled"))),
        ("provider-null", null("spec.provider", external("filled"))),
        (
            "attributes-null",
            null("spec.attributes", external("filled")),
        ),
        (
            "interval-null",
            null(
                "spec.healthCheck.intervalSeconds",
                health(json!({"url": "http://a/"})),
            ),
        ),
        (
            "leases-zero",
            with(external("filled"), &json!({"spec": {"maxLeases": 0}})),
        ),
        (
            "port-limits",
            with(external("filled"), &json!({"spec": {"port": 65535}})),
        ),
        (
            "secret-key",
            with(
                managed("filled"),
                &json!({"spec": {"cloudInit": {"secretRef": {"name": "s"}}}}),
            ),
        ),
        (
            "inline-empty",
            with(
                managed("filled"),
                &json!({"spec": {"cloudInit": {"inline": ""}}}),
            ),
        ),
        (
            "placement-empty",
            with(managed("filled"), &json!({"spec": {"placement": {}}})),
        ),
        (
            "ipv6",
            with(
                external("filled"),
                &json!({"spec": {"endpoint": {"host": "2001:db8::1"}}}),
            ),
        ),
        (
            "url-ipv6",
            health(json!({"url": "http://[2001:db8::1]:8080/x?y=z#f"})),
        ),
        (
            "url-user",
            health(json!({"url": "https://user:secret@example.com/"})),
        ),
        ("url-upper", health(json!({"url": "HTTPS://EXAMPLE.com"}))),
        (
            "unicode",
            with(
                external("filled"),
                &json!({"spec": {"attributes": {"geo": "Zürich 🗻"}}}),
            ),
        ),
        (
            "provider-63",
            with(
                managed("filled"),
                &json!({"spec": {"provider": "p".repeat(63)}}),
            ),
        ),
        (
            "provider-unicode-63",
            with(
                managed("filled"),
                &json!({"spec": {"provider": "ü".repeat(63)}}),
            ),
        ),
    ] {
        let body = with(body, &json!({"metadata": {"name": format!("f-{what}")}}));
        s.post(&format!("filled/{what}"), &proxies, &body).await?;
    }
    Ok(())
}

async fn transitions(s: &mut Session) -> anyhow::Result<()> {
    let made = s.given(&external("fixed")).await?;
    let path = s.proxy_path("fixed");
    let other = json!({"spec": {"mode": "Managed", "provider": "local", "endpoint": null}});
    s.put("changed/mode-update", &path, &with(made.clone(), &other))
        .await?;
    s.merge("changed/mode-patch", &path, &other).await?;
    s.merge(
        "changed/mode-only",
        &path,
        &json!({"spec": {"mode": "Managed"}}),
    )
    .await?;
    s.merge(
        "changed/mode-removed",
        &path,
        &json!({"spec": {"mode": null}}),
    )
    .await?;
    s.merge(
        "changed/port-removed",
        &path,
        &json!({"spec": {"port": null}}),
    )
    .await?;
    s.merge(
        "changed/endpoint-removed",
        &path,
        &json!({"spec": {"endpoint": null}}),
    )
    .await?;
    s.merge("changed/port-bad", &path, &json!({"spec": {"port": 70000}}))
        .await?;
    s.merge(
        "changed/good",
        &path,
        &json!({"spec": {"port": 8080, "attributes": {"geo": "de"}}}),
    )
    .await?;
    Ok(())
}

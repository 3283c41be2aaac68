//! Unknown and duplicate fields: `fieldValidation`.

use reqwest::Method;
use serde_json::json;

use super::{Session, external, with};
use crate::client::Request;

pub async fn ask(s: &mut Session) -> anyhow::Result<()> {
    let unknown = with(
        external("u"),
        &json!({
            "color": "red",
            "metadata": {"mood": "good"},
            "spec": {"speed": 9, "healthCheck": {"depth": 1}, "endpoint": {"port": 1}},
            "status": {"weather": "fine"},
        }),
    );
    for (name, query) in [
        ("default", ""),
        ("strict", "?fieldValidation=Strict"),
        ("warn", "?fieldValidation=Warn"),
        ("ignore", "?fieldValidation=Ignore"),
        ("bad", "?fieldValidation=Maybe"),
        ("lower", "?fieldValidation=strict"),
    ] {
        let path = format!("{}{query}", s.proxies());
        let body = with(
            unknown.clone(),
            &json!({"metadata": {"name": format!("u-{name}")}}),
        );
        s.post(&format!("create/{name}"), &path, &body).await?;

        let twice = format!(
            r#"{{"apiVersion":"crawl.example.com/v1alpha1","kind":"Proxy","metadata":{{"name":"d-{name}","name":"d-{name}"}},"spec":{{"mode":"External","endpoint":{{"host":"a","host":"b"}},"port":1,"port":2}}}}"#
        );
        let request = Request::new(Method::POST, path.clone()).body("application/json", twice);
        s.call(&format!("duplicate-json/{name}"), request).await?;
        let twice = format!(
            "apiVersion: crawl.example.com/v1alpha1\nkind: Proxy\nmetadata:\n  name: y-{name}\nspec:\n  mode: External\n  endpoint:\n    host: a\n  port: 1\n  port: 2\n  speed: 1\n"
        );
        let request = Request::new(Method::POST, path).body("application/yaml", twice);
        s.call(&format!("duplicate-yaml/{name}"), request).await?;

        let target = format!("t-{name}");
        let made = s.given(&external(&target)).await?;
        let path = format!("{}{query}", s.proxy_path(&target));
        let put = with(made, &json!({"spec": {"speed": 1}}));
        s.put(&format!("update/{name}"), &path, &put).await?;
        s.merge(
            &format!("merge/{name}"),
            &path,
            &json!({"spec": {"speed": 2, "port": 99}}),
        )
        .await?;
        let operations = json!([
            {"op": "add", "path": "/spec/speed", "value": 3},
            {"op": "replace", "path": "/spec/port", "value": 98},
        ]);
        let request = Request::new(Method::PATCH, path.clone())
            .body("application/json-patch+json", operations.to_string());
        s.call(&format!("json-patch/{name}"), request).await?;
        let doubled = r#"{"spec":{"port":5,"port":6}}"#;
        let request =
            Request::new(Method::PATCH, path).body("application/merge-patch+json", doubled);
        s.call(&format!("merge-duplicate/{name}"), request).await?;
    }
    // Case matters.
    let cased = with(external("cased"), &json!({"spec": {"Port": 1}, "Spec": {}}));
    s.post(
        "create/case",
        &format!("{}?fieldValidation=Strict", s.proxies()),
        &cased,
    )
    .await?;
    // A refusal by the schema and an unknown field together.
    let both = with(external("both"), &json!({"spec": {"port": 0, "speed": 1}}));
    for (name, query) in [
        ("strict", "?fieldValidation=Strict"),
        ("warn", "?fieldValidation=Warn"),
    ] {
        s.post(
            &format!("both/{name}"),
            &format!("{}{query}", s.proxies()),
            &both,
        )
        .await?;
    }
    // Kinds that are built in.
    for (name, query) in [
        ("strict", "?fieldValidation=Strict"),
        ("warn", "?fieldValidation=Warn"),
        ("default", ""),
    ] {
        let secret = json!({
            "apiVersion": "v1", "kind": "Secret", "metadata": {"name": format!("s-{name}"), "mood": "good"},
            "stringData": {"a": "b"}, "colour": "red",
        });
        let path = format!("{}{query}", s.core("secrets"));
        s.post(&format!("secret/{name}"), &path, &secret).await?;
    }
    Ok(())
}

//! Watches. What counts is the order and content of events, and how a watch ends.

use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};

use super::{Session, external, with};
use crate::client::Request;

const LIMIT: Duration = Duration::from_secs(60);

pub async fn ask(s: &mut Session) -> anyhow::Result<()> {
    lives(s).await?;
    selected(s).await?;
    starts(s).await?;
    shapes(s).await?;
    refused(s).await
}

/// Bookmarks come when a server likes; where they are not the question they are left out.
fn without_bookmarks(events: Vec<Value>) -> Vec<Value> {
    events
        .into_iter()
        .filter(|event| event["type"] != "BOOKMARK")
        .collect()
}

fn count(wanted: usize) -> impl FnMut(&[Value]) -> bool {
    move |events| {
        events
            .iter()
            .filter(|event| event["type"] != "BOOKMARK")
            .count()
            >= wanted
    }
}

impl Session {
    async fn revision(&self) -> anyhow::Result<String> {
        let list = self.target.client.get(&self.proxies()).await?.body;
        Ok(list["metadata"]["resourceVersion"]
            .as_str()
            .unwrap_or("0")
            .to_owned())
    }

    async fn watch(&mut self, what: &str, query: &str, wanted: usize) -> anyhow::Result<()> {
        let request = Request::new(
            Method::GET,
            format!("{}?watch=true&{query}", self.proxies()),
        );
        let events = self
            .target
            .client
            .watch(request, LIMIT, count(wanted))
            .await?;
        self.note(what, &json!(without_bookmarks(events)));
        Ok(())
    }
}

/// The whole life of an object, seen from before it existed.
async fn lives(s: &mut Session) -> anyhow::Result<()> {
    let start = s.revision().await?;
    s.given(&with(
        external("life"),
        &json!({"metadata": {"finalizers": ["example.com/a"]}}),
    ))
    .await?;
    let path = s.proxy_path("life");
    let client = s.target.client.clone();
    let patch = |path: String, body: Value| {
        let client = client.clone();
        async move {
            let request = Request::new(Method::PATCH, path)
                .body("application/merge-patch+json", body.to_string());
            client.send(request).await
        }
    };
    patch(path.clone(), json!({"spec": {"port": 1000}})).await?;
    patch(path.clone(), json!({"spec": {"port": 1000}})).await?;
    patch(
        format!("{path}/status"),
        json!({"status": {"phase": "Ready"}}),
    )
    .await?;
    client.delete(&path).await?;
    patch(path.clone(), json!({"metadata": {"finalizers": null}})).await?;
    s.watch("life", &format!("resourceVersion={start}"), 5)
        .await?;
    s.watch(
        "life/of-one",
        &format!("resourceVersion={start}&fieldSelector=metadata.name%3Dlife"),
        5,
    )
    .await?;
    // Live: the watch is there before the change.
    let start = s.revision().await?;
    let request = Request::new(
        Method::GET,
        format!("{}?watch=true&resourceVersion={start}", s.proxies()),
    );
    let watcher = {
        let client = s.target.client.clone();
        tokio::spawn(async move { client.watch(request, LIMIT, count(2)).await })
    };
    s.given(&external("live")).await?;
    s.target.client.delete(&s.proxy_path("live")).await?;
    s.note("live", &json!(without_bookmarks(watcher.await??)));
    Ok(())
}

/// An object that starts or stops to match appears and disappears.
async fn selected(s: &mut Session) -> anyhow::Result<()> {
    let start = s.revision().await?;
    s.given(&external("sel")).await?;
    let path = s.proxy_path("sel");
    for labels in [
        json!({"on": "1"}),
        json!({"on": "1", "x": "y"}),
        json!({"on": null}),
        json!({"on": "1"}),
    ] {
        let request = Request::new(Method::PATCH, path.clone()).body(
            "application/merge-patch+json",
            json!({"metadata": {"labels": labels}}).to_string(),
        );
        s.target.client.send(request).await?;
    }
    s.target.client.delete(&path).await?;
    s.watch(
        "selected",
        &format!("resourceVersion={start}&labelSelector=on"),
        5,
    )
    .await?;
    Ok(())
}

async fn starts(s: &mut Session) -> anyhow::Result<()> {
    for name in ["s1", "s2"] {
        s.given(&external(name)).await?;
    }
    // Without a revision, and with 0: what there is comes first, as if it had just been made.
    s.watch("start/none", "timeoutSeconds=20", 2).await?;
    s.watch("start/zero", "timeoutSeconds=20&resourceVersion=0", 2)
        .await?;
    // A time limit ends it without an error.
    let start = s.revision().await?;
    let ended = Request::new(
        Method::GET,
        format!(
            "{}?watch=true&resourceVersion={start}&timeoutSeconds=1",
            s.proxies()
        ),
    );
    let events = s.target.client.watch(ended, LIMIT, |_| false).await?;
    s.note("timeout", &json!(without_bookmarks(events)));
    // A list as a watch: everything, then a bookmark that says so.
    let initial = Request::new(
        Method::GET,
        format!(
            "{}?watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true",
            s.proxies()
        ),
    );
    let events = s
        .target
        .client
        .watch(initial, LIMIT, |events| {
            events.iter().any(|event| event["type"] == "BOOKMARK")
        })
        .await?;
    s.note("initial-events", &json!(events));
    let none = Request::new(
        Method::GET,
        format!(
            "{}?watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&timeoutSeconds=20",
            s.proxies()
        ),
    );
    let events = s.target.client.watch(none, LIMIT, count(2)).await?;
    s.note(
        "initial-events/no-bookmarks",
        &json!(without_bookmarks(events)),
    );
    let not = Request::new(
        Method::GET,
        format!(
            "{}?watch=true&sendInitialEvents=false&resourceVersionMatch=NotOlderThan&timeoutSeconds=1",
            s.proxies()
        ),
    );
    let events = s.target.client.watch(not, LIMIT, |_| false).await?;
    s.note("initial-events/not", &json!(without_bookmarks(events)));
    // One object by its own path.
    let item = Request::new(
        Method::GET,
        format!("{}?watch=true&timeoutSeconds=20", s.proxy_path("s1")),
    );
    let events = s.target.client.watch(item, LIMIT, count(1)).await?;
    s.note("item", &json!(without_bookmarks(events)));
    Ok(())
}

async fn shapes(s: &mut Session) -> anyhow::Result<()> {
    let path = format!(
        "{}?watch=true&resourceVersion=0&timeoutSeconds=20",
        s.proxies()
    );
    for (what, accept) in [
        (
            "table",
            "application/json;as=Table;v=v1;g=meta.k8s.io,application/json",
        ),
        (
            "partial",
            "application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io",
        ),
    ] {
        let request = Request::new(Method::GET, path.clone()).header("accept", accept);
        let mut events = without_bookmarks(s.target.client.watch(request, LIMIT, count(2)).await?);
        for event in &mut events {
            event["object"] = super::without_ages(event["object"].clone());
            // Only the first names its columns, and the age column can be told by them alone.
            if let Some(last) = event
                .pointer_mut("/object/rows/0/cells")
                .and_then(Value::as_array_mut)
                .and_then(|cells| cells.last_mut())
            {
                *last = json!("<age>");
            }
        }
        s.note(&format!("shape/{what}"), &json!(events));
    }
    Ok(())
}

async fn refused(s: &mut Session) -> anyhow::Result<()> {
    let proxies = s.proxies();
    let start = s.revision().await?;
    for (what, query) in [
        ("word", "resourceVersion=abc".to_owned()),
        (
            "match-alone",
            "resourceVersionMatch=NotOlderThan".to_owned(),
        ),
        (
            "match-with-revision",
            format!("resourceVersion={start}&resourceVersionMatch=NotOlderThan"),
        ),
        ("initial-without-match", "sendInitialEvents=true".to_owned()),
        (
            "initial-exact",
            "sendInitialEvents=true&resourceVersionMatch=Exact".to_owned(),
        ),
        ("bad-selector", "labelSelector=,,".to_owned()),
        (
            "unknown-field",
            "fieldSelector=spec.mode%3DExternal".to_owned(),
        ),
        ("continue", "continue=abc".to_owned()),
        ("bad-timeout", "timeoutSeconds=soon".to_owned()),
    ] {
        let path = format!("{proxies}?watch=true&{query}");
        let path = if what == "bad-timeout" {
            path
        } else {
            format!("{path}&timeoutSeconds=1")
        };
        s.call(&format!("refused/{what}"), Request::new(Method::GET, path))
            .await?;
    }
    // Older than what the server remembers: an error event, and the client lists again.
    let old = Request::new(
        Method::GET,
        format!("{proxies}?watch=true&resourceVersion=1&timeoutSeconds=5"),
    );
    let events = s
        .target
        .client
        .watch(old, LIMIT, |events| !events.is_empty())
        .await?;
    s.note("too-old", &json!(events.first()));
    s.get(
        "too-old/other-kind",
        "/apis/crawl.example.com/v1alpha1/nothings?watch=true",
    )
    .await?;
    Ok(())
}

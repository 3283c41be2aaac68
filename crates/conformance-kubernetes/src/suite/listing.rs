//! Lists: selectors, pages, revisions, tables.

use reqwest::Method;
use serde_json::{Value, json};

use super::{Session, external, managed, with};
use crate::client::Request;

pub async fn ask(s: &mut Session) -> anyhow::Result<()> {
    let proxies = s.proxies();
    s.get("empty", &proxies).await?;
    for (name, geo, tier) in [
        ("a", "de", Some("1")),
        ("b", "de", Some("2")),
        ("c", "fr", Some("1")),
        ("d", "us", None),
        ("e", "", Some("")),
    ] {
        let labels = json!({"metadata": {"labels": {"geo": geo, "tier": tier}}});
        s.given(&with(external(name), &labels)).await?;
    }
    s.given(&managed("m")).await?;
    s.merge("status", &format!("{}/status", s.proxy_path("m")), &json!({"status": {
        "phase": "Ready", "ip": "192.0.2.1", "providerID": "local/m", "latencyMillis": 12,
        "conditions": [{"type": "Healthy", "status": "True", "reason": "R", "message": "", "lastTransitionTime": "2001-02-03T04:05:06Z"}],
    }})).await?;
    s.get("all", &proxies).await?;
    selectors(s, &proxies).await?;
    pages(s, &proxies).await?;
    revisions(s, &proxies).await?;
    shapes(s, &proxies).await
}

fn names(body: Value) -> Value {
    match body.get("items").and_then(Value::as_array) {
        Some(items) => json!({
            "names": items.iter().map(|item| item["metadata"]["name"].clone()).collect::<Vec<_>>(),
            "metadata": body["metadata"],
        }),
        None => body,
    }
}

async fn selectors(s: &mut Session, proxies: &str) -> anyhow::Result<()> {
    for (what, selector) in [
        ("equal", "geo%3Dde"),
        ("double-equal", "geo%3D%3Dde"),
        ("not-equal", "geo!%3Dde"),
        ("in", "geo%20in%20(de,fr)"),
        ("notin", "geo%20notin%20(de,fr)"),
        ("exists", "tier"),
        ("not-exists", "!tier"),
        ("and", "geo%3Dde,tier%3D1"),
        ("empty-value", "tier%3D"),
        ("empty-in-set", "tier%20in%20(,1)"),
        ("greater", "tier%3E1"),
        ("less", "tier%3C2"),
        ("greater-word", "geo%3E1"),
        ("greater-no-number", "tier%3Ex"),
        ("spaces", "%20geo%20%3D%20de%20"),
        ("bad-syntax", "geo%3Dde,,x"),
        ("bad-operator", "geo%20near%20(de)"),
        ("bad-key", "ge!o%3Dde"),
        ("bad-value", "geo%3Dde%20x"),
        ("open-set", "geo%20in%20(de"),
        ("trailing-comma", "geo%3Dde,"),
    ] {
        let path = format!("{proxies}?labelSelector={selector}");
        s.call_with(
            &format!("label/{what}"),
            Request::new(Method::GET, path),
            names,
        )
        .await?;
    }
    let namespace = s.namespace.clone();
    for (what, selector) in [
        ("name", "metadata.name%3Da".to_owned()),
        ("not-name", "metadata.name!%3Da".to_owned()),
        ("namespace", format!("metadata.namespace%3D{namespace}")),
        ("other-namespace", "metadata.namespace%3Dother".to_owned()),
        (
            "both",
            format!("metadata.name%3Da,metadata.namespace%3D{namespace}"),
        ),
        ("nobody", "metadata.name%3Dnobody".to_owned()),
        ("unknown", "spec.mode%3DExternal".to_owned()),
        ("label", "metadata.labels.geo%3Dde".to_owned()),
        ("bad-syntax", "metadata.name".to_owned()),
        ("set", "metadata.name%20in%20(a)".to_owned()),
    ] {
        let path = format!("{proxies}?fieldSelector={selector}");
        s.call_with(
            &format!("field/{what}"),
            Request::new(Method::GET, path),
            names,
        )
        .await?;
    }
    let everywhere = "/apis/crawl.example.com/v1alpha1/proxies?fieldSelector=metadata.namespace%3D";
    s.call_with(
        "field/everywhere",
        Request::new(Method::GET, format!("{everywhere}{namespace}")),
        names,
    )
    .await?;
    Ok(())
}

async fn pages(s: &mut Session, proxies: &str) -> anyhow::Result<()> {
    let page = |query: String| Request::new(Method::GET, format!("{proxies}?{query}"));
    let token = |body: &Value| {
        body["metadata"]["continue"]
            .as_str()
            .unwrap_or_default()
            .to_owned()
    };
    let first = s
        .call_with("page/first", page("limit=2".to_owned()), names)
        .await?;
    // What is made later does not appear in the pages of an earlier list.
    s.given(&external("aa")).await?;
    let next = token(&first.body);
    let second = s
        .call_with(
            "page/second",
            page(format!("limit=2&continue={next}")),
            names,
        )
        .await?;
    let next = token(&second.body);
    s.call_with(
        "page/third",
        page(format!("limit=2&continue={next}")),
        names,
    )
    .await?;
    s.call_with(
        "page/rest",
        page(format!("continue={}", token(&first.body))),
        names,
    )
    .await?;
    s.target.client.delete(&s.proxy_path("aa")).await?;
    s.call_with("page/exact", page("limit=6".to_owned()), names)
        .await?;
    s.call_with("page/large", page("limit=500".to_owned()), names)
        .await?;
    s.call_with("page/zero", page("limit=0".to_owned()), names)
        .await?;
    s.call_with("page/negative", page("limit=-1".to_owned()), names)
        .await?;
    s.call_with("page/word", page("limit=many".to_owned()), names)
        .await?;
    let selected = s
        .call_with(
            "page/selected",
            page("limit=1&labelSelector=geo%3Dde".to_owned()),
            names,
        )
        .await?;
    let next = token(&selected.body);
    s.call_with(
        "page/selected-next",
        page(format!("limit=1&labelSelector=geo%3Dde&continue={next}")),
        names,
    )
    .await?;
    s.call_with(
        "page/bad-token",
        page("limit=2&continue=nonsense".to_owned()),
        names,
    )
    .await?;
    s.call_with("page/bad-base64", page("continue=%21%21".to_owned()), names)
        .await?;
    s.call_with(
        "page/token-and-revision",
        page(format!("continue={}&resourceVersion=5", token(&first.body))),
        names,
    )
    .await?;
    s.call_with(
        "page/revision-0",
        page("limit=2&resourceVersion=0".to_owned()),
        names,
    )
    .await?;
    Ok(())
}

async fn revisions(s: &mut Session, proxies: &str) -> anyhow::Result<()> {
    let now = s.target.client.get(proxies).await?.body["metadata"]["resourceVersion"].clone();
    let now = now.as_str().unwrap_or("0").to_owned();
    s.given(&external("later")).await?;
    for (what, query) in [
        ("any", "resourceVersion=0".to_owned()),
        (
            "not-older",
            format!("resourceVersion={now}&resourceVersionMatch=NotOlderThan"),
        ),
        (
            "exact",
            format!("resourceVersion={now}&resourceVersionMatch=Exact"),
        ),
        (
            "exact-page",
            format!("resourceVersion={now}&resourceVersionMatch=Exact&limit=2"),
        ),
        ("plain", format!("resourceVersion={now}")),
        (
            "exact-0",
            "resourceVersion=0&resourceVersionMatch=Exact".to_owned(),
        ),
        (
            "exact-old",
            "resourceVersion=1&resourceVersionMatch=Exact".to_owned(),
        ),
        ("match-alone", "resourceVersionMatch=Exact".to_owned()),
        (
            "match-unknown",
            format!("resourceVersion={now}&resourceVersionMatch=Newest"),
        ),
        ("word", "resourceVersion=abc".to_owned()),
        ("negative", "resourceVersion=-1".to_owned()),
        (
            "initial-events-without-watch",
            "sendInitialEvents=true".to_owned(),
        ),
    ] {
        let request = Request::new(Method::GET, format!("{proxies}?{query}"));
        s.call_with(&format!("revision/{what}"), request, names)
            .await?;
    }
    let future = format!("{proxies}?resourceVersion=999999999&timeoutSeconds=1");
    s.call_with(
        "revision/future",
        Request::new(Method::GET, future),
        |mut body| {
            // How long the server waited before it gave up is its own matter.
            if let Some(details) = body.get_mut("details").and_then(Value::as_object_mut) {
                details.remove("retryAfterSeconds");
            }
            body
        },
    )
    .await?;
    let item = s.proxy_path("a");
    s.get("revision/get-any", &format!("{item}?resourceVersion=0"))
        .await?;
    s.get("revision/get-word", &format!("{item}?resourceVersion=abc"))
        .await?;
    s.target.client.delete(&s.proxy_path("later")).await?;
    Ok(())
}

async fn shapes(s: &mut Session, proxies: &str) -> anyhow::Result<()> {
    let table = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json";
    let list = |query: &str, accept: &str| {
        Request::new(Method::GET, format!("{proxies}{query}")).header("accept", accept.to_owned())
    };
    s.call("shape/table", list("", table)).await?;
    s.call("shape/table-none", list("?includeObject=None", table))
        .await?;
    s.call(
        "shape/table-metadata",
        list("?includeObject=Metadata", table),
    )
    .await?;
    s.call("shape/table-object", list("?includeObject=Object", table))
        .await?;
    s.call("shape/table-bad", list("?includeObject=Everything", table))
        .await?;
    s.call("shape/table-page", list("?limit=2", table)).await?;
    s.call("shape/table-empty", list("?labelSelector=nothing", table))
        .await?;
    s.call("shape/table-refusal", list("?labelSelector=,,", table))
        .await?;
    let partial = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io";
    s.call("shape/partial", list("", partial)).await?;
    s.call(
        "shape/partial-of-list",
        list(
            "",
            "application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io",
        ),
    )
    .await?;
    s.call(
        "shape/old-table",
        list("", "application/json;as=Table;v=v1beta1;g=meta.k8s.io"),
    )
    .await?;
    Ok(())
}

//! The questions. Each area works in a namespace of its own and asks one server; the same area run
//! against another server asks the same questions in the same order.

mod core;
mod discovery;
mod fields;
mod kubectl_verbs;
mod listing;
mod metadata;
mod objects;
mod patches;
mod validation;
mod watching;

use std::collections::BTreeSet;

use futures::future::BoxFuture;
use serde_json::{Map, Value, json};

use crate::client::{Answer, Request};
use crate::compare::{Normaliser, Record, plain_text};
use crate::kubectl::Output;
use crate::target::Target;
use reqwest::Method;

/// What one area asks.
pub type Area = for<'a> fn(&'a mut Session) -> BoxFuture<'a, anyhow::Result<()>>;

/// Every area, by name.
pub const AREAS: &[(&str, Area)] = &[
    ("discovery", |s| Box::pin(discovery::ask(s))),
    ("objects", |s| Box::pin(objects::ask(s))),
    ("metadata", |s| Box::pin(metadata::ask(s))),
    ("validation", |s| Box::pin(validation::ask(s))),
    ("fields", |s| Box::pin(fields::ask(s))),
    ("patches", |s| Box::pin(patches::ask(s))),
    ("listing", |s| Box::pin(listing::ask(s))),
    ("watching", |s| Box::pin(watching::ask(s))),
    ("core", |s| Box::pin(core::ask(s))),
    ("kubectl", |s| Box::pin(kubectl_verbs::ask(s))),
];

/// Runs areas one after the other and gives all answers, normalised.
pub async fn run(target: &Target, areas: &[(&'static str, Area)]) -> Vec<Record> {
    let mut records = Vec::new();
    for (name, area) in areas {
        let mut session = Session::new(target.clone(), name);
        if let Err(error) = session.prepare().await {
            session.note("area", &json!({"failed": format!("{error:#}")}));
        } else if let Err(error) = area(&mut session).await {
            session.note("area", &json!({"failed": format!("{error:#}")}));
        }
        records.append(&mut session.records);
    }
    records
}

/// One area's conversation with one server.
pub struct Session {
    pub target: Target,
    /// The area's own namespace.
    pub namespace: String,
    area: &'static str,
    normaliser: Normaliser,
    records: Vec<Record>,
    names: BTreeSet<String>,
}

/// Headers that are compared; others (dates, lengths, audit ids) are each server's own.
const HEADERS: [&str; 5] = [
    "content-type",
    "warning",
    "allow",
    "retry-after",
    "location",
];

impl Session {
    fn new(target: Target, area: &'static str) -> Self {
        let mut normaliser = Normaliser::default();
        normaliser.literal(target.url.clone(), "<server>");
        if let Some((_, address)) = target.url.split_once("://") {
            normaliser.literal(address, "<server>");
        }
        Self {
            target,
            namespace: format!("suite-{area}"),
            area,
            normaliser,
            records: Vec::new(),
            names: BTreeSet::new(),
        }
    }

    async fn prepare(&mut self) -> anyhow::Result<()> {
        let namespace = json!({
            "apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.namespace},
        });
        let answer = self
            .target
            .client
            .post("/api/v1/namespaces", &namespace)
            .await?;
        anyhow::ensure!(
            answer.status == 201,
            "cannot create a namespace: {answer:?}"
        );
        Ok(())
    }

    /// The collection of Proxies of the area.
    pub fn proxies(&self) -> String {
        format!(
            "/apis/crawl.example.com/v1alpha1/namespaces/{}/proxies",
            self.namespace
        )
    }

    pub fn proxy_path(&self, name: &str) -> String {
        format!("{}/{name}", self.proxies())
    }

    /// A collection of the core group in the area's namespace.
    pub fn core(&self, plural: &str) -> String {
        format!("/api/v1/namespaces/{}/{plural}", self.namespace)
    }

    /// Keeps an answer under a name.
    ///
    /// # Panics
    /// When the name was used before: then two answers would be compared with one.
    pub fn note(&mut self, what: &str, answer: &Value) {
        let call = format!("{}/{what}", self.area);
        assert!(
            self.names.insert(call.clone()),
            "two calls are named {call}"
        );
        let answer = self.normaliser.normalise(answer);
        self.records.push(Record { call, answer });
    }

    /// One raw call.
    ///
    /// # Errors
    /// When the server does not answer at all.
    pub async fn call(&mut self, what: &str, request: Request) -> anyhow::Result<Answer> {
        self.call_with(what, request, |body| body).await
    }

    /// [`Session::call`], of whose body only a part is compared.
    ///
    /// # Errors
    /// As [`Session::call`].
    pub async fn call_with(
        &mut self,
        what: &str,
        request: Request,
        part: impl FnOnce(Value) -> Value,
    ) -> anyhow::Result<Answer> {
        let answer = self.target.client.send(request).await?;
        let headers: Map<String, Value> = HEADERS
            .iter()
            .filter_map(|name| {
                let mut values: Vec<&str> = answer.headers.get(*name)?.split(" | ").collect();
                values.sort_unstable();
                Some(((*name).to_owned(), json!(values.join(" | "))))
            })
            .collect();
        let body = part(without_ages(answer.body.clone()));
        self.note(
            what,
            &json!({"status": answer.status, "headers": headers, "body": body}),
        );
        Ok(answer)
    }

    /// # Errors
    /// As [`Session::call`].
    pub async fn get(&mut self, what: &str, path: &str) -> anyhow::Result<Answer> {
        self.call(what, Request::new(Method::GET, path)).await
    }

    /// # Errors
    /// As [`Session::call`].
    pub async fn post(&mut self, what: &str, path: &str, body: &Value) -> anyhow::Result<Answer> {
        self.call(what, Request::new(Method::POST, path).json(body))
            .await
    }

    /// # Errors
    /// As [`Session::call`].
    pub async fn put(&mut self, what: &str, path: &str, body: &Value) -> anyhow::Result<Answer> {
        self.call(what, Request::new(Method::PUT, path).json(body))
            .await
    }

    /// # Errors
    /// As [`Session::call`].
    pub async fn delete(&mut self, what: &str, path: &str) -> anyhow::Result<Answer> {
        self.call(what, Request::new(Method::DELETE, path)).await
    }

    /// A merge patch.
    ///
    /// # Errors
    /// As [`Session::call`].
    pub async fn merge(&mut self, what: &str, path: &str, body: &Value) -> anyhow::Result<Answer> {
        let request = Request::new(Method::PATCH, path)
            .body("application/merge-patch+json", body.to_string());
        self.call(what, request).await
    }

    /// Creates a Proxy without comparing the answer: what is compared comes later.
    ///
    /// # Errors
    /// When the server refuses.
    pub async fn given(&mut self, body: &Value) -> anyhow::Result<Value> {
        let answer = self.target.client.post(&self.proxies(), body).await?;
        anyhow::ensure!(answer.status == 201, "cannot create {body}: {answer:?}");
        self.normaliser.see(&answer.body);
        Ok(answer.body)
    }

    /// One call of kubectl in the area's namespace.
    ///
    /// # Errors
    /// When it does not end.
    pub async fn kubectl(
        &mut self,
        what: &str,
        args: &[&str],
        input: Option<&str>,
    ) -> anyhow::Result<Output> {
        let namespace = format!("--namespace={}", self.namespace);
        let mut all = vec![namespace.as_str()];
        all.extend(args);
        let output = self.target.kubectl.run(&all, input).await?;
        let stdout = serde_json::from_str::<Value>(&output.stdout)
            .ok()
            .filter(|value| value.is_object() || value.is_array())
            .unwrap_or_else(|| plain_text(&output.stdout));
        self.note(
            what,
            &json!({"code": output.code, "stdout": stdout, "stderr": plain_text(&output.stderr)}),
        );
        Ok(output)
    }
}

/// A good External Proxy.
pub fn external(name: &str) -> Value {
    json!({
        "apiVersion": "crawl.example.com/v1alpha1",
        "kind": "Proxy",
        "metadata": {"name": name},
        "spec": {"mode": "External", "endpoint": {"host": "192.0.2.7"}},
    })
}

/// A good Managed Proxy.
pub fn managed(name: &str) -> Value {
    json!({
        "apiVersion": "crawl.example.com/v1alpha1",
        "kind": "Proxy",
        "metadata": {"name": name},
        "spec": {"mode": "Managed", "provider": "local"},
    })
}

/// `value` with `change` merged over it (RFC 7396).
#[must_use]
pub fn with(mut value: Value, change: &Value) -> Value {
    merge_into(&mut value, change);
    value
}

fn merge_into(value: &mut Value, change: &Value) {
    let Value::Object(change) = change else {
        *value = change.clone();
        return;
    };
    if !value.is_object() {
        *value = json!({});
    }
    if let Value::Object(map) = value {
        for (key, new) in change {
            if new.is_null() {
                map.remove(key);
            } else {
                merge_into(map.entry(key.clone()).or_insert(Value::Null), new);
            }
        }
    }
}

/// The cells of a Table's date columns are ages.
fn without_ages(mut body: Value) -> Value {
    let Some(columns) = body.get("columnDefinitions").and_then(Value::as_array) else {
        return body;
    };
    let dates: Vec<usize> = columns
        .iter()
        .enumerate()
        .filter(|(_, column)| {
            column["type"] == "date" || column["name"] == "Age" || column["name"] == "Last Seen"
        })
        .map(|(index, _)| index)
        .collect();
    if let Some(rows) = body.get_mut("rows").and_then(Value::as_array_mut) {
        for row in rows {
            for index in &dates {
                if let Some(cell) = row["cells"].get_mut(*index).filter(|cell| cell.is_string()) {
                    *cell = json!("<age>");
                }
            }
        }
    }
    body
}

//! Raw HTTP, so that what a server answers is seen as it is and not as a library reads it.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, bail};
use futures::StreamExt as _;
use reqwest::Method;
use serde_json::Value;

use crate::certificates::Pair;

/// Longer than any single answer takes on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Who a client is.
pub enum Credentials {
    Certificate(Pair),
    Token(String),
}

/// What one call answered.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    pub status: u16,
    /// Names in lower case.
    pub headers: BTreeMap<String, String>,
    /// JSON where it is JSON, else a string.
    pub body: Value,
}

/// One request.
#[derive(Debug, Clone)]
pub struct Request {
    pub method: Method,
    /// With the query, percent-encoded.
    pub path: String,
    pub headers: Vec<(&'static str, String)>,
    pub body: Option<String>,
}

impl Request {
    pub fn new(method: Method, path: impl Into<String>) -> Self {
        Self {
            method,
            path: path.into(),
            headers: Vec::new(),
            body: None,
        }
    }

    #[must_use]
    pub fn header(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    /// JSON, with its content type unless another is set.
    #[must_use]
    pub fn json(self, body: &Value) -> Self {
        self.body("application/json", body.to_string())
    }

    #[must_use]
    pub fn body(mut self, content_type: &'static str, body: impl Into<String>) -> Self {
        self.headers.push(("content-type", content_type.to_owned()));
        self.body = Some(body.into());
        self
    }
}

/// A client of one server.
#[derive(Debug, Clone)]
pub struct Client {
    url: String,
    token: Option<String>,
    http: reqwest::Client,
}

impl Client {
    /// # Errors
    /// When the certificates are not good.
    pub fn new(
        url: &str,
        authority: &str,
        credentials: Option<&Credentials>,
    ) -> anyhow::Result<Self> {
        let mut builder = reqwest::Client::builder()
            .no_proxy()
            .http1_only()
            .user_agent("suite/1.0")
            // A server may close a connection after a refusal, and a kept one would then fail the
            // next call.
            .pool_max_idle_per_host(0)
            .tls_certs_only([reqwest::Certificate::from_pem(authority.as_bytes())?]);
        let mut token = None;
        match credentials {
            Some(Credentials::Certificate(pair)) => {
                let pem = format!("{}{}", pair.key, pair.certificate);
                builder = builder.identity(reqwest::Identity::from_pem(pem.as_bytes())?);
            }
            Some(Credentials::Token(text)) => token = Some(text.clone()),
            None => {}
        }
        Ok(Self {
            url: url.to_owned(),
            token,
            http: builder.build()?,
        })
    }

    /// # Errors
    /// When the server does not answer.
    pub async fn get(&self, path: &str) -> anyhow::Result<Answer> {
        self.send(Request::new(Method::GET, path)).await
    }

    /// # Errors
    /// When the server does not answer.
    pub async fn post(&self, path: &str, body: &Value) -> anyhow::Result<Answer> {
        self.send(Request::new(Method::POST, path).json(body)).await
    }

    /// # Errors
    /// When the server does not answer.
    pub async fn delete(&self, path: &str) -> anyhow::Result<Answer> {
        self.send(Request::new(Method::DELETE, path)).await
    }

    /// # Errors
    /// When the server does not answer.
    pub async fn send(&self, request: Request) -> anyhow::Result<Answer> {
        let shown = format!("{} {}", request.method, request.path);
        let response = self.start(request).await?;
        let status = response.status().as_u16();
        let headers = response
            .headers()
            .iter()
            .map(|(name, value)| {
                (
                    name.as_str().to_owned(),
                    String::from_utf8_lossy(value.as_bytes()).into_owned(),
                )
            })
            .fold(
                BTreeMap::new(),
                |mut all: BTreeMap<String, String>, (name, value)| {
                    all.entry(name)
                        .and_modify(|old| {
                            old.push_str(" | ");
                            old.push_str(&value);
                        })
                        .or_insert(value);
                    all
                },
            );
        let text = tokio::time::timeout(TIMEOUT, response.text())
            .await
            .with_context(|| format!("{shown}: no end of the answer"))??;
        let body = serde_json::from_str(&text).unwrap_or(Value::String(text));
        Ok(Answer {
            status,
            headers,
            body,
        })
    }

    /// Reads a watch until `enough` says so or the server ends it; `limit` bounds it all.
    ///
    /// # Errors
    /// When the server does not answer, or `limit` passes before there is enough.
    pub async fn watch(
        &self,
        request: Request,
        limit: Duration,
        mut enough: impl FnMut(&[Value]) -> bool,
    ) -> anyhow::Result<Vec<Value>> {
        let shown = format!("{} {}", request.method, request.path);
        let mut events = Vec::new();
        let reading = async {
            let response = self.start(request).await?;
            let mut stream = response.bytes_stream();
            let mut pending = Vec::new();
            while !enough(&events) {
                let Some(chunk) = stream.next().await else {
                    return anyhow::Ok(());
                };
                pending.extend_from_slice(&chunk?);
                while let Some(end) = pending.iter().position(|byte| *byte == b'\n') {
                    let line: Vec<u8> = pending.drain(..=end).collect();
                    events.push(serde_json::from_slice(&line).with_context(|| {
                        format!("not an event: {}", String::from_utf8_lossy(&line))
                    })?);
                }
            }
            Ok(())
        };
        match tokio::time::timeout(limit, reading).await {
            Ok(done) => done.with_context(|| shown)?,
            Err(_) => bail!(
                "{shown}: only {} events within {limit:?}: {events:?}",
                events.len()
            ),
        }
        Ok(events)
    }

    async fn start(&self, request: Request) -> anyhow::Result<reqwest::Response> {
        let shown = format!("{} {}", request.method, request.path);
        let mut builder = self
            .http
            .request(request.method, format!("{}{}", self.url, request.path));
        if let Some(token) = &self.token {
            builder = builder.bearer_auth(token);
        }
        for (name, value) in request.headers {
            builder = builder.header(name, value);
        }
        if let Some(body) = request.body {
            builder = builder.body(body);
        }
        tokio::time::timeout(TIMEOUT, builder.send())
            .await
            .with_context(|| format!("{shown}: no answer within {TIMEOUT:?}"))?
            .with_context(|| shown)
    }
}

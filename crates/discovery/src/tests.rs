//! The API over real connections.

mod calls;
mod document;
mod edges;
mod sockets;
mod watching;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use egress_core::{ProxyKey, ProxyRecord};
use egress_lease::testing::{ManualTime, proxy};
use egress_lease::{LeaseStore, MemoryStore};
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::BodyExt;
use hyper_util::rt::{TokioExecutor, TokioIo};
use prometheus_client::registry::Registry;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::*;

/// No test waits for anything longer.
const PATIENCE: Duration = Duration::from_secs(20);

/// Proxies that a test puts in.
struct Fake {
    proxies: Mutex<BTreeMap<ProxyKey, Arc<ProxyRecord>>>,
    not_ready: Mutex<Option<String>>,
    changed: watch::Sender<()>,
}

impl Fake {
    fn put(&self, record: ProxyRecord) {
        let mut proxies = self.proxies.lock().unwrap();
        proxies.insert(record.key.clone(), Arc::new(record));
        self.changed.send_replace(());
    }

    fn remove(&self, name: &str) {
        let mut proxies = self.proxies.lock().unwrap();
        proxies.remove(&ProxyKey::new("default", name)).unwrap();
        self.changed.send_replace(());
    }
}

impl Directory for Fake {
    fn proxies(&self) -> Vec<Arc<ProxyRecord>> {
        self.proxies.lock().unwrap().values().cloned().collect()
    }

    fn get(&self, key: &ProxyKey) -> Option<Arc<ProxyRecord>> {
        self.proxies.lock().unwrap().get(key).cloned()
    }

    fn synced(&self) -> bool {
        self.not_ready.lock().unwrap().is_none()
    }

    fn not_ready_reason(&self) -> Option<String> {
        self.not_ready.lock().unwrap().clone()
    }

    fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }
}

/// A served API.
struct World {
    directory: Arc<Fake>,
    store: Arc<MemoryStore>,
    time: ManualTime,
    address: Option<SocketAddr>,
    registry: Registry,
    cancel: CancellationToken,
    served: Option<JoinHandle<Result<(), ServeError>>>,
}

/// A loopback port of the kernel's choice.
fn loopback() -> Config {
    Config {
        addresses: vec!["127.0.0.1:0".parse().unwrap()],
        ..Config::default()
    }
}

impl World {
    async fn start() -> Self {
        Self::with(loopback()).await
    }

    async fn with(config: Config) -> Self {
        let directory = Arc::new(Fake {
            proxies: Mutex::default(),
            not_ready: Mutex::default(),
            changed: watch::Sender::new(()),
        });
        let time = ManualTime::default();
        let lease_config = egress_lease::Config::default();
        let default_ttl = lease_config.default_ttl;
        let store = Arc::new(MemoryStore::new(lease_config, time.time()));
        let mut registry = Registry::default();
        let cancel = CancellationToken::new();
        let deps = Deps {
            directory: directory.clone(),
            leases: store.clone(),
            default_ttl,
            metrics: Metrics::register(&mut registry),
            cancel: cancel.clone(),
        };
        let router = router(&config, deps).unwrap();
        let bound = bind(&config).await.unwrap();
        let address = bound.local_addr();
        let served = Some(tokio::spawn(serve(bound, router, cancel.clone())));
        Self {
            directory,
            store,
            time,
            address,
            registry,
            cancel,
            served,
        }
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address.unwrap()).await.unwrap()
    }

    async fn send(&self, request: Request<Body>) -> Reply {
        exchange(self.connect().await, request).await
    }

    async fn get(&self, path: &str) -> Reply {
        self.send(request(Method::GET, path, None)).await
    }

    async fn post(&self, path: &str, body: &str) -> Reply {
        self.send(request(Method::POST, path, Some(body))).await
    }

    async fn delete(&self, path: &str) -> Reply {
        self.send(request(Method::DELETE, path, None)).await
    }

    /// A new lease's id.
    async fn lease(&self, body: &str) -> String {
        let reply = self.post("/v1/leases", body).await;
        assert_eq!(reply.status, 201, "{reply:?}");
        reply.json()["leaseID"].as_str().unwrap().to_owned()
    }

    fn scrape(&self) -> String {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry).unwrap();
        text
    }

    async fn stop(&mut self) {
        self.cancel.cancel();
        let served = self.served.take().unwrap();
        tokio::time::timeout(PATIENCE, served)
            .await
            .unwrap()
            .unwrap()
            .unwrap();
    }
}

fn request(method: Method, path: &str, body: Option<&str>) -> Request<Body> {
    let builder = Request::builder()
        .method(method)
        .uri(path)
        .header("host", "proxies.example");
    match body {
        Some(body) => builder
            .header("content-type", "application/json")
            .body(Body::from(body.to_owned())),
        None => builder.body(Body::empty()),
    }
    .unwrap()
}

#[derive(Debug)]
struct Reply {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
}

impl Reply {
    #[track_caller]
    fn json(&self) -> Value {
        assert_eq!(self.headers["content-type"], "application/json", "{self:?}");
        serde_json::from_slice(&self.body).unwrap()
    }

    /// Checks a refusal's whole shape.
    #[track_caller]
    fn refused(&self, status: u16, code: &str) -> Value {
        assert_eq!(self.status, status, "{self:?}");
        let json = self.json();
        assert_eq!(json["error"], code, "{json}");
        assert!(json["message"].as_str().unwrap().len() > 5, "{json}");
        json
    }
}

async fn reply(response: http::Response<hyper::body::Incoming>) -> Reply {
    let (parts, body) = response.into_parts();
    Reply {
        status: parts.status,
        headers: parts.headers,
        body: body.collect().await.unwrap().to_bytes(),
    }
}

/// One request on an HTTP/1 connection.
async fn exchange<I>(io: I, request: Request<Body>) -> Reply
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    tokio::time::timeout(PATIENCE, async {
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(io))
            .await
            .unwrap();
        tokio::spawn(connection);
        reply(sender.send_request(request).await.unwrap()).await
    })
    .await
    .unwrap()
}

/// One request on an HTTP/2 connection.
async fn exchange2<I>(io: I, request: Request<Body>) -> Reply
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    tokio::time::timeout(PATIENCE, async {
        let (mut sender, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(io))
                .await
                .unwrap();
        tokio::spawn(connection);
        reply(sender.send_request(request).await.unwrap()).await
    })
    .await
    .unwrap()
}

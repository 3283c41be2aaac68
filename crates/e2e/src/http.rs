//! One plain HTTP request on a connection of its own, over TCP or a unix socket.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};

const PATIENCE: Duration = Duration::from_secs(20);

/// Whom to ask.
#[derive(Debug, Clone)]
pub enum Endpoint {
    /// Host and port.
    Tcp(SocketAddr),
    /// A unix socket.
    Unix(PathBuf),
}

/// What came back.
#[derive(Debug)]
pub struct Answer {
    /// The status code.
    pub status: u16,
    /// The body.
    pub body: Bytes,
}

impl Answer {
    /// The body as JSON.
    ///
    /// # Errors
    /// When it is none.
    pub fn json(&self) -> anyhow::Result<serde_json::Value> {
        serde_json::from_slice(&self.body).with_context(|| format!("not JSON: {}", self.text()))
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The body as JSON, if the status is one of success.
    ///
    /// # Errors
    /// With status and body, when it is not.
    pub fn success(&self) -> anyhow::Result<serde_json::Value> {
        if !(200..300).contains(&self.status) {
            bail!("status {}: {}", self.status, self.text());
        }
        if self.body.is_empty() {
            Ok(serde_json::Value::Null)
        } else {
            self.json()
        }
    }
}

impl Endpoint {
    /// Sends one request, with a JSON body when there is one.
    ///
    /// # Errors
    /// When nobody answers.
    pub async fn request(
        &self,
        method: &str,
        path: &str,
        body: Option<&serde_json::Value>,
    ) -> anyhow::Result<Answer> {
        self.request_as(method, path, "application/json", body)
            .await
    }

    /// [`Self::request`] with another content type.
    ///
    /// # Errors
    /// When nobody answers.
    pub async fn request_as(
        &self,
        method: &str,
        path: &str,
        content_type: &str,
        body: Option<&serde_json::Value>,
    ) -> anyhow::Result<Answer> {
        let bytes = body.map(ToString::to_string).unwrap_or_default();
        let mut request = http::Request::builder()
            .method(method)
            .uri(path)
            .header("host", "localhost")
            .header("accept", "application/json");
        if body.is_some() {
            request = request.header("content-type", content_type);
        }
        let request = request.body(Full::new(Bytes::from(bytes)))?;
        let exchange = async {
            match self {
                Self::Tcp(address) => exchange(TcpStream::connect(address).await?, request).await,
                Self::Unix(path) => exchange(UnixStream::connect(path).await?, request).await,
            }
        };
        tokio::time::timeout(PATIENCE, exchange)
            .await
            .with_context(|| format!("{method} {path}: no answer within {PATIENCE:?}"))?
            .with_context(|| format!("{method} {path}"))
    }
}

async fn exchange<S>(stream: S, request: http::Request<Full<Bytes>>) -> anyhow::Result<Answer>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let exchange = async {
        let answer = sender.send_request(request).await?;
        let status = answer.status().as_u16();
        let body = answer.into_body().collect().await?.to_bytes();
        anyhow::Ok(Answer { status, body })
    };
    tokio::pin!(exchange);
    tokio::select! {
        answer = &mut exchange => answer,
        ended = connection => {
            ended?;
            exchange.await
        }
    }
}

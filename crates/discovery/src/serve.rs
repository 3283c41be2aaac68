//! Accepting connections, serving them, and ending in time.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use crate::bind::{Bound, BoundListener, ListeningSocket};
use crate::config::Limits;
use crate::sniff::{Rewound, Version, sniff};
use crate::tls::Reloading;

/// A header block of more is refused (431 by hyper).
const MAX_HEADER: u32 = 16 * 1024;

/// A client that acknowledges nothing for so long is gone.
const GONE: Duration = Duration::from_secs(30);

/// After an accept failed for want of something (descriptors, memory).
const AFTER_FAILURE: Duration = Duration::from_millis(100);

/// A part of the server ended that never should.
#[derive(Debug, thiserror::Error)]
#[error("a listener of the discovery API has ended: {0}")]
pub struct ServeError(#[source] tokio::task::JoinError);

/// Serves until `cancel`; then accepts nothing more, lets requests that are being answered finish
/// within the drain time, and returns.
///
/// # Errors
/// When a listener's task panicked.
pub async fn serve(
    bound: Bound,
    router: Router,
    cancel: CancellationToken,
) -> Result<(), ServeError> {
    let Bound { listeners, limits } = bound;
    let server = Arc::new(Server {
        router,
        connections: Arc::new(Semaphore::new(limits.max_connections)),
        limits,
        cancel: cancel.clone(),
    });
    let mut tasks = JoinSet::new();
    for listener in listeners {
        tracing::info!(address = %listener, "the discovery API is served");
        tasks.spawn(listen(listener, Arc::clone(&server)));
    }
    while let Some(ended) = tasks.join_next().await {
        if let Err(error) = ended {
            // The others end cleanly first.
            cancel.cancel();
            while tasks.join_next().await.is_some() {}
            return Err(ServeError(error));
        }
    }
    Ok(())
}

struct Server {
    router: Router,
    limits: Limits,
    connections: Arc<Semaphore>,
    cancel: CancellationToken,
}

enum Accepted {
    Tcp(TcpStream),
    Unix(UnixStream),
}

async fn accept(socket: &ListeningSocket) -> io::Result<Accepted> {
    match socket {
        ListeningSocket::Tcp(listener) => Ok(Accepted::Tcp(listener.accept().await?.0)),
        ListeningSocket::Unix(listener) => Ok(Accepted::Unix(listener.accept().await?.0)),
    }
}

async fn listen(listener: BoundListener, server: Arc<Server>) {
    let mut connections = JoinSet::new();
    let mut failing = false;
    loop {
        let next = async {
            // Before the accept: who is over the limit waits in the backlog.
            let permit = Arc::clone(&server.connections).acquire_owned().await;
            (accept(&listener.socket).await, permit)
        };
        let (accepted, permit) = tokio::select! {
            () = server.cancel.cancelled() => break,
            next = next => next,
            // Frees what ended ones hold.
            Some(ended) = connections.join_next() => {
                if let Err(error) = ended {
                    tracing::error!(%error, "a connection's task has panicked");
                }
                continue;
            }
        };
        match accepted {
            Ok(stream) => {
                failing = false;
                let server = Arc::clone(&server);
                let tls = listener.tls.clone();
                connections.spawn(async move {
                    let _permit = permit;
                    if let Err(error) = server.connection(stream, tls).await {
                        tracing::debug!(%error, "a connection failed");
                    }
                });
            }
            Err(error) if is_of_connection(&error) => {}
            Err(error) => {
                if !failing {
                    tracing::warn!(%error, address = %listener, "cannot accept connections");
                }
                failing = true;
                tokio::time::sleep(AFTER_FAILURE).await;
            }
        }
    }
    // Nobody may think that we still listen.
    drop(listener);
    let all = async { while connections.join_next().await.is_some() {} };
    if timeout(server.limits.drain, all).await.is_err() {
        tracing::warn!(
            open = connections.len(),
            "requests took too long to finish: their connections are cut"
        );
    }
    connections.shutdown().await;
}

/// The client was gone before it was accepted (accept(2)).
fn is_of_connection(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionRefused
            | io::ErrorKind::Interrupted
    )
}

#[derive(Debug, thiserror::Error)]
enum ConnectionError {
    #[error("no request came in time")]
    Silent,
    #[error("TLS: {0}")]
    Tls(#[source] io::Error),
    #[error("reading: {0}")]
    Read(#[source] io::Error),
    #[error(transparent)]
    Http(#[from] hyper::Error),
}

impl Server {
    async fn connection(
        &self,
        stream: Accepted,
        tls: Option<Arc<Reloading>>,
    ) -> Result<(), ConnectionError> {
        let stream = match stream {
            Accepted::Unix(stream) => return self.plain(stream).await,
            Accepted::Tcp(stream) => stream,
        };
        // Neither is worth refusing a client for.
        let _ = stream.set_nodelay(true);
        let _ = socket2::SockRef::from(&stream).set_tcp_user_timeout(Some(GONE));
        let Some(tls) = tls else {
            return self.plain(stream).await;
        };
        let handshake = TlsAcceptor::from(tls.current()).accept(stream);
        let stream = self
            .in_time(handshake)
            .await?
            .map_err(ConnectionError::Tls)?;
        match stream.get_ref().1.alpn_protocol() {
            Some(b"h2") => self.http2(Rewound::new(stream)).await,
            Some(_) => self.http1(Rewound::new(stream)).await,
            None => self.plain(stream).await,
        }
    }

    /// What a client must have done within the header timeout; a stop ends the wait.
    async fn in_time<T>(&self, step: impl Future<Output = T>) -> Result<T, ConnectionError> {
        tokio::select! {
            step = timeout(self.limits.header_timeout, step) => {
                step.map_err(|_| ConnectionError::Silent)
            }
            () = self.cancel.cancelled() => Err(ConnectionError::Silent),
        }
    }

    async fn plain<I>(&self, io: I) -> Result<(), ConnectionError>
    where
        I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        match self.in_time(sniff(io)).await? {
            Ok(Some((Version::Http1, io))) => self.http1(io).await,
            Ok(Some((Version::Http2, io))) => self.http2(io).await,
            Ok(None) => Ok(()),
            Err(error) => Err(ConnectionError::Read(error)),
        }
    }

    async fn http1<I>(&self, io: Rewound<I>) -> Result<(), ConnectionError>
    where
        I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let service = TowerToHyperService::new(self.router.clone());
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(self.limits.header_timeout)
            .max_header_size(MAX_HEADER as usize)
            .serve_connection(TokioIo::new(io), service);
        tokio::pin!(connection);
        tokio::select! {
            ended = connection.as_mut() => return Ok(ended?),
            () = self.cancel.cancelled() => connection.as_mut().graceful_shutdown(),
        }
        Ok(connection.await?)
    }

    async fn http2<I>(&self, io: Rewound<I>) -> Result<(), ConnectionError>
    where
        I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let service = TowerToHyperService::new(self.router.clone());
        let connection = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .max_concurrent_streams(self.limits.max_streams)
            .max_header_list_size(MAX_HEADER)
            // Pings; an idle HTTP/2 connection costs little, a dead one is noticed.
            .keep_alive_interval(GONE)
            .keep_alive_timeout(GONE)
            .serve_connection(TokioIo::new(io), service);
        tokio::pin!(connection);
        tokio::select! {
            ended = connection.as_mut() => return Ok(ended?),
            () = self.cancel.cancelled() => connection.as_mut().graceful_shutdown(),
        }
        Ok(connection.await?)
    }
}

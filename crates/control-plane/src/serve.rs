//! Listeners: TLS with authentication, and a unix socket.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use http::Request;
use http::header::AUTHORIZATION;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use rustls::RootCertStore;
use rustls::server::WebPkiClientVerifier;
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use subtle::ConstantTimeEq;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use crate::error::ApiError;
use crate::pki::{Pki, PkiError};
use crate::server::Server;

const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
const HEADER_TIMEOUT: Duration = Duration::from_secs(15);
/// How long open connections may finish when the server is cancelled.
const DRAIN: Duration = Duration::from_secs(2);
/// Pause when accepting fails, as when there are no file descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
const MAX_CONNECTIONS: usize = 1024;

/// Why serving ended.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error(transparent)]
    Pki(#[from] PkiError),
    #[error("the TLS server cannot be set up: {0}")]
    Tls(#[from] rustls::Error),
    #[error("the CA's certificate is not usable for clients: {0}")]
    Verifier(#[from] rustls::server::VerifierBuilderError),
    #[error("the listener's address is unknown")]
    Address(#[source] std::io::Error),
}

/// A bearer token that is let in. `Debug` hides it.
#[derive(Clone)]
pub struct Token {
    user: String,
    token: String,
}

impl Token {
    pub fn new(user: impl Into<String>, token: impl Into<String>) -> Self {
        Self {
            user: user.into(),
            token: token.into(),
        }
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Token")
            .field("user", &self.user)
            .finish_non_exhaustive()
    }
}

/// Whether a connection or a request is let in.
#[derive(Clone)]
enum Admittance {
    /// By a client certificate, or because the socket is ours alone.
    Everything,
    ByToken(Arc<[Token]>),
}

impl Admittance {
    fn admits(&self, request: &Request<Incoming>) -> bool {
        let Self::ByToken(tokens) = self else {
            return true;
        };
        let Some(given) = request
            .headers()
            .get(AUTHORIZATION)
            .and_then(|v| v.to_str().ok())
            .and_then(|v| v.strip_prefix("Bearer "))
        else {
            return false;
        };
        // All are compared, so that the time tells nothing.
        tokens.iter().fold(false, |found, token| {
            found | bool::from(token.token.as_bytes().ct_eq(given.as_bytes()))
        })
    }
}

pub(crate) async fn tls(
    server: &Server,
    pki: &Pki,
    names: &[String],
    tokens: Vec<Token>,
    listener: TcpListener,
    cancel: CancellationToken,
) -> Result<(), ServeError> {
    let address = listener.local_addr().map_err(ServeError::Address)?.ip();
    let names = server_names(address, names);
    let tokens: Arc<[Token]> = tokens.into();
    let (mut acceptor, mut renew_at) = acceptor(pki, &names, server)?;
    let mut connections = JoinSet::new();
    loop {
        let stream = tokio::select! {
            () = cancel.cancelled() => break,
            Some(_) = connections.join_next() => continue,
            accepted = listener.accept(), if connections.len() < MAX_CONNECTIONS => accepted,
        };
        let stream = match stream {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!("the control plane could not accept a connection: {error}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        if server.now() >= renew_at {
            (acceptor, renew_at) = self::acceptor(pki, &names, server)?;
        }
        // Watches are many small writes.
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!("TCP_NODELAY could not be set: {error}");
        }
        let (acceptor, server, tokens, cancel) = (
            acceptor.clone(),
            server.clone(),
            Arc::clone(&tokens),
            cancel.clone(),
        );
        connections.spawn(async move {
            let handshake = tokio::time::timeout(HANDSHAKE_TIMEOUT, acceptor.accept(stream));
            match handshake.await {
                Ok(Ok(stream)) => {
                    let known = stream.get_ref().1.peer_certificates().is_some();
                    let admittance = if known {
                        Admittance::Everything
                    } else {
                        Admittance::ByToken(tokens)
                    };
                    connection(server, stream, admittance, cancel).await;
                }
                Ok(Err(error)) => tracing::debug!("a TLS handshake failed: {error}"),
                Err(_) => tracing::debug!("a TLS handshake took too long"),
            }
        });
    }
    drain(connections).await;
    Ok(())
}

pub(crate) async fn unix(
    server: &Server,
    listener: UnixListener,
    cancel: CancellationToken,
) -> Result<(), ServeError> {
    let mut connections = JoinSet::new();
    loop {
        let stream = tokio::select! {
            () = cancel.cancelled() => break,
            Some(_) = connections.join_next() => continue,
            accepted = listener.accept(), if connections.len() < MAX_CONNECTIONS => accepted,
        };
        match stream {
            Ok((stream, _)) => {
                let (server, cancel) = (server.clone(), cancel.clone());
                connections.spawn(connection(server, stream, Admittance::Everything, cancel));
            }
            Err(error) => {
                tracing::warn!("the control plane could not accept a connection: {error}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    drain(connections).await;
    Ok(())
}

async fn drain(mut connections: JoinSet<()>) {
    let all = async { while connections.join_next().await.is_some() {} };
    // Watches may go on for ever: what is left is cut.
    let _ = tokio::time::timeout(DRAIN, all).await;
}

async fn connection(
    server: Server,
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    admittance: Admittance,
    cancel: CancellationToken,
) {
    let service = service_fn(move |request: Request<Incoming>| {
        let (server, admittance) = (server.clone(), admittance.clone());
        async move {
            let response: Response = if admittance.admits(&request) {
                crate::handlers::handle(&server, request.map(Body::new)).await
            } else {
                ApiError::unauthorized().into_response()
            };
            Ok::<_, std::convert::Infallible>(response)
        }
    });
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT);
    builder.http2().timer(TokioTimer::new());
    let connection = builder.serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    let result = tokio::select! {
        result = connection.as_mut() => result,
        () = cancel.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = result {
        tracing::debug!("a connection to the control plane ended: {error}");
    }
}

/// What the certificate must answer to.
fn server_names(address: IpAddr, configured: &[String]) -> Vec<String> {
    let mut names = vec![
        "localhost".to_owned(),
        "127.0.0.1".to_owned(),
        "::1".to_owned(),
    ];
    if !address.is_unspecified() {
        names.push(address.to_string());
    }
    names.extend(configured.iter().cloned());
    names.sort();
    names.dedup();
    names
}

fn acceptor(
    pki: &Pki,
    names: &[String],
    server: &Server,
) -> Result<(TlsAcceptor, jiff::Timestamp), ServeError> {
    let identity = pki.server_identity(names, server.now())?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(pki.ca_certificate().as_bytes()) {
        roots.add(certificate.map_err(PkiError::Key)?)?;
    }
    let verifier =
        WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider))
            .allow_unauthenticated()
            .build()?;
    let mut config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_client_cert_verifier(verifier)
        .with_single_cert(identity.chain, identity.key)?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok((TlsAcceptor::from(Arc::new(config)), identity.renew_at))
}

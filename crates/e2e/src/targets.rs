//! What proxies lead to: a TLS server with a certificate of a throwaway authority, and a client
//! that goes through a proxy with CONNECT.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// For one request through a proxy.
const PATIENCE: Duration = Duration::from_secs(20);

/// A TLS server that answers every request with one status; it ends when dropped.
#[derive(Debug)]
pub struct TlsTarget {
    address: SocketAddr,
    authority: CertificateDer<'static>,
    authority_file: PathBuf,
    hits: Arc<AtomicUsize>,
    _serving: JoinSet<()>,
}

impl TlsTarget {
    /// Listens on `ip` at a free port, with a certificate for `names` (names or addresses) of an
    /// authority whose certificate is written into `dir`.
    ///
    /// # Errors
    /// When it cannot listen or make certificates.
    pub async fn start(
        ip: IpAddr,
        names: &[&str],
        status: u16,
        dir: &Path,
    ) -> anyhow::Result<Self> {
        let authority_key = rcgen::KeyPair::generate()?;
        let mut parameters = rcgen::CertificateParams::new(Vec::new())?;
        parameters.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        parameters.key_usages = vec![
            rcgen::KeyUsagePurpose::KeyCertSign,
            rcgen::KeyUsagePurpose::CrlSign,
        ];
        parameters
            .distinguished_name
            .push(rcgen::DnType::CommonName, "lab authority");
        let authority = parameters.self_signed(&authority_key)?;
        let issuer = rcgen::Issuer::new(parameters, authority_key);
        let key = rcgen::KeyPair::generate()?;
        let names: Vec<String> = names.iter().map(ToString::to_string).collect();
        let certificate = rcgen::CertificateParams::new(names)?.signed_by(&key, &issuer)?;

        let authority_file = dir.join("authority.pem");
        std::fs::write(&authority_file, authority.pem())?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(
                vec![certificate.der().clone()],
                PrivateKeyDer::Pkcs8(key.serialize_der().into()),
            )?;
        let listener = TcpListener::bind((ip, 0)).await?;
        let address = listener.local_addr()?;
        let hits = Arc::new(AtomicUsize::new(0));
        let mut serving = JoinSet::new();
        serving.spawn(accept(
            listener,
            TlsAcceptor::from(Arc::new(config)),
            status,
            Arc::clone(&hits),
        ));
        Ok(Self {
            address,
            authority: authority.der().clone(),
            authority_file,
            hits,
            _serving: serving,
        })
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// Whom clients have to trust, as a PEM file.
    pub fn authority_file(&self) -> &Path {
        &self.authority_file
    }

    /// Requests answered so far.
    pub fn hits(&self) -> usize {
        self.hits.load(Ordering::SeqCst)
    }

    /// GETs `path` of `name` through the proxy and gives the status.
    ///
    /// # Errors
    /// When the proxy refuses, TLS fails or the answer is none.
    pub async fn get_through(
        &self,
        proxy: SocketAddr,
        name: &str,
        path: &str,
    ) -> anyhow::Result<u16> {
        let authority = self.authority.clone();
        let port = self.port();
        let attempt = async {
            let stream = connect_through(proxy, &format!("{name}:{port}")).await?;
            let mut roots = rustls::RootCertStore::empty();
            roots.add(authority)?;
            let provider = Arc::new(rustls::crypto::ring::default_provider());
            let config = rustls::ClientConfig::builder_with_provider(provider)
                .with_safe_default_protocol_versions()?
                .with_root_certificates(roots)
                .with_no_client_auth();
            let server = ServerName::try_from(name.to_owned())?;
            let tls = TlsConnector::from(Arc::new(config))
                .connect(server, stream)
                .await?;
            let mut tls = BufReader::new(tls);
            let request =
                format!("GET {path} HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\n\r\n");
            tls.write_all(request.as_bytes()).await?;
            status_line(&mut tls).await
        };
        tokio::time::timeout(PATIENCE, attempt)
            .await
            .with_context(|| format!("no answer through {proxy} within {PATIENCE:?}"))?
    }
}

/// Opens a tunnel through an HTTP proxy.
///
/// # Errors
/// When the proxy cannot be reached or does not answer 200.
pub async fn connect_through(proxy: SocketAddr, target: &str) -> anyhow::Result<TcpStream> {
    let mut stream = TcpStream::connect(proxy)
        .await
        .with_context(|| format!("dialling {proxy}"))?;
    stream
        .write_all(format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n").as_bytes())
        .await?;
    // Byte by byte: what comes after the head belongs to the tunnel.
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        ensure!(
            head.len() < 16 * 1024,
            "{proxy} answers CONNECT without end"
        );
        head.push(
            stream
                .read_u8()
                .await
                .context("the proxy closed the connection")?,
        );
    }
    let head = String::from_utf8_lossy(&head);
    match head.split_whitespace().nth(1) {
        Some("200") => Ok(stream),
        _ => bail!(
            "CONNECT {target} through {proxy}: {}",
            head.lines().next().unwrap_or("")
        ),
    }
}

async fn status_line(from: &mut (impl tokio::io::AsyncBufRead + Unpin)) -> anyhow::Result<u16> {
    let mut line = String::new();
    from.read_line(&mut line).await?;
    line.split_whitespace()
        .nth(1)
        .and_then(|status| status.parse().ok())
        .with_context(|| format!("no status line: {line:?}"))
}

async fn accept(listener: TcpListener, tls: TlsAcceptor, status: u16, hits: Arc<AtomicUsize>) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let (tls, hits) = (tls.clone(), Arc::clone(&hits));
        connections.spawn(async move {
            // A client that does not trust us, or goes away, is none of our faults.
            let _ = tokio::time::timeout(PATIENCE, answer(stream, tls, status, &hits)).await;
        });
        while connections.try_join_next().is_some() {}
    }
}

async fn answer(
    stream: TcpStream,
    tls: TlsAcceptor,
    status: u16,
    hits: &AtomicUsize,
) -> anyhow::Result<()> {
    let mut stream = BufReader::new(tls.accept(stream).await?);
    let mut line = String::new();
    while stream.read_line(&mut line).await? > 2 {
        line.clear();
    }
    hits.fetch_add(1, Ordering::SeqCst);
    let answer = format!("HTTP/1.1 {status} Answer\r\nConnection: close\r\n\r\n");
    stream.write_all(answer.as_bytes()).await?;
    stream.shutdown().await?;
    Ok(())
}

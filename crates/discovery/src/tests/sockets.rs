//! HTTP/2, TLS, unix and inherited sockets, and addresses that cannot be had.

use std::os::fd::OwnedFd;
use std::path::Path;

use rustls::pki_types::{CertificateDer, ServerName};
use tempfile::TempDir;
use tokio::net::UnixStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::*;

#[tokio::test]
async fn http2_with_prior_knowledge() {
    let world = World::start().await;
    world.directory.put(proxy("p1", 3));
    let uri = "http://proxies.example/v1/leases";
    let reply = exchange2(
        world.connect().await,
        request(Method::POST, uri, Some("{}")),
    )
    .await;
    assert_eq!(reply.status, 201, "{reply:?}");
    let uri = "http://proxies.example/nowhere";
    let reply = exchange2(world.connect().await, request(Method::GET, uri, None)).await;
    reply.refused(404, "not_found");
}

/// Writes a new self-signed pair.
fn issue(directory: &Path) -> (TlsFiles, CertificateDer<'static>) {
    let made = rcgen::generate_simple_self_signed(vec!["proxies.example".to_owned()]).unwrap();
    let files = TlsFiles {
        certificate: directory.join("tls.crt"),
        key: directory.join("tls.key"),
    };
    std::fs::write(&files.certificate, made.cert.pem()).unwrap();
    std::fs::write(&files.key, made.signing_key.serialize_pem()).unwrap();
    (files, made.cert.der().clone())
}

async fn connect_tls(
    world: &World,
    trusted: &CertificateDer<'static>,
    alpn: &[&[u8]],
) -> std::io::Result<TlsStream<TcpStream>> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(trusted.clone()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    let name = ServerName::try_from("proxies.example").unwrap();
    TlsConnector::from(Arc::new(config))
        .connect(name, world.connect().await)
        .await
}

#[tokio::test]
async fn tls_with_and_without_alpn() {
    let directory = TempDir::new().unwrap();
    let (files, certificate) = issue(directory.path());
    let world = World::with(Config {
        tls: Some(files),
        ..loopback()
    })
    .await;
    for (alpn, agreed) in [
        (&[b"h2".as_slice(), b"http/1.1"][..], Some(b"h2".as_slice())),
        (&[b"http/1.1".as_slice()][..], Some(b"http/1.1".as_slice())),
        (&[][..], None),
    ] {
        let io = connect_tls(&world, &certificate, alpn).await.unwrap();
        assert_eq!(io.get_ref().1.alpn_protocol(), agreed);
        let get = request(Method::GET, "https://proxies.example/healthz", None);
        let reply = if agreed == Some(b"h2") {
            exchange2(io, get).await
        } else {
            exchange(io, get).await
        };
        assert_eq!(reply.body, "ok");
    }
    // Plain HTTP gets no HTTP.
    let mut plain = world.connect().await;
    tokio::io::AsyncWriteExt::write_all(&mut plain, b"GET / HTTP/1.1\r\n\r\n")
        .await
        .unwrap();
    let mut answer = Vec::new();
    let _ = tokio::io::AsyncReadExt::read_to_end(&mut plain, &mut answer).await;
    assert!(!answer.starts_with(b"HTTP"), "{answer:?}");
}

#[tokio::test]
async fn a_certificate_may_be_replaced_and_a_bad_one_is_not_taken() {
    let directory = TempDir::new().unwrap();
    let (files, old) = issue(directory.path());
    let world = World::with(Config {
        tls: Some(files.clone()),
        ..loopback()
    })
    .await;
    connect_tls(&world, &old, &[]).await.unwrap();
    let (_, new) = issue(directory.path());
    connect_tls(&world, &old, &[]).await.unwrap_err();
    connect_tls(&world, &new, &[]).await.unwrap();
    // A certificate without its key yet.
    let elsewhere = TempDir::new().unwrap();
    let (other, _) = issue(elsewhere.path());
    std::fs::copy(&other.certificate, &files.certificate).unwrap();
    connect_tls(&world, &new, &[]).await.unwrap();
    std::fs::remove_file(&files.key).unwrap();
    connect_tls(&world, &new, &[]).await.unwrap();
}

#[tokio::test]
async fn tls_files_that_cannot_be_used_are_told_before_anything_listens() {
    let directory = TempDir::new().unwrap();
    let (files, _) = issue(directory.path());
    let elsewhere = TempDir::new().unwrap();
    let (other, _) = issue(elsewhere.path());
    let empty = directory.path().join("empty");
    std::fs::write(&empty, "").unwrap();
    for (certificate, key, word) in [
        (
            directory.path().join("missing"),
            files.key.clone(),
            "missing",
        ),
        (files.certificate.clone(), empty.clone(), "private key"),
        (empty, files.key.clone(), "no certificate"),
        (files.certificate.clone(), other.key, "cannot be used"),
    ] {
        let error = bind(&Config {
            tls: Some(TlsFiles { certificate, key }),
            ..loopback()
        })
        .await
        .unwrap_err();
        assert!(error.to_string().contains(word), "{error}");
    }
}

#[tokio::test]
async fn a_unix_socket_serves_and_goes_away() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("api.sock");
    // What a killed predecessor left.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let config = Config {
        addresses: vec![Listen::Unix(path.clone()), "127.0.0.1:0".parse().unwrap()],
        ..Config::default()
    };
    let mut world = World::with(config.clone()).await;
    let io = UnixStream::connect(&path).await.unwrap();
    let reply = exchange(io, request(Method::GET, "/healthz", None)).await;
    assert_eq!(reply.body, "ok");
    // The other address serves the same.
    assert_eq!(world.get("/healthz").await.body, "ok");
    let mode =
        std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&path).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o660);

    let error = bind(&config).await.unwrap_err();
    assert!(matches!(error, BindError::SocketInUse { .. }), "{error}");
    world.stop().await;
    assert!(!path.exists());
    std::fs::write(&path, "no socket").unwrap();
    let error = bind(&config).await.unwrap_err();
    assert!(matches!(error, BindError::NotASocket { .. }), "{error}");
    assert!(path.exists());
}

#[tokio::test]
async fn inherited_sockets_serve() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("api.sock");
    let unix = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let tcp = std::net::TcpListener::bind("[::1]:0").unwrap();
    let inherit = |fd: OwnedFd| Listen::Inherited(Arc::new(fd));
    let mut world = World::with(Config {
        addresses: vec![inherit(unix.into()), inherit(tcp.into())],
        ..Config::default()
    })
    .await;
    assert!(world.address.unwrap().is_ipv6());
    assert_eq!(world.get("/healthz").await.body, "ok");
    let io = UnixStream::connect(&path).await.unwrap();
    let reply = exchange(io, request(Method::GET, "/healthz", None)).await;
    assert_eq!(reply.body, "ok");
    world.stop().await;
    assert!(path.exists(), "not ours to remove");

    let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    let error = bind(&Config {
        addresses: vec![inherit(one.into())],
        ..Config::default()
    })
    .await
    .unwrap_err();
    assert!(matches!(error, BindError::Inherited(_)), "{error}");
}

#[tokio::test]
async fn a_taken_port_is_told_and_nothing_else_is_left_bound() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("api.sock");
    let error = bind(&Config {
        addresses: vec![
            Listen::Unix(path.clone()),
            format!("127.0.0.1:{port}").parse().unwrap(),
        ],
        ..Config::default()
    })
    .await
    .unwrap_err();
    let text = error.to_string();
    assert!(
        text.starts_with(&format!("port {port} is already in use")),
        "{text}"
    );
    assert!(text.contains("--discovery-addr"), "{text}");
    assert!(!path.exists(), "half-started");
    let error = bind(&Config {
        addresses: Vec::new(),
        ..Config::default()
    })
    .await
    .unwrap_err();
    assert!(matches!(error, BindError::NoAddress), "{error}");
}

#[tokio::test]
async fn a_bare_port_serves_both_families() {
    let bound = bind(&Config {
        addresses: vec![Listen::Port(0)],
        ..Config::default()
    })
    .await
    .unwrap();
    let port = bound.local_addr().unwrap().port();
    TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    if bound.local_addr().unwrap().is_ipv6() {
        TcpStream::connect(("::1", port)).await.unwrap();
    }
}

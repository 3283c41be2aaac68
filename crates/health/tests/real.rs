//! The real prober through real proxies, all on loopback.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that fails by a panic"
)]

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use egress_forward_proxy::{Config as ProxyConfig, Net};
use egress_health::roots::client_config;
use egress_health::{HttpProbe, Outcome, Probe, ProbeClass, ProbeRequest};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

struct Authority {
    root: CertificateDer<'static>,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let root = params.self_signed(&key).unwrap().der().clone();
        Self {
            root,
            issuer: Issuer::new(params, key),
        }
    }

    fn acceptor(&self, names: &[&str]) -> TlsAcceptor {
        let names: Vec<String> = names.iter().map(ToString::to_string).collect();
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::new(names)
            .unwrap()
            .signed_by(&key, &self.issuer)
            .unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(
                vec![certificate.der().clone()],
                PrivateKeyDer::try_from(key.serialize_der()).unwrap(),
            )
            .unwrap();
        TlsAcceptor::from(Arc::new(config))
    }

    fn probe(&self) -> HttpProbe {
        HttpProbe::new(client_config(std::slice::from_ref(&self.root)).unwrap())
    }
}

async fn read_head<S: AsyncReadExt + Unpin>(stream: &mut S) -> io::Result<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await?);
    }
    Ok(String::from_utf8_lossy(&head).into_owned())
}

/// A TLS target that answers each connection with the same bytes and tells what it was asked.
async fn tls_target(
    at: &str,
    acceptor: TlsAcceptor,
    answer: &'static str,
) -> (SocketAddr, mpsc::UnboundedReceiver<String>) {
    let listener = TcpListener::bind(at).await.unwrap();
    let address = listener.local_addr().unwrap();
    let (seen, heads) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (acceptor, seen) = (acceptor.clone(), seen.clone());
            tokio::spawn(async move {
                let mut stream = acceptor.accept(stream).await?;
                let _ = seen.send(read_head(&mut stream).await?);
                stream.write_all(answer.as_bytes()).await?;
                stream.shutdown().await
            });
        }
    });
    (address, heads)
}

/// A server that reads a head and answers with these bytes, for targets and for bad proxies.
async fn canned(at: &str, answer: &[u8]) -> (SocketAddr, mpsc::UnboundedReceiver<String>) {
    let listener = TcpListener::bind(at).await.unwrap();
    let address = listener.local_addr().unwrap();
    let (seen, heads) = mpsc::unbounded_channel();
    let answer = answer.to_vec();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let (answer, seen) = (answer.clone(), seen.clone());
            tokio::spawn(async move {
                let _ = seen.send(read_head(&mut stream).await?);
                stream.write_all(&answer).await?;
                // Held open until the prober leaves, so that nothing ends by a closed connection.
                let _ = stream.read_to_end(&mut Vec::new()).await;
                io::Result::Ok(())
            });
        }
    });
    (address, heads)
}

async fn proxy(at: &str, change: impl FnOnce(&mut ProxyConfig)) -> SocketAddr {
    let mut config = ProxyConfig::new(at.parse().unwrap());
    config.allow_targets = Net::loopback();
    change(&mut config);
    let listeners = egress_forward_proxy::bind(&config).unwrap();
    let address = listeners[0].local_addr().unwrap();
    let never = CancellationToken::new();
    tokio::spawn(egress_forward_proxy::run(config, listeners, never));
    address
}

fn request(proxy: SocketAddr, url: &str) -> ProbeRequest {
    ProbeRequest {
        host: proxy.ip().to_string(),
        port: proxy.port(),
        url: url.parse().unwrap(),
        expected_status: 204,
        dial_timeout: Duration::from_secs(20),
        timeout: Duration::from_secs(20),
    }
}

/// A port on which nothing listens and that nobody else can take while the socket lives.
fn closed_port(at: &str) -> (SocketAddr, tokio::net::TcpSocket) {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind(at.parse().unwrap()).unwrap();
    (socket.local_addr().unwrap(), socket)
}

#[track_caller]
fn assert_failed(outcome: &Outcome, class: ProbeClass, says: &str) {
    assert_eq!(outcome.class, class, "{outcome:?}");
    assert!(
        outcome.detail.contains(says),
        "{outcome:?} does not say {says:?}"
    );
    assert_eq!(outcome.latency, None);
}

#[tokio::test]
async fn https_goes_through_the_tunnel_and_names_nobody() {
    let authority = Authority::new();
    let proxy_v4 = proxy("127.0.0.1:0", |_| {}).await;
    let proxy_v6 = proxy("[::1]:0", |_| {}).await;
    for (at, host, proxy) in [
        ("127.0.0.1:0", "127.0.0.1", proxy_v4),
        ("[::1]:0", "[::1]", proxy_v4),
        ("127.0.0.1:0", "localhost", proxy_v6),
    ] {
        let names = ["127.0.0.1", "::1", "localhost"];
        let (target, mut heads) = tls_target(
            at,
            authority.acceptor(&names),
            "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n",
        )
        .await;
        let url = format!("https://{host}:{}/generate?x=1#part", target.port());
        let outcome = authority.probe().probe(request(proxy, &url)).await;
        assert_eq!(outcome.class, ProbeClass::Success, "{outcome:?}");
        assert!(outcome.latency.is_some());
        assert_eq!(
            heads.recv().await.unwrap(),
            format!(
                "GET /generate?x=1 HTTP/1.1\r\nHost: {host}:{}\r\nAccept: */*\r\nConnection: close\r\n\r\n",
                target.port()
            )
        );
    }
}

#[tokio::test]
async fn the_target_sees_the_proxys_source_address() {
    // The proof that it went through: the proxy alone leaves from 127.0.0.7.
    let proxy = proxy("127.0.0.1:0", |config| {
        config.bind_addresses = vec![IpAddr::from([127, 0, 0, 7])];
    })
    .await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let target = tokio::spawn(async move {
        let (mut stream, peer) = listener.accept().await.unwrap();
        let head = read_head(&mut stream).await.unwrap();
        stream.write_all(b"HTTP/1.1 204 x\r\n\r\n").await.unwrap();
        (peer.ip(), head)
    });
    let outcome = Authority::new().probe().probe(request(proxy, &url)).await;
    assert_eq!(outcome.class, ProbeClass::Success, "{outcome:?}");
    let (peer, head) = target.await.unwrap();
    assert_eq!(peer, IpAddr::from([127, 0, 0, 7]));
    assert!(head.starts_with("GET / HTTP/1.1\r\n"), "{head}");
}

#[tokio::test]
async fn http_asks_with_an_absolute_uri() {
    let (proxy, mut heads) = canned("127.0.0.1:0", b"HTTP/1.1 204 x\r\n\r\n").await;
    for (url, line, host) in [
        ("http://a.example/x?y", "http://a.example/x?y", "a.example"),
        (
            "http://A.example:8080",
            "http://a.example:8080/",
            "a.example:8080",
        ),
        (
            "http://[2001:db8::1]:81/",
            "http://[2001:db8::1]:81/",
            "[2001:db8::1]:81",
        ),
        (
            "http://u:secret@a.example/",
            "http://a.example/",
            "a.example",
        ),
    ] {
        let outcome = Authority::new().probe().probe(request(proxy, url)).await;
        assert_eq!(outcome.class, ProbeClass::Success, "{outcome:?}");
        assert_eq!(
            heads.recv().await.unwrap(),
            format!(
                "GET {line} HTTP/1.1\r\nHost: {host}\r\nAccept: */*\r\nConnection: close\r\n\r\n"
            )
        );
    }
}

#[tokio::test]
async fn connect_names_the_target_with_port_and_one_pair_of_brackets() {
    let (proxy, mut heads) = canned("127.0.0.1:0", b"HTTP/1.1 502 x\r\n\r\n").await;
    for (url, authority) in [
        ("https://a.example/x", "a.example:443"),
        ("https://a.example:444/x", "a.example:444"),
        ("https://[2001:db8::1]/", "[2001:db8::1]:443"),
    ] {
        Authority::new().probe().probe(request(proxy, url)).await;
        assert_eq!(
            heads.recv().await.unwrap(),
            format!("CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n")
        );
    }
}

#[tokio::test]
async fn a_proxy_that_is_not_there_is_a_dial_failure() {
    let probe = Authority::new().probe();
    let (closed, _held) = closed_port("127.0.0.1:0");
    let outcome = probe.probe(request(closed, "https://a.example/")).await;
    assert_failed(&outcome, ProbeClass::Dial, "onnection refused");
    let named = ProbeRequest {
        host: "no-such-name.invalid".into(),
        ..request(closed, "https://a.example/")
    };
    let outcome = probe.probe(named).await;
    assert!(
        matches!(outcome.class, ProbeClass::Dial | ProbeClass::Timeout),
        "{outcome:?}"
    );
}

#[tokio::test]
async fn a_proxy_that_cannot_get_out_is_unhealthy_and_its_status_is_kept() {
    let probe = Authority::new().probe();
    let (closed, _held) = closed_port("127.0.0.1:0");
    let cannot = proxy("127.0.0.1:0", |_| {}).await;
    let outcome = probe
        .probe(request(cannot, &format!("https://{closed}/")))
        .await;
    assert_failed(&outcome, ProbeClass::ConnectRefused, "502");
    let outcome = probe
        .probe(request(cannot, &format!("http://{closed}/")))
        .await;
    assert_failed(&outcome, ProbeClass::UnexpectedStatus, "502, expected 204");
    let denies = proxy("127.0.0.1:0", |config| config.allow_targets.clear()).await;
    let outcome = probe
        .probe(request(denies, &format!("https://{closed}/")))
        .await;
    assert_failed(&outcome, ProbeClass::ConnectRefused, "403");
}

#[tokio::test]
async fn credentials_that_a_proxy_wants_are_a_class_of_their_own() {
    let answer = b"HTTP/1.1 407 Proxy Authentication Required\r\nProxy-Authenticate: Basic realm=\"x\"\r\n\r\n";
    let (proxy, _heads) = canned("127.0.0.1:0", answer).await;
    for url in ["https://a.example/", "http://a.example/"] {
        let outcome = Authority::new().probe().probe(request(proxy, url)).await;
        assert_failed(&outcome, ProbeClass::AuthRequired, "407");
    }
}

#[tokio::test]
async fn the_status_must_be_the_expected_one_and_redirects_are_not_followed() {
    let authority = Authority::new();
    let proxy = proxy("127.0.0.1:0", |_| {}).await;
    for (answer, says) in [
        (
            "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
            "200, expected 204",
        ),
        (
            "HTTP/1.1 302 Found\r\nLocation: https://127.0.0.1/\r\n\r\n",
            "302, expected 204",
        ),
        ("HTTP/1.1 407 x\r\n\r\n", "407, expected 204"),
        (
            "HTTP/1.1 429 Too Many\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            "429",
        ),
    ] {
        let (target, _heads) =
            tls_target("127.0.0.1:0", authority.acceptor(&["127.0.0.1"]), answer).await;
        let outcome = authority
            .probe()
            .probe(request(proxy, &format!("https://{target}/")))
            .await;
        assert_failed(&outcome, ProbeClass::UnexpectedStatus, says);
    }
}

#[tokio::test]
async fn tls_to_the_target_is_verified() {
    let authority = Authority::new();
    let stranger = Authority::new();
    let proxy = proxy("127.0.0.1:0", |_| {}).await;
    let answer = "HTTP/1.1 204 x\r\n\r\n";
    for acceptor in [
        stranger.acceptor(&["127.0.0.1"]),
        authority.acceptor(&["other.example"]),
    ] {
        let (target, _heads) = tls_target("127.0.0.1:0", acceptor, answer).await;
        let outcome = authority
            .probe()
            .probe(request(proxy, &format!("https://{target}/")))
            .await;
        assert_failed(&outcome, ProbeClass::Tls, "certificate");
    }
}

#[tokio::test]
async fn a_proxy_that_answers_for_the_target_is_caught_by_tls() {
    for answer in [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nHi".as_slice(),
        b"HTTP/1.1 200 OK\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n",
    ] {
        let (liar, _heads) = canned("127.0.0.1:0", answer).await;
        let outcome = Authority::new()
            .probe()
            .probe(ProbeRequest {
                timeout: Duration::from_secs(1),
                ..request(liar, "https://a.example/")
            })
            .await;
        assert!(
            matches!(outcome.class, ProbeClass::Tls | ProbeClass::Timeout),
            "{outcome:?}"
        );
    }
}

/// A proxy of the test's own: answers CONNECT in the pieces given, then joins both sides, with
/// the target's first bytes in one packet with the end of its answer.
async fn piecewise_proxy(target: SocketAddr, pieces: &'static [&'static str]) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let (mut client, _) = listener.accept().await?;
        client.set_nodelay(true)?;
        read_head(&mut client).await?;
        let mut target = TcpStream::connect(target).await?;
        for piece in pieces {
            client.write_all(piece.as_bytes()).await?;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        tokio::io::copy_bidirectional(&mut client, &mut target).await
    });
    address
}

#[tokio::test]
async fn slow_interim_and_old_answers_to_connect_are_understood() {
    let authority = Authority::new();
    for pieces in [
        ["HTTP/1.1 2", "00 Connection", " established\r", "\n\r\n"].as_slice(),
        &[
            "HTTP/1.1 100 Continue\r\n\r\n",
            "HTTP/1.1 200 x\r\nA: b\r\n\r\n",
        ],
        &["HTTP/1.0 200\r\n\r\n"],
        &["HTTP/1.1 200 OK\nServer: old\n\n"],
        &["HTTP/1.1 299 fine\r\nTransfer-Encoding: chunked\r\n\r\n"],
    ] {
        let (target, _heads) = tls_target(
            "127.0.0.1:0",
            authority.acceptor(&["127.0.0.1"]),
            "HTTP/1.1 204 x\r\n\r\n",
        )
        .await;
        let proxy = piecewise_proxy(target, pieces).await;
        let outcome = authority
            .probe()
            .probe(request(proxy, &format!("https://{target}/")))
            .await;
        assert_eq!(
            outcome.class,
            ProbeClass::Success,
            "{pieces:?}: {outcome:?}"
        );
    }
}

#[tokio::test]
async fn bytes_right_behind_the_answer_to_connect_belong_to_the_tunnel() {
    // Bytes that arrive with the head must reach TLS: here they break it.
    let answer = b"HTTP/1.1 200 OK\r\n\r\nnot a TLS record at all";
    let (proxy, _heads) = canned("127.0.0.1:0", answer).await;
    let outcome = Authority::new()
        .probe()
        .probe(request(proxy, "https://a.example/"))
        .await;
    assert_failed(&outcome, ProbeClass::Tls, "TLS to the target");
}

#[tokio::test]
async fn endless_and_foreign_answers_are_io_failures() {
    let mut endless = b"HTTP/1.1 200 OK\r\n".to_vec();
    endless.extend(b"X-Fill: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n".repeat(2000));
    for (answer, says) in [
        (endless.as_slice(), "more than"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "is not HTTP/1.1"),
        (b"\x05\x00\n", "is not HTTP/1.1"),
    ] {
        let (proxy, _heads) = canned("127.0.0.1:0", answer).await;
        let outcome = Authority::new()
            .probe()
            .probe(request(proxy, "https://a.example/"))
            .await;
        assert_failed(&outcome, ProbeClass::Io, says);
    }
    // Closed without a word.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await?;
        read_head(&mut stream).await
    });
    let outcome = Authority::new()
        .probe()
        .probe(request(address, "http://a.example/"))
        .await;
    assert_failed(&outcome, ProbeClass::Io, "closed before");
}

#[tokio::test]
async fn each_step_that_hangs_is_named() {
    let probe = Authority::new().probe();
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent_at = silent.local_addr().unwrap();
    let quick = |request: ProbeRequest| ProbeRequest {
        timeout: Duration::from_millis(300),
        ..request
    };
    let outcome = probe
        .probe(quick(request(silent_at, "https://a.example/")))
        .await;
    assert_failed(&outcome, ProbeClass::Timeout, "answer to CONNECT");
    let outcome = probe
        .probe(quick(request(silent_at, "http://a.example/")))
        .await;
    assert_failed(&outcome, ProbeClass::Timeout, "the response");
    let good = proxy("127.0.0.1:0", |_| {}).await;
    let url = format!("https://{silent_at}/");
    let outcome = probe.probe(quick(request(good, &url))).await;
    assert_failed(&outcome, ProbeClass::Timeout, "TLS to the target");
}

//! The proxy over loopback sockets, with clients that write raw bytes.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that fails by a panic"
)]

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use egress_forward_proxy::{Config, Net, Resolve, bind, run_with};
use futures::future::BoxFuture;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// Names mean what the test says.
#[derive(Default)]
struct Names(BTreeMap<&'static str, Vec<IpAddr>>);

impl Resolve for Names {
    fn resolve<'a>(&'a self, host: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        Box::pin(async move {
            self.0
                .get(host)
                .cloned()
                .ok_or_else(|| io::Error::other("no such name"))
        })
    }
}

struct Proxy {
    address: SocketAddr,
    cancel: CancellationToken,
    task: JoinHandle<()>,
}

async fn start(change: impl FnOnce(&mut Config)) -> Proxy {
    start_with(Names::default(), change).await
}

async fn start_with(names: Names, change: impl FnOnce(&mut Config)) -> Proxy {
    let mut config = Config::new("127.0.0.1:0".parse().unwrap());
    config.allow_targets = Net::loopback();
    change(&mut config);
    let listeners = bind(&config).unwrap();
    let address = listeners[0].local_addr().unwrap();
    let cancel = CancellationToken::new();
    let task = tokio::spawn(run_with(config, listeners, Arc::new(names), cancel.clone()));
    Proxy {
        address,
        cancel,
        task,
    }
}

impl Proxy {
    async fn open(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// Sends `request` and reads to the end.
    async fn ask(&self, request: &str) -> String {
        let mut stream = self.open().await;
        stream.write_all(request.as_bytes()).await.unwrap();
        within(read_all(&mut stream)).await
    }

    /// Asks for a tunnel and gives the stream and the response's head.
    async fn connect(&self, target: &str) -> (TcpStream, String) {
        let mut stream = self.open().await;
        let head = format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        let head = within(read_head(&mut stream)).await;
        (stream, head)
    }
}

async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(20), future)
        .await
        .expect("nothing happened for 20 s")
}

async fn read_all(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    // A reset after the answer is an end too.
    let _ = stream.read_to_end(&mut bytes).await;
    String::from_utf8_lossy(&bytes).into_owned()
}

async fn read_head(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    while !bytes.ends_with(b"\r\n\r\n") {
        match stream.read_u8().await {
            Ok(byte) => bytes.push(byte),
            Err(_) => break,
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A target that takes one connection, reads a head, keeps what it saw, answers `answer`.
async fn target(at: &str, answer: &'static str) -> (SocketAddr, JoinHandle<(String, IpAddr)>) {
    let listener = TcpListener::bind(at).await.unwrap();
    let address = listener.local_addr().unwrap();
    let seen = tokio::spawn(async move {
        let (mut stream, peer) = listener.accept().await.unwrap();
        let head = read_head(&mut stream).await;
        stream.write_all(answer.as_bytes()).await.unwrap();
        (head, peer.ip())
    });
    (address, seen)
}

/// Sends back what it gets, and `bye` after the end of it.
async fn echo(at: &str) -> SocketAddr {
    let listener = TcpListener::bind(at).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut read, mut write) = stream.split();
                let _ = tokio::io::copy(&mut read, &mut write).await;
                let _ = write.write_all(b"bye").await;
            });
        }
    });
    address
}

/// An address on which connecting hangs: the listener's queue is full.
async fn black_hole(at: &str) -> (SocketAddr, Vec<socket2::Socket>) {
    let at: SocketAddr = at.parse().unwrap();
    let new = || {
        let socket = socket2::Socket::new(
            socket2::Domain::for_address(at),
            socket2::Type::STREAM,
            None,
        )
        .unwrap();
        socket.set_nonblocking(true).unwrap();
        socket
    };
    let listener = new();
    listener.bind(&at.into()).unwrap();
    listener.listen(0).unwrap();
    let address = listener.local_addr().unwrap().as_socket().unwrap();
    let mut held = vec![listener];
    for _ in 0..4 {
        let filler = new();
        let _ = filler.connect(&address.into());
        held.push(filler);
    }
    (address, held)
}

#[tokio::test]
async fn a_tunnel_carries_bytes_both_ways_and_half_closes() {
    let proxy = start(|_| {}).await;
    for at in ["127.0.0.1:0", "[::1]:0"] {
        let target = echo(at).await;
        let mut stream = proxy.open().await;
        // The first bytes of the tunnel come with the request, as an eager client sends them.
        let eager = format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\nhello");
        stream.write_all(eager.as_bytes()).await.unwrap();
        let head = within(read_head(&mut stream)).await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        assert!(
            !head.to_ascii_lowercase().contains("content-length"),
            "{head}"
        );
        stream.write_all(b" world").await.unwrap();
        stream.shutdown().await.unwrap();
        assert_eq!(within(read_all(&mut stream)).await, "hello worldbye");
    }
}

#[tokio::test]
async fn a_plain_request_arrives_as_if_the_client_had_sent_it() {
    let proxy = start(|_| {}).await;
    for (at, authority) in [("127.0.0.1:0", "127.0.0.1"), ("[::1]:0", "[::1]")] {
        let (address, seen) = target(
            at,
            "HTTP/1.1 418 Teapot\r\nConnection: X-Hop, close\r\nX-Hop: 1\r\nX-Kept: 2\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        )
        .await;
        let port = address.port();
        let answer = proxy
            .ask(&format!(
                "GET http://{authority}:{port}/path?q=1 HTTP/1.1\r\nHost: other.example\r\nX-Case-Kept: yes\r\nProxy-Authorization: Basic c2VjcmV0\r\nProxy-Connection: close\r\nConnection: close, X-Mine\r\nX-Mine: 1\r\n\r\n"
            ))
            .await;
        let (head, _) = within(seen).await.unwrap();
        assert_eq!(
            head.lines().collect::<Vec<_>>(),
            [
                "GET /path?q=1 HTTP/1.1",
                &format!("host: {authority}:{port}").replace("host", host_name(&head)),
                "X-Case-Kept: yes",
                ""
            ],
            "{head}"
        );
        assert!(answer.starts_with("HTTP/1.1 418"), "{answer}");
        assert!(answer.contains("X-Kept: 2"), "{answer}");
        assert!(!answer.contains("X-Hop: 1"), "{answer}");
        assert!(answer.contains("abc"), "{answer}");
        let lower = format!("{head}{answer}").to_ascii_lowercase();
        assert!(
            !lower.contains("via:") && !lower.contains("forwarded"),
            "{lower}"
        );
    }
}

/// The header's name as it was written.
fn host_name(head: &str) -> &str {
    head.lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(name, _)| name)
        .find(|name| name.eq_ignore_ascii_case("host"))
        .unwrap_or("no host header")
}

#[tokio::test]
async fn a_body_is_forwarded_and_a_second_request_uses_the_same_client_connection() {
    let proxy = start(|_| {}).await;
    let target = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = target.local_addr().unwrap();
    let served = tokio::spawn(async move {
        let mut bodies = Vec::new();
        for _ in 0..2 {
            let (mut stream, _) = target.accept().await.unwrap();
            let head = read_head(&mut stream).await.to_ascii_lowercase();
            assert!(head.contains("content-length: 5"), "{head}");
            let mut body = [0; 5];
            stream.read_exact(&mut body).await.unwrap();
            bodies.push(body);
            stream
                .write_all(b"HTTP/1.1 204 No Content\r\n\r\n")
                .await
                .unwrap();
        }
        bodies
    });
    let mut stream = proxy.open().await;
    for body in ["first", "later"] {
        let request = format!(
            "POST http://{address}/ HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n{body}"
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        let head = within(read_head(&mut stream)).await;
        assert!(head.starts_with("HTTP/1.1 204"), "{head}");
    }
    assert_eq!(within(served).await.unwrap(), [*b"first", *b"later"]);
}

#[tokio::test]
async fn metadata_and_link_local_are_refused_by_the_resolved_address() {
    let mut names = Names::default();
    names
        .0
        .insert("metadata.example", vec!["169.254.169.254".parse().unwrap()]);
    names.0.insert(
        "mapped.example",
        vec!["::ffff:169.254.169.254".parse().unwrap()],
    );
    let proxy = start_with(names, |config| {
        config.allow_targets = vec!["0.0.0.0/0".parse().unwrap(), "::/0".parse().unwrap()];
    })
    .await;
    for target in [
        "169.254.169.254:80",
        "metadata.example:80",
        "mapped.example:80",
        "[fe80::1]:80",
        "[::ffff:169.254.169.254]:80",
        "0.0.0.0:80",
    ] {
        let (_, head) = proxy.connect(target).await;
        assert!(head.starts_with("HTTP/1.1 403"), "{target}: {head}");
        let answer = proxy
            .ask(&format!(
                "GET http://{target}/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            ))
            .await;
        assert!(answer.starts_with("HTTP/1.1 403"), "{target}: {answer}");
        assert!(answer.contains("not allowed as a target"), "{answer}");
    }
}

#[tokio::test]
async fn the_machine_itself_is_no_target_unless_allowed() {
    let proxy = start(|config| config.allow_targets.clear()).await;
    let target = echo("127.0.0.1:0").await;
    let (_, head) = proxy.connect(&target.to_string()).await;
    assert!(head.starts_with("HTTP/1.1 403"), "{head}");
}

#[tokio::test]
async fn only_named_clients_are_served() {
    let proxy = start(|config| config.allow_clients = vec!["192.0.2.0/24".parse().unwrap()]).await;
    let answer = proxy
        .ask("GET http://127.0.0.1:1/ HTTP/1.1\r\nHost: x\r\n\r\n")
        .await;
    assert!(answer.starts_with("HTTP/1.1 403"), "{answer}");
    assert!(
        answer.contains("127.0.0.1 is not an allowed client"),
        "{answer}"
    );
}

#[tokio::test]
async fn wrong_requests_have_their_status_and_sentence() {
    let proxy = start(|_| {}).await;
    for (request, status, says) in [
        (
            "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
            400,
            "absolute URI",
        ),
        (
            "GET https://x/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
            400,
            "use CONNECT",
        ),
        (
            "GET http://u:p@x/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
            400,
            "no usable host",
        ),
        (
            "CONNECT x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
            400,
            "a host and a port",
        ),
        (
            "CONNECT [[::1]]:443 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
            400,
            "",
        ),
        (
            "TRACE http://127.0.0.1:1/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
            405,
            "TRACE",
        ),
        (
            "CONNECT nowhere.example:443 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
            502,
            "does not resolve",
        ),
        ("garbage\r\n\r\n", 400, ""),
    ] {
        let answer = proxy.ask(request).await;
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status}")) && answer.contains(says),
            "{request:?}: {answer:?}"
        );
    }
}

#[tokio::test]
async fn a_target_that_fails_has_a_gateway_status() {
    let proxy = start(|config| config.timeouts.connect = Duration::from_millis(300)).await;
    // Bound and not listening: refused, and nobody else can take the port meanwhile.
    let closed = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    closed
        .bind(&"127.0.0.1:0".parse::<SocketAddr>().unwrap().into())
        .unwrap();
    let closed_at = closed.local_addr().unwrap().as_socket().unwrap();
    let (_, head) = proxy.connect(&closed_at.to_string()).await;
    assert!(head.starts_with("HTTP/1.1 502"), "{head}");

    let (hole, _held) = black_hole("127.0.0.1:0").await;
    let (_, head) = proxy.connect(&hole.to_string()).await;
    assert!(head.starts_with("HTTP/1.1 504"), "{head}");

    let (address, _) = target("127.0.0.1:0", "this is not HTTP\r\n\r\n").await;
    let answer = proxy
        .ask(&format!(
            "GET http://{address}/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        ))
        .await;
    assert!(answer.starts_with("HTTP/1.1 502"), "{answer}");
}

#[tokio::test]
async fn a_silent_target_is_given_up() {
    let proxy = start(|config| config.timeouts.response = Duration::from_millis(200)).await;
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = silent.local_addr().unwrap();
    let answer = proxy
        .ask(&format!(
            "GET http://{address}/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        ))
        .await;
    assert!(answer.starts_with("HTTP/1.1 504"), "{answer}");
}

#[tokio::test]
async fn a_dead_ipv6_path_costs_a_moment_and_not_the_connection() {
    let (dead, _held) = black_hole("[::1]:0").await;
    let target = echo(&format!("127.0.0.1:{}", dead.port())).await;
    let mut names = Names::default();
    names.0.insert(
        "dual.example",
        vec!["::1".parse().unwrap(), "127.0.0.1".parse().unwrap()],
    );
    let proxy = start_with(names, |_| {}).await;
    let before = Instant::now();
    let (_, head) = proxy
        .connect(&format!("dual.example:{}", target.port()))
        .await;
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    assert!(
        before.elapsed() < Duration::from_secs(2),
        "{:?}",
        before.elapsed()
    );
    assert!(
        before.elapsed() >= Duration::from_millis(200),
        "IPv6 was not tried first"
    );
}

#[tokio::test]
async fn the_source_address_is_the_one_that_was_asked_for() {
    let proxy = start(|config| config.bind_addresses = vec!["127.0.0.9".parse().unwrap()]).await;
    let (address, seen) = target("127.0.0.1:0", "HTTP/1.1 204 No Content\r\n\r\n").await;
    proxy
        .ask(&format!(
            "GET http://{address}/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        ))
        .await;
    assert_eq!(within(seen).await.unwrap().1, IpAddr::from([127, 0, 0, 9]));
    // Never by another path: no IPv6 target from an IPv4 source.
    let (_, head) = proxy.connect("[::1]:443").await;
    assert!(head.starts_with("HTTP/1.1 502"), "{head}");
}

#[tokio::test]
async fn heads_are_bounded_in_size_and_time() {
    let proxy = start(|config| config.timeouts.header = Duration::from_millis(300)).await;
    let huge = format!(
        "GET http://127.0.0.1:1/ HTTP/1.1\r\nHost: x\r\nX-Huge: {}\r\n\r\n",
        "a".repeat(100_000)
    );
    let mut stream = proxy.open().await;
    let _ = stream.write_all(huge.as_bytes()).await;
    let answer = within(read_all(&mut stream)).await;
    assert!(
        answer.is_empty() || answer.starts_with("HTTP/1.1 431"),
        "{answer}"
    );

    let mut slow = proxy.open().await;
    slow.write_all(b"GET http://127.0.0.1:1/ HTT")
        .await
        .unwrap();
    let answer = within(read_all(&mut slow)).await;
    assert!(
        answer.is_empty() || answer.starts_with("HTTP/1.1 408"),
        "{answer}"
    );
}

#[tokio::test]
async fn an_idle_tunnel_is_closed() {
    let proxy = start(|config| config.timeouts.idle = Duration::from_millis(200)).await;
    let target = echo("127.0.0.1:0").await;
    let (mut stream, head) = proxy.connect(&target.to_string()).await;
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    assert_eq!(within(read_all(&mut stream)).await, "");
}

#[tokio::test]
async fn further_connections_wait_for_a_free_place() {
    let proxy = start(|config| config.max_connections = 1).await;
    let target = echo("127.0.0.1:0").await;
    let (first, head) = proxy.connect(&target.to_string()).await;
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    let name = target.to_string();
    let second = proxy.connect(&name);
    tokio::pin!(second);
    let early = tokio::time::timeout(Duration::from_millis(200), &mut second).await;
    assert!(
        early.is_err(),
        "the second connection was served beside the first"
    );
    drop(first);
    let (_, head) = within(second).await;
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
}

#[tokio::test]
async fn stopping_ends_idle_clients_at_once_and_tunnels_after_the_drain() {
    let proxy = start(|config| config.timeouts.drain = Duration::from_millis(300)).await;
    let target = echo("127.0.0.1:0").await;
    let mut idle = proxy.open().await;
    let (mut held, _) = proxy.connect(&target.to_string()).await;
    proxy.cancel.cancel();
    within(proxy.task).await.unwrap();
    assert_eq!(within(read_all(&mut idle)).await, "");
    assert_eq!(within(read_all(&mut held)).await, "");
    assert!(
        TcpStream::connect(proxy.address).await.is_err(),
        "still listening"
    );
}

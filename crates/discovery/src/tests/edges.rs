//! What is refused before a handler sees it, and clients that misbehave.

use egress_core::SecretBytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;

fn secured() -> Config {
    Config {
        token: TokenSource::Static(SecretBytes::new("t0ken-of-the-test")),
        ..loopback()
    }
}

#[test]
fn openness_is_told() {
    assert!(Config::default().token.is_open());
    assert!(!secured().token.is_open());
    assert!(!format!("{:?}", secured()).contains("t0ken"));
}

#[tokio::test]
async fn everything_but_health_needs_the_token() {
    let world = World::with(secured()).await;
    world.directory.put(proxy("p1", 1));
    let with = |method: Method, path: &str, header: Option<&str>| {
        let mut request = request(method, path, None);
        if let Some(header) = header {
            let value = header.parse().unwrap();
            request.headers_mut().insert("authorization", value);
        }
        request
    };
    for (method, path) in [
        (Method::GET, "/v1/proxies"),
        (Method::GET, "/v1/proxies/default/p1"),
        (Method::POST, "/v1/leases"),
        (Method::GET, "/v1/leases/x"),
        (Method::DELETE, "/v1/leases/x"),
        (Method::POST, "/v1/leases/x/renew"),
        (Method::POST, "/v1/leases/x/report"),
        (Method::GET, "/v1/watch"),
        (Method::GET, "/openapi.json"),
        (Method::GET, "/no/such/path"),
        (Method::PUT, "/v1/leases"),
        (Method::GET, "/healthz/"),
        (Method::GET, "//healthz"),
    ] {
        for header in [None, Some("Bearer wrong"), Some("Basic t0ken-of-the-test")] {
            let reply = world.send(with(method.clone(), path, header)).await;
            reply.refused(401, "unauthorized");
            assert_eq!(reply.headers["www-authenticate"], "Bearer");
        }
    }
    assert_eq!(world.store.active(), BTreeMap::new());
    let right = with(Method::GET, "/v1/proxies", Some("Bearer t0ken-of-the-test"));
    assert_eq!(world.send(right).await.status, 200);
}

#[tokio::test]
async fn a_token_file_may_be_rotated() {
    let directory = tempfile::TempDir::new().unwrap();
    let path = directory.path().join("token");
    std::fs::write(&path, "before\n").unwrap();
    let world = World::with(Config {
        token: TokenSource::File(path.clone()),
        ..loopback()
    })
    .await;
    let status = async |token: &str| {
        let mut request = request(Method::GET, "/v1/proxies", None);
        let value = format!("Bearer {token}").parse().unwrap();
        request.headers_mut().insert("authorization", value);
        world.send(request).await.status.as_u16()
    };
    assert_eq!(status("before").await, 200);
    // As an editor, or a mounted secret, replaces it.
    let new = directory.path().join("new");
    std::fs::write(&new, "after!\n").unwrap();
    std::fs::rename(&new, &path).unwrap();
    assert_eq!(status("before").await, 401);
    assert_eq!(status("after!").await, 200);
}

#[tokio::test]
async fn unknown_paths_and_methods_are_told() {
    let world = World::start().await;
    for path in [
        "/",
        "/v1",
        "/v1/proxies/",
        "/v1/proxies/only-one",
        "/v2/proxies",
    ] {
        world.get(path).await.refused(404, "not_found");
    }
    for (method, path, allow) in [
        (Method::POST, "/v1/proxies", "GET,HEAD"),
        (Method::GET, "/v1/leases", "POST"),
        (Method::PUT, "/v1/leases/x", "GET,HEAD,DELETE"),
        (Method::GET, "/v1/leases/x/renew", "POST"),
        (Method::DELETE, "/healthz", "GET,HEAD"),
    ] {
        let reply = world.send(request(method, path, None)).await;
        reply.refused(405, "method_not_allowed");
        assert_eq!(reply.headers["allow"], allow, "{path}");
    }
    let head = world.send(request(Method::HEAD, "/v1/proxies", None)).await;
    assert_eq!((head.status.as_u16(), head.body.len()), (200, 0));
}

#[tokio::test]
async fn bodies_are_bounded_and_typed() {
    let world = World::start().await;
    world.directory.put(proxy("p1", 100));
    let limit = Limits::default().max_body;
    let filled = |length: usize| {
        let mut body = String::from("{}");
        body.extend(std::iter::repeat_n(' ', length - 2));
        body
    };
    let reply = world.post("/v1/leases", &filled(limit)).await;
    assert_eq!(reply.status, 201, "{reply:?}");
    for path in ["/v1/leases", "/v1/leases/x/renew", "/v1/leases/x/report"] {
        world
            .post(path, &filled(limit + 1))
            .await
            .refused(413, "body_too_large");
        // Of no told length.
        let chunks = (0..=limit / 1024).map(|_| Ok::<_, std::io::Error>(filled(1024)));
        let mut streamed = request(Method::POST, path, Some(""))
            .map(|_| Body::from_stream(futures::stream::iter(chunks.collect::<Vec<_>>())));
        streamed.headers_mut().remove("content-length");
        world.send(streamed).await.refused(413, "body_too_large");
        for (content_type, refused) in [
            (Some("application/json; charset=utf-8"), false),
            (Some("Application/JSON"), false),
            (Some("application/merge-patch+json"), false),
            (Some("application/x-www-form-urlencoded"), true),
            (Some("text/json"), true),
            (Some("application/jsonp"), true),
            (Some(""), true),
            (None, true),
        ] {
            let mut request = request(Method::POST, path, Some("{}"));
            match content_type {
                Some(value) => {
                    let value = value.parse().unwrap();
                    request.headers_mut().insert("content-type", value);
                }
                None => {
                    request.headers_mut().remove("content-type");
                }
            }
            let reply = world.send(request).await;
            if refused {
                reply.refused(415, "unsupported_media_type");
            } else {
                assert_ne!(reply.status, 415, "{content_type:?}: {reply:?}");
            }
        }
    }
}

/// Reads what comes until the peer closes.
async fn until_closed(io: &mut TcpStream) -> String {
    let mut text = Vec::new();
    // A reset is an end as well.
    let _ = tokio::time::timeout(PATIENCE, io.read_to_end(&mut text))
        .await
        .expect("the connection stays open");
    String::from_utf8_lossy(&text).into_owned()
}

fn impatient() -> Config {
    Config {
        limits: Limits {
            header_timeout: Duration::from_millis(200),
            body_timeout: Duration::from_millis(200),
            drain: Duration::from_millis(500),
            ..Limits::default()
        },
        ..loopback()
    }
}

#[tokio::test]
async fn slow_clients_are_sent_away() {
    let world = World::with(impatient()).await;
    for first in ["", "P", "PRI * HTTP/2.0\r\n", "GET /healthz HTTP/1.1\r\nho"] {
        let mut io = world.connect().await;
        io.write_all(first.as_bytes()).await.unwrap();
        let answer = until_closed(&mut io).await;
        assert!(!answer.contains(" 200 "), "{first:?}: {answer}");
    }
    let mut io = world.connect().await;
    io.write_all(
        b"POST /v1/leases HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
          content-length: 10\r\n\r\n{",
    )
    .await
    .unwrap();
    let mut answer = vec![0; 12];
    tokio::time::timeout(PATIENCE, io.read_exact(&mut answer))
        .await
        .unwrap()
        .unwrap();
    assert_eq!(answer, b"HTTP/1.1 408");
    assert!(until_closed(&mut io).await.contains("body_timeout"));
}

#[tokio::test]
async fn connections_over_the_limit_wait() {
    let mut config = loopback();
    config.limits.max_connections = 2;
    let world = World::with(config).await;
    let mut held = Vec::new();
    for _ in 0..2 {
        let mut io = world.connect().await;
        io.write_all(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
            .await
            .unwrap();
        let mut answer = vec![0; 15];
        io.read_exact(&mut answer).await.unwrap();
        held.push(io);
    }
    // Connected by the kernel, not served.
    let mut third = world.connect().await;
    third
        .write_all(b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        .await
        .unwrap();
    let mut byte = [0];
    let early = tokio::time::timeout(Duration::from_millis(100), third.read(&mut byte)).await;
    assert!(early.is_err(), "served over the limit");
    held.pop();
    assert!(until_closed(&mut third).await.ends_with("ok"));
}

#[tokio::test]
async fn a_stop_lets_requests_finish_and_ends_in_time() {
    let mut world = World::with(impatient()).await;
    world.directory.put(proxy("p1", 1));
    // Half a request: the answer is still owed.
    let mut busy = world.connect().await;
    busy.write_all(
        b"POST /v1/leases HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
          content-length: 2\r\n\r\n{",
    )
    .await
    .unwrap();
    let mut idle = world.connect().await;
    idle.write_all(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        .await
        .unwrap();
    let mut answer = vec![0; 15];
    idle.read_exact(&mut answer).await.unwrap();
    let watching = world.connect().await;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(watching))
        .await
        .unwrap();
    tokio::spawn(connection);
    let events = sender
        .send_request(request(Method::GET, "/v1/watch", None))
        .await
        .unwrap();
    // The server has the first half of the busy one when it has answered those after it.
    world.get("/healthz").await;

    world.cancel.cancel();
    busy.write_all(b"}").await.unwrap();
    let answer = until_closed(&mut busy).await;
    assert!(answer.starts_with("HTTP/1.1 201"), "{answer}");
    until_closed(&mut idle).await;
    let rest = events.into_body().collect().await;
    assert!(rest.is_ok(), "a cut stream instead of its end: {rest:?}");
    world.stop().await;
    TcpStream::connect(world.address.unwrap())
        .await
        .unwrap_err();
}

#[tokio::test]
async fn a_stop_does_not_wait_for_ever() {
    let mut config = impatient();
    config.limits.body_timeout = Duration::from_secs(3600);
    let mut world = World::with(config).await;
    let mut stuck = world.connect().await;
    stuck
        .write_all(
            b"POST /v1/leases HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
              content-length: 2\r\n\r\n{",
        )
        .await
        .unwrap();
    world.get("/healthz").await;
    world.stop().await;
    until_closed(&mut stuck).await;
}

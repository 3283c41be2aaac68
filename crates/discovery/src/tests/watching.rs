//! `/v1/watch`.

use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde_json::json;

use super::*;

/// One client's events.
struct Events {
    body: Incoming,
    text: String,
}

impl Events {
    async fn open(world: &World) -> Self {
        let io = TokioIo::new(world.connect().await);
        let (mut sender, connection) = hyper::client::conn::http1::handshake(io).await.unwrap();
        tokio::spawn(connection);
        let response = sender
            .send_request(request(Method::GET, "/v1/watch", None))
            .await
            .unwrap();
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        assert_eq!(response.headers()["cache-control"], "no-store");
        Self {
            body: response.into_body(),
            text: String::new(),
        }
    }

    /// The next block, an event or a comment.
    async fn block(&mut self) -> Option<String> {
        loop {
            if let Some((block, rest)) = self.text.split_once("\n\n") {
                let block = block.to_owned();
                self.text = rest.to_owned();
                return Some(block);
            }
            let frame = tokio::time::timeout(PATIENCE, self.body.frame())
                .await
                .expect("no event came")?
                .unwrap();
            let data = frame.into_data().unwrap();
            self.text.push_str(std::str::from_utf8(&data).unwrap());
        }
    }

    async fn next(&mut self) -> (String, Value) {
        loop {
            let block = self.block().await.expect("the stream has ended");
            if block.starts_with(':') {
                continue;
            }
            let (name, data) = block.split_once('\n').unwrap();
            return (
                name.strip_prefix("event: ").unwrap().to_owned(),
                serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap(),
            );
        }
    }
}

fn quick() -> Config {
    let mut config = loopback();
    config.limits.watch_interval = Duration::from_millis(20);
    config
}

#[tokio::test]
async fn the_state_comes_first_then_each_change() {
    let world = World::with(quick()).await;
    world.directory.put(proxy("a", 1));
    let mut events = Events::open(&world).await;
    let list = world.get("/v1/proxies").await.json();
    assert_eq!(events.next().await, ("state".to_owned(), list));

    world.directory.put(proxy("b", 1));
    let (name, added) = events.next().await;
    assert_eq!(name, "added");
    assert_eq!(added, world.get("/v1/proxies/default/b").await.json());

    world.directory.put(ProxyRecord {
        healthy: false,
        ..proxy("a", 1)
    });
    let (name, changed) = events.next().await;
    assert_eq!(
        (name.as_str(), &changed["healthy"]),
        ("changed", &json!(false))
    );

    // A lease is no change of the directory.
    let id = world.lease("{}").await;
    let (name, changed) = events.next().await;
    assert_eq!(
        (name.as_str(), &changed["activeLeases"]),
        ("changed", &json!(1))
    );
    world.delete(&format!("/v1/leases/{id}")).await;
    let (_, changed) = events.next().await;
    assert_eq!(changed["activeLeases"], 0);

    // Being deleted is being gone.
    world.directory.put(ProxyRecord {
        deleting: true,
        ..proxy("b", 1)
    });
    let removed = ("removed".to_owned(), json!({"id": "default/b"}));
    assert_eq!(events.next().await, removed);
    world.directory.remove("b");
    world.directory.remove("a");
    let removed = ("removed".to_owned(), json!({"id": "default/a"}));
    assert_eq!(events.next().await, removed);
}

#[tokio::test]
async fn comments_keep_a_quiet_stream_alive() {
    let mut config = loopback();
    config.limits.keepalive = Duration::from_millis(20);
    let world = World::with(config).await;
    let mut events = Events::open(&world).await;
    events.next().await;
    for _ in 0..3 {
        assert!(events.block().await.unwrap().starts_with(':'));
    }
}

/// A client that does not read: the others are served, and when it reads again it comes to the
/// right state by what it is sent, however much it missed.
#[tokio::test]
async fn a_slow_client_blocks_nobody_and_catches_up() {
    let world = World::with(quick()).await;
    let mut slow = Events::open(&world).await;
    let (_, state) = slow.next().await;
    assert_eq!(state["count"], 0);
    let mut quick = Events::open(&world).await;
    quick.next().await;
    let filler = "x".repeat(2000);
    let mut changes = 0;
    for round in 0..60 {
        for n in 0..20 {
            world.directory.put(ProxyRecord {
                latency_millis: Some(round),
                attributes: BTreeMap::from([("filler".to_owned(), filler.clone())]),
                ..proxy(&format!("p{n:02}"), 1)
            });
        }
        // The quick one sees every round.
        loop {
            let (_, proxy) = quick.next().await;
            changes += 1;
            if proxy["id"] == "default/p19" && proxy["latencyMillis"] == round {
                break;
            }
        }
    }
    world.directory.remove("p07");
    let mut mirror = BTreeMap::new();
    let mut received = 0;
    let expected = world.get("/v1/proxies").await.json();
    loop {
        let (name, data) = slow.next().await;
        received += 1;
        let id = data["id"].as_str().unwrap().to_owned();
        match name.as_str() {
            "removed" => mirror.remove(&id),
            "added" => mirror.insert(id, data),
            "changed" => mirror.insert(id, data),
            other => panic!("{other}"),
        };
        if mirror.values().eq(expected["proxies"].as_array().unwrap()) {
            break;
        }
    }
    assert!(changes >= 1200, "{changes}");
    assert!(
        received <= changes + 1,
        "{received} events to a slow client"
    );
}

#[tokio::test]
async fn watchers_are_bounded_and_counted() {
    let mut config = quick();
    config.limits.max_watchers = 2;
    let world = World::with(config).await;
    let first = Events::open(&world).await;
    let _second = Events::open(&world).await;
    assert!(world.scrape().contains("egress_api_watchers 2"));
    world
        .get("/v1/watch")
        .await
        .refused(503, "too_many_watchers");
    drop(first);
    let again = async {
        // The server notices the closed connection when it next has something to send or read.
        while world.scrape().contains("egress_api_watchers 2") {
            tokio::task::yield_now().await;
        }
        Events::open(&world).await.next().await
    };
    let (name, _) = tokio::time::timeout(PATIENCE, again).await.unwrap();
    assert_eq!(name, "state");
}

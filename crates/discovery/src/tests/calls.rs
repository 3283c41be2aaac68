//! Each row of the reference.

use egress_core::target::Target;
use egress_core::{Phase, Uid};
use egress_lease::{
    AcquireError, AcquireRequest, Acquired, Lease, LeaseId, RenewError, Report, ReportError,
    StoreFailure,
};
use serde_json::json;

use super::*;

fn with(name: &str, attributes: &[(&str, &str)]) -> ProxyRecord {
    ProxyRecord {
        attributes: attributes
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect(),
        ..proxy(name, 2)
    }
}

fn ids(reply: &Reply) -> Vec<String> {
    assert_eq!(reply.status, 200, "{reply:?}");
    let json = reply.json();
    let proxies = json["proxies"].as_array().unwrap();
    assert_eq!(json["count"], proxies.len());
    let id = |proxy: &Value| proxy["id"].as_str().unwrap().to_owned();
    proxies.iter().map(id).collect()
}

#[tokio::test]
async fn health_and_readiness_need_no_token() {
    let world = World::with(Config {
        token: TokenSource::Static(egress_core::SecretBytes::new("t0ken")),
        ..loopback()
    })
    .await;
    for path in ["/healthz", "/readyz"] {
        let reply = world.get(path).await;
        assert_eq!((reply.status.as_u16(), &reply.body[..]), (200, &b"ok"[..]));
    }
    *world.directory.not_ready.lock().unwrap() = Some("loading 3 of 7 kinds".into());
    assert_eq!(world.get("/healthz").await.status, 200);
    let refusal = world.get("/readyz").await.refused(503, "not_ready");
    assert!(refusal["message"].as_str().unwrap().contains("3 of 7"));
}

#[tokio::test]
async fn nothing_is_guessed_before_the_cache_is_full() {
    let world = World::start().await;
    *world.directory.not_ready.lock().unwrap() = Some("loading".into());
    for path in [
        "/v1/proxies",
        "/v1/proxies/a/b",
        "/v1/leases/x",
        "/v1/watch",
    ] {
        let reply = world.get(path).await;
        reply.refused(503, "not_ready");
        assert_eq!(reply.headers["retry-after"], "1");
    }
    world
        .post("/v1/leases", "{}")
        .await
        .refused(503, "not_ready");
    // What needs no proxies works.
    assert_eq!(world.delete("/v1/leases/x").await.status, 204);
}

#[tokio::test]
async fn a_proxy_object_is_as_documented() {
    let world = World::start().await;
    world.directory.put(with("p1", &[("country", "DE")]));
    let full = world.get("/v1/proxies/default/p1").await;
    assert_eq!(
        full.json(),
        json!({
            "id": "default/p1", "ip": "192.0.2.1", "port": 3128,
            "attributes": {"country": "DE"}, "phase": "Ready", "healthy": true,
            "latencyMillis": 20, "activeLeases": 0, "maxLeases": 2,
            "url": "http://192.0.2.1:3128",
        })
    );
    world.directory.put(ProxyRecord {
        host: None,
        latency_millis: None,
        healthy: false,
        phase: Phase::Pending,
        ..with("p2", &[])
    });
    let bare = world.get("/v1/proxies/default/p2").await;
    assert_eq!(
        bare.json(),
        json!({
            "id": "default/p2", "port": 3128, "phase": "Pending", "healthy": false,
            "activeLeases": 0, "maxLeases": 2,
        })
    );
    for (host, ip, url) in [
        ("2001:db8::1", "2001:db8::1", "http://[2001:db8::1]:3128"),
        ("[2001:db8::1]", "2001:db8::1", "http://[2001:db8::1]:3128"),
        (
            "proxy.example",
            "proxy.example",
            "http://proxy.example:3128",
        ),
    ] {
        world.directory.put(ProxyRecord {
            host: Some(host.into()),
            ..with("p3", &[])
        });
        let json = world.get("/v1/proxies/default/p3").await.json();
        assert_eq!((&json["ip"], &json["url"]), (&json!(ip), &json!(url)));
    }
    world
        .get("/v1/proxies/default/other")
        .await
        .refused(404, "not_found");
    world
        .get("/v1/proxies/default/%ff")
        .await
        .refused(404, "not_found");
}

#[tokio::test]
async fn lists_filter_and_sort_by_id() {
    let world = World::start().await;
    world
        .directory
        .put(with("b", &[("country", "DE"), ("kind", "home")]));
    world.directory.put(with("a", &[("country", "DE")]));
    world.directory.put(ProxyRecord {
        key: ProxyKey::new("default-2", "a"),
        healthy: false,
        ..with("other", &[("country", "A b&c")])
    });
    world.directory.put(ProxyRecord {
        deleting: true,
        ..with("going", &[("country", "DE")])
    });
    let all = ["default-2/a", "default/a", "default/b"];
    assert_eq!(ids(&world.get("/v1/proxies").await), all);
    for (query, expected) in [
        ("healthy=true", &all[1..]),
        ("healthy=false", &all[..1]),
        ("attr.country=DE", &all[1..]),
        ("attr.country=DE&attr.kind=home", &all[2..]),
        ("attr.country=DE&attr.kind=office", &[]),
        ("attr.country=DE&attr.country=FR", &[]),
        ("attr.country=de", &[]),
        ("attr.country=A+b%26c&healthy=false", &all[..1]),
        ("", &all[..]),
    ] {
        let reply = world.get(&format!("/v1/proxies?{query}")).await;
        assert_eq!(ids(&reply), expected, "{query}");
    }
    for query in [
        "healthy=maybe",
        "healthy",
        "attr.=x",
        "country=DE",
        "attr.%ff=x%ff&x",
    ] {
        world
            .get(&format!("/v1/proxies?{query}"))
            .await
            .refused(400, "invalid_query");
    }
    // A proxy that is being deleted appears nowhere.
    world
        .get("/v1/proxies/default/going")
        .await
        .refused(404, "not_found");
}

#[tokio::test]
async fn a_lease_lives_as_documented() {
    let world = World::start().await;
    world.directory.put(with("p1", &[]));
    let reply = world
        .post(
            "/v1/leases",
            r#"{"target":"https://Example.com./x","ttlSeconds":60}"#,
        )
        .await;
    assert_eq!(reply.status, 201, "{reply:?}");
    let lease = reply.json();
    let id = lease["leaseID"].as_str().unwrap().to_owned();
    assert_eq!(
        reply.headers["location"],
        format!("/v1/leases/{id}").as_str()
    );
    let proxy = json!({
        "id": "default/p1", "ip": "192.0.2.1", "port": 3128, "phase": "Ready", "healthy": true,
        "latencyMillis": 20, "activeLeases": 1, "maxLeases": 2, "url": "http://192.0.2.1:3128",
    });
    assert_eq!(
        lease,
        json!({
            "leaseID": id, "proxy": proxy, "expiresAt": "2026-01-01T00:01:00Z", "ttlSeconds": 60,
            "target": "example.com",
        })
    );
    let path = format!("/v1/leases/{id}");
    assert_eq!(world.get(&path).await.json(), lease);

    world.time.advance(Duration::from_secs(30));
    let renewed = world.post(&format!("{path}/renew"), "{}").await;
    assert_eq!(renewed.status, 200);
    assert_eq!(renewed.json()["expiresAt"], "2026-01-01T00:05:30Z");
    assert_eq!(renewed.json()["ttlSeconds"], 300);
    let shorter = world
        .post(&format!("{path}/renew"), r#"{"ttlSeconds":1}"#)
        .await;
    assert_eq!(shorter.json()["expiresAt"], "2026-01-01T00:00:31Z");

    world.time.advance(Duration::from_secs(1));
    world.get(&path).await.refused(404, "unknown_lease");
    world
        .post(&format!("{path}/renew"), "{}")
        .await
        .refused(409, "expired");
    // Late, but it lands.
    let reply = world
        .post(&format!("{path}/report"), r#"{"result":"banned"}"#)
        .await;
    assert_eq!((reply.status.as_u16(), reply.body.len()), (204, 0));
    let refusal = world
        .post("/v1/leases", r#"{"target":"example.com"}"#)
        .await;
    let refusal = refusal.refused(409, "no_match");
    assert_eq!(refusal["inCooldown"], 1);

    for _ in 0..2 {
        assert_eq!(world.delete(&path).await.status, 204);
    }
    assert_eq!(world.delete("/v1/leases/never-was").await.status, 204);
    assert_eq!(world.delete("/v1/leases/%ff").await.status, 204);
}

#[tokio::test]
async fn an_empty_body_is_a_whole_request() {
    let world = World::start().await;
    world.directory.put(with("p1", &[]));
    for body in [
        "",
        "{}",
        r#"{"selector":null,"ttlSeconds":null,"target":null}"#,
    ] {
        let reply = world.post("/v1/leases", body).await;
        assert_eq!(reply.status, 201, "{body:?}: {reply:?}");
        assert_eq!(reply.json()["ttlSeconds"], 300);
        let id = reply.json()["leaseID"].as_str().unwrap().to_owned();
        assert_eq!(world.delete(&format!("/v1/leases/{id}")).await.status, 204);
    }
}

#[tokio::test]
async fn a_refused_lease_says_why() {
    let world = World::start().await;
    let empty = world.post("/v1/leases", "{}").await;
    assert_eq!(
        empty.refused(409, "no_match"),
        json!({
            "error": "no_match", "message": "no proxy matches the selector",
            "considered": 0, "atCapacity": 0, "inCooldown": 0, "unhealthy": 0,
        })
    );
    world.directory.put(ProxyRecord {
        max_leases: 1,
        ..with("full", &[("c", "1")])
    });
    world.directory.put(ProxyRecord {
        healthy: false,
        ..with("sick", &[("c", "1")])
    });
    world.directory.put(with("elsewhere", &[("c", "2")]));
    world.lease(r#"{"selector":{"c":"1"}}"#).await;
    let refusal = world.post("/v1/leases", r#"{"selector":{"c":"1"}}"#).await;
    let refusal = refusal.refused(409, "no_match");
    assert_eq!(
        (
            &refusal["considered"],
            &refusal["atCapacity"],
            &refusal["unhealthy"]
        ),
        (&json!(2), &json!(1), &json!(1))
    );
    for (body, code) in [
        (r#"{"ttlSeconds":0}"#, "invalid_ttl"),
        (r#"{"ttlSeconds":-5}"#, "invalid_ttl"),
        (r#"{"ttlSeconds":86401}"#, "invalid_ttl"),
        (r#"{"ttlSeconds":9223372036854775807}"#, "invalid_ttl"),
        (r#"{"ttlSeconds":9223372036854775808}"#, "invalid_body"),
        (r#"{"ttlSeconds":1.5}"#, "invalid_body"),
        (r#"{"ttlSeconds":"60"}"#, "invalid_body"),
        (r#"{"ttlseconds":60}"#, "invalid_body"),
        (r#"{"selector":{"c":1}}"#, "invalid_body"),
        (r#"{"target":"x","target":"y"}"#, "invalid_body"),
        (r#"{"target":" "}"#, "invalid_target"),
        (r#"{"target":"https://"}"#, "invalid_target"),
        ("{", "invalid_body"),
        ("{} {}", "invalid_body"),
        ("[]", "invalid_body"),
        ("null", "invalid_body"),
        ("\u{feff}{}", "invalid_body"),
    ] {
        world.post("/v1/leases", body).await.refused(400, code);
    }
    let told = world
        .post("/v1/leases", r#"{"selector":{"c":1}}"#)
        .await
        .json();
    assert!(
        told["message"].as_str().unwrap().contains("selector.c"),
        "{told}"
    );
}

#[tokio::test]
async fn reports_are_checked() {
    let world = World::start().await;
    world.directory.put(with("p1", &[]));
    let id = world.lease("{}").await;
    let path = format!("/v1/leases/{id}/report");
    for body in [
        "",
        "{}",
        r#"{"result":"great"}"#,
        r#"{"result":"OK"}"#,
        r#"{"result":null}"#,
    ] {
        world.post(&path, body).await.refused(400, "invalid_result");
    }
    for body in [r#"{"result":1}"#, r#"{"result":"ok","why":"x"}"#] {
        world.post(&path, body).await.refused(400, "invalid_body");
    }
    world
        .post(&path, r#"{"result":"ok","target":""}"#)
        .await
        .refused(400, "invalid_target");
    world
        .post("/v1/leases/never-was/report", r#"{"result":"ok"}"#)
        .await
        .refused(404, "unknown_lease");
    world
        .post("/v1/leases/never-was/renew", "{}")
        .await
        .refused(404, "unknown_lease");
    for result in ["ok", "rate_limited", "banned"] {
        let body = format!(r#"{{"result":"{result}","target":"{result}.example"}}"#);
        assert_eq!(world.post(&path, &body).await.status, 204);
    }
    for (target, status) in [("ok", 201), ("rate_limited", 409), ("banned", 409)] {
        let body = format!(r#"{{"target":"{target}.example"}}"#);
        assert_eq!(world.post("/v1/leases", &body).await.status, status);
    }
}

#[tokio::test]
async fn a_retry_with_the_same_key_takes_no_second_slot() {
    let world = World::start().await;
    world.directory.put(with("p1", &[]));
    let send = |key: &'static str, body: &'static str| {
        let mut request = request(Method::POST, "/v1/leases", Some(body));
        request
            .headers_mut()
            .insert("idempotency-key", key.parse().unwrap());
        world.send(request)
    };
    let first = send("k1", r#"{"ttlSeconds":60}"#).await;
    assert_eq!(first.status, 201);
    // Another text, the same request.
    let again = send("k1", r#" { "ttlSeconds" : 60, "selector": {} } "#).await;
    assert_eq!(again.status, 200);
    assert_eq!(first.json(), again.json());
    send("k1", "{}").await.refused(422, "idempotency_mismatch");
    assert_eq!(world.store.active().values().sum::<usize>(), 1);
    send("", "{}").await.refused(400, "invalid_idempotency_key");
    send("é", "{}")
        .await
        .refused(400, "invalid_idempotency_key");
    let long: &'static str = Box::leak("k".repeat(256).into_boxed_str());
    send(long, "{}")
        .await
        .refused(400, "invalid_idempotency_key");
    // Its attributes have changed meanwhile: still the lease that the client holds.
    send("k2", r#"{"ttlSeconds":5}"#).await;
    world.directory.put(with("p1", &[("moved", "yes")]));
    let again = send("k1", r#"{"ttlSeconds":60}"#).await;
    assert_eq!(again.status, 200);
    assert_eq!(again.json()["leaseID"], first.json()["leaseID"]);
}

#[tokio::test]
async fn leases_of_a_proxy_made_again_do_not_carry_over() {
    let world = World::start().await;
    world.directory.put(with("p1", &[]));
    let kept = world.lease("{}").await;
    let other = world.lease("{}").await;
    world.directory.put(ProxyRecord {
        uid: Uid::new("another"),
        ..with("p1", &[])
    });
    let json = world.get("/v1/proxies/default/p1").await.json();
    assert_eq!(json["activeLeases"], 0);
    world
        .get(&format!("/v1/leases/{kept}"))
        .await
        .refused(404, "unknown_lease");
    world
        .post(&format!("/v1/leases/{kept}/renew"), "{}")
        .await
        .refused(404, "unknown_lease");
    assert_eq!(world.store.active(), BTreeMap::new(), "{other} is left");
}

/// Deletion begins between the look at the directory and the grant.
#[tokio::test]
async fn no_lease_is_left_of_a_proxy_deleted_meanwhile() {
    struct Going(Arc<Fake>);
    impl Directory for Going {
        fn proxies(&self) -> Vec<Arc<ProxyRecord>> {
            let before = self.0.proxies();
            self.0.put(ProxyRecord {
                deleting: true,
                ..proxy("p1", 2)
            });
            before
        }
        fn get(&self, key: &ProxyKey) -> Option<Arc<ProxyRecord>> {
            self.0.get(key)
        }
        fn synced(&self) -> bool {
            true
        }
        fn not_ready_reason(&self) -> Option<String> {
            None
        }
        fn changes(&self) -> watch::Receiver<()> {
            self.0.changes()
        }
    }
    let world = World::start().await;
    world.directory.put(proxy("p1", 2));
    let config = loopback();
    let router = router(
        &config,
        Deps {
            directory: Arc::new(Going(world.directory.clone())),
            leases: world.store.clone(),
            default_ttl: Duration::from_secs(300),
            metrics: Metrics::default(),
            cancel: world.cancel.clone(),
        },
    )
    .unwrap();
    let bound = bind(&config).await.unwrap();
    let address = bound.local_addr().unwrap();
    tokio::spawn(serve(bound, router, world.cancel.clone()));
    let io = TcpStream::connect(address).await.unwrap();
    let reply = exchange(io, request(Method::POST, "/v1/leases", Some("{}"))).await;
    reply.refused(409, "no_match");
    assert_eq!(world.store.active(), BTreeMap::new());
}

/// A store whose grants wait for the test.
struct Gated {
    store: Arc<MemoryStore>,
    entered: tokio::sync::mpsc::UnboundedSender<()>,
    gate: Mutex<std::sync::mpsc::Receiver<()>>,
}

impl LeaseStore for Gated {
    fn acquire(
        &self,
        request: &AcquireRequest,
        candidates: &[ProxyRecord],
    ) -> Result<Acquired, AcquireError> {
        self.entered.send(()).unwrap();
        // Held until the grant: who waits longer is granted later.
        let gate = self.gate.lock().unwrap();
        gate.recv().unwrap();
        self.store.acquire(request, candidates)
    }
    fn get(&self, id: &LeaseId) -> Option<Lease> {
        self.store.get(id)
    }
    fn renew(&self, id: &LeaseId, ttl: Duration) -> Result<Lease, RenewError> {
        self.store.renew(id, ttl)
    }
    fn release(&self, id: &LeaseId) -> Result<(), StoreFailure> {
        self.store.release(id)?;
        self.entered.send(()).unwrap();
        Ok(())
    }
    fn report(&self, id: &LeaseId, report: Report, of: Option<Target>) -> Result<(), ReportError> {
        self.store.report(id, report, of)
    }
    fn end_for(&self, uid: &Uid) -> Result<usize, StoreFailure> {
        self.store.end_for(uid)
    }
    fn active(&self) -> BTreeMap<Uid, usize> {
        self.store.active()
    }
    fn sweep(&self) -> Result<(), StoreFailure> {
        self.store.sweep()
    }
    fn close(&self) {
        self.store.close();
    }
}

/// A client that goes away while its lease is being granted leaves none behind, unless it gave a
/// key to come back with.
#[tokio::test]
async fn a_lease_that_nobody_hears_of_is_released() {
    let world = World::start().await;
    world.directory.put(proxy("p1", 9));
    let (entered, mut events) = tokio::sync::mpsc::unbounded_channel();
    let (open, gate) = std::sync::mpsc::channel();
    let mut config = loopback();
    // The second connection is served when the first is over, its request included.
    config.limits.max_connections = 1;
    let deps = Deps {
        directory: world.directory.clone(),
        leases: Arc::new(Gated {
            store: world.store.clone(),
            entered,
            gate: Mutex::new(gate),
        }),
        default_ttl: Duration::from_secs(300),
        metrics: Metrics::default(),
        cancel: world.cancel.clone(),
    };
    let router = router(&config, deps).unwrap();
    let bound = bind(&config).await.unwrap();
    let address = bound.local_addr().unwrap();
    tokio::spawn(serve(bound, router, world.cancel.clone()));
    let connect = async || TcpStream::connect(address).await.unwrap();
    for (key, left) in [("", 0), ("idempotency-key: k\r\n", 1)] {
        let mut io = connect().await;
        let head = format!("POST /v1/leases HTTP/1.1\r\nhost: x\r\n{key}\r\n");
        tokio::io::AsyncWriteExt::write_all(&mut io, head.as_bytes())
            .await
            .unwrap();
        events.recv().await.unwrap();
        drop(io);
        let reply = exchange(connect().await, request(Method::GET, "/healthz", None)).await;
        assert_eq!(reply.body, "ok");
        open.send(()).unwrap();
        if left == 0 {
            tokio::time::timeout(PATIENCE, events.recv())
                .await
                .expect("it was not released");
            assert_eq!(world.store.active().values().sum::<usize>(), left);
        }
    }
    // The retry finds what the first try got.
    open.send(()).unwrap();
    let mut again = request(Method::POST, "/v1/leases", Some("{}"));
    let key = again.headers_mut();
    key.insert("idempotency-key", "k".parse().unwrap());
    let reply = exchange(connect().await, again).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    assert_eq!(world.store.active().values().sum::<usize>(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn twenty_clients_for_one_slot_have_one_winner() {
    let world = Arc::new(World::start().await);
    world.directory.put(proxy("only", 1));
    for _ in 0..5 {
        let calls: Vec<_> = (0..20)
            .map(|_| {
                let world = Arc::clone(&world);
                tokio::spawn(async move { world.post("/v1/leases", "{}").await })
            })
            .collect();
        let mut won = Vec::new();
        for call in calls {
            let reply = call.await.unwrap();
            if reply.status == 201 {
                won.push(reply.json()["leaseID"].as_str().unwrap().to_owned());
            } else {
                assert_eq!(reply.refused(409, "no_match")["atCapacity"], 1);
            }
        }
        assert_eq!(won.len(), 1);
        assert_eq!(
            world.delete(&format!("/v1/leases/{}", won[0])).await.status,
            204
        );
    }
}

#[tokio::test]
async fn a_stopping_operator_grants_nothing_and_takes_back() {
    let world = World::start().await;
    world.directory.put(proxy("p1", 2));
    let id = world.lease("{}").await;
    world.store.close();
    let reply = world.post("/v1/leases", "{}").await;
    reply.refused(503, "shutting_down");
    assert_eq!(world.delete(&format!("/v1/leases/{id}")).await.status, 204);
}

#[tokio::test]
async fn requests_are_counted_by_pattern() {
    let world = World::start().await;
    world.directory.put(proxy("p1", 2));
    world.lease("{}").await;
    for n in 0..3 {
        world.get(&format!("/v1/proxies/default/nobody-{n}")).await;
        world.get(&format!("/made/up/{n}")).await;
    }
    let text = world.scrape();
    for line in [
        r#"egress_api_requests_total{route="/v1/proxies/{namespace}/{name}",method="GET",status="404"} 3"#,
        r#"egress_api_requests_total{route="unmatched",method="GET",status="404"} 3"#,
        r#"egress_api_requests_total{route="/v1/leases",method="POST",status="201"} 1"#,
    ] {
        assert!(text.lines().any(|l| l == line), "no {line} in\n{text}");
    }
    assert!(!text.contains("nobody-1"), "{text}");
}

//! The operator as its service account on a real API server, with exactly the RBAC that is shipped.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use egress_kube_suite::client::{Client, Request};
use egress_kube_suite::daemon::Daemon;
use egress_kube_suite::{ApiServer, Target, enabled, programs};
use reqwest::Method;
use serde_json::{Value, json};

const NAMESPACE: &str = "egress-system";
const ACCOUNT: &str = "egress-proxies-operator";
const USER: &str = "system:serviceaccount:egress-system:egress-proxies-operator";
/// Generous: the machine may be busy with compilers.
const LIMIT: Duration = Duration::from_secs(60);

/// A real API server that writes down who asked what, and the shipped manifests on it.
struct Cluster {
    api: ApiServer,
    audit: PathBuf,
    _dir: tempfile::TempDir,
}

impl Cluster {
    async fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let policy = dir.path().join("audit.yaml");
        let audit = dir.path().join("audit.log");
        let rules = json!({
            "apiVersion": "audit.k8s.io/v1", "kind": "Policy",
            "omitStages": ["RequestReceived"], "rules": [{"level": "Metadata"}],
        });
        fs::write(&policy, rules.to_string()).unwrap();
        let programs = tokio::task::spawn_blocking(programs::ensure)
            .await
            .unwrap()
            .unwrap();
        let flags = [
            format!("--audit-policy-file={}", policy.display()),
            format!("--audit-log-path={}", audit.display()),
            "--audit-log-mode=blocking".to_owned(),
        ];
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let api = ApiServer::start_with(programs, &flags).await.unwrap();
        let base = deploy().join("base");
        let kubectl = &api.admin().kubectl;
        kubectl
            .ok(&["apply", "-k", base.to_str().unwrap()])
            .await
            .unwrap();
        kubectl
            .ok(&[
                "wait",
                "--for=condition=Established",
                "crd/proxies.crawl.example.com",
            ])
            .await
            .unwrap();
        Self {
            api,
            audit,
            _dir: dir,
        }
    }

    /// What the operator asked, as `verb resource`, with how often each answer came.
    fn asked(&self) -> BTreeMap<(String, u64), usize> {
        let mut asked = BTreeMap::new();
        for line in fs::read_to_string(&self.audit).unwrap_or_default().lines() {
            let entry: Value = serde_json::from_str(line).unwrap_or_default();
            if entry["user"]["username"] != USER {
                continue;
            }
            let object = &entry["objectRef"];
            let text = |key: &str| object[key].as_str().unwrap_or_default().to_owned();
            let mut resource = match text("apiGroup") {
                group if group.is_empty() => text("resource"),
                group => format!("{}.{group}", text("resource")),
            };
            if !text("subresource").is_empty() {
                resource = format!("{resource}/{}", text("subresource"));
            }
            let verb = entry["verb"].as_str().unwrap_or_default();
            let code = entry["responseStatus"]["code"].as_u64().unwrap_or_default();
            *asked
                .entry((format!("{verb} {resource}"), code))
                .or_default() += 1;
        }
        asked
    }

    /// The rights that the shipped role gives, in the same words.
    async fn granted(&self) -> BTreeSet<String> {
        let path = format!("/apis/rbac.authorization.k8s.io/v1/clusterroles/{ACCOUNT}");
        let role = self.api.admin().client.get(&path).await.unwrap().body;
        let list = |rule: &Value, key: &str| -> Vec<String> {
            rule[key]
                .as_array()
                .into_iter()
                .flatten()
                .map(|v| v.as_str().unwrap().to_owned())
                .collect()
        };
        let mut all = BTreeSet::new();
        for rule in role["rules"].as_array().unwrap() {
            for group in list(rule, "apiGroups") {
                for resource in list(rule, "resources") {
                    let (plural, sub) = resource.split_once('/').unwrap_or((&resource, ""));
                    let mut name = plural.to_owned();
                    if !group.is_empty() {
                        name = format!("{name}.{group}");
                    }
                    if !sub.is_empty() {
                        name = format!("{name}/{sub}");
                    }
                    all.extend(
                        list(rule, "verbs")
                            .iter()
                            .map(|verb| format!("{verb} {name}")),
                    );
                }
            }
        }
        all
    }

    /// Takes one verb out of the role, or gives it back.
    async fn set_verb(&self, resource: &str, verb: &str, allowed: bool) {
        let path = format!("/apis/rbac.authorization.k8s.io/v1/clusterroles/{ACCOUNT}");
        let mut role = self.api.admin().client.get(&path).await.unwrap().body;
        for rule in role["rules"].as_array_mut().unwrap() {
            if rule["resources"][0] == resource {
                let verbs = rule["verbs"].as_array_mut().unwrap();
                verbs.retain(|v| v != verb);
                if allowed {
                    verbs.push(json!(verb));
                }
            }
        }
        let request = Request::new(Method::PUT, path).json(&role);
        let answer = self.api.admin().client.send(request).await.unwrap();
        assert_eq!(answer.status, 200, "{answer:?}");
    }
}

/// The operator's process.
struct Operator {
    daemon: Daemon,
    http: reqwest::Client,
    url: String,
    _dir: tempfile::TempDir,
}

/// The arguments of the shipped Deployment, as they are.
fn shipped_arguments() -> Vec<String> {
    let file = deploy().join("base/deployment.yaml");
    let deployment: Value = serde_saphyr::from_str(&fs::read_to_string(file).unwrap()).unwrap();
    let args = &deployment["spec"]["template"]["spec"]["containers"][0]["args"];
    args.as_array()
        .unwrap()
        .iter()
        .map(|arg| arg.as_str().unwrap().to_owned())
        .collect()
}

fn deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/kubernetes")
}

impl Operator {
    /// With the arguments of the Deployment; only directories and addresses are this test's.
    fn start(account: &Target) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let providers = dir.path().join("providers.yaml");
        let config = json!({"providers": [{"name": "local", "type": "local", "local": {"allowTargets": ["127.0.0.0/8"]}}]});
        fs::write(&providers, config.to_string()).unwrap();
        let path = |name: &str| dir.path().join(name).display().to_string();
        let mut args: Vec<String> = shipped_arguments()
            .iter()
            .map(|arg| {
                let name = arg.split('=').next().unwrap();
                match name {
                    "--state-dir" => format!("{name}={}", path("state")),
                    "--runtime-dir" => format!("{name}={}", path("run")),
                    "--cache-dir" => format!("{name}={}", path("cache")),
                    "--providers-config" => format!("{name}={}", providers.display()),
                    "--discovery-addr" => format!("{name}={address}"),
                    "--metrics-addr" => format!("{name}=0"),
                    _ => arg.clone(),
                }
            })
            .collect();
        args.push(format!("--kubeconfig={}", account.kubeconfig.display()));
        let binary = egress_e2e::operator::binary().unwrap();
        let log = dir.path().join("operator.log");
        let daemon = Daemon::start("egress-proxies-operator", &binary, &args, log).unwrap();
        let http = reqwest::Client::builder().no_proxy().build().unwrap();
        Self {
            daemon,
            http,
            url: format!("http://{address}"),
            _dir: dir,
        }
    }

    async fn readiness(&self) -> (u16, String) {
        match self.http.get(format!("{}/readyz", self.url)).send().await {
            Ok(answer) => (
                answer.status().as_u16(),
                answer.text().await.unwrap_or_default(),
            ),
            Err(error) => (0, error.to_string()),
        }
    }

    async fn ready(&self) {
        let ready = || async { self.readiness().await.0 == 200 };
        self.daemon.wait_until(LIMIT, ready).await.unwrap();
    }

    async fn lease(&self) -> Value {
        let request = self.http.post(format!("{}/v1/leases", self.url)).body("{}");
        let answer = request
            .header("content-type", "application/json")
            .send()
            .await
            .unwrap();
        let status = answer.status();
        let text = answer.text().await.unwrap();
        assert_eq!(status, 201, "{text}");
        serde_json::from_str(&text).unwrap()
    }
}

/// Asks until the answer satisfies `wanted`.
async fn until(
    client: &Client,
    path: &str,
    operator: &Operator,
    wanted: impl Fn(u16, &Value) -> bool,
) -> Value {
    let start = Instant::now();
    loop {
        let answer = client.get(path).await.unwrap();
        if wanted(answer.status, &answer.body) {
            return answer.body;
        }
        assert!(
            start.elapsed() < LIMIT,
            "{path} is not what it should be: {}\n{}",
            answer.body,
            operator.daemon.log_tail()
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// A probe target: answers every request with 204.
async fn target() -> SocketAddr {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .await
        .unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut buffer = [0; 4096];
                while matches!(stream.read(&mut buffer).await, Ok(n) if n > 0) {
                    let answer = "HTTP/1.1 204 No Content\r\ncontent-length: 0\r\n\r\n";
                    if stream.write_all(answer.as_bytes()).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    address
}

fn ready(body: &Value) -> bool {
    body["status"]["conditions"].as_array().is_some_and(|all| {
        all.iter()
            .any(|c| c["type"] == "Ready" && c["status"] == "True")
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_whole_life_needs_exactly_the_shipped_rights() {
    if !enabled("a_whole_life_needs_exactly_the_shipped_rights") {
        return;
    }
    let cluster = Cluster::start().await;
    let admin = cluster.api.admin();
    let account = cluster
        .api
        .service_account(NAMESPACE, ACCOUNT)
        .await
        .unwrap();
    let operator = Operator::start(&account);
    operator.ready().await;

    let url = format!("http://{}/generate_204", target().await);
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret",
        "metadata": {"name": "user-data", "labels": {"crawl.example.com/cloud-init": "true"}},
        "stringData": {"user-data": "#cloud-config\n"},
    });
    let secrets = "/api/v1/namespaces/default/secrets";
    assert_eq!(
        admin.client.post(secrets, &secret).await.unwrap().status,
        201
    );
    let free = || {
        TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
            .unwrap()
            .local_addr()
            .unwrap()
            .port()
    };
    let proxy = json!({
        "apiVersion": "crawl.example.com/v1alpha1", "kind": "Proxy",
        "metadata": {"name": "life"},
        "spec": {
            "mode": "Managed", "provider": "local", "port": free(),
            "cloudInit": {"secretRef": {"name": "user-data"}},
            "healthCheck": {"url": url, "intervalSeconds": 1, "timeoutSeconds": 1},
        },
    });
    let proxies = "/apis/crawl.example.com/v1alpha1/namespaces/default/proxies";
    let path = format!("{proxies}/life");
    assert_eq!(
        admin.client.post(proxies, &proxy).await.unwrap().status,
        201
    );
    let first = until(&admin.client, &path, &operator, |_, body| ready(body)).await;
    let lease = operator.lease().await;
    assert_eq!(lease["proxy"]["id"], "default/life", "{lease}");

    // Another port: another instance, and Ready again.
    let hash =
        |body: &Value| body["metadata"]["annotations"]["crawl.example.com/spec-hash"].clone();
    let change = json!({"spec": {"port": free()}}).to_string();
    let request =
        Request::new(Method::PATCH, path.clone()).body("application/merge-patch+json", change);
    assert_eq!(admin.client.send(request).await.unwrap().status, 200);
    until(&admin.client, &path, &operator, |_, body| {
        hash(body) != hash(&first) && ready(body)
    })
    .await;

    // Somebody else's proxy that does not answer.
    let external = json!({
        "apiVersion": "crawl.example.com/v1alpha1", "kind": "Proxy", "metadata": {"name": "dead"},
        "spec": {"mode": "External", "endpoint": {"host": "127.0.0.1"}, "port": free(),
            "healthCheck": {"url": url, "intervalSeconds": 1, "timeoutSeconds": 1}},
    });
    assert_eq!(
        admin.client.post(proxies, &external).await.unwrap().status,
        201
    );
    let dead = format!("{proxies}/dead");
    until(&admin.client, &dead, &operator, |_, body| {
        body["status"]["phase"] == "Unhealthy"
    })
    .await;

    for path in [&path, &dead] {
        admin.client.delete(path).await.unwrap();
        until(&admin.client, path, &operator, |status, _| status == 404).await;
    }
    // Events tell of it.
    let events = "/apis/events.k8s.io/v1/namespaces/default/events";
    until(&admin.client, events, &operator, |_, body| {
        body["items"]
            .as_array()
            .is_some_and(|items| !items.is_empty())
    })
    .await;
    drop(operator);

    let asked = cluster.asked();
    let forbidden: Vec<_> = asked.iter().filter(|((_, code), _)| *code == 403).collect();
    assert!(forbidden.is_empty(), "forbidden calls: {forbidden:?}");
    let used: BTreeSet<String> = asked.keys().map(|(call, _)| call.clone()).collect();
    let idle: Vec<String> = cluster.granted().await.difference(&used).cloned().collect();
    assert!(
        idle.is_empty(),
        "granted and never used: {idle:?} (used: {used:?})"
    );
    println!("stage a whole life on {}: {asked:?}", cluster.api.version());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_missing_verb_is_named() {
    if !enabled("each_missing_verb_is_named") {
        return;
    }
    let cluster = Cluster::start().await;
    let account = cluster
        .api
        .service_account(NAMESPACE, ACCOUNT)
        .await
        .unwrap();
    for (resource, verb) in [
        ("proxies", "list"),
        ("proxies", "watch"),
        ("secrets", "list"),
        ("secrets", "watch"),
    ] {
        cluster.set_verb(resource, verb, false).await;
        let operator = Operator::start(&account);
        let named = || async {
            let (status, told) = operator.readiness().await;
            status == 503
                && told.contains(verb)
                && told.contains(resource)
                && told.contains("grant")
        };
        operator.daemon.wait_until(LIMIT, named).await.unwrap();
        // Given back, it recovers by itself.
        cluster.set_verb(resource, verb, true).await;
        operator.ready().await;
    }
}

#[test]
fn the_shipped_provider_files_are_good() {
    if !enabled("the_shipped_provider_files_are_good") {
        return;
    }
    let binary = egress_e2e::operator::binary().unwrap();
    for file in ["base/providers.yaml", "overlays/kvm/providers.yaml"] {
        let output = std::process::Command::new(&binary)
            .arg("check-config")
            .arg(deploy().join(file))
            .output()
            .unwrap();
        assert!(output.status.success(), "{file}: {output:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_api_server_that_is_away_is_waited_for() {
    if !enabled("an_api_server_that_is_away_is_waited_for") {
        return;
    }
    let mut cluster = Cluster::start().await;
    let account = cluster
        .api
        .service_account(NAMESPACE, ACCOUNT)
        .await
        .unwrap();
    let url = format!("http://{}/generate_204", target().await);
    let proxies = "/apis/crawl.example.com/v1alpha1/namespaces/default/proxies";
    let dead = |name: &str| {
        json!({
            "apiVersion": "crawl.example.com/v1alpha1", "kind": "Proxy", "metadata": {"name": name},
            "spec": {"mode": "External", "endpoint": {"host": "127.0.0.1"}, "port": 1,
                "healthCheck": {"url": url, "intervalSeconds": 1, "timeoutSeconds": 1}},
        })
    };
    let unhealthy = |_: u16, body: &Value| body["status"]["phase"] == "Unhealthy";

    // Refused at the start: it lives, says why, and is ready when the server comes.
    cluster.api.kill_server();
    let operator = Operator::start(&account);
    let says_why = || async {
        let (status, told) = operator.readiness().await;
        status == 503 && told.contains("cannot list")
    };
    operator.daemon.wait_until(LIMIT, says_why).await.unwrap();
    cluster.api.start_server().await.unwrap();
    operator.ready().await;

    // Killed while it is watched: what is made after it came back is seen.
    let client = cluster.api.admin().client.clone();
    assert_eq!(
        client.post(proxies, &dead("before")).await.unwrap().status,
        201
    );
    until(&client, &format!("{proxies}/before"), &operator, unhealthy).await;
    cluster.api.kill_server();
    cluster.api.start_server().await.unwrap();
    assert_eq!(
        client.post(proxies, &dead("after")).await.unwrap().status,
        201
    );
    until(&client, &format!("{proxies}/after"), &operator, unhealthy).await;
    operator.ready().await;

    // And no tight loop: a handful of lists and watches for two starts and one cut.
    let asked = cluster.asked();
    for verb in ["list", "watch"] {
        let calls: usize = asked
            .iter()
            .filter(|((call, _), _)| call.starts_with(verb))
            .map(|(_, count)| count)
            .sum();
        assert!(calls < 20, "{calls} calls to {verb}: {asked:?}");
    }
}

/// Resident memory in MiB: now, and the peak since it was last reset.
fn memory(pid: u32) -> (u64, u64) {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let mib = |field: &str| {
        let line = status.lines().find(|line| line.starts_with(field)).unwrap();
        line.split_whitespace()
            .nth(1)
            .unwrap()
            .parse::<u64>()
            .unwrap()
            / 1024
    };
    (mib("VmRSS:"), mib("VmHWM:"))
}

fn reset_peak(pid: u32) {
    // 5: the peak becomes what is resident now (proc(5)).
    fs::write(format!("/proc/{pid}/clear_refs"), "5").unwrap();
}

/// A benchmark: `EGRESS_BENCH=1` beside the tier's variable.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_proxies_are_held_in_bounded_memory() {
    const COUNT: usize = 10_000;
    if !enabled("ten_thousand_proxies_are_held_in_bounded_memory") {
        return;
    }
    if std::env::var_os("EGRESS_BENCH").is_none_or(|value| value != "1") {
        println!(
            "skipped: ten_thousand_proxies_are_held_in_bounded_memory: a benchmark of some minutes; set EGRESS_BENCH=1"
        );
        return;
    }
    use futures::StreamExt as _;
    let mut cluster = Cluster::start().await;
    let account = cluster
        .api
        .service_account(NAMESPACE, ACCOUNT)
        .await
        .unwrap();
    let proxies = "/apis/crawl.example.com/v1alpha1/namespaces/default/proxies";
    let client = cluster.api.admin().client.clone();
    let made = futures::stream::iter(0..COUNT)
        .map(|n| {
            let client = client.clone();
            async move {
                // Probed once a day: the matter here is memory.
                let body = json!({
                    "apiVersion": "crawl.example.com/v1alpha1", "kind": "Proxy",
                    "metadata": {"name": format!("p{n:05}")},
                    "spec": {"mode": "External", "endpoint": {"host": "127.0.0.1"}, "port": 1,
                        "attributes": {"geo": "de", "n": n.to_string()},
                        "healthCheck": {"url": "http://127.0.0.1:1/", "intervalSeconds": 86400}},
                });
                client.post(proxies, &body).await.unwrap().status
            }
        })
        .buffer_unordered(32)
        .filter(|status| futures::future::ready(*status == 201))
        .count()
        .await;
    assert_eq!(made, COUNT);

    let operator = Operator::start(&account);
    let pid = operator.daemon.pid();
    let start = Instant::now();
    let ready = || async { operator.readiness().await.0 == 200 };
    operator
        .daemon
        .wait_until(Duration::from_secs(300), ready)
        .await
        .unwrap();
    let synced = start.elapsed();
    // Every status is written once; then nothing moves any more.
    let patches = |cluster: &Cluster| -> usize {
        let asked = cluster.asked();
        asked
            .iter()
            .filter(|((call, _), _)| call.starts_with("patch"))
            .map(|(_, n)| n)
            .sum()
    };
    let mut before = 0;
    loop {
        tokio::time::sleep(Duration::from_secs(5)).await;
        let now = patches(&cluster);
        if now == before && now >= COUNT {
            break;
        }
        assert!(
            start.elapsed() < Duration::from_secs(600),
            "only {now} statuses are written"
        );
        before = now;
    }
    let settled = start.elapsed();
    let (steady, peak) = memory(pid);
    // All of it again, after the server has forgotten where the watch was.
    reset_peak(pid);
    let relists = |cluster: &Cluster| -> usize {
        let asked = cluster.asked();
        asked
            .iter()
            .filter(|((call, _), _)| call == "list proxies.crawl.example.com")
            .map(|(_, n)| n)
            .sum()
    };
    let lists = relists(&cluster);
    cluster.api.kill_server();
    cluster.api.compact().await.unwrap();
    cluster.api.start_server().await.unwrap();
    // (The sweep lists too, but only every five minutes.)
    let again = || async { relists(&cluster) >= lists + COUNT / 500 };
    operator
        .daemon
        .wait_until(Duration::from_secs(180), again)
        .await
        .unwrap();
    operator.ready().await;
    let (after, relist_peak) = memory(pid);
    println!(
        "stage 10000 External proxies: synced in {:.1} s, all statuses written after {:.0} s; {steady} MiB steady (peak {peak} MiB), relist peak {relist_peak} MiB, {after} MiB after",
        synced.as_secs_f32(),
        settled.as_secs_f32()
    );
    assert!(steady < 200, "{steady} MiB");
    assert!(
        relist_peak < 2 * steady,
        "{relist_peak} MiB against {steady} MiB"
    );
}

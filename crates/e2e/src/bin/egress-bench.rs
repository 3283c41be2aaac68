//! What `cargo xtask bench` runs: figures of the operator as a user's machine would see them.
//! Nothing here passes or fails; quote medians, and only from a machine that does nothing else.

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use egress_e2e::http::Endpoint;
use egress_e2e::operator::{binary, resident_kib};
use egress_e2e::process::{Process, Seen, until};
use serde_json::json;
use tokio::process::Command;

const RUNS: usize = 11;
const PATIENCE: Duration = Duration::from_secs(30);

#[tokio::main]
async fn main() -> ExitCode {
    let filter = std::env::args().nth(1).unwrap_or_default();
    match run(&filter).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(filter: &str) -> Result<()> {
    println!(
        "{:<52} {:>10} {:>10} {:>10}",
        "figure", "min", "median", "max"
    );
    if "start".contains(filter) {
        start().await?;
    }
    if "lease".contains(filter) {
        leases().await?;
    }
    Ok(())
}

fn row(name: &str, unit: &str, mut values: Vec<f64>) {
    values.sort_by(f64::total_cmp);
    let at = |i: usize| values.get(i).copied().unwrap_or(f64::NAN);
    let show = |v: f64| format!("{v:.1} {unit}");
    println!(
        "{name:<52} {:>10} {:>10} {:>10}",
        show(at(0)),
        show(at(values.len() / 2)),
        show(at(values.len().saturating_sub(1)))
    );
}

struct Running {
    process: Process,
    discovery: Endpoint,
    api: Endpoint,
    started: Duration,
}

async fn operator(dir: &Path) -> Result<Running> {
    let discovery = dir.join("discovery.sock");
    let api = dir.join("api.sock");
    let providers = dir.join("providers.yaml");
    std::fs::write(
        &providers,
        "providers: [{name: local, type: local, local: {stopOnExit: true}}]",
    )?;
    let mut command = Command::new(binary()?);
    command
        .args([
            "--control-plane",
            "embedded",
            "--api-addr",
            "127.0.0.1:0",
            "--log",
            "error",
        ])
        .arg("--state-dir")
        .arg(dir.join("state"))
        .arg("--api-socket")
        .arg(&api)
        .arg("--providers-config")
        .arg(&providers)
        .arg("--discovery-addr")
        .arg(format!("unix:{}", discovery.display()));
    let begin = Instant::now();
    let mut process = Process::spawn("operator", &mut command, &dir.join("log"))?;
    let discovery = Endpoint::Unix(discovery);
    // Finer than the harness's own waiting: what is measured is tens of milliseconds.
    while !matches!(discovery.request("GET", "/readyz", None).await, Ok(a) if a.status == 200) {
        process.check_alive()?;
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    Ok(Running {
        process,
        discovery,
        api: Endpoint::Unix(api),
        started: begin.elapsed(),
    })
}

async fn start() -> Result<()> {
    let (mut empty, mut again, mut memory) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..RUNS {
        let dir = tempfile::tempdir()?;
        let first = operator(dir.path()).await?;
        empty.push(first.started.as_secs_f64() * 1e3);
        tokio::time::sleep(Duration::from_secs(1)).await;
        let pid = first.process.pid().as_raw_nonzero().get();
        memory.push(f64::from(u32::try_from(resident_kib(pid)?)?) / 1024.0);
        first.process.stop().await?;
        let second = operator(dir.path()).await?;
        again.push(second.started.as_secs_f64() * 1e3);
        second.process.stop().await?;
    }
    row("start to ready, empty state", "ms", empty);
    row("start to ready, state of an earlier run", "ms", again);
    row("resident memory, idle", "MiB", memory);
    Ok(())
}

/// Durable acquires and releases, one after the other and 16 at a time.
async fn leases() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let running = operator(dir.path()).await?;
    let target = egress_e2e::mirror::Mirror::start().await?;
    let url = target.url("anything");
    let object = json!({
        "apiVersion": "crawl.example.com/v1alpha1", "kind": "Proxy",
        "metadata": {"name": "p1", "namespace": "default"},
        "spec": {"mode": "Managed", "provider": "local", "maxLeases": 100_000,
                 "healthCheck": {"url": url, "expectedStatus": 404}},
    });
    let path = "/apis/crawl.example.com/v1alpha1/namespaces/default/proxies";
    running
        .api
        .request("POST", path, Some(&object))
        .await?
        .success()?;
    let loopback = json!({"providers": [{"name": "local", "type": "local",
        "local": {"stopOnExit": true, "allowTargets": ["127.0.0.0/8"]}}]});
    std::fs::write(dir.path().join("providers.yaml"), loopback.to_string())?;
    until("a proxy can be leased", PATIENCE, async || {
        let list = running
            .discovery
            .request("GET", "/v1/proxies?healthy=true", None)
            .await?
            .json()?;
        Ok(if list["count"] == 1 {
            Seen::There(())
        } else {
            Seen::not_yet(list)
        })
    })
    .await?;
    for parallel in [1_usize, 16] {
        let mut rates = Vec::new();
        for _ in 0..RUNS {
            let begin = Instant::now();
            let each = 320 / parallel;
            let clients = (0..parallel).map(|_| async {
                for _ in 0..each {
                    running
                        .discovery
                        .request("POST", "/v1/leases", Some(&json!({})))
                        .await?
                        .success()
                        .context("an acquire")?;
                }
                Ok::<_, anyhow::Error>(())
            });
            futures::future::try_join_all(clients).await?;
            rates.push(320.0 / begin.elapsed().as_secs_f64());
        }
        row(
            &format!("durable acquires, {parallel} client(s)"),
            "/s",
            rates,
        );
    }
    running.process.stop().await?;
    Ok(())
}

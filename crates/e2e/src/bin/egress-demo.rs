//! The main job, end to end, on this machine: what `cargo xtask demo` runs.
//!
//! Starts `egress-proxies-operator dev` and a TLS target of its own, applies two Proxies, waits for
//! them, leases one, sends a real CONNECT request through it, reports a ban, shows that the next
//! lease takes the other, deletes them, and prints a table of the steps. Nothing is left running,
//! also when it is interrupted.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use egress_e2e::lab::{self, Guest, Lab};
use egress_e2e::targets::TlsTarget;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, ChildStdout, Command};
use tokio::signal::unix::{SignalKind, signal};

const DISCOVERY: &str = "127.0.0.1:8090";
/// For each step that waits for the operator.
const PATIENCE: Duration = Duration::from_secs(60);
/// A guest under software emulation, on a busy machine.
const BOOT: Duration = Duration::from_secs(240);

fn main() -> ExitCode {
    // Whoever is first to make a TLS client chooses the crypto provider for all.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    // Inside its own lab this program is started again, with the lab's arguments.
    let result = if lab::is_inside() || arguments == ["--kvm"] {
        kvm()
    } else if arguments.is_empty() {
        tokio::runtime::Runtime::new()
            .map_err(Into::into)
            .and_then(|rt| rt.block_on(local()))
    } else {
        Err(anyhow::anyhow!(
            "unknown arguments {arguments:?}: there is only --kvm"
        ))
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The same with VMs: libvirtd, sshd, an image mirror, the target and the operator all run in a
/// network namespace of their own, which goes with this program.
fn kvm() -> Result<()> {
    lab::run(&[Guest::Light], async |lab: &Lab| {
        let mut table = Table::default();
        let mut begin = Instant::now();
        let mut done = |table: &mut Table, step: &str, told: String| {
            table.0.push((step.to_owned(), begin.elapsed(), told));
            begin = Instant::now();
        };
        let site = lab.mk_site().await?;
        done(
            &mut table,
            "start libvirtd, sshd and an image mirror",
            "all in one namespace".to_owned(),
        );
        let operator = site.mk_operator(lab).await?;
        done(
            &mut table,
            "start the operator",
            "it reaches libvirt through SSH".to_owned(),
        );
        operator
            .apply(
                &site
                    .mk_proxy("demo-1")
                    .with("/attributes", json!({"geo": "demo"})),
            )
            .await?;
        operator
            .apply(
                &site
                    .mk_proxy("demo-2")
                    .with("/attributes", json!({"geo": "demo"})),
            )
            .await?;
        let first = operator.ready("demo-1", BOOT).await?;
        let second = operator.ready("demo-2", BOOT).await?;
        let told = format!("{first} and {second}, one image fetched");
        done(
            &mut table,
            "apply two Proxies: fetch, boot, probe, Ready",
            told,
        );
        let lease = operator.lease("shop.example").await?;
        done(
            &mut table,
            "lease one for target shop.example",
            lease["proxy"]["id"].to_string(),
        );
        let leased = address(&lease)?;
        site.crawl_through(leased).await?;
        done(
            &mut table,
            "a TLS request through it (CONNECT)",
            format!("through {leased}"),
        );
        let id = lease["leaseID"].as_str().context("no leaseID")?;
        let report = format!("/v1/leases/{id}/report");
        operator
            .discovery("POST", &report, Some(&json!({"result": "banned"})))
            .await?
            .success()?;
        done(
            &mut table,
            "report it as banned",
            "it rests for shop.example".to_owned(),
        );
        let other = operator.lease("shop.example").await?;
        ensure!(
            other["proxy"]["id"] != lease["proxy"]["id"],
            "the banned proxy was leased"
        );
        done(
            &mut table,
            "the next lease takes the other",
            other["proxy"]["id"].to_string(),
        );
        for name in ["demo-1", "demo-2"] {
            operator.delete(name).await?;
        }
        for name in ["demo-1", "demo-2"] {
            operator.gone(name, PATIENCE).await?;
        }
        site.check_clean().await?;
        done(
            &mut table,
            "delete both",
            "the host keeps the base image, nothing else".to_owned(),
        );
        table.print();
        Ok(())
    })
}

async fn local() -> Result<()> {
    let (mut interrupt, mut terminate) = (
        signal(SignalKind::interrupt())?,
        signal(SignalKind::terminate())?,
    );
    let mut demo = Demo::start().await?;
    let result = tokio::select! {
        result = demo.steps() => result,
        _ = interrupt.recv() => Err(anyhow::anyhow!("interrupted")),
        _ = terminate.recv() => Err(anyhow::anyhow!("terminated")),
    };
    let stopped = demo.stop().await;
    demo.table.print();
    result.and(stopped)
}

#[derive(Default)]
struct Table(Vec<(String, Duration, String)>);

impl Table {
    fn print(&self) {
        println!("\n{:<44} {:>9}  result", "step", "time");
        for (step, time, result) in &self.0 {
            println!("{step:<44} {:>7} ms  {result}", time.as_millis());
        }
        let total: Duration = self.0.iter().map(|(_, time, _)| *time).sum();
        println!("{:<44} {:>7} ms", "in all", total.as_millis());
    }
}

struct Demo {
    table: Table,
    operator: Child,
    kubeconfig: PathBuf,
    target: TlsTarget,
    dir: tempfile::TempDir,
    http: reqwest::Client,
    binary: PathBuf,
    _output: BufReader<ChildStdout>,
}

impl Demo {
    async fn start() -> Result<Self> {
        let binary = operator_binary()?;
        let dir = tempfile::tempdir().context("cannot make a temporary directory")?;
        let mut table = Table::default();
        let target = TlsTarget::start(
            IpAddr::V4(Ipv4Addr::LOCALHOST),
            &["localhost", "127.0.0.1"],
            204,
            dir.path(),
        )
        .await?;
        let begin = Instant::now();
        let mut command = Command::new(&binary);
        command
            .args([
                "dev",
                "--log",
                "warn",
                "--discovery-addr",
                DISCOVERY,
                "--health-ca",
            ])
            .arg(target.authority_file())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            // Ctrl-C reaches the whole foreground group; this program decides when dev ends.
            .process_group(0)
            .kill_on_drop(true);
        let mut operator = command
            .spawn()
            .with_context(|| format!("cannot start {}", binary.display()))?;
        let stdout = operator.stdout.take().context("dev has no output")?;
        let mut output = BufReader::new(stdout);
        let kubeconfig = match wait_ready(&mut output).await {
            Ok(path) => path,
            Err(error) => {
                let status = tokio::time::timeout(Duration::from_secs(10), operator.wait()).await;
                bail!("egress-proxies-operator dev did not start ({status:?}): {error:#}");
            }
        };
        table.0.push((
            "start the operator (dev)".to_owned(),
            begin.elapsed(),
            format!("API and discovery serve, {DISCOVERY}"),
        ));
        let http = reqwest::Client::builder()
            .no_proxy()
            .timeout(PATIENCE)
            .build()?;
        Ok(Self {
            table,
            operator,
            kubeconfig,
            target,
            dir,
            http,
            binary,
            _output: output,
        })
    }

    async fn steps(&mut self) -> Result<()> {
        let manifest = self.dir.path().join("proxies.yaml");
        std::fs::write(&manifest, self.manifest())?;
        let client = if has_kubectl().await {
            "kubectl"
        } else {
            "the operator's own client"
        };
        self.step(&format!("apply two Proxies ({client})"), async |demo| {
            demo.control(&["apply", "-f", path(&manifest)?]).await?;
            Ok("demo-1, demo-2".to_owned())
        })
        .await?;
        self.step("both are Ready", async |demo| {
            demo.wait_ready("demo-1").await?;
            demo.wait_ready("demo-2").await?;
            let list = demo.get("/v1/proxies?healthy=true").await?;
            ensure!(list["count"] == 2, "two healthy proxies expected: {list}");
            Ok(format!(
                "{} and {}",
                list["proxies"][0]["url"], list["proxies"][1]["url"]
            ))
        })
        .await?;
        let mut first = Value::Null;
        self.step("lease one for target shop.example", async |demo| {
            first = demo.lease().await?;
            Ok(format!(
                "{} until {}",
                first["proxy"]["id"], first["expiresAt"]
            ))
        })
        .await?;
        self.step("a TLS request through it (CONNECT)", async |demo| {
            let proxy = address(&first)?;
            let before = demo.target.hits();
            let status = demo.target.get_through(proxy, "localhost", "/").await?;
            ensure!(
                status == 204 && demo.target.hits() > before,
                "the target answered {status}"
            );
            Ok(format!("{status} from the target, through {proxy}"))
        })
        .await?;
        self.step("report it as banned", async |demo| {
            let id = first["leaseID"].as_str().context("no leaseID")?;
            let answer = demo
                .http
                .post(format!("http://{DISCOVERY}/v1/leases/{id}/report"))
                .json(&json!({"result": "banned"}))
                .send()
                .await?;
            ensure!(
                answer.status() == 204,
                "report answered {}",
                answer.status()
            );
            Ok("it rests for shop.example".to_owned())
        })
        .await?;
        self.step("the next lease takes the other", async |demo| {
            let second = demo.lease().await?;
            ensure!(
                second["proxy"]["id"] != first["proxy"]["id"],
                "the banned proxy was leased"
            );
            Ok(second["proxy"]["id"].to_string())
        })
        .await?;
        self.step("delete both", async |demo| {
            demo.delete(&["demo-1", "demo-2"]).await?;
            let list = demo.get("/v1/proxies").await?;
            ensure!(list["count"] == 0, "still listed: {list}");
            Ok("gone, and their processes".to_owned())
        })
        .await
    }

    async fn step(
        &mut self,
        name: &str,
        work: impl AsyncFnOnce(&mut Self) -> Result<String>,
    ) -> Result<()> {
        let begin = Instant::now();
        let result = work(self).await;
        let told = match &result {
            Ok(text) => text.replace('"', ""),
            Err(_) => "FAILED".to_owned(),
        };
        self.table.0.push((name.to_owned(), begin.elapsed(), told));
        result.map(drop).with_context(|| name.to_owned())
    }

    fn manifest(&self) -> String {
        let port = self.target.port();
        ["demo-1", "demo-2"]
            .map(|name| {
                format!(
                    "---
apiVersion: crawl.example.com/v1alpha1
kind: Proxy
metadata:
  name: {name}
spec:
  mode: Managed
  provider: local
  attributes: {{geo: demo}}
  healthCheck:
    url: https://localhost:{port}/
    intervalSeconds: 2
    timeoutSeconds: 2
"
                )
            })
            .concat()
    }

    /// kubectl, or the operator's own client where there is none.
    async fn control(&self, arguments: &[&str]) -> Result<String> {
        let mut command = if has_kubectl().await {
            Command::new("kubectl")
        } else {
            let mut own = Command::new(&self.binary);
            own.arg("client");
            own
        };
        let output = command
            .args(arguments)
            .env("KUBECONFIG", &self.kubeconfig)
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .output()
            .await
            .context("cannot run the client")?;
        if !output.status.success() {
            bail!(
                "{} failed: {}",
                arguments.join(" "),
                String::from_utf8_lossy(&output.stderr)
            );
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    async fn wait_ready(&self, name: &str) -> Result<()> {
        if has_kubectl().await {
            let resource = format!("px/{name}");
            self.control(&["wait", "--for=condition=Ready", &resource, "--timeout=60s"])
                .await?;
        } else {
            self.control(&["wait", name, "--timeout", "60s"]).await?;
        }
        Ok(())
    }

    async fn delete(&self, names: &[&str]) -> Result<()> {
        if has_kubectl().await {
            let mut arguments = vec!["delete", "px", "--timeout=60s"];
            arguments.extend(names);
            self.control(&arguments).await?;
        } else {
            for name in names {
                self.control(&["delete", name]).await?;
            }
        }
        Ok(())
    }

    async fn get(&self, path: &str) -> Result<Value> {
        let answer = self
            .http
            .get(format!("http://{DISCOVERY}{path}"))
            .send()
            .await?;
        Ok(serde_json::from_slice(&answer.bytes().await?)?)
    }

    async fn lease(&self) -> Result<Value> {
        let answer = self
            .http
            .post(format!("http://{DISCOVERY}/v1/leases"))
            .json(&json!({"selector": {"geo": "demo"}, "ttlSeconds": 60, "target": "shop.example"}))
            .send()
            .await?;
        let status = answer.status();
        let body: Value = serde_json::from_slice(&answer.bytes().await?)?;
        ensure!(status == 201, "the lease was refused: {status} {body}");
        Ok(body)
    }

    /// Ends `dev` and waits until it is gone.
    async fn stop(&mut self) -> Result<()> {
        let begin = Instant::now();
        if let Some(pid) = self.operator.id().and_then(|id| i32::try_from(id).ok())
            && let Some(pid) = rustix::process::Pid::from_raw(pid)
        {
            // It may have ended by itself: then there is only the status to read.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let status = tokio::time::timeout(Duration::from_secs(15), self.operator.wait())
            .await
            .context("the operator did not end within 15 s")??;
        self.table.0.push((
            "stop the operator".to_owned(),
            begin.elapsed(),
            status.to_string(),
        ));
        ensure!(status.success(), "the operator ended with {status}");
        Ok(())
    }
}

async fn wait_ready(output: &mut BufReader<ChildStdout>) -> Result<PathBuf> {
    let mut kubeconfig = None;
    let read = async {
        let mut line = String::new();
        loop {
            line.clear();
            if output.read_line(&mut line).await? == 0 {
                bail!("it ended; its messages are above");
            }
            if let Some(path) = line.trim().strip_prefix("export KUBECONFIG=") {
                kubeconfig = Some(PathBuf::from(path));
            }
            if line.starts_with("Ctrl-C ends it") {
                return kubeconfig
                    .take()
                    .context("it did not say where the kubeconfig is");
            }
        }
    };
    tokio::time::timeout(PATIENCE, read)
        .await
        .context("it was not ready within a minute")?
}

async fn has_kubectl() -> bool {
    static FOUND: tokio::sync::OnceCell<bool> = tokio::sync::OnceCell::const_new();
    *FOUND
        .get_or_init(|| async {
            Command::new("kubectl")
                .args(["version", "--client"])
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .status()
                .await
                .is_ok_and(|status| status.success())
        })
        .await
}

fn operator_binary() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("EGRESS_OPERATOR_BIN") {
        return Ok(path.into());
    }
    let own = std::env::current_exe()?;
    let beside = own.with_file_name("egress-proxies-operator");
    ensure!(
        beside.exists(),
        "{} is not built: use cargo xtask demo",
        beside.display()
    );
    Ok(beside)
}

fn path(path: &Path) -> Result<&str> {
    path.to_str().context("a path that is not UTF-8")
}

fn address(lease: &Value) -> Result<SocketAddr> {
    let ip: IpAddr = lease["proxy"]["ip"].as_str().context("no ip")?.parse()?;
    let port = lease["proxy"]["port"]
        .as_u64()
        .and_then(|p| u16::try_from(p).ok());
    Ok(SocketAddr::new(ip, port.context("no port")?))
}

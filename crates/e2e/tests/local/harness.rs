//! One operator with state of its own, reached over unix sockets only: tests run side by side.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use egress_e2e::http::{Answer, Endpoint};
use egress_e2e::operator::{binary, condition, conditions};
use egress_e2e::process::{Process, Seen, tail, until};
use egress_e2e::targets::TlsTarget;
use serde_json::{Value, json};
use tokio::process::Command;

pub const PATIENCE: Duration = Duration::from_secs(60);
const PROXIES: &str = "/apis/crawl.example.com/v1alpha1/namespaces/default/proxies";

pub struct Local {
    pub dir: tempfile::TempDir,
    pub target: TlsTarget,
    process: Option<Process>,
}

impl Local {
    /// Started and ready. The proxies end with the operator only when `stop_on_exit` says so.
    pub async fn start(stop_on_exit: bool) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("egress-local-").tempdir()?;
        let ip = std::net::Ipv4Addr::LOCALHOST.into();
        let target = TlsTarget::start(ip, &["localhost"], 204, dir.path()).await?;
        let providers = json!({"providers": [{
            "name": "local",
            "type": "local",
            "local": {"stopOnExit": stop_on_exit, "allowTargets": ["127.0.0.0/8"]},
        }]});
        fs::write(dir.path().join("providers.yaml"), providers.to_string())?;
        let mut local = Self {
            dir,
            target,
            process: None,
        };
        local.run().await?;
        Ok(local)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Starts the operator (again) and waits until it is ready.
    pub async fn run(&mut self) -> Result<()> {
        ensure!(self.process.is_none(), "it runs already");
        let mut command = Command::new(binary()?);
        command
            .args(["--control-plane", "embedded", "--api-addr", "127.0.0.1:0"])
            .args(["--log", "info", "--state-dir"])
            .arg(self.path("state"))
            .arg("--api-socket")
            .arg(self.path("api.sock"))
            .arg("--providers-config")
            .arg(self.path("providers.yaml"))
            .arg("--discovery-addr")
            .arg(format!("unix:{}", self.path("discovery.sock").display()))
            .arg("--health-ca")
            .arg(self.target.authority_file());
        let mut process = Process::spawn("operator", &mut command, &self.path("log"))?;
        until("the operator is ready", PATIENCE, async || {
            process.check_alive()?;
            Ok(match self.discovery("GET", "/readyz", None).await {
                Ok(Answer { status: 200, .. }) => Seen::There(()),
                Ok(answer) => Seen::not_yet(answer.text()),
                Err(error) => Seen::not_yet(format!("{error:#}")),
            })
        })
        .await?;
        self.process = Some(process);
        Ok(())
    }

    pub async fn kill(&mut self) -> Result<()> {
        self.process.take().context("it does not run")?.kill().await
    }

    pub async fn stop(&mut self) -> Result<()> {
        let status = self
            .process
            .take()
            .context("it does not run")?
            .stop()
            .await?;
        ensure!(
            status.success(),
            "the operator ended with {status}:\n{}",
            self.log()
        );
        Ok(())
    }

    pub fn log(&self) -> String {
        tail(
            &fs::read_to_string(self.path("log")).unwrap_or_default(),
            25,
        )
    }

    pub async fn api(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Answer> {
        Endpoint::Unix(self.path("api.sock"))
            .request(method, path, body)
            .await
    }

    pub async fn discovery(
        &self,
        method: &str,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Answer> {
        Endpoint::Unix(self.path("discovery.sock"))
            .request(method, path, body)
            .await
    }

    /// A Managed proxy that is probed with this test's own target.
    pub async fn create(&self, name: &str, interval: u32) -> Result<()> {
        let object = json!({
            "apiVersion": "crawl.example.com/v1alpha1",
            "kind": "Proxy",
            "metadata": {"name": name, "namespace": "default"},
            "spec": {
                "mode": "Managed",
                "provider": "local",
                "healthCheck": {
                    "url": format!("https://localhost:{}/", self.target.port()),
                    "intervalSeconds": interval,
                    "timeoutSeconds": interval.min(5),
                },
            },
        });
        self.api("POST", PROXIES, Some(&object))
            .await?
            .success()
            .map(drop)
    }

    pub async fn proxies(&self) -> Result<Value> {
        self.api("GET", PROXIES, None).await?.success()
    }

    pub async fn delete(&self, name: &str) -> Result<()> {
        self.api("DELETE", &format!("{PROXIES}/{name}"), None)
            .await?
            .success()
            .map(drop)
    }

    /// Waits until `count` Proxies are there and all are Ready.
    pub async fn all_ready(&self, count: usize) -> Result<()> {
        let what = format!("{count} Proxies are Ready");
        let waited = until(&what, PATIENCE, async || {
            let list = self.proxies().await?;
            let items = list["items"].as_array().context("no items")?;
            let ready = |p: &&Value| condition(p, "Ready").is_some_and(|c| c["status"] == "True");
            let done = items.iter().filter(ready).count();
            if done == count && items.len() == count {
                return Ok(Seen::There(()));
            }
            let other = items
                .iter()
                .find(|p| !ready(p))
                .map(conditions)
                .unwrap_or_default();
            Ok(Seen::not_yet(format!("{done} of {}; {other}", items.len())))
        });
        waited.await.with_context(|| self.log())
    }

    pub async fn lease(&self, target: &str) -> Result<Value> {
        let body = json!({"target": target, "ttlSeconds": 600});
        self.discovery("POST", "/v1/leases", Some(&body))
            .await?
            .success()
    }

    /// The running proxies that this operator's local provider started.
    pub fn processes(&self) -> Vec<i32> {
        processes_of(self.dir.path())
    }
}

impl Drop for Local {
    /// A failed test leaves no process behind.
    fn drop(&mut self) {
        for pid in processes_of(self.dir.path()) {
            signal(pid, rustix::process::Signal::KILL);
        }
        if let Some(pid) = self
            .process
            .as_ref()
            .map(|p| p.pid().as_raw_nonzero().get())
        {
            signal(pid, rustix::process::Signal::KILL);
        }
    }
}

pub fn signal(pid: i32, signal: rustix::process::Signal) {
    if let Some(pid) = rustix::process::Pid::from_raw(pid) {
        // It may have ended by itself.
        let _ = rustix::process::kill_process(pid, signal);
    }
}

/// Forward proxies that hold a file below `dir` open: each holds its instance's lock.
pub fn processes_of(dir: &Path) -> Vec<i32> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry
            .file_name()
            .to_str()
            .and_then(|n| n.parse::<i32>().ok())
        else {
            continue;
        };
        let arguments = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        if !arguments.split(|b| *b == 0).any(|a| a == b"forward-proxy") {
            continue;
        }
        let ours = fs::read_dir(entry.path().join("fd"))
            .into_iter()
            .flatten()
            .flatten()
            .any(|fd| fs::read_link(fd.path()).is_ok_and(|to| to.starts_with(dir)));
        if ours {
            found.push(pid);
        }
    }
    found
}

/// Runs the operator with these arguments until it ends; its exit code, output and errors.
pub async fn operator(arguments: &[&str]) -> Result<(i32, String, String)> {
    let mut command = Command::new(binary()?);
    command
        .args(arguments)
        .env_remove("DISCOVERY_TOKEN")
        .env_remove("KUBECONFIG");
    let output = egress_e2e::exec::output_within(&mut command, PATIENCE).await?;
    let Some(code) = output.status.code() else {
        bail!("ended by a signal")
    };
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    Ok((code, text(output.stdout), text(output.stderr)))
}

//! The operator itself, as a process of the lab.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use serde_json::{Value, json};
use tokio::process::Command;

use crate::exec;
use crate::http::{Answer, Endpoint};
use crate::lab::Lab;
use crate::process::{Process, Seen, tail, until};

/// Overrides which binary runs.
const BINARY: &str = "EGRESS_OPERATOR_BIN";
const NAME: &str = "egress-proxies-operator";
const START: Duration = Duration::from_secs(30);
const PROXIES: &str = "/apis/crawl.example.com/v1alpha1/namespaces/default/proxies";
/// Fixed, since nobody else is in the lab.
const DISCOVERY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 8090);

/// The operator with its state; it may be stopped and started again.
#[derive(Debug)]
pub struct Operator {
    binary: PathBuf,
    dir: PathBuf,
    log: PathBuf,
    arguments: Vec<String>,
    process: Option<Process>,
}

/// The binary to test.
///
/// # Errors
/// When it has not been built.
pub fn binary() -> anyhow::Result<PathBuf> {
    if let Some(path) = std::env::var_os(BINARY) {
        return Ok(path.into());
    }
    // Tests run as target/PROFILE/deps/NAME-HASH.
    let test = std::env::current_exe()?;
    let path = test
        .ancestors()
        .skip(1)
        .take(2)
        .map(|directory| directory.join(NAME))
        .find(|path| path.is_file());
    path.with_context(|| {
        format!("{NAME} is not built: run `cargo build -p {NAME}` first, or name one in {BINARY}")
    })
}

impl Lab {
    /// The operator with this providers file, started and ready.
    ///
    /// # Errors
    /// When it does not become ready.
    pub async fn mk_operator(
        &self,
        providers: &Value,
        arguments: &[&str],
    ) -> anyhow::Result<Operator> {
        let mut operator = Operator {
            binary: binary()?,
            dir: self.mk_dir("operator")?,
            log: self.log("operator"),
            arguments: arguments.iter().map(ToString::to_string).collect(),
            process: None,
        };
        operator.write_providers(providers)?;
        operator.start().await?;
        Ok(operator)
    }
}

impl Operator {
    /// Replaces the providers file; a running operator notices.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write_providers(&self, providers: &Value) -> anyhow::Result<()> {
        // JSON is YAML too.
        let path = self.providers_file();
        let new = path.with_extension("new");
        fs::write(&new, serde_json::to_string_pretty(providers)?)?;
        Ok(fs::rename(new, path)?)
    }

    /// Where the providers file is.
    pub fn providers_file(&self) -> PathBuf {
        self.dir.join("providers.yaml")
    }

    fn api(&self) -> Endpoint {
        Endpoint::Unix(self.dir.join("api.sock"))
    }

    /// Starts it and waits until it says that it is ready.
    ///
    /// # Errors
    /// When it ends or is not ready in time; its last lines are in the message.
    pub async fn start(&mut self) -> anyhow::Result<()> {
        ensure!(self.process.is_none(), "the operator runs already");
        let mut command = Command::new(&self.binary);
        command
            .args(["--control-plane", "embedded", "--log", "debug"])
            .arg("--state-dir")
            .arg(self.dir.join("state"))
            .arg("--api-socket")
            .arg(self.dir.join("api.sock"))
            .arg("--providers-config")
            .arg(self.providers_file())
            .args(["--discovery-addr", &DISCOVERY.to_string()])
            .args(&self.arguments);
        let mut process = Process::spawn("operator", &mut command, &self.log)?;
        let discovery = Endpoint::Tcp(DISCOVERY);
        until("the operator is ready", START, async || {
            process.check_alive()?;
            Ok(match discovery.request("GET", "/readyz", None).await {
                Ok(Answer { status: 200, .. }) => Seen::There(()),
                Ok(answer) => Seen::not_yet(answer.text()),
                Err(error) => Seen::not_yet(format!("{error:#}")),
            })
        })
        .await?;
        self.process = Some(process);
        Ok(())
    }

    /// Kills it, as `kill -9` and a power cut do.
    ///
    /// # Errors
    /// When it does not run.
    pub async fn kill(&mut self) -> anyhow::Result<()> {
        self.process
            .take()
            .context("the operator does not run")?
            .kill()
            .await
    }

    /// Ends it as a service manager does.
    ///
    /// # Errors
    /// When it does not run, does not end, or ends with an error.
    pub async fn stop(&mut self) -> anyhow::Result<()> {
        let status = self
            .process
            .take()
            .context("the operator does not run")?
            .stop()
            .await?;
        ensure!(status.success(), "the operator ended with {status}");
        Ok(())
    }

    /// Other flags than before, for the next start.
    pub fn set_flags(&mut self, flags: &[&str]) {
        self.arguments = flags.iter().map(ToString::to_string).collect();
    }

    /// Loses everything it knew: another machine, or a lost disk.
    ///
    /// # Errors
    /// When it runs, or the state cannot be removed.
    pub fn forget(&self) -> anyhow::Result<()> {
        ensure!(self.process.is_none(), "the operator runs");
        Ok(fs::remove_dir_all(self.dir.join("state"))?)
    }

    /// Runs another subcommand with the same binary and gives output and exit status.
    ///
    /// # Errors
    /// When it cannot be run.
    pub async fn subcommand(&self, arguments: &[&str]) -> anyhow::Result<std::process::Output> {
        exec::output_within(Command::new(&self.binary).args(arguments), START).await
    }

    /// Its output so far.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn log(&self) -> anyhow::Result<String> {
        let bytes = fs::read(&self.log)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Its process id in the lab.
    ///
    /// # Errors
    /// When it does not run.
    pub fn pid(&self) -> anyhow::Result<i32> {
        let process = self.process.as_ref().context("the operator does not run")?;
        Ok(process.pid().as_raw_nonzero().get())
    }

    /// Creates the Proxy, or changes it to be so.
    ///
    /// # Errors
    /// When the API refuses it.
    pub async fn apply(&self, proxy: &MkProxy) -> anyhow::Result<()> {
        let object = proxy.object();
        let path = format!("{PROXIES}/{}", proxy.name);
        let created = self.api().request("POST", PROXIES, Some(&object)).await?;
        if created.status != 409 {
            return created.success().map(drop);
        }
        self.api()
            .request_as(
                "PATCH",
                &path,
                "application/merge-patch+json",
                Some(&object),
            )
            .await?
            .success()
            .map(drop)
    }

    /// The Proxy as the API has it; None when there is none.
    ///
    /// # Errors
    /// When the API does not answer.
    pub async fn proxy(&self, name: &str) -> anyhow::Result<Option<Value>> {
        let answer = self
            .api()
            .request("GET", &format!("{PROXIES}/{name}"), None)
            .await?;
        if answer.status == 404 {
            Ok(None)
        } else {
            answer.success().map(Some)
        }
    }

    /// Marks the Proxy as deleted, without waiting.
    ///
    /// # Errors
    /// When the API refuses.
    pub async fn delete(&self, name: &str) -> anyhow::Result<()> {
        self.api()
            .request("DELETE", &format!("{PROXIES}/{name}"), None)
            .await?
            .success()
            .map(drop)
    }

    /// Waits until the Proxy is gone.
    ///
    /// # Errors
    /// When it is still there after `limit`, with its conditions.
    pub async fn gone(&self, name: &str, limit: Duration) -> anyhow::Result<()> {
        until(&format!("{name} is gone"), limit, async || {
            Ok(match self.proxy(name).await? {
                None => Seen::There(()),
                Some(proxy) => Seen::not_yet(conditions(&proxy)),
            })
        })
        .await
    }

    /// Waits until a condition of the Proxy has this status, and a reason and message that hold
    /// `text`. Gives the Proxy as it was then.
    ///
    /// # Errors
    /// When that is not so within `limit`, with what its conditions are.
    pub async fn condition(
        &self,
        name: &str,
        kind: &str,
        status: &str,
        text: &str,
        limit: Duration,
    ) -> anyhow::Result<Value> {
        let what = format!("{name} is {kind}={status} {text:?}");
        let wanted = |proxy: &Value| {
            condition(proxy, kind).is_some_and(|one| one["status"] == status && tells(one, text))
        };
        self.seen(name, &what, limit, wanted).await
    }

    /// Waits until some condition of the Proxy is False and tells `text`, whichever it is.
    ///
    /// # Errors
    /// As [`Self::condition`].
    pub async fn complains(
        &self,
        name: &str,
        text: &str,
        limit: Duration,
    ) -> anyhow::Result<Value> {
        let wanted = |proxy: &Value| {
            let all = proxy["status"]["conditions"].as_array();
            all.is_some_and(|all| {
                all.iter()
                    .any(|one| one["status"] == "False" && tells(one, text))
            })
        };
        self.seen(
            name,
            &format!("{name} complains of {text:?}"),
            limit,
            wanted,
        )
        .await
    }

    async fn seen(
        &self,
        name: &str,
        what: &str,
        limit: Duration,
        wanted: impl Fn(&Value) -> bool,
    ) -> anyhow::Result<Value> {
        let seen = until(what, limit, async || {
            let Some(proxy) = self.proxy(name).await? else {
                bail!("there is no Proxy {name}");
            };
            Ok(if wanted(&proxy) {
                Seen::There(proxy)
            } else {
                Seen::not_yet(conditions(&proxy))
            })
        });
        seen.await.map_err(|error| {
            let log = tail(&self.log().unwrap_or_default(), 15);
            error.context(format!("the operator's last lines:\n{log}"))
        })
    }

    /// Waits until the Proxy is Ready and gives where it listens.
    ///
    /// # Errors
    /// As [`Self::condition`].
    pub async fn ready(&self, name: &str, limit: Duration) -> anyhow::Result<SocketAddr> {
        let proxy = self.condition(name, "Ready", "True", "", limit).await?;
        let ip = proxy["status"]["ip"]
            .as_str()
            .context("Ready without an address")?;
        let port = proxy["spec"]["port"].as_u64().unwrap_or(3128);
        Ok(SocketAddr::new(ip.parse()?, u16::try_from(port)?))
    }

    /// Waits until the Proxy's instance was started, whether it has an address or not.
    ///
    /// # Errors
    /// When it is not within `limit`.
    pub async fn started(&self, name: &str, limit: Duration) -> anyhow::Result<()> {
        until(&format!("{name} has an instance"), limit, async || {
            let Some(proxy) = self.proxy(name).await? else {
                bail!("there is no Proxy {name}");
            };
            let up = condition(&proxy, "Provisioned").is_some_and(|condition| {
                condition["status"] == "True" || condition["reason"] == "WaitingForAddress"
            });
            Ok(if up {
                Seen::There(())
            } else {
                Seen::not_yet(conditions(&proxy))
            })
        })
        .await
    }

    /// Remembers where the log ends now.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn log_watch(&self) -> anyhow::Result<LogWatch> {
        Ok(LogWatch {
            file: self.log.clone(),
            from: fs::metadata(&self.log)?.len(),
        })
    }

    /// The id of the instance behind the Proxy.
    ///
    /// # Errors
    /// When there is none.
    pub async fn provider_id(&self, name: &str) -> anyhow::Result<String> {
        let proxy = self
            .proxy(name)
            .await?
            .with_context(|| format!("no Proxy {name}"))?;
        let id = proxy["status"]["providerID"].as_str();
        id.map(str::to_owned)
            .with_context(|| format!("{name} has no providerID"))
    }

    /// Asks the discovery API.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn discovery(
        &self,
        method: &str,
        path: &str,
        body: Option<&Value>,
    ) -> anyhow::Result<Answer> {
        Endpoint::Tcp(DISCOVERY).request(method, path, body).await
    }

    /// Leases some proxy for `target`.
    ///
    /// # Errors
    /// When there is none, with the reasons.
    pub async fn lease(&self, target: &str) -> anyhow::Result<Value> {
        let body = json!({ "target": target });
        self.discovery("POST", "/v1/leases", Some(&body))
            .await?
            .success()
    }
}

/// Looks at what the operator logs from some moment on.
#[derive(Debug)]
pub struct LogWatch {
    file: PathBuf,
    from: u64,
}

impl LogWatch {
    /// Waits until `times` lines were logged that hold one of `texts`; false when that did not
    /// happen within `limit`.
    ///
    /// # Errors
    /// When the log cannot be read.
    pub async fn after(
        &self,
        texts: &[&str],
        times: usize,
        limit: Duration,
    ) -> anyhow::Result<bool> {
        const PAUSE: Duration = Duration::from_millis(1);
        let end = tokio::time::Instant::now() + limit;
        loop {
            let bytes = fs::read(&self.file)?;
            let new = bytes.get(usize::try_from(self.from)?..).unwrap_or_default();
            let lines = String::from_utf8_lossy(new);
            let holds = |line: &&str| texts.iter().any(|text| line.contains(text));
            let seen = lines.lines().filter(holds).count();
            if seen >= times || tokio::time::Instant::now() >= end {
                return Ok(seen >= times);
            }
            // Shorter than any call takes: the kill must hit its step.
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// The condition of that type.
pub fn condition<'p>(proxy: &'p Value, kind: &str) -> Option<&'p Value> {
    proxy["status"]["conditions"]
        .as_array()?
        .iter()
        .find(|condition| condition["type"] == kind)
}

/// Whether a condition's reason or message holds `text`.
fn tells(condition: &Value, text: &str) -> bool {
    ["reason", "message"]
        .iter()
        .any(|part| condition[part].as_str().is_some_and(|it| it.contains(text)))
}

/// All conditions in a line, for messages.
pub fn conditions(proxy: &Value) -> String {
    let mut text = format!(
        "phase {}",
        proxy["status"]["phase"].as_str().unwrap_or("none")
    );
    for one in proxy["status"]["conditions"]
        .as_array()
        .into_iter()
        .flatten()
    {
        let part = |name| one[name].as_str().unwrap_or("").to_owned();
        text.push_str(&format!(
            "; {}={} {} {}",
            part("type"),
            part("status"),
            part("reason"),
            part("message")
        ));
    }
    text
}

/// A Proxy to be applied.
#[derive(Debug, Clone)]
pub struct MkProxy {
    name: String,
    spec: Value,
}

/// A managed Proxy of the provider `kvm` with the light guest; probed quickly.
pub fn mk_proxy(name: &str) -> MkProxy {
    MkProxy {
        name: name.to_owned(),
        spec: json!({
            "mode": "Managed",
            "provider": "kvm",
            "placement": { "image": "light", "machineType": "light" },
            "healthCheck": { "intervalSeconds": 1, "timeoutSeconds": 1 },
        }),
    }
}

impl MkProxy {
    /// Sets any field, by a JSON pointer such as `/placement/zone`.
    ///
    /// # Panics
    /// When the part above it does not exist.
    #[must_use]
    #[track_caller]
    pub fn with(mut self, pointer: &str, value: impl Into<Value>) -> Self {
        let (parent, field) = pointer
            .rsplit_once('/')
            .expect("a JSON pointer begins with a slash");
        let parent = self
            .spec
            .pointer_mut(parent)
            .expect("a field that exists above");
        parent[field] = value.into();
        self
    }

    /// Somebody else's, at that address.
    #[must_use]
    #[track_caller]
    pub fn external(mut self, host: &str) -> Self {
        for field in ["provider", "placement"] {
            let spec = self.spec.as_object_mut().expect("made as an object");
            spec.remove(field);
        }
        self.with("/mode", "External")
            .with("/endpoint", json!({ "host": host }))
    }

    /// On that host.
    #[must_use]
    #[track_caller]
    pub fn on(self, host: &str) -> Self {
        self.with("/placement/zone", host)
    }

    /// With that image and the machine type of the same name.
    #[must_use]
    #[track_caller]
    pub fn of(self, image: &str) -> Self {
        self.with("/placement/image", image)
            .with("/placement/machineType", image)
    }

    /// With that cloud-init user-data.
    #[must_use]
    #[track_caller]
    pub fn user_data(self, text: &str) -> Self {
        self.with("/cloudInit", json!({ "inline": text }))
    }

    /// Probed with that URL.
    #[must_use]
    #[track_caller]
    pub fn probing(self, url: &str) -> Self {
        self.with("/healthCheck/url", url)
    }

    fn object(&self) -> Value {
        json!({
            "apiVersion": "crawl.example.com/v1alpha1",
            "kind": "Proxy",
            "metadata": { "name": self.name, "namespace": "default" },
            "spec": self.spec,
        })
    }
}

/// Measures from its making.
#[derive(Debug)]
pub struct Stopwatch(Instant);

impl Stopwatch {
    /// Starts.
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// Prints what has passed.
    pub fn print(&self, what: &str) {
        println!(
            "  {what}: {:.0} ms",
            self.0.elapsed().as_secs_f64() * 1000.0
        );
    }

    /// Fails when more than `limit` has passed.
    ///
    /// # Panics
    /// Then, at the caller's line.
    #[track_caller]
    pub fn assert_within(&self, what: &str, limit: Duration) {
        let took = self.0.elapsed();
        assert!(took <= limit, "{what} took {took:?}, more than {limit:?}");
    }
}

/// The memory that a process holds, in KiB.
///
/// # Errors
/// When there is no such process.
pub fn resident_kib(pid: i32) -> anyhow::Result<u64> {
    status_kib(pid, "VmRSS:")
}

/// The memory that a process holds of its own, in KiB: without what it maps of files, which for a
/// debug build is mostly the program itself.
///
/// # Errors
/// When there is no such process.
pub fn anonymous_kib(pid: i32) -> anyhow::Result<u64> {
    status_kib(pid, "RssAnon:")
}

fn status_kib(pid: i32, field: &str) -> anyhow::Result<u64> {
    let path = Path::new("/proc").join(pid.to_string()).join("status");
    let status = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let line = status.lines().find_map(|line| line.strip_prefix(field));
    line.and_then(|rest| rest.split_whitespace().next()?.parse().ok())
        .with_context(|| format!("{} has no {field}", path.display()))
}

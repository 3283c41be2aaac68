//! The real kubectl, with nothing of the user's around it.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, ChildStdout, Command};

/// A call that takes longer is stuck.
const TIMEOUT: Duration = Duration::from_secs(90);

/// kubectl for one kubeconfig.
#[derive(Debug, Clone)]
pub struct Kubectl {
    pub program: PathBuf,
    pub kubeconfig: PathBuf,
    /// Where it may keep its caches.
    pub home: PathBuf,
}

/// How a call ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// -1: ended by a signal.
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Kubectl {
    /// Runs to the end, whatever the exit code.
    ///
    /// # Errors
    /// When it cannot be started or does not end.
    pub async fn run(&self, args: &[&str], input: Option<&str>) -> anyhow::Result<Output> {
        let shown = format!("kubectl {}", args.join(" "));
        let mut command = self.command(args);
        command
            .stdin(if input.is_some() {
                Stdio::piped()
            } else {
                Stdio::null()
            })
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().with_context(|| shown.clone())?;
        if let (Some(mut stdin), Some(input)) = (child.stdin.take(), input) {
            let input = input.to_owned();
            // kubectl may end without reading all of it; then the rest is of no interest.
            tokio::spawn(async move { stdin.write_all(input.as_bytes()).await });
        }
        let output = tokio::time::timeout(TIMEOUT, child.wait_with_output())
            .await
            .with_context(|| format!("{shown}: no end within {TIMEOUT:?}"))??;
        Ok(Output {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        })
    }

    /// Runs and gives the standard output.
    ///
    /// # Errors
    /// When the exit code is not 0; with what kubectl said.
    pub async fn ok(&self, args: &[&str]) -> anyhow::Result<String> {
        self.ok_with(args, None).await
    }

    /// [`Kubectl::ok`] with something on standard input.
    ///
    /// # Errors
    /// As [`Kubectl::ok`].
    pub async fn ok_with(&self, args: &[&str], input: Option<&str>) -> anyhow::Result<String> {
        let output = self.run(args, input).await?;
        if output.code != 0 {
            bail!(
                "kubectl {}: {}\n{}",
                args.join(" "),
                output.code,
                output.stderr
            );
        }
        Ok(output.stdout)
    }

    /// An object as JSON.
    ///
    /// # Errors
    /// As [`Kubectl::ok`].
    pub async fn json(&self, args: &[&str]) -> anyhow::Result<Value> {
        let mut all = args.to_vec();
        all.extend(["-o", "json"]);
        Ok(serde_json::from_str(&self.ok(&all).await?)?)
    }

    /// Starts a call that goes on, such as `get -w`; it is killed when the handle is dropped.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn follow(&self, args: &[&str]) -> anyhow::Result<Following> {
        let mut command = self.command(args);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut child = command.spawn().context("cannot start kubectl")?;
        let stdout = child.stdout.take().context("no standard output")?;
        Ok(Following {
            _child: child,
            lines: BufReader::new(stdout).lines(),
        })
    }

    /// The same for another program that reads a kubeconfig, such as Helm.
    #[must_use]
    pub fn with_program(&self, program: PathBuf) -> Self {
        Self {
            program,
            ..self.clone()
        }
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command
            .args(args)
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("HOME", &self.home)
            .env("KUBECONFIG", &self.kubeconfig)
            .env("GOMAXPROCS", "2")
            .env("EDITOR", self.home.join("editor"))
            .kill_on_drop(true);
        command
    }
}

/// A call that goes on.
pub struct Following {
    _child: Child,
    lines: tokio::io::Lines<BufReader<ChildStdout>>,
}

impl Following {
    /// The next line of its output.
    ///
    /// # Errors
    /// When there is none in time.
    pub async fn line(&mut self) -> anyhow::Result<String> {
        tokio::time::timeout(TIMEOUT, self.lines.next_line())
            .await
            .context("kubectl printed nothing")??
            .context("kubectl ended")
    }
}

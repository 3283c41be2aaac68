//! A program that a lab runs in the background, its output in a file of the lab's.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};
use rustix::process::{Pid, Signal};
use tokio::process::{Child, Command};

/// Longest wait for a program that was asked to end.
const PATIENCE: Duration = Duration::from_secs(20);

/// A running program. Dropping it leaves it running: the lab's end is what ends everything.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    pid: Pid,
    log: PathBuf,
}

impl Process {
    /// Starts `command`, its output appended to `log`.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn spawn(name: &str, command: &mut Command, log: &Path) -> anyhow::Result<Self> {
        let open = || {
            File::options()
                .create(true)
                .append(true)
                .open(log)
                .with_context(|| format!("cannot open {}", log.display()))
        };
        let child = command
            .stdin(Stdio::null())
            .stdout(open()?)
            .stderr(open()?)
            .spawn()
            .with_context(|| format!("cannot start {name}: {:?}", command.as_std()))?;
        let pid = child
            .id()
            .and_then(|id| Pid::from_raw(i32::try_from(id).ok()?))
            .with_context(|| format!("{name} ended at once"))?;
        Ok(Self {
            name: name.to_owned(),
            child,
            pid,
            log: log.to_owned(),
        })
    }

    /// Its process id inside the lab.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// What it printed so far.
    ///
    /// # Errors
    /// When the log cannot be read.
    pub fn output(&self) -> anyhow::Result<String> {
        let bytes = fs::read(&self.log).with_context(|| self.log.display().to_string())?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Fails with its output when it has ended.
    ///
    /// # Errors
    /// When it is not running any more.
    pub fn check_alive(&mut self) -> anyhow::Result<()> {
        if let Some(status) = self.child.try_wait()? {
            bail!(
                "{} ended ({status}):\n{}",
                self.name,
                tail(&self.output()?, 30)
            );
        }
        Ok(())
    }

    /// Sends a signal to it alone.
    ///
    /// # Errors
    /// When it is not running any more.
    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        rustix::process::kill_process(self.pid, signal)
            .with_context(|| format!("signalling {}", self.name))
    }

    /// Asks it to end, and insists when it does not.
    ///
    /// # Errors
    /// When it cannot be waited for.
    pub async fn stop(mut self) -> anyhow::Result<ExitStatus> {
        // It may have ended by itself just now; then there is only the code to collect.
        let _ = self.signal(Signal::TERM);
        if let Ok(status) = tokio::time::timeout(PATIENCE, self.child.wait()).await {
            return Ok(status?);
        }
        self.child.start_kill()?;
        let _ = self.child.wait().await?;
        bail!("{} did not end within {PATIENCE:?} of SIGTERM", self.name)
    }

    /// Ends it as a power cut would.
    ///
    /// # Errors
    /// When it cannot be waited for.
    pub async fn kill(mut self) -> anyhow::Result<()> {
        let _ = self.child.start_kill();
        self.child.wait().await?;
        Ok(())
    }

    /// Waits until it ends by itself.
    ///
    /// # Errors
    /// When it runs on for longer than `limit`.
    pub async fn wait(&mut self, limit: Duration) -> anyhow::Result<ExitStatus> {
        tokio::time::timeout(limit, self.child.wait())
            .await
            .with_context(|| format!("{} still runs after {limit:?}", self.name))?
            .with_context(|| format!("waiting for {}", self.name))
    }

    /// Stops its time, and that of its children: sockets stay open and nobody answers.
    ///
    /// # Errors
    /// When a signal cannot be sent.
    pub fn freeze(&self) -> anyhow::Result<()> {
        self.signal_tree(Signal::STOP)
    }

    /// Lets it go on after [`Self::freeze`].
    ///
    /// # Errors
    /// When a signal cannot be sent.
    pub fn thaw(&self) -> anyhow::Result<()> {
        self.signal_tree(Signal::CONT)
    }

    fn signal_tree(&self, signal: Signal) -> anyhow::Result<()> {
        self.signal(signal)?;
        for child in descendants(self.pid) {
            // A session that ended in between is no fault.
            let _ = rustix::process::kill_process(child, signal);
        }
        Ok(())
    }

    /// Ends its children and leaves itself running: for sshd, all sessions.
    pub fn kill_children(&self) {
        for child in descendants(self.pid) {
            let _ = rustix::process::kill_process(child, Signal::KILL);
        }
    }
}

/// Children, their children, and so on.
fn descendants(of: Pid) -> Vec<Pid> {
    let mut found = Vec::new();
    let mut open = vec![of];
    while let Some(pid) = open.pop() {
        let path = format!("/proc/{0}/task/{0}/children", pid.as_raw_nonzero());
        let children = fs::read_to_string(path).unwrap_or_default();
        for child in children
            .split_whitespace()
            .filter_map(|id| Pid::from_raw(id.parse().ok()?))
        {
            found.push(child);
            open.push(child);
        }
    }
    found
}

/// The last lines of a text.
pub fn tail(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

/// Looks again and again until there is something, for things that tell nobody when they happen.
///
/// # Errors
/// When `limit` has passed (with what was seen last), or when looking itself fails.
pub async fn until<T>(
    what: &str,
    limit: Duration,
    mut look: impl AsyncFnMut() -> anyhow::Result<Seen<T>>,
) -> anyhow::Result<T> {
    const PAUSE: Duration = Duration::from_millis(50);
    let end = tokio::time::Instant::now() + limit;
    loop {
        match look().await? {
            Seen::There(value) => return Ok(value),
            Seen::NotYet(state) if tokio::time::Instant::now() >= end => {
                bail!("{what}: not within {limit:?}; last seen: {state}")
            }
            Seen::NotYet(_) => tokio::time::sleep(PAUSE).await,
        }
    }
}

/// What [`until`] saw.
#[derive(Debug)]
pub enum Seen<T> {
    /// What was waited for.
    There(T),
    /// Something else, for the message when the time is over.
    NotYet(String),
}

impl<T> Seen<T> {
    /// `NotYet` for everything that can be shown.
    pub fn not_yet(state: impl std::fmt::Display) -> Self {
        Self::NotYet(state.to_string())
    }
}

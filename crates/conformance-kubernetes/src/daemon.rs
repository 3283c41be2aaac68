//! A program that runs as long as its handle lives.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};

/// A child process that is killed when this is dropped, and by the kernel when the test program
/// dies without dropping anything.
pub struct Daemon {
    name: &'static str,
    pid: u32,
    log: PathBuf,
    stop: Option<mpsc::Sender<()>>,
    /// The thread that started the child: `PR_SET_PDEATHSIG` is tied to it, so it stays.
    keeper: Option<JoinHandle<()>>,
}

impl Daemon {
    /// Starts `program`, its output going to `log`.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(
        name: &'static str,
        program: &Path,
        args: &[String],
        log: PathBuf,
    ) -> anyhow::Result<Self> {
        let output =
            File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
        let mut command = dies_with_us(program);
        command
            .args(args)
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .env("GOMAXPROCS", "2");
        let (started, starting) = mpsc::channel();
        let (stop, stopped) = mpsc::channel();
        let keeper = std::thread::Builder::new()
            .name(format!("keep-{name}"))
            .spawn(move || {
                match command.spawn() {
                    Ok(child) => {
                        if started.send(Ok(child.id())).is_ok() {
                            // Ends when the handle is dropped: the sender is gone then.
                            let _ = stopped.recv();
                        }
                        end(child);
                    }
                    Err(error) => drop(started.send(Err(error))),
                }
            })?;
        let pid = starting
            .recv()
            .context("the thread that starts programs died")?
            .with_context(|| format!("cannot start {}", program.display()))?;
        Ok(Self {
            name,
            pid,
            log,
            stop: Some(stop),
            keeper: Some(keeper),
        })
    }

    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Whether it still runs (a zombie does not).
    pub fn is_running(&self) -> bool {
        fs::read_to_string(format!("/proc/{}/stat", self.pid)).is_ok_and(|stat| {
            stat.rsplit_once(')')
                .is_some_and(|(_, rest)| !rest.trim_start().starts_with('Z'))
        })
    }

    /// The end of its log.
    pub fn log_tail(&self) -> String {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(30)..].join("\n")
    }

    /// Asks `ready` again and again until it says yes.
    ///
    /// # Errors
    /// When the program ends or `limit` passes; with the end of its log.
    pub async fn wait_until<F>(
        &self,
        limit: Duration,
        mut ready: impl FnMut() -> F,
    ) -> anyhow::Result<()>
    where
        F: Future<Output = bool>,
    {
        let start = Instant::now();
        loop {
            if ready().await {
                return Ok(());
            }
            if !self.is_running() {
                bail!("{} ended while it started:\n{}", self.name, self.log_tail());
            }
            if start.elapsed() > limit {
                bail!(
                    "{} is not ready after {limit:?}:\n{}",
                    self.name,
                    self.log_tail()
                );
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(keeper) = self.keeper.take() {
            let _ = keeper.join();
        }
    }
}

/// Nothing that these programs keep is wanted afterwards, so they need no time to say goodbye.
fn end(mut child: Child) {
    let _ = child.kill();
    let _ = child.wait();
}

/// `setpriv` asks the kernel to kill the program with its parent, which cannot be done from safe
/// Rust.
fn dies_with_us(program: &Path) -> Command {
    let setpriv = Path::new("/usr/bin/setpriv");
    if setpriv.exists() {
        let mut command = Command::new(setpriv);
        command.args(["--pdeathsig", "KILL", "--"]).arg(program);
        command
    } else {
        Command::new(program)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_handle_ends_the_program() {
        let dir = tempfile::tempdir().unwrap();
        let args = ["1000".to_owned()];
        let daemon = Daemon::start(
            "sleep",
            Path::new("/bin/sleep"),
            &args,
            dir.path().join("log"),
        )
        .unwrap();
        assert!(daemon.is_running());
        let pid = daemon.pid();
        drop(daemon);
        assert!(!Path::new(&format!("/proc/{pid}")).exists());
    }

    #[test]
    fn a_missing_program_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let daemon = Daemon::start(
            "nothing",
            Path::new("/nonexistent"),
            &[],
            dir.path().join("log"),
        );
        // setpriv starts and then fails to run it; without setpriv the start itself fails.
        match daemon {
            Ok(daemon) => {
                let runtime = tokio::runtime::Builder::new_current_thread()
                    .enable_all()
                    .build()
                    .unwrap();
                let told = runtime
                    .block_on(daemon.wait_until(Duration::from_secs(10), || async { false }))
                    .unwrap_err();
                assert!(told.to_string().contains("/nonexistent"), "{told}");
            }
            Err(error) => assert!(error.to_string().contains("/nonexistent"), "{error}"),
        }
    }
}

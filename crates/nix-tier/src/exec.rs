//! Running programs: a failure says which one, how it ended and what it printed.

use std::io::Write as _;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

/// Where a program is, by `PATH` and the places that a user's `PATH` often lacks.
pub fn find(program: &str) -> Option<std::path::PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/usr/bin", "/sbin", "/bin"].map(Into::into))
        .map(|dir| dir.join(program))
        .find(|file| file.is_file())
}

/// Runs to the end and gives the standard output.
///
/// # Errors
/// When it cannot be started or ends with another code than 0.
pub fn run(command: &mut Command) -> Result<String> {
    let output = output(command)?;
    if !output.status.success() {
        bail!(
            "{command:?}: {}\n{}{}",
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs to the end, whatever the code.
///
/// # Errors
/// When it cannot be started.
pub fn output(command: &mut Command) -> Result<Output> {
    command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {command:?}"))
}

/// What a program did within a time.
#[derive(Debug)]
pub struct Ended {
    /// None: it was still running and was ended.
    pub success: Option<bool>,
    pub stdout: String,
    pub stderr: String,
}

/// Runs with `input` on the standard input; after `limit` the program is ended.
///
/// # Errors
/// When it cannot be started.
pub fn within(command: &mut Command, input: &str, limit: Duration) -> Result<Ended> {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {command:?}"))?;
    if let Some(mut stdin) = child.stdin.take() {
        // A program that does not read its input is no fault of the caller.
        let _ = stdin.write_all(input.as_bytes());
    }
    let stdout = drain(child.stdout.take());
    let stderr = drain(child.stderr.take());
    let deadline = Instant::now() + limit;
    let success = wait(&mut child, deadline)?;
    let text = |reader: std::thread::JoinHandle<String>| reader.join().unwrap_or_default();
    Ok(Ended {
        success,
        stdout: text(stdout),
        stderr: text(stderr),
    })
}

/// Waits for the end, or ends it at the deadline.
///
/// # Errors
/// When the child cannot be waited for.
pub fn wait(child: &mut Child, deadline: Instant) -> Result<Option<bool>> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status.success()));
        }
        if Instant::now() >= deadline {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        pause();
    }
}

/// Polls until `check` holds, or the time is over.
pub fn until(limit: Duration, mut check: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + limit;
    loop {
        if check() {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        pause();
    }
}

/// Between two looks at another program, which tells of its progress by files and its end only.
#[allow(
    clippy::disallowed_methods,
    reason = "a test's own thread polls, with a deadline"
)]
fn pause() {
    std::thread::sleep(Duration::from_millis(20));
}

fn drain(reader: Option<impl std::io::Read + Send + 'static>) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut reader) = reader {
            let _ = reader.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

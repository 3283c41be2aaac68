//! Running cargo and reading what its test runner says.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};

/// The workspace's folder.
pub fn root() -> PathBuf {
    let manifest = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    manifest
        .ancestors()
        .nth(2)
        .map(PathBuf::from)
        .unwrap_or(manifest)
}

pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root()).stdin(Stdio::null());
    // What cargo told this program of its own package would reach build scripts that watch these
    // variables (ring's), and build half the workspace anew each time.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&name);
        }
    }
    command
}

/// Where cargo puts what it builds.
pub fn target_dir() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => root().join(dir),
        None => root().join("target"),
    }
}

/// Builds the operator and whatever else the workspace has as programs; returns their folder.
pub fn build(release: bool) -> Result<PathBuf> {
    let mut command = cargo();
    command.args(["build", "--workspace", "--bins", "--locked"]);
    if release {
        command.arg("--release");
    }
    let status = command.status().context("cannot run cargo")?;
    if !status.success() {
        bail!("the build failed: see the compiler's messages above");
    }
    Ok(target_dir().join(if release { "release" } else { "debug" }))
}

/// A test program that cargo built.
#[derive(Debug, Clone)]
pub struct TestProgram {
    pub package: String,
    pub target: String,
    /// An integration test (a file under tests/), not the unit tests of a library or program.
    pub integration: bool,
    executable: PathBuf,
    package_dir: PathBuf,
}

impl TestProgram {
    /// A command that runs it as cargo would.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.executable);
        command
            .current_dir(&self.package_dir)
            .env("CARGO_MANIFEST_DIR", &self.package_dir)
            .env("CARGO_PKG_NAME", &self.package)
            .env("RUST_BACKTRACE", "0")
            .stdin(Stdio::null());
        command
    }
}

/// Builds all tests at once (so that every package is built with the same features) and names them.
pub fn build_tests(units_only: bool) -> Result<Vec<TestProgram>> {
    let mut command = cargo();
    command.args(["test", "--workspace", "--locked", "--no-run"]);
    command.arg("--message-format=json-render-diagnostics");
    if units_only {
        command.args(["--lib", "--bins"]);
    }
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run cargo")?;
    if !output.status.success() {
        bail!("the tests do not build: see the compiler's messages above");
    }
    let mut found = Vec::new();
    for line in output.stdout.split(|b| *b == b'\n') {
        let Ok(message) = serde_json::from_slice::<serde_json::Value>(line) else {
            continue;
        };
        let Some(executable) = message["executable"].as_str() else {
            continue;
        };
        if message["profile"]["test"] != true {
            continue;
        }
        let manifest = PathBuf::from(message["manifest_path"].as_str().unwrap_or_default());
        let Some(package_dir) = manifest.parent() else {
            continue;
        };
        found.push(TestProgram {
            package: package_name(message["package_id"].as_str().unwrap_or_default()),
            target: message["target"]["name"]
                .as_str()
                .unwrap_or_default()
                .to_owned(),
            integration: message["target"]["kind"][0] == "test",
            executable: executable.into(),
            package_dir: package_dir.to_owned(),
        });
    }
    found.sort_by(|a, b| (&a.package, &a.target).cmp(&(&b.package, &b.target)));
    Ok(found)
}

/// From `path+file:///.../crates/core#egress-core@0.1.0` (or `...#0.1.0` where folder and package
/// share a name).
fn package_name(id: &str) -> String {
    let (path, fragment) = id.rsplit_once('#').unwrap_or(("", id));
    match fragment.split_once('@') {
        Some((name, _)) => name.to_owned(),
        None => path.rsplit('/').next().unwrap_or_default().to_owned(),
    }
}

/// What one run of a test command counted.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Counts {
    pub passed: usize,
    pub failed: usize,
    /// `test name: why`, as the tests printed them.
    pub skipped: Vec<String>,
}

impl Counts {
    pub fn add(&mut self, other: &Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped.extend(other.skipped.iter().cloned());
    }

    /// Reads one line of libtest's output.
    fn read(&mut self, line: &str) {
        if let Some(rest) = line.strip_prefix("test result: ") {
            let number = |word: &str| {
                rest.split([';', '.'])
                    .filter_map(|part| part.trim().strip_suffix(word))
                    .find_map(|n| n.trim().parse::<usize>().ok())
                    .unwrap_or(0)
            };
            self.passed += number("passed");
            self.failed += number("failed");
        } else if let Some(reason) = line.trim_start().strip_prefix("skipped: ") {
            self.skipped.push(reason.to_owned());
        }
    }
}

/// Runs a test program: everything goes to a log, the results to the terminal, and on failure the
/// failing tests' output too.
pub fn tests(program: &TestProgram, mut command: Command) -> Result<Counts> {
    let name = &format!("{}-{}", program.package, program.target);
    let begin = Instant::now();
    let log_dir = target_dir().join("xtask");
    std::fs::create_dir_all(&log_dir)?;
    let log_path = log_dir.join(format!("{name}.log"));
    let mut log = std::fs::File::create(&log_path)
        .with_context(|| format!("cannot write {}", log_path.display()))?;
    let (reader, writer) = std::io::pipe()?;
    command.stdout(writer.try_clone()?).stderr(writer);
    let mut child = command.spawn().context("cannot start the test command")?;
    drop(command); // Holds the pipe's other end.
    let mut counts = Counts::default();
    let mut in_failures = false;
    for line in BufReader::new(reader).split(b'\n') {
        let line = line?;
        let line = String::from_utf8_lossy(&line);
        writeln!(log, "{line}")?;
        counts.read(&line);
        if line == "failures:" {
            in_failures = true;
        }
        let trimmed = line.trim_start();
        let told = in_failures
            || trimmed.starts_with("stage ")
            || trimmed.starts_with("skipped: ")
            || trimmed.contains("... FAILED");
        if told {
            println!("  {line}");
        }
        if line.starts_with("test result: ") {
            in_failures = false;
        }
    }
    let status = child.wait()?;
    println!(
        "  {name}: {} passed, {} failed, {:.1} s",
        counts.passed,
        counts.failed,
        begin.elapsed().as_secs_f64()
    );
    if !status.success() && counts.failed == 0 {
        // A build that failed, or a test program that died, has no result line of its own.
        counts.failed = 1;
        println!(
            "  {name}: {status}; the whole output is in {}",
            log_path.display()
        );
        let text = std::fs::read_to_string(&log_path).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        for line in &lines[lines.len().saturating_sub(60)..] {
            println!("  | {line}");
        }
    }
    Ok(counts)
}

/// Runs one check that either holds or does not; counts as one test.
pub fn check(name: &str, mut command: Command) -> Result<Counts> {
    let output = command
        .output()
        .with_context(|| format!("cannot run {name}"))?;
    if output.status.success() {
        println!("  {name}: ok");
        return Ok(Counts {
            passed: 1,
            ..Counts::default()
        });
    }
    println!("  {name}: FAILED");
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    for line in &lines[lines.len().saturating_sub(80)..] {
        println!("  | {line}");
    }
    Ok(Counts {
        failed: 1,
        ..Counts::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn package_names_are_read_from_both_forms_of_ids() {
        assert_eq!(
            package_name("path+file:///a/crates/core#egress-core@0.1.0"),
            "egress-core"
        );
        assert_eq!(package_name("path+file:///a/crates/xtask#0.1.0"), "xtask");
    }

    #[test]
    fn result_lines_and_skips_are_counted() {
        let mut counts = Counts::default();
        for line in [
            "running 3 tests",
            "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.50s",
            "test result: FAILED. 3 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.50s",
            "skipped: kubectl_apply: no kubectl on this machine",
        ] {
            counts.read(line);
        }
        assert_eq!((counts.passed, counts.failed), (15, 2));
        assert_eq!(
            counts.skipped,
            ["kubectl_apply: no kubectl on this machine"]
        );
    }
}

//! A lab: namespaces of a test's own, in which real daemons may do as they like.
//!
//! ```text
//! cargo test ── test thread ("outer": packages, images, which need the network)
//!                  └─ unshare: new network, mount and process namespaces
//!                       └─ the same test binary as process 1 ("init": reaps, dies with "outer")
//!                            └─ the same test binary once more ("body": runs the test's body)
//!                                 └─ libvirtd, dnsmasq, QEMU, sshd, the operator, clients …
//! ```
//!
//! In a lab there is a loopback and nothing else, so no packet can leave and no address clashes.
//! Whatever is left over when the body ends, however it ends, dies with process 1.

use std::any::type_name;
use std::fs;
use std::io::Read as _;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use futures::FutureExt as _;
use tokio::io::{AsyncBufReadExt as _, AsyncRead, BufReader};

use crate::process::tail;
use crate::{cache, exec, guest, prereq};

/// Set (to 1) by `cargo xtask test kvm`; without it these tests say that they were left out.
pub const TIER: &str = "EGRESS_TIER_KVM";
/// Keep a lab's files also after success.
const KEEP: &str = "EGRESS_LAB_KEEP";
/// Leave a failed lab running, to be looked at.
const PAUSE: &str = "EGRESS_LAB_PAUSE";
/// How many labs may run side by side on this machine.
const SLOTS: &str = "EGRESS_LAB_SLOTS";

const DIR_PREFIX: &str = "egress-lab-";
const ROLE: &str = "EGRESS_LAB_ROLE";
const DIR: &str = "EGRESS_LAB_DIR";
/// Printed by a paused body, for the outer process, which knows the process id to enter.
const PAUSED: &str = "egress-lab-paused";
/// Proof that a body ran to its end: a renamed test would otherwise run nothing and be green.
const COMPLETED: &str = "completed";
/// A whole lab may take this long.
const LIMIT: Duration = Duration::from_secs(600);
/// A user of the hosts, allowed to use libvirt and nothing else.
pub const HOST_USER: &str = "egress";

/// A guest image that a test uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Guest {
    /// See [`guest::light`].
    Light,
    /// See [`guest::full`].
    Full,
}

impl Guest {
    fn variable(self) -> &'static str {
        match self {
            Self::Light => "EGRESS_LAB_GUEST_LIGHT",
            Self::Full => "EGRESS_LAB_GUEST_FULL",
        }
    }

    fn image(self) -> anyhow::Result<guest::Image> {
        match self {
            Self::Light => guest::light::image(),
            Self::Full => guest::full::image(),
        }
    }
}

/// Runs `body` in a lab of its own, with these guest images at hand. To be called directly in a
/// `#[test]` function, with a closure written there.
///
/// # Panics
/// When the lab cannot be made or the body fails: that is the test's failure.
#[track_caller]
pub fn test<F>(guests: &[Guest], body: F)
where
    F: AsyncFnOnce(&Lab) -> anyhow::Result<()>,
{
    // `kvm::happy_path::{{closure}}`: the closure's own type tells which test it is written in.
    let name = name_of::<F>();
    if std::env::var_os(ROLE).is_none() && std::env::var_os(TIER).is_none_or(|value| value != "1") {
        println!("skipped: {name} needs root and a minute; `cargo xtask test kvm` runs it");
        return;
    }
    if let Err(error) = run(guests, body) {
        panic!("{name}: {error:?}");
    }
}

/// Whether this process is part of a lab: a program that calls [`run`] must do so again then.
pub fn is_inside() -> bool {
    std::env::var_os(ROLE).is_some()
}

/// [`test()`] for a program: whether a lab is wanted is the caller's matter.
///
/// # Errors
/// When the lab cannot be made or the body fails.
pub fn run<F>(guests: &[Guest], body: F) -> anyhow::Result<()>
where
    F: AsyncFnOnce(&Lab) -> anyhow::Result<()>,
{
    let name = name_of::<F>();
    match std::env::var(ROLE).ok().as_deref() {
        None => outer(name, guests),
        Some("init") => init(name),
        Some("body") => run_body(name, body),
        Some(role) => Err(anyhow::anyhow!("{ROLE}={role}: no such role")),
    }
}

/// `kvm::happy_path::{{closure}}`: the closure's own type tells which function it is written in.
fn name_of<F>() -> &'static str {
    let path = type_name::<F>();
    let path = path
        .split_once("::{{closure}}")
        .map_or(path, |(test, _)| test);
    path.split_once("::").map_or(path, |(_, test)| test)
}

fn outer(name: &str, guests: &[Guest]) -> anyhow::Result<()> {
    // With --nocapture the line with the test's name is not finished yet.
    println!();
    ensure!(
        prereq::is_root(),
        "labs need root (namespaces, libvirtd): run `sudo -E cargo xtask test kvm`"
    );
    prereq::ensure(prereq::KVM)?;
    let mut images = Vec::new();
    for guest in guests {
        images.push((guest.variable(), guest.image()?.path));
    }
    let _slot = slot(name)?;
    remove_stale();
    let dir = tempfile::Builder::new().prefix(DIR_PREFIX).tempdir()?;
    // dnsmasq and the hosts' user must get through to what is theirs.
    fs::set_permissions(
        dir.path(),
        std::os::unix::fs::PermissionsExt::from_mode(0o755),
    )?;
    fs::create_dir(dir.path().join("log"))?;

    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let result = runtime.block_on(async {
        let mut command = tokio::process::Command::new("unshare");
        command
            .args([
                "--net",
                "--mount",
                "--pid",
                "--fork",
                "--kill-child",
                "--mount-proc",
            ])
            .args(["--propagation", "private", "--"])
            .arg(std::env::current_exe()?)
            .args(["--exact", name, "--nocapture", "--test-threads=1"])
            .env(ROLE, "init")
            .env(DIR, dir.path())
            .envs(images)
            // The lab's process 1 ends when this end of its input is closed, however we end.
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        let mut child = command.spawn().context("cannot run unshare")?;
        let unshare = child.id().context("unshare ended at once")?;
        let _input = child.stdin.take();
        let stdout = child.stdout.take().context("no output")?;
        let stderr = child.stderr.take().context("no errors")?;
        let limit = if std::env::var_os(PAUSE).is_some() {
            Duration::MAX
        } else {
            LIMIT
        };
        let ended = tokio::time::timeout(limit, async {
            let (_, _, status) = futures::join!(
                forward(stdout, unshare),
                forward(stderr, unshare),
                child.wait()
            );
            status
        })
        .await;
        match ended {
            Err(_) => bail!("no end within {limit:?}"),
            Ok(status) => {
                let status = status?;
                ensure!(status.success(), "the lab ended with {status}");
                ensure!(
                    dir.path().join(COMPLETED).exists(),
                    "no body ran: lab::test must be called in the #[test] function itself"
                );
                Ok(())
            }
        }
    });
    let keep = std::env::var_os(KEEP).is_some();
    if result.is_err() || keep {
        let path = dir.keep();
        if result.is_err() {
            show_logs(&path.join("log"));
            if !keep {
                // Disks are big and the logs are what tells.
                remove_all_but_logs(&path);
            }
        }
        println!("the lab's files are in {}", path.display());
    }
    result
}

/// Labs of yesterday, whose tests were killed or failed and have been looked at since.
fn remove_stale() {
    const AGE: Duration = Duration::from_secs(24 * 3600);
    for entry in fs::read_dir(std::env::temp_dir())
        .into_iter()
        .flatten()
        .flatten()
    {
        let ours = entry.file_name().to_string_lossy().starts_with(DIR_PREFIX);
        let modified = entry.metadata().and_then(|metadata| metadata.modified());
        if ours && modified.is_ok_and(|at| at.elapsed().is_ok_and(|age| age > AGE)) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Passes lines on to where this test's output goes, without those of the inner test harness.
async fn forward(from: impl AsyncRead + Unpin, unshare: u32) {
    let mut lines = BufReader::new(from).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        if line == PAUSED {
            let path = format!("/proc/{unshare}/task/{unshare}/children");
            let init = fs::read_to_string(path).unwrap_or_default();
            println!("the lab stays up; look into it with\n  nsenter --all --target {init}");
        } else if !line.is_empty()
            && !line.starts_with("running 1 test")
            && !line.starts_with("test ")
            && !line.starts_with("failures:")
            && !line.starts_with("error: test failed")
        {
            println!("{line}");
        }
    }
}

fn slot(name: &str) -> anyhow::Result<cache::Lock> {
    let slots = std::env::var(SLOTS)
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(2_usize)
        .max(1);
    for number in 0..slots {
        if let Some(lock) = cache::try_lock(&format!("lab-{number}"))? {
            return Ok(lock);
        }
    }
    // All are taken; waiting for one of them, each test for another, is fair enough.
    cache::lock(&format!("lab-{}", name.len() % slots))
}

fn show_logs(dir: &Path) {
    let mut logs: Vec<PathBuf> = fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .collect();
    logs.sort();
    for log in logs {
        if let Ok(bytes) = fs::read(&log)
            && !bytes.is_empty()
        {
            println!("--- the end of {}", log.display());
            println!("{}", tail(&String::from_utf8_lossy(&bytes), 25));
        }
    }
}

fn remove_all_but_logs(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_name() != "log" {
            let path = entry.path();
            let _ = if path.is_dir() {
                fs::remove_dir_all(path)
            } else {
                fs::remove_file(path)
            };
        }
    }
}

/// Process 1 of the lab: libvirtd and dnsmasq leave orphans, and somebody must wait for them, or
/// libvirtd believes that a QEMU it killed still runs.
fn init(name: &str) -> anyhow::Result<()> {
    let dir = lab_dir()?;
    prepare_namespaces(&dir)?;
    let body = Command::new(std::env::current_exe()?)
        .args(["--exact", name, "--nocapture", "--test-threads=1"])
        .env(ROLE, "body")
        .stdin(Stdio::null())
        .spawn()
        .context("cannot run the body")?;
    let body = i32::try_from(body.id())?;
    std::thread::spawn(|| {
        let mut nothing = [0; 1];
        // Data never comes; the end comes when the outer process is gone.
        let _ = std::io::stdin().read(&mut nothing);
        std::process::exit(1);
    });
    loop {
        match rustix::process::wait(rustix::process::WaitOptions::empty()) {
            Ok(Some((pid, status))) if pid.as_raw_nonzero().get() == body => {
                std::process::exit(status.exit_status().unwrap_or(1));
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => bail!("waiting for the body: {error}"),
        }
    }
}

/// Gives the lab its own `/run`, its own users and its loopback.
fn prepare_namespaces(dir: &Path) -> anyhow::Result<()> {
    let mount = |arguments: &[&str], on: &str| {
        exec::run(Command::new("mount").args(arguments).arg(on)).map(drop)
    };
    mount(&["-t", "tmpfs", "-o", "mode=0755", "tmpfs"], "/run")?;
    // Of this network namespace, or libvirt asks for devices that are the machine's.
    mount(&["-t", "sysfs", "sysfs"], "/sys")?;
    for directory in ["/run/libvirt", "/run/lock", "/run/sshd"] {
        fs::create_dir_all(directory)?;
    }
    exec::run(Command::new("ip").args(["link", "set", "lo", "up"]))?;

    let users = dir.join("users");
    fs::create_dir(&users)?;
    // A password of `*` cannot be typed, yet unlike `!` it does not lock the account for keys.
    let lines = [
        (
            "/etc/passwd",
            format!("{HOST_USER}:x:64999:64999::/nonexistent:/usr/sbin/nologin\n"),
        ),
        ("/etc/shadow", format!("{HOST_USER}:*:20000::::::\n")),
        ("/etc/group", format!("{HOST_USER}:x:64999:\n")),
    ];
    for (file, line) in lines {
        let ours = users.join(file.trim_start_matches("/etc/"));
        fs::copy(file, &ours)?;
        let mut text = fs::read_to_string(&ours)?;
        text.push_str(&line);
        if file == "/etc/group" {
            text = member_of(&text, "libvirt", HOST_USER);
        }
        fs::write(&ours, text)?;
        mount(&["--bind", &ours.to_string_lossy()], file)?;
    }
    Ok(())
}

/// `/etc/group` with `user` added to `group`.
fn member_of(groups: &str, group: &str, user: &str) -> String {
    let mut text = String::new();
    for line in groups.lines() {
        text.push_str(line);
        if line.split(':').next() == Some(group) {
            if !line.ends_with(':') {
                text.push(',');
            }
            text.push_str(user);
        }
        text.push('\n');
    }
    text
}

fn lab_dir() -> anyhow::Result<PathBuf> {
    std::env::var_os(DIR)
        .map(PathBuf::from)
        .with_context(|| format!("{DIR} is not set"))
}

fn run_body<F>(name: &str, body: F) -> anyhow::Result<()>
where
    F: AsyncFnOnce(&Lab) -> anyhow::Result<()>,
{
    // The inner test harness left its line unfinished.
    println!();
    let lab = Lab {
        name: name.to_owned(),
        dir: lab_dir()?,
        started: Instant::now(),
        stages: Mutex::default(),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    let result = runtime.block_on(AssertUnwindSafe(body(&lab)).catch_unwind());
    lab.print_stages();
    let failure = match result {
        Ok(Ok(())) => {
            fs::write(lab.dir.join(COMPLETED), "")?;
            // Background work of the body must not hold it up.
            runtime.shutdown_background();
            return Ok(());
        }
        Ok(Err(error)) => error,
        // The panic's message was printed when it happened.
        Err(_) => anyhow::anyhow!("panicked (see above)"),
    };
    if std::env::var_os(PAUSE).is_some() {
        eprintln!("{name}: {failure:?}");
        println!("{PAUSED}");
        runtime.block_on(std::future::pending::<()>());
    }
    runtime.shutdown_background();
    Err(failure)
}

/// What a test's body has at hand.
#[derive(Debug)]
pub struct Lab {
    name: String,
    dir: PathBuf,
    started: Instant,
    stages: Mutex<Vec<(String, Instant)>>,
}

impl Lab {
    /// The test's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A directory that goes away with the lab.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// A new directory in the lab.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn mk_dir(&self, name: &str) -> anyhow::Result<PathBuf> {
        let dir = self.dir.join(name);
        fs::create_dir_all(&dir).with_context(|| dir.display().to_string())?;
        Ok(dir)
    }

    /// Where a program's output goes; shown when the test fails.
    pub fn log(&self, name: &str) -> PathBuf {
        self.dir.join("log").join(format!("{name}.log"))
    }

    /// The image of a guest that the test asked for.
    ///
    /// # Errors
    /// When the test did not name it.
    pub fn image(&self, guest: Guest) -> anyhow::Result<guest::Image> {
        let path = std::env::var_os(guest.variable())
            .map(PathBuf::from)
            .with_context(|| {
                format!(
                    "{} uses the {guest:?} guest and did not ask for it",
                    self.name
                )
            })?;
        Ok(guest::Image { path })
    }

    /// Ends the stage before and begins another; the times are printed at the end.
    pub fn stage(&self, what: &str) {
        // xtask shows lines that begin so while the tests run.
        println!(
            "stage {} {:6.1} s: {what}",
            self.name,
            self.started.elapsed().as_secs_f32()
        );
        self.stages
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .push((what.to_owned(), Instant::now()));
    }

    fn print_stages(&self) {
        let stages = self
            .stages
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let ends = stages
            .iter()
            .skip(1)
            .map(|(_, at)| *at)
            .chain([Instant::now()]);
        println!(
            "stage {} {:6.1} s: end",
            self.name,
            self.started.elapsed().as_secs_f32()
        );
        for ((what, began), end) in stages.iter().zip(ends) {
            println!("  {:6.1} s  {what}", (end - *began).as_secs_f32());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_joins_an_empty_group_and_a_full_one() {
        let groups = "a:x:1:\nlibvirt:x:2:\nb:x:3:me\n";
        assert_eq!(
            member_of(groups, "libvirt", "u"),
            "a:x:1:\nlibvirt:x:2:u\nb:x:3:me\n"
        );
        assert_eq!(
            member_of(groups, "b", "u"),
            "a:x:1:\nlibvirt:x:2:\nb:x:3:me,u\n"
        );
    }
}

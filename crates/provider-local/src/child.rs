//! Child processes that outlive the operator and are found again by the next one.
//!
//! Each holds the lock on `NAME.lock` for its whole life, as its standard input: the lock is taken
//! before the process is made and goes with it, so that at no moment is there a process without a
//! held lock. Whoever finds the lock held starts no second one, but adopts its holder.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use rustix::process::Signal;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::broadcast;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::process::{Identity, Process, holder, reap, signal, try_lock};
use crate::spawner;
use crate::supervise::{Command, Ended, Run, Supervisor};

/// From SIGTERM to SIGKILL: Squid takes up to three seconds with a shutdown_lifetime of one.
const GRACE: Duration = Duration::from_secs(6);
/// From SIGKILL to giving up; only a process that hangs in the kernel takes longer.
const KILL_GRACE: Duration = Duration::from_secs(5);
/// What a child sees of the operator's environment: nothing that could be a secret.
const PASSED_ENVIRONMENT: [&str; 4] = ["PATH", "TZ", "LANG", "LD_LIBRARY_PATH"];

/// A child that runs and is watched.
#[derive(Debug, Clone)]
struct Watched {
    identity: Identity,
    pidfd: Arc<OwnedFd>,
    asked: Arc<AtomicBool>,
    ended: CancellationToken,
}

impl Watched {
    fn run(&self) -> Run {
        // A pid does not come again within one clock tick.
        let pid = u64::from(self.identity.pid.unsigned_abs());
        Run(self.identity.start_time.rotate_left(32) ^ pid)
    }
}

type Watching = Arc<Mutex<BTreeMap<String, Watched>>>;

fn lock(watching: &Watching) -> MutexGuard<'_, BTreeMap<String, Watched>> {
    watching.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Children of one provider instance.
pub(crate) struct Children {
    dir: PathBuf,
    watching: Watching,
    ended: broadcast::Sender<Ended>,
    tasks: TaskTracker,
    cancel: CancellationToken,
}

impl Children {
    /// `dir` exists and is ours.
    pub(crate) fn new(dir: PathBuf) -> Self {
        Self {
            dir,
            watching: Watching::default(),
            ended: broadcast::channel(1024).0,
            tasks: TaskTracker::new(),
            cancel: CancellationToken::new(),
        }
    }

    fn lock_path(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.lock"))
    }

    fn log_path(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.log"))
    }

    fn watched(&self, name: &str) -> Option<Watched> {
        lock(&self.watching).get(name).cloned()
    }

    /// Watches a process until its end. One that is watched already stays so.
    fn watch(&self, name: &str, process: Process) -> io::Result<Watched> {
        let mut watching = lock(&self.watching);
        if let Some(watched) = watching.get(name)
            && watched.identity == process.identity
        {
            return Ok(watched.clone());
        }
        let watched = Watched {
            identity: process.identity,
            pidfd: Arc::new(process.pidfd),
            asked: Arc::default(),
            ended: CancellationToken::new(),
        };
        // Readable once the process has ended (pidfd_open(2)), child of ours or not.
        let owned = Arc::clone(&watched.pidfd);
        #[allow(
            unsafe_code,
            reason = "tokio's safe constructor is deprecated (tokio#8587)"
        )]
        // SAFETY: the Arc owns the descriptor, nothing replaces it, and it is dropped only after
        // the AsyncFd that holds it.
        let readable = unsafe { AsyncFd::register_with_interest(owned, Interest::READABLE) }?;
        let watch = watch_end(
            name.to_owned(),
            watched.clone(),
            readable,
            Arc::clone(&self.watching),
            self.ended.clone(),
        );
        let cancel = self.cancel.clone();
        self.tasks.spawn(async move {
            tokio::select! {
                () = watch => {}
                () = cancel.cancelled() => {}
            }
        });
        watching.insert(name.to_owned(), watched.clone());
        Ok(watched)
    }

    /// The running process of that name, found by its lock if it is not watched yet.
    async fn find(&self, name: &str) -> io::Result<Option<Watched>> {
        if let Some(watched) = self.watched(name) {
            return Ok(Some(watched));
        }
        let path = self.lock_path(name);
        match spawner::run(move || adopt(&path)).await? {
            Some(process) => self.watch(name, process).map(Some),
            None => Ok(None),
        }
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        // Only the watching ends; the processes live on for the next operator.
        self.cancel.cancel();
    }
}

async fn watch_end(
    name: String,
    watched: Watched,
    readable: AsyncFd<Arc<OwnedFd>>,
    watching: Watching,
    ended: broadcast::Sender<Ended>,
) {
    if let Err(error) = readable.readable().await {
        // Nobody is told of its end then; the next look finds it by the lock.
        tracing::warn!(instance = name, %error, "a proxy process cannot be watched");
    }
    let how = reap(&watched.pidfd);
    {
        let mut watching = lock(&watching);
        if watching
            .get(&name)
            .is_some_and(|now| now.identity == watched.identity)
        {
            watching.remove(&name);
        }
    }
    watched.ended.cancel();
    let end = Ended {
        run: watched.run(),
        asked: watched.asked.load(Ordering::Relaxed),
        name,
        how,
    };
    // Nobody listens: nobody needs to know.
    let _ = ended.send(end);
}

#[async_trait]
impl Supervisor for Children {
    async fn start(&self, name: &str, command: Command) -> io::Result<Run> {
        let (lock, log) = (self.lock_path(name), self.log_path(name));
        let process = spawner::run(move || start(&lock, &log, &command)).await?;
        Ok(self.watch(name, process)?.run())
    }

    async fn running(&self, name: &str) -> io::Result<Option<Run>> {
        Ok(self.find(name).await?.map(|watched| watched.run()))
    }

    async fn was_started(&self, name: &str) -> io::Result<bool> {
        match tokio::fs::metadata(self.lock_path(name)).await {
            Ok(metadata) => Ok(metadata.len() > 0),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn stop(&self, name: &str) -> io::Result<()> {
        let Some(watched) = self.find(name).await? else {
            return Ok(());
        };
        watched.asked.store(true, Ordering::Relaxed);
        signal(&watched.pidfd, Signal::TERM)?;
        if tokio::time::timeout(GRACE, watched.ended.cancelled())
            .await
            .is_ok()
        {
            return Ok(());
        }
        tracing::warn!(instance = name, "did not end on SIGTERM, is killed");
        signal(&watched.pidfd, Signal::KILL)?;
        tokio::time::timeout(KILL_GRACE, watched.ended.cancelled())
            .await
            .map_err(|_| {
                io::Error::other(format!(
                    "process {} did not end on SIGKILL",
                    watched.identity.pid
                ))
            })
    }

    async fn forget(&self, name: &str) -> io::Result<()> {
        let (lock, log) = (self.lock_path(name), self.log_path(name));
        spawner::run(move || {
            let file = match File::options().read(true).write(true).open(&lock) {
                Ok(file) => file,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    return remove_if_there(&log);
                }
                Err(error) => return Err(error),
            };
            if !try_lock(&file)? {
                return Err(io::Error::other("its process still runs"));
            }
            remove_if_there(&log)?;
            remove_if_there(&lock)
        })
        .await
    }

    async fn last_words(&self, name: &str) -> Option<String> {
        let bytes = tokio::fs::read(self.log_path(name)).await.ok()?;
        let tail = &bytes[bytes.len().saturating_sub(4096)..];
        String::from_utf8_lossy(tail)
            .lines()
            .map(str::trim)
            .rfind(|line| !line.is_empty())
            .map(|line| line.chars().take(300).collect())
    }

    fn ended(&self) -> broadcast::Receiver<Ended> {
        self.ended.subscribe()
    }
}

pub(crate) fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn open_lock(path: &Path) -> io::Result<File> {
    File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
}

/// On the spawning thread: the holder of the lock, if it is held.
fn adopt(lock: &Path) -> io::Result<Option<Process>> {
    let file = match File::options().read(true).write(true).open(lock) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    adopt_open(&file)
}

fn adopt_open(lock: &File) -> io::Result<Option<Process>> {
    // A process that is just ending still holds its lock when it can be opened no more, and one
    // that another part of this program starts holds every open file until its exec.
    for _ in 0..50 {
        if try_lock(lock)? {
            return Ok(None);
        }
        if let Some(process) = holder(lock)? {
            return Ok(Some(process));
        }
        #[allow(
            clippy::disallowed_methods,
            reason = "this is the dedicated spawning thread, and no event tells of a released lock"
        )]
        std::thread::sleep(Duration::from_millis(10));
    }
    Err(io::Error::other(
        "its lock is held by a process that cannot be seen: is /proc restricted (hidepid), or does \
         the process belong to another user?",
    ))
}

/// On the spawning thread: starts the process, or gives the one that runs.
fn start(lock_path: &Path, log_path: &Path, command: &Command) -> io::Result<Process> {
    let lock = open_lock(lock_path)?;
    if let Some(process) = adopt_open(&lock)? {
        return Ok(process);
    }
    // Ours now, and empty: a crash between here and the note leaves a holder without a note.
    lock.set_len(0)?;
    let log = File::options()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(log_path)?;
    let stdin = lock.try_clone()?;
    let mut spawn = std::process::Command::new(&command.program);
    if let Some(arg0) = &command.arg0 {
        spawn.arg0(arg0);
    }
    spawn
        .args(&command.args)
        .current_dir("/")
        .env_clear()
        .envs(
            PASSED_ENVIRONMENT
                .iter()
                .filter_map(|name| Some((name, std::env::var_os(name)?))),
        )
        .stdin(Stdio::from(stdin))
        .stdout(Stdio::from(log.try_clone()?))
        .stderr(Stdio::from(log));
    let parent = rustix::process::getpid();
    let die_with_parent = command.die_with_parent;
    let before_exec = move || {
        // A session of its own: neither Ctrl-C nor a closed terminal reaches it.
        rustix::process::setsid()?;
        if die_with_parent {
            rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?;
            // The parent may have ended before the signal was asked for.
            if rustix::process::getppid() != Some(parent) {
                return Err(io::ErrorKind::Interrupted.into());
            }
        }
        Ok(())
    };
    #[allow(
        unsafe_code,
        reason = "a session of its own can only be made between fork and exec"
    )]
    // SAFETY: the closure makes only system calls that are async-signal-safe (setsid, prctl,
    // getppid), allocates nothing and takes no lock.
    unsafe {
        spawn.pre_exec(before_exec);
    }
    let child = spawn.spawn().map_err(|error| {
        io::Error::new(
            error.kind(),
            format!("{} cannot be started: {error}", command.program.display()),
        )
    })?;
    let pid = i32::try_from(child.id()).map_err(io::Error::other)?;
    // Not waited for yet, so that the pid is still its own even if it has ended already.
    let identity = Identity::of(pid)?
        .ok_or_else(|| io::Error::other(format!("process {pid} vanished as it started")))?;
    lock.write_all_at(identity.to_line().as_bytes(), 0)?;
    Process::open(identity)?
        .ok_or_else(|| io::Error::other(format!("process {pid} vanished as it started")))
}

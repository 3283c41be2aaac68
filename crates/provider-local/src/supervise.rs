//! How processes are started, watched and ended. Child processes are one way; a service manager
//! is another.

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;

use async_trait::async_trait;
use tokio::sync::broadcast;

/// What is to run.
#[derive(Debug, Clone)]
pub(crate) struct Command {
    pub(crate) program: PathBuf,
    /// What the process is called in listings, if not by its file.
    pub(crate) arg0: Option<OsString>,
    pub(crate) args: Vec<OsString>,
    /// Ends with the operator, however that ends.
    pub(crate) die_with_parent: bool,
}

/// One run of a process: another one has another number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run(pub(crate) u64);

/// The run of that instance has ended.
#[derive(Debug, Clone)]
pub(crate) struct Ended {
    pub(crate) name: String,
    pub(crate) run: Run,
    /// It was asked to end by [`Supervisor::stop`].
    pub(crate) asked: bool,
    /// How, where that is known.
    pub(crate) how: Option<String>,
}

/// At most one process an instance name, whatever crashes in between.
#[async_trait]
pub(crate) trait Supervisor: Send + Sync + 'static {
    /// Starts the process, unless one of this name runs already.
    async fn start(&self, name: &str, command: Command) -> io::Result<Run>;

    /// The run that is going on.
    async fn running(&self, name: &str) -> io::Result<Option<Run>>;

    /// Was it ever started?
    async fn was_started(&self, name: &str) -> io::Result<bool>;

    /// Ends it, at first politely; returns when it has ended. None running is fine.
    async fn stop(&self, name: &str) -> io::Result<()>;

    /// Removes what is kept of an instance that does not run.
    async fn forget(&self, name: &str) -> io::Result<()>;

    /// The last line that the process wrote, for people.
    async fn last_words(&self, name: &str) -> Option<String>;

    /// Ends of runs, as they happen.
    fn ended(&self) -> broadcast::Receiver<Ended>;
}

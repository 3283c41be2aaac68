//! One thread, for the life of the program, that starts processes and takes their locks.
//!
//! It must be one: a lock's descriptor that is open while another process is being started is
//! inherited for the moment until that one's exec, and would look held. It must live on: the kernel
//! sends the parent-death signal (prctl(2), PR_SET_PDEATHSIG) when the *thread* that started a
//! process ends, and threads of a runtime come and go.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};

use tokio::sync::oneshot;

type Job = Box<dyn FnOnce() + Send>;

static JOBS: OnceLock<Result<Sender<Job>, String>> = OnceLock::new();

fn jobs() -> io::Result<&'static Sender<Job>> {
    let started = JOBS.get_or_init(|| {
        let (jobs, queue) = channel::<Job>();
        std::thread::Builder::new()
            .name("local-spawner".to_owned())
            .spawn(move || {
                for job in queue {
                    // The asker sees its answer dropped; the others are served on.
                    let _ = catch_unwind(AssertUnwindSafe(job));
                }
            })
            .map(|_| jobs)
            .map_err(|error| error.to_string())
    });
    started
        .as_ref()
        .map_err(|error| io::Error::other(format!("the spawning thread did not start: {error}")))
}

/// Runs `job` on the thread. It runs to its end even when nobody waits for the answer any more.
pub(crate) async fn run<T, F>(job: F) -> io::Result<T>
where
    T: Send + 'static,
    F: FnOnce() -> io::Result<T> + Send + 'static,
{
    let (answer, answered) = oneshot::channel();
    let job: Job = Box::new(move || {
        // Nobody waits any more: what was done is found on disk by whoever looks next.
        let _ = answer.send(job());
    });
    let gone = || io::Error::other("the spawning thread dropped the job");
    jobs()?.send(job).map_err(|_| gone())?;
    answered.await.map_err(|_| gone())?
}

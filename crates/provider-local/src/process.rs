//! Processes that may or may not be ours, told apart without a chance of error.
//!
//! A pid alone says nothing: it is used again. A process is ours when it holds our lock file as
//! its standard input; it is the one that we noted when its start time is the same.

use std::fs::{self, File, Metadata};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::str::FromStr;

use rustix::fs::FlockOperation;
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions};

/// A pid and when its process started, in clock ticks since boot (proc(5), field 22 of `stat`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) pid: i32,
    pub(crate) start_time: u64,
}

impl Identity {
    /// The process that has this pid now; None when there is none.
    pub(crate) fn of(pid: i32) -> io::Result<Option<Self>> {
        let stat = match fs::read_to_string(format!("/proc/{pid}/stat")) {
            Ok(stat) => stat,
            Err(error)
                if error.kind() == io::ErrorKind::NotFound
                    || error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) =>
            {
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        // The command's name may hold anything, spaces and parentheses too: count from its end.
        let start_time = stat
            .rsplit_once(')')
            .and_then(|(_, rest)| rest.split_whitespace().nth(19))
            .and_then(|field| field.parse().ok())
            .ok_or_else(|| io::Error::other(format!("/proc/{pid}/stat is of an unknown form")))?;
        Ok(Some(Self { pid, start_time }))
    }

    /// `pid start-time`, as in a lock file.
    pub(crate) fn to_line(self) -> String {
        format!("{} {}\n", self.pid, self.start_time)
    }
}

impl FromStr for Identity {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let mut fields = text.split_whitespace();
        let mut next = || fields.next().ok_or(());
        let pid = next()?.parse().map_err(|_| ())?;
        let start_time = next()?.parse().map_err(|_| ())?;
        Ok(Self { pid, start_time })
    }
}

/// A handle that stays with its process, whatever becomes of the pid.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) identity: Identity,
    pub(crate) pidfd: OwnedFd,
}

impl Process {
    /// Opens the process of that pid if it is still the same; None when it is gone.
    pub(crate) fn open(wanted: Identity) -> io::Result<Option<Self>> {
        let Some(pid) = Pid::from_raw(wanted.pid) else {
            return Ok(None);
        };
        let pidfd = match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
            Ok(pidfd) => pidfd,
            Err(rustix::io::Errno::SRCH) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        // Looked at after opening: if it is the same now, the handle is its.
        Ok((Identity::of(wanted.pid)? == Some(wanted)).then_some(Self {
            identity: wanted,
            pidfd,
        }))
    }
}

/// A process that has ended already is no error.
pub(crate) fn signal(pidfd: &OwnedFd, signal: Signal) -> io::Result<()> {
    match rustix::process::pidfd_send_signal(pidfd, signal) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Takes the exit status of a process that has ended, if it was our child. None: it was not.
pub(crate) fn reap(pidfd: &OwnedFd) -> Option<String> {
    use std::os::fd::AsFd;
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
    let status = rustix::process::waitid(WaitId::PidFd(pidfd.as_fd()), options).ok()??;
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => Some(format!("exit status {code}")),
        (_, Some(signal)) => Some(format!("signal {signal}")),
        _ => None,
    }
}

/// Takes the lock, unless a process holds it.
pub(crate) fn try_lock(lock: &File) -> io::Result<bool> {
    match rustix::fs::flock(lock, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// The process that holds this (held) lock as its standard input: first the one that is noted in
/// it, else a search, for a start that was cut off before the note.
pub(crate) fn holder(lock: &File) -> io::Result<Option<Process>> {
    let wanted = lock.metadata()?;
    let mut text = [0; 64];
    let read = lock.read_at(&mut text, 0)?;
    let noted = std::str::from_utf8(&text[..read])
        .ok()
        .and_then(|text| text.parse::<Identity>().ok());
    if let Some(noted) = noted
        && let Some(process) = Process::open(noted)?
    {
        return Ok(Some(process));
    }
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse().ok()) else {
            continue;
        };
        if !has_as_stdin(&entry.path(), &wanted) {
            continue;
        }
        let Some(identity) = Identity::of(pid)? else {
            continue;
        };
        if let Some(process) = Process::open(identity)?
            && has_as_stdin(&entry.path(), &wanted)
        {
            return Ok(Some(process));
        }
    }
    Ok(None)
}

fn has_as_stdin(process: &Path, wanted: &Metadata) -> bool {
    // Processes of others cannot be looked into, and are not ours.
    fs::metadata(process.join("fd/0"))
        .is_ok_and(|stdin| stdin.dev() == wanted.dev() && stdin.ino() == wanted.ino())
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn this_process_has_an_identity_and_no_other_has_it() {
        let pid = i32::try_from(std::process::id()).unwrap();
        let me = Identity::of(pid).unwrap().unwrap();
        assert_eq!(me.to_line().parse(), Ok(me));
        assert!(Process::open(me).unwrap().is_some());
        let recycled = Identity {
            start_time: me.start_time + 1,
            ..me
        };
        assert!(Process::open(recycled).unwrap().is_none());
        assert_eq!(Identity::of(i32::MAX).unwrap(), None);
    }

    #[test]
    fn the_holder_is_found_with_and_without_a_note() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        let open = || {
            File::options()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(&path)
                .unwrap()
        };
        let lock = open();
        assert!(try_lock(&lock).unwrap());
        let mut child = Command::new("sleep")
            .arg("60")
            .stdin(Stdio::from(lock))
            .spawn()
            .unwrap();
        let again = open();
        assert!(!try_lock(&again).unwrap());
        let found = holder(&again).unwrap().unwrap();
        assert_eq!(found.identity.pid, i32::try_from(child.id()).unwrap());
        // A note of a process that is no more does not mislead.
        let wrong = Identity {
            pid: found.identity.pid,
            start_time: 1,
        };
        again.write_all_at(wrong.to_line().as_bytes(), 0).unwrap();
        assert_eq!(holder(&again).unwrap().unwrap().identity, found.identity);
        signal(&found.pidfd, Signal::KILL).unwrap();
        child.wait().unwrap();
        assert!(try_lock(&again).unwrap());
        signal(&found.pidfd, Signal::KILL).unwrap();
    }
}

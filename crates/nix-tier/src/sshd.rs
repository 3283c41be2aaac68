//! A real sshd with the rendered access, and what a key may and may not do there.
//!
//! Each connection gets an sshd of its own, as its `ProxyCommand`, in a mount namespace where the
//! user, the libvirt socket and the key file are in the places that the rendered configuration
//! names. No port is opened and nothing of the machine is changed.

use std::fs;
use std::io::Read as _;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::exec::{Ended, run, until, within};

/// What every listener says to whoever reaches it.
const REACHED: &str = "REACHED";
const LIMIT: Duration = Duration::from_secs(20);

/// What is run as `ProxyCommand`.
const ENTER: &str = r#"
set -e
mount --make-rprivate /
for file in passwd group shadow; do mount --bind "$W/$file" "/etc/$file"; done
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/sshd /run/libvirt /run/keys /run/current-system/sw/bin
ln -s /usr/sbin/nologin /run/current-system/sw/bin/nologin
mount --bind "$W/sockets" /run/libvirt
cp "$W/authorized_keys" /run/keys/
exec /usr/sbin/sshd -i -f "$W/sshd_config" -E "$W/sshd.log"
"#;

/// A machine that lets one user in.
pub struct Server {
    dir: PathBuf,
    user: String,
    tcp: Listener,
    socket: Listener,
    other: Listener,
}

struct Listener {
    reached: Arc<AtomicUsize>,
    port: u16,
}

impl Listener {
    fn count(&self) -> usize {
        self.reached.load(Ordering::SeqCst)
    }
}

/// What is tried. All but the libvirt socket must be refused to a restricted key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Attempt {
    Shell,
    Pty,
    Sftp,
    LocalTcp,
    OtherSocket,
    RemoteTcp,
    RemoteSocket,
    Agent,
}

impl Attempt {
    pub const ALL: [Self; 8] = [
        Self::Shell,
        Self::Pty,
        Self::Sftp,
        Self::LocalTcp,
        Self::OtherSocket,
        Self::RemoteTcp,
        Self::RemoteSocket,
        Self::Agent,
    ];
}

impl Server {
    /// `match_block` follows sshd's other settings; `key_options` come before the key, with a space.
    ///
    /// # Errors
    /// When files, keys or listeners cannot be made.
    pub fn new(
        dir: &Path,
        user: &str,
        shell: &str,
        match_block: &str,
        key_options: &str,
    ) -> Result<Self> {
        fs::set_permissions(dir, fs::Permissions::from_mode(0o755))?;
        for key in ["host", "client"] {
            run(Command::new("ssh-keygen")
                .args(["-q", "-t", "ed25519", "-N", "", "-f"])
                .arg(dir.join(key)))?;
        }
        let public = fs::read_to_string(dir.join("client.pub"))?;
        fs::write(
            dir.join("authorized_keys"),
            format!("{key_options}{public}"),
        )?;
        let host = fs::read_to_string(dir.join("host.pub"))?;
        fs::write(dir.join("known_hosts"), format!("hypervisor {host}"))?;

        let add = |file: &str, line: String| -> Result<()> {
            let there = fs::read_to_string(Path::new("/etc").join(file))?;
            fs::write(dir.join(file), format!("{}\n{line}\n", there.trim_end()))?;
            Ok(())
        };
        add("passwd", format!("{user}:x:64999:64999::/:{shell}"))?;
        add("group", format!("{user}:x:64999:"))?;
        add("shadow", format!("{user}:*:19000:0:99999:7:::"))?;

        let w = dir.display();
        fs::write(
            dir.join("sshd_config"),
            format!(
                "HostKey {w}/host\nAuthorizedKeysFile /run/keys/authorized_keys\nUsePAM yes\n\
                 PidFile none\nLogLevel DEBUG1\nPasswordAuthentication no\n\
                 Subsystem sftp /usr/lib/openssh/sftp-server\n{match_block}"
            ),
        )?;
        fs::write(dir.join("enter.sh"), ENTER)?;

        let sockets = dir.join("sockets");
        fs::create_dir(&sockets)?;
        fs::set_permissions(&sockets, fs::Permissions::from_mode(0o777))?;
        let listen = |name: &str| -> Result<Listener> {
            let path = sockets.join(name);
            let listener = UnixListener::bind(&path)?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o666))?;
            Ok(serve(0, move || Some(listener.accept().ok()?.0)))
        };
        let socket = listen("libvirt-sock")?;
        let other = listen("other-sock")?;
        let tcp = TcpListener::bind("127.0.0.1:0")?;
        let port = tcp.local_addr()?.port();
        let tcp = serve(port, move || Some(tcp.accept().ok()?.0));
        Ok(Self {
            dir: dir.to_owned(),
            user: user.to_owned(),
            tcp,
            socket,
            other,
        })
    }

    fn client(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        let w = self.dir.display();
        command
            .args(["-F", "none", "-i"])
            .arg(self.dir.join("client"));
        for option in [
            format!("ProxyCommand=env W={w} unshare --mount sh {w}/enter.sh"),
            format!("UserKnownHostsFile={w}/known_hosts"),
            "HostKeyAlias=hypervisor".to_owned(),
            "StrictHostKeyChecking=yes".to_owned(),
            "IdentitiesOnly=yes".to_owned(),
            "BatchMode=yes".to_owned(),
        ] {
            command.arg("-o").arg(option);
        }
        command
    }

    fn destination(&self) -> String {
        format!("{}@hypervisor", self.user)
    }

    fn ssh(&self, options: &[&str], words: &[&str]) -> Result<Ended> {
        let mut command = self.client("ssh");
        command.args(options).arg(self.destination()).args(words);
        within(&mut command, "", LIMIT)
    }

    /// What sshd wrote of all connections.
    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.join("sshd.log")).unwrap_or_default()
    }

    /// Whether the libvirt socket can be reached through a forwarded one.
    ///
    /// # Errors
    /// When ssh cannot be run.
    pub fn reaches_libvirt(&self) -> Result<bool> {
        let before = self.socket.count();
        let answered = self.through("/run/libvirt/libvirt-sock")?;
        Ok(answered && self.socket.count() > before)
    }

    /// Tries something; true when it got through.
    ///
    /// # Errors
    /// When the client cannot be run.
    pub fn attempt(&self, what: Attempt) -> Result<bool> {
        match what {
            Attempt::Shell => Ok(self.ssh(&[], &["echo", REACHED])?.stdout.contains(REACHED)),
            Attempt::Pty => {
                let ended = self.ssh(&["-tt"], &["test", "-t", "0", "&&", "echo", REACHED])?;
                Ok(ended.stdout.contains(REACHED))
            }
            Attempt::Sftp => {
                let mut command = self.client("sftp");
                command.args(["-b", "-"]).arg(self.destination());
                Ok(within(&mut command, "ls /\n", LIMIT)?.success == Some(true))
            }
            Attempt::LocalTcp => {
                let before = self.tcp.count();
                let target = format!("127.0.0.1:{}", self.tcp.port);
                let ended = self.ssh(&["-W", &target], &[])?;
                Ok(ended.stdout.contains(REACHED) || self.tcp.count() > before)
            }
            Attempt::OtherSocket => {
                let before = self.other.count();
                let answered = self.through("/run/libvirt/other-sock")?;
                Ok(answered || self.other.count() > before)
            }
            Attempt::RemoteTcp => {
                let ended = self.forward("127.0.0.1:0:127.0.0.1:1", || false)?;
                Ok(ended.contains("Allocated port"))
            }
            Attempt::RemoteSocket => {
                let made = self.dir.join("sockets/remote.sock");
                let mut seen = false;
                self.forward("/run/libvirt/remote.sock:127.0.0.1:1", || {
                    seen = made.exists();
                    seen
                })?;
                Ok(seen)
            }
            Attempt::Agent => {
                let path = self.dir.join("agent.sock");
                let _ = fs::remove_file(&path);
                let mut agent = Command::new("ssh-agent")
                    .arg("-D")
                    .arg("-a")
                    .arg(&path)
                    .stdin(Stdio::null())
                    .stdout(Stdio::null())
                    .spawn()
                    .context("cannot run ssh-agent")?;
                until(LIMIT, || path.exists());
                let mut command = self.client("ssh");
                command
                    .env("SSH_AUTH_SOCK", &path)
                    .args(["-A"])
                    .arg(self.destination())
                    .args(["test", "-S", "\"$SSH_AUTH_SOCK\"", "&&", "echo", REACHED]);
                let ended = within(&mut command, "", LIMIT);
                let _ = agent.kill();
                agent.wait()?;
                Ok(ended?.stdout.contains(REACHED))
            }
        }
    }

    /// Asks for a remote forward and gives what the client said; ended as soon as `seen` says so, or
    /// by the server's refusal, or when it has stood for a moment.
    fn forward(&self, what: &str, mut seen: impl FnMut() -> bool) -> Result<String> {
        let stderr = self.dir.join("forward.err");
        let mut child = self
            .client("ssh")
            .args(["-N", "-o", "ExitOnForwardFailure=yes", "-R", what])
            .arg(self.destination())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(&stderr)?)
            .spawn()
            .context("cannot run ssh")?;
        let said = || fs::read_to_string(&stderr).unwrap_or_default();
        until(LIMIT, || {
            seen() || said().contains("Allocated port") || !matches!(child.try_wait(), Ok(None))
        });
        let _ = child.kill();
        child.wait()?;
        Ok(said())
    }

    /// Forwards a local socket to a path over there; true when somebody answered at it.
    fn through(&self, path: &str) -> Result<bool> {
        let local = self.dir.join("local.sock");
        let _ = fs::remove_file(&local);
        let mut child = self
            .client("ssh")
            .args(["-N", "-L", &format!("{}:{path}", local.display())])
            .arg(self.destination())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("cannot run ssh")?;
        let up = until(LIMIT, || {
            local.exists() || !matches!(child.try_wait(), Ok(None))
        });
        let mut said = String::new();
        if up && local.exists() {
            let mut stream = UnixStream::connect(&local)?;
            stream.set_read_timeout(Some(LIMIT))?;
            // A refusal closes the connection; that is an answer too.
            let _ = stream.read_to_string(&mut said);
        }
        let _ = child.kill();
        child.wait()?;
        Ok(said.contains(REACHED))
    }
}

/// Greets everybody and counts.
fn serve<S: std::io::Write + Send + 'static>(
    port: u16,
    mut accept: impl FnMut() -> Option<S> + Send + 'static,
) -> Listener {
    let reached = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&reached);
    std::thread::spawn(move || {
        while let Some(mut stream) = accept() {
            count.fetch_add(1, Ordering::SeqCst);
            let _ = stream.write_all(REACHED.as_bytes());
        }
    });
    Listener { reached, port }
}

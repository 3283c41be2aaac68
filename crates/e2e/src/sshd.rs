//! An sshd of the lab's own, with throwaway keys, in front of one host.
//!
//! It runs on the host, so that a client reaches the sockets that the host has, as a user that may
//! use libvirt and has no shell.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use tokio::process::Command;

use crate::exec;
use crate::host::Host;
use crate::lab::{HOST_USER, Lab};
use crate::process::{Process, Seen, until};

const START: Duration = Duration::from_secs(20);
const KEYGEN: Duration = Duration::from_secs(20);

/// What a host that serves only libvirt would allow: one socket, nothing else.
pub const TIGHT: &str = "AllowTcpForwarding local\n\
                         AllowStreamLocalForwarding local\n\
                         PermitOpen [/run/libvirt/libvirt-sock]:*\n\
                         PermitTTY no\n\
                         X11Forwarding no\n\
                         AllowAgentForwarding no\n\
                         ForceCommand /usr/sbin/nologin\n";

/// A running (or stopped) sshd.
#[derive(Debug)]
pub struct Sshd {
    dir: PathBuf,
    address: SocketAddr,
    process: Option<Process>,
}

impl Host {
    /// An sshd on `127.0.0.1:22` of the lab plus the host's number in the last byte, with these
    /// further lines in its configuration.
    ///
    /// # Errors
    /// When it does not start.
    pub async fn mk_sshd(&self, options: &str) -> anyhow::Result<Sshd> {
        let dir = self.dir().join("ssh");
        fs::create_dir_all(&dir)?;
        for key in ["host_ed25519", "client_ed25519", "other_ed25519"] {
            mk_key(&dir.join(key)).await?;
        }
        fs::copy(dir.join("client_ed25519.pub"), dir.join("authorized_keys"))?;
        let number = self.address().octets()[2];
        let address = SocketAddr::from((Ipv4Addr::new(127, 0, 1, number + 1), 22));
        let mut sshd = Sshd {
            dir,
            address,
            process: None,
        };
        sshd.start(self, options).await?;
        Ok(sshd)
    }
}

async fn mk_key(path: &Path) -> anyhow::Result<()> {
    if path.exists() {
        return Ok(());
    }
    exec::run_within(
        Command::new("ssh-keygen")
            .args(["-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f"])
            .arg(path),
        KEYGEN,
    )
    .await
    .map(drop)
}

impl Sshd {
    /// Starts it on `host`, whose keys stay the same over restarts.
    ///
    /// # Errors
    /// When it does not listen in time.
    pub async fn start(&mut self, host: &Host, options: &str) -> anyhow::Result<()> {
        let dir = self.dir.display();
        let config = self.dir.join("sshd_config");
        // MaxStartups: the default drops connections when many dial at once.
        fs::write(
            &config,
            format!(
                "ListenAddress {address}\nHostKey {dir}/host_ed25519\n\
                 AuthorizedKeysFile {dir}/authorized_keys\nPidFile none\nUsePAM no\n\
                 StrictModes no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n\
                 AllowUsers {HOST_USER}\nMaxStartups 100:30:200\nLogLevel VERBOSE\n{options}\n",
                address = self.address,
            ),
        )?;
        let mut process = host.spawn(
            "sshd",
            host.command("/usr/sbin/sshd")
                .args(["-D", "-e", "-f"])
                .arg(&config),
        )?;
        let address = self.address;
        until("sshd", START, async || {
            process.check_alive()?;
            Ok(match tokio::net::TcpStream::connect(address).await {
                Ok(_) => Seen::There(()),
                Err(error) => Seen::not_yet(error),
            })
        })
        .await?;
        self.process = Some(process);
        Ok(())
    }

    /// Ends it and all its sessions.
    ///
    /// # Errors
    /// When it does not run.
    pub async fn kill(&mut self) -> anyhow::Result<()> {
        let process = self.process.take().context("sshd does not run")?;
        process.kill_children();
        process.kill().await
    }

    /// Ends all sessions; new ones are served.
    ///
    /// # Errors
    /// When it does not run.
    pub fn cut_sessions(&self) -> anyhow::Result<()> {
        self.process
            .as_ref()
            .context("sshd does not run")?
            .kill_children();
        Ok(())
    }

    /// It and its sessions keep their connections and do nothing: a host that hangs.
    ///
    /// # Errors
    /// When it does not run.
    pub fn freeze(&self) -> anyhow::Result<()> {
        self.process.as_ref().context("sshd does not run")?.freeze()
    }

    /// The end of [`Self::freeze`].
    ///
    /// # Errors
    /// When it does not run.
    pub fn thaw(&self) -> anyhow::Result<()> {
        self.process.as_ref().context("sshd does not run")?.thaw()
    }

    /// Gives it a new host key, as a reinstalled machine (or another in the middle) has.
    ///
    /// # Errors
    /// When no key can be made.
    pub async fn change_host_key(&self) -> anyhow::Result<()> {
        for file in ["host_ed25519", "host_ed25519.pub"] {
            fs::remove_file(self.dir.join(file))?;
        }
        mk_key(&self.dir.join("host_ed25519")).await
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The key that is let in.
    pub fn client_key(&self) -> PathBuf {
        self.dir.join("client_ed25519")
    }

    /// A key that is not.
    pub fn other_key(&self) -> PathBuf {
        self.dir.join("other_ed25519")
    }

    /// The line of `known_hosts` for it.
    ///
    /// # Errors
    /// When the key cannot be read.
    pub fn known_hosts_line(&self) -> anyhow::Result<String> {
        let key = fs::read_to_string(self.dir.join("host_ed25519.pub"))?;
        let host = match self.address.port() {
            22 => self.address.ip().to_string(),
            port => format!("[{}]:{port}", self.address.ip()),
        };
        Ok(format!("{host} {}\n", key.trim()))
    }

    /// A `known_hosts` file with its line.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn mk_known_hosts(&self) -> anyhow::Result<PathBuf> {
        let path = self.dir.join("known_hosts");
        fs::write(&path, self.known_hosts_line()?)?;
        Ok(path)
    }

    /// OpenSSH's own client, which forwards a socket of the host's to one of the lab's: the way
    /// with which ours is compared. It runs until the lab ends.
    ///
    /// # Errors
    /// When the client does not get in.
    pub async fn mk_forward(&self, lab: &Lab, socket: &str) -> anyhow::Result<PathBuf> {
        let local = self.dir.join("forwarded");
        let known_hosts = self.mk_known_hosts()?;
        let mut client = Process::spawn(
            "ssh-client",
            Command::new("ssh")
                .args([
                    "-F",
                    "none",
                    "-N",
                    "-o",
                    "BatchMode=yes",
                    "-o",
                    "ExitOnForwardFailure=yes",
                ])
                .args([
                    "-o",
                    "StrictHostKeyChecking=yes",
                    "-o",
                    "IdentitiesOnly=yes",
                ])
                .arg("-o")
                .arg(format!("UserKnownHostsFile={}", known_hosts.display()))
                .arg("-i")
                .arg(self.client_key())
                .arg("-L")
                .arg(format!("{}:{socket}", local.display()))
                .arg(format!("{HOST_USER}@{}", self.address.ip()))
                .args(["-p", &self.address.port().to_string()]),
            &lab.log("ssh-client"),
        )?;
        until("the forwarded socket", START, async || {
            client.check_alive()?;
            Ok(if local.exists() {
                Seen::There(())
            } else {
                Seen::not_yet("no socket")
            })
        })
        .await?;
        Ok(local)
    }

    /// What it logged so far.
    ///
    /// # Errors
    /// When it does not run.
    pub fn log(&self) -> anyhow::Result<String> {
        self.process.as_ref().context("sshd does not run")?.output()
    }
}

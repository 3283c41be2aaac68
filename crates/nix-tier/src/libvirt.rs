//! A real libvirtd in namespaces of its own, for the rendered pools and networks.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use crate::exec::{find, run, until};

/// Packages, by Debian's names, and a program each brings.
pub const NEEDS: [(&str, &str); 4] = [
    ("libvirt-daemon-system", "libvirtd"),
    ("libvirt-clients", "virsh"),
    ("dnsmasq-base", "dnsmasq"),
    ("iptables", "iptables"),
];

/// What is missing of [`NEEDS`].
pub fn missing() -> Vec<&'static str> {
    NEEDS
        .iter()
        .filter(|(_, program)| find(program).is_none())
        .map(|(p, _)| *p)
        .collect()
}

/// Validates XML against libvirt's schemas.
///
/// # Errors
/// With what the validator said.
pub fn validate(xml: &Path) -> Result<()> {
    run(Command::new("virt-xml-validate").arg(xml)).map(drop)
}

/// libvirtd in its own mount and network namespaces: whatever it makes goes with it.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    pub dir: PathBuf,
}

/// Private mounts, loopback, then the daemon itself, so that the child is the daemon.
const ENTER: &str = r#"
set -e
mount --make-rprivate /
mkdir -p "$W/lib" "$W/run" "$W/log" "$W/state"
cp -a /etc/libvirt "$W/etc"
rm -rf "$W"/etc/qemu/networks "$W"/etc/storage
mount -t tmpfs tmpfs /run
mkdir -p /run/libvirt /run/lock
mkdir -p /var/lib/libvirt /var/log/libvirt
mount --bind "$W/lib" /var/lib/libvirt
mount --bind "$W/log" /var/log/libvirt
mount --bind "$W/etc" /etc/libvirt
ip link set lo up
exec libvirtd -f "$W/libvirtd.conf" --timeout 0 >"$W/libvirtd.log" 2>&1
"#;

impl Daemon {
    /// Starts it and waits until it answers.
    ///
    /// # Errors
    /// When it does not, with its log.
    pub fn start(dir: &Path) -> Result<Self> {
        fs::write(
            dir.join("libvirtd.conf"),
            "auth_unix_ro = \"none\"\nauth_unix_rw = \"none\"\nunix_sock_group = \"root\"\n",
        )?;
        let child = Command::new("unshare")
            .args(["--mount", "--net", "sh", "-c", ENTER])
            .env("W", dir)
            .stdin(Stdio::null())
            .spawn()
            .context("cannot run unshare")?;
        let daemon = Self {
            child,
            dir: dir.to_owned(),
        };
        let answers = until(Duration::from_secs(60), || {
            daemon.virsh(&["uri"]).is_ok() && daemon.virsh(&["pool-list"]).is_ok()
        });
        if !answers {
            let log = fs::read_to_string(dir.join("libvirtd.log")).unwrap_or_default();
            bail!("libvirtd does not answer:\n{log}");
        }
        Ok(daemon)
    }

    /// A program beside the daemon.
    pub fn inside(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command
            .args([
                "--target",
                &self.child.id().to_string(),
                "--mount",
                "--net",
                "--",
            ])
            .arg(program)
            .env("LIBVIRT_DEFAULT_URI", "qemu:///system")
            .env("STATE_DIRECTORY", self.dir.join("state"));
        command
    }

    /// # Errors
    /// When virsh fails, with what it said.
    pub fn virsh(&self, args: &[&str]) -> Result<String> {
        run(self.inside("virsh").arg("-q").args(args))
    }

    /// Runs the hypervisor module's script with definitions, as the unit does.
    ///
    /// # Errors
    /// When it fails, with what it said.
    pub fn reconcile(&self, definitions: &Path) -> Result<String> {
        run(self
            .inside("bash")
            .arg(crate::root().join("modules/hypervisor/reconcile.sh"))
            .arg(definitions))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // dnsmasq is the daemon's child and has the namespace's only reason to stay.
        let _ = self
            .inside("sh")
            .args(["-c", "kill $(cat /run/libvirt/network/*.pid)"])
            .output();
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

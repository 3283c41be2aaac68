//! A libvirt host of a lab: libvirtd and virtlogd with files, sockets and a bridge of their own.
//!
//! Two hosts of one lab share its network, as two machines in one rack do, and nothing else: each
//! sees its own `/run/libvirt`, `/var/lib/libvirt` and `/etc/libvirt`.

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use rustix::process::Signal;
use tokio::process::Command;

use crate::cache::{self, Key};
use crate::exec;
use crate::lab::Lab;
use crate::process::{Process, Seen, until};

/// Probing QEMU's abilities takes seconds the first time.
const START: Duration = Duration::from_secs(60);
/// For one call of virsh.
const CALL: Duration = Duration::from_secs(60);

const LIBVIRTD_CONF: &str = r#"
unix_sock_group = "libvirt"
unix_sock_rw_perms = "0770"
auth_unix_ro = "none"
auth_unix_rw = "none"
log_outputs = "2:stderr"
"#;

/// No cgroups and no confinement: a test machine is often a container.
const QEMU_CONF: &str = r#"
security_driver = "none"
user = "root"
group = "root"
dynamic_ownership = 0
remember_owner = 0
cgroup_controllers = []
namespaces = []
stdio_handler = "logd"
"#;

/// One host.
#[derive(Debug)]
pub struct Host {
    name: String,
    number: u8,
    dir: PathBuf,
    log_dir: PathBuf,
    /// A file that keeps the host's mount namespace.
    namespace: PathBuf,
    virtlogd: Option<Process>,
    libvirtd: Option<Process>,
}

impl Lab {
    /// A host without daemons yet. `number` tells the hosts of a lab apart: its network is
    /// `10.77.NUMBER.0/24`.
    ///
    /// # Errors
    /// When its mount namespace cannot be made.
    pub async fn mk_host_stopped(&self, name: &str, number: u8) -> anyhow::Result<Host> {
        let dir = self.mk_dir(&format!("hosts/{name}"))?;
        let host = Host {
            name: name.to_owned(),
            number,
            log_dir: self.dir().join("log"),
            namespace: dir.join("mnt"),
            dir,
            virtlogd: None,
            libvirtd: None,
        };
        host.prepare()
            .await
            .with_context(|| format!("preparing host {name}"))?;
        Ok(host)
    }

    /// A running host with a pool `default` and a network `default`.
    ///
    /// # Errors
    /// When a daemon does not start.
    pub async fn mk_host(&self, name: &str, number: u8) -> anyhow::Result<Host> {
        let mut host = self.mk_host_stopped(name, number).await?;
        host.start().await?;
        host.mk_pool("default").await?;
        host.mk_network("default").await?;
        Ok(host)
    }
}

impl Host {
    async fn prepare(&self) -> anyhow::Result<()> {
        // Seen from the host, and seen from the rest of the lab.
        let views = [
            ("/run/libvirt", self.dir.join("run")),
            ("/var/lib/libvirt", self.dir.join("lib")),
            ("/var/cache/libvirt", self.dir.join("cache")),
            ("/var/log/libvirt", self.dir.join("log")),
            ("/etc/libvirt", self.dir.join("etc")),
        ];
        let etc = &views[4].1;
        exec::copy_tree(Path::new("/etc/libvirt"), etc)?;
        fs::write(etc.join("qemu.conf"), QEMU_CONF)?;
        fs::write(etc.join("libvirtd.conf"), LIBVIRTD_CONF)?;
        // Networks and pools that the machine itself may have are not this host's.
        for definitions in ["qemu/networks", "storage", "qemu/autostart"] {
            let dir = etc.join(definitions);
            let _ = fs::remove_dir_all(&dir);
            fs::create_dir_all(dir)?;
        }
        fs::write(&self.namespace, "")?;
        // unshare's helper may look before the namespace is new, and then has nothing to bind.
        until("a mount namespace", START, async || {
            let mut unshare = Command::new("unshare");
            unshare
                .arg(format!("--mount={}", self.namespace.display()))
                .args(["--propagation", "private", "true"]);
            let made = exec::run_within(&mut unshare, CALL).await;
            Ok(made.map_or_else(Seen::not_yet, |_| Seen::There(())))
        })
        .await?;
        for (place, view) in &views {
            fs::create_dir_all(view)?;
            fs::create_dir_all(place)?;
            exec::run_within(
                self.command("mount").arg("--bind").arg(view).arg(place),
                CALL,
            )
            .await?;
        }
        Ok(())
    }

    /// The host's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The directory of the host's files, the same path inside and outside of it.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// A program that runs on this host.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--mount={}", self.namespace.display()))
            .args(["--", program])
            .env("LC_ALL", "C.UTF-8");
        command
    }

    /// Starts a daemon of the host's.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn spawn(&self, name: &str, command: &mut Command) -> anyhow::Result<Process> {
        let name = format!("{}-{name}", self.name);
        Process::spawn(&name, command, &self.log_dir.join(format!("{name}.log")))
    }

    /// libvirt's socket, as the rest of the lab sees it.
    pub fn socket(&self) -> PathBuf {
        self.dir.join("run/libvirt-sock")
    }

    /// The host's own address on its bridge, where guests find what runs in the lab.
    pub fn address(&self) -> Ipv4Addr {
        Ipv4Addr::new(10, 77, self.number, 1)
    }

    /// Starts virtlogd and libvirtd, and waits until libvirt answers.
    ///
    /// # Errors
    /// When a daemon ends at once or does not answer in time.
    pub async fn start(&mut self) -> anyhow::Result<()> {
        let capabilities = Capabilities::of(&self.dir).await?;
        capabilities.restore()?;
        if self.virtlogd.is_none() {
            let log = self.dir.join("run/virtlogd.pid");
            self.virtlogd =
                Some(self.spawn("virtlogd", self.command("virtlogd").arg("-p").arg(log))?);
            let socket = self.dir.join("run/virtlogd-sock");
            until("virtlogd's socket", START, async || {
                Ok(match socket.exists() {
                    true => Seen::There(()),
                    false => Seen::not_yet("no socket"),
                })
            })
            .await?;
        }
        ensure!(
            self.libvirtd.is_none(),
            "libvirtd of {} runs already",
            self.name
        );
        let mut libvirtd = self.spawn(
            "libvirtd",
            self.command("libvirtd")
                .arg("-p")
                .arg(self.dir.join("run/libvirtd.pid"))
                .args(["-f", "/etc/libvirt/libvirtd.conf", "--timeout", "0"]),
        )?;
        let socket = self.socket();
        until("libvirtd's socket", START, async || {
            libvirtd.check_alive()?;
            Ok(match tokio::net::UnixStream::connect(&socket).await {
                Ok(_) => Seen::There(()),
                Err(error) => Seen::not_yet(error),
            })
        })
        .await?;
        self.libvirtd = Some(libvirtd);
        // The first connection waits until all drivers are there.
        self.virsh(&["uri"]).await?;
        capabilities.keep()
    }

    /// Stops libvirtd as a service manager would; guests go on.
    ///
    /// # Errors
    /// When it does not end.
    pub async fn stop(&mut self) -> anyhow::Result<()> {
        match self.libvirtd.take() {
            Some(libvirtd) => libvirtd.stop().await.map(drop),
            None => bail!("libvirtd of {} does not run", self.name),
        }
    }

    /// Kills libvirtd; guests go on.
    ///
    /// # Errors
    /// When it does not run.
    pub async fn kill(&mut self) -> anyhow::Result<()> {
        let libvirtd = self.libvirtd.take().context("libvirtd does not run")?;
        libvirtd.kill().await
    }

    /// [`Self::stop`] and [`Self::start`].
    ///
    /// # Errors
    /// As those.
    pub async fn restart(&mut self) -> anyhow::Result<()> {
        self.stop().await?;
        self.start().await
    }

    /// libvirtd hangs: it holds its sockets open and answers nothing.
    ///
    /// # Errors
    /// When it does not run.
    pub fn freeze(&self) -> anyhow::Result<()> {
        self.libvirtd
            .as_ref()
            .context("libvirtd does not run")?
            .signal(Signal::STOP)
    }

    /// The end of [`Self::freeze`].
    ///
    /// # Errors
    /// When it does not run.
    pub fn thaw(&self) -> anyhow::Result<()> {
        self.libvirtd
            .as_ref()
            .context("libvirtd does not run")?
            .signal(Signal::CONT)
    }

    /// Runs virsh against the host, from outside of it.
    ///
    /// # Errors
    /// When virsh fails; its message is in the error.
    pub async fn virsh(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let uri = format!("qemu+unix:///system?socket={}", self.socket().display());
        exec::run_within(
            Command::new("virsh")
                .args(["-q", "-c", &uri])
                .args(arguments)
                .env("LC_ALL", "C.UTF-8"),
            CALL,
        )
        .await
    }

    /// The lines of an answer of virsh's that lists names.
    ///
    /// # Errors
    /// As [`Self::virsh`].
    pub async fn names(&self, arguments: &[&str]) -> anyhow::Result<Vec<String>> {
        let text = self.virsh(arguments).await?;
        let mut names: Vec<String> = text
            .lines()
            .filter_map(|line| line.split_whitespace().next())
            .map(str::to_owned)
            .collect();
        names.sort();
        Ok(names)
    }

    /// All domains, running or not.
    ///
    /// # Errors
    /// As [`Self::virsh`].
    pub async fn domains(&self) -> anyhow::Result<Vec<String>> {
        self.names(&["list", "--all", "--name"]).await
    }

    /// The volumes of a pool, after a look at what is really there.
    ///
    /// # Errors
    /// As [`Self::virsh`].
    pub async fn volumes(&self, pool: &str) -> anyhow::Result<Vec<String>> {
        self.virsh(&["pool-refresh", pool]).await?;
        self.names(&["vol-list", pool]).await
    }

    /// `running`, `shut off` and so on.
    ///
    /// # Errors
    /// As [`Self::virsh`].
    pub async fn state(&self, domain: &str) -> anyhow::Result<String> {
        Ok(self.virsh(&["domstate", domain]).await?.trim().to_owned())
    }

    /// Waits until the host runs exactly one domain, and gives its name.
    ///
    /// # Errors
    /// When it does not within `limit`.
    pub async fn running_domain(&self, limit: Duration) -> anyhow::Result<String> {
        until("one running domain", limit, async || {
            let mut names = self.names(&["list", "--name"]).await?;
            Ok(match (names.pop(), names.is_empty()) {
                (Some(name), true) => Seen::There(name),
                (last, _) => Seen::not_yet(format!("{names:?} {last:?}")),
            })
        })
        .await
    }

    /// The leases that the network's DHCP server gave a domain.
    ///
    /// # Errors
    /// As [`Self::virsh`].
    pub async fn leased_address(&self, domain: &str) -> anyhow::Result<Option<Ipv4Addr>> {
        let text = self
            .virsh(&["domifaddr", domain, "--source", "lease"])
            .await?;
        Ok(text
            .split_whitespace()
            .filter_map(|word| word.split_once('/'))
            .find_map(|(address, _)| address.parse().ok()))
    }

    /// Waits until the network's DHCP server gave a domain an address.
    ///
    /// # Errors
    /// When it did not within `limit`.
    pub async fn guest_address(&self, domain: &str, limit: Duration) -> anyhow::Result<Ipv4Addr> {
        until(&format!("a lease for {domain}"), limit, async || {
            Ok(self
                .leased_address(domain)
                .await?
                .map_or(Seen::not_yet("none"), Seen::There))
        })
        .await
    }

    /// Defines something from XML with a verb of virsh's such as `define`.
    ///
    /// # Errors
    /// As [`Self::virsh`].
    pub async fn define(&self, verb: &str, xml: &str) -> anyhow::Result<()> {
        let mut file = tempfile::NamedTempFile::new_in(&self.dir)?;
        std::io::Write::write_all(&mut file, xml.as_bytes())?;
        let path = file.path().to_str().context("a path that is no text")?;
        self.virsh(&[verb, path]).await.map(drop)
    }

    /// A started directory pool.
    ///
    /// # Errors
    /// As [`Self::virsh`].
    pub async fn mk_pool(&self, name: &str) -> anyhow::Result<PathBuf> {
        let dir = self.mk_pool_inactive(name).await?;
        self.virsh(&["pool-start", name]).await?;
        Ok(dir)
    }

    /// A defined directory pool that is not started.
    ///
    /// # Errors
    /// As [`Self::virsh`].
    pub async fn mk_pool_inactive(&self, name: &str) -> anyhow::Result<PathBuf> {
        let dir = self.dir.join("pools").join(name);
        fs::create_dir_all(&dir)?;
        self.define(
            "pool-define",
            &format!(
                "<pool type='dir'><name>{name}</name><target><path>{}</path></target></pool>",
                dir.display()
            ),
        )
        .await?;
        Ok(dir)
    }

    /// A started pool on a file system of that size.
    ///
    /// # Errors
    /// As [`Self::virsh`].
    pub async fn mk_pool_of_size(&self, name: &str, mib: u32) -> anyhow::Result<PathBuf> {
        let dir = self.mk_pool_inactive(name).await?;
        exec::run_within(
            self.command("mount")
                .args(["-t", "tmpfs", "-o"])
                .arg(format!("size={mib}m"))
                .arg("tmpfs")
                .arg(&dir),
            CALL,
        )
        .await?;
        self.virsh(&["pool-start", name]).await?;
        Ok(dir)
    }

    /// A started network with DHCP, and DNS that knows `target.lab.test` as the host itself.
    ///
    /// # Errors
    /// As [`Self::virsh`].
    pub async fn mk_network(&self, name: &str) -> anyhow::Result<()> {
        self.define("net-define", &self.network_xml(name)).await?;
        self.virsh(&["net-start", name]).await.map(drop)
    }

    /// The network's bridge.
    pub fn bridge(&self) -> String {
        format!("lab{}", self.number)
    }

    fn network_xml(&self, name: &str) -> String {
        let net = format!("10.77.{}", self.number);
        // `no-ping` spares three seconds for each lease; `open` leaves the firewall alone.
        format!(
            "<network xmlns:dnsmasq='http://libvirt.org/schemas/network/dnsmasq/1.0'>\
             <name>{name}</name><forward mode='open'/>\
             <bridge name='{bridge}' stp='off' delay='0'/>\
             <dns><host ip='{net}.1'><hostname>target.lab.test</hostname></host></dns>\
             <ip address='{net}.1' netmask='255.255.255.0'>\
             <dhcp><range start='{net}.10' end='{net}.200'/></dhcp></ip>\
             <dnsmasq:options><dnsmasq:option value='no-ping'/></dnsmasq:options></network>",
            bridge = self.bridge(),
        )
    }

    /// A domain with a copy of this image that nobody else manages.
    ///
    /// # Errors
    /// As [`Self::virsh`].
    pub async fn mk_domain(&self, name: &str, image: &Path, mib: u32) -> anyhow::Result<()> {
        let disk = self.dir.join(format!("{name}.qcow2"));
        fs::copy(image, &disk)?;
        self.define("define", &domain_xml(name, &disk, mib, &self.log_dir))
            .await
    }
}

fn domain_xml(name: &str, disk: &Path, mib: u32, log_dir: &Path) -> String {
    format!(
        "<domain type='qemu'><name>{name}</name><memory unit='MiB'>{mib}</memory><vcpu>1</vcpu>\
         <os firmware='efi'><type arch='x86_64' machine='q35'>hvm</type>\
         <firmware><feature enabled='no' name='enrolled-keys'/>\
         <feature enabled='no' name='secure-boot'/></firmware><boot dev='hd'/></os>\
         <features><acpi/><apic/></features><cpu mode='custom'><model>Nehalem</model></cpu>\
         <devices>\
         <disk type='file' device='disk'><driver name='qemu' type='qcow2' cache='unsafe'/>\
         <source file='{disk}'/><target dev='vda' bus='virtio'/></disk>\
         <interface type='network'><source network='default'/><model type='virtio'/></interface>\
         <serial type='pty'><log file='{log}/{name}-console.log'/><target port='0'/></serial>\
         <channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>\
         <rng model='virtio'><backend model='random'>/dev/urandom</backend></rng>\
         <memballoon model='none'/></devices></domain>",
        disk = disk.display(),
        log = log_dir.display(),
    )
}

/// What libvirtd found out about QEMU, carried from lab to lab: probing takes it seconds. It checks
/// by itself whether that still holds.
#[derive(Debug)]
struct Capabilities {
    key: Key,
    dir: PathBuf,
}

impl Capabilities {
    const NAME: &str = "libvirt-capabilities";

    async fn of(host: &Path) -> anyhow::Result<Self> {
        let versions = exec::run_within(
            Command::new("dpkg-query")
                .args(["-W", "-f=${Package} ${Version}\n"])
                .args(["qemu-system-x86", "libvirt-daemon", "ovmf"]),
            CALL,
        )
        .await?;
        let kernel = rustix::system::uname()
            .release()
            .to_string_lossy()
            .into_owned();
        let key = Key::new().with("versions", versions).with("kernel", kernel);
        Ok(Self {
            key,
            dir: host.join("cache"),
        })
    }

    fn restore(&self) -> anyhow::Result<()> {
        let kept = cache::path(Self::NAME, &self.key);
        if kept.is_dir() && !self.dir.join("qemu").exists() {
            exec::copy_tree(&kept.join("qemu"), &self.dir.join("qemu"))?;
        }
        Ok(())
    }

    fn keep(&self) -> anyhow::Result<()> {
        cache::entry(Self::NAME, &self.key, |out| {
            exec::copy_tree(&self.dir.join("qemu"), &out.join("qemu"))
        })
        .map(drop)
    }
}

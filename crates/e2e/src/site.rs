//! What most cases need: a host behind sshd, a mirror with an image, a target to probe, and the
//! providers file that names them.

use std::path::Path;

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::guest;
use crate::host::Host;
use crate::lab::{Guest, HOST_USER, Lab};
use crate::mirror::Mirror;
use crate::operator::{MkProxy, Operator, mk_proxy};
use crate::sshd::{Sshd, TIGHT};
use crate::targets::TlsTarget;

/// The name that guests know the lab's target by; the operator's own resolver does not.
pub const TARGET_NAME: &str = "target.lab.test";

/// See the module.
#[derive(Debug)]
pub struct Site {
    /// The host `a`, with a pool and a network `default`.
    pub host: Host,
    /// The way to it.
    pub sshd: Sshd,
    /// Serves the images that the lab has, as `/light.qcow2` and `/full.qcow2`.
    pub mirror: Mirror,
    /// Answers 204.
    pub target: TlsTarget,
    providers: Value,
}

impl Lab {
    /// A site with the guests that the test asked for.
    ///
    /// # Errors
    /// When a daemon does not start.
    pub async fn mk_site(&self) -> anyhow::Result<Site> {
        self.stage("the host starts");
        let host = self.mk_host("a", 0).await?;
        let sshd = host.mk_sshd(TIGHT).await?;
        let mirror = Mirror::start().await?;
        let anywhere = std::net::Ipv4Addr::UNSPECIFIED.into();
        let target = TlsTarget::start(anywhere, &[TARGET_NAME], 204, self.dir()).await?;
        let mut providers = json!({ "providers": [{
            "name": "kvm",
            "type": "kvm",
            "kvm": {
                "sshKeyFile": sshd.client_key(),
                "knownHostsFile": sshd.mk_known_hosts()?,
                "diskSizeGb": 1,
                "images": {},
                "machineTypes": {
                    "light": { "vcpus": 1, "memoryMiB": guest::light::MEMORY_MIB },
                    "full": { "vcpus": 1, "memoryMiB": guest::full::MEMORY_MIB },
                },
                "hosts": [host_entry(&host, &sshd)],
            },
        }]});
        for (guest, name) in [(Guest::Light, "light"), (Guest::Full, "full")] {
            if let Ok(image) = self.image(guest) {
                let url = mirror.add_file(&format!("{name}.qcow2"), &image.path);
                let sha256 = sha256(&image.path)?;
                providers["providers"][0]["kvm"]["images"][name] =
                    json!({ "url": url, "sha256": sha256 });
            }
        }
        Ok(Site {
            host,
            sshd,
            mirror,
            target,
            providers,
        })
    }
}

/// An entry of `hosts` for a host that is reached through its sshd.
pub fn host_entry(host: &Host, sshd: &Sshd) -> Value {
    json!({
        "name": host.name(),
        "address": sshd.address().to_string(),
        "user": HOST_USER,
        "pool": "default",
        "network": "default",
        "domainType": "qemu",
        // The quickest of QEMU's models under software emulation.
        "cpuMode": "Nehalem",
    })
}

impl Site {
    /// The providers file, to be changed by a test before it is used.
    pub fn providers(&self) -> Value {
        self.providers.clone()
    }

    /// The operator with that file, ready.
    ///
    /// # Errors
    /// When it does not become ready.
    pub async fn mk_operator(&self, lab: &Lab) -> anyhow::Result<Operator> {
        self.mk_operator_with(lab, &self.providers, &[]).await
    }

    /// The operator with another providers file and further flags, ready.
    ///
    /// # Errors
    /// When it does not become ready.
    pub async fn mk_operator_with(
        &self,
        lab: &Lab,
        providers: &Value,
        flags: &[&str],
    ) -> anyhow::Result<Operator> {
        lab.stage("the operator starts");
        let authority = self.target.authority_file();
        let authority = authority.to_str().context("a path that is no text")?;
        let flags = [&["--health-ca", authority], flags].concat();
        lab.mk_operator(providers, &flags).await
    }

    /// A Proxy with the light guest that is probed with this site's target.
    pub fn mk_proxy(&self, name: &str) -> MkProxy {
        let url = format!("https://{TARGET_NAME}:{}/generate_204", self.target.port());
        mk_proxy(name).probing(&url)
    }

    /// Asks this site's target through a proxy, as a crawler would.
    ///
    /// # Errors
    /// When the answer is not 204.
    pub async fn crawl_through(&self, proxy: std::net::SocketAddr) -> anyhow::Result<()> {
        let status = self.target.get_through(proxy, TARGET_NAME, "/page").await?;
        ensure!(
            status == 204,
            "the target answered {status} through {proxy}"
        );
        Ok(())
    }

    /// Volumes of the host that are not base images or their markers.
    ///
    /// # Errors
    /// When the host does not answer.
    pub async fn volumes_of_instances(&self) -> anyhow::Result<Vec<String>> {
        let all = self.host.volumes("default").await?;
        Ok(all
            .into_iter()
            .filter(|name| !name.starts_with("base-"))
            .collect())
    }

    /// Whole base images of the host.
    ///
    /// # Errors
    /// When the host does not answer.
    pub async fn base_images(&self) -> anyhow::Result<Vec<String>> {
        let all = self.host.volumes("default").await?;
        let whole = |name: &&String| all.contains(&format!("{name}.complete"));
        Ok(all.iter().filter(whole).cloned().collect())
    }

    /// As [`Self::base_images`], for a host whose libvirt does not run.
    ///
    /// # Errors
    /// When the pool's directory cannot be read.
    pub fn base_images_on_disk(&self) -> anyhow::Result<Vec<String>> {
        let pool = self.host.dir().join("pools/default");
        let names = std::fs::read_dir(pool)?
            .flatten()
            .map(|entry| entry.file_name());
        let names = names.map(|name| name.to_string_lossy().into_owned());
        Ok(names.filter(|name| name.ends_with(".complete")).collect())
    }

    /// Nothing of any instance is left on the host: no domain, no disk, no seed, no NVRAM.
    ///
    /// # Errors
    /// Naming what is left.
    pub async fn check_clean(&self) -> anyhow::Result<()> {
        let domains = self.host.domains().await?;
        let volumes = self.volumes_of_instances().await?;
        let nvram = self.host.dir().join("lib/qemu/nvram");
        let nvram: Vec<_> = std::fs::read_dir(nvram)
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.file_name())
            .collect();
        ensure!(
            domains.is_empty() && volumes.is_empty() && nvram.is_empty(),
            "left on the host: domains {domains:?}, volumes {volumes:?}, NVRAM {nvram:?}"
        );
        Ok(())
    }
}

/// The SHA-256 of a file, in hexadecimal digits.
///
/// # Errors
/// When it cannot be read.
pub fn sha256(path: &Path) -> anyhow::Result<String> {
    let mut file =
        std::fs::File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let read = std::io::Read::read(&mut file, &mut buffer)?;
        if read == 0 {
            return Ok(data_encoding::HEXLOWER.encode(&hash.finalize()));
        }
        hash.update(&buffer[..read]);
    }
}

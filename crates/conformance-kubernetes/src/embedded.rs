//! Our own control plane, served over TLS as users reach it.

use std::fs;
use std::net::Ipv4Addr;
use std::path::Path;

use anyhow::{Context as _, bail};
use data_encoding::BASE64;
use egress_control_plane::{Config, ControlPlane, Storage};
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::certificates::Pair;
use crate::client::Credentials;
use crate::programs;
use crate::target::Target;

/// The embedded control plane with the Proxy CRD, in memory. Ends when this is dropped.
pub struct Embedded {
    _dir: tempfile::TempDir,
    control_plane: ControlPlane,
    cancel: CancellationToken,
    serving: JoinHandle<()>,
    admin: Target,
}

impl Embedded {
    /// # Errors
    /// When it does not open, or the programs (kubectl) cannot be built.
    pub async fn start() -> anyhow::Result<Self> {
        crate::install_crypto_provider();
        let programs = tokio::task::spawn_blocking(programs::ensure).await??;
        let dir = tempfile::Builder::new()
            .prefix("egress-embedded-")
            .tempdir()?;
        let config = Config::new(Storage::Memory, vec![egress_api::crd()]);
        let control_plane = ControlPlane::open(config).await?;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let kubeconfig = dir.path().join("admin.kubeconfig");
        control_plane.write_admin_kubeconfig(&kubeconfig, address)?;
        let cancel = CancellationToken::new();
        let serving = {
            let (control_plane, cancel) = (control_plane.clone(), cancel.clone());
            tokio::spawn(async move {
                if let Err(error) = control_plane.serve_tls(listener, cancel).await {
                    println!("the embedded control plane stopped: {error}");
                }
            })
        };
        let identity = Identity::read(&kubeconfig)?;
        let admin = Target::new(
            "embedded",
            dir.path(),
            &programs.kubectl(),
            &identity.server,
            &identity.authority,
            &Credentials::Certificate(identity.pair),
        )?;
        Ok(Self {
            _dir: dir,
            control_plane,
            cancel,
            serving,
            admin,
        })
    }

    /// With all rights.
    pub fn admin(&self) -> &Target {
        &self.admin
    }

    pub fn control_plane(&self) -> &ControlPlane {
        &self.control_plane
    }
}

impl Drop for Embedded {
    fn drop(&mut self) {
        self.cancel.cancel();
        self.serving.abort();
    }
}

/// What the admin kubeconfig holds.
struct Identity {
    server: String,
    authority: String,
    pair: Pair,
}

impl Identity {
    fn read(path: &Path) -> anyhow::Result<Self> {
        let text =
            fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let config: Value = serde_saphyr::from_str(&text)?;
        let cluster = &config["clusters"][0]["cluster"];
        let user = &config["users"][0]["user"];
        let pem = |value: &Value| {
            let Some(data) = value.as_str() else {
                bail!("the kubeconfig has no certificate data")
            };
            Ok(String::from_utf8(BASE64.decode(data.as_bytes())?)?)
        };
        Ok(Self {
            server: cluster["server"]
                .as_str()
                .context("the kubeconfig names no server")?
                .to_owned(),
            authority: pem(&cluster["certificate-authority-data"])?,
            pair: Pair {
                certificate: pem(&user["client-certificate-data"])?,
                key: pem(&user["client-key-data"])?,
            },
        })
    }
}

//! One API server as the suite sees it.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde_json::json;

use crate::client::{Client, Credentials};
use crate::kubectl::Kubectl;

/// A server, and who asks it.
#[derive(Debug, Clone)]
pub struct Target {
    /// For messages.
    pub name: &'static str,
    pub url: String,
    pub kubeconfig: PathBuf,
    pub client: Client,
    pub kubectl: Kubectl,
}

impl Target {
    /// Writes a kubeconfig below `dir` and builds clients for it.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn new(
        name: &'static str,
        dir: &Path,
        kubectl: &Path,
        url: &str,
        authority: &str,
        credentials: &Credentials,
    ) -> anyhow::Result<Self> {
        let home = dir.join("home");
        fs::create_dir_all(&home).with_context(|| format!("cannot make {}", home.display()))?;
        let write = |file: &str, text: &str| {
            let path = home.join(file);
            fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
            anyhow::Ok(path)
        };
        let user = match credentials {
            Credentials::Certificate(pair) => json!({
                "client-certificate": write("client.pem", &pair.certificate)?,
                "client-key": write("client.key", &pair.key)?,
            }),
            Credentials::Token(token) => json!({"token": token}),
        };
        let kubeconfig = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{
                "name": "test",
                "cluster": {"server": url, "certificate-authority": write("ca.pem", authority)?},
            }],
            "users": [{"name": "test", "user": user}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "current-context": "test",
        });
        let kubeconfig = write("kubeconfig", &kubeconfig.to_string())?;
        Ok(Self {
            name,
            url: url.to_owned(),
            client: Client::new(url, authority, Some(credentials))?,
            kubectl: Kubectl {
                program: kubectl.to_owned(),
                kubeconfig: kubeconfig.clone(),
                home,
            },
            kubeconfig,
        })
    }
}

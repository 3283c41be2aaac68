//! etcd and kube-apiserver, together one throwaway cluster without nodes and controllers.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use serde_json::{Value, json};

use crate::certificates::{self, Authority, Pair};
use crate::client::{Client, Credentials};
use crate::daemon::Daemon;
use crate::programs::{self, Programs};
use crate::target::Target;

/// Generous: the machine may be busy with compilers.
const START_LIMIT: Duration = Duration::from_secs(120);

/// A real API server. Everything ends when this is dropped.
///
/// There is no controller manager: namespaces stay `Terminating`, owners' dependents are not
/// collected, and a new namespace gets no `default` service account by itself.
pub struct ApiServer {
    dir: tempfile::TempDir,
    programs: Programs,
    authority: Authority,
    url: String,
    etcd_url: String,
    arguments: Vec<String>,
    /// Before etcd: ended first.
    server: Option<Daemon>,
    etcd: Daemon,
    admin: Target,
    /// From the first process to `/readyz`.
    pub started_in: Duration,
}

impl ApiServer {
    /// Starts one, building the programs first if that was never done.
    ///
    /// # Errors
    /// When a program cannot be built or does not come up; with the end of its log.
    pub async fn start() -> anyhow::Result<Self> {
        let programs = tokio::task::spawn_blocking(programs::ensure).await??;
        Self::start_with(programs, &[]).await
    }

    /// [`ApiServer::start`] with more flags for kube-apiserver.
    ///
    /// # Errors
    /// As [`ApiServer::start`].
    pub async fn start_with(programs: Programs, flags: &[&str]) -> anyhow::Result<Self> {
        crate::install_crypto_provider();
        let dir = tempfile::Builder::new().prefix("egress-kube-").tempdir()?;
        let began = Instant::now();
        let (address, [client_port, peer_port, server_port]) = address()?;
        let etcd_url = format!("http://{address}:{client_port}");
        let etcd = start_etcd(
            &programs,
            dir.path(),
            &etcd_url,
            &format!("http://{address}:{peer_port}"),
        )?;

        let authority = Authority::new()?;
        let files = Files::write(dir.path(), &authority, address)?;
        let mut arguments = files.flags();
        arguments.extend([
            format!("--etcd-servers={etcd_url}"),
            format!("--bind-address={address}"),
            format!("--secure-port={server_port}"),
        ]);
        arguments.extend(flags.iter().map(|flag| (*flag).to_owned()));

        let url = format!("https://{address}:{server_port}");
        let pair = authority.client("kubernetes-admin", &["system:masters"])?;
        let credentials = Credentials::Certificate(pair);
        let admin = Target::new(
            "kube-apiserver",
            dir.path(),
            &programs.kubectl(),
            &url,
            authority.certificate(),
            &credentials,
        )?;
        let mut this = Self {
            dir,
            programs,
            authority,
            url,
            etcd_url,
            arguments,
            server: None,
            etcd,
            admin,
            started_in: Duration::ZERO,
        };
        this.start_server().await?;
        this.started_in = began.elapsed();
        Ok(this)
    }

    /// With all rights.
    pub fn admin(&self) -> &Target {
        &self.admin
    }

    /// Such as `https://127.80.1.2:43211`.
    pub fn url(&self) -> &str {
        &self.url
    }

    pub fn version(&self) -> &str {
        &self.programs.version
    }

    /// The directory of this cluster, removed with it.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub fn ca_certificate(&self) -> &str {
        self.authority.certificate()
    }

    /// Process ids of etcd and of the API server.
    pub fn pids(&self) -> (u32, Option<u32>) {
        (self.etcd.pid(), self.server.as_ref().map(Daemon::pid))
    }

    /// Kills the API server; etcd and its data stay.
    pub fn kill_server(&mut self) {
        self.server = None;
    }

    /// Starts the API server (again), on the same address and data, and waits until it is ready.
    ///
    /// # Errors
    /// When it does not come up; with the end of its log.
    pub async fn start_server(&mut self) -> anyhow::Result<()> {
        self.kill_server();
        let server = Daemon::start(
            "kube-apiserver",
            &self.programs.kube_apiserver(),
            &self.arguments,
            self.dir.path().join("kube-apiserver.log"),
        )?;
        let client = &self.admin.client;
        server
            .wait_until(START_LIMIT, || async {
                client
                    .get("/readyz")
                    .await
                    .is_ok_and(|answer| answer.status == 200)
            })
            .await?;
        self.server = Some(server);
        Ok(())
    }

    /// Throws etcd's history away, as the API server does every five minutes: continue tokens and
    /// watches from before answer 410.
    ///
    /// # Errors
    /// When etcd refuses.
    pub async fn compact(&self) -> anyhow::Result<()> {
        let http = reqwest::Client::builder().no_proxy().build()?;
        let post = |path: &str, body: Value| {
            http.post(format!("{}{path}", self.etcd_url))
                .body(body.to_string())
                .send()
        };
        let range = post("/v3/kv/range", json!({"key": "AA=="}))
            .await?
            .text()
            .await?;
        let range: Value = serde_json::from_str(&range)?;
        let revision = range["header"]["revision"]
            .as_str()
            .context("etcd names no revision")?;
        let answer = post("/v3/kv/compaction", json!({"revision": revision})).await?;
        if !answer.status().is_success() {
            bail!("etcd refused to compact: {}", answer.text().await?);
        }
        Ok(())
    }

    /// A client with a certificate of that user.
    ///
    /// # Errors
    /// When its files cannot be written.
    pub fn user(&self, user: &str, groups: &[&str]) -> anyhow::Result<Target> {
        self.target(&Credentials::Certificate(
            self.authority.client(user, groups)?,
        ))
    }

    /// A client that is a service account, with a token from the token API.
    ///
    /// # Errors
    /// When there is no such account.
    pub async fn service_account(&self, namespace: &str, name: &str) -> anyhow::Result<Target> {
        let path = format!("/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token");
        let request = json!({
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": 3600},
        });
        let answer = self.admin.client.post(&path, &request).await?;
        let token = answer.body["status"]["token"]
            .as_str()
            .with_context(|| format!("no token for {namespace}/{name}: {}", answer.body))?;
        self.target(&Credentials::Token(token.to_owned()))
    }

    fn target(&self, credentials: &Credentials) -> anyhow::Result<Target> {
        let dir = tempfile::Builder::new()
            .prefix("client-")
            .tempdir_in(self.dir.path())?
            .keep();
        Target::new(
            "kube-apiserver",
            &dir,
            &self.programs.kubectl(),
            &self.url,
            self.authority.certificate(),
            credentials,
        )
    }

    /// An unauthenticated client.
    ///
    /// # Errors
    /// When no client can be built.
    pub fn anonymous(&self) -> anyhow::Result<Client> {
        Client::new(&self.url, self.authority.certificate(), None)
    }
}

/// A loopback address that nobody else uses, with three free ports: programs that cannot report
/// the port they chose must be told one, and two tests must not be told the same.
fn address() -> anyhow::Result<(IpAddr, [u16; 3])> {
    let [a, b, c]: [u8; 3] = rand::random();
    let address = IpAddr::from(Ipv4Addr::new(127, 64 | (a & 63), b, c.clamp(1, 254)));
    let listeners = [0; 3].map(|port| TcpListener::bind((address, port)));
    let mut ports = [0; 3];
    for (port, listener) in ports.iter_mut().zip(listeners) {
        *port = listener
            .and_then(|listener| listener.local_addr())
            .with_context(|| format!("cannot listen on {address}"))?
            .port();
    }
    Ok((address, ports))
}

fn start_etcd(programs: &Programs, dir: &Path, client: &str, peer: &str) -> anyhow::Result<Daemon> {
    let arguments = [
        "--name=test".to_owned(),
        format!("--data-dir={}", dir.join("etcd").display()),
        format!("--listen-client-urls={client}"),
        format!("--advertise-client-urls={client}"),
        format!("--listen-peer-urls={peer}"),
        format!("--initial-advertise-peer-urls={peer}"),
        format!("--initial-cluster=test={peer}"),
        // Nothing of a test has to survive a power cut.
        "--unsafe-no-fsync".to_owned(),
        "--logger=zap".to_owned(),
        "--log-level=warn".to_owned(),
    ];
    Daemon::start("etcd", &programs.etcd(), &arguments, dir.join("etcd.log"))
}

/// The files that kube-apiserver is started with.
struct Files {
    certificate: PathBuf,
    key: PathBuf,
    authority: PathBuf,
    token_key: PathBuf,
    token_public_key: PathBuf,
}

impl Files {
    fn write(dir: &Path, authority: &Authority, address: IpAddr) -> anyhow::Result<Self> {
        let Pair { certificate, key } = authority.server(address)?;
        let (token_key, token_public_key) = certificates::token_key()?;
        let write = |name: &str, text: &str| {
            let path = dir.join(name);
            fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
            anyhow::Ok(path)
        };
        Ok(Self {
            certificate: write("server.pem", &certificate)?,
            key: write("server.key", &key)?,
            authority: write("ca.pem", authority.certificate())?,
            token_key: write("tokens.key", &token_key)?,
            token_public_key: write("tokens.pem", &token_public_key)?,
        })
    }

    fn flags(&self) -> Vec<String> {
        vec![
            format!("--tls-cert-file={}", self.certificate.display()),
            format!("--tls-private-key-file={}", self.key.display()),
            format!("--client-ca-file={}", self.authority.display()),
            "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
            format!(
                "--service-account-key-file={}",
                self.token_public_key.display()
            ),
            format!(
                "--service-account-signing-key-file={}",
                self.token_key.display()
            ),
            "--authorization-mode=RBAC".to_owned(),
            "--service-cluster-ip-range=10.0.0.0/24".to_owned(),
            // Nothing reaches the API server through the `kubernetes` Service here.
            "--advertise-address=127.0.0.1".to_owned(),
            "--endpoint-reconciler-type=none".to_owned(),
            "--profiling=false".to_owned(),
        ]
    }
}

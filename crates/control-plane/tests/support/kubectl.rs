//! A control plane on loopback and the machine's kubectl against it.

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use egress_control_plane::{Config, ControlPlane, Storage};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// The kubectl to test with: `$KUBECTL`, or the one on the PATH.
pub fn kubectl() -> Option<PathBuf> {
    let asked = std::env::var_os("KUBECTL").map(PathBuf::from);
    let found = asked.or_else(|| {
        std::env::split_paths(&std::env::var_os("PATH")?)
            .map(|dir| dir.join("kubectl"))
            .find(|path| path.is_file())
    });
    if found.is_none() {
        println!("skipped: there is no kubectl on this machine's PATH and $KUBECTL names none");
    }
    found
}

pub struct Cluster {
    pub plane: ControlPlane,
    kubectl: PathBuf,
    directory: tempfile::TempDir,
    cancel: CancellationToken,
    server: JoinHandle<()>,
}

/// What a kubectl said.
#[derive(Debug)]
pub struct Said {
    pub ok: bool,
    pub stdout: String,
    pub stderr: String,
}

impl From<Output> for Said {
    fn from(output: Output) -> Self {
        Self {
            ok: output.status.success(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

impl Cluster {
    /// None where there is no kubectl.
    pub async fn start() -> Option<Self> {
        let kubectl = kubectl()?;
        let directory = tempfile::tempdir().unwrap();
        let config = Config::new(
            Storage::Directory(directory.path().join("state")),
            vec![egress_api::crd()],
        );
        let plane = ControlPlane::open(config).await.unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        plane
            .write_admin_kubeconfig(&directory.path().join("kubeconfig"), address)
            .unwrap();
        let cancel = CancellationToken::new();
        let server = tokio::spawn({
            let (plane, cancel) = (plane.clone(), cancel.clone());
            async move { plane.serve_tls(listener, cancel).await.unwrap() }
        });
        Some(Self {
            plane,
            kubectl,
            directory,
            cancel,
            server,
        })
    }

    pub async fn stop(self) {
        self.cancel.cancel();
        self.server.await.unwrap();
        self.plane.shutdown().await;
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub fn write(&self, name: &str, text: &str) -> String {
        let path = self.path(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }

    /// A kubectl that is ready to be started.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(&self.kubectl);
        command
            .args(args)
            .env("KUBECONFIG", self.path("kubeconfig"))
            .env("HOME", self.directory.path())
            .stdin(Stdio::null());
        command
    }

    pub async fn run(&self, args: &[&str]) -> Said {
        self.finish(self.command(args)).await
    }

    pub async fn finish(&self, mut command: Command) -> Said {
        tokio::task::spawn_blocking(move || command.output().unwrap().into())
            .await
            .unwrap()
    }

    /// Runs a kubectl that must succeed; what it printed.
    pub async fn ok(&self, args: &[&str]) -> String {
        let said = self.run(args).await;
        assert!(said.ok, "kubectl {args:?}: {}{}", said.stdout, said.stderr);
        said.stdout
    }

    /// Runs a kubectl that must fail; what it complained of.
    pub async fn fails(&self, args: &[&str]) -> String {
        let said = self.run(args).await;
        assert!(!said.ok, "kubectl {args:?} succeeded: {}", said.stdout);
        said.stderr
    }
}

//! The programs of the Kubernetes control plane, built by Go once and kept outside the checkout.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail};
use egress_e2e::cache;

/// What the Go module builds: one folder with a `main.go` each.
const NAMES: [&str; 3] = ["etcd", "kube-apiserver", "kubectl"];

/// Where the built programs are.
#[derive(Debug, Clone)]
pub struct Programs {
    dir: PathBuf,
    /// The version of Kubernetes, such as `v1.36.3`.
    pub version: String,
}

impl Programs {
    pub fn etcd(&self) -> PathBuf {
        self.dir.join("etcd")
    }

    pub fn kube_apiserver(&self) -> PathBuf {
        self.dir.join("kube-apiserver")
    }

    pub fn kubectl(&self) -> PathBuf {
        self.dir.join("kubectl")
    }
}

/// The Go module of the current version.
pub fn module() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/kubernetes")
}

/// Finds the programs in the cache, or builds them: minutes the first time, nothing after.
///
/// # Errors
/// When there is no Go, a module cannot be fetched, or the build fails; the message says which.
pub fn ensure() -> anyhow::Result<Programs> {
    let module = module();
    let go_mod = fs::read_to_string(module.join("go.mod"))
        .with_context(|| format!("cannot read {}", module.join("go.mod").display()))?;
    let version =
        kubernetes_version(&go_mod).context("go.mod requires no k8s.io/kubernetes at a version")?;
    let mut numbers = version.trim_start_matches('v').split('.');
    let major = numbers.next().unwrap_or_default();
    let minor = numbers.next().unwrap_or_default();
    // Without these the programs call themselves v0.0.0-master and clients doubt them.
    let set = |name: &str, value: &str| format!("-X k8s.io/component-base/version.{name}={value}");
    let flags = [
        set("gitVersion", &version),
        set("gitMajor", major),
        set("gitMinor", minor),
        set("gitTreeState", "clean"),
    ];
    let packages = NAMES.map(|name| format!("./{name}"));
    let sources = NAMES.map(|name| format!("{name}/main.go"));
    let dir = build("kubernetes", &module, &sources, &packages, &flags.join(" "))?;
    Ok(Programs { dir, version })
}

/// Helm, built in the same way.
///
/// # Errors
/// As [`ensure`].
pub fn helm() -> anyhow::Result<PathBuf> {
    let module = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/helm");
    let package = ["helm.sh/helm/v3/cmd/helm".to_owned()];
    Ok(build("helm", &module, &[], &package, "")?.join("helm"))
}

/// One entry of the cache: the programs of `packages`, keyed by what they are built from.
fn build(
    name: &str,
    module: &Path,
    sources: &[String],
    packages: &[String],
    flags: &str,
) -> anyhow::Result<PathBuf> {
    let mut key = cache::Key::new().with("flags", flags);
    for file in ["go.mod", "go.sum"].map(String::from).iter().chain(sources) {
        let text = fs::read(module.join(file)).with_context(|| format!("cannot read {file}"))?;
        key = key.with(file, text);
    }
    cache::entry(name, &key, |out| go_build(module, packages, flags, out))
}

fn go_build(module: &Path, packages: &[String], flags: &str, out: &Path) -> anyhow::Result<()> {
    let mut command = Command::new("nice");
    command
        .args([
            "-n",
            "19",
            "go",
            "build",
            "-mod=readonly",
            "-buildvcs=false",
            "-trimpath",
        ])
        .args(["-p", "2"])
        .arg(format!("-ldflags=-s -w {flags}"))
        .arg("-o")
        .arg(format!("{}/", out.display()))
        .args(packages)
        .env("CGO_ENABLED", "0")
        .env("GOFLAGS", "")
        .current_dir(module);
    let output = command
        .output()
        .context("cannot run go (Go 1.26 or newer is needed, from https://go.dev/dl)")?;
    if !output.status.success() {
        bail!(
            "go build in {}: {}\n{}",
            module.display(),
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(())
}

fn kubernetes_version(go_mod: &str) -> Option<String> {
    go_mod.lines().find_map(|line| {
        let mut words = line
            .split_whitespace()
            .skip_while(|word| *word == "require");
        (words.next() == Some("k8s.io/kubernetes")).then(|| words.next().map(str::to_owned))?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_the_one_that_is_required() {
        let text = "require (\n\tk8s.io/kubectl v0.1.0\n\tk8s.io/kubernetes v1.2.3\n)\n";
        assert_eq!(kubernetes_version(text).as_deref(), Some("v1.2.3"));
        assert_eq!(kubernetes_version("module x\n"), None);
    }

    #[test]
    fn every_staging_module_is_replaced_by_the_release_of_the_version() {
        let text = fs::read_to_string(module().join("go.mod")).unwrap();
        let version = kubernetes_version(&text).unwrap();
        let staging = version.replacen("v1.", "v0.", 1);
        let replaced: Vec<&str> = text.lines().filter(|line| line.contains(" => ")).collect();
        assert!(replaced.len() > 25, "{replaced:?}");
        for line in replaced {
            assert!(
                line.trim_end().ends_with(&staging),
                "{line} does not belong to {version}"
            );
        }
    }
}

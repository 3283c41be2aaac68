//! Debian packages as files, from the machine's own apt sources.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, bail, ensure};

use crate::cache::{self, Key};
use crate::{exec, prereq};

/// Packages with the exact versions that apt would download now.
#[derive(Debug, Clone)]
pub struct Selection {
    versions: BTreeMap<String, String>,
}

impl Selection {
    /// What apt would take. Refreshes its lists once when a package is unknown to it.
    pub fn resolve(packages: &[&str]) -> anyhow::Result<Self> {
        Self::look_up(packages).or_else(|_| {
            prereq::update_lists()?;
            Self::look_up(packages)
        })
    }

    fn look_up(packages: &[&str]) -> anyhow::Result<Self> {
        let records = show(packages)?;
        let mut versions = BTreeMap::new();
        for record in records.split("\n\n") {
            if let (Some(name), Some(version)) =
                (field(record, "Package"), field(record, "Version"))
            {
                versions.insert(name.to_owned(), version.to_owned());
            }
        }
        for package in packages {
            ensure!(
                versions.contains_key(*package),
                "apt knows no version of {package}"
            );
        }
        Ok(Self { versions })
    }

    /// Adds names and versions to the key of what is built from them.
    pub fn add_to(&self, key: Key) -> Key {
        self.versions
            .iter()
            .fold(key, |key, (name, version)| key.with(name, version))
    }

    /// Downloads all and unpacks them over each other into `root`.
    pub fn unpack_into(&self, root: &Path, scratch: &Path) -> anyhow::Result<()> {
        let debs = scratch.join("debs");
        std::fs::create_dir_all(&debs)?;
        std::fs::create_dir_all(root)?;
        let wanted: Vec<String> = self
            .versions
            .iter()
            .map(|(name, version)| format!("{name}={version}"))
            .collect();
        exec::run(
            prereq::apt_get()
                .arg("-q")
                .arg("download")
                .args(&wanted)
                .current_dir(&debs),
        )
        .context("downloading packages (if a version is gone from the mirror: apt-get update)")?;
        let mut unpacked = 0;
        for deb in std::fs::read_dir(&debs)? {
            exec::run(exec::niced("dpkg-deb").arg("-x").arg(deb?.path()).arg(root))?;
            unpacked += 1;
        }
        ensure!(
            unpacked == wanted.len(),
            "apt-get downloaded {unpacked} of {} packages",
            wanted.len()
        );
        Ok(())
    }
}

/// The package that holds the newest cloud kernel: `linux-image-cloud-amd64` only depends on it.
pub fn cloud_kernel() -> anyhow::Result<String> {
    let look = || {
        let record = show(&["linux-image-cloud-amd64"])?;
        let depends = field(&record, "Depends").context("linux-image-cloud-amd64: no Depends")?;
        depends
            .split(", ")
            .filter_map(|dependency| dependency.split(' ').next())
            .find(|name| name.starts_with("linux-image-"))
            .map(str::to_owned)
            .context("linux-image-cloud-amd64 depends on no kernel")
    };
    look().or_else(|_: anyhow::Error| {
        prereq::update_lists()?;
        look()
    })
}

/// `apt-cache show`, remembered for as long as apt's lists stay as they are: on a machine without
/// a binary cache each call parses all lists, which takes seconds.
fn show(packages: &[&str]) -> anyhow::Result<String> {
    let mut key = Key::new();
    let mut lists: Vec<_> = std::fs::read_dir("/var/lib/apt/lists")
        .context("no apt lists: is this a Debian machine?")?
        .flatten()
        .filter_map(|entry| Some((entry.file_name(), entry.metadata().ok()?)))
        .filter(|(_, metadata)| metadata.is_file())
        .collect();
    lists.sort_by(|one, other| one.0.cmp(&other.0));
    for (name, metadata) in lists {
        let state = format!("{} {:?}", metadata.len(), metadata.modified().ok());
        key = key.with(&name.to_string_lossy(), state);
    }
    for package in packages {
        key = key.with("package", package);
    }
    let entry = cache::entry("apt-show", &key, |out| {
        let text = exec::run(
            Command::new("apt-cache")
                .args(["show", "--no-all-versions"])
                .args(packages),
        )?;
        Ok(std::fs::write(out.join("records"), text)?)
    })?;
    Ok(std::fs::read_to_string(entry.join("records"))?)
}

fn field<'r>(record: &'r str, name: &str) -> Option<&'r str> {
    record
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
        .map(str::trim)
}

/// apt sources of Debian itself as this machine has them, other vendors' left out, in one-line
/// form.
pub fn debian_sources() -> anyhow::Result<Vec<String>> {
    let targets = || {
        exec::run(Command::new("apt-get").args([
            "indextargets",
            "--format",
            "$(ORIGIN)|$(REPO_URI)|$(RELEASE)|$(COMPONENT)|$(SIGNED_BY)",
            "Created-By: Packages",
        ]))
    };
    let mut text = targets()?;
    if !text.lines().any(|line| line.starts_with("Debian|")) {
        prereq::update_lists()?;
        text = targets()?;
    }
    let mut sources = Vec::new();
    for line in text.lines() {
        let [origin, uri, release, component, signed_by] = line.split('|').collect::<Vec<_>>()[..]
        else {
            bail!("apt-get indextargets answered {line:?}");
        };
        if origin != "Debian" {
            continue;
        }
        // An unset field comes back as it was asked for.
        let options = match signed_by {
            "" | "$(SIGNED_BY)" => String::new(),
            key => format!("[signed-by={key}] "),
        };
        sources.push(format!("deb {options}{uri} {release} {component}"));
    }
    sources.dedup();
    ensure!(
        !sources.is_empty(),
        "no Debian mirror among this machine's apt sources"
    );
    Ok(sources)
}

/// This machine's Debian release, such as `bookworm`.
pub fn codename() -> anyhow::Result<String> {
    let release = std::fs::read_to_string("/etc/os-release").context("reading /etc/os-release")?;
    release
        .lines()
        .find_map(|line| line.strip_prefix("VERSION_CODENAME="))
        .map(|name| name.trim_matches('"').to_owned())
        .context("/etc/os-release names no VERSION_CODENAME")
}

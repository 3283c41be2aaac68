//! Nix and a current systemd-analyze: those on the machine, else Debian trixie's packages, unpacked
//! beside the checkout and never installed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::exec::{find, run};

/// The first that can evaluate what nixpkgs of today says.
const SUITE: &str = "trixie";
const PACKAGES: [&str; 2] = ["nix-bin", "systemd"];

/// Programs of one unpacked set, and a Nix store of its own.
#[derive(Debug, Clone)]
pub struct Tools {
    bin: PathBuf,
    /// None: the machine's own Nix and its store are used.
    store: Option<PathBuf>,
}

impl Tools {
    /// The machine's Nix, or the unpacked one; the first time that one is downloaded.
    ///
    /// # Errors
    /// When there is none and none can be had; the message says what was missing.
    pub fn get() -> Result<Self> {
        if let Some(nix) = find("nix-instantiate") {
            let bin = nix.parent().unwrap_or(Path::new("/usr/bin")).to_owned();
            return Ok(Self { bin, store: None });
        }
        let home = cache().join(format!("nix-{SUITE}"));
        if !home.join("ready").exists() {
            install(&home).context("cannot unpack Debian's Nix; install Nix and try again")?;
        }
        Ok(Self {
            bin: home.join("root/usr/bin"),
            store: Some(home.join("nix")),
        })
    }

    /// A Nix program, niced: evaluations share the machine.
    pub fn nix(&self, program: &str) -> Command {
        let mut command = Command::new("nice");
        command.arg(self.bin.join(program));
        command.env_remove("NIX_PATH");
        if let Some(store) = &self.store {
            let var = store.join("var");
            command
                .env("NIX_CONF_DIR", store.join("etc"))
                .env("NIX_STORE_DIR", store.join("store"))
                .env("NIX_STATE_DIR", &var)
                .env("NIX_LOCALSTATE_DIR", &var)
                .env("NIX_LOG_DIR", var.join("log"));
        }
        command
    }

    /// systemd-analyze of the unpacked set, which knows newer keys than an older machine's.
    pub fn systemd_analyze(&self) -> Option<PathBuf> {
        let own = self.bin.join("systemd-analyze");
        if own.exists() {
            Some(own)
        } else {
            find("systemd-analyze")
        }
    }
}

/// `EGRESS_TEST_CACHE`, else a directory of ours among the user's caches.
fn cache() -> PathBuf {
    const NAME: &str = "egress-proxies-operator-tests";
    let var = |name| {
        std::env::var_os(name)
            .filter(|v| !v.is_empty())
            .map(PathBuf::from)
    };
    var("EGRESS_TEST_CACHE")
        .or_else(|| var("XDG_CACHE_HOME").map(|dir| dir.join(NAME)))
        .or_else(|| {
            var("HOME")
                .filter(|_| !crate::is_root())
                .map(|home| home.join(".cache").join(NAME))
        })
        .unwrap_or_else(|| Path::new("/var/cache").join(NAME))
}

/// The mirror that this machine takes its own packages from.
fn mirror() -> Result<String> {
    let mut files = vec![PathBuf::from("/etc/apt/sources.list")];
    if let Ok(dir) = fs::read_dir("/etc/apt/sources.list.d") {
        files.extend(dir.flatten().map(|entry| entry.path()));
    }
    files
        .iter()
        .filter_map(|file| fs::read_to_string(file).ok())
        .flat_map(|text| text.lines().map(str::to_owned).collect::<Vec<_>>())
        .filter(|line| line.starts_with("URIs:") || line.starts_with("deb "))
        .flat_map(|line| {
            line.split_whitespace()
                .map(str::to_owned)
                .collect::<Vec<_>>()
        })
        .find(|word| word.contains("://") && word.trim_end_matches('/').ends_with("/debian"))
        .context("no Debian mirror in the apt sources")
}

fn install(home: &Path) -> Result<()> {
    for program in ["apt-get", "dpkg-deb"] {
        if find(program).is_none() {
            bail!("{program} is missing");
        }
    }
    let Some(patchelf) = find("patchelf") else {
        bail!("patchelf is missing: apt-get install patchelf");
    };
    let apt = home.join("apt");
    for dir in ["lists/partial", "cache/archives/partial", "state"] {
        fs::create_dir_all(apt.join(dir))?;
    }
    fs::write(apt.join("state/status"), "")?;
    fs::write(
        apt.join("sources.list"),
        format!(
            "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] {} {SUITE} main\n",
            mirror()?
        ),
    )?;
    let dir = apt.display();
    let configuration = apt.join("apt.conf");
    fs::write(
        &configuration,
        format!(
            "Dir::State \"{dir}/state\";\nDir::State::status \"{dir}/state/status\";\n\
             Dir::State::lists \"{dir}/lists\";\nDir::Cache \"{dir}/cache\";\n\
             Dir::Etc::sourcelist \"{dir}/sources.list\";\nDir::Etc::sourceparts \"-\";\n\
             APT::Sandbox::User \"root\";\n"
        ),
    )?;
    let apt_get = |args: &[&str]| {
        run(Command::new("apt-get")
            .env("APT_CONFIG", &configuration)
            .arg("-q")
            .args(args))
    };
    apt_get(&["update"]).or_else(|_| apt_get(&["update"]))?;
    let mut args = vec![
        "install",
        "--yes",
        "--download-only",
        "--no-install-recommends",
    ];
    args.extend(PACKAGES);
    apt_get(&args)?;

    let root = home.join("root");
    fs::create_dir_all(&root)?;
    for package in fs::read_dir(apt.join("cache/archives"))? {
        let package = package?.path();
        if package.extension().is_some_and(|e| e == "deb") {
            run(Command::new("dpkg-deb").arg("-x").arg(&package).arg(&root))?;
        }
    }
    // With their own loader and libraries, so that nothing of the machine's is needed or changed.
    let (triple, loader) = match std::env::consts::ARCH {
        "aarch64" => ("aarch64-linux-gnu", "ld-linux-aarch64.so.1"),
        _ => ("x86_64-linux-gnu", "ld-linux-x86-64.so.2"),
    };
    let lib = root.join("usr/lib").join(triple);
    for program in ["nix", "systemd-analyze"] {
        run(Command::new(&patchelf)
            .arg("--set-interpreter")
            .arg(lib.join(loader))
            .args(["--force-rpath", "--set-rpath"])
            .arg(format!("{0}:{0}/nix:{0}/systemd", lib.display()))
            .arg(root.join("usr/bin").join(program)))?;
    }
    let etc = home.join("nix/etc");
    fs::create_dir_all(&etc)?;
    fs::create_dir_all(home.join("nix/store"))?;
    // Nothing is built and nothing fetched: only evaluated.
    fs::write(
        etc.join("nix.conf"),
        "sandbox = false\nsubstituters =\nbuild-users-group =\nexperimental-features = nix-command flakes\n",
    )?;
    fs::remove_dir_all(&apt)?;
    fs::write(home.join("ready"), "")?;
    Ok(())
}

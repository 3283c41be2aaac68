//! What the modules render, run for real.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use egress_nix_tier::exec::{find, run, until};
use egress_nix_tier::sshd::{Attempt, Server};
use egress_nix_tier::{eval, golden, is_root, libvirt, root, skipped, systemd};

use crate::{EVALUATION, golden_files, nixpkgs, operator, tier, tools};

#[test]
fn shell_scripts_of_the_modules_parse() {
    if !tier() {
        return;
    }
    for script in [
        "modules/operator/apply-manifests.sh",
        "modules/hypervisor/reconcile.sh",
        "modules/hypervisor/replug.sh",
        "modules/hypervisor/info.sh",
        "nix/demo.sh",
    ] {
        run(Command::new("bash").arg("-n").arg(root().join(script))).unwrap();
    }
}

#[test]
fn rendered_units_satisfy_systemd() {
    if !tier() {
        return;
    }
    let Some(analyze) = tools().systemd_analyze() else {
        panic!("no systemd-analyze (Debian: apt-get install systemd)")
    };
    let dir = tempfile::tempdir().unwrap();
    let mut scores = Vec::new();
    let mut faults = Vec::new();
    for (name, text) in golden_files("units/") {
        let (host, unit) = name.split_once('/').unwrap();
        let path = dir.path().join(host).join(unit);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, runnable(&text)).unwrap();
        if let Err(error) = systemd::verify(&analyze, &path) {
            faults.push(format!("{name}: {error}"));
        }
        if unit == "egress-proxies-operator.service" {
            match systemd::security(&analyze, &path) {
                Ok(tenths) => scores.push(format!("{host} {}.{}", tenths / 10, tenths % 10)),
                Err(error) => faults.push(format!("{name}: {error}")),
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    println!("exposure of the operator's unit: {}", scores.join(", "));
}

/// Golden units name `/nix/store/NAME`, which is not here.
fn runnable(unit: &str) -> String {
    let mut out = String::new();
    for word in unit.split_inclusive([' ', '\n', '=', '"']) {
        let ending = word.len() - word.trim_end_matches([' ', '\n', '=', '"']).len();
        let (body, end) = word.split_at(word.len() - ending);
        out.push_str(if body.starts_with("/nix/store/") {
            "/bin/true"
        } else {
            body
        });
        out.push_str(end);
    }
    out
}

#[test]
fn the_operators_key_opens_the_libvirt_socket_and_nothing_else() {
    if !tier() {
        return;
    }
    assert!(
        is_root(),
        "the restricted SSH access is tried as root: run the tier as root"
    );
    for program in ["sshd", "ssh", "sftp", "ssh-keygen", "unshare"] {
        assert!(
            find(program).is_some(),
            "{program} is missing (Debian: apt-get install openssh-server openssh-client util-linux)"
        );
    }
    let host = golden::read("hypervisor-networkd").unwrap();
    let block = &host["ssh/match.conf"];
    let line = &host["ssh/authorized_keys.egress-hypervisor"];
    let options = line.split_once("ssh-ed25519").unwrap().0;
    let user = "egress-hypervisor";
    let nologin = "/usr/sbin/nologin";

    // That the attempts are real: an ordinary user's key gets through with every one of them.
    let open = attempts("an unrestricted key", user, "/bin/sh", "", "");
    assert!(
        open.values().all(|through| *through),
        "an unrestricted key: {open:?}"
    );

    for (what, shell, block, options) in [
        ("as rendered", nologin, block.as_str(), options),
        // Each line of defence alone, even for a user with a shell.
        ("sshd's block alone", "/bin/sh", block.as_str(), ""),
        // No key option forbids a remote forward of a unix socket; one line of sshd's does.
        (
            "the key's options alone",
            "/bin/sh",
            "AllowStreamLocalForwarding local\n",
            options,
        ),
    ] {
        let tried = attempts(what, user, shell, block, options);
        assert!(tried.values().all(|through| !through), "{what}: {tried:?}");
        println!(
            "{what}: the libvirt socket, and none of {} other things",
            tried.len()
        );
    }
}

fn attempts(
    what: &str,
    user: &str,
    shell: &str,
    block: &str,
    options: &str,
) -> BTreeMap<Attempt, bool> {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::new(dir.path(), user, shell, block, options).unwrap();
    assert!(
        server.reaches_libvirt().unwrap(),
        "{what}: the libvirt socket was not reached\n{}",
        server.log()
    );
    Attempt::ALL
        .into_iter()
        .map(|a| (a, server.attempt(a).unwrap()))
        .collect()
}

#[test]
fn sshd_takes_the_whole_rendered_configuration() {
    if !tier() {
        return;
    }
    let Some(nixpkgs) = nixpkgs("sshd's whole configuration", true) else {
        return;
    };
    let tools = tools();
    let host = {
        let _one = EVALUATION.lock();
        eval::host(&tools, &nixpkgs, "hypervisor-scripted").unwrap()
    };
    let dir = tempfile::tempdir().unwrap();
    let key = dir.path().join("key");
    run(Command::new("ssh-keygen")
        .args(["-q", "-t", "ed25519", "-N", "", "-f"])
        .arg(&key))
    .unwrap();
    // Algorithms are left to this machine's sshd, which may be older than the one they are for.
    let text: String = host.files["ssh/sshd_config"]
        .lines()
        .filter(|line| {
            !["Ciphers", "KexAlgorithms", "Macs", "HostKey"]
                .contains(&line.split(' ').next().unwrap_or(""))
        })
        .map(|line| format!("{line}\n"))
        .collect();
    let path = dir.path().join("sshd_config");
    fs::write(
        &path,
        format!(
            "HostKey {}\n{}",
            key.display(),
            golden::runnable(&text, "/bin/true")
        ),
    )
    .unwrap();
    let _ = fs::create_dir("/run/sshd");
    let effective = run(Command::new(find("sshd").unwrap())
        .args(["-T", "-C", "user=proxies,host=x,addr=192.0.2.1", "-f"])
        .arg(&path))
    .unwrap();
    for line in [
        "permitopen [/run/libvirt/libvirt-sock]:*",
        "allowtcpforwarding local",
        "allowstreamlocalforwarding local",
        "maxsessions 0",
        "permittty no",
        "allowagentforwarding no",
        "forcecommand /run/current-system/sw/bin/nologin",
    ] {
        assert!(
            effective.lines().any(|l| l == line),
            "sshd does not have {line:?}:\n{effective}"
        );
    }
}

#[test]
fn rendered_pools_and_networks_live_in_a_real_libvirtd() {
    if !tier() {
        return;
    }
    let missing = libvirt::missing();
    assert!(
        missing.is_empty(),
        "missing: apt-get install {}",
        missing.join(" ")
    );
    assert!(is_root(), "libvirtd is run as root: run the tier as root");
    let dir = tempfile::tempdir().unwrap();
    let definitions = dir.path().join("definitions");
    for folder in ["pools", "networks"] {
        fs::create_dir_all(definitions.join(folder)).unwrap();
    }
    let mut validated = 0;
    for (name, text) in golden_files("libvirt/") {
        let xml = dir.path().join(name.replace('/', "-"));
        fs::write(&xml, text).unwrap();
        libvirt::validate(&xml).unwrap();
        validated += 1;
    }
    println!("{validated} definitions are valid by libvirt's schemas");

    let host = golden::read("hypervisor-networkd").unwrap();
    let old = dir.path().join("images");
    let pool = |path: &Path| {
        host["libvirt/pools/default.xml"].replace("/var/lib/libvirt/images", path.to_str().unwrap())
    };
    let pool_file = definitions.join("pools/default.xml");
    fs::write(&pool_file, pool(&old)).unwrap();
    fs::write(definitions.join("pools/default.autostart"), "").unwrap();
    fs::write(
        definitions.join("networks/egress.xml"),
        &host["libvirt/networks/egress.xml"],
    )
    .unwrap();

    let daemon = libvirt::Daemon::start(dir.path()).unwrap();
    // The user's own pool of that name, with a UUID of its own, is taken over.
    daemon
        .virsh(&["pool-define-as", "default", "dir", "--target", "/nowhere"])
        .unwrap();
    let uuid = daemon.virsh(&["pool-uuid", "default"]).unwrap();

    daemon.reconcile(&definitions).unwrap();
    let info = daemon.virsh(&["pool-info", "default"]).unwrap();
    assert!(info.contains("running"), "{info}");
    assert!(
        info.lines()
            .any(|l| l.starts_with("Autostart") && l.ends_with("yes")),
        "{info}"
    );
    assert_eq!(daemon.virsh(&["pool-uuid", "default"]).unwrap(), uuid);
    let info = daemon.virsh(&["net-info", "egress"]).unwrap();
    assert!(
        info.lines()
            .any(|l| l.starts_with("Active") && l.ends_with("yes")),
        "{info}"
    );

    // The same again is nothing to do.
    assert_eq!(daemon.reconcile(&definitions).unwrap(), "");

    // A disk, then another path: the pool is elsewhere, the disk where it was.
    daemon
        .virsh(&[
            "vol-create-as",
            "default",
            "disk.qcow2",
            "1M",
            "--format",
            "raw",
        ])
        .unwrap();
    let new = dir.path().join("elsewhere");
    fs::write(&pool_file, pool(&new)).unwrap();
    daemon.reconcile(&definitions).unwrap();
    let xml = daemon.virsh(&["pool-dumpxml", "default"]).unwrap();
    assert!(xml.contains(new.to_str().unwrap()), "{xml}");
    assert!(old.join("disk.qcow2").exists(), "the disk is gone");

    // Turned off: what was made goes, disks stay.
    daemon
        .virsh(&[
            "vol-create-as",
            "default",
            "other.qcow2",
            "1M",
            "--format",
            "raw",
        ])
        .unwrap();
    let nothing = dir.path().join("nothing");
    fs::create_dir(&nothing).unwrap();
    daemon.reconcile(&nothing).unwrap();
    assert_eq!(
        daemon
            .virsh(&["pool-list", "--all", "--name"])
            .unwrap()
            .trim(),
        ""
    );
    assert_eq!(
        daemon
            .virsh(&["net-list", "--all", "--name"])
            .unwrap()
            .trim(),
        ""
    );
    assert!(new.join("other.qcow2").exists(), "the disk is gone");
}

#[test]
fn declared_proxies_are_applied_and_pruned_by_a_real_operator() {
    const WHAT: &str = "declared Proxies";
    if !tier() {
        return;
    }
    let Some(operator) = operator() else {
        skipped(WHAT, "EGRESS_OPERATOR_BIN does not name the operator");
        return;
    };
    assert!(find("kubectl").is_some(), "kubectl is missing");
    let dir = tempfile::tempdir().unwrap();
    let manifests = dir.path().join("manifests");
    fs::create_dir(&manifests).unwrap();
    let bin = dir.path().join("bin");
    fs::create_dir(&bin).unwrap();
    std::os::unix::fs::symlink(&operator, bin.join("egress-proxies-operator")).unwrap();
    let providers = dir.path().join("providers.yaml");
    let local = golden::read("local").unwrap();
    let remote = golden::read("remote").unwrap();
    fs::write(&providers, &local["operator/providers.yaml"]).unwrap();

    let state = dir.path().join("state");
    let running = Command::new(&operator)
        .args(["--control-plane", "embedded", "--api-addr", "127.0.0.1:0"])
        .args(["--discovery-addr", "127.0.0.1:0", "--providers-config"])
        .arg(&providers)
        .env("STATE_DIRECTORY", &state)
        .env("RUNTIME_DIRECTORY", dir.path().join("run"))
        .env("CACHE_DIRECTORY", dir.path().join("cache"))
        .stdin(std::process::Stdio::null())
        .stdout(fs::File::create(dir.path().join("log")).unwrap())
        .stderr(fs::File::create(dir.path().join("errors")).unwrap())
        .spawn()
        .unwrap();
    let _running = Ended(running);
    let kubeconfig = state.join("admin.kubeconfig");
    assert!(
        until(Duration::from_secs(30), || kubeconfig.exists()),
        "{}",
        fs::read_to_string(dir.path().join("log")).unwrap()
    );

    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let own_state = dir.path().join("manifests-state");
    fs::create_dir(&own_state).unwrap();
    let apply = || {
        run(Command::new("bash")
            .arg(root().join("modules/operator/apply-manifests.sh"))
            .env("PATH", &path)
            .env("HOME", dir.path())
            .env("MANIFESTS", &manifests)
            .env("STATE_DIRECTORY", &own_state)
            .env("KUBECONFIG", &kubeconfig))
    };
    let proxies = || {
        run(Command::new("kubectl")
            .args(["get", "proxies", "--all-namespaces", "-o", "name"])
            .env("HOME", dir.path())
            .env("KUBECONFIG", &kubeconfig))
        .unwrap()
    };
    let office = "crawl.office.yaml";
    fs::write(
        manifests.join("default.one.yaml"),
        &local["operator/default.one.yaml"],
    )
    .unwrap();
    fs::write(
        manifests.join(office),
        &remote["operator/crawl.office.yaml"],
    )
    .unwrap();
    apply().unwrap();
    assert_eq!(proxies().lines().count(), 2, "{}", proxies());
    // The same again changes nothing.
    apply().unwrap();
    assert_eq!(proxies().lines().count(), 2);
    // What is no longer declared goes, and only that.
    fs::remove_file(manifests.join(office)).unwrap();
    let said = apply().unwrap();
    assert!(said.contains("deleting crawl/office"), "{said}");
    assert_eq!(proxies().trim(), "proxy.crawl.example.com/one");
    fs::remove_file(manifests.join("default.one.yaml")).unwrap();
    apply().unwrap();
    assert_eq!(proxies(), "");
}

/// A program of ours, ended with the test.
struct Ended(std::process::Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn the_operator_accepts_what_is_rendered() {
    if !tier() {
        return;
    }
    let Some(operator) = operator() else {
        skipped(
            "rendered providers files",
            "EGRESS_OPERATOR_BIN does not name the operator",
        );
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let mut checked = 0;
    for (name, text) in golden_files("operator/providers.yaml") {
        let path = dir.path().join(name.replace('/', "-"));
        fs::write(&path, text).unwrap();
        run(Command::new(&operator).arg("check-config").arg(&path)).unwrap();
        checked += 1;
    }
    println!("{checked} providers files pass check-config");
}

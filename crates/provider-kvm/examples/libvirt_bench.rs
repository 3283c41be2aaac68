//! Measures the provider against a real libvirtd, in namespaces of its own (as root):
//!
//! ```sh
//! cargo run --release -p egress-provider-kvm --example libvirt_bench -- [ROUNDS] [MIB]
//! ```
//!
//! - `list` over 200 domains that are defined and not started, against one metadata call each;
//! - an upload through SSH, against `virsh vol-upload` through the same sshd, and the memory it took;
//! - rounds of connect, get, list: open files and memory before and after.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a measurement that cannot be made ends with what was missing"
)]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use egress_core::spec::Placement;
use egress_core::{InstallationId, InstanceName, ProxyKey, Uid};
use egress_provider::config::{self, BuildContext};
use egress_provider::{CreateRequest, InstanceState, Provider, Step};
use egress_provider_kvm::{KvmType, Metrics};
use uuid::Uuid;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if std::env::var_os("EGRESS_BENCH_INSIDE").is_none() {
        let dir = tempfile::Builder::new()
            .prefix("lvbench")
            .tempdir()
            .unwrap();
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/in-namespace.sh");
        let status = Command::new("unshare")
            .args([
                "--net",
                "--mount",
                "--pid",
                "--fork",
                "--kill-child",
                "--mount-proc",
                "bash",
                script,
            ])
            .arg(dir.path())
            .arg(std::env::current_exe().unwrap())
            .args(&arguments)
            .env("EGRESS_BENCH_INSIDE", "1")
            .status()
            .expect("unshare: run as root");
        drop(dir);
        std::process::exit(status.code().unwrap_or(1));
    }
    let number = |i: usize, default: usize| {
        arguments
            .get(i)
            .map_or(default, |text| text.parse().expect("a number"))
    };
    let (rounds, mib) = (number(0, 1000), number(1, 512));
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let work = PathBuf::from(std::env::var("W").unwrap());
        let sshd = Sshd::start(&work);
        upload(&work, &sshd, mib).await;
        list(&work, &sshd).await;
        churn(&work, &sshd, rounds).await;
    });
}

fn virsh(args: &[&str]) -> String {
    let out = Command::new("virsh").arg("-q").args(args).output().unwrap();
    assert!(
        out.status.success(),
        "virsh {args:?}: {}",
        String::from_utf8_lossy(&out.stderr)
    );
    String::from_utf8(out.stdout).unwrap()
}

fn resident_kib(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    status
        .lines()
        .find_map(|l| l.strip_prefix(field))
        .and_then(|l| l.split_whitespace().next()?.parse().ok())
        .unwrap()
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Ends with the value.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Sshd {
    dir: PathBuf,
    port: u16,
    _process: Process,
}

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port()
}

fn wait_for(port: u16) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
        assert!(Instant::now() < deadline, "port {port} does not answer");
        std::thread::yield_now();
    }
}

impl Sshd {
    fn start(work: &Path) -> Self {
        let dir = work.join("sshd");
        std::fs::create_dir_all(&dir).unwrap();
        for name in ["host", "client"] {
            let made = Command::new("ssh-keygen")
                .args(["-q", "-N", "", "-t", "ed25519", "-f"])
                .arg(dir.join(name))
                .status()
                .unwrap();
            assert!(made.success());
        }
        std::fs::copy(dir.join("client.pub"), dir.join("authorized_keys")).unwrap();
        let port = free_port();
        let host = std::fs::read_to_string(dir.join("host.pub")).unwrap();
        std::fs::write(
            dir.join("known_hosts"),
            format!("[127.0.0.1]:{port} {host}"),
        )
        .unwrap();
        std::fs::write(
            dir.join("config"),
            format!(
                "ListenAddress 127.0.0.1:{port}\nHostKey {0}/host\nAuthorizedKeysFile {0}/authorized_keys\nPidFile none\nStrictModes no\nUsePAM no\nPermitRootLogin yes\n",
                dir.display()
            ),
        )
        .unwrap();
        let process = Process(
            Command::new("/usr/sbin/sshd")
                .args(["-D", "-f"])
                .arg(dir.join("config"))
                .arg("-E")
                .arg(dir.join("log"))
                .spawn()
                .unwrap(),
        );
        wait_for(port);
        Self {
            dir,
            port,
            _process: process,
        }
    }

    fn provider(&self, work: &Path, images: &str) -> Arc<dyn Provider> {
        let kvm = KvmType::new(Metrics::default());
        let text = format!(
            "providers: [{{name: kvm, type: kvm, kvm: {{sshKeyFile: {0}/client, knownHostsFile: {0}/known_hosts, diskSizeGb: 4, images: {{{images}}}, machineTypes: {{tiny: {{vcpus: 1, memoryMiB: 256}}}}, hosts: [{{name: far, address: '127.0.0.1:{1}', user: root, domainType: qemu, cpuMode: Nehalem, network: testnet}}]}}}}]",
            self.dir.display(),
            self.port
        );
        config::parse(&text, &[&kvm]).unwrap()[0]
            .blueprint
            .build(BuildContext {
                name: "kvm".into(),
                installation: InstallationId::new("bench"),
                state_dir: work.join("state"),
                runtime_dir: work.join("run"),
                cache_dir: work.join("cache"),
            })
            .unwrap()
    }
}

fn request(image: &str) -> CreateRequest {
    let uid = Uid::new(Uuid::new_v4().to_string());
    CreateRequest {
        name: InstanceName::for_uid(&uid),
        uid,
        key: ProxyKey::new("default", "bench"),
        installation: InstallationId::new("bench"),
        port: 3128,
        placement: Placement {
            image: Some(image.into()),
            ..Placement::default()
        },
        user_data: None,
    }
}

async fn upload(work: &Path, sshd: &Sshd, mib: usize) {
    let dir = work.join("www");
    std::fs::create_dir_all(&dir).unwrap();
    let image = dir.join("image.raw");
    let made = Command::new("dd")
        .args(["if=/dev/urandom", "bs=1M", "status=none"])
        .arg(format!("count={mib}"))
        .arg(format!("of={}", image.display()))
        .status()
        .unwrap();
    assert!(made.success());
    let sum = Command::new("sha256sum").arg(&image).output().unwrap();
    let sum = String::from_utf8(sum.stdout).unwrap()[..64].to_owned();
    let port = free_port();
    let _mirror = Process(
        Command::new("python3")
            .args([
                "-m",
                "http.server",
                "--bind",
                "127.0.0.1",
                &port.to_string(),
            ])
            .current_dir(&dir)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap(),
    );
    wait_for(port);

    // virsh through the same sshd, by OpenSSH's own client.
    let socket = work.join("forward.sock");
    let _forward = Process(
        Command::new("ssh")
            .args([
                "-N",
                "-o",
                "BatchMode=yes",
                "-o",
                "StrictHostKeyChecking=yes",
            ])
            .arg("-o")
            .arg(format!(
                "UserKnownHostsFile={}/known_hosts",
                sshd.dir.display()
            ))
            .arg("-i")
            .arg(sshd.dir.join("client"))
            .arg("-L")
            .arg(format!("{}:/run/libvirt/libvirt-sock", socket.display()))
            .args(["-p", &sshd.port.to_string(), "root@127.0.0.1"])
            .spawn()
            .unwrap(),
    );
    let deadline = Instant::now() + Duration::from_secs(20);
    while !socket.exists() {
        assert!(Instant::now() < deadline);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let uri = format!("qemu+unix:///system?socket={}", socket.display());
    virsh(&["vol-create-as", "default", "by-virsh", &format!("{mib}M")]);
    let began = Instant::now();
    virsh(&[
        "-c",
        &uri,
        "vol-upload",
        "by-virsh",
        image.to_str().unwrap(),
        "--pool",
        "default",
    ]);
    let by_virsh = began.elapsed();
    virsh(&["vol-delete", "by-virsh", "default"]);

    let provider = sshd.provider(
        work,
        &format!("img: {{url: 'http://127.0.0.1:{port}/image.raw', sha256: '{sum}', format: raw, firmware: bios}}"),
    );
    let _ = provider.list().await.unwrap();
    let before = resident_kib("VmRSS:");
    let one = request("img");
    let began = Instant::now();
    let id = provider.create(&one).await.unwrap();
    let by_us = loop {
        let seen = provider.get(&id).await.unwrap();
        if !matches!(
            &seen.state,
            InstanceState::Provisioning(Step::FetchingImage(_))
        ) {
            break began.elapsed();
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    let peak = resident_kib("VmHWM:");
    println!(
        "upload of {mib} MiB: virsh {:.2} s; download, hash and upload together {:.2} s ({:+.0} %)",
        by_virsh.as_secs_f64(),
        by_us.as_secs_f64(),
        (by_us.as_secs_f64() / by_virsh.as_secs_f64() - 1.0) * 100.0
    );
    println!(
        "memory: {} MiB before, {} MiB at most",
        before / 1024,
        peak / 1024
    );
    let deadline = Instant::now() + Duration::from_secs(60);
    while !matches!(
        provider.get(&id).await.unwrap().state,
        InstanceState::Provisioning(Step::WaitingForAddress(_))
    ) {
        assert!(Instant::now() < deadline);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let second = request("img");
    let began = Instant::now();
    provider.create(&second).await.unwrap();
    println!(
        "create with a cached image, until the domain runs: {:.2} s",
        began.elapsed().as_secs_f64()
    );
    for one in [&one, &second] {
        let id = egress_core::ProviderId::new(format!("hosts/far/domains/{}", one.name));
        provider.delete(&id).await.unwrap();
    }
}

async fn list(work: &Path, sshd: &Sshd) {
    let xml = |name: &str, uid: &str| {
        format!(
            "<domain type='qemu'><name>{name}</name><uuid>{uid}</uuid><metadata><egress:proxy xmlns:egress='{}'><egress:managed>true</egress:managed><egress:uid>{uid}</egress:uid><egress:installation>bench</egress:installation></egress:proxy></metadata><memory unit='MiB'>256</memory><os><type machine='q35'>hvm</type></os></domain>",
            egress_provider_kvm::domain::NAMESPACE
        )
    };
    let file = work.join("d.xml");
    let mut names = Vec::new();
    for _ in 0..200 {
        let one = request("img");
        std::fs::write(&file, xml(one.name.as_str(), one.uid.as_str())).unwrap();
        virsh(&["define", file.to_str().unwrap()]);
        names.push(one.name.to_string());
    }
    let provider = sshd.provider(work, "img: {url: 'http://127.0.0.1:1/x'}");
    // Connects.
    let _ = provider
        .get(&egress_core::ProviderId::new("hosts/far/domains/x"))
        .await;
    let began = Instant::now();
    assert_eq!(provider.list().await.unwrap().len(), 200);
    let cold = began.elapsed();
    let mut warm = Duration::MAX;
    for _ in 0..20 {
        let began = Instant::now();
        assert_eq!(provider.list().await.unwrap().len(), 200);
        warm = warm.min(began.elapsed());
    }
    // One call for each, over a connection of the same kind.
    let began = Instant::now();
    for name in &names {
        let id = egress_core::ProviderId::new(format!("hosts/far/domains/{name}"));
        provider.get(&id).await.unwrap();
    }
    let gets = began.elapsed();
    println!(
        "list of 200 domains: the first {:.1} ms (marks are read), then {:.1} ms; one get for each {:.1} ms (three calls each)",
        cold.as_secs_f64() * 1e3,
        warm.as_secs_f64() * 1e3,
        gets.as_secs_f64() * 1e3
    );
}

async fn churn(work: &Path, sshd: &Sshd, rounds: usize) {
    let name = virsh(&["list", "--all", "--name"])
        .lines()
        .next()
        .unwrap()
        .to_owned();
    let id = egress_core::ProviderId::new(format!("hosts/far/domains/{name}"));
    let mut first = None;
    let began = Instant::now();
    for round in 0..rounds {
        let provider = sshd.provider(work, "img: {url: 'http://127.0.0.1:1/x'}");
        provider.get(&id).await.unwrap();
        provider.list().await.unwrap();
        drop(provider);
        if round == rounds / 10 {
            first = Some((open_files(), resident_kib("VmRSS:")));
        }
    }
    let took = began.elapsed();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let (files, memory) = first.unwrap();
    println!(
        "{rounds} rounds of connect, get, list in {:.0} s: files {files} then {}, memory {} MiB then {} MiB",
        took.as_secs_f64(),
        open_files(),
        memory / 1024,
        resident_kib("VmRSS:") / 1024
    );
}

//! Against a real libvirtd and QEMU in software emulation, in namespaces of its own.
//!
//! [`on_real_libvirt`] makes the namespaces and runs the ignored tests of this file in them.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod support;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use egress_core::spec::Placement;
use egress_core::{
    ErrorClass, InstallationId, InstanceName, ProviderId, ProxyKey, SecretBytes, Uid,
};
use egress_provider::config::{self, BuildContext};
use egress_provider::{CreateRequest, Instance, InstanceEvent, InstanceState, Provider, Step};
use egress_provider_kvm::{KvmType, Metrics};
use futures::StreamExt as _;
use support::{Answer, Mirror, qcow2, sha256};
use uuid::Uuid;

/// Root is needed for namespaces; the rest is installed packages.
#[test]
fn on_real_libvirt() {
    let dir = tempfile::Builder::new().prefix("lv").tempdir().unwrap();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/in-namespace.sh");
    let out = Command::new("unshare")
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
        .args(["--ignored", "--test-threads=1", "--nocapture"])
        .output()
        .expect("unshare: run as root");
    let text = format!(
        "{}{}",
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr)
    );
    println!("{text}");
    let log = std::fs::read_to_string(dir.path().join("log/libvirtd.log")).unwrap_or_default();
    assert!(out.status.success(), "{text}\nlibvirtd: {log}");
    // Nothing in there means that nothing was tried.
    assert!(
        text.contains("test result: ok.") && !text.contains("ok. 0 passed"),
        "{text}"
    );
}

fn virsh(args: &[&str]) -> String {
    let out = Command::new("virsh").arg("-q").args(args).output().unwrap();
    String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr)
}

fn volumes() -> Vec<String> {
    virsh(&["pool-refresh", "default"]);
    let mut names: Vec<String> = virsh(&["vol-list", "default"])
        .lines()
        .filter_map(|l| l.split_whitespace().next().map(str::to_owned))
        .collect();
    names.sort();
    names
}

fn domains() -> Vec<String> {
    virsh(&["list", "--all", "--name"])
        .lines()
        .filter(|l| !l.is_empty())
        .map(str::to_owned)
        .collect()
}

/// What an earlier test left, whatever it was.
fn clean() {
    for name in domains() {
        virsh(&["destroy", &name]);
        virsh(&["undefine", "--nvram", "--managed-save", &name]);
    }
    virsh(&["pool-start", "default"]);
    for name in volumes() {
        virsh(&["vol-delete", &name, "default"]);
    }
}

/// A provider on this namespace's libvirtd, and a mirror with an image.
struct World {
    dir: tempfile::TempDir,
    mirror: Mirror,
    image: Vec<u8>,
    provider: Arc<dyn Provider>,
    kvm: Arc<KvmType>,
}

impl World {
    async fn new() -> Self {
        clean();
        let dir = tempfile::tempdir().unwrap();
        let image = qcow2(dir.path(), "512M", 3_000_000);
        let mirror = Mirror::start().await;
        mirror.set("/img.qcow2", Answer::of(image.clone()));
        let sum = sha256(&image);
        let text = format!(
            "img: {{url: '{}', sha256: '{sum}'}}",
            mirror.url("/img.qcow2")
        );
        let (kvm, provider) = Self::build(&dir, &text, "network: testnet");
        Self {
            dir,
            mirror,
            image,
            provider,
            kvm,
        }
    }

    fn build(
        dir: &tempfile::TempDir,
        images: &str,
        host: &str,
    ) -> (Arc<KvmType>, Arc<dyn Provider>) {
        let kvm = Arc::new(KvmType::new(Metrics::default()));
        let text = format!(
            "
providers:
- name: kvm
  type: kvm
  kvm:
    diskSizeGb: 1
    images:
      {images}
    machineTypes: {{tiny: {{vcpus: 1, memoryMiB: 256}}}}
    hosts: [{{name: here, local: true, domainType: qemu, cpuMode: Nehalem, {host}}}]
"
        );
        let blueprints = config::parse(&text, &[&*kvm]).unwrap();
        let provider = blueprints[0]
            .blueprint
            .build(BuildContext {
                name: "kvm".into(),
                installation: InstallationId::new("test"),
                state_dir: dir.path().join("state"),
                runtime_dir: dir.path().join("run"),
                cache_dir: dir.path().join("cache"),
            })
            .unwrap();
        (kvm, provider)
    }

    /// The same configuration after a restart of the operator.
    fn rebuilt(&self, images: &str, host: &str) -> Arc<dyn Provider> {
        Self::build(&self.dir, images, host).1
    }
}

fn request(image: &str) -> CreateRequest {
    let uid = Uid::new(Uuid::new_v4().to_string());
    CreateRequest {
        name: InstanceName::for_uid(&uid),
        uid,
        key: ProxyKey::new("default", "p1"),
        installation: InstallationId::new("test"),
        port: 3128,
        placement: Placement {
            image: Some(image.into()),
            ..Placement::default()
        },
        user_data: Some(SecretBytes::new("#cloud-config\n# sentinel-user-data\n")),
    }
}

/// Creates and waits until the domain is there (the guest itself has nothing to boot).
async fn create(provider: &Arc<dyn Provider>, request: &CreateRequest) -> ProviderId {
    let id = provider.create(request).await.unwrap();
    let up = |i: &Instance| {
        matches!(
            &i.state,
            InstanceState::Provisioning(Step::WaitingForAddress(_)) | InstanceState::Running { .. }
        )
    };
    wait(provider, &id, up).await;
    id
}

async fn wait(
    provider: &Arc<dyn Provider>,
    id: &ProviderId,
    good: impl Fn(&Instance) -> bool,
) -> Instance {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let last = provider.get(id).await;
        match &last {
            Ok(instance) if good(instance) => return last.unwrap(),
            Ok(_) => {}
            Err(error) => panic!("{error}"),
        }
        assert!(Instant::now() < deadline, "{last:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Asks until there is an error.
async fn failure(provider: &Arc<dyn Provider>, id: &ProviderId) -> egress_provider::ProviderError {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        if let Err(error) = provider.get(id).await {
            return error;
        }
        assert!(Instant::now() < deadline, "no error came");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "run by on_real_libvirt"]
async fn a_vms_life() {
    let world = World::new().await;
    let provider = &world.provider;
    let mut events = provider.events();
    let one = request("img");
    let began = Instant::now();
    let id = provider.create(&one).await.unwrap();
    assert_eq!(id.as_str(), format!("hosts/here/domains/{}", one.name));
    let first = provider.get(&id).await.unwrap();
    assert!(
        matches!(&first.state, InstanceState::Provisioning(_)),
        "{first:?}"
    );
    assert_eq!(first.uid, one.uid);
    assert_eq!(create(provider, &one).await, id);
    println!("first create with fetch: {:?}", began.elapsed());
    // The events name the instance.
    let told = tokio::time::timeout(Duration::from_secs(10), async {
        while let Some(event) = events.next().await {
            if event == InstanceEvent::Instance(one.name.clone()) {
                return true;
            }
        }
        false
    });
    assert!(told.await.unwrap());

    let two = request("img");
    let began = Instant::now();
    let second = provider.create(&two).await.unwrap();
    let took = began.elapsed();
    println!("create with a cached image: {took:?}");
    // The bound itself is measured elsewhere, on a machine that does nothing else.
    assert!(took < Duration::from_secs(30), "{took:?}");
    wait(provider, &second, |i| {
        !matches!(i.state, InstanceState::Stopped)
    })
    .await;
    assert_eq!(world.mirror.count("/img.qcow2"), 1, "one download for both");

    let listed = provider.list().await.unwrap();
    let uids: BTreeSet<&Uid> = listed.iter().map(|i| &i.uid).collect();
    assert_eq!(uids, BTreeSet::from([&one.uid, &two.uid]));
    assert!(listed.iter().all(|i| i.created_at.is_some()));
    assert!(provider.find(&two.name).await.unwrap().is_some());
    // Another installation sees none of them.
    let uuid = virsh(&["domuuid", one.name.as_str()]);
    assert_eq!(uuid.trim(), one.uid.as_str());
    let sum = sha256(&world.image);
    let base = format!("base-img-{}.qcow2", &sum[..12]);
    assert!(volumes().contains(&base) && volumes().contains(&format!("{base}.complete")));
    let uploaded = std::fs::read(
        PathBuf::from(std::env::var("W").unwrap())
            .join("pool")
            .join(&base),
    )
    .unwrap();
    assert!(
        uploaded == world.image,
        "the base is not what the mirror has"
    );

    // A stopped VM is started by a create.
    virsh(&["destroy", one.name.as_str()]);
    let stopped = wait(provider, &id, |i| i.state == InstanceState::Stopped).await;
    assert_eq!(stopped.name, one.name);
    create(provider, &one).await;

    // A managed-save image and NVRAM are no hindrance to delete.
    virsh(&["managedsave", two.name.as_str()]);
    for id in [&id, &second] {
        provider.delete(id).await.unwrap();
        provider.delete(id).await.unwrap();
        let gone = provider.get(id).await.unwrap_err();
        assert_eq!(gone.class, ErrorClass::NotFound, "{gone}");
    }
    assert_eq!(domains(), Vec::<String>::new());
    assert_eq!(volumes(), [base.clone(), format!("{base}.complete")]);
    assert!(provider.list().await.unwrap().is_empty());
    let nvram = PathBuf::from(std::env::var("W").unwrap()).join("lib/qemu/nvram");
    let left: Vec<_> = std::fs::read_dir(nvram)
        .map(|d| d.flatten().collect())
        .unwrap_or_default();
    assert!(left.is_empty(), "{left:?}");
    drop(world.kvm);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "run by on_real_libvirt"]
async fn half_made_states_are_finished() {
    let world = World::new().await;
    let provider = &world.provider;
    let one = request("img");
    let id = create(provider, &one).await;
    let (overlay, seed) = (
        format!("{}.qcow2", one.name),
        format!("{}-seed.iso", one.name),
    );
    // Defined, but not started.
    virsh(&["destroy", one.name.as_str()]);
    create(provider, &one).await;
    // Volumes without a domain.
    virsh(&["destroy", one.name.as_str()]);
    virsh(&["undefine", "--nvram", one.name.as_str()]);
    assert!(volumes().contains(&overlay));
    // The seed was cut off.
    virsh(&["vol-delete", &seed, "default"]);
    virsh(&["vol-create-as", "default", &seed, "100"]);
    create(provider, &one).await;
    let pool = PathBuf::from(std::env::var("W").unwrap()).join("pool");
    let content = std::fs::read(pool.join(&seed)).unwrap();
    assert!(
        content.windows(19).any(|w| w == b"sentinel-user-data\n"),
        "the seed was not made anew"
    );
    assert_eq!(domains(), [one.name.to_string()]);
    // delete finds the volumes although the domain is gone.
    virsh(&["destroy", one.name.as_str()]);
    virsh(&["undefine", "--nvram", one.name.as_str()]);
    provider.delete(&id).await.unwrap();
    assert!(!volumes().iter().any(|v| v.contains(one.name.as_str())));

    // A base without its marker is fetched anew.
    let base = format!("base-img-{}.qcow2", &sha256(&world.image)[..12]);
    virsh(&["vol-delete", &format!("{base}.complete"), "default"]);
    std::fs::write(pool.join(&base), b"cut off").unwrap();
    let before = world.mirror.count("/img.qcow2");
    let two = request("img");
    let id = create(provider, &two).await;
    assert_eq!(world.mirror.count("/img.qcow2"), before + 1);
    assert!(std::fs::read(pool.join(&base)).unwrap() == world.image);
    provider.delete(&id).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "run by on_real_libvirt"]
async fn what_is_not_ours_is_left_alone() {
    let world = World::new().await;
    let provider = &world.provider;
    let one = request("img");
    let xml = format!(
        "<domain type='qemu'><name>{}</name><memory unit='MiB'>256</memory><os><type machine='q35'>hvm</type></os></domain>",
        one.name
    );
    let file = world.dir.path().join("d.xml");
    std::fs::write(&file, xml).unwrap();
    virsh(&["define", file.to_str().unwrap()]);
    let error = provider.create(&one).await.unwrap_err();
    assert_eq!(error.class, ErrorClass::Permanent);
    assert!(error.message.contains("not the operator's"), "{error}");
    let id = ProviderId::new(format!("hosts/here/domains/{}", one.name));
    assert_eq!(
        provider.get(&id).await.unwrap_err().class,
        ErrorClass::NotFound
    );
    assert!(provider.list().await.unwrap().is_empty());
    provider.delete(&id).await.unwrap();
    assert_eq!(
        domains(),
        [one.name.to_string()],
        "the foreign domain is gone"
    );
    virsh(&["undefine", one.name.as_str()]);

    // A volume of the overlay's name that is laid over nothing.
    let two = request("img");
    virsh(&[
        "vol-create-as",
        "default",
        &format!("{}.qcow2", two.name),
        "1M",
    ]);
    std::fs::write(
        PathBuf::from(std::env::var("W").unwrap())
            .join("pool")
            .join(format!("{}.qcow2", two.name)),
        b"precious",
    )
    .unwrap();
    virsh(&["pool-refresh", "default"]);
    let id = match provider.create(&two).await {
        Err(error) => {
            assert!(error.message.contains("not the operator's"), "{error}");
            None
        }
        Ok(id) => {
            let error = failure(provider, &id).await;
            assert!(error.message.contains("not the operator's"), "{error}");
            Some(id)
        }
    };
    assert!(volumes().contains(&format!("{}.qcow2", two.name)));
    drop(id);
    virsh(&["vol-delete", &format!("{}.qcow2", two.name), "default"]);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "run by on_real_libvirt"]
async fn bad_images_never_become_bases() {
    let world = World::new().await;
    let mut hostile = world.image.clone();
    hostile[72..80].copy_from_slice(&4_u64.to_be_bytes());
    let mut backed = world.image.clone();
    backed[8..16].copy_from_slice(&200_u64.to_be_bytes());
    backed[16..20].copy_from_slice(&11_u32.to_be_bytes());
    let mut huge = world.image.clone();
    huge[24..32].copy_from_slice(&(2_u64 << 40).to_be_bytes());
    let cases: [(&str, Answer, String, ErrorClass, &str); 7] = [
        (
            "gone",
            Answer {
                status: Some(404),
                ..Answer::default()
            },
            String::new(),
            ErrorClass::Permanent,
            "404",
        ),
        (
            "wrong",
            Answer::of(world.image.clone()),
            format!(", sha256: '{}'", "0".repeat(64)),
            ErrorClass::Permanent,
            "was expected",
        ),
        (
            "hostile",
            Answer::of(hostile),
            String::new(),
            ErrorClass::Permanent,
            "data file",
        ),
        (
            "backed",
            Answer::of(backed),
            String::new(),
            ErrorClass::Permanent,
            "backing file",
        ),
        (
            "huge",
            Answer::of(huge),
            String::new(),
            ErrorClass::Permanent,
            "diskSizeGb",
        ),
        (
            "short",
            Answer::of(&world.image[..50]),
            String::new(),
            ErrorClass::Permanent,
            "cut off",
        ),
        (
            "cut",
            Answer {
                break_off: Some((usize::MAX, 100_000)),
                no_ranges: true,
                no_length: true,
                ..Answer::of(world.image.clone())
            },
            format!(", sha256: '{}'", sha256(&world.image)),
            ErrorClass::Permanent,
            "was expected",
        ),
    ];
    for (name, answer, sum, class, word) in cases {
        world.mirror.set(&format!("/{name}"), answer);
        let images = format!(
            "{name}: {{url: '{}'{sum}}}",
            world.mirror.url(&format!("/{name}"))
        );
        let provider = world.rebuilt(&images, "network: testnet");
        let one = request(name);
        let id = provider.create(&one).await.unwrap();
        let error = failure(&provider, &id).await;
        assert_eq!(error.class, class, "{name}: {error}");
        assert!(error.message.contains(word), "{name}: {error}");
        assert!(
            !volumes().iter().any(|v| v.contains(name)),
            "{name}: {:?}",
            volumes()
        );
        provider.delete(&id).await.unwrap();
        assert_eq!(
            provider.get(&id).await.unwrap_err().class,
            ErrorClass::NotFound
        );
    }
    assert!(domains().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "run by on_real_libvirt"]
async fn images_without_a_checksum_compressed_or_by_url() {
    let world = World::new().await;
    let compress = |tool: &str| {
        let plain = world.dir.path().join("plain");
        std::fs::write(&plain, &world.image).unwrap();
        let out = Command::new(tool)
            .args(["-c", "-q"])
            .arg(&plain)
            .output()
            .unwrap();
        assert!(out.status.success(), "{tool}");
        out.stdout
    };
    let xz = compress("xz");
    world.mirror.set("/i.qcow2.xz", Answer::of(xz.clone()));
    world
        .mirror
        .set("/i.qcow2.gz", Answer::of(compress("gzip")));
    world.mirror.set(
        "/i.qcow2.zst",
        Answer {
            no_length: true,
            ..Answer::of(compress("zstd"))
        },
    );
    world.mirror.set(
        "/SHA256SUMS",
        Answer::of(format!(
            "{}  other\n{} *i.qcow2.xz\n",
            "0".repeat(64),
            sha256(&xz)
        )),
    );
    world.mirror.set(
        "/raw",
        Answer::of({
            let mut raw = vec![0; 1 << 20];
            raw[510..512].copy_from_slice(b"\x55\xaa");
            raw
        }),
    );
    let images = [
        format!(
            "xz: {{url: '{}', checksums: '{}'}}",
            world.mirror.url("/i.qcow2.xz"),
            world.mirror.url("/SHA256SUMS")
        ),
        format!("gz: {{url: '{}'}}", world.mirror.url("/i.qcow2.gz")),
        format!("zstd: {{url: '{}'}}", world.mirror.url("/i.qcow2.zst")),
        format!(
            "raw: {{url: '{}', format: raw, firmware: bios}}",
            world.mirror.url("/raw")
        ),
    ]
    .join("\n      ");
    let provider = world.rebuilt(&images, "network: testnet");
    let pool = PathBuf::from(std::env::var("W").unwrap()).join("pool");
    for key in ["xz", "gz", "zstd", "raw"] {
        let one = request(key);
        let id = create(&provider, &one).await;
        let base = volumes()
            .into_iter()
            .find(|v| v.starts_with(&format!("base-{key}-")) && !v.ends_with(".complete"))
            .unwrap();
        let stored = std::fs::read(pool.join(&base)).unwrap();
        assert!(key == "raw" || stored == world.image, "{key}");
        provider.delete(&id).await.unwrap();
    }
    assert_eq!(world.mirror.count("/i.qcow2.xz"), 1);
    // Without a checksum the file is read once for its digest and once more to be kept; then the
    // digest is known.
    assert_eq!(world.mirror.count("/i.qcow2.gz"), 2);
    let again = world.rebuilt(&images, "network: testnet");
    let one = request("gz");
    let id = create(&again, &one).await;
    assert_eq!(world.mirror.count("/i.qcow2.gz"), 2);
    again.delete(&id).await.unwrap();

    let one = request(&world.mirror.url("/img.qcow2"));
    let id = create(&provider, &one).await;
    provider.delete(&id).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "run by on_real_libvirt"]
async fn pools_missing_inactive_and_full() {
    let world = World::new().await;
    let image = format!(
        "img: {{url: '{}', sha256: '{}'}}",
        world.mirror.url("/img.qcow2"),
        sha256(&world.image)
    );
    let missing = world.rebuilt(&image, "network: testnet, pool: nowhere");
    let error = missing.create(&request("img")).await.unwrap_err();
    assert_eq!(error.class, ErrorClass::Permanent, "{error}");
    assert!(
        error.message.contains("nowhere") && error.message.contains("default"),
        "{error}"
    );
    // Nothing to clean in a pool that is not there.
    let ghost = ProviderId::new("hosts/here/domains/proxy-aaaaaaaaaaaaaaaa");
    missing.delete(&ghost).await.unwrap();

    virsh(&["pool-destroy", "default"]);
    let one = request("img");
    let id = create(&world.provider, &one).await;
    world.provider.delete(&id).await.unwrap();

    let small = PathBuf::from(std::env::var("W").unwrap()).join("small");
    std::fs::create_dir_all(&small).unwrap();
    let mounted = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=2m", "tmpfs"])
        .arg(&small)
        .status()
        .unwrap();
    assert!(mounted.success());
    virsh(&[
        "pool-define-as",
        "small",
        "dir",
        "--target",
        small.to_str().unwrap(),
    ]);
    virsh(&["pool-start", "small"]);
    let full = world.rebuilt(&image, "network: testnet, pool: small");
    let one = request("img");
    let error = match full.create(&one).await {
        Ok(id) => failure(&full, &id).await,
        Err(error) => error,
    };
    assert_eq!(error.class, ErrorClass::QuotaExceeded, "{error}");
    assert!(error.message.contains("MiB"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "run by on_real_libvirt"]
async fn orphans_are_collected_and_nothing_else() {
    let world = World::new().await;
    let provider = &world.provider;
    let one = request("img");
    let id = create(provider, &one).await;
    let live = BTreeSet::from([one.uid.clone()]);
    let orphan = InstanceName::for_uid(&Uid::new("gone"));
    virsh(&["vol-create-as", "default", &format!("{orphan}.qcow2"), "1M"]);
    virsh(&[
        "vol-create-as",
        "default",
        &format!("{orphan}-seed.iso"),
        "1M",
    ]);
    virsh(&["vol-create-as", "default", "somebody-elses.qcow2", "1M"]);
    virsh(&[
        "vol-create-as",
        "default",
        "base-foreign-0123456789ab.qcow2",
        "1M",
    ]);
    let hour = Duration::from_secs(3600);
    assert!(
        provider
            .collect_garbage(&live, hour)
            .await
            .unwrap()
            .is_empty(),
        "younger than the grace"
    );
    // mtimes are whole seconds.
    tokio::time::sleep(Duration::from_millis(1100)).await;
    let mut swept = provider
        .collect_garbage(&live, Duration::ZERO)
        .await
        .unwrap();
    swept.sort();
    assert_eq!(
        swept,
        [
            format!("hosts/here/volumes/{orphan}-seed.iso"),
            format!("hosts/here/volumes/{orphan}.qcow2")
        ]
    );
    assert!(provider.get(&id).await.is_ok());
    // The image leaves the configuration: its base goes once nothing is laid over it.
    let none = world.rebuilt("other: {url: 'http://127.0.0.1:1/x'}", "network: testnet");
    assert!(
        none.collect_garbage(&live, Duration::ZERO)
            .await
            .unwrap()
            .is_empty()
    );
    none.delete(&id).await.unwrap();
    let swept = none
        .collect_garbage(&BTreeSet::new(), Duration::ZERO)
        .await
        .unwrap();
    assert_eq!(swept.len(), 1, "{swept:?}");
    assert!(swept[0].contains("base-img-"), "{swept:?}");
    assert_eq!(
        volumes(),
        ["base-foreign-0123456789ab.qcow2", "somebody-elses.qcow2"]
    );
    for name in volumes() {
        virsh(&["vol-delete", &name, "default"]);
    }
}

/// libvirtd frozen, then killed and back: calls come back with errors, and then work again.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "run by on_real_libvirt"]
async fn a_daemon_that_hangs_or_restarts() {
    let world = World::new().await;
    let provider = &world.provider;
    let one = request("img");
    let id = create(provider, &one).await;
    let dir = PathBuf::from(std::env::var("W").unwrap());
    let pid = std::fs::read_to_string(dir.join("libvirtd.pid"))
        .unwrap()
        .trim()
        .to_owned();
    let kill = |signal: &str| Command::new("kill").args([signal, &pid]).status().unwrap();
    kill("-STOP");
    let began = Instant::now();
    let error = provider.get(&id).await.unwrap_err();
    println!("a frozen daemon: {:?} {error}", began.elapsed());
    assert_eq!(error.class, ErrorClass::Transient);
    assert!(began.elapsed() < Duration::from_secs(70));
    kill("-CONT");
    let deadline = Instant::now() + Duration::from_secs(30);
    while let Err(error) = provider.get(&id).await {
        assert!(Instant::now() < deadline, "{error}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    kill("-TERM");
    while std::path::Path::new(&format!("/proc/{pid}")).exists() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(
        provider.get(&id).await.unwrap_err().class,
        ErrorClass::Transient
    );
    let started = Command::new("libvirtd")
        .args(["-d", "--timeout", "0", "-p"])
        .arg(dir.join("libvirtd.pid"))
        .arg("-f")
        .arg(dir.join("libvirtd.conf"))
        .status()
        .unwrap();
    assert!(started.success());
    let mut events = provider.events();
    let deadline = Instant::now() + Duration::from_secs(60);
    while let Err(error) = provider.get(&id).await {
        assert!(Instant::now() < deadline, "{error}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    // Events come over the new connection too.
    virsh(&["destroy", one.name.as_str()]);
    let told = tokio::time::timeout(Duration::from_secs(10), async {
        while let Some(event) = events.next().await {
            if event == InstanceEvent::Instance(one.name.clone()) {
                return;
            }
        }
    });
    told.await.unwrap();
    provider.delete(&id).await.unwrap();
}

/// An sshd in the namespace whose key may open exactly the libvirt socket.
struct Sshd {
    dir: tempfile::TempDir,
    port: u16,
    child: std::process::Child,
}

impl Sshd {
    fn start(settings: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for name in ["host", "client"] {
            let made = Command::new("ssh-keygen")
                .args(["-q", "-N", "", "-t", "ed25519", "-f"])
                .arg(at(name))
                .status()
                .unwrap();
            assert!(made.success());
        }
        let public = std::fs::read_to_string(at("client.pub")).unwrap();
        let restricted = "restrict,port-forwarding,permitopen=\"[/run/libvirt/libvirt-sock]:*\",command=\"/usr/sbin/nologin\"";
        std::fs::write(at("authorized_keys"), format!("{restricted} {public}")).unwrap();
        let port = std::net::TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        let host = std::fs::read_to_string(at("host.pub")).unwrap();
        std::fs::write(at("known_hosts"), format!("[127.0.0.1]:{port} {host}")).unwrap();
        std::fs::write(
            at("config"),
            format!(
                "ListenAddress 127.0.0.1:{port}\nHostKey {}\nAuthorizedKeysFile {}\nPidFile none\nStrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\n{settings}\n",
                at("host").display(),
                at("authorized_keys").display()
            ),
        )
        .unwrap();
        let child = Command::new("/usr/sbin/sshd")
            .args(["-D", "-f"])
            .arg(at("config"))
            .arg("-E")
            .arg(at("log"))
            .spawn()
            .unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(Instant::now() < deadline, "sshd did not start");
            std::thread::yield_now();
        }
        Self { dir, port, child }
    }

    fn settings(&self) -> String {
        format!(
            "sshKeyFile: {0}/client, knownHostsFile: {0}/known_hosts",
            self.dir.path().display()
        )
    }
}

impl Drop for Sshd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn far(world: &World, sshd: &Sshd, images: &str) -> (Arc<KvmType>, Arc<dyn Provider>) {
    let kvm = Arc::new(KvmType::new(Metrics::default()));
    let text = format!(
        "providers: [{{name: kvm, type: kvm, kvm: {{{}, diskSizeGb: 1, images: {{{images}}}, machineTypes: {{tiny: {{vcpus: 1, memoryMiB: 256}}}}, hosts: [{{name: far, address: '127.0.0.1:{}', user: root, domainType: qemu, cpuMode: Nehalem, network: testnet}}]}}}}]",
        sshd.settings(),
        sshd.port
    );
    let blueprints = config::parse(&text, &[&*kvm]).unwrap();
    let provider = blueprints[0]
        .blueprint
        .build(BuildContext {
            name: "kvm".into(),
            installation: InstallationId::new("test"),
            state_dir: world.dir.path().join("state-far"),
            runtime_dir: world.dir.path().join("run"),
            cache_dir: world.dir.path().join("cache"),
        })
        .unwrap();
    (kvm, provider)
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "run by on_real_libvirt"]
async fn far_over_ssh_with_a_key_for_one_socket_only() {
    let world = World::new().await;
    let sshd = Sshd::start("AllowTcpForwarding local\nAllowStreamLocalForwarding local");
    let images = format!("img: {{url: '{}'}}", world.mirror.url("/img.qcow2"));
    let (kvm, provider) = far(&world, &sshd, &images);
    let one = request("img");
    let id = create(&provider, &one).await;
    assert_eq!(id.as_str(), format!("hosts/far/domains/{}", one.name));
    assert_eq!(provider.list().await.unwrap().len(), 1);
    let reports = kvm.provider("kvm").unwrap().doctor().await;
    assert!(reports[0].ok(), "{reports:#?}");
    let names: Vec<_> = reports[0].checks.iter().map(|c| c.name).collect();
    assert_eq!(
        names,
        [
            "ssh", "socket", "libvirt", "pool", "space", "network", "kvm", "firmware", "memory"
        ]
    );

    // The connection is cut in the middle of things: the next calls work again.
    let sessions = Command::new("pkill")
        .args(["-KILL", "-P", &sshd.child.id().to_string()])
        .status();
    assert!(sessions.unwrap().success());
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        match provider.get(&id).await {
            Ok(_) => break,
            Err(error) => assert_eq!(error.class, ErrorClass::Transient, "{error}"),
        }
        assert!(Instant::now() < deadline);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    provider.delete(&id).await.unwrap();
    // Nothing of the private sockets stays behind.
    let left: Vec<_> = std::fs::read_dir(world.dir.path().join("run/kvm"))
        .unwrap()
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "run by on_real_libvirt"]
async fn forwarding_that_is_forbidden_is_said_by_create_and_by_the_doctor() {
    let world = World::new().await;
    for setting in ["AllowStreamLocalForwarding no", "AllowTcpForwarding no"] {
        let sshd = Sshd::start(setting);
        let (kvm, provider) = far(&world, &sshd, "img: {url: 'http://127.0.0.1:1/x'}");
        let error = provider.create(&request("img")).await.unwrap_err();
        assert!(
            error.message.contains("AllowStreamLocalForwarding"),
            "{error}"
        );
        let reports = kvm.provider("kvm").unwrap().doctor().await;
        let last = reports[0].checks.last().unwrap();
        assert!(!last.ok && last.name == "socket", "{last:?}");
        assert!(last.what_to_do.is_some());
    }
}

/// Many domains: one round trip for all, not one for each.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "run by on_real_libvirt"]
async fn a_list_of_two_hundred() {
    let world = World::new().await;
    let provider = &world.provider;
    let template = request("img");
    let id = create(provider, &template).await;
    let xml = virsh(&["dumpxml", "--inactive", template.name.as_str()]);
    let old_mac = xml.split("mac address='").nth(1).unwrap()[..17].to_owned();
    for _ in 0..199 {
        let one = request("img");
        let text = xml
            .replace(template.name.as_str(), one.name.as_str())
            .replace(template.uid.as_str(), one.uid.as_str())
            .replace(&old_mac, "52:54:00:00:00:01");
        let file = world.dir.path().join("d.xml");
        std::fs::write(&file, text).unwrap();
        virsh(&["define", file.to_str().unwrap()]);
    }
    let began = Instant::now();
    assert_eq!(provider.list().await.unwrap().len(), 200);
    let cold = began.elapsed();
    let began = Instant::now();
    assert_eq!(provider.list().await.unwrap().len(), 200);
    let warm = began.elapsed();
    println!("list of 200: first {cold:?}, then {warm:?}");
    provider.delete(&id).await.unwrap();
    assert_eq!(provider.list().await.unwrap().len(), 199);
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

/// Connections and calls leave nothing behind.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "run by on_real_libvirt"]
async fn rounds_leave_files_and_memory_as_they_were() {
    let world = World::new().await;
    let one = request("img");
    let id = create(&world.provider, &one).await;
    let image = format!(
        "img: {{url: '{}', sha256: '{}'}}",
        world.mirror.url("/img.qcow2"),
        sha256(&world.image)
    );
    let mut first = None;
    for round in 0..120 {
        // A new provider is a new connection.
        let provider = world.rebuilt(&image, "network: testnet");
        for _ in 0..5 {
            provider.get(&id).await.unwrap();
            provider.list().await.unwrap();
        }
        drop(provider);
        if round == 20 {
            tokio::time::sleep(Duration::from_millis(500)).await;
            first = Some((open_files(), resident()));
        }
    }
    let (files, memory) = first.unwrap();
    let deadline = Instant::now() + Duration::from_secs(10);
    while open_files() > files + 4 {
        assert!(
            Instant::now() < deadline,
            "{} files, {files} before",
            open_files()
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let grown = resident().saturating_sub(memory) / 1024;
    println!(
        "files {files} then {}, memory grew by {grown} KiB over 100 connections",
        open_files()
    );
    assert!(grown < 8 * 1024, "{grown} KiB");
    world.provider.delete(&id).await.unwrap();
}

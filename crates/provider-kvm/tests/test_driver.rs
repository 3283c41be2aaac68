//! Against libvirt's own `test:///default` driver: no daemon, no root. It has domains, metadata,
//! events and made-up addresses, but no uploads, so nothing is created through the provider here.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

use std::sync::Arc;
use std::time::Duration;

use egress_core::{
    ErrorClass, InstallationId, InstanceName, ProviderId, ProxyKey, SystemClock, Uid,
};
use egress_provider::config::{self, BuildContext, Fields, ProviderBlueprint, ProviderType};
use egress_provider::{InstanceEvent, InstanceState, Provider, ProviderError};
use egress_provider_kvm::config::{Firmware, Format, KvmConfig, MachineType, Nic};
use egress_provider_kvm::domain::{Disk, DomainSpec, Marks};
use egress_provider_kvm::image::download::HttpConfig;
use egress_provider_kvm::{KvmProvider, Metrics};
use futures::StreamExt as _;
use std::sync::Mutex;
use virt::connect::Connect;

const URI: &str = "test:///default";

/// Reads the block as the real type does, and keeps it.
#[derive(Default)]
struct Keep(Mutex<Option<KvmConfig>>);

struct Nothing;

impl ProviderBlueprint for Nothing {
    fn build(&self, _: BuildContext) -> Result<Arc<dyn Provider>, ProviderError> {
        unreachable!("only read")
    }
}

impl ProviderType for Keep {
    fn type_name(&self) -> &'static str {
        "kvm"
    }

    fn read(&self, fields: &mut Fields<'_>) -> Option<Box<dyn ProviderBlueprint>> {
        *self.0.lock().unwrap() = egress_provider_kvm::config::read(fields);
        Some(Box::new(Nothing))
    }
}

fn provider(dir: &std::path::Path, installation: &str) -> Arc<KvmProvider> {
    let keep = Keep::default();
    let text = "
providers:
- name: kvm
  type: kvm
  kvm:
    machineTypes: {tiny: {vcpus: 1, memoryMiB: 256}}
    hosts: [{name: here, local: true, network: default, pool: default-pool}]
";
    drop(config::parse(text, &[&keep]).unwrap());
    let config = keep.0.into_inner().unwrap().unwrap();
    let context = BuildContext {
        name: "kvm".into(),
        installation: InstallationId::new(installation),
        state_dir: dir.join("state"),
        runtime_dir: dir.join("run"),
        cache_dir: dir.join("cache"),
    };
    KvmProvider::build_with(
        Arc::new(config),
        &context,
        Metrics::default(),
        Arc::new(SystemClock),
        HttpConfig::default(),
        |host| host.with_uri(URI),
    )
    .unwrap()
}

fn spec(uid: &Uid, installation: &str) -> DomainSpec {
    DomainSpec {
        name: InstanceName::for_uid(uid).to_string(),
        key: ProxyKey::new("default", "p"),
        marks: Marks {
            uid: uid.clone(),
            installation: InstallationId::new(installation),
            created_at: Some("2026-01-02T03:04:05Z".parse().unwrap()),
        },
        machine: MachineType {
            vcpus: 1,
            memory_mib: 256,
        },
        kvm: false,
        cpu_mode: None,
        firmware: Firmware::Bios,
        overlay: Disk {
            path: "/a".into(),
            format: Format::Qcow2,
        },
        seed: Disk {
            path: "/b".into(),
            format: Format::Raw,
        },
        nic: Nic::Network("default".into()),
    }
}

fn define(conn: &Connect, spec: &DomainSpec) -> virt::domain::Domain {
    let xml = spec
        .to_xml()
        .replace("<domain type=\"qemu\">", "<domain type=\"test\">");
    let domain = conn.define_domain_xml(&xml).unwrap();
    domain.create().unwrap();
    domain
}

#[tokio::test(flavor = "multi_thread")]
async fn domains_are_seen_listed_told_and_removed() {
    let dir = tempfile::tempdir().unwrap();
    let provider = provider(dir.path(), "mine");
    // The driver's domains are shared by all connections of a process.
    let _ = provider.list().await.unwrap();
    let conn = Connect::open(Some(URI)).unwrap();
    let uid = Uid::new("6f1c1f0e-5b0a-4d3a-9c55-0d0a6c3b7f11");
    let theirs = Uid::new("7f1c1f0e-5b0a-4d3a-9c55-0d0a6c3b7f11");
    let domain = define(&conn, &spec(&uid, "mine"));
    define(&conn, &spec(&theirs, "other"));
    let name = InstanceName::for_uid(&uid);
    let id = ProviderId::new(format!("hosts/here/domains/{name}"));

    let seen = provider.get(&id).await.unwrap();
    assert_eq!(
        (seen.uid.clone(), seen.name.clone()),
        (uid.clone(), name.clone())
    );
    assert!(seen.created_at.is_some());
    assert!(
        matches!(seen.state, InstanceState::Running { .. }),
        "{seen:?}"
    );
    let listed = provider.list().await.unwrap();
    assert_eq!(listed, [seen], "the other installation's is not ours");

    let mut events = provider.events();
    domain.suspend().unwrap();
    let told = tokio::time::timeout(Duration::from_secs(10), events.next()).await;
    assert_eq!(told.unwrap(), Some(InstanceEvent::Instance(name.clone())));
    assert_eq!(
        provider.get(&id).await.unwrap().state,
        InstanceState::Stopped
    );
    domain.resume().unwrap();

    // The driver knows none of the later undefine flags: fewer are tried.
    provider.delete(&id).await.unwrap();
    provider.delete(&id).await.unwrap();
    assert_eq!(
        provider.get(&id).await.unwrap_err().class,
        ErrorClass::NotFound
    );
    assert!(provider.list().await.unwrap().is_empty());

    let their_name = InstanceName::for_uid(&theirs);
    let their_id = ProviderId::new(format!("hosts/here/domains/{their_name}"));
    assert_eq!(
        provider.get(&their_id).await.unwrap_err().class,
        ErrorClass::NotFound
    );
    provider.delete(&their_id).await.unwrap();
    assert!(
        conn.lookup_domain_by_name(their_name.as_str()).is_ok(),
        "not ours, and gone"
    );

    // Ids that name nothing here.
    let gone = ProviderId::new("hosts/gone/domains/x");
    assert_eq!(
        provider.get(&gone).await.unwrap_err().class,
        ErrorClass::Permanent
    );
    provider.delete(&gone).await.unwrap();
    provider.shutdown().await;
}

//! The suite that every provider passes, on real libvirt through a real sshd.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use egress_core::InstallationId;
use egress_core::spec::Placement;
use egress_e2e::lab::{self, Guest, Lab};
use egress_e2e::site::Site;
use egress_provider::config::{self, BuildContext};
use egress_provider::conformance::{self, Harness, Limits};
use egress_provider::{Instance, Provider};
use egress_provider_kvm::{KvmType, Metrics};

use crate::BOOT;

/// One boot after the other.
#[test]
fn the_provider_conforms() {
    lab::test(&[Guest::Light], async |lab| {
        let site = lab.mk_site().await?;
        lab.stage("the suite");
        let checks = conformance::run(&mut Libvirt {
            lab,
            site: &site,
            made: 0,
        })
        .await;
        println!("  {} checks passed", checks.len());
        assert!(checks.len() > 10, "{checks:?}");
        site.check_clean().await?;
        assert_eq!(site.mirror.gets("light.qcow2"), 1);
        Ok(())
    });
}

struct Libvirt<'l> {
    lab: &'l Lab,
    site: &'l Site,
    made: u32,
}

#[async_trait]
impl Harness for Libvirt<'_> {
    async fn provider(&mut self, installation: &InstallationId) -> Arc<dyn Provider> {
        let kvm = KvmType::new(Metrics::register(
            &mut prometheus_client::registry::Registry::default(),
        ));
        let text = self.site.providers().to_string();
        let mut read = config::parse(&text, &[&kvm]).unwrap_or_else(|faults| panic!("{faults}"));
        self.made += 1;
        let dir = |name: &str| {
            self.lab
                .mk_dir(&format!("provider/{name}"))
                .expect("a directory")
        };
        let context = BuildContext {
            name: "kvm".to_owned(),
            installation: installation.clone(),
            state_dir: dir("state"),
            // Of one process: two of them would share sockets.
            runtime_dir: dir(&format!("run-{}", self.made)),
            cache_dir: dir("cache"),
        };
        read.remove(0)
            .blueprint
            .build(context)
            .expect("a provider that can be built")
    }

    fn placement(&self, _n: u32) -> Placement {
        Placement {
            image: Some("light".to_owned()),
            machine_type: Some("light".to_owned()),
            ..Placement::default()
        }
    }

    fn unknown_placement(&self) -> Option<Placement> {
        Some(Placement {
            image: Some("no-such-image".to_owned()),
            ..self.placement(0)
        })
    }

    async fn stop(&mut self, instance: &Instance) {
        let domain = instance.name.as_str();
        self.site
            .host
            .virsh(&["destroy", domain])
            .await
            .expect("a domain that ran");
    }

    async fn vanish(&mut self, instance: &Instance) {
        self.stop(instance).await;
        let domain = instance.name.as_str();
        let undefine = ["undefine", "--nvram", domain];
        self.site
            .host
            .virsh(&undefine)
            .await
            .expect("a domain that was there");
    }

    fn limits(&self) -> Limits {
        Limits {
            running: BOOT,
            gone: BOOT,
            event: BOOT,
            poll: Duration::from_millis(100),
        }
    }

    async fn count_on_backend(&mut self) -> Option<usize> {
        Some(
            self.site
                .host
                .domains()
                .await
                .expect("a host that answers")
                .len(),
        )
    }
}

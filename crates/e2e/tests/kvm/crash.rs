//! The operator killed between any two calls to libvirt: never two domains, never a leak.

use std::time::Duration;

use egress_e2e::guest::light;
use egress_e2e::lab::{self, Guest};
use egress_e2e::process::{Seen, until};

use crate::{BOOT, SOON};

/// What changes something, in the operator's log: every call to libvirt that does, and what the
/// reconciler has recorded at the API. Killing between two reads would be the same as killing
/// before the first.
const STEPS: &[&str] = &[
    "rpc=\"virStorageVolCreateXML\"",
    "rpc=\"virStorageVolUpload\"",
    "rpc=\"virDomainDefineXML\"",
    "rpc=\"virDomainCreate\"",
    "rpc=\"virDomainDestroy\"",
    "rpc=\"virDomainUndefineFlags\"",
    "rpc=\"virStorageVolDelete\"",
    "instance created",
    "status.patch",
];
/// The first sweep comes half a minute after the start, whatever the interval.
const SWEPT: Duration = Duration::from_secs(60);
/// More than a create or a delete takes.
const MOST: usize = 40;

/// `kill -9` after the first, second, third … step of a create, then of a delete, each time
/// restarted and brought to its end.
#[test]
fn the_operator_may_die_at_every_step() {
    lab::test(&[Guest::Light], async |lab| {
        let site = lab.mk_site().await?;
        let sweep = ["--sweep-interval", "1s", "--orphan-grace", "1s"];
        let mut operator = site
            .mk_operator_with(lab, &site.providers(), &sweep)
            .await?;
        lab.stage("the image is fetched");
        let proxy = site.mk_proxy("p").user_data("#light no-proxy\n");
        operator.apply(&proxy).await?;
        operator
            .condition("p", "Provisioned", "True", "", BOOT)
            .await?;
        operator.delete("p").await?;
        operator.gone("p", SOON).await?;

        lab.stage("killed in create");
        let mut created = 0;
        for step in 1..MOST {
            let log = operator.log_watch()?;
            operator.apply(&proxy).await?;
            let killed = log.after(STEPS, step, Duration::from_secs(5)).await?;
            operator.kill().await?;
            operator.start().await?;
            operator.started("p", SOON).await?;
            assert_eq!(
                site.host.domains().await?.len(),
                1,
                "after a kill at call {step}"
            );
            operator.delete("p").await?;
            operator.gone("p", SOON).await?;
            site.check_clean().await?;
            created = step;
            if !killed {
                break;
            }
        }

        lab.stage("killed in delete");
        let mut deleted = 0;
        for step in 1..MOST {
            operator.apply(&proxy).await?;
            operator.started("p", SOON).await?;
            let log = operator.log_watch()?;
            operator.delete("p").await?;
            let killed = log.after(STEPS, step, Duration::from_secs(5)).await?;
            operator.kill().await?;
            operator.start().await?;
            operator.gone("p", SOON).await?;
            assert_eq!(
                site.host.domains().await?,
                Vec::<String>::new(),
                "after a kill at call {step}"
            );
            deleted = step;
            if !killed {
                break;
            }
        }
        lab.stage("what a killed delete left is swept");
        // Between the domain and its disks; a Proxy whose domain is gone is released.
        until("a clean host", SWEPT, async || {
            Ok(site
                .check_clean()
                .await
                .map_or_else(Seen::not_yet, Seen::There))
        })
        .await?;
        println!("  killed at {created} steps of create and {deleted} of delete");
        assert!(
            created > 5 && deleted > 4,
            "the steps were not seen in the log"
        );
        assert_eq!(site.mirror.gets("light.qcow2"), 1);
        Ok(())
    });
}

/// What no Proxy owns is deleted, volumes and all; what others own, or another installation made,
/// is not.
#[test]
fn orphans_are_swept_and_nothing_else() {
    lab::test(&[Guest::Light], async |lab| {
        let site = lab.mk_site().await?;
        let authority = site.target.authority_file().to_string_lossy().into_owned();
        let mine = ["--installation-id", "mine"];
        let sweep = [
            "--sweep-interval",
            "1s",
            "--orphan-grace",
            "1s",
            "--health-ca",
            &authority,
        ];
        let image = lab.image(Guest::Light)?.path;
        site.host
            .mk_domain("theirs", &image, light::MEMORY_MIB)
            .await?;
        let mut operator = site.mk_operator_with(lab, &site.providers(), &mine).await?;
        lab.stage("an instance loses its Proxy");
        operator
            .apply(&site.mk_proxy("p").user_data("#light no-proxy\n"))
            .await?;
        operator
            .condition("p", "Provisioned", "True", "", BOOT)
            .await?;
        operator.kill().await?;
        operator.forget()?;

        lab.stage("another installation leaves it alone");
        operator.set_flags(&[&["--installation-id", "other"], &sweep[..]].concat());
        operator.start().await?;
        let before = site.host.domains().await?;
        let watch = operator.log_watch()?;
        // Some sweeps pass, each of which lists the domains.
        assert!(
            watch
                .after(&["virConnectGetAllDomainStats"], 3, SWEPT)
                .await?,
            "no sweeps"
        );
        assert_eq!(site.host.domains().await?, before);
        operator.stop().await?;
        operator.forget()?;

        lab.stage("its own sweeps it");
        operator.set_flags(&[&mine[..], &sweep[..]].concat());
        operator.start().await?;
        until("only the foreign domain is left", SWEPT, async || {
            let left = (
                site.host.domains().await?,
                site.volumes_of_instances().await?,
            );
            Ok(match left == (vec!["theirs".to_owned()], Vec::new()) {
                true => Seen::There(()),
                false => Seen::not_yet(format!("{left:?}")),
            })
        })
        .await?;
        assert_eq!(site.base_images().await?.len(), 1);
        Ok(())
    });
}

//! The harness itself: if one of these fails, look here first.

use std::time::Duration;

use crate::BOOT;

use egress_e2e::exec::run_within;
use egress_e2e::guest::light;
use egress_e2e::lab::{self, Guest};
use egress_e2e::process::{Seen, until};
use egress_e2e::sshd;

/// The harness itself: if this fails, look here first.
#[test]
fn a_light_guest_boots_and_answers() {
    lab::test(&[Guest::Light], async |lab| {
        lab.stage("libvirtd starts");
        let host = lab.mk_host("a", 0).await?;
        lab.stage("guest boots");
        let image = lab.image(Guest::Light)?;
        host.mk_domain("light", &image.path, light::MEMORY_MIB)
            .await?;
        host.virsh(&["start", "light"]).await?;
        let address = host.guest_address("light", BOOT).await?;
        lab.stage("guest answers");
        until("its agent", Duration::from_secs(60), async || {
            Ok(
                match host
                    .virsh(&["domifaddr", "light", "--source", "agent"])
                    .await
                {
                    Ok(text) if text.contains(&address.to_string()) => Seen::There(()),
                    Ok(text) => Seen::not_yet(text),
                    Err(error) => Seen::not_yet(error),
                },
            )
        })
        .await?;
        lab.stage("guest is destroyed");
        host.virsh(&["destroy", "light"]).await?;
        host.virsh(&["undefine", "--nvram", "light"]).await?;
        assert!(host.domains().await?.is_empty());
        Ok(())
    });
}

/// Two hosts in one lab are as apart as two machines, and sshd lets a key reach one socket only.
#[test]
fn two_hosts_behind_sshd_are_apart() {
    lab::test(&[], async |lab| {
        lab.stage("two hosts start");
        let (one, other) = (lab.mk_host("one", 0).await?, lab.mk_host("other", 1).await?);
        one.mk_pool("only-here").await?;
        assert_eq!(
            one.names(&["pool-list", "--name"]).await?,
            ["default", "only-here"]
        );
        assert_eq!(other.names(&["pool-list", "--name"]).await?, ["default"]);

        lab.stage("libvirt through sshd");
        let sshd = one.mk_sshd(sshd::TIGHT).await?;
        let forwarded = sshd.mk_forward(lab, "/run/libvirt/libvirt-sock").await?;
        let uri = format!("qemu+unix:///system?socket={}", forwarded.display());
        let mut virsh = tokio::process::Command::new("virsh");
        let pools = virsh.args(["-q", "-c", &uri, "pool-list", "--name"]);
        let pools = run_within(pools, Duration::from_secs(20)).await?;
        assert_eq!(
            pools.split_whitespace().collect::<Vec<_>>(),
            ["default", "only-here"]
        );
        Ok(())
    });
}

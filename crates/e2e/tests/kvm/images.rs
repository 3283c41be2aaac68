//! Mirrors that fail and images that no host should be given.

use egress_e2e::fixtures::{mk_html, mk_qcow2, mk_raw};
use egress_e2e::lab::{self, Guest};
use egress_e2e::mirror::Fault;
use egress_e2e::operator::anonymous_kib;
use egress_e2e::process::{Seen, until};
use serde_json::json;

use crate::{BOOT, SOON};

/// Each is refused with its reason, before anything of it is on the host.
#[test]
fn bad_images_never_reach_the_host() {
    lab::test(&[], async |lab| {
        let site = lab.mk_site().await?;
        let gib = 1_u64 << 30;
        let cases: &[(&str, Vec<u8>, &str)] = &[
            (
                "backed",
                mk_qcow2().backed_by("/etc/shadow").bytes(),
                "backing file",
            ),
            (
                "backed-v2",
                mk_qcow2().of_version(2).backed_by("/etc/shadow").bytes(),
                "backing file",
            ),
            (
                "data-file",
                mk_qcow2().with_data_in("/etc/shadow").bytes(),
                "data file",
            ),
            (
                "huge",
                mk_qcow2().of_virtual_size(40 * gib).bytes(),
                "diskSizeGb",
            ),
            ("raw-as-qcow2", mk_raw(1 << 20), "qcow2"),
            ("html", mk_html(), "qcow2"),
            ("cut-header", mk_qcow2().cut_to(40).bytes(), ""),
            ("empty", Vec::new(), ""),
        ];
        let mut providers = site.providers();
        for (name, bytes, _) in cases {
            let url = site.mirror.add_bytes(&format!("{name}.img"), bytes.clone());
            providers["providers"][0]["kvm"]["images"][name] =
                json!({ "url": url, "format": "qcow2" });
        }
        let url = site.mirror.url("nothing.img");
        providers["providers"][0]["kvm"]["images"]["missing"] = json!({ "url": url });
        let operator = site.mk_operator_with(lab, &providers, &[]).await?;

        lab.stage("each is refused");
        for (name, _, text) in cases {
            operator
                .apply(&site.mk_proxy(name).with("/placement/image", *name))
                .await?;
            let proxy = operator
                .condition(name, "Provisioned", "False", text, SOON)
                .await?;
            println!("  {name}: {}", egress_e2e::operator::conditions(&proxy));
        }
        operator
            .apply(&site.mk_proxy("missing").with("/placement/image", "missing"))
            .await?;
        operator
            .condition("missing", "Provisioned", "False", "404", SOON)
            .await?;
        for (name, ..) in cases {
            let failed = operator.proxy(name).await?.unwrap_or_default();
            assert_eq!(failed["status"]["phase"], "Failed", "{name}");
        }
        assert!(site.host.domains().await?.is_empty());
        assert_eq!(site.host.volumes("default").await?, Vec::<String>::new());
        Ok(())
    });
}

/// A cut download goes on where it was, a wrong one is never used, and a good one heals all.
#[test]
fn a_failing_mirror_leaves_no_half_image() {
    lab::test(&[Guest::Light], async |lab| {
        let site = lab.mk_site().await?;
        let operator = site.mk_operator(lab).await?;

        lab.stage("wrong digest");
        site.mirror.set_fault("light.qcow2", Some(Fault::Corrupt));
        operator.apply(&site.mk_proxy("p")).await?;
        operator
            .condition("p", "Provisioned", "False", "sha256", SOON)
            .await?;
        assert_eq!(site.base_images().await?, Vec::<String>::new());

        lab.stage("cut off, then good");
        operator.delete("p").await?;
        operator.gone("p", SOON).await?;
        site.mirror
            .set_fault("light.qcow2", Some(Fault::CutOnceAt(9 << 20)));
        operator.apply(&site.mk_proxy("q")).await?;
        operator.ready("q", BOOT).await?;
        let resumed = site
            .mirror
            .requests()
            .iter()
            .any(|r| r.from == Some(9 << 20));
        assert!(
            resumed,
            "the second request takes up where the first was cut: {:?}",
            site.mirror.requests()
        );
        assert_eq!(site.base_images().await?.len(), 1);
        Ok(())
    });
}

/// Half a gigabyte goes to the host without ever being in memory.
#[test]
fn a_large_image_takes_little_memory() {
    const SIZE: u64 = 512 << 20;
    const LIMIT_KIB: u64 = 64 << 10;
    lab::test(&[], async |lab| {
        let site = lab.mk_site().await?;
        let file = lab.dir().join("large.raw");
        std::fs::File::create(&file)?.set_len(SIZE)?;
        let mut providers = site.providers();
        let url = site.mirror.add_file("large.raw", &file);
        providers["providers"][0]["kvm"]["images"]["large"] =
            json!({ "url": url, "format": "raw" });
        let operator = site.mk_operator_with(lab, &providers, &[]).await?;

        lab.stage("half a gigabyte");
        let proxy = site.mk_proxy("p").with("/placement/image", "large");
        operator.apply(&proxy).await?;
        let mut most = 0;
        let pid = operator.pid()?;
        until("the image is there", BOOT, async || {
            most = most.max(anonymous_kib(pid)?);
            let sent = site
                .mirror
                .requests()
                .iter()
                .map(|request| request.sent)
                .max();
            let whole = site.base_images_on_disk()?;
            Ok(if whole.is_empty() {
                Seen::not_yet(format!("{sent:?}"))
            } else {
                Seen::There(())
            })
        })
        .await?;
        println!("  the operator held at most {} MiB", most >> 10);
        assert!(most < LIMIT_KIB, "{most} KiB");
        Ok(())
    });
}

//! Hosts that refuse, hang or go away.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::time::Duration;

use egress_core::{InstanceName, Uid};
use egress_e2e::exec::output_within;
use egress_e2e::lab::{self, Guest, Lab};
use egress_e2e::mirror::Fault;
use egress_e2e::operator::binary;
use egress_e2e::site::{Site, host_entry};
use egress_e2e::sshd::TIGHT;

use crate::{BOOT, SOON};

/// Longer than the SSH keepalive takes to give up, and than a backoff that has grown a little.
const RECOVERY: Duration = Duration::from_secs(90);

/// Each way of not being let in has its own sentence, and all is well once it is put right.
#[test]
fn what_is_wrong_with_ssh_is_said_and_heals() {
    lab::test(&[Guest::Light], async |lab| {
        let mut site = lab.mk_site().await?;
        let known_hosts = site.sshd.mk_known_hosts()?;
        let good = fs::read_to_string(&known_hosts)?;
        fs::write(&known_hosts, "")?;
        let operator = site.mk_operator(lab).await?;
        let proxy = site.mk_proxy("p");
        let refused = async |n: u32, why| {
            let text = format!("#light no-proxy\n#{n}\n");
            operator.apply(&proxy.clone().user_data(&text)).await?;
            let proxy = operator.complains("p", why, SOON).await?;
            println!("  {}", egress_e2e::operator::conditions(&proxy));
            anyhow::Ok(())
        };

        lab.stage("unknown host key");
        refused(1, "SHA256:").await?;
        lab.stage("changed host key");
        let other_key = fs::read_to_string(site.sshd.other_key().with_extension("pub"))?;
        fs::write(
            &known_hosts,
            format!("{} {other_key}", site.sshd.address().ip()),
        )?;
        refused(2, "records another key").await?;

        lab.stage("wrong client key");
        fs::write(&known_hosts, &good)?;
        let client_key = site.sshd.client_key();
        let good_key = fs::read(&client_key)?;
        replace_key(&client_key, &fs::read(site.sshd.other_key())?)?;
        refused(3, "refused").await?;

        lab.stage("forwarding forbidden");
        replace_key(&client_key, &good_key)?;
        site.sshd.kill().await?;
        site.sshd
            .start(&site.host, "AllowStreamLocalForwarding no\n")
            .await?;
        refused(4, "AllowStreamLocalForwarding").await?;

        lab.stage("all well");
        site.sshd.kill().await?;
        site.sshd.start(&site.host, TIGHT).await?;
        // A changed file is read again, and wakes what failed.
        let mut providers = site.providers();
        providers["providers"][0]["kvm"]["diskSizeGb"] = 2.into();
        operator.write_providers(&providers)?;
        operator
            .condition("p", "Provisioned", "True", "", RECOVERY + BOOT)
            .await
            .map(drop)
    });
}

/// Missing, inactive and full are three different things, and none of them is for ever.
#[test]
fn what_is_wrong_with_a_pool_is_said_and_heals() {
    lab::test(&[Guest::Light], async |lab| {
        let site = lab.mk_site().await?;
        let mut providers = site.providers();
        let host = &mut providers["providers"][0]["kvm"]["hosts"][0];
        host["pool"] = "tiny".into();
        let operator = site.mk_operator_with(lab, &providers, &[]).await?;
        operator
            .apply(&site.mk_proxy("p").user_data("#light no-proxy\n"))
            .await?;

        lab.stage("missing");
        operator
            .condition("p", "Provisioned", "False", "tiny", SOON)
            .await?;
        lab.stage("full");
        let dir = site.host.mk_pool_of_size("tiny", 8).await?;
        operator
            .apply(&site.mk_proxy("p").user_data("#light no-proxy\n#2\n"))
            .await?;
        operator
            .condition("p", "Provisioned", "False", "QuotaExceeded", SOON)
            .await?;
        assert_eq!(site.host.volumes("tiny").await?, Vec::<String>::new());

        lab.stage("inactive, and large enough");
        site.host.virsh(&["pool-destroy", "tiny"]).await?;
        let mut grow = site.host.command("mount");
        let grow = grow.args(["-o", "remount,size=2g"]).arg(dir);
        egress_e2e::exec::run_within(grow, SOON).await?;
        operator
            .apply(&site.mk_proxy("p").user_data("#light no-proxy\n#3\n"))
            .await?;
        operator
            .condition("p", "Provisioned", "True", "", BOOT)
            .await?;
        assert_eq!(site.host.domains().await?.len(), 1);
        Ok(())
    });
}

/// The host goes down with half an image on it, and comes back.
#[test]
fn a_host_dies_in_the_middle_of_an_upload() {
    lab::test(&[Guest::Light], async |lab| {
        let mut site = lab.mk_site().await?;
        let operator = site.mk_operator(lab).await?;
        lab.stage("half an image");
        site.mirror
            .set_fault("light.qcow2", Some(Fault::HoldAt(12 << 20)));
        operator.apply(&site.mk_proxy("p")).await?;
        operator
            .condition("p", "Provisioned", "False", "FetchingImage", SOON)
            .await?;
        site.mirror.sent("light.qcow2", 12 << 20, SOON).await?;

        lab.stage("the host is gone");
        site.sshd.kill().await?;
        site.host.kill().await?;
        site.mirror.set_fault("light.qcow2", None);
        site.mirror.release();
        operator
            .condition("p", "ProviderReachable", "False", "", RECOVERY)
            .await?;
        assert_eq!(site.base_images_on_disk()?, Vec::<String>::new());

        lab.stage("the host is back");
        site.host.start().await?;
        site.sshd.start(&site.host, TIGHT).await?;
        operator.ready("p", RECOVERY + BOOT).await?;
        assert_eq!(site.base_images().await?.len(), 1);
        Ok(())
    });
}

/// A call that never comes back holds up neither another host nor, once the connection is cut,
/// its own.
#[test]
fn a_hung_host_does_not_hold_up_another() {
    lab::test(&[Guest::Light], async |lab| {
        let site = lab.mk_site().await?;
        let other = lab.mk_host("b", 1).await?;
        let sshd = other.mk_sshd(TIGHT).await?;
        let known = site.sshd.known_hosts_line()? + &sshd.known_hosts_line()?;
        fs::write(site.sshd.mk_known_hosts()?, known)?;
        fs::copy(
            site.sshd.client_key().with_extension("pub"),
            other.dir().join("ssh/authorized_keys"),
        )?;
        let mut providers = site.providers();
        let hosts = providers["providers"][0]["kvm"]["hosts"].as_array_mut();
        hosts
            .into_iter()
            .for_each(|hosts| hosts.push(host_entry(&other, &sshd)));
        let operator = site.mk_operator_with(lab, &providers, &[]).await?;

        lab.stage("one hangs, the other works");
        site.host.freeze()?;
        operator.apply(&site.mk_proxy("on-a").on("a")).await?;
        operator.apply(&site.mk_proxy("on-b").on("b")).await?;
        operator.ready("on-b", BOOT).await?;

        lab.stage("its connection is cut in the middle of a call");
        site.sshd.cut_sessions()?;
        operator
            .condition("on-a", "ProviderReachable", "False", "", RECOVERY)
            .await?;
        site.host.thaw()?;
        operator.ready("on-a", RECOVERY + BOOT).await?;
        assert_eq!(site.host.domains().await?.len(), 1);
        assert_eq!(other.domains().await?.len(), 1);
        Ok(())
    });
}

/// A domain with our name that we did not make is somebody's: a conflict, and untouched.
#[test]
fn a_foreign_domain_is_left_alone() {
    lab::test(&[Guest::Light], async |lab| {
        let site = lab.mk_site().await?;
        let mut providers = site.providers();
        providers["providers"][0]["kvm"]["hosts"][0]["pool"] = "later".into();
        let operator = site.mk_operator_with(lab, &providers, &[]).await?;
        lab.stage("a foreign domain takes the name");
        // No pool yet, so nothing can be made before the name is taken.
        operator
            .apply(&site.mk_proxy("p").user_data("#light no-proxy\n"))
            .await?;
        operator
            .condition("p", "Provisioned", "False", "later", SOON)
            .await?;
        let proxy = operator.proxy("p").await?.unwrap_or_default();
        let uid = Uid::new(proxy["metadata"]["uid"].as_str().unwrap_or_default());
        let name = InstanceName::for_uid(&uid);
        let image = lab.image(Guest::Light)?.path;
        site.host.mk_domain(name.as_str(), &image, 256).await?;
        let before = site
            .host
            .virsh(&["dumpxml", "--inactive", name.as_str()])
            .await?;

        lab.stage("a conflict");
        site.host.mk_pool("later").await?;
        operator
            .apply(&site.mk_proxy("p").user_data("#light no-proxy\n#2\n"))
            .await?;
        operator
            .condition("p", "Provisioned", "False", name.as_str(), RECOVERY)
            .await?;
        lab.stage("deleting the Proxy leaves it");
        operator.delete("p").await?;
        operator.gone("p", RECOVERY).await?;
        let after = site
            .host
            .virsh(&["dumpxml", "--inactive", name.as_str()])
            .await?;
        assert_eq!(before, after);
        assert_eq!(site.host.state(name.as_str()).await?, "shut off");
        Ok(())
    });
}

/// Another key in the same file, as a rotation does it.
fn replace_key(path: &std::path::Path, key: &[u8]) -> anyhow::Result<()> {
    let new = path.with_extension("new");
    fs::write(&new, key)?;
    fs::set_permissions(&new, fs::Permissions::from_mode(0o600))?;
    Ok(fs::rename(new, path)?)
}

/// The doctor finds nothing on a good host, and each fault where there is one.
#[test]
fn the_doctor_names_each_fault() {
    lab::test(&[], async |lab| {
        let mut site = lab.mk_site().await?;
        let (good, report) = doctor(lab, &site.providers()).await?;
        println!("{report}");
        assert!(good, "{report}");

        let found = async |site: &Site, what: &str| {
            let (good, report) = doctor(lab, &site.providers()).await?;
            assert!(
                !good && report.contains("FAULT") && report.contains(what),
                "{what}: {report}"
            );
            anyhow::Ok(())
        };
        lab.stage("no network, no pool, no daemon, no sshd");
        site.host.virsh(&["net-destroy", "default"]).await?;
        found(&site, "network default is not active").await?;
        site.host.virsh(&["pool-destroy", "default"]).await?;
        site.host.virsh(&["pool-undefine", "default"]).await?;
        found(&site, "pool-define-as default").await?;
        site.host.stop().await?;
        found(&site, "start libvirtd").await?;
        site.sshd.kill().await?;
        found(&site, "check address and port").await
    });
}

/// Whether `doctor` is content, and what it printed.
async fn doctor(lab: &Lab, providers: &serde_json::Value) -> anyhow::Result<(bool, String)> {
    let file = lab.dir().join("doctor.yaml");
    fs::write(&file, providers.to_string())?;
    let mut command = tokio::process::Command::new(binary()?);
    command.arg("doctor").arg("--providers-config").arg(file);
    command.arg("--state-dir").arg(lab.mk_dir("doctor")?);
    let output = output_within(&mut command, RECOVERY).await?;
    let text = [output.stdout, output.stderr].concat();
    Ok((
        output.status.success(),
        String::from_utf8_lossy(&text).into_owned(),
    ))
}

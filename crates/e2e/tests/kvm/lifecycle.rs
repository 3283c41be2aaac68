//! A Proxy's life on a host that does what it should.

use std::time::Duration;

use egress_e2e::guest::light;
use egress_e2e::lab::{self, Guest};
use egress_e2e::operator::Stopwatch;
use egress_e2e::process::{Seen, until};

use crate::{BOOT, SOON};

/// Debian with cloud-init takes half a minute alone and two on a busy machine.
const FULL_BOOT: Duration = Duration::from_secs(300);

/// Squid comes from this alone: the image's own configuration admits nobody.
const SQUID: &str = "#cloud-config
write_files:
- path: /etc/squid/squid.conf
  content: |
    http_port 3128
    acl lab src 10.77.0.0/16
    http_access allow lab
    cache deny all
    pid_filename none
    max_filedescriptors 1024
    shutdown_lifetime 1 seconds
runcmd:
- systemctl restart squid
";

/// The main path, once, with a real distribution: from apply to a leased connection and back.
#[test]
fn a_debian_guest_becomes_a_leased_squid() {
    lab::test(&[Guest::Full], async |lab| {
        let site = lab.mk_site().await?;
        let operator = site.mk_operator(lab).await?;
        lab.stage("image, domain, boot, cloud-init, probe");
        operator
            .apply(&site.mk_proxy("squid").of("full").user_data(SQUID))
            .await?;
        let address = operator.ready("squid", FULL_BOOT).await?;
        assert!(
            site.target.hits() > 0,
            "Ready without a probe through the proxy"
        );

        lab.stage("leased and used");
        let lease = operator.lease("example.com").await?;
        assert_eq!(lease["proxy"]["id"], "default/squid");
        assert_eq!(lease["proxy"]["url"], format!("http://{address}"));
        site.crawl_through(address).await?;

        lab.stage("deleted");
        operator.delete("squid").await?;
        operator.gone("squid", SOON).await?;
        site.check_clean().await?;
        assert_eq!(site.base_images().await?.len(), 1);
        assert_eq!(site.mirror.gets("full.qcow2"), 1);
        Ok(())
    });
}

/// Two Proxies share one download; a changed cloud-init gives another guest with another disk.
#[test]
fn two_proxies_share_one_image_and_one_is_replaced() {
    lab::test(&[Guest::Light], async |lab| {
        let site = lab.mk_site().await?;
        let operator = site.mk_operator(lab).await?;
        lab.stage("two at once, nothing cached");
        let one = site.mk_proxy("one").user_data("#light version=1\n");
        operator.apply(&one).await?;
        operator.apply(&site.mk_proxy("two")).await?;
        let first = operator.ready("one", BOOT).await?;
        let second = operator.ready("two", BOOT).await?;
        assert_ne!(first.ip(), second.ip());
        assert_eq!(site.mirror.gets("light.qcow2"), 1, "one download for both");
        assert_eq!(site.base_images().await?.len(), 1);
        assert_eq!(get(first.ip(), "user-data").await?, "#light version=1\n");

        lab.stage("changed cloud-init replaces");
        let two = operator.provider_id("two").await?;
        operator.apply(&one.user_data("#light version=2\n")).await?;
        operator
            .condition("one", "Ready", "False", "", SOON)
            .await?;
        let again = operator.ready("one", BOOT).await?;
        assert_eq!(get(again.ip(), "user-data").await?, "#light version=2\n");
        assert_eq!(site.host.domains().await?.len(), 2);
        assert_eq!(
            operator.provider_id("two").await?,
            two,
            "the other one is left alone"
        );
        assert_eq!(site.mirror.gets("light.qcow2"), 1);

        lab.stage("attributes do not replace");
        let before = site.host.domains().await?;
        operator
            .apply(
                &site
                    .mk_proxy("two")
                    .with("/attributes", serde_json::json!({"geo": "de"})),
            )
            .await?;
        let found = operator
            .discovery("GET", "/v1/proxies?attr.geo=de", None)
            .await?
            .success()?;
        assert_eq!(found["count"], 1, "{found}");
        assert_eq!(site.host.domains().await?, before);

        lab.stage("deleted");
        for name in ["one", "two"] {
            operator.delete(name).await?;
        }
        for name in ["one", "two"] {
            operator.gone(name, SOON).await?;
        }
        site.check_clean().await
    });
}

/// With a cached image a domain starts at once, and a dead guest is noticed without a poll.
#[test]
fn a_destroyed_guest_is_replaced_and_libvirtd_may_restart() {
    lab::test(&[Guest::Light], async |lab| {
        let mut site = lab.mk_site().await?;
        let mut operator = site.mk_operator(lab).await?;
        lab.stage("the image is fetched");
        operator
            .apply(&site.mk_proxy("first").user_data("#light no-proxy\n"))
            .await?;
        operator
            .condition("first", "Provisioned", "True", "", BOOT)
            .await?;
        operator.delete("first").await?;
        operator.gone("first", SOON).await?;

        lab.stage("from apply to the domain's start");
        // With the interval that people get, not the quick one of the other cases.
        let proxy = site.mk_proxy("p").with("/healthCheck/intervalSeconds", 10);
        let watch = Stopwatch::start();
        operator.apply(&proxy).await?;
        let domain = site.host.running_domain(SOON).await?;
        watch.print("from apply to the domain's start");
        watch.assert_within(
            "starting a domain with a cached image",
            Duration::from_secs(5),
        );

        lab.stage("from an open port to Ready");
        let ip = site.host.guest_address(&domain, BOOT).await?;
        until("the guest's port", BOOT, async || {
            let dialled = tokio::net::TcpStream::connect((ip, 3128)).await;
            Ok(dialled.map_or_else(Seen::not_yet, |_| Seen::There(())))
        })
        .await?;
        let watch = Stopwatch::start();
        let address = operator.ready("p", BOOT).await?;
        watch.print("from an open port to Ready");
        watch.assert_within("becoming Ready", Duration::from_secs(5));

        lab.stage("libvirtd restarts under it");
        site.host.restart().await?;
        site.crawl_through(address).await?;
        assert_eq!(site.host.state(&domain).await?, "running");

        lab.stage("the guest is destroyed by hand");
        operator
            .condition("p", "ProviderReachable", "True", "", SOON)
            .await?;
        site.host.virsh(&["destroy", &domain]).await?;
        // The reconnected events say so; a poll would take longer than this.
        operator.condition("p", "Ready", "False", "", SOON).await?;
        operator.ready("p", BOOT).await?;
        assert_eq!(site.host.domains().await?.len(), 1);

        lab.stage("the domain vanishes, then the Proxy");
        let domain = site.host.running_domain(SOON).await?;
        // While nobody looks: a running operator replaces it faster than two commands are typed.
        operator.stop().await?;
        site.host.virsh(&["destroy", &domain]).await?;
        site.host.virsh(&["undefine", "--nvram", &domain]).await?;
        operator.start().await?;
        operator.delete("p").await?;
        operator.gone("p", SOON).await?;
        site.check_clean().await
    });
}

/// What a guest found in its seed.
async fn get(ip: std::net::IpAddr, file: &str) -> anyhow::Result<String> {
    let guest = egress_e2e::http::Endpoint::Tcp((ip, 80).into());
    Ok(guest
        .request("GET", &format!("/{file}"), None)
        .await?
        .text())
}

/// A guest that somebody else runs: probed through it, leased, and never touched.
#[test]
fn an_external_guest_is_probed_and_leased() {
    lab::test(&[Guest::Light], async |lab| {
        let site = lab.mk_site().await?;
        lab.stage("somebody's guest boots");
        let image = lab.image(Guest::Light)?.path;
        site.host
            .mk_domain("theirs", &image, light::MEMORY_MIB)
            .await?;
        site.host.virsh(&["start", "theirs"]).await?;
        let address = site.host.guest_address("theirs", BOOT).await?;
        let operator = site
            .mk_operator_with(lab, &serde_json::json!({ "providers": [] }), &[])
            .await?;

        lab.stage("probed and leased");
        operator
            .apply(&site.mk_proxy("theirs").external(&address.to_string()))
            .await?;
        operator
            .condition("theirs", "Ready", "True", "", BOOT)
            .await?;
        let lease = operator.lease("example.com").await?;
        assert_eq!(lease["proxy"]["url"], format!("http://{address}:3128"));
        site.crawl_through((address, 3128).into()).await?;

        lab.stage("it goes away");
        site.host.virsh(&["destroy", "theirs"]).await?;
        operator
            .condition("theirs", "Healthy", "False", "", SOON)
            .await?;
        operator.delete("theirs").await?;
        operator.gone("theirs", SOON).await?;
        assert_eq!(site.host.domains().await?, ["theirs"]);
        Ok(())
    });
}

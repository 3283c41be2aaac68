//! A stock kubectl against the control plane, over TLS with the admin kubeconfig.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests"
)]

mod support {
    pub mod kubectl;
}

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use kube::Client;
use kube::api::{Api, Patch, PatchParams};
use serde_json::{Value, json};
use support::kubectl::Cluster;

const PROXY: &str = "apiVersion: crawl.example.com/v1alpha1
kind: Proxy
metadata:
  name: one
  labels: {geo: de}
spec:
  mode: External
  endpoint: {host: 192.0.2.1}
";

/// Starts a cluster, or ends the test where there is no kubectl.
macro_rules! cluster {
    () => {
        match Cluster::start().await {
            Some(cluster) => cluster,
            None => return,
        }
    };
}

async fn set_status(cluster: &Cluster, name: &str, status: Value) {
    let api: Api<egress_api::Proxy> =
        Api::namespaced(Client::new(cluster.plane.router(), "default"), "default");
    let patch = json!({"status": status});
    api.patch_status(name, &PatchParams::default(), &Patch::Merge(&patch))
        .await
        .unwrap();
}

fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn apply_and_get_in_every_form() {
    let c = cluster!();
    let file = c.write("proxy.yaml", PROXY);
    assert_eq!(
        c.ok(&["apply", "-f", &file]).await,
        "proxy.crawl.example.com/one created\n"
    );
    assert_eq!(
        c.ok(&["apply", "-f", &file]).await,
        "proxy.crawl.example.com/one unchanged\n"
    );
    let changed = c.write("changed.yaml", &PROXY.replace("geo: de", "geo: fr"));
    assert_eq!(
        c.ok(&["apply", "-f", &changed]).await,
        "proxy.crawl.example.com/one configured\n"
    );
    set_status(
        &c,
        "one",
        json!({"phase": "Ready", "ip": "192.0.2.1", "latencyMillis": 12, "providerID": "x/1",
               "conditions": [{"type": "Healthy", "status": "True", "reason": "ProbeSucceeded", "message": "",
                               "lastTransitionTime": "2026-01-01T00:00:00Z"}]}),
    )
    .await;
    let table = c.ok(&["get", "px"]).await;
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(
        words(lines[0]),
        ["NAME", "MODE", "PROVIDER", "PHASE", "IP", "HEALTHY", "AGE"]
    );
    assert_eq!(
        words(lines[1])[..5],
        ["one", "External", "Ready", "192.0.2.1", "True"]
    );
    let wide = c.ok(&["get", "proxies", "-o", "wide"]).await;
    assert!(
        wide.contains("PROVIDERID") && wide.contains("LATENCY") && wide.contains("x/1"),
        "{wide}"
    );
    let yaml = c.ok(&["get", "proxy", "one", "-o", "yaml"]).await;
    assert!(
        yaml.contains("intervalSeconds: 10") && yaml.contains("geo: fr"),
        "{yaml}"
    );
    let json: Value =
        serde_json::from_str(&c.ok(&["get", "px", "one", "-o", "json"]).await).unwrap();
    assert_eq!(json["spec"]["port"], 3128);
    assert_eq!(
        c.ok(&["get", "px", "-o", "name"]).await,
        "proxy.crawl.example.com/one\n"
    );
    assert_eq!(
        c.ok(&["get", "crawl", "-o", "name"]).await,
        "proxy.crawl.example.com/one\n"
    );
    assert_eq!(
        c.ok(&[
            "get",
            "px",
            "-l",
            "geo=fr",
            "-o",
            "jsonpath={.items[*].status.ip}"
        ])
        .await,
        "192.0.2.1"
    );
    let all = c.ok(&["get", "px", "-A"]).await;
    assert_eq!(words(all.lines().next().unwrap())[0], "NAMESPACE");
    assert!(
        c.fails(&["get", "px", "two"])
            .await
            .contains("proxies.crawl.example.com \"two\" not found")
    );
    assert_eq!(
        c.run(&["get", "px", "-n", "nowhere"]).await.stderr,
        "No resources found in nowhere namespace.\n"
    );
    c.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_objects_are_refused_with_the_rule() {
    let c = cluster!();
    for (spec, message) in [
        (
            "{mode: External, endpoint: {host: x}, provider: kvm}",
            "spec: Invalid value: an External proxy must not have spec.provider: the operator creates nothing for it",
        ),
        (
            "{mode: Managed, provider: kvm, cloudInit: {inline: a, secretRef: {name: b}}}",
            "spec.cloudInit needs exactly one of inline and secretRef",
        ),
        (
            "{mode: External, endpoint: {host: x}, port: 0}",
            "spec.port in body should be greater than or equal to 1",
        ),
        (
            "{mode: External, endpoint: {host: x}, prot: 1}",
            "unknown field \"spec.prot\"",
        ),
        (
            "{mode: Foo}",
            "spec.mode: Unsupported value: \"Foo\": supported values: \"Managed\", \"External\"",
        ),
    ] {
        let file = c.write(
            "wrong.yaml",
            &format!("apiVersion: crawl.example.com/v1alpha1\nkind: Proxy\nmetadata: {{name: wrong}}\nspec: {spec}\n"),
        );
        let complaint = c.fails(&["apply", "-f", &file]).await;
        assert!(complaint.contains(message), "{spec}: {complaint}");
    }
    let file = c.write("proxy.yaml", PROXY);
    c.ok(&["apply", "-f", &file]).await;
    let managed = PROXY.replace(
        "mode: External\n  endpoint: {host: 192.0.2.1}",
        "mode: Managed\n  provider: kvm",
    );
    let file = c.write("managed.yaml", &managed);
    let complaint = c.fails(&["apply", "-f", &file]).await;
    assert!(
        complaint.contains("spec.mode: Invalid value: \"Managed\": spec.mode cannot be changed: delete the Proxy and create another"),
        "{complaint}"
    );
    c.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn get_watch_prints_each_change() {
    let c = cluster!();
    let file = c.write("proxy.yaml", PROXY);
    c.ok(&["apply", "-f", &file]).await;
    let mut watch = c
        .command(&["get", "px", "-w"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let stdout = watch.stdout.take().unwrap();
    let (lines, mut read) = tokio::sync::mpsc::unbounded_channel();
    let reader = std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            if lines.send(line).is_err() {
                break;
            }
        }
    });
    let mut next = async || {
        tokio::time::timeout(std::time::Duration::from_secs(20), read.recv())
            .await
            .expect("a line within 20 s")
            .expect("kubectl goes on")
    };
    assert!(next().await.starts_with("NAME"));
    assert!(next().await.starts_with("one"));
    set_status(&c, "one", json!({"phase": "Ready"})).await;
    assert!(next().await.contains("Ready"));
    set_status(&c, "one", json!({"phase": "Unhealthy"})).await;
    assert!(next().await.contains("Unhealthy"));
    watch.kill().unwrap();
    watch.wait().unwrap();
    reader.join().unwrap();
    c.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn edit_patch_label_annotate_replace_and_diff() {
    let c = cluster!();
    let file = c.write("proxy.yaml", PROXY);
    c.ok(&["apply", "-f", &file]).await;
    let editor = c.write(
        "editor.sh",
        "#!/bin/sh\nsed -i 's/maxLeases: 5/maxLeases: 8/' \"$1\"\n",
    );
    let mut edit = c.command(&["edit", "px", "one"]);
    edit.env("KUBE_EDITOR", format!("sh {editor}"));
    let said = c.finish(edit).await;
    assert!(said.ok && said.stdout.contains("edited"), "{said:?}");
    let leases = async || {
        c.ok(&["get", "px", "one", "-o", "jsonpath={.spec.maxLeases}"])
            .await
    };
    assert_eq!(leases().await, "8");
    c.ok(&[
        "patch",
        "px",
        "one",
        "--type=merge",
        "-p",
        r#"{"spec":{"maxLeases":9}}"#,
    ])
    .await;
    assert_eq!(leases().await, "9");
    let json = r#"[{"op":"replace","path":"/spec/maxLeases","value":10}]"#;
    c.ok(&["patch", "px", "one", "--type=json", "-p", json])
        .await;
    assert_eq!(leases().await, "10");
    let refused = c
        .fails(&["patch", "px", "one", "-p", r#"{"spec":{"maxLeases":9}}"#])
        .await;
    assert!(
        refused.contains("application/merge-patch+json"),
        "{refused}"
    );
    c.ok(&["label", "px", "one", "tier=front"]).await;
    c.ok(&["annotate", "px", "one", "note=hello"]).await;
    let refused = c.fails(&["label", "px", "one", "tier=back"]).await;
    assert!(refused.contains("--overwrite"), "{refused}");
    c.ok(&["label", "px", "one", "tier-"]).await;
    c.ok(&[
        "patch",
        "px",
        "one",
        "--subresource=status",
        "--type=merge",
        "-p",
        r#"{"status":{"phase":"Ready"}}"#,
    ])
    .await;
    let file = c.write("two.yaml", &PROXY.replace("geo: de", "geo: it"));
    let diff = c.run(&["diff", "-f", &file]).await;
    assert!(!diff.ok && diff.stdout.contains("+    geo: it"), "{diff:?}");
    let file = c.write("replace.yaml", &PROXY.replace("geo: de", "geo: se"));
    c.ok(&["replace", "-f", &file]).await;
    assert_eq!(
        c.ok(&["get", "px", "one", "-o", "jsonpath={.metadata.labels.geo}"])
            .await,
        "se"
    );
    assert_eq!(leases().await, "5");
    let before = c.plane.revision();
    c.ok(&["apply", "-f", &file, "--dry-run=server"]).await;
    assert_eq!(c.plane.revision(), before);
    c.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn delete_waits_for_finalizers() {
    let c = cluster!();
    let file = c.write(
        "proxy.yaml",
        &PROXY.replace(
            "  name: one",
            "  name: one\n  finalizers: [crawl.example.com/cleanup]",
        ),
    );
    c.ok(&["apply", "-f", &file]).await;
    let mut delete = c
        .command(&["delete", "px", "one"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let api: Api<egress_api::Proxy> =
        Api::namespaced(Client::new(c.plane.router(), "default"), "default");
    tokio::time::timeout(std::time::Duration::from_secs(20), async {
        while api
            .get("one")
            .await
            .unwrap()
            .metadata
            .deletion_timestamp
            .is_none()
        {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    })
    .await
    .unwrap();
    assert!(delete.try_wait().unwrap().is_none(), "kubectl waits");
    c.ok(&[
        "patch",
        "px",
        "one",
        "--type=merge",
        "-p",
        r#"{"metadata":{"finalizers":null}}"#,
    ])
    .await;
    let output = tokio::task::spawn_blocking(move || delete.wait_with_output().unwrap())
        .await
        .unwrap();
    assert!(output.status.success());
    assert!(c.fails(&["get", "px", "one"]).await.contains("not found"));
    assert_eq!(
        c.run(&["delete", "px", "one", "--ignore-not-found"])
            .await
            .stdout,
        ""
    );
    c.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wait_follows_a_condition() {
    let c = cluster!();
    let file = c.write("proxy.yaml", PROXY);
    c.ok(&["apply", "-f", &file]).await;
    let wait = c.command(&["wait", "--for=condition=Ready", "px/one", "--timeout=30s"]);
    let (said, ()) = tokio::join!(c.finish(wait), async {
        set_status(
            &c,
            "one",
            json!({"conditions": [{"type": "Ready", "status": "True", "reason": "Probed", "message": "",
                                   "lastTransitionTime": "2026-01-01T00:00:00Z"}]}),
        )
        .await;
    });
    assert!(said.ok && said.stdout.contains("condition met"), "{said:?}");
    let late = c
        .run(&["wait", "--for=delete", "px/one", "--timeout=2s"])
        .await;
    assert!(!late.ok && late.stderr.contains("timed out"), "{late:?}");
    c.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn describe_shows_the_events() {
    use kube::runtime::events::{Event, EventType, Recorder, Reporter};
    let c = cluster!();
    let file = c.write("proxy.yaml", PROXY);
    c.ok(&["apply", "-f", &file]).await;
    let client = Client::new(c.plane.router(), "default");
    let api: Api<egress_api::Proxy> = Api::namespaced(client.clone(), "default");
    let proxy = api.get("one").await.unwrap();
    let reporter = Reporter {
        controller: "egress-proxies-operator".to_owned(),
        instance: None,
    };
    let event = Event {
        type_: EventType::Warning,
        reason: "QuotaExceeded".to_owned(),
        note: Some("no room in kvm-home".to_owned()),
        action: "Creating".to_owned(),
        secondary: None,
    };
    Recorder::new(client, reporter)
        .publish(&event, &kube::Resource::object_ref(&proxy, &()))
        .await
        .unwrap();
    let described = c.ok(&["describe", "px", "one"]).await;
    assert!(
        described.contains("QuotaExceeded") && described.contains("no room in kvm-home"),
        "{described}"
    );
    let events = c.ok(&["get", "events"]).await;
    assert_eq!(
        words(events.lines().next().unwrap()),
        ["LAST", "SEEN", "TYPE", "REASON", "OBJECT", "MESSAGE"]
    );
    assert!(
        events.contains("proxy/one") && events.contains("Warning"),
        "{events}"
    );
    let listed = c.ok(&["events", "--for", "proxy/one"]).await;
    assert!(listed.contains("no room in kvm-home"), "{listed}");
    c.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn explain_reads_the_descriptions() {
    let c = cluster!();
    let text = c.ok(&["explain", "px.spec.healthCheck"]).await;
    assert!(
        text.contains("intervalSeconds") && text.contains("Seconds from one probe to the next."),
        "{text}"
    );
    let text = c.ok(&["explain", "proxy"]).await;
    assert!(
        text.contains("KIND:       Proxy") && text.contains("metadata"),
        "{text}"
    );
    let text = c.ok(&["explain", "secret.data"]).await;
    assert!(text.contains("base64"), "{text}");
    let text = c.ok(&["explain", "px", "--recursive"]).await;
    assert!(
        text.contains("expectedStatus") && text.contains("ownerReferences"),
        "{text}"
    );
    c.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn secrets_config_maps_and_namespaces() {
    let c = cluster!();
    c.ok(&[
        "create",
        "secret",
        "generic",
        "s",
        "--from-literal=user-data=#cloud-config",
    ])
    .await;
    assert_eq!(
        c.ok(&["get", "secret", "s", "-o", "jsonpath={.data.user-data}"])
            .await,
        "I2Nsb3VkLWNvbmZpZw=="
    );
    let table = c.ok(&["get", "secrets"]).await;
    assert_eq!(
        words(table.lines().nth(1).unwrap())[..3],
        ["s", "Opaque", "1"]
    );
    c.ok(&["label", "secret", "s", "crawl.example.com/cloud-init=true"])
        .await;
    c.ok(&[
        "patch",
        "secret",
        "s",
        "-p",
        r#"{"stringData":{"more":"x"}}"#,
    ])
    .await;
    assert!(
        c.ok(&["describe", "secret", "s"])
            .await
            .contains("user-data:  13 bytes")
    );
    c.ok(&["create", "configmap", "m", "--from-literal=a=b"])
        .await;
    let file = c.write(
        "m.yaml",
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: m2}\ndata: {a: b}\n",
    );
    c.ok(&["apply", "-f", &file]).await;
    let file = c.write(
        "m.yaml",
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: m2}\ndata: {c: d}\n",
    );
    c.ok(&["apply", "-f", &file]).await;
    assert_eq!(
        c.ok(&["get", "cm", "m2", "-o", "jsonpath={.data}"]).await,
        r#"{"c":"d"}"#
    );
    c.ok(&["create", "namespace", "work"]).await;
    let table = c.ok(&["get", "ns"]).await;
    assert!(
        table.contains("default   Active") && table.contains("work      Active"),
        "{table}"
    );
    let proxy = c.write("proxy.yaml", PROXY);
    c.ok(&["apply", "-n", "work", "-f", &proxy]).await;
    c.ok(&["delete", "namespace", "work"]).await;
    assert!(
        c.fails(&["apply", "-n", "work", "-f", &proxy])
            .await
            .contains("namespaces \"work\" not found")
    );
    c.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn server_side_apply_keeps_who_owns_what() {
    let c = cluster!();
    let file = c.write("proxy.yaml", PROXY);
    let said = c.ok(&["apply", "--server-side", "-f", &file]).await;
    assert_eq!(said, "proxy.crawl.example.com/one serverside-applied\n");
    let fields = c
        .ok(&["get", "px", "one", "--show-managed-fields", "-o", "json"])
        .await;
    let object: Value = serde_json::from_str(&fields).unwrap();
    let entry = &object["metadata"]["managedFields"][0];
    assert_eq!(
        (&entry["manager"], &entry["operation"]),
        (&json!("kubectl"), &json!("Apply"))
    );
    assert_eq!(
        entry["fieldsV1"]["f:spec"]["f:endpoint"]["f:host"],
        json!({})
    );
    assert_eq!(
        entry["fieldsV1"]["f:spec"].get("f:port"),
        None,
        "a default is nobody's"
    );

    c.ok(&[
        "patch",
        "px",
        "one",
        "--type=merge",
        "-p",
        r#"{"spec":{"endpoint":{"host":"192.0.2.2"}}}"#,
    ])
    .await;
    let conflict = c.fails(&["apply", "--server-side", "-f", &file]).await;
    assert!(
        conflict.contains(
            "conflict with \"kubectl-patch\" using crawl.example.com/v1alpha1: .spec.endpoint.host"
        ),
        "{conflict}"
    );
    c.ok(&["apply", "--server-side", "--force-conflicts", "-f", &file])
        .await;
    assert_eq!(
        c.ok(&["get", "px", "one", "-o", "jsonpath={.spec.endpoint.host}"])
            .await,
        "192.0.2.1"
    );

    // What is no longer applied goes, when nobody else owns it.
    let file = c.write("less.yaml", &PROXY.replace("  labels: {geo: de}\n", ""));
    c.ok(&["apply", "--server-side", "-f", &file]).await;
    assert_eq!(
        c.ok(&["get", "px", "one", "-o", "jsonpath={.metadata.labels}"])
            .await,
        ""
    );
    let before = c.plane.revision();
    c.ok(&["apply", "--server-side", "-f", &file]).await;
    assert_eq!(c.plane.revision(), before, "the same again writes nothing");
    c.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_objects_are_listed_in_pages() {
    let c = cluster!();
    let mut text = String::new();
    let api: Api<egress_api::Proxy> =
        Api::namespaced(Client::new(c.plane.router(), "default"), "default");
    for i in 0..1000 {
        text = format!("p{i:04}");
        let proxy: egress_api::Proxy = serde_json::from_value(json!({
            "apiVersion": "crawl.example.com/v1alpha1", "kind": "Proxy", "metadata": {"name": text},
            "spec": {"mode": "External", "endpoint": {"host": "192.0.2.1"}}
        }))
        .unwrap();
        api.create(&Default::default(), &proxy).await.unwrap();
    }
    let names = c.ok(&["get", "px", "-o", "name"]).await;
    assert_eq!(names.lines().count(), 1000);
    assert!(names.trim_end().ends_with(&text));
    let said = c.run(&["get", "px", "-v=6"]).await;
    assert_eq!(said.stdout.lines().count(), 1001);
    let pages = said.stderr.matches("/proxies?").count();
    assert!(pages >= 2, "{}", said.stderr);
    c.ok(&["delete", "px", "--all", "--wait=false"]).await;
    assert!(
        c.run(&["get", "px"])
            .await
            .stderr
            .contains("No resources found")
    );
    c.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn discovery_and_strangers() {
    let c = cluster!();
    let resources = c.ok(&["api-resources"]).await;
    let row = resources
        .lines()
        .find(|l| l.starts_with("proxies"))
        .unwrap();
    assert_eq!(
        words(row),
        [
            "proxies",
            "px",
            "crawl.example.com/v1alpha1",
            "true",
            "Proxy"
        ]
    );
    assert!(c.ok(&["api-versions"]).await.contains("events.k8s.io/v1"));
    assert!(
        c.ok(&["version"])
            .await
            .contains("Server Version: v1.36.0+egress")
    );
    assert_eq!(c.ok(&["get", "--raw", "/readyz"]).await, "ok");
    // Without a certificate nobody comes in.
    let kubeconfig = std::fs::read_to_string(c.path("kubeconfig")).unwrap();
    let stranger: String = kubeconfig
        .lines()
        .filter(|l| !l.contains("client-"))
        .map(|l| l.replace("  user:", "  user: {token: wrong}") + "\n")
        .collect::<String>()
        .replace("    user: {token: wrong} admin", "    user: admin");
    let path = c.write("stranger", &stranger);
    let mut command = c.command(&["get", "px"]);
    command.env("KUBECONFIG", path);
    let said = c.finish(command).await;
    assert!(
        !said.ok && said.stderr.contains("Unauthorized"),
        "{said:?}\n{stranger}"
    );
    c.stop().await;
}

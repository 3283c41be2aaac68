//! The verbs of kubectl, as people use them.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use anyhow::Context as _;
use serde_json::{Value, json};

use super::{Session, external, with};
use crate::compare::plain_text;

const ONE: &str = "apiVersion: crawl.example.com/v1alpha1
kind: Proxy
metadata:
  name: one
  labels: {geo: de}
spec:
  mode: External
  endpoint:
    host: 192.0.2.1
  attributes:
    geo: de
";

pub async fn ask(s: &mut Session) -> anyhow::Result<()> {
    apply(s).await?;
    get(s).await?;
    change(s).await?;
    describe(s).await?;
    wait(s).await?;
    watch(s).await?;
    server_side(s).await?;
    wrong(s).await?;
    others(s).await?;
    delete(s).await
}

async fn apply(s: &mut Session) -> anyhow::Result<()> {
    s.kubectl(
        "apply/dry-run",
        &["apply", "--dry-run=server", "-f", "-"],
        Some(ONE),
    )
    .await?;
    diff(s, "diff/new", &["diff", "-f", "-"], ONE).await?;
    s.kubectl("apply/create", &["apply", "-f", "-"], Some(ONE))
        .await?;
    s.kubectl("apply/unchanged", &["apply", "-f", "-"], Some(ONE))
        .await?;
    let more = ONE
        .replace("geo: de\n", "geo: fr\n")
        .replace("spec:", "spec:\n  port: 8080");
    diff(s, "diff/changed", &["diff", "-f", "-"], &more).await?;
    s.kubectl("apply/configured", &["apply", "-f", "-"], Some(&more))
        .await?;
    s.kubectl("apply/field-removed", &["apply", "-f", "-"], Some(ONE))
        .await?;
    s.kubectl(
        "apply/result",
        &["get", "px", "one", "-o", "json", "--show-managed-fields"],
        None,
    )
    .await?;
    s.kubectl(
        "apply/view-last-applied",
        &["apply", "view-last-applied", "px/one", "-o", "json"],
        None,
    )
    .await?;
    let two = format!(
        "{ONE}---\n{}",
        ONE.replace("name: one", "name: two")
            .replace("192.0.2.1", "192.0.2.2")
    );
    s.kubectl("apply/two", &["apply", "-f", "-"], Some(&two))
        .await?;
    s.kubectl("create/exists", &["create", "-f", "-"], Some(ONE))
        .await?;
    s.kubectl("replace", &["replace", "-f", "-"], Some(&more))
        .await?;
    s.kubectl(
        "replace/missing",
        &["replace", "-f", "-"],
        Some(&ONE.replace("name: one", "name: none")),
    )
    .await?;
    Ok(())
}

/// The lines of a diff that name temporary files are left out.
async fn diff(s: &mut Session, what: &str, args: &[&str], input: &str) -> anyhow::Result<()> {
    let namespace = format!("--namespace={}", s.namespace);
    let mut all = vec![namespace.as_str()];
    all.extend(args);
    let output = s.target.kubectl.run(&all, Some(input)).await?;
    let lines: Vec<&str> = output
        .stdout
        .lines()
        .filter(|line| {
            !["diff ", "---", "+++"]
                .iter()
                .any(|head| line.starts_with(head))
        })
        .collect();
    let stdout = plain_text(&lines.join("\n"));
    s.note(
        what,
        &json!({"code": output.code, "stdout": stdout, "stderr": plain_text(&output.stderr)}),
    );
    Ok(())
}

async fn get(s: &mut Session) -> anyhow::Result<()> {
    let status = json!({"status": {
        "phase": "Ready", "ip": "192.0.2.1", "latencyMillis": 42, "providerID": "x/y",
        "conditions": [{"type": "Healthy", "status": "True", "reason": "ProbeSucceeded", "message": "fine", "lastTransitionTime": "2001-02-03T04:05:06Z"}],
    }});
    let status = status.to_string();
    s.kubectl(
        "get/status-set",
        &[
            "patch",
            "px",
            "one",
            "--subresource=status",
            "--type=merge",
            "-p",
            &status,
        ],
        None,
    )
    .await?;
    for (what, args) in [
        ("table", &["get", "px"][..]),
        ("plural", &["get", "proxies"]),
        ("full", &["get", "proxies.v1alpha1.crawl.example.com"]),
        ("wide", &["get", "px", "-o", "wide"]),
        ("yaml", &["get", "px", "one", "-o", "yaml"]),
        ("json", &["get", "px", "one", "-o", "json"]),
        ("list-json", &["get", "px", "-o", "json"]),
        ("name", &["get", "px", "-o", "name"]),
        (
            "jsonpath",
            &["get", "px", "-o", "jsonpath={.items[*].spec.endpoint.host}"],
        ),
        (
            "columns",
            &[
                "get",
                "px",
                "-o",
                "custom-columns=N:.metadata.name,H:.spec.endpoint.host,P:.status.phase",
            ],
        ),
        ("labels", &["get", "px", "--show-labels"]),
        ("label-column", &["get", "px", "-L", "geo"]),
        ("no-headers", &["get", "px", "--no-headers"]),
        ("selector", &["get", "px", "-l", "geo=de"]),
        ("selector-none", &["get", "px", "-l", "geo=nowhere"]),
        (
            "field-selector",
            &["get", "px", "--field-selector=metadata.name=two"],
        ),
        (
            "field-selector-bad",
            &["get", "px", "--field-selector=spec.port=1"],
        ),
        ("sorted", &["get", "px", "--sort-by=.spec.endpoint.host"]),
        ("chunks", &["get", "px", "--chunk-size=1"]),
        ("category", &["get", "crawl"]),
        ("missing", &["get", "px", "nobody"]),
        (
            "missing-ignored",
            &["get", "px", "nobody", "--ignore-not-found"],
        ),
        ("two-kinds", &["get", "px,secrets"]),
        ("all", &["get", "all"]),
        (
            "subresource",
            &["get", "px", "one", "--subresource=status", "-o", "json"],
        ),
        ("raw", &["get", "--raw", "/apis/crawl.example.com"]),
        ("namespace", &["get", "ns", "suite-kubectl"]),
        ("events-none", &["get", "events"]),
        ("verbs", &["get", "px", "one", "two"]),
    ] {
        s.kubectl(&format!("get/{what}"), args, None).await?;
    }
    Ok(())
}

async fn change(s: &mut Session) -> anyhow::Result<()> {
    s.kubectl("label", &["label", "px", "one", "tier=1"], None)
        .await?;
    s.kubectl("label/again", &["label", "px", "one", "tier=2"], None)
        .await?;
    s.kubectl(
        "label/overwrite",
        &["label", "px", "one", "tier=2", "--overwrite"],
        None,
    )
    .await?;
    s.kubectl("label/remove", &["label", "px", "one", "tier-"], None)
        .await?;
    s.kubectl(
        "annotate",
        &[
            "annotate",
            "px",
            "one",
            "crawl.example.com/skip-cleanup=true",
        ],
        None,
    )
    .await?;
    s.kubectl(
        "patch/merge",
        &[
            "patch",
            "px",
            "one",
            "--type=merge",
            "-p",
            r#"{"spec":{"maxLeases":7}}"#,
        ],
        None,
    )
    .await?;
    s.kubectl(
        "patch/nothing",
        &[
            "patch",
            "px",
            "one",
            "--type=merge",
            "-p",
            r#"{"spec":{"maxLeases":7}}"#,
        ],
        None,
    )
    .await?;
    s.kubectl(
        "patch/json",
        &[
            "patch",
            "px",
            "one",
            "--type=json",
            "-p",
            r#"[{"op":"replace","path":"/spec/maxLeases","value":8}]"#,
        ],
        None,
    )
    .await?;
    s.kubectl(
        "patch/strategic",
        &["patch", "px", "one", "-p", r#"{"spec":{"maxLeases":9}}"#],
        None,
    )
    .await?;
    s.kubectl(
        "patch/invalid",
        &[
            "patch",
            "px",
            "one",
            "--type=merge",
            "-p",
            r#"{"spec":{"port":0}}"#,
        ],
        None,
    )
    .await?;
    s.kubectl(
        "patch/mode",
        &[
            "patch",
            "px",
            "one",
            "--type=merge",
            "-p",
            r#"{"spec":{"mode":"Managed"}}"#,
        ],
        None,
    )
    .await?;
    // edit: an editor that changes a number, then one that makes it wrong.
    let editor = s.target.kubectl.home.join("editor");
    let edits = |script: &str| -> anyhow::Result<()> {
        fs::write(&editor, format!("#!/bin/sh\n{script}\n")).context("cannot write the editor")?;
        fs::set_permissions(&editor, fs::Permissions::from_mode(0o700))?;
        Ok(())
    };
    edits("sed -i 's/maxLeases: .*/maxLeases: 11/' \"$1\"")?;
    s.kubectl("edit", &["edit", "px", "one"], None).await?;
    edits("true")?;
    s.kubectl("edit/nothing", &["edit", "px", "one"], None)
        .await?;
    s.kubectl(
        "edit/result",
        &[
            "get",
            "px",
            "one",
            "-o",
            "jsonpath={.spec.maxLeases} {.metadata.generation}",
        ],
        None,
    )
    .await?;
    Ok(())
}

async fn describe(s: &mut Session) -> anyhow::Result<()> {
    let subject = s.target.client.get(&s.proxy_path("one")).await?.body;
    let namespace = s.namespace.clone();
    let event = json!({
        "apiVersion": "v1", "kind": "Event", "metadata": {"name": "one.1"},
        "involvedObject": {"apiVersion": "crawl.example.com/v1alpha1", "kind": "Proxy", "name": "one",
            "namespace": namespace, "uid": subject["metadata"]["uid"]},
        "reason": "Created", "message": "made it", "type": "Normal", "source": {"component": "suite"},
        "count": 3, "firstTimestamp": "2001-02-03T04:05:06Z", "lastTimestamp": "2001-02-03T04:05:06Z",
    });
    s.target.client.post(&s.core("events"), &event).await?;
    s.kubectl("describe", &["describe", "px", "one"], None)
        .await?;
    s.kubectl(
        "describe/no-events",
        &["describe", "px", "two", "--show-events=false"],
        None,
    )
    .await?;
    s.kubectl("describe/missing", &["describe", "px", "nobody"], None)
        .await?;
    s.kubectl("describe/prefix", &["describe", "px", "tw"], None)
        .await?;
    s.kubectl("get/events", &["get", "events"], None).await?;
    s.kubectl("get/events-wide", &["get", "events", "-o", "wide"], None)
        .await?;
    s.kubectl(
        "events",
        &["events", "--for=proxy.crawl.example.com/one"],
        None,
    )
    .await?;
    Ok(())
}

async fn wait(s: &mut Session) -> anyhow::Result<()> {
    s.kubectl(
        "wait/there",
        &["wait", "--for=condition=Healthy", "px/one", "--timeout=20s"],
        None,
    )
    .await?;
    s.kubectl(
        "wait/jsonpath",
        &[
            "wait",
            "--for=jsonpath={.status.phase}=Ready",
            "px/one",
            "--timeout=20s",
        ],
        None,
    )
    .await?;
    s.kubectl(
        "wait/never",
        &["wait", "--for=condition=Ready", "px/one", "--timeout=1s"],
        None,
    )
    .await?;
    s.kubectl(
        "wait/missing",
        &["wait", "--for=condition=Ready", "px/nobody", "--timeout=1s"],
        None,
    )
    .await?;
    s.kubectl(
        "wait/delete-missing",
        &["wait", "--for=delete", "px/nobody", "--timeout=5s"],
        None,
    )
    .await?;
    // The condition comes while kubectl waits.
    let client = s.target.client.clone();
    let path = format!("{}/status", s.proxy_path("two"));
    let later = tokio::spawn(async move {
        tokio::time::sleep(std::time::Duration::from_millis(1500)).await;
        let body = json!({"status": {"conditions": [{"type": "Ready", "status": "True", "reason": "R", "message": "", "lastTransitionTime": "2001-02-03T04:05:06Z"}]}});
        let request = crate::client::Request::new(reqwest::Method::PATCH, path)
            .body("application/merge-patch+json", body.to_string());
        client.send(request).await
    });
    s.kubectl(
        "wait/comes",
        &["wait", "--for=condition=Ready", "px/two", "--timeout=30s"],
        None,
    )
    .await?;
    later.await??;
    Ok(())
}

async fn watch(s: &mut Session) -> anyhow::Result<()> {
    let namespace = s.namespace.clone();
    for (what, output) in [("watch/table", "wide"), ("watch/name", "name")] {
        let mut following = s
            .target
            .kubectl
            .follow(&["-n", &namespace, "get", "px", "-w", "-o", output])?;
        let mut lines = Vec::new();
        let before = if output == "wide" { 3 } else { 2 };
        for _ in 0..before {
            lines.push(following.line().await?);
        }
        s.given(&external("watched")).await?;
        lines.push(following.line().await?);
        let request = crate::client::Request::new(
            reqwest::Method::PATCH,
            format!("{}/status", s.proxy_path("watched")),
        )
        .body(
            "application/merge-patch+json",
            r#"{"status":{"phase":"Ready"}}"#,
        );
        s.target.client.send(request).await?;
        lines.push(following.line().await?);
        s.target.client.delete(&s.proxy_path("watched")).await?;
        lines.push(following.line().await?);
        s.note(what, &plain_text(&lines.join("\n")));
    }
    let mut following = s.target.kubectl.follow(&[
        "-n",
        &namespace,
        "get",
        "px",
        "--watch-only",
        "--output-watch-events",
        "-o",
        "name",
    ])?;
    // Whether the watch has begun cannot be seen from outside; changes go on until one is seen.
    let first = async {
        let mut round = 0;
        loop {
            round += 1;
            let made = s
                .target
                .client
                .post(&s.proxies(), &external("again"))
                .await?;
            anyhow::ensure!(made.status == 201, "{made:?}");
            if let Ok(line) =
                tokio::time::timeout(std::time::Duration::from_secs(1), following.line()).await
            {
                s.target.client.delete(&s.proxy_path("again")).await?;
                return line;
            }
            s.target.client.delete(&s.proxy_path("again")).await?;
            anyhow::ensure!(round < 60, "no event was seen");
        }
    };
    let first = first.await?;
    s.note("watch/events", &plain_text(&first));
    Ok(())
}

async fn server_side(s: &mut Session) -> anyhow::Result<()> {
    let three = ONE.replace("name: one", "name: three");
    s.kubectl(
        "server-side/create",
        &["apply", "--server-side", "-f", "-"],
        Some(&three),
    )
    .await?;
    s.kubectl(
        "server-side/again",
        &["apply", "--server-side", "-f", "-"],
        Some(&three),
    )
    .await?;
    let moved = three.replace("192.0.2.1", "192.0.2.3");
    s.kubectl(
        "server-side/conflict",
        &["apply", "--server-side", "--field-manager=other", "-f", "-"],
        Some(&moved),
    )
    .await?;
    s.kubectl(
        "server-side/force",
        &[
            "apply",
            "--server-side",
            "--force-conflicts",
            "--field-manager=other",
            "-f",
            "-",
        ],
        Some(&moved),
    )
    .await?;
    s.kubectl(
        "server-side/dry-run",
        &["apply", "--server-side", "--dry-run=server", "-f", "-"],
        Some(&three),
    )
    .await?;
    // From client-side to server-side: kubectl moves what it had applied before.
    s.kubectl(
        "server-side/takes-over",
        &["apply", "--server-side", "-f", "-"],
        Some(ONE),
    )
    .await?;
    s.kubectl(
        "server-side/result",
        &["get", "px", "three", "-o", "json", "--show-managed-fields"],
        None,
    )
    .await?;
    let new = ONE.replace("name: one", "name: new");
    diff(
        s,
        "server-side/diff",
        &["diff", "--server-side", "-f", "-"],
        &new,
    )
    .await?;
    Ok(())
}

async fn wrong(s: &mut Session) -> anyhow::Result<()> {
    let spec = |change: Value| with(external("bad"), &json!({"spec": change})).to_string();
    for (what, body) in [
        ("external-provider", spec(json!({"provider": "local"}))),
        (
            "cloud-init-both",
            spec(
                json!({"mode": "Managed", "provider": "p", "endpoint": null, "cloudInit": {"inline": "x", "secretRef": {"name": "s"}}}),
            ),
        ),
        ("port-0", spec(json!({"port": 0}))),
        ("unknown-field", spec(json!({"colour": "red"}))),
        ("wrong-type", spec(json!({"port": "x"}))),
        (
            "several",
            spec(json!({"port": 0, "maxLeases": -1, "provider": "x"})),
        ),
        (
            "bad-name",
            with(external("bad"), &json!({"metadata": {"name": "Bad_Name"}})).to_string(),
        ),
        (
            "no-kind",
            with(external("bad"), &json!({"kind": null})).to_string(),
        ),
        (
            "other-kind",
            with(external("bad"), &json!({"kind": "Gateway"})).to_string(),
        ),
    ] {
        s.kubectl(&format!("wrong/{what}"), &["apply", "-f", "-"], Some(&body))
            .await?;
    }
    let unknown = spec(json!({"colour": "red"}));
    s.kubectl(
        "wrong/validate-warn",
        &["apply", "--validate=warn", "-f", "-"],
        Some(&unknown),
    )
    .await?;
    s.kubectl(
        "wrong/validate-off",
        &["apply", "--validate=false", "-f", "-"],
        Some(&unknown),
    )
    .await?;
    s.kubectl(
        "wrong/create",
        &["create", "-f", "-"],
        Some(&spec(json!({"maxLeases": -1}))),
    )
    .await?;
    Ok(())
}

async fn others(s: &mut Session) -> anyhow::Result<()> {
    for (what, args) in [
        (
            "secret",
            &[
                "create",
                "secret",
                "generic",
                "s",
                "--from-literal=user-data=#cloud-config",
            ][..],
        ),
        (
            "secret-label",
            &["label", "secret", "s", "crawl.example.com/cloud-init=true"],
        ),
        ("secret-get", &["get", "secret", "s", "-o", "json"]),
        ("secrets", &["get", "secrets"]),
        ("secret-describe", &["describe", "secret", "s"]),
        (
            "secret-patch",
            &[
                "patch",
                "secret",
                "s",
                "-p",
                r#"{"stringData":{"more":"x"}}"#,
            ],
        ),
        ("map", &["create", "configmap", "m", "--from-literal=a=b"]),
        ("map-describe", &["describe", "configmap", "m"]),
        ("namespace", &["create", "namespace", "kubectl-made"]),
        (
            "namespaces",
            &["get", "namespace", "kubectl-made", "-o", "json"],
        ),
        (
            "namespace-describe",
            &["describe", "namespace", "kubectl-made"],
        ),
        ("scale", &["scale", "px/one", "--replicas=2"]),
        ("pods", &["get", "pods"]),
        ("can-i", &["auth", "can-i", "create", "px"]),
        ("whoami", &["auth", "whoami"]),
        ("secret-delete", &["delete", "secret", "s"]),
    ] {
        s.kubectl(&format!("other/{what}"), args, None).await?;
    }
    let secret = "apiVersion: v1\nkind: Secret\nmetadata: {name: applied}\nstringData: {k: v}\n";
    s.kubectl("other/secret-apply", &["apply", "-f", "-"], Some(secret))
        .await?;
    s.kubectl(
        "other/secret-apply-again",
        &["apply", "-f", "-"],
        Some(&secret.replace("k: v", "k: w")),
    )
    .await?;
    s.kubectl(
        "other/secret-applied",
        &["get", "secret", "applied", "-o", "jsonpath={.data.k}"],
        None,
    )
    .await?;
    Ok(())
}

async fn delete(s: &mut Session) -> anyhow::Result<()> {
    s.kubectl("delete", &["delete", "px", "two"], None).await?;
    s.kubectl("delete/missing", &["delete", "px", "two"], None)
        .await?;
    s.kubectl(
        "delete/missing-ignored",
        &["delete", "px", "two", "--ignore-not-found"],
        None,
    )
    .await?;
    s.kubectl(
        "delete/dry-run",
        &["delete", "px", "one", "--dry-run=server"],
        None,
    )
    .await?;
    s.merge(
        "delete/finalizer",
        &s.proxy_path("one"),
        &json!({"metadata": {"finalizers": ["crawl.example.com/cleanup"]}}),
    )
    .await?;
    s.kubectl(
        "delete/no-wait",
        &["delete", "px", "one", "--wait=false"],
        None,
    )
    .await?;
    s.kubectl(
        "delete/held",
        &["delete", "px", "one", "--timeout=1s"],
        None,
    )
    .await?;
    s.kubectl(
        "delete/terminating",
        &["get", "px", "one", "-o", "jsonpath={.metadata.finalizers}"],
        None,
    )
    .await?;
    let client = s.target.client.clone();
    let path = s.proxy_path("one");
    let later = tokio::spawn(async move {
        tokio::time::sleep(std::time::Duration::from_millis(1500)).await;
        let request = crate::client::Request::new(reqwest::Method::PATCH, path).body(
            "application/merge-patch+json",
            r#"{"metadata":{"finalizers":null}}"#,
        );
        client.send(request).await
    });
    s.kubectl(
        "delete/released",
        &["delete", "px", "one", "--timeout=30s"],
        None,
    )
    .await?;
    later.await??;
    s.given(&with(
        external("l1"),
        &json!({"metadata": {"labels": {"d": "1"}}}),
    ))
    .await?;
    s.kubectl("delete/selector", &["delete", "px", "-l", "d=1"], None)
        .await?;
    s.kubectl(
        "delete/file",
        &["delete", "-f", "-"],
        Some(&ONE.replace("name: one", "name: three")),
    )
    .await?;
    s.kubectl("delete/all", &["delete", "px", "--all"], None)
        .await?;
    s.kubectl("delete/all-none", &["delete", "px", "--all"], None)
        .await?;
    s.kubectl("get/none-left", &["get", "px"], None).await?;
    Ok(())
}

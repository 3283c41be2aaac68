//! Acknowledged writes survive SIGKILL; certificates and the lock of a state directory.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests"
)]

mod support;

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

use egress_control_plane::{Config, ControlPlane, Storage};
use kube::ResourceExt;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use serde_json::json;
use support::{mk_external, open, proxies};

const STATE: &str = "EGRESS_TEST_CHILD_STATE";

/// Not a test by itself: the child process that the next one kills. Tells each acknowledged write.
#[tokio::test(flavor = "multi_thread")]
async fn child_writes_until_it_is_killed() {
    let Some(state) = std::env::var_os(STATE) else {
        return;
    };
    let (_plane, client) = open(Storage::Directory(state.into())).await;
    let api = proxies(&client);
    let mut writers = tokio::task::JoinSet::new();
    for w in 0..4 {
        let api = api.clone();
        writers.spawn(async move {
            for i in 0.. {
                let name = format!("w{w}-{i}");
                api.create(&PostParams::default(), &mk_external(&name))
                    .await
                    .unwrap();
                println!("wrote {name} 5");
                let patch = json!({"spec": {"maxLeases": i + 10}});
                api.patch(&name, &PatchParams::default(), &Patch::Merge(&patch))
                    .await
                    .unwrap();
                println!("wrote {name} {}", i + 10);
            }
        });
    }
    writers.join_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acknowledged_writes_survive_sigkill() {
    let directory = tempfile::tempdir().unwrap();
    let mut acknowledged = std::collections::BTreeMap::new();
    for round in 0..3 {
        // Its own state each time, so that names do not clash; the last lines may be cut.
        let state = directory.path().join(format!("state-{round}"));
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_writes_until_it_is_killed", "--nocapture"])
            .env(STATE, &state)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        acknowledged.clear();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut wrote = |line: String| {
            // The test harness writes on the same line.
            let Some(at) = line.find("wrote ") else {
                return;
            };
            let words: Vec<&str> = line[at..].split_whitespace().collect();
            if let [_, name, leases] = words[..]
                && let Ok(leases) = leases.parse::<i32>()
            {
                acknowledged.insert(name.to_owned(), leases);
            }
        };
        for line in lines.by_ref().take(60 + round * 37) {
            wrote(line.unwrap());
        }
        child.kill().unwrap();
        child.wait().unwrap();
        // What it had told before it died.
        for line in lines.map_while(Result::ok) {
            wrote(line);
        }
        assert!(acknowledged.len() > 20);
        let (plane, client) = open(Storage::Directory(state)).await;
        let stored = proxies(&client).list(&ListParams::default()).await.unwrap();
        let leases: std::collections::BTreeMap<String, i32> = stored
            .iter()
            .map(|p| (p.name_any(), p.spec.max_leases))
            .collect();
        for (name, wanted) in &acknowledged {
            let found = leases.get(name).copied().unwrap_or(-1);
            assert!(
                found >= *wanted,
                "{name}: acknowledged {wanted}, stored {found}"
            );
        }
        // And it goes on.
        proxies(&client)
            .create(&PostParams::default(), &mk_external("after"))
            .await
            .unwrap();
        plane.shutdown().await;
    }
}

#[tokio::test]
async fn what_was_written_is_there_after_a_restart_with_the_same_certificates() {
    let directory = tempfile::tempdir().unwrap();
    let storage = Storage::Directory(directory.path().join("state"));
    let (plane, client) = open(storage.clone()).await;
    let made = proxies(&client)
        .create(&PostParams::default(), &mk_external("a"))
        .await
        .unwrap();
    let (revision, ca) = (
        plane.revision(),
        plane.pki().unwrap().ca_certificate().to_owned(),
    );
    let kubeconfig = directory.path().join("kubeconfig");
    let address = "127.0.0.1:1".parse().unwrap();
    plane.write_admin_kubeconfig(&kubeconfig, address).unwrap();
    let first = std::fs::read_to_string(&kubeconfig).unwrap();
    plane.shutdown().await;
    drop((plane, client));

    let (plane, client) = open(storage).await;
    assert_eq!(plane.revision(), revision);
    assert_eq!(proxies(&client).get("a").await.unwrap(), made);
    assert_eq!(plane.pki().unwrap().ca_certificate(), ca);
    plane.write_admin_kubeconfig(&kubeconfig, address).unwrap();
    assert_eq!(std::fs::read_to_string(&kubeconfig).unwrap(), first);
    for file in walk(&directory.path().join("state"))
        .into_iter()
        .chain([kubeconfig])
    {
        let mode = std::fs::metadata(&file).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o600, "{}", file.display());
    }
    plane.shutdown().await;
}

fn walk(directory: &std::path::Path) -> Vec<std::path::PathBuf> {
    std::fs::read_dir(directory)
        .unwrap()
        .flat_map(|entry| {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path)
            } else {
                vec![path]
            }
        })
        .collect()
}

#[tokio::test]
async fn a_second_control_plane_on_the_same_directory_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let storage = Storage::Directory(directory.path().to_owned());
    let (plane, _client) = open(storage.clone()).await;
    let second = ControlPlane::open(Config::new(storage, Vec::new())).await;
    let Err(error) = second else {
        panic!("opened twice")
    };
    assert!(
        error
            .to_string()
            .contains("another process is using this state directory"),
        "{error}"
    );
    plane.shutdown().await;
}

#[tokio::test]
async fn a_unix_socket_serves_without_certificates() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let directory = tempfile::tempdir().unwrap();
    let (plane, _client) = open(Storage::Memory).await;
    let path = directory.path().join("api.sock");
    let listener = tokio::net::UnixListener::bind(&path).unwrap();
    let cancel = tokio_util::sync::CancellationToken::new();
    let server = tokio::spawn({
        let (plane, cancel) = (plane.clone(), cancel.clone());
        async move { plane.serve_unix(listener, cancel).await }
    });
    let mut stream = tokio::net::UnixStream::connect(&path).await.unwrap();
    stream
        .write_all(b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        .await
        .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(
        answer.starts_with("HTTP/1.1 200 OK") && answer.contains("gitVersion"),
        "{answer}"
    );
    cancel.cancel();
    server.await.unwrap().unwrap();
}

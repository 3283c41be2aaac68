//! What a user types wrongly, and the sentence that comes back.

use std::net::TcpListener;

use anyhow::{Context as _, Result};

use crate::harness::operator;

#[track_caller]
fn refused(answer: &(i32, String, String), parts: &[&str]) {
    let (code, _, errors) = answer;
    assert_ne!(*code, 0, "it was accepted");
    for part in parts {
        assert!(errors.contains(part), "{part:?} is not in: {errors}");
    }
    assert!(!errors.contains("panicked"), "{errors}");
}

#[tokio::test]
async fn wrong_flags_get_their_sentence() -> Result<()> {
    let cases: &[(&[&str], &[&str])] = &[
        (
            &["--discovery-adr", ":1"],
            &["--discovery-adr", "--discovery-addr"],
        ),
        (
            &["--control-plane", "etcd"],
            &["etcd", "cluster", "embedded"],
        ),
        (&["--sweep-interval", "soon"], &["--sweep-interval", "90s"]),
        (&["--sweep-interval", "0s"], &["more than zero"]),
        (
            &["--health-workers", "0"],
            &["--health-workers", "1..=4096"],
        ),
        (&["--discovery-tls-cert", "x.pem"], &["--discovery-tls-key"]),
        (
            &["--log", "loud=very", "--control-plane", "embedded"],
            &["log filter", "info, debug, trace"],
        ),
        (
            &["--kubeconfig", "/nonexistent/config"],
            &["/nonexistent/config does not exist"],
        ),
        (
            &["--control-plane", "embedded", "--kubeconfig", "/etc/passwd"],
            &["--kubeconfig names a cluster", "leave one of them out"],
        ),
        (
            &["client", "--kubeconfig", "/nonexistent/config", "get"],
            &["cannot read the kubeconfig"],
        ),
        (
            &["check-config", "/nonexistent/providers.yaml"],
            &["cannot read the providers file"],
        ),
        (
            &["forward-proxy", "--listen", "here"],
            &["--listen", "here"],
        ),
    ];
    for (arguments, parts) in cases {
        let answer = operator(arguments).await?;
        println!("{arguments:?}: {}", answer.2.trim());
        refused(&answer, parts);
    }
    Ok(())
}

#[tokio::test]
async fn all_faults_of_the_flags_at_once() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let state = dir.path().join("state");
    let answer = operator(&[
        "--control-plane",
        "embedded",
        "--state-dir",
        state.to_str().context("utf-8")?,
        "--api-addr",
        "localhost:6443",
        "--metrics-addr",
        "nine",
        "--discovery-addr",
        "8090.example",
        "--health-ca",
        "/nonexistent/ca.pem",
        "--installation-id",
        "a b",
    ])
    .await?;
    refused(
        &answer,
        &[
            "--api-addr",
            "--metrics-addr",
            "--discovery-addr",
            "/nonexistent/ca.pem",
            "--installation-id",
        ],
    );
    assert!(
        !state.exists(),
        "nothing was made before the flags were checked"
    );
    Ok(())
}

#[tokio::test]
async fn all_faults_of_a_providers_file_at_once() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("providers.yaml");
    let path = file.to_str().context("utf-8")?;
    std::fs::write(
        &file,
        "providers:
  - {name: a, type: local, local: {program: nginx, listenAdresses: [127.0.0.1]}}
  - {name: a, type: local}
  - {name: c, type: locl}
",
    )?;
    let answer = operator(&["check-config", path]).await?;
    refused(
        &answer,
        &[
            "providers[0] \"a\": local.program",
            "providers[0] \"a\": local.listenAdresses: unknown field",
            "providers[1] \"a\": duplicate name",
            "providers[2] \"c\": unknown type \"locl\"",
        ],
    );
    std::fs::write(&file, "providers:\n  - {name: a, type: local}\n")?;
    let (code, output, _) = operator(&["check-config", path]).await?;
    assert_eq!(code, 0);
    assert!(output.contains("1 provider(s), no faults"), "{output}");
    Ok(())
}

#[tokio::test]
async fn an_address_in_use_is_said_and_nothing_is_left() -> Result<()> {
    let taken = TcpListener::bind("127.0.0.1:0")?;
    let address = taken.local_addr()?.to_string();
    let dir = tempfile::tempdir()?;
    let state = dir.path().to_str().context("utf-8")?;
    let answer = operator(&["dev", "--discovery-addr", &address, "--state-dir", state]).await?;
    refused(&answer, &[&address, "in use", "--discovery-addr"]);
    assert!(
        !answer.1.contains("KUBECONFIG"),
        "it said that it was ready"
    );
    assert!(crate::harness::processes_of(dir.path()).is_empty());
    Ok(())
}

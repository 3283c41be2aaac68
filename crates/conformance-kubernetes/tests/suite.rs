//! One black-box suite over both API servers.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use egress_kube_suite::compare::{self, Difference, Record};
use egress_kube_suite::explained::Sorted;
use egress_kube_suite::{ApiServer, Embedded, Target, enabled, explained, suite};
use serde_json::{Value, json};

/// The CRD as it is shipped.
const CRD: &str = "deploy/kubernetes/base/crd.yaml";

async fn with_crd(api: &ApiServer) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(CRD);
    let kubectl = &api.admin().kubectl;
    kubectl
        .ok(&["apply", "-f", file.to_str().unwrap()])
        .await
        .unwrap();
    kubectl
        .ok(&[
            "wait",
            "--for=condition=Established",
            "crd/proxies.crawl.example.com",
        ])
        .await
        .unwrap();
    // The CRD's OpenAPI document is published a little later.
    let document = "/openapi/v3/apis/crawl.example.com/v1alpha1";
    for _ in 0..600 {
        if api.admin().client.get(document).await.unwrap().status == 200 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("no {document} after a minute");
}

/// Areas named in `EGRESS_SUITE_AREAS` (comma-separated), else all.
fn areas() -> Vec<(&'static str, suite::Area)> {
    let wanted = std::env::var("EGRESS_SUITE_AREAS").unwrap_or_default();
    let wanted: Vec<&str> = wanted.split(',').filter(|name| !name.is_empty()).collect();
    suite::AREAS
        .iter()
        .filter(|(name, _)| wanted.is_empty() || wanted.contains(name))
        .copied()
        .collect()
}

async fn ask(target: &Target) -> Vec<Record> {
    suite::run(target, &areas()).await
}

fn failures(records: &[Record]) -> Vec<&Value> {
    records
        .iter()
        .filter(|r| r.call.ends_with("/area"))
        .map(|r| &r.answer)
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_servers_answer_the_same() {
    if !enabled("both_servers_answer_the_same") {
        return;
    }
    let api = ApiServer::start().await.unwrap();
    with_crd(&api).await;
    let embedded = Embedded::start().await.unwrap();
    // The real server's history of a kind begins when its CRD was made; so that ours has a past that
    // is forgotten too, something is written and compacted away.
    let past = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "past"}});
    embedded
        .admin()
        .client
        .post("/api/v1/namespaces", &past)
        .await
        .unwrap();
    embedded
        .admin()
        .client
        .delete("/api/v1/namespaces/past")
        .await
        .unwrap();
    let plane = embedded.control_plane();
    plane.compact(plane.revision()).await.unwrap();
    let (real, ours) = futures::join!(ask(api.admin()), ask(embedded.admin()));
    dump("EGRESS_SUITE_REAL", &real);
    dump("EGRESS_SUITE_OURS", &ours);
    assert_eq!(
        failures(&real),
        Vec::<&Value>::new(),
        "the real server failed the suite itself"
    );

    let mut fields = 0;
    let mut differing = BTreeSet::new();
    let mut differences = Vec::new();
    let answers: BTreeMap<&str, &Value> = ours
        .iter()
        .map(|record| (record.call.as_str(), &record.answer))
        .collect();
    for record in &real {
        let found = match answers.get(record.call.as_str()) {
            Some(ours) => compare::compare(&record.call, &record.answer, ours, &mut fields),
            None => vec![Difference {
                call: record.call.clone(),
                field: "(the whole call)".to_owned(),
                real: Some(json!("answered")),
                ours: None,
            }],
        };
        if !found.is_empty() {
            differing.insert(record.call.clone());
        }
        differences.extend(found);
    }
    let reasons = explained::load().unwrap();
    let Sorted {
        explained,
        others,
        idle,
        idle_calls,
    } = explained::sort(&differences, &reasons);
    for difference in &others {
        println!(
            "unexplained: {} {}\n    real: {}\n    ours: {}",
            difference.call,
            difference.field,
            shown(difference.real.as_ref()),
            shown(difference.ours.as_ref())
        );
    }
    let unexplained: BTreeSet<&str> = others.iter().map(|d| d.call.as_str()).collect();
    let open: BTreeSet<&str> = explained
        .iter()
        .filter(|(_, r)| r.open)
        .map(|(d, _)| d.call.as_str())
        .collect();
    println!(
        "stage suite: {} calls ({fields} fields) compared with kube-apiserver {}: {} equal, {} \
         different and explained (of these {} to be put right), {} different and unexplained",
        real.len(),
        api.version(),
        real.len() - differing.len(),
        differing.len() - unexplained.len(),
        open.len(),
        unexplained.len(),
    );
    assert_eq!(
        failures(&ours),
        Vec::<&Value>::new(),
        "the embedded server failed the suite"
    );
    assert!(
        others.is_empty(),
        "{} differences are not explained: see above",
        others.len()
    );
    if areas().len() == suite::AREAS.len() {
        let (open, idle): (Vec<_>, Vec<_>) = idle.into_iter().partition(|reason| reason.open);
        for reason in open {
            println!(
                "stage suite: put right, take it out of differences.yaml: {}",
                reason.what
            );
        }
        for (reason, call) in idle_calls {
            println!(
                "stage suite: equal now, take it out of differences.yaml: {call} ({})",
                reason.what
            );
        }
        let idle: Vec<&str> = idle.iter().map(|reason| reason.what.as_str()).collect();
        assert!(
            idle.is_empty(),
            "these reasons explain nothing any more: {idle:?}"
        );
    }
}

fn shown(value: Option<&Value>) -> String {
    match value {
        None => "(not there)".to_owned(),
        Some(value) => value.to_string().chars().take(600).collect(),
    }
}

/// For people who look into a difference: all answers of one server as a JSON file.
fn dump(variable: &str, records: &[Record]) {
    if let Some(path) = std::env::var_os(variable) {
        let all: Vec<Value> = records
            .iter()
            .map(|r| json!({"call": r.call, "answer": r.answer}))
            .collect();
        std::fs::write(path, serde_json::to_string_pretty(&all).unwrap()).unwrap();
    }
}

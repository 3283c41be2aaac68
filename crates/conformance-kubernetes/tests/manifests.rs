//! Every manifest that is shipped, really applied to a real API server; and what the shipped RBAC
//! lets the operator do, and what not.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::path::{Path, PathBuf};

use egress_kube_suite::client::{Client, Request};
use egress_kube_suite::{ApiServer, Target, enabled, programs};
use reqwest::Method;
use serde_json::{Value, json};

const NAMESPACE: &str = "egress-system";
const ACCOUNT: &str = "egress-proxies-operator";

fn deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/kubernetes")
}

/// The manifests that users apply as a whole.
const FLAVOURS: [&str; 3] = ["base", "overlays/kvm", "overlays/namespaced"];

/// Applies a kustomization as users do. The CRD must be known before Proxies are applied, but
/// nothing in a flavour is one, so that one call is enough.
async fn apply(target: &Target, flavour: &str) -> String {
    let dir = deploy().join(flavour);
    target
        .kubectl
        .ok(&["apply", "-k", dir.to_str().unwrap()])
        .await
        .unwrap()
}

async fn established(target: &Target) {
    let crd = "crd/proxies.crawl.example.com";
    target
        .kubectl
        .ok(&["wait", "--for=condition=Established", crd, "--timeout=60s"])
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_real_api_server_takes_the_crd() {
    if !enabled("a_real_api_server_takes_the_crd") {
        return;
    }
    let api = ApiServer::start().await.unwrap();
    let crd = deploy().join("base/crd.yaml");
    let kubectl = &api.admin().kubectl;
    kubectl
        .ok(&["create", "--validate=strict", "-f", crd.to_str().unwrap()])
        .await
        .unwrap();
    established(api.admin()).await;
    let crd = kubectl
        .json(&["get", "crd", "proxies.crawl.example.com"])
        .await
        .unwrap();
    let conditions = crd["status"]["conditions"].as_array().unwrap();
    let state = |kind: &str| {
        conditions
            .iter()
            .find(|c| c["type"] == kind)
            .map(|c| c["status"].as_str().unwrap())
    };
    assert_eq!(state("NamesAccepted"), Some("True"), "{conditions:?}");
    assert_eq!(state("Established"), Some("True"), "{conditions:?}");
    assert_eq!(state("NonStructuralSchema"), None, "{conditions:?}");

    // The checked-in file is what the types say.
    let written: Value =
        serde_saphyr::from_str(&std::fs::read_to_string(deploy().join("base/crd.yaml")).unwrap())
            .unwrap();
    let wanted = serde_json::to_value(egress_api::crd()).unwrap();
    assert_eq!(
        written["spec"]["versions"][0]["schema"]
            .to_string()
            .replace(".0,", ","),
        wanted["spec"]["versions"][0]["schema"]
            .to_string()
            .replace(".0,", ","),
        "run cargo xtask generate"
    );

    // Each CEL rule refuses with its own sentence.
    for (spec, told) in [
        (
            json!({"mode": "Managed"}),
            "a Managed proxy needs spec.provider: the name of a configured provider",
        ),
        (
            json!({"mode": "Managed", "provider": "p", "endpoint": {"host": "a"}}),
            "a Managed proxy must not have spec.endpoint: its address comes from the provider",
        ),
        (
            json!({"mode": "External"}),
            "an External proxy needs spec.endpoint.host: the address of the proxy",
        ),
        (
            json!({"mode": "External", "endpoint": {"host": "a"}, "provider": "p"}),
            "an External proxy must not have spec.provider: the operator creates nothing for it",
        ),
        (
            json!({"mode": "External", "endpoint": {"host": "a"}, "placement": {}}),
            "an External proxy must not have spec.placement: the operator creates nothing for it",
        ),
        (
            json!({"mode": "External", "endpoint": {"host": "a"}, "cloudInit": {"inline": ""}}),
            "an External proxy must not have spec.cloudInit: the operator creates nothing for it",
        ),
        (
            json!({"mode": "Managed", "provider": "p", "cloudInit": {}}),
            "spec.cloudInit needs exactly one of inline and secretRef",
        ),
        (
            json!({"mode": "External", "endpoint": {"host": "a"}, "healthCheck": {"timeoutSeconds": 11}}),
            "spec.healthCheck.timeoutSeconds must not be more than intervalSeconds",
        ),
        (
            json!({"mode": "External", "endpoint": {"host": "a"}, "healthCheck": {"url": "ftp://a/"}}),
            "spec.healthCheck.url must be an absolute http or https URL",
        ),
    ] {
        let proxy = json!({
            "apiVersion": "crawl.example.com/v1alpha1", "kind": "Proxy",
            "metadata": {"name": "wrong"}, "spec": spec,
        });
        let path = "/apis/crawl.example.com/v1alpha1/namespaces/default/proxies";
        let answer = api.admin().client.post(path, &proxy).await.unwrap();
        assert_eq!(answer.status, 422, "{spec} was taken: {answer:?}");
        assert!(
            answer.body["message"].as_str().unwrap().contains(told),
            "{spec}: {}",
            answer.body
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_flavour_and_sample_applies() {
    if !enabled("every_flavour_and_sample_applies") {
        return;
    }
    let api = ApiServer::start().await.unwrap();
    let admin = api.admin();
    for flavour in FLAVOURS {
        let told = apply(admin, flavour).await;
        assert!(!told.contains("Warning"), "{flavour}: {told}");
        restricted_pod(admin, NAMESPACE, ACCOUNT).await;
        // A second time changes nothing.
        let again = apply(admin, flavour).await;
        let changed: Vec<&str> = again
            .lines()
            .filter(|line| !line.ends_with("unchanged"))
            .collect();
        assert!(
            changed.is_empty(),
            "{flavour} is not the same twice: {changed:?}"
        );
    }
    established(admin).await;
    admin
        .kubectl
        .ok(&["create", "namespace", "samples"])
        .await
        .unwrap();
    let mut samples = 0;
    for entry in std::fs::read_dir(deploy().join("samples")).unwrap() {
        let file = entry.unwrap().path();
        let output = admin
            .kubectl
            .run(
                &[
                    "-n",
                    "samples",
                    "apply",
                    "--validate=strict",
                    "-f",
                    file.to_str().unwrap(),
                ],
                None,
            )
            .await
            .unwrap();
        assert_eq!(
            (output.code, output.stderr.as_str()),
            (0, ""),
            "{}",
            file.display()
        );
        samples += 1;
    }
    println!(
        "stage {} flavours and {samples} samples applied",
        FLAVOURS.len()
    );
}

/// The Pod that the Deployment asks for is one that a `restricted` namespace takes (no controller
/// makes it here, so it is made by hand).
async fn restricted_pod(admin: &Target, namespace: &str, deployment: &str) {
    let flavour = deployment;
    let path = format!("/apis/apps/v1/namespaces/{namespace}/deployments/{deployment}");
    let deployment = admin.client.get(&path).await.unwrap().body;
    let template = &deployment["spec"]["template"];
    let limit = &template["spec"]["containers"][0]["resources"]["limits"]["memory"];
    assert_eq!(limit, "128Mi", "{flavour}");
    let mut pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"generateName": "operator-", "labels": template["metadata"]["labels"]},
        "spec": template["spec"],
    });
    let pods = format!("/api/v1/namespaces/{namespace}/pods");
    let made = admin.client.post(&pods, &pod).await.unwrap();
    assert_eq!(made.status, 201, "{flavour}: {}", made.body);
    assert_eq!(made.headers.get("warning"), None, "{flavour}");
    // The namespace does enforce it.
    pod["spec"]["hostNetwork"] = json!(true);
    let refused = admin.client.post(&pods, &pod).await.unwrap();
    assert_eq!(
        refused.status, 403,
        "{flavour}: a Pod in the host's network was taken"
    );
}

/// Whether RBAC lets a call pass, whatever becomes of it then (Pod Security answers 403 too).
async fn allowed(client: &Client, request: Request) -> bool {
    let answer = client.send(request).await.unwrap();
    let told = answer.body["message"].as_str().unwrap_or_default();
    !(answer.status == 403 && told.contains(" cannot "))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_operator_may_do_exactly_what_it_needs() {
    if !enabled("the_operator_may_do_exactly_what_it_needs") {
        return;
    }
    for (flavour, everywhere) in [("base", true), ("overlays/namespaced", false)] {
        let api = ApiServer::start().await.unwrap();
        apply(api.admin(), flavour).await;
        established(api.admin()).await;
        let operator = api.service_account(NAMESPACE, ACCOUNT).await.unwrap();
        let client = &operator.client;
        let proxies = |namespace: &str| match namespace {
            "" => "/apis/crawl.example.com/v1alpha1/proxies".to_owned(),
            other => format!("/apis/crawl.example.com/v1alpha1/namespaces/{other}/proxies"),
        };
        let merge = |path: String| {
            Request::new(Method::PATCH, path).body("application/merge-patch+json", "{}")
        };
        let event =
            json!({"apiVersion": "events.k8s.io/v1", "kind": "Event", "metadata": {"name": "e"}});
        for namespace in [NAMESPACE, "default", ""] {
            let here = everywhere || namespace == NAMESPACE;
            let core = |plural: &str| match namespace {
                "" => format!("/api/v1/{plural}"),
                other => format!("/api/v1/namespaces/{other}/{plural}"),
            };
            let get = |path: String| Request::new(Method::GET, path);
            let labelled = "labelSelector=crawl.example.com/cloud-init%3Dtrue";
            let watch = "watch=true&timeoutSeconds=1";
            let mut calls = vec![
                ("list proxies", get(proxies(namespace)), here),
                (
                    "watch proxies",
                    get(format!("{}?{watch}", proxies(namespace))),
                    here,
                ),
                (
                    "list labelled secrets",
                    get(format!("{}?{labelled}", core("secrets"))),
                    here,
                ),
                (
                    "watch labelled secrets",
                    get(format!("{}?{labelled}&{watch}", core("secrets"))),
                    here,
                ),
                ("list pods", get(core("pods")), false),
                ("list configmaps", get(core("configmaps")), false),
                ("list services", get(core("services")), false),
                ("list serviceaccounts", get(core("serviceaccounts")), false),
            ];
            if !namespace.is_empty() {
                let one = format!("{}/p", proxies(namespace));
                let events = format!("/apis/events.k8s.io/v1/namespaces/{namespace}/events");
                calls.extend([
                    ("get a proxy", get(one.clone()), here),
                    ("patch a proxy", merge(one.clone()), here),
                    ("patch its status", merge(format!("{one}/status")), here),
                    (
                        "create a proxy",
                        Request::new(Method::POST, proxies(namespace)).json(&json!({})),
                        false,
                    ),
                    (
                        "delete a proxy",
                        Request::new(Method::DELETE, one.clone()),
                        false,
                    ),
                    (
                        "delete proxies",
                        Request::new(Method::DELETE, proxies(namespace)),
                        false,
                    ),
                    ("get a secret", get(format!("{}/s", core("secrets"))), here),
                    (
                        "create a secret",
                        Request::new(Method::POST, core("secrets")).json(&json!({})),
                        false,
                    ),
                    (
                        "create an event",
                        Request::new(Method::POST, events.clone()).json(&event),
                        here,
                    ),
                    ("patch an event", merge(format!("{events}/e")), false),
                    (
                        "create a pod",
                        Request::new(Method::POST, core("pods")).json(&json!({})),
                        false,
                    ),
                    (
                        "delete a pod",
                        Request::new(Method::DELETE, format!("{}/p", core("pods"))),
                        false,
                    ),
                    (
                        "create a token",
                        Request::new(
                            Method::POST,
                            format!("{}/default/token", core("serviceaccounts")),
                        )
                        .json(&json!({})),
                        false,
                    ),
                ]);
            }
            for (what, request, wanted) in calls {
                let may = allowed(client, request).await;
                assert_eq!(may, wanted, "{flavour}: {what} in {namespace:?}");
            }
        }
        for path in [
            "/api/v1/nodes",
            "/api/v1/namespaces",
            "/apis/rbac.authorization.k8s.io/v1/clusterroles",
        ] {
            assert!(
                !allowed(client, Request::new(Method::GET, path)).await,
                "{flavour}: {path}"
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn people_get_proxies_with_their_usual_roles() {
    if !enabled("people_get_proxies_with_their_usual_roles") {
        return;
    }
    let api = ApiServer::start().await.unwrap();
    apply(api.admin(), "base").await;
    established(api.admin()).await;
    // Roles that aggregate others are put together by a controller, so here the parts are bound.
    for (user, role, may_edit) in [
        ("viewer", "egress-proxies-view", false),
        ("editor", "egress-proxies-edit", true),
    ] {
        let binding = format!("rolebinding/{user}");
        let name = binding.split('/').nth(1).unwrap();
        api.admin()
            .kubectl
            .ok(&[
                "create",
                "rolebinding",
                name,
                &format!("--clusterrole={role}"),
                &format!("--user={user}"),
            ])
            .await
            .unwrap();
        let person = api.user(user, &[]).unwrap();
        let proxies = "/apis/crawl.example.com/v1alpha1/namespaces/default/proxies";
        let create = Request::new(Method::POST, proxies).json(&json!({}));
        assert_eq!(allowed(&person.client, create).await, may_edit, "{user}");
        let list = Request::new(Method::GET, proxies);
        assert_eq!(allowed(&person.client, list).await, !may_edit, "{user}");
        assert!(
            !allowed(
                &person.client,
                Request::new(Method::GET, "/api/v1/namespaces/default/secrets")
            )
            .await
        );
    }
}

/// What a role grants, whatever its kind and name.
async fn rules(admin: &Target, path: &str) -> Value {
    admin.client.get(path).await.unwrap().body["rules"].clone()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_chart_installs_and_grants_the_same() {
    if !enabled("the_chart_installs_and_grants_the_same") {
        return;
    }
    let api = ApiServer::start().await.unwrap();
    let admin = api.admin();
    let program = tokio::task::spawn_blocking(programs::helm)
        .await
        .unwrap()
        .unwrap();
    let helm = admin.kubectl.with_program(program);
    let chart = deploy().join("../helm/egress-proxies-operator");
    let chart = chart.to_str().unwrap();
    helm.ok(&["lint", "--strict", chart]).await.unwrap();
    let restricted = "pod-security.kubernetes.io/enforce=restricted";
    let roles = "/apis/rbac.authorization.k8s.io/v1";
    for (namespace, more) in [
        ("whole", &[][..]),
        (
            "one",
            &[
                "--set=namespaced=true",
                "--set=secretMounts.egress-ssh=/etc/egress-ssh",
            ],
        ),
    ] {
        admin
            .kubectl
            .ok(&["create", "namespace", namespace])
            .await
            .unwrap();
        admin
            .kubectl
            .ok(&["label", "namespace", namespace, restricted])
            .await
            .unwrap();
        let mut args = vec!["install", "-n", namespace, namespace, chart];
        args.extend(more);
        helm.ok(&args).await.unwrap();
        restricted_pod(admin, namespace, &format!("{namespace}-{ACCOUNT}")).await;
        args[0] = "upgrade";
        helm.ok(&args).await.unwrap();
    }
    established(admin).await;
    // The same rights as the kustomize base gives, which the operator was seen to need.
    apply(admin, "base").await;
    let wanted = rules(admin, &format!("{roles}/clusterroles/{ACCOUNT}")).await;
    assert!(wanted.is_array());
    assert_eq!(
        rules(admin, &format!("{roles}/clusterroles/whole-{ACCOUNT}")).await,
        wanted
    );
    assert_eq!(
        rules(
            admin,
            &format!("{roles}/namespaces/one/roles/one-{ACCOUNT}")
        )
        .await,
        wanted
    );
    assert_eq!(
        rules(admin, &format!("{roles}/clusterroles/one-{ACCOUNT}")).await,
        Value::Null
    );

    // An uninstall keeps the state and the CRD, and with it every Proxy.
    helm.ok(&["uninstall", "-n", "whole", "whole"])
        .await
        .unwrap();
    admin
        .kubectl
        .ok(&[
            "-n",
            "whole",
            "get",
            "pvc",
            &format!("whole-{ACCOUNT}-state"),
        ])
        .await
        .unwrap();
    admin
        .kubectl
        .ok(&["get", "crd", "proxies.crawl.example.com"])
        .await
        .unwrap();
}

#[test]
fn the_chart_has_the_same_crd() {
    let read = |file: &str| std::fs::read_to_string(deploy().join(file)).unwrap();
    let chart = read("../helm/egress-proxies-operator/crds/proxies.yaml");
    assert!(
        chart == read("base/crd.yaml"),
        "copy deploy/kubernetes/base/crd.yaml into the chart"
    );
}

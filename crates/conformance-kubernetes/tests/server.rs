//! The API server under test is a real one, and the harness keeps its word.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use egress_kube_suite::{ApiServer, enabled};
use serde_json::json;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn starts_with_rbac_survives_a_kill_and_leaves_nothing() {
    if !enabled("starts_with_rbac_survives_a_kill_and_leaves_nothing") {
        return;
    }
    let mut api = ApiServer::start().await.unwrap();
    println!(
        "stage kube-apiserver {} ready in {:.1} s",
        api.version(),
        api.started_in.as_secs_f32()
    );

    let version = api.admin().client.get("/version").await.unwrap();
    assert_eq!(version.body["gitVersion"], json!(api.version()));

    // RBAC: a user without a role may do nothing, the administrator everything.
    let nobody = api.user("nobody", &[]).unwrap();
    let refused = nobody.client.get("/api/v1/namespaces").await.unwrap();
    assert_eq!(refused.status, 403, "{refused:?}");
    assert_eq!(
        api.anonymous()
            .unwrap()
            .get("/api/v1/namespaces")
            .await
            .unwrap()
            .status,
        403
    );
    assert_eq!(
        api.admin()
            .client
            .get("/api/v1/namespaces")
            .await
            .unwrap()
            .status,
        200
    );

    // A service account's token is who it says.
    let account =
        json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "robot"}});
    let path = "/api/v1/namespaces/default/serviceaccounts";
    assert_eq!(
        api.admin()
            .client
            .post(path, &account)
            .await
            .unwrap()
            .status,
        201
    );
    let robot = api.service_account("default", "robot").await.unwrap();
    let who = robot
        .kubectl
        .ok(&[
            "auth",
            "whoami",
            "-o",
            "jsonpath={.status.userInfo.username}",
        ])
        .await;
    assert_eq!(who.unwrap(), "system:serviceaccount:default:robot");

    // Killed and back: the same address, the same data.
    api.kill_server();
    assert!(api.admin().client.get("/readyz").await.is_err());
    api.start_server().await.unwrap();
    let kept = api
        .admin()
        .client
        .get(&format!("{path}/robot"))
        .await
        .unwrap();
    assert_eq!(kept.status, 200);

    let (etcd, server) = api.pids();
    let dir = api.dir().to_owned();
    drop(api);
    for pid in [Some(etcd), server].into_iter().flatten() {
        assert!(
            !std::path::Path::new(&format!("/proc/{pid}")).exists(),
            "{pid} still runs"
        );
    }
    assert!(!dir.exists());
}

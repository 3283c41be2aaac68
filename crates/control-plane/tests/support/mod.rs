//! What the tests share.
#![allow(dead_code, reason = "each test file uses its own part")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests"
)]

use std::collections::BTreeMap;

use egress_api::{Endpoint, HealthCheck, Mode, Proxy, ProxySpec};
use egress_control_plane::{Config, ControlPlane, Storage};
use kube::{Api, Client};

pub async fn in_memory() -> (ControlPlane, Client) {
    open(Storage::Memory).await
}

pub async fn open(storage: Storage) -> (ControlPlane, Client) {
    let plane = ControlPlane::open(Config::new(storage, vec![egress_api::crd()]))
        .await
        .unwrap();
    let client = Client::new(plane.router(), "default");
    (plane, client)
}

pub fn proxies(client: &Client) -> Api<Proxy> {
    Api::namespaced(client.clone(), "default")
}

pub fn mk_external(name: &str) -> Proxy {
    Proxy::new(
        name,
        ProxySpec {
            mode: Mode::External,
            provider: None,
            placement: None,
            port: 3128,
            cloud_init: None,
            attributes: BTreeMap::new(),
            endpoint: Some(Endpoint {
                host: "192.0.2.1".to_owned(),
            }),
            health_check: HealthCheck::default(),
            max_leases: 5,
        },
    )
}

#[track_caller]
pub fn status(error: kube::Error) -> kube::core::Status {
    match error {
        kube::Error::Api(status) => *status,
        other => panic!("no Status: {other:?}"),
    }
}

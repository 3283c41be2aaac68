//! Every call of the Kubernetes API that the reconciler makes, each with a deadline, and each
//! write with the resource version it was decided from: a decision from an outdated view is a
//! conflict, never a second instance.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::time::Duration;

use egress_api::{CLOUD_INIT_LABEL, INSTANCE_UID_ANNOTATION, Proxy, ProxyStatus};
use egress_core::{ProxyKey, SecretBytes, Uid};
use k8s_openapi::api::core::v1::Secret;
use kube::api::{ListParams, Patch, PatchParams};
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};
use tracing::Instrument;

use crate::error::ApiError;

const MANAGER: &str = "egress-proxies-operator";
const PAGE: u32 = 500;

/// See the module.
#[derive(Clone)]
pub(crate) struct KubernetesApi {
    client: Client,
    deadline: Duration,
}

/// What a Secret's key gave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum UserData {
    Found(SecretBytes),
    NoSecret,
    NoLabel,
    NoKey { others: Vec<String> },
}

/// The UIDs that have an owner, straight from the API.
#[derive(Debug, Default, Clone)]
pub(crate) struct Live {
    /// Of Proxies, and of what they adopted.
    pub uids: BTreeSet<Uid>,
    /// Of Proxies alone.
    pub objects: BTreeSet<Uid>,
    /// Which provider each instance UID is recorded at.
    pub recorded_at: BTreeMap<Uid, String>,
}

impl KubernetesApi {
    pub(crate) fn new(client: Client, deadline: Duration) -> Self {
        Self { client, deadline }
    }

    fn proxies(&self, namespace: &str) -> Api<Proxy> {
        Api::namespaced(self.client.clone(), namespace)
    }

    async fn within<T>(
        &self,
        action: &'static str,
        what: impl std::fmt::Display,
        call: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, ApiError> {
        within(self.deadline, action, what, call).await
    }

    /// The object as it is now, not as a cache has it.
    pub(crate) async fn get(&self, key: &ProxyKey) -> Result<Option<Proxy>, ApiError> {
        let api = self.proxies(&key.namespace);
        self.within("get", format!("proxy {key}"), api.get_opt(&key.name))
            .await
    }

    /// Merges `metadata` into the object as it was at `seen`.
    pub(crate) async fn patch_metadata(
        &self,
        seen: &Proxy,
        mut metadata: Value,
    ) -> Result<Proxy, ApiError> {
        let key = seen.key();
        metadata["resourceVersion"] = json!(seen.resource_version());
        let patch = Patch::Merge(json!({ "metadata": metadata }));
        let api = self.proxies(&key.namespace);
        self.within(
            "patch",
            format!("proxy {key}"),
            api.patch(&key.name, &params(), &patch),
        )
        .await
    }

    /// Writes the whole status of the object as it was at `seen`.
    pub(crate) async fn patch_status(
        &self,
        seen: &Proxy,
        status: &ProxyStatus,
    ) -> Result<Proxy, ApiError> {
        let key = seen.key();
        let patch = Patch::Merge(json!({
            "metadata": {"resourceVersion": seen.resource_version()},
            "status": with_nulls(status),
        }));
        let api = self.proxies(&key.namespace);
        self.within(
            "patch the status of",
            format!("proxy {key}"),
            api.patch_status(&key.name, &params(), &patch),
        )
        .instrument(tracing::info_span!("status.patch"))
        .await
    }

    /// User-data from a labelled Secret.
    pub(crate) async fn user_data(
        &self,
        namespace: &str,
        name: &str,
        key: &str,
    ) -> Result<UserData, ApiError> {
        let api: Api<Secret> = Api::namespaced(self.client.clone(), namespace);
        let secret = self
            .within(
                "get",
                format!("secret {namespace}/{name}"),
                api.get_opt(name),
            )
            .await?;
        let Some(secret) = secret else {
            return Ok(UserData::NoSecret);
        };
        if secret.labels().get(CLOUD_INIT_LABEL).map(String::as_str) != Some("true") {
            return Ok(UserData::NoLabel);
        }
        let mut data = secret.data.unwrap_or_default();
        Ok(match data.remove(key) {
            Some(bytes) => UserData::Found(SecretBytes::new(bytes.0)),
            None => UserData::NoKey {
                others: data.into_keys().collect(),
            },
        })
    }

    /// The UIDs of all Proxies, read from the API itself. In one namespace only where `namespace`
    /// is set and the operator may not look at the others.
    pub(crate) async fn live(&self, namespace: Option<&str>) -> Result<Live, ApiError> {
        let everywhere = self.live_in(Api::all(self.client.clone())).await;
        match (everywhere, namespace) {
            (Err(e), Some(namespace)) if e.is_forbidden() => {
                self.live_in(self.proxies(namespace)).await
            }
            (answer, _) => answer,
        }
    }

    async fn live_in(&self, api: Api<Proxy>) -> Result<Live, ApiError> {
        let mut live = Live::default();
        let mut params = ListParams::default().limit(PAGE);
        loop {
            let page = self
                .within("list", "proxies", api.list_metadata(&params))
                .await?;
            for object in page.items {
                let annotations = object.annotations();
                let own = object.metadata.uid.as_deref().map(Uid::new);
                let instance = annotations
                    .get(INSTANCE_UID_ANNOTATION)
                    .map(|uid| Uid::new(uid.as_str()));
                if let Some(provider) = annotations.get(egress_api::PROVIDER_ANNOTATION)
                    && let Some(uid) = instance.as_ref().or(own.as_ref())
                {
                    live.recorded_at.insert(uid.clone(), provider.clone());
                }
                live.objects.extend(own.clone());
                live.uids.extend(own);
                live.uids.extend(instance);
            }
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params = params.continue_token(&token),
                None => return Ok(live),
            }
        }
    }
}

/// `call` with a deadline.
pub(crate) async fn within<T>(
    limit: Duration,
    action: &'static str,
    what: impl std::fmt::Display,
    call: impl Future<Output = kube::Result<T>>,
) -> Result<T, ApiError> {
    match tokio::time::timeout(limit, call).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(source)) => Err(ApiError::Call {
            action,
            what: what.to_string(),
            source: Box::new(source),
        }),
        Err(_) => Err(ApiError::Deadline {
            action,
            what: what.to_string(),
            limit,
        }),
    }
}

fn params() -> PatchParams {
    PatchParams {
        field_manager: Some(MANAGER.to_owned()),
        ..PatchParams::default()
    }
}

/// A merge patch keeps what it does not name, so a field that is gone is named with null.
fn with_nulls(status: &ProxyStatus) -> Value {
    let mut value = serde_json::to_value(status).unwrap_or_else(|_| json!({}));
    for field in [
        "phase",
        "ip",
        "port",
        "providerID",
        "latencyMillis",
        "observedGeneration",
    ] {
        if value.get(field).is_none() {
            value[field] = Value::Null;
        }
    }
    if value.get("conditions").is_none() {
        value["conditions"] = json!([]);
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_patch_names_what_is_gone() {
        let all = with_nulls(&ProxyStatus::default());
        let full = ProxyStatus {
            phase: Some("Ready".into()),
            ip: Some("192.0.2.1".into()),
            port: Some(1),
            provider_id: Some("x".into()),
            latency_millis: Some(1),
            observed_generation: Some(1),
            conditions: Vec::new(),
        };
        let full = with_nulls(&full);
        let names = |v: &Value| v.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&all), names(&full), "a field was added: name it here");
        assert!(all["ip"].is_null());
    }
}

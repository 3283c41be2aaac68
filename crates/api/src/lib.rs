//! The `Proxy` resource: `crawl.example.com/v1alpha1`.
//!
//! The CRD in `deploy/kubernetes/base/crd.yaml` is generated from these types
//! (`cargo xtask generate`), and a test fails when the two differ. [`validate()`] turns a raw object
//! into what the rest of the program works with.

#![allow(
    clippy::duplicated_attributes,
    reason = "printer columns share their types and priorities"
)]

mod conditions;
mod validate;

use std::collections::BTreeMap;
use std::fmt;

use egress_core::{Phase, ProxyKey, Uid};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps, JSONSchemaPropsOrArray,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema, ResourceExt};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use conditions::{ConditionChange, ConditionType, set_condition};
pub use validate::{InvalidSpec, validate};

/// Set before anything is created; removed when nothing is left of it.
pub const FINALIZER: &str = "crawl.example.com/cleanup";
/// Hash of what the running instance was built from.
pub const SPEC_HASH_ANNOTATION: &str = "crawl.example.com/spec-hash";
/// The provider that the running instance was built by: a changed `spec.provider` must delete the
/// old instance where it is.
pub const PROVIDER_ANNOTATION: &str = "crawl.example.com/provider";
/// The UID that the instance was made for, when that is not the object's own: an export writes it,
/// so that an import into another control plane adopts the instance instead of building again.
pub const INSTANCE_UID_ANNOTATION: &str = "crawl.example.com/instance-uid";
/// `"true"`: abandon the instance, release the object.
pub const SKIP_CLEANUP_ANNOTATION: &str = "crawl.example.com/skip-cleanup";
/// `"true"` on every Secret that a `secretRef` names; others are invisible to the operator.
pub const CLOUD_INIT_LABEL: &str = "crawl.example.com/cloud-init";
/// The key in a Secret when `secretRef.key` is left out.
pub const DEFAULT_USER_DATA_KEY: &str = "user-data";
pub const DEFAULT_PORT: i32 = 3128;
pub const DEFAULT_MAX_LEASES: i32 = 5;
pub const DEFAULT_HEALTH_URL: &str = "https://www.gstatic.com/generate_204";

/// An egress proxy: a machine, pod or process that the operator makes and keeps (Managed), or
/// somebody else's that it only probes and leases (External).
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[kube(
    group = "crawl.example.com",
    version = "v1alpha1",
    kind = "Proxy",
    plural = "proxies",
    singular = "proxy",
    shortname = "px",
    category = "crawl",
    namespaced,
    derive = "PartialEq",
    status = "ProxyStatus",
    doc = "An egress proxy: a machine, pod or process that the operator makes and keeps (Managed), or somebody else's that it only probes and leases (External).",
    printcolumn(name = "Mode", type_ = "string", json_path = ".spec.mode"),
    printcolumn(name = "Provider", type_ = "string", json_path = ".spec.provider"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "IP", type_ = "string", json_path = ".status.ip"),
    printcolumn(
        name = "Healthy",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Healthy\")].status"
    ),
    printcolumn(
        name = "ProviderID",
        type_ = "string",
        json_path = ".status.providerID",
        priority = 1
    ),
    printcolumn(
        name = "Latency",
        type_ = "integer",
        json_path = ".status.latencyMillis",
        priority = 1
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp"
    )
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self.mode != 'Managed' || has(self.provider)")
        .message("a Managed proxy needs spec.provider: the name of a configured provider"),
    validation = Rule::new("self.mode != 'Managed' || !has(self.endpoint)")
        .message("a Managed proxy must not have spec.endpoint: its address comes from the provider"),
    validation = Rule::new("self.mode != 'External' || has(self.endpoint)")
        .message("an External proxy needs spec.endpoint.host: the address of the proxy"),
    validation = Rule::new("self.mode != 'External' || !has(self.provider)")
        .message("an External proxy must not have spec.provider: the operator creates nothing for it"),
    validation = Rule::new("self.mode != 'External' || !has(self.placement)")
        .message("an External proxy must not have spec.placement: the operator creates nothing for it"),
    validation = Rule::new("self.mode != 'External' || !has(self.cloudInit)")
        .message("an External proxy must not have spec.cloudInit: the operator creates nothing for it")
)]
pub struct ProxySpec {
    /// Managed: the operator creates and owns a backing instance. External: somebody else's proxy,
    /// only probed and leased. Cannot be changed later.
    #[x_kube(validation = Rule::new("self == oldSelf")
        .message("spec.mode cannot be changed: delete the Proxy and create another"))]
    pub mode: Mode,

    /// The name of a configured provider instance (such as kvm-home), not its type. Required when
    /// Managed, forbidden when External.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63))]
    pub provider: Option<String>,

    /// Where the instance runs and what it is; each field's meaning is the provider's matter.
    /// Changing it replaces the instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<Placement>,

    /// The port that the proxy listens on. Changing it replaces a Managed instance.
    #[serde(default = "default_port")]
    #[schemars(range(min = 1, max = 65535))]
    pub port: i32,

    /// User-data for the instance, handed to it byte for byte. Changing it (a rotated Secret too)
    /// replaces the instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cloud_init: Option<CloudInit>,

    /// Free selection labels for leases, such as geo, asn or purpose.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub attributes: BTreeMap<String, String>,

    /// The address of an External proxy. Required when External, forbidden when Managed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<Endpoint>,

    /// How the proxy is probed: a request through it.
    #[serde(default)]
    pub health_check: HealthCheck,

    /// How many leases may be active at a time; 0: the proxy is never leased.
    #[serde(default = "default_max_leases")]
    #[schemars(range(min = 0, max = 1_000_000))]
    pub max_leases: i32,
}

/// Who owns the instance.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Managed,
    External,
}

/// Each field's meaning is the provider's matter.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Placement {
    /// Such as europe-west1; the kvm and local providers ignore it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub region: Option<String>,
    /// A cloud zone; for kvm the name of a host; for local the name of a bind address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone: Option<String>,
    /// A cloud machine type; for kvm a configured profile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine_type: Option<String>,
    /// A cloud image; for kvm a configured image key or a URL.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
}

/// Exactly one of inline and secretRef.
#[derive(Serialize, Deserialize, KubeSchema, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.inline) != has(self.secretRef)")
    .message("spec.cloudInit needs exactly one of inline and secretRef"))]
pub struct CloudInit {
    /// The user-data itself, in any format that cloud-init knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inline: Option<UserDataText>,
    /// A Secret in the same namespace, labelled crawl.example.com/cloud-init: "true".
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_ref: Option<SecretRef>,
}

/// User-data as text. `Debug` shows only its length.
#[derive(Serialize, Deserialize, JsonSchema, Clone, PartialEq, Eq)]
#[serde(transparent)]
pub struct UserDataText(pub String);

impl fmt::Debug for UserDataText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UserDataText({} bytes)", self.0.len())
    }
}

/// A key of a Secret.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, PartialEq, Eq)]
pub struct SecretRef {
    /// Name of the Secret, in the namespace of the Proxy.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// Key within the Secret.
    #[serde(default = "default_user_data_key")]
    #[schemars(length(min = 1, max = 253))]
    pub key: String,
}

/// Where an External proxy is.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Host name, IPv4 or IPv6 address.
    #[schemars(length(min = 1, max = 253))]
    pub host: String,
}

/// How a proxy is probed.
#[derive(Serialize, Deserialize, KubeSchema, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.timeoutSeconds <= self.intervalSeconds")
    .message("spec.healthCheck.timeoutSeconds must not be more than intervalSeconds"))]
pub struct HealthCheck {
    /// Absolute http or https URL that is fetched through the proxy; https by a CONNECT tunnel.
    #[serde(default = "default_health_url")]
    #[schemars(length(max = 2048))]
    #[x_kube(validation = Rule::new(
        "isURL(self) && url(self).getScheme() in ['http', 'https'] && url(self).getHostname() != ''")
        .message("spec.healthCheck.url must be an absolute http or https URL"))]
    pub url: String,
    /// Seconds from one probe to the next.
    #[serde(default = "default_interval")]
    #[schemars(range(min = 1, max = 86400))]
    pub interval_seconds: i32,
    /// Seconds until a probe counts as failed; at most intervalSeconds.
    #[serde(default = "default_timeout")]
    #[schemars(range(min = 1, max = 86400))]
    pub timeout_seconds: i32,
    /// Successes in a row that turn unhealthy to healthy.
    #[serde(default = "default_success_threshold")]
    #[schemars(range(min = 1, max = 1000))]
    pub success_threshold: i32,
    /// Failures in a row that turn healthy to unhealthy.
    #[serde(default = "default_failure_threshold")]
    #[schemars(range(min = 1, max = 1000))]
    pub failure_threshold: i32,
    /// The status that counts as success.
    #[serde(default = "default_expected_status")]
    #[schemars(range(min = 100, max = 599))]
    pub expected_status: i32,
}

impl Default for HealthCheck {
    fn default() -> Self {
        Self {
            url: default_health_url(),
            interval_seconds: default_interval(),
            timeout_seconds: default_timeout(),
            success_threshold: default_success_threshold(),
            failure_threshold: default_failure_threshold(),
            expected_status: default_expected_status(),
        }
    }
}

fn default_port() -> i32 {
    DEFAULT_PORT
}
fn default_max_leases() -> i32 {
    DEFAULT_MAX_LEASES
}
fn default_user_data_key() -> String {
    DEFAULT_USER_DATA_KEY.to_owned()
}
fn default_health_url() -> String {
    DEFAULT_HEALTH_URL.to_owned()
}
fn default_interval() -> i32 {
    10
}
fn default_timeout() -> i32 {
    5
}
fn default_success_threshold() -> i32 {
    1
}
fn default_failure_threshold() -> i32 {
    3
}
fn default_expected_status() -> i32 {
    204
}

/// What the operator says of a Proxy.
#[derive(Serialize, Deserialize, KubeSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct ProxyStatus {
    /// Pending, Provisioning, Ready, Unhealthy, Deleting or Failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// The instance's address; empty while there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ip: Option<String>,
    /// Where the instance listens, when the provider chose another port than spec.port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<i32>,
    /// The provider's own id of the instance.
    #[serde(
        default,
        rename = "providerID",
        skip_serializing_if = "Option::is_none"
    )]
    pub provider_id: Option<String>,
    /// Milliseconds that the last successful probe took, as last written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency_millis: Option<i64>,
    /// The generation that this status is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Healthy, Provisioned, ProviderReachable and Ready.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

impl ProxyStatus {
    pub fn phase(&self) -> Phase {
        let text = self.phase.as_deref().unwrap_or_default();
        Phase::ALL
            .into_iter()
            .find(|p| p.as_str() == text)
            .unwrap_or_default()
    }
}

impl Proxy {
    /// `namespace/name`.
    pub fn key(&self) -> ProxyKey {
        ProxyKey::new(self.namespace().unwrap_or_default(), self.name_any())
    }

    /// None only for an object that was never stored.
    pub fn stored_uid(&self) -> Option<Uid> {
        self.metadata.uid.as_deref().map(Uid::new)
    }

    /// The UID that the instance is named and marked by: [`INSTANCE_UID_ANNOTATION`] where an
    /// import brought one, else the object's own.
    pub fn instance_uid(&self) -> Option<Uid> {
        self.annotations()
            .get(INSTANCE_UID_ANNOTATION)
            .filter(|uid| !uid.is_empty())
            .map(|uid| Uid::new(uid.as_str()))
            .or_else(|| self.stored_uid())
    }

    pub fn is_deleting(&self) -> bool {
        self.metadata.deletion_timestamp.is_some()
    }

    pub fn has_finalizer(&self) -> bool {
        self.metadata
            .finalizers
            .iter()
            .flatten()
            .any(|f| f == FINALIZER)
    }

    pub fn skips_cleanup(&self) -> bool {
        self.annotations()
            .get(SKIP_CLEANUP_ANNOTATION)
            .is_some_and(|v| v == "true")
    }
}

/// The CRD as it is applied to a cluster and served by the embedded control plane.
///
/// Optional fields are not `nullable`: an API server then drops an explicit null before it looks at
/// the rules, where `has(self.provider)` would be true of a kept one.
pub fn crd() -> CustomResourceDefinition {
    use kube::CustomResourceExt;
    let mut crd = Proxy::crd();
    for version in &mut crd.spec.versions {
        if let Some(schema) = version
            .schema
            .as_mut()
            .and_then(|s| s.open_api_v3_schema.as_mut())
        {
            drop_nullable(schema);
        }
    }
    crd
}

fn drop_nullable(schema: &mut JSONSchemaProps) {
    schema.nullable = None;
    for property in schema.properties.iter_mut().flat_map(BTreeMap::values_mut) {
        drop_nullable(property);
    }
    if let Some(JSONSchemaPropsOrArray::Schema(items)) = &mut schema.items {
        drop_nullable(items);
    }
}

#[cfg(test)]
mod crd_tests;

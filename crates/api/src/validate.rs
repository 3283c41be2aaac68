//! From a raw object to a validated spec.
//!
//! The CRD's schema and CEL rules refuse most bad objects at the API; this is the same contract for
//! an object that came in before a rule existed, and the place where raw types end.

use std::time::Duration;

use egress_core::SecretBytes;
use egress_core::spec::{self, CloudInitSource, ManagedSpec, ModeSpec};

use crate::{CloudInit, Mode, Proxy};

/// Why a spec cannot be worked with: every fault, each naming its field.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InvalidSpec(pub Vec<String>);

impl std::fmt::Display for InvalidSpec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0.join("; "))
    }
}

impl std::error::Error for InvalidSpec {}

/// Validates a Proxy's spec.
///
/// # Errors
/// All faults together.
pub fn validate(proxy: &Proxy) -> Result<spec::ProxySpec, InvalidSpec> {
    let raw = &proxy.spec;
    let mut faults = Vec::new();
    let mode = match raw.mode {
        Mode::Managed => {
            if raw.endpoint.is_some() {
                faults.push("spec.endpoint is forbidden when mode is Managed".to_owned());
            }
            if raw.provider.is_none() {
                faults.push("spec.provider is required when mode is Managed".to_owned());
            }
            let cloud_init = raw.cloud_init.as_ref().and_then(|c| source(c, &mut faults));
            ModeSpec::Managed(ManagedSpec {
                provider: raw.provider.clone().unwrap_or_default(),
                placement: raw.placement.as_ref().map(placement).unwrap_or_default(),
                cloud_init,
            })
        }
        Mode::External => {
            for (set, field) in [
                (raw.provider.is_some(), "provider"),
                (raw.placement.is_some(), "placement"),
                (raw.cloud_init.is_some(), "cloudInit"),
            ] {
                if set {
                    faults.push(format!("spec.{field} is forbidden when mode is External"));
                }
            }
            let host = raw
                .endpoint
                .as_ref()
                .map(|e| e.host.clone())
                .unwrap_or_default();
            if host.is_empty() {
                faults.push("spec.endpoint.host is required when mode is External".to_owned());
            }
            ModeSpec::External {
                host: host
                    .trim_start_matches('[')
                    .trim_end_matches(']')
                    .to_owned(),
            }
        }
    };
    let port = u16::try_from(raw.port)
        .ok()
        .filter(|p| *p != 0)
        .unwrap_or_else(|| {
            faults.push(format!(
                "spec.port must be from 1 to 65535, not {}",
                raw.port
            ));
            0
        });
    let max_leases = u32::try_from(raw.max_leases).unwrap_or_else(|_| {
        faults.push(format!(
            "spec.maxLeases must not be negative, not {}",
            raw.max_leases
        ));
        0
    });
    let health_check = health_check(&raw.health_check, &mut faults);
    match health_check {
        Some(health_check) if faults.is_empty() => Ok(spec::ProxySpec {
            mode,
            port,
            attributes: raw.attributes.clone(),
            health_check,
            max_leases,
        }),
        _ => Err(InvalidSpec(faults)),
    }
}

fn source(raw: &CloudInit, faults: &mut Vec<String>) -> Option<CloudInitSource> {
    match (&raw.inline, &raw.secret_ref) {
        (Some(text), None) => Some(CloudInitSource::Inline(SecretBytes::new(text.0.as_bytes()))),
        (None, Some(r)) => Some(CloudInitSource::SecretRef {
            name: r.name.clone(),
            key: r.key.clone(),
        }),
        _ => {
            faults.push("spec.cloudInit needs exactly one of inline and secretRef".to_owned());
            None
        }
    }
}

fn placement(raw: &crate::Placement) -> spec::Placement {
    spec::Placement {
        region: raw.region.clone(),
        zone: raw.zone.clone(),
        machine_type: raw.machine_type.clone(),
        image: raw.image.clone(),
    }
}

fn health_check(raw: &crate::HealthCheck, faults: &mut Vec<String>) -> Option<spec::HealthCheck> {
    let before = faults.len();
    let mut positive = |field: &str, value: i32| {
        u32::try_from(value)
            .ok()
            .filter(|v| *v > 0)
            .unwrap_or_else(|| {
                faults.push(format!(
                    "spec.healthCheck.{field} must be at least 1, not {value}"
                ));
                1
            })
    };
    let interval = positive("intervalSeconds", raw.interval_seconds);
    let timeout = positive("timeoutSeconds", raw.timeout_seconds);
    let success_threshold = positive("successThreshold", raw.success_threshold);
    let failure_threshold = positive("failureThreshold", raw.failure_threshold);
    if timeout > interval {
        faults.push(format!(
            "spec.healthCheck.timeoutSeconds ({timeout}) must not be more than intervalSeconds ({interval})"
        ));
    }
    let expected_status = u16::try_from(raw.expected_status)
        .ok()
        .filter(|s| (100..600).contains(s));
    if expected_status.is_none() {
        faults.push(format!(
            "spec.healthCheck.expectedStatus must be from 100 to 599, not {}",
            raw.expected_status
        ));
    }
    let url = url::Url::parse(&raw.url).ok().filter(|u| {
        matches!(u.scheme(), "http" | "https") && u.host_str().is_some_and(|h| !h.is_empty())
    });
    if url.is_none() {
        faults.push(format!(
            "spec.healthCheck.url must be an absolute http or https URL, not {:?}",
            raw.url
        ));
    }
    if faults.len() > before {
        return None;
    }
    Some(spec::HealthCheck {
        url: url?,
        interval: Duration::from_secs(interval.into()),
        timeout: Duration::from_secs(timeout.into()),
        success_threshold,
        failure_threshold,
        expected_status: expected_status?,
    })
}

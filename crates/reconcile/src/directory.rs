//! The Proxies as the lease store and the edges see them: objects and live verdicts, put together
//! the moment one of the two changes. A verdict counts before it is written to any status.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

use egress_api::{InvalidSpec, Proxy, validate};
use egress_core::spec::ModeSpec;
use egress_core::{Phase, ProxyKey, ProxyRecord};
use egress_health::{Health, Verdict};
use tokio::sync::watch;

use crate::index::Index;
use crate::metrics::Metrics;

/// A view of all Proxies. Cheap to clone; clones are one view.
#[derive(Clone)]
pub struct Directory {
    shared: Arc<Shared>,
}

struct Shared {
    records: RwLock<BTreeMap<ProxyKey, (Arc<ProxyRecord>, String)>>,
    changed: watch::Sender<u64>,
    health: Arc<dyn Health>,
    index: Arc<Index>,
    metrics: Metrics,
}

impl Directory {
    pub(crate) fn new(health: Arc<dyn Health>, index: Arc<Index>, metrics: Metrics) -> Self {
        Self {
            shared: Arc::new(Shared {
                records: RwLock::default(),
                changed: watch::channel(0).0,
                health,
                index,
                metrics,
            }),
        }
    }

    /// All Proxies, in the order of their keys; those being deleted say so.
    pub fn records(&self) -> Vec<Arc<ProxyRecord>> {
        let records = self
            .shared
            .records
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        records.values().map(|(r, _)| Arc::clone(r)).collect()
    }

    pub fn get(&self, key: &ProxyKey) -> Option<Arc<ProxyRecord>> {
        let records = self
            .shared
            .records
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        records.get(key).map(|(r, _)| Arc::clone(r))
    }

    /// Marks a change each time a record changes, appears or goes; the value only counts.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.shared.changed.subscribe()
    }

    /// Takes one Proxy over as it is now; None: it is gone.
    pub(crate) fn refresh(&self, key: &ProxyKey, object: Option<&Proxy>) {
        let record = object.and_then(|object| {
            let verdict = self.shared.health.verdict(key);
            let mut record = record_of(object, verdict.as_ref()).ok()?;
            if record.healthy && self.shared.index.older_at_address(key).is_some() {
                record.healthy = false;
                record.phase = Phase::Unhealthy;
            }
            let provider = object.spec.provider.clone().unwrap_or_default();
            Some((Arc::new(record), provider))
        });
        let mut records = self
            .shared
            .records
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        let old = records.get(key);
        if old == record.as_ref() {
            return;
        }
        let metrics = &self.shared.metrics;
        if let Some((old, provider)) = old {
            metrics.proxy_left(provider, old.phase);
        }
        match record {
            Some((new, provider)) => {
                metrics.proxy_entered(&provider, new.phase);
                records.insert(key.clone(), (new, provider));
            }
            None => {
                records.remove(key);
            }
        }
        drop(records);
        self.shared.changed.send_modify(|n| *n = n.wrapping_add(1));
    }
}

/// One Proxy with its live verdict. A verdict of another UID or address does not count.
///
/// That of two Proxies with one address only the older counts as healthy is not seen from one
/// object: [`Directory`] sees to it.
///
/// # Errors
/// The spec is invalid: such a Proxy cannot be used.
pub fn record_of(proxy: &Proxy, verdict: Option<&Verdict>) -> Result<ProxyRecord, InvalidSpec> {
    let spec = validate(proxy)?;
    let uid = proxy
        .stored_uid()
        .ok_or_else(|| InvalidSpec(vec!["metadata.uid is missing".to_owned()]))?;
    let status = proxy.status.clone().unwrap_or_default();
    let deleting = proxy.is_deleting();
    let (host, port) = match &spec.mode {
        ModeSpec::External { host } => (Some(host.clone()), spec.port),
        ModeSpec::Managed(_) => {
            let port = status.port.and_then(|p| u16::try_from(p).ok());
            (status.ip.clone(), port.unwrap_or(spec.port))
        }
    };
    let phase = status.phase();
    let usable = !deleting && host.is_some() && !matches!(phase, Phase::Failed | Phase::Deleting);
    let verdict = verdict.filter(|v| {
        usable && v.uid == uid && host.as_deref() == Some(v.host.as_str()) && v.port == port
    });
    Ok(ProxyRecord {
        key: proxy.key(),
        uid,
        host,
        port,
        attributes: spec.attributes,
        phase: match verdict {
            _ if deleting => Phase::Deleting,
            Some(verdict) if verdict.healthy => Phase::Ready,
            Some(_) => Phase::Unhealthy,
            None => phase,
        },
        healthy: verdict.is_some_and(|v| v.healthy),
        latency_millis: verdict
            .and_then(|v| v.latency)
            .map(|l| u64::try_from(l.as_millis()).unwrap_or(u64::MAX)),
        max_leases: spec.max_leases,
        deleting,
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use egress_health::ProbeClass;

    use super::*;
    use crate::testing::{mk_external, mk_managed};

    fn verdict(proxy: &Proxy, host: &str, healthy: bool) -> Verdict {
        Verdict {
            uid: proxy.stored_uid().unwrap(),
            host: host.into(),
            port: 3128,
            healthy,
            latency: Some(Duration::from_millis(12)),
            class: ProbeClass::Success,
            message: String::new(),
        }
    }

    #[test]
    fn a_live_verdict_counts_before_the_status_says_so() {
        let proxy = mk_external("e", "192.0.2.1");
        let none = record_of(&proxy, None).unwrap();
        assert!(!none.healthy && none.phase == Phase::Pending);
        let live = record_of(&proxy, Some(&verdict(&proxy, "192.0.2.1", true))).unwrap();
        assert!(live.healthy && live.phase == Phase::Ready);
        assert_eq!(live.latency_millis, Some(12));
        assert_eq!(live.url().as_deref(), Some("http://192.0.2.1:3128"));
    }

    #[test]
    fn a_verdict_of_another_address_uid_or_of_a_failed_proxy_does_not_count() {
        let mut proxy = mk_external("e", "192.0.2.1");
        let other = verdict(&proxy, "192.0.2.2", true);
        assert!(!record_of(&proxy, Some(&other)).unwrap().healthy);
        let mut foreign = verdict(&proxy, "192.0.2.1", true);
        foreign.uid = egress_core::Uid::new("another");
        assert!(!record_of(&proxy, Some(&foreign)).unwrap().healthy);
        let mine = verdict(&proxy, "192.0.2.1", true);
        proxy.status = Some(egress_api::ProxyStatus {
            phase: Some("Failed".into()),
            ..Default::default()
        });
        assert!(!record_of(&proxy, Some(&mine)).unwrap().healthy);
    }

    #[test]
    fn an_invalid_spec_has_no_record() {
        let mut proxy = mk_managed("m", "fake-a");
        proxy.spec.port = 0;
        assert!(record_of(&proxy, None).is_err());
    }
}

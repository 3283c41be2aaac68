use std::time::Duration;

use egress_core::Uid;
use egress_health::ProbeClass;
use egress_provider::Step;

use super::*;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

fn verdict(healthy: bool, class: ProbeClass, latency: u64) -> Verdict {
    Verdict {
        uid: Uid::new("u"),
        host: "192.0.2.1".into(),
        port: 3128,
        healthy,
        latency: Some(Duration::from_millis(latency)),
        class,
        message: format!("{class}: {latency}"),
    }
}

fn probed() -> Rest {
    Rest::Probed {
        host: "192.0.2.1".into(),
        port: 3128,
        id: Some(ProviderId::new("x")),
        caveat: None,
    }
}

struct Sheet {
    status: ProxyStatus,
    now: i64,
    generation: i64,
    deleting: bool,
    shared: Option<ProxyKey>,
}

impl Sheet {
    fn new() -> Self {
        Self {
            status: ProxyStatus::default(),
            now: 100,
            generation: 1,
            deleting: false,
            shared: None,
        }
    }

    fn next(&mut self, rest: &Rest, verdict: Option<&Verdict>) -> bool {
        self.now += 10;
        let new = next(&Input {
            previous: &self.status,
            rest,
            verdict,
            shared_with: self.shared.as_ref(),
            port: 3128,
            generation: Some(self.generation),
            deleting: self.deleting,
            now: at(self.now),
        });
        let changed = new != self.status;
        self.status = new;
        changed
    }

    #[track_caller]
    fn says(&self, type_: &str, status: &str, reason: &str) {
        let c = self
            .status
            .conditions
            .iter()
            .find(|c| c.type_ == type_)
            .unwrap_or_else(|| panic!("no {type_} in {:?}", self.status));
        assert_eq!(
            (c.status.as_str(), c.reason.as_str()),
            (status, reason),
            "{c:?}"
        );
    }
}

fn failure(class: ErrorClass, during: During) -> Rest {
    Rest::Failed(Failure {
        class,
        message: "fake-a: get x: connection refused".into(),
        during,
    })
}

#[test]
fn the_life_of_a_proxy_in_phases() {
    let mut s = Sheet::new();
    s.next(
        &Rest::Provisioning {
            id: ProviderId::new("x"),
            step: Step::FetchingImage("42%".into()),
        },
        None,
    );
    assert_eq!(s.status.phase(), Phase::Provisioning);
    s.says("Provisioned", "False", "FetchingImage");
    s.says("Ready", "False", "FetchingImage");
    s.says("Healthy", "Unknown", "NotProbed");
    // Running without a verdict is still provisioning.
    s.next(&probed(), None);
    assert_eq!(s.status.phase(), Phase::Provisioning);
    assert_eq!(s.status.ip.as_deref(), Some("192.0.2.1"));
    s.says("Provisioned", "True", "Running");
    s.says("Healthy", "Unknown", "AwaitingFirstProbe");
    s.next(&probed(), Some(&verdict(true, ProbeClass::Success, 12)));
    assert_eq!(s.status.phase(), Phase::Ready);
    assert_eq!(s.status.latency_millis, Some(12));
    s.says("Ready", "True", "Ready");
    s.next(&probed(), Some(&verdict(false, ProbeClass::Timeout, 12)));
    assert_eq!(s.status.phase(), Phase::Unhealthy);
    s.says("Ready", "False", "Timeout");
    s.next(&Rest::Draining(Why::Stopped), None);
    assert_eq!(s.status.phase(), Phase::Provisioning);
    assert_eq!((&s.status.ip, s.status.latency_millis), (&None, None));
    s.deleting = true;
    s.next(&Rest::Draining(Why::ProxyDeleted), None);
    assert_eq!(s.status.phase(), Phase::Deleting);
    s.says("Ready", "False", "Deleting");
}

#[test]
fn nothing_new_is_no_change() {
    let mut s = Sheet::new();
    let ok = verdict(true, ProbeClass::Success, 100);
    assert!(s.next(&probed(), Some(&ok)));
    assert!(!s.next(&probed(), Some(&ok)));
    // A little slower, a probe that failed once, the restart of the operator: no writes.
    assert!(!s.next(&probed(), Some(&verdict(true, ProbeClass::Timeout, 119))));
    assert!(!s.next(&probed(), None));
    assert!(!s.next(&Rest::Held, Some(&ok)));
    // Materially slower is one write.
    assert!(s.next(&probed(), Some(&verdict(true, ProbeClass::Success, 160))));
    assert_eq!(s.status.latency_millis, Some(160));
    // Unhealthy in other words is none.
    assert!(s.next(&probed(), Some(&verdict(false, ProbeClass::Io, 1))));
    assert!(!s.next(&probed(), Some(&verdict(false, ProbeClass::Io, 2))));
    assert!(s.next(&probed(), Some(&verdict(false, ProbeClass::Tls, 2))));
}

#[test]
fn every_state_is_stable_when_repeated() {
    let rests = [
        Rest::Invalid("spec.port".into()),
        probed(),
        Rest::Provisioning {
            id: ProviderId::new("x"),
            step: Step::Creating("x".into()),
        },
        Rest::Recreating,
        Rest::NoUserData("none".into()),
        Rest::NotConfigured {
            provider: "a".into(),
            holds_instance: false,
        },
        Rest::Draining(Why::SpecChanged),
        failure(ErrorClass::Transient, During::Look),
        failure(ErrorClass::Transient, During::Create),
        failure(ErrorClass::Transient, During::Delete),
        failure(ErrorClass::QuotaExceeded, During::Create),
        failure(ErrorClass::Permanent, During::Create),
        failure(ErrorClass::Permanent, During::Look),
        Rest::Held,
    ];
    let verdicts = [
        None,
        Some(verdict(true, ProbeClass::Success, 5)),
        Some(verdict(false, ProbeClass::Dial, 5)),
    ];
    for from in &rests {
        for to in &rests {
            for v in &verdicts {
                let mut s = Sheet::new();
                s.next(from, v.as_ref());
                s.next(to, v.as_ref());
                assert!(
                    !s.next(to, v.as_ref()),
                    "{from:?}, {to:?}, {v:?}: {:?}",
                    s.status
                );
                // And waiting an error out says nothing new either.
                if matches!(to, Rest::Failed(_)) {
                    assert!(
                        !s.next(&Rest::Held, v.as_ref()),
                        "{to:?}, {v:?}: {:?}",
                        s.status
                    );
                }
            }
        }
    }
}

#[test]
fn the_generation_is_always_observed() {
    let mut s = Sheet::new();
    let ok = verdict(true, ProbeClass::Success, 100);
    s.next(&probed(), Some(&ok));
    let since: Vec<_> = s
        .status
        .conditions
        .iter()
        .map(|c| c.last_transition_time.clone())
        .collect();
    s.generation = 2;
    assert!(s.next(&probed(), Some(&ok)));
    assert_eq!(s.status.observed_generation, Some(2));
    for (c, since) in s.status.conditions.iter().zip(since) {
        assert_eq!(c.observed_generation, Some(2), "{c:?}");
        assert_eq!(c.last_transition_time, since, "{c:?}");
    }
}

#[test]
fn a_host_that_went_down_shows_and_the_prober_goes_on() {
    let mut s = Sheet::new();
    let ok = verdict(true, ProbeClass::Success, 100);
    s.next(&probed(), Some(&ok));
    s.next(&failure(ErrorClass::Transient, During::Look), Some(&ok));
    assert_eq!(s.status.phase(), Phase::Ready);
    s.says("ProviderReachable", "False", "TransientError");
    s.says("Provisioned", "True", "Running");
    let down = verdict(false, ProbeClass::Dial, 100);
    s.next(&Rest::Held, Some(&down));
    assert_eq!(s.status.phase(), Phase::Unhealthy);
    s.says("ProviderReachable", "False", "TransientError");
    s.next(&probed(), Some(&ok));
    s.says("ProviderReachable", "True", "Reached");
    assert_eq!(s.status.phase(), Phase::Ready);
}

#[test]
fn errors_show_by_their_class() {
    for (class, phase, reason, reachable) in [
        (
            ErrorClass::Permanent,
            Phase::Failed,
            "ProviderError",
            "True",
        ),
        (
            ErrorClass::QuotaExceeded,
            Phase::Pending,
            "QuotaExceeded",
            "True",
        ),
        (
            ErrorClass::Transient,
            Phase::Pending,
            "ProviderError",
            "False",
        ),
    ] {
        let mut s = Sheet::new();
        s.next(&failure(class, During::Create), None);
        assert_eq!(s.status.phase(), phase, "{class}");
        s.says("Provisioned", "False", reason);
        let c = s
            .status
            .conditions
            .iter()
            .find(|c| c.type_ == "ProviderReachable")
            .unwrap();
        assert_eq!(c.status, reachable, "{class}");
    }
}

#[test]
fn the_younger_of_two_with_one_address_is_not_healthy() {
    let mut s = Sheet::new();
    s.shared = Some(ProxyKey::new("default", "older"));
    s.next(&probed(), Some(&verdict(true, ProbeClass::Success, 5)));
    assert_eq!(s.status.phase(), Phase::Unhealthy);
    s.says("Healthy", "False", "AddressInUse");
    s.shared = None;
    s.next(&probed(), Some(&verdict(true, ProbeClass::Success, 5)));
    assert_eq!(s.status.phase(), Phase::Ready);
}

#[test]
fn a_new_address_starts_the_health_state_over() {
    let mut s = Sheet::new();
    s.next(&probed(), Some(&verdict(true, ProbeClass::Success, 5)));
    let moved = Rest::Probed {
        host: "192.0.2.2".into(),
        port: 3128,
        id: Some(ProviderId::new("x")),
        caveat: None,
    };
    s.next(&moved, None);
    assert_eq!(s.status.phase(), Phase::Provisioning);
    assert_eq!(s.status.latency_millis, None);
    s.says("Healthy", "Unknown", "AwaitingFirstProbe");
}

#[test]
fn a_port_is_shown_only_where_it_differs_from_the_spec() {
    let mut s = Sheet::new();
    s.next(&probed(), None);
    assert_eq!(s.status.port, None);
    s.next(
        &Rest::Probed {
            host: "127.0.0.1".into(),
            port: 40_000,
            id: Some(ProviderId::new("x")),
            caveat: None,
        },
        None,
    );
    assert_eq!(s.status.port, Some(40_000));
}

//! From the state a Proxy rests in to its status: pure, and equal to what was there when nothing
//! changed, so that it is written on change only.

use egress_api::{ConditionChange, ConditionType, ProxyStatus, set_condition};
use egress_core::{ErrorClass, Phase, ProviderId, ProxyKey};
use egress_health::Verdict;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

#[cfg(test)]
use crate::plan::Why;
use crate::plan::{During, Failure, Rest};

/// A latency is written when it differs from the last one written by more than half of it...
const MATERIAL_RATIO: f64 = 0.5;
/// ...and by more than that.
const MATERIAL_MILLIS: i64 = 20;

/// What a status is made from, beside the one before.
pub(crate) struct Input<'a> {
    pub previous: &'a ProxyStatus,
    pub rest: &'a Rest,
    /// Of the address that the Proxy has now.
    pub verdict: Option<&'a Verdict>,
    /// An older Proxy that has the same address.
    pub shared_with: Option<&'a ProxyKey>,
    /// `spec.port`.
    pub port: i32,
    pub generation: Option<i64>,
    pub deleting: bool,
    pub now: Timestamp,
}

struct Say {
    status: Option<bool>,
    reason: &'static str,
    message: String,
}

fn say(status: bool, reason: &'static str, message: impl Into<String>) -> Say {
    Say {
        status: Some(status),
        reason,
        message: message.into(),
    }
}

/// The address part of a status.
enum Address {
    Keep,
    Nothing,
    Is { host: String, port: i32 },
}

struct Outlook {
    /// None: as the verdict says.
    phase: Option<Phase>,
    address: Address,
    id: Option<Option<ProviderId>>,
    provisioned: Option<Say>,
    reachable: Option<Say>,
}

/// The status that `input` leads to.
pub(crate) fn next(input: &Input<'_>) -> ProxyStatus {
    let previous = input.previous;
    let mut outlook = outlook(input);
    let mut status = previous.clone();
    status.observed_generation = input.generation;
    if let Some(id) = outlook.id.take() {
        status.provider_id = id.map(|id| id.as_str().to_owned());
    }
    match &outlook.address {
        Address::Keep => {}
        Address::Nothing => {
            status.ip = None;
            status.port = None;
        }
        Address::Is { host, port } => {
            status.ip = Some(host.clone());
            status.port = Some(*port).filter(|port| *port != input.port);
        }
    }
    let healthy = healthy(input, &status);
    let phase = outlook.phase.unwrap_or(match &healthy {
        Some(said) => match said.status {
            Some(true) => Phase::Ready,
            Some(false) => Phase::Unhealthy,
            None => Phase::Provisioning,
        },
        None => previous.phase(),
    });
    status.phase = Some(phase.as_str().to_owned());
    status.latency_millis = latency(input, &status);
    let mut put = |type_: ConditionType, said: Option<Say>| {
        let Some(said) = said else { return };
        set_condition(
            &mut status.conditions,
            &ConditionChange {
                type_,
                status: said.status,
                reason: said.reason,
                message: &said.message,
            },
            input.generation,
            input.now,
        );
    };
    put(ConditionType::Provisioned, outlook.provisioned.take());
    put(ConditionType::ProviderReachable, outlook.reachable.take());
    put(ConditionType::Healthy, healthy);
    for condition in &mut status.conditions {
        // What is kept was looked at too.
        condition.observed_generation = input.generation;
    }
    let ready = ready(phase, &status.conditions);
    set_condition(
        &mut status.conditions,
        &ConditionChange {
            type_: ConditionType::Ready,
            status: Some(ready.0),
            reason: &ready.1,
            message: &ready.2,
        },
        input.generation,
        input.now,
    );
    status
}

fn outlook(input: &Input<'_>) -> Outlook {
    let reached = || Some(say(true, "Reached", "the provider answers"));
    let none = Outlook {
        phase: None,
        address: Address::Keep,
        id: None,
        provisioned: None,
        reachable: None,
    };
    match input.rest {
        Rest::Gone => Outlook {
            phase: Some(Phase::Deleting),
            ..none
        },
        Rest::Invalid(why) => Outlook {
            phase: Some(Phase::Failed),
            provisioned: Some(say(false, "InvalidSpec", why.clone())),
            ..none
        },
        Rest::Probed {
            host,
            port,
            id,
            caveat,
        } => Outlook {
            phase: None,
            address: Address::Is {
                host: host.clone(),
                port: i32::from(*port),
            },
            id: Some(id.clone()),
            provisioned: Some(match (id, caveat) {
                (None, _) => say(
                    true,
                    "External",
                    "somebody else's proxy: only probed and leased",
                ),
                (Some(_), None) => say(true, "Running", "the instance has an address"),
                (Some(_), Some(caveat)) => say(
                    true,
                    "CloudInitError",
                    format!("the instance runs, but could not be made anew: {caveat}"),
                ),
            }),
            reachable: id.is_some().then(reached).flatten(),
        },
        Rest::Provisioning { id, step } => Outlook {
            phase: Some(Phase::Provisioning),
            address: Address::Nothing,
            id: Some(Some(id.clone())),
            provisioned: Some(say(false, step.reason(), step.message())),
            reachable: reached(),
        },
        Rest::Empty => Outlook {
            phase: Some(if input.deleting {
                Phase::Deleting
            } else {
                Phase::Provisioning
            }),
            address: Address::Nothing,
            id: Some(None),
            provisioned: Some(say(false, "Creating", "there is no instance yet")),
            reachable: reached(),
        },
        Rest::Recreating => Outlook {
            phase: Some(Phase::Provisioning),
            address: Address::Nothing,
            provisioned: Some(say(
                false,
                "Recreating",
                "the instance was lost several times in a row: the next one waits a little",
            )),
            ..none
        },
        Rest::NoUserData(fault) => Outlook {
            phase: Some(Phase::Pending),
            address: Address::Nothing,
            provisioned: Some(say(false, "CloudInitError", fault.clone())),
            ..none
        },
        Rest::NotConfigured {
            provider,
            holds_instance,
        } => not_configured(input, provider, *holds_instance, none),
        Rest::Draining(why) => Outlook {
            phase: Some(if input.deleting {
                Phase::Deleting
            } else {
                Phase::Provisioning
            }),
            address: Address::Nothing,
            provisioned: Some(say(
                false,
                if input.deleting {
                    "Deleting"
                } else {
                    "Replacing"
                },
                format!("the instance is being deleted: {}", why.sentence()),
            )),
            reachable: reached(),
            ..none
        },
        Rest::Failed(failure) => failed(input, failure, none),
        Rest::Held => Outlook {
            phase: if input.deleting {
                Some(Phase::Deleting)
            } else {
                phase_as_before(input.previous)
            },
            ..none
        },
    }
}

fn not_configured(
    input: &Input<'_>,
    provider: &str,
    holds_instance: bool,
    base: Outlook,
) -> Outlook {
    let message = match (input.deleting, holds_instance) {
        (true, _) => format!(
            "provider {provider:?} is not configured, and may still have the instance: configure \
             it again, or set the annotation {}: \"true\" to abandon the instance",
            egress_api::SKIP_CLEANUP_ANNOTATION
        ),
        (false, true) => format!(
            "provider {provider:?}, which the present instance was made by, is not configured: \
             the instance cannot be replaced until it is"
        ),
        (false, false) => format!(
            "provider {provider:?} is not configured: add it to the providers file, or change \
             spec.provider"
        ),
    };
    Outlook {
        phase: Some(if input.deleting {
            Phase::Deleting
        } else {
            Phase::Failed
        }),
        provisioned: Some(say(false, "ProviderNotConfigured", message)),
        ..base
    }
}

fn failed(input: &Input<'_>, failure: &Failure, base: Outlook) -> Outlook {
    let message = failure.message.clone();
    let reachable = Some(match failure.class {
        ErrorClass::Transient => say(false, "TransientError", message.clone()),
        _ => say(true, "Reached", "the provider answers"),
    });
    let provisioned = match failure.class {
        ErrorClass::QuotaExceeded => say(false, "QuotaExceeded", message),
        _ => say(false, "ProviderError", message),
    };
    if input.deleting {
        return Outlook {
            phase: Some(Phase::Deleting),
            provisioned: Some(provisioned),
            reachable,
            ..base
        };
    }
    match (failure.class, failure.during) {
        (ErrorClass::Permanent, _) => Outlook {
            phase: Some(Phase::Failed),
            provisioned: Some(provisioned),
            reachable,
            ..base
        },
        // The instance cannot be looked at now, and goes on as far as the prober can tell.
        // A background step that met a full host is told all the same.
        (class, During::Look) => Outlook {
            phase: phase_as_before(input.previous),
            provisioned: (class == ErrorClass::QuotaExceeded).then_some(provisioned),
            reachable,
            ..base
        },
        (_, During::Create) => Outlook {
            phase: Some(Phase::Pending),
            address: Address::Nothing,
            provisioned: Some(provisioned),
            reachable,
            ..base
        },
        (_, During::Delete) => Outlook {
            phase: Some(Phase::Provisioning),
            address: Address::Nothing,
            provisioned: Some(provisioned),
            reachable,
            ..base
        },
    }
}

/// What has an address follows the prober (None); the rest stays.
fn phase_as_before(previous: &ProxyStatus) -> Option<Phase> {
    if has_usable_address(previous) {
        return None;
    }
    Some(previous.phase())
}

/// An address of an instance that is not known to have failed.
pub(crate) fn has_usable_address(status: &ProxyStatus) -> bool {
    status.ip.is_some()
        && matches!(
            status.phase(),
            Phase::Ready | Phase::Unhealthy | Phase::Provisioning
        )
}

/// The `Healthy` condition; None: what is there stays.
fn healthy(input: &Input<'_>, status: &ProxyStatus) -> Option<Say> {
    let not_probed = |why: &str| {
        Some(Say {
            status: None,
            reason: "NotProbed",
            message: why.to_owned(),
        })
    };
    if input.deleting {
        return not_probed("the Proxy is being deleted");
    }
    if !is_probed(input.rest, input.previous) {
        return not_probed("there is no instance with an address");
    }
    if let Some(older) = input.shared_with {
        return Some(say(
            false,
            "AddressInUse",
            format!("{older}, which is older, has the same address: only that one is leased"),
        ));
    }
    let before = input
        .previous
        .conditions
        .iter()
        .find(|c| c.type_ == ConditionType::Healthy.as_str());
    match input.verdict {
        Some(verdict) if verdict.healthy => Some(say(
            true,
            "ProbeSucceeded",
            "a request through the proxy succeeded",
        )),
        Some(verdict) => {
            let reason = verdict.class.reason();
            // Within one reason the first message stays: no write for each new wording.
            let message = before
                .filter(|c| c.status == "False" && c.reason == reason)
                .map_or_else(|| verdict.message.clone(), |c| c.message.clone());
            Some(say(false, reason, message))
        }
        None => {
            let same_address = input.previous.ip == status.ip && input.previous.port == status.port;
            let known = before.is_some_and(|c| c.status != "Unknown" && c.reason != "AddressInUse");
            let settled = matches!(input.previous.phase(), Phase::Ready | Phase::Unhealthy);
            if same_address && known && settled {
                // The operator was restarted: what was last known stands until the first probe.
                return before.map(|c| Say {
                    status: Some(c.status == "True"),
                    reason: static_reason(&c.reason),
                    message: c.message.clone(),
                });
            }
            Some(Say {
                status: None,
                reason: "AwaitingFirstProbe",
                message: "the first probe has not ended yet".to_owned(),
            })
        }
    }
}

fn static_reason(reason: &str) -> &'static str {
    use egress_health::ProbeClass as C;
    [
        C::Success,
        C::Dial,
        C::ConnectRefused,
        C::AuthRequired,
        C::Tls,
        C::Timeout,
        C::UnexpectedStatus,
        C::Io,
    ]
    .into_iter()
    .map(C::reason)
    .find(|known| *known == reason)
    .unwrap_or("ProbeSucceeded")
}

/// Whether the prober is to look at a Proxy that rests so and had that status before.
pub(crate) fn is_probed(rest: &Rest, previous: &ProxyStatus) -> bool {
    match rest {
        Rest::Probed { .. } => true,
        Rest::Held => has_usable_address(previous),
        Rest::Failed(failure) => {
            failure.class != ErrorClass::Permanent
                && failure.during == During::Look
                && has_usable_address(previous)
        }
        _ => false,
    }
}

fn latency(input: &Input<'_>, status: &ProxyStatus) -> Option<i64> {
    status.ip.as_ref()?;
    let old = input
        .previous
        .latency_millis
        .filter(|_| input.previous.ip == status.ip && input.previous.port == status.port);
    let new = input
        .verdict
        .and_then(|v| v.latency)
        .map(|l| i64::try_from(l.as_millis()).unwrap_or(i64::MAX));
    match (old, new) {
        (Some(old), Some(new)) if !is_material(old, new) => Some(old),
        (_, Some(new)) => Some(new),
        (old, None) => old,
    }
}

#[allow(
    clippy::cast_precision_loss,
    reason = "milliseconds of a probe are far below 2^52"
)]
fn is_material(old: i64, new: i64) -> bool {
    let difference = old.abs_diff(new);
    difference > MATERIAL_MILLIS.unsigned_abs()
        && difference as f64 > old.max(1) as f64 * MATERIAL_RATIO
}

/// The summary: what keeps it from being ready is the first condition that is not True.
fn ready(phase: Phase, conditions: &[Condition]) -> (bool, String, String) {
    if phase == Phase::Ready {
        return (true, "Ready".to_owned(), "the proxy can be used".to_owned());
    }
    if phase == Phase::Deleting {
        return (
            false,
            "Deleting".to_owned(),
            "the Proxy is being deleted".to_owned(),
        );
    }
    [
        ConditionType::Provisioned,
        ConditionType::ProviderReachable,
        ConditionType::Healthy,
    ]
    .into_iter()
    .find_map(|type_| {
        conditions
            .iter()
            .find(|c| c.type_ == type_.as_str() && c.status != "True")
    })
    .map_or_else(
        || (false, phase.as_str().to_owned(), String::new()),
        |c| (false, c.reason.clone(), c.message.clone()),
    )
}

#[cfg(test)]
#[path = "status_tests.rs"]
mod tests;

//! Conditions by the Kubernetes API conventions.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

/// The conditions of a Proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ConditionType {
    /// The summary, for `kubectl wait --for=condition=Ready`.
    Ready,
    /// The backing instance exists and has an address.
    Provisioned,
    /// The probe's verdict: True only when a request through the proxy succeeded.
    Healthy,
    /// False while the provider answers with transient errors.
    ProviderReachable,
}

impl ConditionType {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ready => "Ready",
            Self::Provisioned => "Provisioned",
            Self::Healthy => "Healthy",
            Self::ProviderReachable => "ProviderReachable",
        }
    }
}

/// What a condition is to say from now on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConditionChange<'a> {
    pub type_: ConditionType,
    /// None: `Unknown`.
    pub status: Option<bool>,
    /// CamelCase.
    pub reason: &'a str,
    /// For people.
    pub message: &'a str,
}

/// Sets a condition; `lastTransitionTime` moves only when the status really changes. The list stays
/// sorted by type, so that equal conditions compare equal.
pub fn set_condition(
    conditions: &mut Vec<Condition>,
    change: &ConditionChange<'_>,
    generation: Option<i64>,
    now: Timestamp,
) {
    let status = match change.status {
        Some(true) => "True",
        Some(false) => "False",
        None => "Unknown",
    };
    let since = conditions
        .iter()
        .find(|c| c.type_ == change.type_.as_str() && c.status == status)
        .map_or_else(|| whole_seconds(now), |c| c.last_transition_time.clone());
    conditions.retain(|c| c.type_ != change.type_.as_str());
    conditions.push(Condition {
        type_: change.type_.as_str().to_owned(),
        status: status.to_owned(),
        reason: change.reason.to_owned(),
        message: change.message.to_owned(),
        last_transition_time: since,
        observed_generation: generation,
    });
    conditions.sort_by(|a, b| a.type_.cmp(&b.type_));
}

/// The API keeps `Time` in whole seconds; a fraction would make what was written differ from what
/// is read back, and cause a write each time.
fn whole_seconds(now: Timestamp) -> Time {
    Time(Timestamp::from_second(now.as_second()).unwrap_or(now))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn healthy(status: bool, reason: &str) -> ConditionChange<'_> {
        ConditionChange {
            type_: ConditionType::Healthy,
            status: Some(status),
            reason,
            message: "",
        }
    }

    #[test]
    fn the_transition_time_moves_only_on_a_transition() {
        let mut list = Vec::new();
        let at = |s| Timestamp::from_second(s).unwrap();
        set_condition(
            &mut list,
            &healthy(true, "ProbeSucceeded"),
            Some(1),
            at(100),
        );
        set_condition(&mut list, &healthy(true, "OtherReason"), Some(2), at(200));
        assert_eq!(list[0].last_transition_time.0, at(100));
        assert_eq!(list[0].reason, "OtherReason");
        assert_eq!(list[0].observed_generation, Some(2));
        set_condition(&mut list, &healthy(false, "Timeout"), Some(2), at(300));
        assert_eq!(list.len(), 1);
        assert_eq!(list[0].last_transition_time.0, at(300));
    }
}

//! The health of one proxy: thresholds, the verdict, and when it is worth telling. No I/O, no time.

use std::collections::VecDeque;
use std::time::Duration;

use egress_core::spec::HealthCheck;

use crate::contract::ProbeClass;
use crate::prober::Outcome;

/// What a result changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// Nothing that anybody must hear of.
    None,
    /// The verdict, or its class.
    Verdict,
    /// Only the latency, materially.
    Latency,
}

/// Where one proxy stands.
#[derive(Debug, Clone, Default)]
pub(crate) struct Standing {
    successes: u32,
    failures: u32,
    verdict: Option<bool>,
    class: Option<ProbeClass>,
    message: String,
    /// As last told.
    latency: Option<Duration>,
    /// Latencies of the last successes since it turned healthy, at most [`RECENT`].
    recent: VecDeque<Duration>,
    /// Classes told since it turned unhealthy: each is told once, so that two that take turns
    /// do not write for ever.
    told: Vec<ProbeClass>,
    /// What was said of the other proxies when it turned unhealthy.
    others: Option<String>,
}

impl Standing {
    pub(crate) fn healthy(&self) -> Option<bool> {
        self.verdict
    }

    pub(crate) fn class(&self) -> Option<ProbeClass> {
        self.class
    }

    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    pub(crate) fn latency(&self) -> Option<Duration> {
        self.latency
    }

    /// A failure now would be the first of a row.
    pub(crate) fn at_rest(&self) -> bool {
        self.failures == 0
    }

    /// The check is another one: what was counted under the old one counts no more, the verdict
    /// stays until the new one has given its own.
    pub(crate) fn restart_counts(&mut self) {
        self.successes = 0;
        self.failures = 0;
    }

    /// Takes one result in; `others` says how many other proxies fail the same way.
    pub(crate) fn apply(
        &mut self,
        check: &HealthCheck,
        outcome: &Outcome,
        others: Option<String>,
    ) -> Change {
        if outcome.class == ProbeClass::Success {
            self.succeed(check, outcome)
        } else {
            self.fail(check, outcome, others)
        }
    }

    fn succeed(&mut self, check: &HealthCheck, outcome: &Outcome) -> Change {
        self.failures = 0;
        self.successes = self.successes.saturating_add(1);
        let turned = match self.verdict {
            None => true,
            Some(false) => self.successes >= check.success_threshold,
            Some(true) => false,
        };
        if turned {
            self.verdict = Some(true);
            self.latency = outcome.latency;
            self.recent.clear();
            self.told.clear();
            self.others = None;
        }
        if self.verdict != Some(true) {
            return Change::None;
        }
        self.note(outcome);
        if turned {
            return Change::Verdict;
        }
        let Some(now) = outcome
            .latency
            .and_then(|latency| self.usual_latency(latency))
        else {
            return Change::None;
        };
        if self.latency.is_some_and(|told| !is_material(told, now)) {
            return Change::None;
        }
        self.latency = Some(now);
        Change::Latency
    }

    /// The median of the last few, once there are enough: one slow probe, or a busy minute of the
    /// operator's own machine, is no change of the proxy's and must not write to the API.
    fn usual_latency(&mut self, latest: Duration) -> Option<Duration> {
        if self.recent.len() == RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back(latest);
        let mut sorted: Vec<Duration> = self.recent.iter().copied().collect();
        sorted.sort_unstable();
        (sorted.len() == RECENT).then(|| sorted[RECENT / 2])
    }

    fn fail(&mut self, check: &HealthCheck, outcome: &Outcome, others: Option<String>) -> Change {
        self.successes = 0;
        self.failures = self.failures.saturating_add(1);
        let turned = match self.verdict {
            None => true,
            Some(true) => self.failures >= check.failure_threshold,
            Some(false) => false,
        };
        if turned {
            self.verdict = Some(false);
            self.told.clear();
            self.others = others;
        }
        if self.verdict != Some(false) {
            return Change::None;
        }
        let new_class = !self.told.contains(&outcome.class);
        if new_class {
            self.told.push(outcome.class);
        }
        self.note(outcome);
        if new_class {
            Change::Verdict
        } else {
            Change::None
        }
    }

    fn note(&mut self, outcome: &Outcome) {
        self.class = Some(outcome.class);
        self.message = match &self.others {
            Some(others) => format!("{}: {}; {others}", outcome.class, outcome.detail),
            None => format!("{}: {}", outcome.class, outcome.detail),
        };
    }
}

/// How many latencies the usual one is taken from.
const RECENT: usize = 5;

/// More than 50 % and more than 20 ms from what was told.
fn is_material(told: Duration, now: Duration) -> bool {
    let difference = told.abs_diff(now);
    difference > told / 2 && difference > Duration::from_millis(20)
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    pub(crate) fn check(success: u32, failure: u32) -> HealthCheck {
        HealthCheck {
            url: "https://target.example/".parse().unwrap(),
            interval: Duration::from_secs(10),
            timeout: Duration::from_secs(5),
            success_threshold: success,
            failure_threshold: failure,
            expected_status: 204,
        }
    }

    fn good(millis: u64) -> Outcome {
        Outcome::success(204, Duration::from_millis(millis))
    }

    fn bad(class: ProbeClass) -> Outcome {
        Outcome::failure(class, "x")
    }

    #[test]
    fn the_first_result_is_a_verdict_at_once() {
        let mut up = Standing::default();
        assert_eq!(up.apply(&check(3, 3), &good(5), None), Change::Verdict);
        assert_eq!(up.healthy(), Some(true));
        let mut down = Standing::default();
        let failed = bad(ProbeClass::Dial);
        assert_eq!(down.apply(&check(3, 3), &failed, None), Change::Verdict);
        assert_eq!(down.healthy(), Some(false));
        assert_eq!(down.message(), "dial: x");
    }

    #[test]
    fn thresholds_count_results_in_a_row() {
        let check = check(2, 3);
        let mut one = Standing::default();
        one.apply(&check, &good(5), None);
        for results in ["fgff", "ffgff"] {
            for result in results.chars() {
                let outcome = if result == 'g' {
                    good(5)
                } else {
                    bad(ProbeClass::Io)
                };
                assert_eq!(one.apply(&check, &outcome, None), Change::None);
                assert_eq!(one.healthy(), Some(true));
                assert_eq!(
                    one.message(),
                    "success: 204",
                    "the verdict's own message stays"
                );
            }
            one.apply(&check, &good(5), None);
        }
        for _ in 0..2 {
            assert_eq!(one.apply(&check, &bad(ProbeClass::Io), None), Change::None);
        }
        assert_eq!(
            one.apply(&check, &bad(ProbeClass::Io), None),
            Change::Verdict
        );
        assert_eq!(one.healthy(), Some(false));
        for result in [good(5), bad(ProbeClass::Io), good(5)] {
            assert_eq!(one.apply(&check, &result, None), Change::None);
        }
        assert_eq!(one.apply(&check, &good(5), None), Change::Verdict);
        assert_eq!(one.healthy(), Some(true));
    }

    /// What is told when the latency is this for good.
    #[track_caller]
    fn settle(one: &mut Standing, millis: u64) -> Vec<Change> {
        (0..RECENT)
            .map(|_| one.apply(&check(1, 3), &good(millis), None))
            .collect()
    }

    #[test]
    fn a_latency_is_told_when_it_changed_by_half_and_by_20_ms() {
        let mut one = Standing::default();
        one.apply(&check(1, 3), &good(10), None);
        for (millis, told) in [
            (30, 10),
            (31, 31),
            (11, 31),
            (10, 10),
            (100, 100),
            (150, 100),
            (151, 151),
        ] {
            let changes = settle(&mut one, millis);
            let times = changes.iter().filter(|c| **c == Change::Latency).count();
            assert!(times <= 1, "{millis}: {changes:?}");
            assert_eq!(one.latency(), Some(Duration::from_millis(told)), "{millis}");
        }
    }

    #[test]
    fn slow_probes_now_and_then_are_not_told() {
        let mut one = Standing::default();
        one.apply(&check(1, 3), &good(10), None);
        settle(&mut one, 10);
        for millis in [400, 10, 10, 700, 10, 10, 10, 300, 300, 10, 10, 10] {
            assert_eq!(
                one.apply(&check(1, 3), &good(millis), None),
                Change::None,
                "{millis}"
            );
        }
    }

    #[test]
    fn another_reason_is_told_once_while_unhealthy() {
        let mut one = Standing::default();
        let mut told = Vec::new();
        for class in [
            ProbeClass::Dial,
            ProbeClass::Timeout,
            ProbeClass::AuthRequired,
        ]
        .into_iter()
        .cycle()
        .take(30)
        {
            if one.apply(&check(1, 3), &bad(class), None) == Change::Verdict {
                told.push(class);
            }
            assert_eq!(one.class(), Some(class));
        }
        assert_eq!(
            told,
            [
                ProbeClass::Dial,
                ProbeClass::Timeout,
                ProbeClass::AuthRequired
            ]
        );
    }

    #[test]
    fn what_was_said_of_the_others_stays_until_it_is_healthy() {
        let mut one = Standing::default();
        one.apply(&check(1, 1), &good(5), None);
        one.apply(
            &check(1, 1),
            &bad(ProbeClass::Dial),
            Some("and 4 of 4 others".into()),
        );
        assert_eq!(one.message(), "dial: x; and 4 of 4 others");
        one.apply(&check(1, 1), &bad(ProbeClass::Dial), None);
        assert_eq!(one.message(), "dial: x; and 4 of 4 others");
        one.apply(&check(1, 1), &good(5), None);
        assert_eq!(one.message(), "success: 204");
    }

    proptest! {
        /// Against the sentence of the specification, computed from the whole history each time.
        #[test]
        fn verdicts_follow_the_history(
            results in proptest::collection::vec(any::<bool>(), 1..60),
            success in 1u32..4,
            failure in 1u32..4,
        ) {
            let check = check(success, failure);
            let mut one = Standing::default();
            let mut expected = results[0];
            for end in 1..=results.len() {
                let outcome = if results[end - 1] { good(5) } else { bad(ProbeClass::Io) };
                let before = one.healthy();
                let change = one.apply(&check, &outcome, None);
                let wanted = if expected { failure } else { success } as usize;
                if end >= wanted && results[end - wanted..end].iter().all(|r| *r != expected) {
                    expected = !expected;
                }
                prop_assert_eq!(one.healthy(), Some(expected));
                prop_assert_eq!(change == Change::Verdict, before != Some(expected));
            }
        }
    }
}

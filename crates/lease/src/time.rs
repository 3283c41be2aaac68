//! The two clocks of a lease.
//!
//! While the operator runs, a lease ends by a clock that only moves forward and counts the time
//! that a machine sleeps (`CLOCK_BOOTTIME`): setting the wall clock neither ends nor revives one.
//! On disk there are both: after a restart within one boot the boot-time instants go on counting,
//! after a reboot, when they mean nothing any more, the wall-clock ones do (see `remaining_ms`).

use std::sync::Arc;
use std::time::Duration;

use egress_core::Clock;
use jiff::{SignedDuration, Timestamp};

/// A clock that never goes backwards.
pub trait Monotonic: Send + Sync + 'static {
    /// Time since some fixed instant.
    fn elapsed(&self) -> Duration;

    /// Names that instant: what two processes measured can be compared when this is equal. Empty
    /// when it is not known, and then equal to nothing.
    fn epoch(&self) -> String;
}

/// `CLOCK_BOOTTIME`: monotonic, suspend included (clock_gettime(2)).
#[derive(Debug, Clone, Copy, Default)]
pub struct BootTime;

impl Monotonic for BootTime {
    fn elapsed(&self) -> Duration {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        // Both are never negative for this clock.
        Duration::new(
            u64::try_from(now.tv_sec).unwrap_or(0),
            u32::try_from(now.tv_nsec).unwrap_or(0),
        )
    }

    /// The kernel's id of this boot (random(4)).
    fn epoch(&self) -> String {
        std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
            .map(|id| id.trim().to_owned())
            .unwrap_or_default()
    }
}

/// Where a store's time comes from.
#[derive(Clone)]
pub struct Time {
    wall: Arc<dyn Clock>,
    monotonic: Arc<dyn Monotonic>,
}

impl Time {
    pub fn new(wall: Arc<dyn Clock>, monotonic: Arc<dyn Monotonic>) -> Self {
        Self { wall, monotonic }
    }

    pub(crate) fn now(&self) -> Now {
        Now {
            mono: Mono(i64::try_from(self.monotonic.elapsed().as_millis()).unwrap_or(i64::MAX)),
            wall: to_millis(self.wall.now()),
        }
    }

    pub(crate) fn epoch(&self) -> String {
        self.monotonic.epoch()
    }
}

/// This wall clock, beside the machine's boot-time clock.
impl From<Arc<dyn Clock>> for Time {
    fn from(wall: Arc<dyn Clock>) -> Self {
        Self::new(wall, Arc::new(BootTime))
    }
}

impl std::fmt::Debug for Time {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Time")
    }
}

/// Milliseconds of the monotonic clock. Negative ones are instants before its start, such as the
/// end of a lease that ran out while the operator was down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Mono(pub i64);

impl Mono {
    pub fn after(self, millis: i64) -> Self {
        Self(self.0.saturating_add(millis))
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Now {
    pub mono: Mono,
    /// Whole milliseconds, as stored.
    pub wall: Timestamp,
}

/// What is stored is milliseconds: an answer before a restart and after it must be the same.
fn to_millis(instant: Timestamp) -> Timestamp {
    Timestamp::from_millisecond(instant.as_millisecond()).unwrap_or(instant)
}

pub(crate) fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

pub(crate) fn wall_after(instant: Timestamp, millis: i64) -> Timestamp {
    instant
        .saturating_add(SignedDuration::from_millis(millis))
        .unwrap_or(Timestamp::MAX)
}

/// What is left, at the first start after a reboot, of something that lasts until the wall-clock instant `until_ms`:
/// measured from `reference_ms` (the later of the wall clock and the last instant that the
/// database has seen, so that a clock which went backwards meanwhile revives nothing), and never
/// more than `whole_ms`, its whole length. Negative when it is over.
pub(crate) fn remaining_ms(until_ms: i64, reference_ms: i64, whole_ms: i64) -> i64 {
    until_ms.saturating_sub(reference_ms).min(whole_ms.max(0))
}

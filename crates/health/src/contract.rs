//! What the reconciler says to the prober and hears from it.

use std::fmt;
use std::time::Duration;

use egress_core::spec::HealthCheck;
use egress_core::{ProxyKey, Uid};
use futures::stream::BoxStream;

/// One proxy to be probed. A changed uid, host or port starts the health state over; a changed
/// check takes effect at once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    pub key: ProxyKey,
    pub uid: Uid,
    /// Host name or address of the proxy, without brackets.
    pub host: String,
    pub port: u16,
    pub check: HealthCheck,
}

/// The state of one probed proxy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    pub uid: Uid,
    pub host: String,
    pub port: u16,
    pub healthy: bool,
    /// How long a successful probe took, from dialling to the status line: the value last told
    /// through [`Health::transitions`], so that it stands still while nothing material changes.
    pub latency: Option<Duration>,
    /// The class of the last result that agrees with `healthy`.
    pub class: ProbeClass,
    /// One short line for the condition, naming the class and the status.
    pub message: String,
}

/// What came of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ProbeClass {
    Success,
    /// TCP to the proxy failed.
    Dial,
    /// The proxy answered CONNECT with an error; the message keeps its status.
    ConnectRefused,
    /// 407.
    AuthRequired,
    /// TLS to the target failed.
    Tls,
    Timeout,
    UnexpectedStatus,
    Io,
}

impl ProbeClass {
    pub const ALL: [Self; 8] = [
        Self::Success,
        Self::Dial,
        Self::ConnectRefused,
        Self::AuthRequired,
        Self::Tls,
        Self::Timeout,
        Self::UnexpectedStatus,
        Self::Io,
    ];

    /// The metric label.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Success => "success",
            Self::Dial => "dial",
            Self::ConnectRefused => "connect_refused",
            Self::AuthRequired => "auth_required",
            Self::Tls => "tls",
            Self::Timeout => "timeout",
            Self::UnexpectedStatus => "unexpected_status",
            Self::Io => "io",
        }
    }

    /// The `Healthy` condition's reason.
    pub fn reason(self) -> &'static str {
        match self {
            Self::Success => "ProbeSucceeded",
            Self::Dial => "DialFailed",
            Self::ConnectRefused => "ConnectRefused",
            Self::AuthRequired => "AuthRequired",
            Self::Tls => "TLSFailed",
            Self::Timeout => "Timeout",
            Self::UnexpectedStatus => "UnexpectedStatus",
            Self::Io => "IOFailed",
        }
    }
}

impl fmt::Display for ProbeClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The prober as the reconciler knows it; the engine implements it, and so does a scripted one in
/// tests.
pub trait Health: Send + Sync + 'static {
    /// Starts probing, or takes a changed target over. The same target again changes nothing.
    fn set(&self, target: Target);

    /// Stops probing and forgets.
    fn remove(&self, key: &ProxyKey);

    /// None: not probed, or no result yet for the target as it is now.
    fn verdict(&self, key: &ProxyKey) -> Option<Verdict>;

    /// Every proxy whose verdict changed (first result, healthy to unhealthy or back, a class of
    /// failure not yet told since it became unhealthy) or whose latency changed materially (more
    /// than 50 % and more than 20 ms from the last one told). Begins with those that have a
    /// verdict already. Never loses a key: an event that cannot be delivered now is delivered
    /// later.
    fn transitions(&self) -> BoxStream<'static, ProxyKey>;
}

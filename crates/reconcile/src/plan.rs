//! What to do next, as pure data: from what was observed to one action, or to a state to rest in.
//!
//! ```text
//!            Record            Create          (get)            (verdict)
//! nothing ---------> recorded --------> exists -----> running ----------> Ready <-> Unhealthy
//!                       ^                  |             |
//!                       | Forget  <-- gone-+-------------+   stopped, overdue, other spec:
//!                       +----------------- Delete, until the provider says it is gone
//! ```
//!
//! Two rules hold in every branch, and the property test at the end checks them:
//! - `Create` only where the object records exactly what is to be created and where, and no
//!   instance is known. The record is moved to another provider only when the old one has said
//!   that nothing is there.
//! - The finalizer is there before anything is created, and goes only when nothing is left (or an
//!   administrator said to abandon it).

use egress_core::spec::SpecHash;
use egress_core::{ErrorClass, ProviderId};
use egress_provider::{InstanceState, ProviderError, Step};

/// What the object says the instance was (or is about to be) built from, and by whom.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Recorded {
    pub hash: SpecHash,
    pub provider: String,
}

/// Everything a decision rests on.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Observed {
    pub deleting: bool,
    pub finalizer: bool,
    pub skip_cleanup: bool,
    pub recorded: Option<Recorded>,
    pub provider_id: Option<ProviderId>,
    pub wish: Wish,
    pub home: Home,
    pub sight: Sight,
    /// An earlier error is still waited out: no calls of the provider.
    pub held: bool,
    /// A delete of this instance was accepted not long ago.
    pub delete_accepted: bool,
    /// An instance that keeps dying is not made anew at once.
    pub create_delayed: bool,
}

/// What the user asks for.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Wish {
    Invalid(String),
    External {
        host: String,
        port: u16,
    },
    Managed {
        provider: String,
        configured: bool,
        port: u16,
        /// Err: why the user-data cannot be had, in words.
        hash: Result<SpecHash, String>,
    },
}

/// The provider that has the instance, if anyone has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Home {
    Nowhere,
    NotConfigured(String),
    Configured(String),
}

/// What the provider said.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Sight {
    /// There was nobody to ask, or nothing to ask about.
    NotAsked,
    Absent,
    Here {
        id: ProviderId,
        state: InstanceState,
        /// Provisioning for longer than allowed.
        overdue: bool,
    },
    Failed(Failure),
}

/// A provider's error, as far as decisions need it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    pub class: ErrorClass,
    /// Names the provider, the operation and the instance.
    pub message: String,
    pub during: During,
}

/// What was being done with the instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum During {
    Look,
    Create,
    Delete,
}

impl Failure {
    pub(crate) fn of(error: &ProviderError, during: During) -> Self {
        Self {
            class: error.class,
            message: error.to_string(),
            during,
        }
    }
}

/// Why an instance is deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Why {
    SpecChanged,
    Stopped,
    Overdue,
    ProxyDeleted,
}

impl Why {
    pub(crate) fn sentence(self) -> &'static str {
        match self {
            Self::SpecChanged => "provider, placement, port or user-data changed",
            Self::Stopped => "the instance stopped",
            Self::Overdue => "provisioning did not finish in time",
            Self::ProxyDeleted => "the Proxy is being deleted",
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Decision {
    /// One step; afterwards everything is observed anew.
    Act(Action),
    /// Nothing to do until something changes: what the status is to say.
    Rest(Rest),
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Action {
    /// Finalizer and annotations, before anything is created.
    Record(Recorded),
    /// The instance is gone: drop its id from the status.
    Forget,
    Create,
    Delete {
        id: ProviderId,
        why: Why,
        /// The instance cannot be looked at, so an accepted delete is all there will be.
        blind: bool,
    },
    /// Drop the finalizer.
    Release {
        abandoned: bool,
    },
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Rest {
    /// Being deleted, and not our matter any more.
    Gone,
    Invalid(String),
    /// There is an address.
    Probed {
        host: String,
        port: u16,
        /// None: External.
        id: Option<ProviderId>,
        /// What keeps it from being replaced, should that become necessary.
        caveat: Option<String>,
    },
    /// The provider has no instance (any more); one is about to be asked for.
    Empty,
    Provisioning {
        id: ProviderId,
        step: Step,
    },
    /// An instance that keeps dying waits before it is made anew.
    Recreating,
    NoUserData(String),
    NotConfigured {
        provider: String,
        /// It has (or may have) an instance of this Proxy.
        holds_instance: bool,
    },
    /// Deleted, and not yet gone.
    Draining(Why),
    Failed(Failure),
    /// An earlier error is still waited out; the status goes on saying so.
    Held,
}

/// The next step.
pub(crate) fn plan(o: &Observed) -> Decision {
    if o.deleting {
        return plan_deletion(o);
    }
    match &o.wish {
        Wish::Invalid(why) => Decision::Rest(Rest::Invalid(why.clone())),
        Wish::External { host, port } => Decision::Rest(Rest::Probed {
            host: host.clone(),
            port: *port,
            id: None,
            caveat: None,
        }),
        Wish::Managed {
            provider,
            configured,
            port,
            hash,
        } => {
            if !configured {
                return Decision::Rest(Rest::NotConfigured {
                    provider: provider.clone(),
                    holds_instance: false,
                });
            }
            if o.held {
                return Decision::Rest(Rest::Held);
            }
            match hash {
                Ok(hash) => {
                    let wanted = Recorded {
                        hash: hash.clone(),
                        provider: provider.clone(),
                    };
                    plan_managed(o, wanted, *port)
                }
                Err(fault) => plan_without_user_data(o, fault, *port),
            }
        }
    }
}

fn plan_managed(o: &Observed, wanted: Recorded, port: u16) -> Decision {
    match &o.recorded {
        None => match (&o.provider_id, &o.sight) {
            (None, _) | (_, Sight::Here { .. }) => Decision::Act(Action::Record(wanted)),
            (Some(_), Sight::Absent) => Decision::Act(Action::Forget),
            (Some(_), Sight::Failed(failure)) => Decision::Rest(Rest::Failed(failure.clone())),
            (Some(_), Sight::NotAsked) => Decision::Rest(Rest::NotConfigured {
                provider: wanted.provider,
                holds_instance: true,
            }),
        },
        Some(recorded) if *recorded == wanted => {
            if o.finalizer {
                plan_kept(o, port, None)
            } else {
                Decision::Act(Action::Record(wanted))
            }
        }
        Some(_) => plan_replacement(o, wanted),
    }
}

/// What runs is what is wanted.
fn plan_kept(o: &Observed, port: u16, caveat: Option<&str>) -> Decision {
    match &o.sight {
        Sight::NotAsked | Sight::Absent if o.provider_id.is_some() => Decision::Act(Action::Forget),
        Sight::NotAsked | Sight::Absent if o.create_delayed => Decision::Rest(Rest::Recreating),
        Sight::NotAsked | Sight::Absent => Decision::Act(Action::Create),
        Sight::Failed(failure) => Decision::Rest(Rest::Failed(failure.clone())),
        Sight::Here { id, state, overdue } => match state {
            _ if o.delete_accepted => Decision::Rest(Rest::Draining(Why::Stopped)),
            InstanceState::Running {
                address,
                port: other,
            } => Decision::Rest(Rest::Probed {
                host: address.to_string(),
                port: other.unwrap_or(port),
                id: Some(id.clone()),
                caveat: caveat.map(str::to_owned),
            }),
            InstanceState::Provisioning(_) if *overdue => delete(id, Why::Overdue),
            InstanceState::Provisioning(step) => Decision::Rest(Rest::Provisioning {
                id: id.clone(),
                step: step.clone(),
            }),
            InstanceState::Stopped => delete(id, Why::Stopped),
        },
    }
}

/// Delete, wait until it is gone, and only then record the new wish.
fn plan_replacement(o: &Observed, wanted: Recorded) -> Decision {
    match (&o.home, &o.sight) {
        (Home::NotConfigured(provider), _) => Decision::Rest(Rest::NotConfigured {
            provider: provider.clone(),
            holds_instance: true,
        }),
        (_, Sight::Here { .. }) if o.delete_accepted => {
            Decision::Rest(Rest::Draining(Why::SpecChanged))
        }
        (_, Sight::Here { id, .. }) => delete(id, Why::SpecChanged),
        (_, Sight::Failed(failure)) => Decision::Rest(Rest::Failed(failure.clone())),
        (_, Sight::Absent) if o.provider_id.is_some() => Decision::Act(Action::Forget),
        (_, Sight::Absent) => Decision::Act(Action::Record(wanted)),
        // Nobody said that nothing is there.
        (_, Sight::NotAsked) => Decision::Rest(Rest::NotConfigured {
            provider: wanted.provider,
            holds_instance: true,
        }),
    }
}

/// Nothing can be created now; what runs goes on.
fn plan_without_user_data(o: &Observed, fault: &str, port: u16) -> Decision {
    let without = || Decision::Rest(Rest::NoUserData(fault.to_owned()));
    match (&o.provider_id, &o.sight) {
        (Some(_), Sight::Failed(failure)) => Decision::Rest(Rest::Failed(failure.clone())),
        (
            Some(_),
            Sight::Here {
                state: InstanceState::Running { .. },
                ..
            },
        ) if !o.delete_accepted => plan_kept(o, port, Some(fault)),
        (Some(_), Sight::Absent) => Decision::Act(Action::Forget),
        _ => without(),
    }
}

/// A Proxy can always finish deleting.
fn plan_deletion(o: &Observed) -> Decision {
    if !o.finalizer {
        return Decision::Rest(Rest::Gone);
    }
    let release = Decision::Act(Action::Release { abandoned: false });
    if o.skip_cleanup {
        // Before the provider is looked up: this also frees a Proxy whose provider is gone.
        return Decision::Act(Action::Release { abandoned: true });
    }
    let ever_created = o.recorded.is_some() || o.provider_id.is_some();
    match (&o.home, &o.sight) {
        (Home::Nowhere, _) => release,
        (Home::NotConfigured(_), _) if !ever_created => release,
        (Home::NotConfigured(provider), _) => Decision::Rest(Rest::NotConfigured {
            provider: provider.clone(),
            holds_instance: true,
        }),
        (Home::Configured(_), _) if o.held => Decision::Rest(Rest::Held),
        // Gone before anybody here asked for it: what belonged to it (a VM's disks) may be left, and
        // delete is idempotent.
        (Home::Configured(_), Sight::Absent) => match &o.provider_id {
            Some(id) if !o.delete_accepted => Decision::Act(Action::Delete {
                id: id.clone(),
                why: Why::ProxyDeleted,
                blind: true,
            }),
            _ => release,
        },
        (Home::Configured(_), Sight::Here { .. }) if o.delete_accepted => {
            Decision::Rest(Rest::Draining(Why::ProxyDeleted))
        }
        (Home::Configured(_), Sight::Here { id, .. }) => delete(id, Why::ProxyDeleted),
        (Home::Configured(_), Sight::Failed(failure)) => match (&o.provider_id, failure.class) {
            (Some(id), ErrorClass::Permanent) => Decision::Act(Action::Delete {
                id: id.clone(),
                why: Why::ProxyDeleted,
                blind: true,
            }),
            _ => Decision::Rest(Rest::Failed(failure.clone())),
        },
        // Not reached: a configured home is always asked while deleting. Waiting is safe.
        (Home::Configured(_), Sight::NotAsked) => Decision::Rest(Rest::Held),
    }
}

fn delete(id: &ProviderId, why: Why) -> Decision {
    Decision::Act(Action::Delete {
        id: id.clone(),
        why,
        blind: false,
    })
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;

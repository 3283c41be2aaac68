//! One reconcile of one Proxy, as a table of contents: observe, plan, apply, and again, until
//! there is nothing to do; then the status.

use std::sync::Arc;
use std::time::Duration;

use egress_api::{Proxy, ProxyStatus};
use egress_core::{Phase, ProxyKey};
use egress_health::{Target, Verdict};
use egress_provider::Step;
use tokio::time::Instant;
use tracing::Instrument;

use crate::apply::{Applied, apply, stop_probing};
use crate::config::jitter;
use crate::context::Context;
use crate::error::ReconcileError;
use crate::events::Notice;
use crate::memory::Memory;
use crate::messages;
use crate::observe::{View, observe};
use crate::plan::{Action, Decision, Rest, Why, plan};
use crate::status::{self, Input};

/// Far more than any sound sequence of actions: a bound against a plan that goes in circles.
const MAX_STEPS: usize = 16;

/// When to look again, should nothing wake the Proxy before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// The object is gone.
    Never,
    At(Instant),
}

/// Brings one Proxy closer to what it asks for.
pub(crate) async fn reconcile(ctx: &Context, key: &ProxyKey) -> Result<Next, ReconcileError> {
    let Some(cached) = ctx.cached(key) else {
        return gone(ctx, key).await;
    };
    let uid = cached
        .stored_uid()
        .ok_or_else(|| ReconcileError::NoUid(key.clone()))?;
    let mut memory = match ctx.memories.get(key) {
        Some(memory) if memory.uid == uid => memory,
        Some(_) => {
            // Deleted and created again under the same name.
            gone(ctx, key).await?;
            Memory::of(uid)
        }
        None => Memory::of(uid),
    };
    let span = if cached.is_deleting() {
        tracing::info_span!("reconcile.delete")
    } else if cached.spec.provider.is_some() {
        tracing::info_span!("reconcile.managed")
    } else {
        tracing::info_span!("reconcile.external")
    };
    let answer = match steps(ctx, key, cached, &mut memory).instrument(span).await {
        // It went while it was worked on.
        Err(ReconcileError::Api(error)) if error.is_not_found() => gone(ctx, key).await,
        answer => answer,
    };
    match answer {
        Ok(Next::Never) => {
            ctx.memories.remove(key);
        }
        Ok(Next::At(_)) => {
            memory.api_failures = 0;
            ctx.memories.put(key, memory);
        }
        Err(_) => {
            memory.api_failures = memory.api_failures.saturating_add(1);
            ctx.memories.put(key, memory);
        }
    }
    answer
}

async fn steps(
    ctx: &Context,
    key: &ProxyKey,
    cached: Arc<Proxy>,
    memory: &mut Memory,
) -> Result<Next, ReconcileError> {
    let mut proxy = cached;
    let mut fresh = false;
    for _ in 0..MAX_STEPS {
        if proxy.is_deleting() {
            begin_deletion(ctx, &proxy, memory).await?;
        }
        let view = observe(ctx, &proxy, memory).await?;
        let rest = match plan(&view.observed) {
            Decision::Rest(rest) => rest,
            Decision::Act(_) if !fresh => {
                // Nothing is changed from a cached view: what it is missing may be an instance.
                fresh = true;
                let Some(latest) = ctx.api.get(key).await? else {
                    return gone(ctx, key).await;
                };
                if latest.stored_uid() != proxy.stored_uid() {
                    // Deleted and made again: the watch brings the new one in a moment.
                    return Ok(Next::At(Instant::now() + Duration::from_millis(100)));
                }
                proxy = Arc::new(latest);
                continue;
            }
            Decision::Act(action) => match act(ctx, &mut proxy, &view, action, memory).await? {
                Some(Settled::Rest(rest)) => rest,
                Some(Settled::Released) => return Ok(Next::At(Instant::now() + ctx.config.poll)),
                None => continue,
            },
        };
        return finish(ctx, proxy, &view, &rest, memory).await;
    }
    tracing::error!("{MAX_STEPS} steps and no end: this is a fault of the operator");
    Ok(Next::At(Instant::now() + ctx.config.backoff.max))
}

enum Settled {
    Rest(Rest),
    Released,
}

/// Applies what the plan says; None: go on with the object as it is now.
async fn act(
    ctx: &Context,
    proxy: &mut Arc<Proxy>,
    view: &View,
    action: Action,
    memory: &mut Memory,
) -> Result<Option<Settled>, ReconcileError> {
    let replaces = matches!(&action, Action::Delete { why, .. } if *why != Why::ProxyDeleted);
    let span = if replaces {
        tracing::info_span!("reconcile.replaceInstance")
    } else {
        tracing::Span::none()
    };
    let applied = apply(ctx, proxy, view, action, memory)
        .instrument(span)
        .await?;
    Ok(match applied {
        Applied::Object(object) => {
            *proxy = object;
            None
        }
        Applied::Released => Some(Settled::Released),
        Applied::Rest(rest) => Some(Settled::Rest(rest)),
    })
}

/// No new leases, and the ones there are end.
async fn begin_deletion(
    ctx: &Context,
    proxy: &Proxy,
    memory: &mut Memory,
) -> Result<(), ReconcileError> {
    stop_probing(ctx, proxy);
    if !memory.leases_ended {
        end_leases(ctx, &proxy.key(), memory.uid.clone()).await?;
        memory.leases_ended = true;
    }
    if !memory.deletion_told && proxy.has_finalizer() {
        memory.deletion_told = true;
        // After a restart in the middle this was told already.
        if proxy.status.as_ref().map(ProxyStatus::phase) != Some(Phase::Deleting) {
            ctx.events.tell(
                proxy,
                Notice::normal("Deleting", "Delete", "leases are ended, the instance goes"),
            );
        }
    }
    Ok(())
}

/// The object is gone: nothing of it stays behind in the prober, the leases or our memory.
async fn gone(ctx: &Context, key: &ProxyKey) -> Result<Next, ReconcileError> {
    ctx.health.remove(key);
    if let Some(memory) = ctx.memories.get(key) {
        if !memory.leases_ended {
            end_leases(ctx, key, memory.uid).await?;
        }
        ctx.memories.remove(key);
    }
    ctx.directory.refresh(key, ctx.cached(key).as_deref());
    Ok(Next::Never)
}

pub(crate) async fn end_leases(
    ctx: &Context,
    key: &ProxyKey,
    uid: egress_core::Uid,
) -> Result<(), ReconcileError> {
    let leases = Arc::clone(&ctx.leases);
    // A durable write: not on an async thread.
    let ended = tokio::task::spawn_blocking(move || leases.end_for(&uid)).await;
    match ended {
        Ok(Ok(0)) => Ok(()),
        Ok(Ok(count)) => {
            tracing::info!(count, "leases ended: the Proxy is going");
            Ok(())
        }
        Ok(Err(source)) => Err(ReconcileError::Leases {
            key: key.clone(),
            source,
        }),
        Err(join) => Err(ReconcileError::Leases {
            key: key.clone(),
            source: egress_lease::StoreFailure {
                action: "end leases",
                message: join.to_string(),
            },
        }),
    }
}

/// The prober, the status, the waits: all follow from the state the Proxy rests in.
async fn finish(
    ctx: &Context,
    proxy: Arc<Proxy>,
    view: &View,
    rest: &Rest,
    memory: &mut Memory,
) -> Result<Next, ReconcileError> {
    let next = wait(ctx, view, rest, memory);
    let previous = proxy.status.clone().unwrap_or_default();
    let verdict = probe(ctx, &proxy, view, rest, &previous);
    if *rest == Rest::Gone {
        return Ok(next);
    }
    let shared_with = ctx.index.older_at_address(&proxy.key());
    let new = status::next(&Input {
        previous: &previous,
        rest,
        verdict: verdict.as_ref(),
        shared_with: shared_with.as_ref(),
        port: proxy.spec.port,
        generation: proxy.metadata.generation,
        deleting: proxy.is_deleting(),
        now: ctx.clock.now(),
    });
    // From the cache, not from what is written now: an address counts once the index knows who
    // else has it.
    let key = proxy.key();
    ctx.directory.refresh(&key, ctx.cached(&key).as_deref());
    if new == previous {
        return Ok(next);
    }
    let written = ctx.api.patch_status(&proxy, &new).await?;
    ctx.metrics.status_writes.inc();
    tell(ctx, &written, &previous, &new);
    Ok(next)
}

/// Sets the prober's target, or ends it; returns the verdict on the address the Proxy has now.
fn probe(
    ctx: &Context,
    proxy: &Proxy,
    view: &View,
    rest: &Rest,
    previous: &ProxyStatus,
) -> Option<Verdict> {
    let key = proxy.key();
    let address = match rest {
        Rest::Probed { host, port, .. } => Some((host.clone(), *port)),
        _ if status::is_probed(rest, previous) => previous.ip.clone().map(|ip| {
            let port = previous.port.unwrap_or(proxy.spec.port);
            (ip, u16::try_from(port).unwrap_or_default())
        }),
        _ => None,
    };
    let (Some((host, port)), Some(spec), Some(uid)) = (address, &view.spec, proxy.stored_uid())
    else {
        ctx.health.remove(&key);
        return None;
    };
    ctx.health.set(Target {
        key: key.clone(),
        uid: uid.clone(),
        host: host.clone(),
        port,
        check: spec.health_check.clone(),
    });
    ctx.health
        .verdict(&key)
        .filter(|v| v.uid == uid && v.host == host && v.port == port)
}

/// Remembers what is to be waited out, and says when to look again.
fn wait(ctx: &Context, view: &View, rest: &Rest, memory: &mut Memory) -> Next {
    let config = &ctx.config;
    let now = Instant::now();
    let resync = now + jitter(config.resync, rand::random());
    match rest {
        Rest::Failed(failure) => {
            let until = memory.hold(failure.class, view.hold_key.clone(), &config.backoff);
            return Next::At(
                until
                    .unwrap_or(resync)
                    .min(resync.max(now + config.backoff.quota())),
            );
        }
        Rest::Held => {
            return Next::At(view.held_until.flatten().unwrap_or(resync));
        }
        _ => memory.no_failure(),
    }
    Next::At(match rest {
        Rest::Draining(_) => now + config.poll,
        // A percentage is worth a write now and then, not one a look.
        Rest::Provisioning {
            step: Step::FetchingImage(_),
            ..
        } => now + config.poll * 2,
        Rest::Provisioning { .. } => now + config.poll,
        Rest::Recreating => view.create_not_before.unwrap_or(now + config.poll),
        _ => resync,
    })
}

/// Events and log lines of what changed from one status to the next.
fn tell(ctx: &Context, proxy: &Proxy, previous: &ProxyStatus, new: &ProxyStatus) {
    let provider = Context::group(Some(proxy));
    let id = new.provider_id.as_deref();
    let of = |status: &ProxyStatus, type_: &str| {
        status
            .conditions
            .iter()
            .find(|c| c.type_ == type_)
            .map(|c| (c.status.clone(), c.reason.clone(), c.message.clone()))
            .unwrap_or_default()
    };
    let (before, after) = (previous.phase(), new.phase());
    let (_, reason, message) = of(new, "Ready");
    if before != after {
        match after {
            Phase::Ready => {
                tracing::info!(
                    message_id = messages::PROXY_READY,
                    PROVIDER = provider,
                    PROVIDER_ID = id,
                    ip = new.ip.as_deref(),
                    "proxy ready"
                );
                let note = format!("{} answers", new.ip.as_deref().unwrap_or("the proxy"));
                ctx.events
                    .tell(proxy, Notice::normal("Ready", "Probe", note));
            }
            Phase::Unhealthy => {
                tracing::warn!(
                    message_id = messages::PROXY_UNHEALTHY,
                    PROVIDER = provider,
                    PROVIDER_ID = id,
                    reason,
                    "proxy unhealthy: {message}"
                );
                let note = format!("{reason}: {message}");
                ctx.events
                    .tell(proxy, Notice::warning("Unhealthy", "Probe", note));
            }
            Phase::Failed => {
                tracing::error!(
                    message_id = messages::PROXY_FAILED,
                    PROVIDER = provider,
                    PROVIDER_ID = id,
                    reason,
                    "proxy failed: {message}"
                );
            }
            _ => tracing::info!(PROVIDER = provider, PROVIDER_ID = id, "proxy {after}"),
        }
    }
    let (status, reason, message) = of(new, "Provisioned");
    let (_, old_reason, old_message) = of(previous, "Provisioned");
    let fault = matches!(
        reason.as_str(),
        "ProviderError"
            | "QuotaExceeded"
            | "CloudInitError"
            | "ProviderNotConfigured"
            | "InvalidSpec"
    );
    if fault && (reason != old_reason || message != old_message) {
        let reason = match reason.as_str() {
            "QuotaExceeded" => "QuotaExceeded",
            "CloudInitError" => "CloudInitError",
            "ProviderNotConfigured" => "ProviderNotConfigured",
            "InvalidSpec" => "InvalidSpec",
            _ => "ProviderError",
        };
        if status != "True" {
            tracing::warn!(PROVIDER = provider, reason, "not provisioned: {message}");
        }
        ctx.events
            .tell(proxy, Notice::warning(reason, "Provision", message));
    }
    let (status, _, message) = of(new, "ProviderReachable");
    let (old_status, _, _) = of(previous, "ProviderReachable");
    if status == "False" && old_status != "False" {
        tracing::warn!(
            message_id = messages::PROVIDER_UNREACHABLE,
            PROVIDER = provider,
            "provider unreachable: {message}"
        );
        ctx.events.tell(
            proxy,
            Notice::warning("ProviderUnreachable", "Provision", message),
        );
    } else if status == "True" && old_status == "False" {
        let note = format!("provider {provider} answers again");
        ctx.events
            .tell(proxy, Notice::normal("ProviderReached", "Provision", note));
    }
}

/// How long to wait after an error of our own side.
pub(crate) fn after_error(ctx: &Context, key: &ProxyKey, error: &ReconcileError) -> Duration {
    if matches!(error, ReconcileError::Api(e) if e.is_conflict()) {
        // The watch brings what is newer in a moment.
        return jitter(Duration::from_millis(100), rand::random());
    }
    let failures = ctx.memories.get(key).map_or(1, |m| m.api_failures);
    ctx.config
        .backoff
        .after(failures)
        .min(Duration::from_secs(60))
}

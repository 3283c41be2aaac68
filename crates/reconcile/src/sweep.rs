//! Orphan collection: what carries our marks and belongs to no Proxy is deleted, but only on a
//! full view, only past its grace, and only so much at a time (machine-controller-manager-
//! provider-aws#127).

use std::collections::BTreeSet;
use std::sync::Arc;

use egress_core::{ProxyKey, Uid};
use egress_provider::{Instance, Provider};
use jiff::{SignedDuration, Timestamp};
use tracing::Instrument;

use crate::context::Context;
use crate::kubernetes::Live;
use crate::messages;
use crate::metrics::{ProviderLabel, ResultLabel};
use crate::step::end_leases;

/// What one sweep did.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Sweep {
    /// Orphans past their grace.
    pub found: usize,
    pub deleted: usize,
    /// Names of volumes and images that were deleted.
    pub garbage: Vec<String>,
    /// Providers that gave no full list.
    pub skipped: Vec<String>,
}

pub(crate) async fn sweep(ctx: &Context) -> Option<Sweep> {
    let span = tracing::info_span!(
        parent: None,
        "gc.sweep",
        found = tracing::field::Empty,
        deleted = tracing::field::Empty,
        skipped = tracing::field::Empty,
    );
    let done = run(ctx).instrument(span.clone()).await;
    let result = match &done {
        None => "error",
        Some(sweep) if sweep.skipped.is_empty() => "complete",
        Some(_) => "partial",
    };
    ctx.metrics
        .sweeps
        .get_or_create(&ResultLabel { result })
        .inc();
    if let Some(sweep) = &done {
        span.record("found", sweep.found);
        span.record("deleted", sweep.deleted);
        span.record("skipped", sweep.skipped.len());
        ctx.metrics
            .orphans_found
            .set(i64::try_from(sweep.found).unwrap_or(i64::MAX));
    }
    done
}

async fn run(ctx: &Context) -> Option<Sweep> {
    let mut sweep = Sweep::default();
    let mut listed: Vec<(Arc<dyn Provider>, Vec<Instance>)> = Vec::new();
    for provider in ctx.providers.all() {
        match provider.list().await {
            Ok(instances) => listed.push((provider, instances)),
            Err(error) => {
                tracing::warn!(PROVIDER = provider.name(), %error, "no full list: not swept");
                sweep.skipped.push(provider.name().to_owned());
            }
        }
    }
    // After the instances, and from the API: whoever had one then is in this list, unless gone.
    let live = match ctx.api.live(ctx.config.namespace.as_deref()).await {
        Ok(live) => live,
        Err(error) => {
            tracing::warn!(%error, "the Proxies cannot be listed: nothing is swept");
            return None;
        }
    };
    let now = ctx.clock.now();
    if live.objects.is_empty() && now.duration_since(ctx.started) < grace(ctx) {
        // The wrong cluster, or one that is about to be filled: not a reason to delete a fleet.
        let count: usize = listed.iter().map(|(_, instances)| instances.len()).sum();
        if count > 0 {
            tracing::warn!(
                count,
                "there is no Proxy at all, but instances of this installation: they are kept for \
                 {} s from the start on, and then deleted",
                ctx.config.orphan_grace.as_secs()
            );
        }
        return Some(sweep);
    }
    for (provider, instances) in &listed {
        for instance in instances {
            if is_orphan(ctx, &live, provider.name(), instance, now) {
                sweep.found += 1;
                if sweep.deleted < ctx.config.sweep_cap && delete(ctx, &**provider, instance).await
                {
                    sweep.deleted += 1;
                }
            }
        }
    }
    if sweep.found > sweep.deleted {
        tracing::warn!(
            found = sweep.found,
            deleted = sweep.deleted,
            cap = ctx.config.sweep_cap,
            "orphans are left for the next sweep"
        );
    }
    for (provider, _) in &listed {
        match provider
            .collect_garbage(&live.uids, ctx.config.orphan_grace)
            .await
        {
            Ok(names) if names.is_empty() => {}
            Ok(names) => {
                tracing::info!(
                    message_id = messages::ORPHAN_DELETED,
                    PROVIDER = provider.name(),
                    "deleted what belongs to no instance: {}",
                    names.join(", ")
                );
                sweep.garbage.extend(names);
            }
            Err(error) => {
                tracing::warn!(PROVIDER = provider.name(), %error, "garbage not collected");
                sweep.skipped.push(provider.name().to_owned());
            }
        }
    }
    end_leases_of_the_gone(ctx, &live).await;
    Some(sweep)
}

/// No Proxy has it; or its Proxy records another provider, which it does only after this one said
/// that nothing was there (a create that arrived late).
fn is_orphan(
    ctx: &Context,
    live: &Live,
    provider: &str,
    instance: &Instance,
    now: Timestamp,
) -> bool {
    let old = instance
        .created_at
        .is_none_or(|at| now.duration_since(at) >= grace(ctx));
    let misplaced = live
        .recorded_at
        .get(&instance.uid)
        .is_some_and(|recorded| recorded != provider);
    old && (misplaced || !live.uids.contains(&instance.uid))
}

fn grace(ctx: &Context) -> SignedDuration {
    SignedDuration::try_from(ctx.config.orphan_grace).unwrap_or(SignedDuration::MAX)
}

async fn delete(ctx: &Context, provider: &dyn Provider, instance: &Instance) -> bool {
    match provider.delete(&instance.id).await {
        Ok(()) => {
            tracing::warn!(
                message_id = messages::ORPHAN_DELETED,
                PROVIDER = provider.name(),
                PROVIDER_ID = instance.id.as_str(),
                uid = instance.uid.as_str(),
                "deleted an instance that belongs to no Proxy"
            );
            ctx.metrics
                .orphans_deleted
                .get_or_create(&ProviderLabel {
                    provider: provider.name().to_owned(),
                })
                .inc();
            true
        }
        Err(error) => {
            tracing::warn!(
                PROVIDER = provider.name(),
                PROVIDER_ID = instance.id.as_str(),
                %error,
                "orphan not deleted"
            );
            false
        }
    }
}

/// Leases whose Proxy went while the operator was not running.
async fn end_leases_of_the_gone(ctx: &Context, live: &Live) {
    let leases = Arc::clone(&ctx.leases);
    let Ok(active) = tokio::task::spawn_blocking(move || leases.active()).await else {
        return;
    };
    let gone: BTreeSet<Uid> = active
        .into_keys()
        .filter(|uid| !live.objects.contains(uid))
        .collect();
    for uid in gone {
        // One that appeared after the list is in the cache.
        if ctx
            .store
            .state()
            .iter()
            .any(|p| p.stored_uid().as_ref() == Some(&uid))
        {
            continue;
        }
        let key = ProxyKey::new("-", uid.as_str());
        if let Err(error) = end_leases(ctx, &key, uid).await {
            tracing::warn!(%error, "leases of a Proxy that is gone");
        }
    }
}

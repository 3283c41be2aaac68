//! Does one action. Each is safe to repeat, and safe to be cut off at any point: what it changed
//! is seen by the next look.

use std::sync::Arc;

use egress_api::{
    FINALIZER, INSTANCE_UID_ANNOTATION, PROVIDER_ANNOTATION, Proxy, SPEC_HASH_ANNOTATION,
};
use egress_core::spec::ModeSpec;
use egress_core::{ErrorClass, ProviderId};
use egress_provider::{CreateRequest, Provider, Step};
use kube::ResourceExt;
use serde_json::{Value, json};

use crate::context::Context;
use crate::error::ReconcileError;
use crate::events::Notice;
use crate::memory::Memory;
use crate::messages;
use crate::observe::View;
use crate::plan::{Action, During, Failure, Recorded, Rest, Why};
use crate::status::{self, Input};

/// What became of an action.
pub(crate) enum Applied {
    /// The object as it is now; everything is to be observed anew.
    Object(Arc<Proxy>),
    /// The finalizer is gone: nothing is left to do.
    Released,
    /// It could not be done now.
    Rest(Rest),
}

pub(crate) async fn apply(
    ctx: &Context,
    proxy: &Arc<Proxy>,
    view: &View,
    action: Action,
    memory: &mut Memory,
) -> Result<Applied, ReconcileError> {
    match action {
        Action::Record(recorded) => record(ctx, proxy, view, &recorded).await,
        Action::Forget => forget(ctx, proxy, memory).await,
        Action::Create => create(ctx, proxy, view).await,
        Action::Delete { id, why, blind } => {
            delete(ctx, proxy, view, &id, why, blind, memory).await
        }
        Action::Release { abandoned } => release(ctx, proxy, view, abandoned).await,
    }
}

/// Finalizer and annotations in one write: there is no moment with one and without the other.
async fn record(
    ctx: &Context,
    proxy: &Arc<Proxy>,
    view: &View,
    recorded: &Recorded,
) -> Result<Applied, ReconcileError> {
    let mut finalizers = proxy.finalizers().to_vec();
    if !proxy.has_finalizer() {
        finalizers.push(FINALIZER.to_owned());
    }
    let mut annotations = json!({
        SPEC_HASH_ANNOTATION: recorded.hash.as_str(),
        PROVIDER_ANNOTATION: recorded.provider,
    });
    if proxy.instance_uid().as_ref() != Some(&view.instance_uid) {
        // The claim on another's instance is dropped for good, not only while that one lives.
        annotations[INSTANCE_UID_ANNOTATION] = Value::Null;
    }
    let metadata = json!({ "finalizers": finalizers, "annotations": annotations });
    let object = ctx.api.patch_metadata(proxy, metadata).await?;
    Ok(Applied::Object(Arc::new(object)))
}

/// The instance is gone. What died without our doing is made anew at once, but not for ever at
/// that speed.
async fn forget(
    ctx: &Context,
    proxy: &Arc<Proxy>,
    memory: &mut Memory,
) -> Result<Applied, ReconcileError> {
    let gone = proxy.status.as_ref().and_then(|s| s.provider_id.clone());
    if !memory.instance_is_gone() {
        memory.note_loss(ctx.config.backoff.max);
        tracing::warn!(
            message_id = messages::INSTANCE_REPLACED,
            PROVIDER_ID = gone.as_deref(),
            "the instance is gone; another one is made"
        );
        ctx.events.tell(
            proxy,
            Notice::warning(
                "Replacing",
                "Replace",
                format!(
                    "instance {} is gone: another one is made",
                    gone.as_deref().unwrap_or("-")
                ),
            ),
        );
    }
    stop_probing(ctx, proxy);
    let object = write_status(ctx, proxy, &Rest::Empty).await?;
    Ok(Applied::Object(Arc::new(object)))
}

async fn create(ctx: &Context, proxy: &Arc<Proxy>, view: &View) -> Result<Applied, ReconcileError> {
    let (Some(provider), Some(spec)) = (&view.target, &view.spec) else {
        return Ok(Applied::Rest(Rest::Held));
    };
    let placement = match &spec.mode {
        ModeSpec::Managed(managed) => managed.placement.clone(),
        ModeSpec::External { .. } => return Ok(Applied::Rest(Rest::Held)),
    };
    let request = CreateRequest {
        name: view.name.clone(),
        uid: view.instance_uid.clone(),
        key: proxy.key(),
        installation: ctx.installation.clone(),
        port: spec.port,
        placement,
        user_data: view.user_data.clone(),
    };
    let id = match provider.create(&request).await {
        Ok(id) => id,
        Err(error) => {
            return Ok(Applied::Rest(Rest::Failed(Failure::of(
                &error,
                During::Create,
            ))));
        }
    };
    let submitted = Rest::Provisioning {
        id: id.clone(),
        step: Step::Creating(format!("submitted to provider {}", provider.name())),
    };
    let object = write_status(ctx, proxy, &submitted).await?;
    tracing::info!(
        PROVIDER = provider.name(),
        PROVIDER_ID = id.as_str(),
        "instance created"
    );
    ctx.events.tell(
        proxy,
        Notice::normal(
            "Created",
            "Create",
            format!("instance {id} at provider {}", provider.name()),
        ),
    );
    Ok(Applied::Object(Arc::new(object)))
}

async fn delete(
    ctx: &Context,
    proxy: &Arc<Proxy>,
    view: &View,
    id: &ProviderId,
    why: Why,
    blind: bool,
    memory: &mut Memory,
) -> Result<Applied, ReconcileError> {
    let Some(provider) = &view.home else {
        return Ok(Applied::Rest(Rest::Held));
    };
    stop_probing(ctx, proxy);
    let answer = match provider.delete(id).await {
        Err(error) if error.class == ErrorClass::NotFound => Ok(()),
        answer => answer,
    };
    if let Err(error) = answer {
        return Ok(Applied::Rest(Rest::Failed(Failure::of(
            &error,
            During::Delete,
        ))));
    }
    if memory.delete_was_accepted(id) {
        if matches!(why, Why::Stopped | Why::Overdue) {
            memory.note_loss(ctx.config.backoff.max);
        }
        tell_deletion(ctx, proxy, &**provider, id, why);
    }
    if blind {
        return release(ctx, proxy, view, false).await;
    }
    Ok(Applied::Object(Arc::clone(proxy)))
}

fn tell_deletion(ctx: &Context, proxy: &Proxy, provider: &dyn Provider, id: &ProviderId, why: Why) {
    let sentence = why.sentence();
    if why == Why::ProxyDeleted {
        tracing::info!(
            PROVIDER = provider.name(),
            PROVIDER_ID = id.as_str(),
            "deleting the instance"
        );
        return;
    }
    tracing::info!(
        message_id = messages::INSTANCE_REPLACED,
        PROVIDER = provider.name(),
        PROVIDER_ID = id.as_str(),
        "replacing the instance: {sentence}"
    );
    let note = format!("instance {id} is deleted and made anew: {sentence}");
    ctx.events.tell(
        proxy,
        match why {
            Why::Overdue => Notice::warning(
                "ProvisioningTimedOut",
                "Replace",
                format!(
                    "{note} (the limit is {} s)",
                    ctx.config.provisioning_timeout.as_secs()
                ),
            ),
            Why::Stopped => Notice::warning("Replacing", "Replace", note),
            Why::SpecChanged | Why::ProxyDeleted => Notice::normal("Replacing", "Replace", note),
        },
    );
}

async fn release(
    ctx: &Context,
    proxy: &Arc<Proxy>,
    view: &View,
    abandoned: bool,
) -> Result<Applied, ReconcileError> {
    let finalizers: Vec<&String> = proxy
        .finalizers()
        .iter()
        .filter(|f| *f != FINALIZER)
        .collect();
    match ctx
        .api
        .patch_metadata(proxy, json!({ "finalizers": finalizers }))
        .await
    {
        Ok(_) => {}
        // The last finalizer: the object goes with it, and may be gone already.
        Err(error) if error.is_not_found() => {}
        Err(error) => return Err(error.into()),
    }
    if abandoned {
        let id = proxy
            .status
            .as_ref()
            .and_then(|s| s.provider_id.clone())
            .unwrap_or_else(|| view.name.as_str().to_owned());
        let provider = Context::group(Some(proxy));
        tracing::warn!(
            message_id = messages::INSTANCE_ABANDONED,
            PROVIDER = provider,
            PROVIDER_ID = id,
            "released without cleaning up: the instance, if it exists, is abandoned"
        );
        ctx.events.tell(
            proxy,
            Notice::warning(
                "Abandoned",
                "Release",
                format!(
                    "{} is set: instance {id} at provider {provider}, if it exists, is abandoned",
                    egress_api::SKIP_CLEANUP_ANNOTATION
                ),
            ),
        );
    } else {
        tracing::info!("released: nothing is left of the instance");
        ctx.events.tell(
            proxy,
            Notice::normal("Released", "Release", "nothing is left of the instance"),
        );
    }
    Ok(Applied::Released)
}

/// In the middle of a reconcile: what must be on record before the next action.
async fn write_status(ctx: &Context, proxy: &Proxy, rest: &Rest) -> Result<Proxy, ReconcileError> {
    let previous = proxy.status.clone().unwrap_or_default();
    let status = status::next(&Input {
        previous: &previous,
        rest,
        verdict: None,
        shared_with: None,
        port: proxy.spec.port,
        generation: proxy.metadata.generation,
        deleting: proxy.is_deleting(),
        now: ctx.clock.now(),
    });
    let object = ctx.api.patch_status(proxy, &status).await?;
    ctx.metrics.status_writes.inc();
    Ok(object)
}

/// From here on no lease is given on the instance.
pub(crate) fn stop_probing(ctx: &Context, proxy: &Proxy) {
    let key = proxy.key();
    ctx.health.remove(&key);
    ctx.directory.refresh(&key, Some(proxy));
}

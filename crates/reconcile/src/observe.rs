//! Looks: at the object, at the Secret it names, at the provider. Needs both clients, changes
//! nothing.

use std::sync::Arc;

use egress_api::{PROVIDER_ANNOTATION, Proxy, SPEC_HASH_ANNOTATION, validate};
use egress_core::spec::{CloudInitSource, ManagedSpec, ModeSpec, ProxySpec, SpecHash};
use egress_core::{ErrorClass, InstanceName, ProviderId, SecretBytes, Uid};
use egress_provider::{Instance, InstanceState, Provider, ProviderError};
use jiff::Timestamp;
use kube::ResourceExt;
use tokio::time::Instant;

use crate::context::Context;
use crate::error::ReconcileError;
use crate::kubernetes::UserData;
use crate::memory::{HoldKey, Memory};
use crate::plan::{During, Failure, Home, Observed, Recorded, Sight, Wish};

/// What was seen, and what applying a decision needs of it.
pub(crate) struct View {
    pub observed: Observed,
    pub spec: Option<ProxySpec>,
    /// The UID that the instance is named and marked by.
    pub instance_uid: Uid,
    pub name: InstanceName,
    pub user_data: Option<SecretBytes>,
    /// The provider that has the instance, if anyone has.
    pub home: Option<Arc<dyn Provider>>,
    /// The provider that is to have it.
    pub target: Option<Arc<dyn Provider>>,
    pub hold_key: HoldKey,
    /// When an earlier error has been waited out; `Some(None)`: only a change ends the wait.
    pub held_until: Option<Option<Instant>>,
    pub create_not_before: Option<Instant>,
}

/// Looks at everything that a decision about `proxy` rests on.
pub(crate) async fn observe(
    ctx: &Context,
    proxy: &Proxy,
    memory: &mut Memory,
) -> Result<View, ReconcileError> {
    let key = proxy.key();
    let own_uid = proxy
        .stored_uid()
        .ok_or_else(|| ReconcileError::NoUid(key.clone()))?;
    let instance_uid = match proxy.instance_uid() {
        // A copied annotation: the instance belongs to the Proxy with the better claim.
        Some(uid) if uid != own_uid && ctx.index.better_claim(&key).is_none() => uid,
        _ => own_uid,
    };
    let name = InstanceName::for_uid(&instance_uid);
    let deleting = proxy.is_deleting();
    let skip_cleanup = proxy.skips_cleanup();
    let recorded = recorded(proxy);
    let provider_id = proxy
        .status
        .as_ref()
        .and_then(|s| s.provider_id.as_deref())
        .map(ProviderId::new);

    let spec = validate(proxy);
    let managed = spec.as_ref().ok().and_then(|s| match &s.mode {
        ModeSpec::Managed(managed) => Some(managed),
        ModeSpec::External { .. } => None,
    });
    let target = managed.and_then(|m| ctx.providers.get(&m.provider));
    let mut user_data = None;
    let wish = match (&spec, managed) {
        (Err(invalid), _) => Wish::Invalid(invalid.to_string()),
        (Ok(spec), None) => match &spec.mode {
            ModeSpec::External { host } => Wish::External {
                host: host.clone(),
                port: spec.port,
            },
            ModeSpec::Managed(_) => Wish::Invalid("spec.mode is unknown".to_owned()),
        },
        (Ok(spec), Some(managed)) => {
            let hash = if deleting {
                Err("the Proxy is being deleted".to_owned())
            } else {
                match resolve(ctx, &key.namespace, managed).await? {
                    Ok(data) => {
                        user_data = data;
                        Ok(SpecHash::of(
                            &managed.provider,
                            &managed.placement,
                            spec.port,
                            user_data.as_ref(),
                        ))
                    }
                    Err(fault) => Err(fault),
                }
            };
            Wish::Managed {
                provider: managed.provider.clone(),
                configured: target.is_some(),
                port: spec.port,
                hash,
            }
        }
    };

    // The raw field: a Proxy can finish deleting with an invalid spec too.
    let home_name = recorded
        .as_ref()
        .map(|r| r.provider.clone())
        .or_else(|| proxy.spec.provider.clone());
    let mut home = home_name.as_deref().and_then(|n| ctx.providers.get(n));
    let hold_key = HoldKey {
        generation: proxy.metadata.generation,
        deleting,
        wanted: match &wish {
            Wish::Managed { hash: Ok(hash), .. } => hash.as_str().to_owned(),
            Wish::Managed { hash: Err(e), .. } | Wish::Invalid(e) => e.clone(),
            Wish::External { .. } => String::new(),
        },
        target: target.clone(),
        home: home.clone(),
    };
    let held_until = memory.held(&hold_key);

    let mut observed = Observed {
        deleting,
        finalizer: proxy.has_finalizer(),
        skip_cleanup,
        home: match (&home, home_name) {
            (Some(_), Some(name)) => Home::Configured(name),
            (None, Some(name)) => Home::NotConfigured(name),
            (_, None) => Home::Nowhere,
        },
        recorded,
        provider_id,
        wish,
        sight: Sight::NotAsked,
        held: held_until.is_some(),
        delete_accepted: false,
        create_delayed: false,
    };
    if let Some(provider) = home.clone()
        && is_to_be_asked(&observed)
    {
        let (sight, elsewhere) = look(
            ctx,
            &*provider,
            observed.provider_id.as_ref(),
            &name,
            &instance_uid,
            &observed,
        )
        .await;
        if let Some(elsewhere) = elsewhere {
            observed.home = Home::Configured(elsewhere.name().to_owned());
            home = Some(elsewhere);
        }
        observed.sight = match sight {
            Ok(None) => Sight::Absent,
            Ok(Some(instance)) => {
                observed.delete_accepted = memory.delete_is_accepted(&instance.id);
                Sight::Here {
                    overdue: is_overdue(ctx, &instance, memory),
                    id: instance.id,
                    state: instance.state,
                }
            }
            Err(error) => Sight::Failed(Failure::of(&error, During::Look)),
        };
    }
    let create_not_before = memory.create_not_before(&ctx.config.backoff);
    observed.create_delayed = create_not_before.is_some();
    Ok(View {
        observed,
        spec: spec.ok(),
        instance_uid,
        name,
        user_data,
        home,
        target,
        hold_key,
        held_until,
        create_not_before,
    })
}

fn recorded(proxy: &Proxy) -> Option<Recorded> {
    let annotations = proxy.annotations();
    let hash = annotations.get(SPEC_HASH_ANNOTATION)?;
    let provider = annotations
        .get(PROVIDER_ANNOTATION)
        .or(proxy.spec.provider.as_ref())?;
    Some(Recorded {
        hash: SpecHash::from_annotation(hash.as_str()),
        provider: provider.clone(),
    })
}

/// Only where the answer decides something.
fn is_to_be_asked(o: &Observed) -> bool {
    if o.held {
        return false;
    }
    if o.deleting {
        return o.finalizer && !o.skip_cleanup;
    }
    let Wish::Managed {
        provider,
        configured: true,
        hash,
        ..
    } = &o.wish
    else {
        return false;
    };
    match (&o.recorded, hash) {
        _ if o.provider_id.is_some() => true,
        (Some(recorded), Ok(hash)) => recorded.hash != *hash || recorded.provider != *provider,
        // Nothing known, or nothing to compare with: create finds what is there by its name.
        _ => false,
    }
}

type Seen = Result<Option<Instance>, ProviderError>;

/// Our instance at `provider`; or, where the record of its provider was lost, at another one.
async fn look(
    ctx: &Context,
    provider: &dyn Provider,
    id: Option<&ProviderId>,
    name: &InstanceName,
    uid: &Uid,
    o: &Observed,
) -> (Seen, Option<Arc<dyn Provider>>) {
    // One that is not ours is not there: never to be touched.
    let ours = |instance: Instance| Some(instance).filter(|i| &i.uid == uid);
    let Some(id) = id else {
        let found = provider.find(name).await;
        return (found.map(|i| i.and_then(ours)), None);
    };
    let seen = match provider.get(id).await {
        Ok(instance) => match ours(instance) {
            Some(instance) => Ok(Some(instance)),
            None => provider.find(name).await.map(|i| i.and_then(ours)),
        },
        Err(error) if error.class == ErrorClass::NotFound => Ok(None),
        Err(error) => Err(error),
    };
    if !matches!(seen, Ok(None)) || o.recorded.is_some() {
        return (seen, None);
    }
    for other in ctx.providers.all() {
        if other.name() == provider.name() {
            continue;
        }
        match other.find(name).await.map(|i| i.and_then(ours)) {
            Ok(None) => {}
            answer => return (answer, Some(other)),
        }
    }
    (Ok(None), None)
}

fn is_overdue(ctx: &Context, instance: &Instance, memory: &mut Memory) -> bool {
    if !matches!(instance.state, InstanceState::Provisioning(_)) {
        return false;
    }
    let limit = ctx.config.provisioning_timeout;
    // The mark outlives a restart; where there is none (or the clock went back), our own watch.
    let by_watch = memory.provisioning_since(&instance.id).elapsed() >= limit;
    let now: Timestamp = ctx.clock.now();
    let by_mark = instance.created_at.is_some_and(|at| {
        now.duration_since(at).is_positive() && now.duration_since(at).unsigned_abs() >= limit
    });
    by_watch || by_mark
}

/// The user-data, or in words why there is none.
async fn resolve(
    ctx: &Context,
    namespace: &str,
    managed: &ManagedSpec,
) -> Result<Result<Option<SecretBytes>, String>, ReconcileError> {
    let (name, key) = match &managed.cloud_init {
        None => return Ok(Ok(None)),
        Some(CloudInitSource::Inline(data)) => return Ok(Ok(Some(data.clone()))),
        Some(CloudInitSource::SecretRef { name, key }) => (name, key),
    };
    let secret = format!("secret {namespace}/{name}");
    let label = egress_api::CLOUD_INIT_LABEL;
    Ok(match ctx.api.user_data(namespace, name, key).await? {
        UserData::Found(data) => Ok(Some(data)),
        UserData::NoSecret => Err(format!(
            "{secret}, which spec.cloudInit.secretRef names, does not exist: create it with the \
             label {label}: \"true\""
        )),
        UserData::NoLabel => Err(format!(
            "{secret} lacks the label {label}: \"true\", without which the operator does not see \
             it: kubectl -n {namespace} label secret {name} {label}=true"
        )),
        UserData::NoKey { others } if others.is_empty() => {
            Err(format!("{secret} has no key {key:?}: it is empty"))
        }
        UserData::NoKey { others } => Err(format!(
            "{secret} has no key {key:?}, only {}: set spec.cloudInit.secretRef.key",
            others.join(", ")
        )),
    })
}

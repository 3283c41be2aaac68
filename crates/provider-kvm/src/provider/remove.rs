//! delete, and what nobody owns any more.

use std::collections::BTreeSet;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use egress_core::{ProviderId, Uid};
use tracing::{info, warn};
use virt::domain::Domain;
use virt::sys;

use super::Inner;
use super::create::lookup;
use super::error::{KvmError, on_host};
use super::placement::{VolumeNames, parse_id};
use super::read::names_of;
use crate::domain::DomainView;
use crate::host::calls::Calls;
use crate::host::error::LibvirtError;
use crate::host::{Host, LONG_CALL};
use crate::image::cache::{base_name, marker_name};
use crate::storage::{Pool, StorageError};

pub(crate) async fn delete(inner: &Arc<Inner>, id: &ProviderId) -> Result<(), KvmError> {
    let Ok((host_name, name)) = parse_id(id) else {
        warn!(
            PROVIDER = inner.name,
            PROVIDER_ID = id.as_str(),
            "no id of this provider: nothing to delete"
        );
        return Ok(());
    };
    let Some(host) = inner.hosts.get(host_name) else {
        warn!(
            PROVIDER = inner.name,
            HOST = host_name,
            PROVIDER_ID = id.as_str(),
            "host {host_name} is not configured any more: the VM stays there. To remove it by hand: virsh destroy {name}; virsh undefine --nvram {name}; then delete the volumes {name}.qcow2 and {name}-seed.iso"
        );
        return Ok(());
    };
    // A fetch goes on (others may want the image), but nothing is built from it for this one.
    let entry = inner
        .pending
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .remove(name);
    if let Some(entry) = entry {
        entry.stop.cancel();
    }
    let lock = inner.lock_of(name);
    let _only = lock.lock().await;
    let _pool = host.pool_lock.lock().await;
    let (pool, job_name) = (host.config.pool.clone(), name.to_owned());
    let installation = inner.installation.clone();
    host.run("virDomainUndefineFlags", LONG_CALL, move |calls| {
        if let Some(domain) = lookup(calls, &job_name)? {
            let view = match view_of(calls, &domain, &job_name)? {
                Some(view) => view,
                None => return remove_volumes(calls, &pool, &job_name, &[]),
            };
            let ours = view
                .marks
                .as_ref()
                .is_some_and(|marks| marks.installation == installation);
            if !ours {
                warn!(
                    HOST = calls.host(),
                    domain = job_name,
                    "a domain of that name is not the operator's: it and its volumes stay"
                );
                return Ok(());
            }
            remove_domain(calls, &domain, &job_name, &view)?;
            return remove_volumes(calls, &pool, &job_name, &view.disks);
        }
        remove_volumes(calls, &pool, &job_name, &[])
    })
    .await?
    .map_err(on_host(host_name))?;
    inner.forget(host_name, name);
    Ok(())
}

fn view_of(
    calls: &Calls<'_>,
    domain: &Domain,
    name: &str,
) -> Result<Option<DomainView>, LibvirtError> {
    match calls.rpc("virDomainGetXMLDesc", name, |_| domain.xml_desc(0)) {
        Ok(xml) => DomainView::parse(&xml)
            .map(Some)
            .map_err(|error| LibvirtError::odd("virDomainGetXMLDesc", error.to_string())),
        Err(error) if error.is(sys::VIR_ERR_NO_DOMAIN) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Each "already" is progress: not running, gone.
fn remove_domain(
    calls: &Calls<'_>,
    domain: &Domain,
    name: &str,
    view: &DomainView,
) -> Result<(), LibvirtError> {
    match calls.rpc("virDomainDestroy", name, |_| domain.destroy()) {
        Ok(()) => {}
        Err(error) if error.is(sys::VIR_ERR_NO_DOMAIN) => return Ok(()),
        Err(error) if error.is(sys::VIR_ERR_OPERATION_INVALID) => {}
        Err(error) => return Err(error),
    }
    // Only a file of this VM alone is removed with it, never a template that others share
    // (terraform-provider-libvirt#921).
    let own_nvram = view.nvram.as_deref().is_none_or(|path| {
        path.rsplit('/')
            .next()
            .is_some_and(|file| file.contains(name))
    });
    let nvram = if own_nvram {
        sys::VIR_DOMAIN_UNDEFINE_NVRAM
    } else {
        sys::VIR_DOMAIN_UNDEFINE_KEEP_NVRAM
    };
    let base =
        sys::VIR_DOMAIN_UNDEFINE_MANAGED_SAVE | sys::VIR_DOMAIN_UNDEFINE_SNAPSHOTS_METADATA | nvram;
    // An older libvirt lacks the later ones, and refuses a flag it does not know.
    let attempts = [
        base | sys::VIR_DOMAIN_UNDEFINE_CHECKPOINTS_METADATA | sys::VIR_DOMAIN_UNDEFINE_TPM,
        base | sys::VIR_DOMAIN_UNDEFINE_CHECKPOINTS_METADATA,
        base,
        nvram,
        0,
    ];
    let mut last = None;
    for flags in attempts {
        match calls.rpc("virDomainUndefineFlags", name, |_| {
            domain.undefine_flags(flags)
        }) {
            Ok(()) => return Ok(()),
            Err(error) if error.is(sys::VIR_ERR_NO_DOMAIN) => return Ok(()),
            // A transient domain has nothing to undefine and went with destroy.
            Err(error)
                if error.is(sys::VIR_ERR_OPERATION_INVALID) && lookup(calls, name)?.is_none() =>
            {
                return Ok(());
            }
            Err(error)
                if matches!(
                    error.number,
                    sys::VIR_ERR_INVALID_ARG
                        | sys::VIR_ERR_ARGUMENT_UNSUPPORTED
                        | sys::VIR_ERR_NO_SUPPORT
                        | sys::VIR_ERR_CONFIG_UNSUPPORTED
                ) =>
            {
                last = Some(error);
            }
            Err(error) => return Err(error),
        }
    }
    last.map_or(Ok(()), Err)
}

/// By name, also when the domain is gone already; and where else the domain had its disks, if the
/// pool's setting changed since.
fn remove_volumes(
    calls: &Calls<'_>,
    pool: &str,
    name: &str,
    disks: &[String],
) -> Result<(), StorageError> {
    match Pool::open(calls, pool) {
        Ok(pool) => {
            let volumes = VolumeNames::of_text(name);
            pool.delete(&volumes.overlay)?;
            pool.delete(&volumes.seed)?;
        }
        // No pool, nothing in it.
        Err(StorageError::NoPool { .. }) => {}
        Err(error) => return Err(error),
    }
    for path in disks {
        let file = path.rsplit('/').next().unwrap_or_default();
        if VolumeNames::instance_of(file) != Some(name) {
            continue;
        }
        match calls.rpc("virStorageVolLookupByPath", path, |conn| {
            conn.lookup_storage_vol_by_path(path)
        }) {
            Ok(volume) => {
                if let Err(error) = calls.rpc("virStorageVolDelete", path, |_| volume.delete(0))
                    && !error.is_gone()
                {
                    return Err(error.into());
                }
            }
            Err(error) if error.is_gone() => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Volumes of instances that nobody has, and bases of ours that nothing uses.
pub(crate) async fn collect_garbage(
    inner: &Arc<Inner>,
    live: &BTreeSet<Uid>,
    grace: Duration,
) -> Result<Vec<String>, KvmError> {
    let live = Arc::new(names_of(live.iter()));
    let sweeps = inner
        .hosts
        .values()
        .map(|host| sweep(inner, host, Arc::clone(&live), grace));
    let mut all = Vec::new();
    for swept in futures::future::join_all(sweeps).await {
        all.extend(swept?);
    }
    Ok(all)
}

async fn sweep(
    inner: &Arc<Inner>,
    host: &Arc<Host>,
    live: Arc<BTreeSet<String>>,
    grace: Duration,
) -> Result<Vec<String>, KvmError> {
    let pending: BTreeSet<String> = inner
        .pending
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .keys()
        .cloned()
        .collect();
    // Bases that a create would use now stay, whether something is laid over them or not.
    let wanted: BTreeSet<String> = inner
        .config
        .images
        .values()
        .filter_map(|spec| {
            let digest = inner.images.known_digest(spec)?;
            Some(base_name(&spec.key, &digest, spec.format?))
        })
        .collect();
    let fetching = inner
        .images
        .status()
        .iter()
        .any(|fetch| fetch.host == host.name());
    let now = inner.clock.now();
    let (pool, name) = (host.config.pool.clone(), host.name().to_owned());
    let (images, job_host) = (Arc::clone(&inner.images), name.clone());
    let _pool = host.pool_lock.lock().await;
    let deleted = host
        .run("virStoragePoolListAllVolumes", LONG_CALL, move |calls| {
            let pool = match Pool::open(calls, &pool) {
                Ok(pool) => pool,
                Err(StorageError::NoPool { .. }) => return Ok(Vec::new()),
                Err(error) => return Err(error),
            };
            pool.refresh()?;
            let mut views = Vec::new();
            for volume in pool.names()? {
                let relevant = VolumeNames::instance_of(&volume).is_some()
                    || volume.starts_with("base-")
                    || volume.ends_with(".qcow2");
                // One that went away in between is no matter.
                if relevant && let Some(view) = pool.view(&volume)? {
                    views.push(view);
                }
            }
            let old = |modified: Option<jiff::Timestamp>| {
                modified
                    .is_some_and(|at| now.duration_since(at).unsigned_abs() >= grace && now > at)
            };
            let mut deleted = Vec::new();
            for view in &views {
                let Some(instance) = VolumeNames::instance_of(&view.name) else {
                    continue;
                };
                let owned = live.contains(instance) || pending.contains(instance);
                // Never from under a domain, whoever's it is.
                if owned || !old(view.modified) || lookup(calls, instance)?.is_some() {
                    continue;
                }
                if pool.delete(&view.name)? {
                    deleted.push(view.name.clone());
                }
            }
            let gone: BTreeSet<&str> = deleted.iter().map(String::as_str).collect();
            let used: BTreeSet<&str> = views
                .iter()
                .filter(|v| !gone.contains(v.name.as_str()))
                .filter_map(|v| v.backing.as_deref())
                .collect();
            let mut bases = Vec::new();
            for view in views.iter().filter(|v| !v.name.ends_with(".complete")) {
                let ours = images.pins.is_our_base(&job_host, pool.name(), &view.name);
                if ours
                    && !fetching
                    && !wanted.contains(&view.name)
                    && !used.contains(view.path.as_str())
                    && old(view.modified)
                {
                    // The marker first: a base without one is never used.
                    pool.delete(&marker_name(&view.name))?;
                    if pool.delete(&view.name)? {
                        bases.push(view.name.clone());
                    }
                    if let Err(error) = images.pins.forget_base(&job_host, pool.name(), &view.name)
                    {
                        warn!(%error, "image record not written");
                    }
                }
            }
            drop(gone);
            deleted.extend(bases);
            Ok::<_, StorageError>(deleted)
        })
        .await?
        .map_err(on_host(&name))?;
    if !deleted.is_empty() {
        info!(
            HOST = name,
            volumes = deleted.join(", "),
            "volumes without an owner deleted"
        );
    }
    Ok(deleted
        .into_iter()
        .map(|volume| format!("hosts/{name}/volumes/{volume}"))
        .collect())
}

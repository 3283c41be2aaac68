//! From a request to a started domain.

use std::sync::{Arc, PoisonError};

use egress_core::ProviderId;
use egress_provider::{CreateRequest, InstanceEvent, Step};
use tracing::{info, warn};
use virt::domain::Domain;
use virt::sys;

use super::Inner;
use super::error::{KvmError, on_host};
use super::placement::{Resolved, VolumeNames, provider_id, resolve};
use crate::capabilities::Capabilities;
use crate::config::{DomainType, Firmware, Format};
use crate::domain::{Disk, DomainSpec, DomainView, Marks};
use crate::host::calls::Calls;
use crate::host::error::LibvirtError;
use crate::host::{CALL, Host, LONG_CALL};
use crate::image::cache::Base;
use crate::seed::Seed;
use crate::storage::{Pool, StorageError};

/// An instance whose image is fetched, or whose wait ended badly.
pub(crate) struct Pending {
    pub host: String,
    pub image: String,
    pub request: CreateRequest,
    /// Some: it ended, with that.
    pub error: Option<KvmError>,
    pub building: bool,
    pub stop: tokio_util::sync::CancellationToken,
}

impl Pending {
    pub fn step(&self, inner: &Inner) -> Step {
        if self.building {
            return Step::Creating(format!("on {}", self.host));
        }
        let text = inner
            .images
            .status()
            .iter()
            .find(|f| f.host == self.host && f.image == self.image)
            .map(crate::image::cache::FetchStatus::text);
        Step::FetchingImage(text.unwrap_or_else(|| format!("{} on {}", self.image, self.host)))
    }
}

pub(crate) async fn create(
    inner: &Arc<Inner>,
    request: &CreateRequest,
) -> Result<ProviderId, KvmError> {
    let lock = inner.lock_of(request.name.as_str());
    let _only = lock.lock().await;
    let name = request.name.as_str();
    {
        let mut pending = inner.pending.lock().unwrap_or_else(PoisonError::into_inner);
        match pending.get(name) {
            Some(found) if found.error.is_none() => return Ok(provider_id(&found.host, name)),
            // Asked for again: a new attempt.
            Some(_) => drop(pending.remove(name)),
            None => {}
        }
    }
    let resolved = resolve(&inner.config, &request.placement)?;
    // An earlier attempt may have got to any of the hosts; one that cannot be asked could hold
    // the instance, and then there would be two.
    let hosts: Vec<Arc<Host>> = resolved
        .hosts
        .iter()
        .map(|host| inner.host(host).cloned())
        .collect::<Result<_, _>>()?;
    let looked = futures::future::join_all(hosts.iter().map(|host| find_ours(host, request))).await;
    for (host, found) in hosts.iter().zip(looked) {
        if let Some(found) = found? {
            ensure_started(host, request, &resolved, found).await?;
            return Ok(provider_id(host.name(), name));
        }
    }
    let host = choose(inner, &hosts, &resolved).await?;
    let base = inner
        .images
        .find_base(&host, &resolved.image, inner.disk_bytes())
        .await?;
    match base {
        Some(base) => build(inner, &host, request, &resolved, &base).await?,
        None => wait_for_image(inner, &host, request, resolved),
    }
    Ok(provider_id(host.name(), name))
}

/// The domain, if it is there: running or not, and its marks.
struct Found {
    active: bool,
    paused: bool,
    marks: Marks,
}

/// Looks for the instance's domain; one of that name or UUID that is not ours is a conflict.
async fn find_ours(host: &Host, request: &CreateRequest) -> Result<Option<Found>, KvmError> {
    let name = request.name.to_string();
    let job_name = name.clone();
    let looked = host
        .call("virDomainLookupByName", CALL, move |calls| {
            let Some(domain) = lookup(calls, &job_name)? else {
                return Ok(None);
            };
            let xml = calls.rpc("virDomainGetXMLDesc", &job_name, |_| domain.xml_desc(0))?;
            let state = state_of(calls, &domain, &job_name)?;
            Ok(Some((xml, state)))
        })
        .await?;
    let Some((xml, state)) = looked else {
        return Ok(None);
    };
    let conflict = |why: &str| KvmError::Conflict {
        host: host.name().to_owned(),
        name: name.clone(),
        why: why.to_owned(),
    };
    let view = DomainView::parse(&xml).map_err(|error| KvmError::BadXml {
        host: host.name().to_owned(),
        name: name.clone(),
        reason: error.to_string(),
    })?;
    let marks = view
        .marks
        .ok_or_else(|| conflict("it has no mark of the operator"))?;
    if marks.uid != request.uid {
        return Err(conflict("it belongs to another Proxy"));
    }
    if marks.installation != request.installation {
        return Err(conflict(&format!(
            "it belongs to the installation {}",
            marks.installation
        )));
    }
    Ok(Some(Found {
        active: !matches!(state, sys::VIR_DOMAIN_SHUTOFF | sys::VIR_DOMAIN_CRASHED),
        paused: state == sys::VIR_DOMAIN_PAUSED,
        marks,
    }))
}

/// A domain by name; None when there is none.
pub(crate) fn lookup(calls: &Calls<'_>, name: &str) -> Result<Option<Domain>, LibvirtError> {
    match calls.rpc("virDomainLookupByName", name, |conn| {
        conn.lookup_domain_by_name(name)
    }) {
        Ok(domain) => Ok(Some(domain)),
        Err(error) if error.is(sys::VIR_ERR_NO_DOMAIN) => Ok(None),
        Err(error) => Err(error),
    }
}

pub(crate) fn state_of(
    calls: &Calls<'_>,
    domain: &Domain,
    name: &str,
) -> Result<sys::virDomainState, LibvirtError> {
    let (state, _) = calls.rpc("virDomainGetState", name, |_| domain.state())?;
    Ok(state.to_raw())
}

/// Starts a domain; one that runs already is fine.
fn start(calls: &Calls<'_>, domain: &Domain, name: &str) -> Result<(), LibvirtError> {
    match calls.rpc("virDomainCreate", name, |_| domain.create()) {
        Err(error)
            if error.is(sys::VIR_ERR_OPERATION_INVALID)
                && calls
                    .rpc("virDomainIsActive", name, |_| domain.is_active())
                    .unwrap_or(false) =>
        {
            Ok(())
        }
        other => other,
    }
}

/// Makes a domain that is there run. Where it does not start as it is, it is defined anew first:
/// what libvirt stored may name a firmware or emulator that went with an update (nixpkgs#378894).
async fn ensure_started(
    host: &Arc<Host>,
    request: &CreateRequest,
    resolved: &Resolved,
    found: Found,
) -> Result<(), KvmError> {
    let name = request.name.to_string();
    if found.active {
        if found.paused {
            host.call("virDomainResume", LONG_CALL, move |calls| {
                match lookup(calls, &name)? {
                    Some(domain) => calls.rpc("virDomainResume", &name, |_| domain.resume()),
                    None => Ok(()),
                }
            })
            .await?;
        }
        return Ok(());
    }
    let job_name = name.clone();
    let started = host
        .call("virDomainCreate", LONG_CALL, move |calls| {
            match lookup(calls, &job_name)? {
                Some(domain) => start(calls, &domain, &job_name),
                None => Err(LibvirtError::odd("virDomainCreate", "the domain went away")),
            }
        })
        .await;
    let Err(error) = started else {
        return Ok(());
    };
    warn!(HOST = host.name(), domain = name, %error, "did not start as it is stored: defining it anew");
    let volumes = VolumeNames::of(&request.name);
    let pool = host.config.pool.clone();
    let paths = host
        .run("virStorageVolGetXMLDesc", CALL, move |calls| {
            let pool = Pool::open(calls, &pool)?;
            let overlay = pool.view(&volumes.overlay)?;
            let seed = pool.view(&volumes.seed)?;
            Ok(overlay.zip(seed).map(|(o, s)| (o.path, s.path)))
        })
        .await?
        .map_err(on_host(host.name()))?;
    match paths {
        Some((overlay, seed)) => {
            define_and_start(host, request, resolved, found.marks, overlay, seed).await
        }
        None => Err(error.into()),
    }
}

/// The host with most memory among those that take new VMs and have enough of it.
async fn choose(
    inner: &Inner,
    hosts: &[Arc<Host>],
    resolved: &Resolved,
) -> Result<Arc<Host>, KvmError> {
    let taking: Vec<&Arc<Host>> = hosts.iter().filter(|h| !h.config.draining).collect();
    match taking.as_slice() {
        [] => {
            let names: Vec<&str> = hosts.iter().map(|h| h.name()).collect();
            return Err(KvmError::Draining(names.join(", ")));
        }
        [only] => return Ok(Arc::clone(only)),
        _ => {}
    }
    let needed = resolved.machine.memory_mib << 20;
    let disk = inner.disk_bytes();
    let asked = taking.iter().map(|host| {
        let pool = host.config.pool.clone();
        async move {
            let memory = host
                .run("virNodeGetMemoryStats", CALL, move |calls| {
                    let memory = calls.available_memory()?;
                    Pool::open(calls, &pool)?.require(disk, "a VM's disk")?;
                    Ok::<_, StorageError>(memory)
                })
                .await;
            match memory {
                Ok(Ok(memory)) if memory >= needed => Ok((memory, Arc::clone(host))),
                Ok(Ok(memory)) => Err(KvmError::NoMemory {
                    host: host.name().to_owned(),
                    available: memory >> 20,
                    needed: resolved.machine.memory_mib,
                }),
                Ok(Err(error)) => Err(on_host(host.name())(error)),
                Err(error) => Err(error.into()),
            }
        }
    });
    let mut best: Option<(u64, Arc<Host>)> = None;
    let mut refused = None;
    for answer in futures::future::join_all(asked).await {
        match answer {
            Ok((memory, host)) => {
                if best.as_ref().is_none_or(|(most, _)| memory > *most) {
                    best = Some((memory, host));
                }
            }
            Err(error) => refused = Some(error),
        }
    }
    match (best, refused) {
        (Some((_, host)), _) => Ok(host),
        (None, Some(error)) => Err(error),
        (None, None) => Err(KvmError::Placement("no host is configured".to_owned())),
    }
}

/// Goes on in the background once the image is there.
fn wait_for_image(
    inner: &Arc<Inner>,
    host: &Arc<Host>,
    request: &CreateRequest,
    resolved: Resolved,
) {
    let name = request.name.to_string();
    let stop = inner.stop.child_token();
    inner
        .pending
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .insert(
            name.clone(),
            Pending {
                host: host.name().to_owned(),
                image: resolved.image.key.clone(),
                request: request.clone(),
                error: None,
                building: false,
                stop: stop.clone(),
            },
        );
    let (inner, host, request) = (Arc::clone(inner), Arc::clone(host), request.clone());
    let tasks = inner.tasks.clone();
    tasks.spawn(async move {
        let image = inner
            .images
            .ensure(&host, &resolved.image, inner.disk_bytes());
        let image = tokio::select! {
            image = image => image,
            // Deleted in the meantime: whoever did that has removed the entry.
            () = stop.cancelled() => return,
        };
        let lock = inner.lock_of(&name);
        let _only = lock.lock().await;
        // From here on a delete waits for the lock, so that nothing is made after it.
        if stop.is_cancelled() {
            return;
        }
        if let Some(entry) = inner
            .pending
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get_mut(&name)
        {
            entry.building = true;
        }
        let result = match image {
            Ok(base) => Box::pin(build(&inner, &host, &request, &resolved, &base)).await,
            Err(error) => Err(error.into()),
        };
        {
            let mut pending = inner.pending.lock().unwrap_or_else(PoisonError::into_inner);
            match result {
                Ok(()) => drop(pending.remove(&name)),
                Err(error) => {
                    if let Some(entry) = pending.get_mut(&name) {
                        entry.error = Some(error);
                    }
                }
            }
        }
        let _ = inner
            .own_events
            .send(InstanceEvent::Instance(request.name.clone()));
    });
}

/// Overlay, seed, define, start.
async fn build(
    inner: &Arc<Inner>,
    host: &Arc<Host>,
    request: &CreateRequest,
    resolved: &Resolved,
    base: &Base,
) -> Result<(), KvmError> {
    let seed = Seed {
        instance: request.name.as_str(),
        user_data: request
            .user_data
            .as_ref()
            .map_or(&[], |data| data.expose_secret()),
        vendor_data: inner
            .config
            .vendor_data
            .as_ref()
            .map(egress_core::SecretBytes::expose_secret),
        network_config: inner
            .config
            .network_config
            .as_ref()
            .map(egress_core::SecretBytes::expose_secret),
        install_guest_agent: inner.config.install_guest_agent,
    }
    .build()?;
    let needed_mib = resolved.machine.memory_mib;
    let memory = host
        .call("virNodeGetMemoryStats", CALL, |calls| {
            calls.available_memory()
        })
        .await;
    match memory {
        Ok(available) if available >> 20 < needed_mib => {
            return Err(KvmError::NoMemory {
                host: host.name().to_owned(),
                available: available >> 20,
                needed: needed_mib,
            });
        }
        Ok(_) => {}
        // Not every driver tells; then the start of the VM will.
        Err(error) if error.libvirt().is_some() => {}
        Err(error) => return Err(error.into()),
    }
    let (overlay, seed) = {
        let _pool = host.pool_lock.lock().await;
        let (pool, disk) = (host.config.pool.clone(), inner.disk_bytes());
        let (volumes, base) = (VolumeNames::of(&request.name), base.clone());
        host.run("virStorageVolCreateXML", LONG_CALL, move |calls| {
            volumes_for(calls, &pool, &volumes, &base, disk, &seed)
        })
        .await?
        .map_err(on_host(host.name()))?
    };
    let marks = Marks {
        uid: request.uid.clone(),
        installation: request.installation.clone(),
        created_at: Some(inner.clock.now()),
    };
    define_and_start(host, request, resolved, marks, overlay, seed).await
}

/// Makes both volumes, and gives their paths.
fn volumes_for(
    calls: &Calls<'_>,
    pool: &str,
    volumes: &VolumeNames,
    base: &Base,
    disk: u64,
    seed: &[u8],
) -> Result<(String, String), StorageError> {
    let pool = Pool::open(calls, pool)?;
    let conflict = |volume: &str, why: &str| StorageError::Conflict {
        pool: pool.name().to_owned(),
        volume: volume.to_owned(),
        why: why.to_owned(),
    };
    let overlay = &volumes.overlay;
    let mut path = None;
    if let Some(view) = pool.view(overlay)? {
        match view.backing.as_deref() {
            Some(backing) if backing == base.path => path = Some(view.path),
            // Left by an attempt with another image, or cut off as it was made: no domain uses
            // it, so it is made anew.
            Some(backing) if is_base_path(backing) => drop(pool.delete(overlay)?),
            None if view.physical == Some(0) => drop(pool.delete(overlay)?),
            Some(backing) => return Err(conflict(overlay, &format!("it is laid over {backing}"))),
            None => return Err(conflict(overlay, "it is laid over nothing")),
        }
    }
    let overlay_path = match path {
        Some(path) => path,
        None => {
            pool.require(disk, "a VM's disk (diskSizeGb)")?;
            let made = pool.create_overlay(overlay, disk, &base.path, base.format)?;
            calls.rpc("virStorageVolGetPath", overlay, |_| made.path())?
        }
    };
    let name = &volumes.seed;
    if let Some(view) = pool.view(name)? {
        if !matches!(view.format.as_str(), "raw" | "iso") || view.capacity > 64 << 20 {
            return Err(conflict(
                name,
                &format!("it is {} of {} bytes", view.format, view.capacity),
            ));
        }
        // What a cut-off upload left is never trusted.
        pool.delete(name)?;
    }
    let made = pool.create_raw(name, seed.len() as u64)?;
    pool.upload(&made, name, seed)?;
    let seed_path = calls.rpc("virStorageVolGetPath", name, |_| made.path())?;
    Ok((overlay_path, seed_path))
}

/// Whether a path is that of a base volume, by its file name.
fn is_base_path(path: &str) -> bool {
    path.rsplit('/').next().is_some_and(|file| {
        file.starts_with("base-") && (file.ends_with(".qcow2") || file.ends_with(".raw"))
    })
}

async fn define_and_start(
    host: &Arc<Host>,
    request: &CreateRequest,
    resolved: &Resolved,
    marks: Marks,
    overlay: String,
    seed: String,
) -> Result<(), KvmError> {
    let config = host.config.clone();
    let (name, key) = (request.name.to_string(), request.key.clone());
    let (machine, image) = (resolved.machine, resolved.image.clone());
    let job_name = name.clone();
    let made = host
        .call("virDomainCreate", LONG_CALL, move |calls| {
            let (kvm, capabilities) = virtualisation(calls, config.domain_type)?;
            if image.firmware == Firmware::Uefi && !capabilities.uefi_without_secure_boot {
                return Ok(false);
            }
            let spec = DomainSpec {
                name: job_name.clone(),
                key,
                marks,
                machine,
                kvm,
                cpu_mode: config.cpu_mode.clone(),
                firmware: image.firmware,
                overlay: Disk {
                    path: overlay,
                    format: Format::Qcow2,
                },
                seed: Disk {
                    path: seed,
                    format: Format::Raw,
                },
                nic: config.nic.clone(),
            };
            let xml = spec.to_xml();
            tracing::trace!(domain = job_name, xml, "domain document");
            let domain = calls.rpc("virDomainDefineXML", &job_name, |conn| {
                conn.define_domain_xml(&xml)
            })?;
            start(calls, &domain, &job_name)?;
            Ok(true)
        })
        .await?;
    if !made {
        return Err(KvmError::NoFirmware {
            host: host.name().to_owned(),
        });
    }
    info!(
        HOST = host.name(),
        domain = name,
        image = resolved.image.key,
        "VM started"
    );
    Ok(())
}

/// Whether guests run under hardware virtualisation there, and what these have.
fn virtualisation(
    calls: &Calls<'_>,
    wanted: DomainType,
) -> Result<(bool, Capabilities), LibvirtError> {
    match wanted {
        DomainType::Kvm => Capabilities::read(calls, "kvm").map(|c| (true, c)),
        DomainType::Qemu => Capabilities::read(calls, "qemu").map(|c| (false, c)),
        DomainType::Auto => match Capabilities::read(calls, "kvm") {
            Ok(found) => Ok((true, found)),
            Err(_) => Capabilities::read(calls, "qemu").map(|c| (false, c)),
        },
    }
}

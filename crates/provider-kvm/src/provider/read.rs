//! get and list.

use std::sync::{Arc, PoisonError};

use egress_core::{ErrorClass, InstanceName, ProviderId, Uid};
use egress_provider::{Instance, InstanceState, Step};
use tracing::warn;
use virt::domain::Domain;
use virt::sys;

use super::Inner;
use super::create::{lookup, state_of};
use super::error::KvmError;
use super::placement::{is_instance_name, parse_id, provider_id};
use crate::address;
use crate::domain::{DomainView, Marks, NAMESPACE};
use crate::host::error::LibvirtError;
use crate::host::{CALL, Host};
use crate::xml::Element;

pub(crate) async fn get(inner: &Arc<Inner>, id: &ProviderId) -> Result<Instance, KvmError> {
    let (host_name, name) = parse_id(id)?;
    let host = inner.host(host_name)?;
    if let Some(answer) = pending(inner, host_name, name) {
        return answer;
    }
    let job_name = name.to_owned();
    let seen = host
        .call("virDomainLookupByName", CALL, move |calls| {
            let Some(domain) = lookup(calls, &job_name)? else {
                return Ok(None);
            };
            let gone = |error: LibvirtError| error.is(sys::VIR_ERR_NO_DOMAIN);
            let xml = match calls.rpc("virDomainGetXMLDesc", &job_name, |_| domain.xml_desc(0)) {
                Ok(xml) => xml,
                Err(error) if gone(error.clone()) => return Ok(None),
                Err(error) => return Err(error),
            };
            let state = match state_of(calls, &domain, &job_name) {
                Ok(state) => state,
                Err(error) if gone(error.clone()) => return Ok(None),
                Err(error) => return Err(error),
            };
            let Ok(view) = DomainView::parse(&xml) else {
                return Err(LibvirtError::odd(
                    "virDomainGetXMLDesc",
                    "the XML is not readable",
                ));
            };
            let address = is_up(state)
                .then(|| address::find(calls, &domain, &view, &job_name))
                .flatten();
            Ok(Some((view, state, domain.id(), address)))
        })
        .await?;
    let not_found = || KvmError::NotFound {
        host: host_name.to_owned(),
        name: name.to_owned(),
    };
    let Some((view, state, run, address)) = seen else {
        inner.forget(host_name, name);
        return Err(not_found());
    };
    // Somebody else's domain of that name: ours is not there. A create will tell the conflict.
    let marks = view
        .marks
        .filter(|marks| marks.installation == inner.installation)
        .ok_or_else(not_found)?;
    let address = remember(inner, host_name, name, run, address, is_up(state));
    Ok(Instance {
        id: id.clone(),
        name: InstanceName::for_uid(&marks.uid),
        state: instance_state(state, address, host_name),
        uid: marks.uid,
        created_at: marks.created_at,
    })
}

/// What is known of an instance that has no domain yet.
fn pending(inner: &Inner, host: &str, name: &str) -> Option<Result<Instance, KvmError>> {
    let mut pending = inner.pending.lock().unwrap_or_else(PoisonError::into_inner);
    let entry = pending.get(name).filter(|entry| entry.host == host)?;
    match &entry.error {
        Some(error) => {
            let error = error.clone();
            // A failure that may heal is told once: the next look finds nothing, and the
            // reconciler creates again. One that will not stays until it is asked for again.
            if error.class() != ErrorClass::Permanent {
                pending.remove(name);
            }
            Some(Err(error))
        }
        None => Some(Ok(Instance {
            id: provider_id(host, name),
            name: entry.request.name.clone(),
            state: InstanceState::Provisioning(entry.step(inner)),
            uid: entry.request.uid.clone(),
            created_at: None,
        })),
    }
}

fn is_up(state: sys::virDomainState) -> bool {
    matches!(state, sys::VIR_DOMAIN_RUNNING | sys::VIR_DOMAIN_BLOCKED)
}

fn instance_state(
    state: sys::virDomainState,
    address: Option<std::net::IpAddr>,
    host: &str,
) -> InstanceState {
    match (state, address) {
        (state, Some(address)) if is_up(state) => InstanceState::Running {
            address,
            port: None,
        },
        (state, None) if is_up(state) => InstanceState::Provisioning(Step::WaitingForAddress(
            format!("the VM runs on {host} and has no address yet"),
        )),
        // Undecidable must not mean that it is built anew.
        (sys::VIR_DOMAIN_NOSTATE, _) => {
            InstanceState::Provisioning(Step::Creating(format!("on {host}")))
        }
        _ => InstanceState::Stopped,
    }
}

/// Keeps the last address of a run of a domain, and gives it where nothing newer is known.
fn remember(
    inner: &Inner,
    host: &str,
    name: &str,
    run: Option<u32>,
    address: Option<std::net::IpAddr>,
    up: bool,
) -> Option<std::net::IpAddr> {
    let mut known = inner
        .addresses
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    let key = (host.to_owned(), name.to_owned());
    let Some(run) = run.filter(|_| up) else {
        known.remove(&key);
        return None;
    };
    match address {
        Some(address) => {
            known.insert(key, (run, address));
            Some(address)
        }
        None => known
            .get(&key)
            .filter(|(of, _)| *of == run)
            .map(|(_, address)| *address),
    }
}

pub(crate) async fn list(inner: &Arc<Inner>) -> Result<Vec<Instance>, KvmError> {
    let lists = futures::future::join_all(inner.hosts.values().map(|h| list_host(inner, h))).await;
    let mut all = Vec::new();
    for list in lists {
        all.extend(list?);
    }
    let pending = inner.pending.lock().unwrap_or_else(PoisonError::into_inner);
    for (name, entry) in pending.iter().filter(|(_, entry)| entry.error.is_none()) {
        if !all.iter().any(|i| i.name.as_str() == name) {
            all.push(Instance {
                id: provider_id(&entry.host, name),
                name: entry.request.name.clone(),
                state: InstanceState::Provisioning(entry.step(inner)),
                uid: entry.request.uid.clone(),
                created_at: None,
            });
        }
    }
    Ok(all)
}

/// A domain of a list, by what one or two round trips tell of all.
struct Listed {
    domain: Domain,
    /// Differs from run to run; None while it does not run.
    run: Option<u32>,
    state: sys::virDomainState,
    name: String,
    uuid: String,
}

async fn list_host(inner: &Arc<Inner>, host: &Arc<Host>) -> Result<Vec<Instance>, KvmError> {
    let mut found = host
        .call("virConnectListAllDomains", CALL, |calls| {
            // Name, UUID and run come with each domain: no further call for these.
            let all = calls.rpc("virConnectListAllDomains", "all", |conn| {
                conn.list_all_domains(0)
            })?;
            let mut found: Vec<Listed> = all
                .into_iter()
                .filter_map(|domain| {
                    let name = domain.name().ok()?;
                    let uuid = domain.uuid_string().ok()?;
                    is_instance_name(&name).then_some(Listed {
                        state: sys::VIR_DOMAIN_SHUTOFF,
                        run: domain.id(),
                        domain,
                        name,
                        uuid,
                    })
                })
                .collect();
            // Only what runs can be in more than one state.
            if found.iter().any(|l| l.run.is_some()) {
                let states: std::collections::HashMap<String, sys::virDomainState> = calls
                    .active_domain_states()?
                    .into_iter()
                    .filter_map(|(domain, state)| Some((domain.uuid_string().ok()?, state)))
                    .collect();
                for listed in found.iter_mut().filter(|l| l.run.is_some()) {
                    if let Some(state) = states.get(&listed.uuid) {
                        listed.state = *state;
                    }
                }
            }
            Ok(found)
        })
        .await?;
    let unknown: Vec<(Domain, String)> = {
        let mut cache = inner.marks.lock().unwrap_or_else(PoisonError::into_inner);
        // What is gone is forgotten, so that the cache is never larger than the host.
        cache.retain(|(of, uuid), _| of != host.name() || found.iter().any(|l| l.uuid == *uuid));
        found
            .iter()
            .filter(|l| !cache.contains_key(&(host.name().to_owned(), l.uuid.clone())))
            .map(|l| (l.domain.clone(), l.uuid.clone()))
            .collect()
    };
    read_marks(inner, host, unknown).await?;
    let mut instances = Vec::new();
    for listed in found.drain(..) {
        let marks = inner
            .marks
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&(host.name().to_owned(), listed.uuid.clone()))
            .cloned()
            .flatten();
        let Some(marks) = marks.filter(|m| m.installation == inner.installation) else {
            continue;
        };
        let address = inner
            .addresses
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&(host.name().to_owned(), listed.name.clone()))
            .filter(|(run, _)| Some(*run) == listed.run)
            .map(|(_, address)| *address);
        instances.push(Instance {
            id: provider_id(host.name(), &listed.name),
            name: InstanceName::for_uid(&marks.uid),
            state: instance_state(listed.state, address, host.name()),
            uid: marks.uid,
            created_at: marks.created_at,
        });
    }
    Ok(instances)
}

/// Reads the marks of domains that were not seen before, on all threads of the connection.
async fn read_marks(
    inner: &Arc<Inner>,
    host: &Arc<Host>,
    domains: Vec<(Domain, String)>,
) -> Result<(), KvmError> {
    if domains.is_empty() {
        return Ok(());
    }
    let share = domains.len().div_ceil(4).max(1);
    let mut jobs = Vec::new();
    let mut rest = domains;
    while !rest.is_empty() {
        let part = rest.split_off(rest.len().saturating_sub(share));
        jobs.push(host.call("virDomainGetMetadata", CALL, move |calls| {
            let mut read = Vec::with_capacity(part.len());
            for (domain, uuid) in part {
                let metadata = calls.rpc("virDomainGetMetadata", &uuid, |_| {
                    let kind = i32::try_from(sys::VIR_DOMAIN_METADATA_ELEMENT).unwrap_or(2);
                    domain.metadata(kind, Some(NAMESPACE), 0)
                });
                match metadata {
                    Ok(text) => match Element::parse(&text) {
                        Ok(element) => read.push((uuid, Marks::read(&element))),
                        Err(error) => {
                            warn!(domain = uuid, %error, "metadata not readable, left out");
                        }
                    },
                    Err(error) if error.is(sys::VIR_ERR_NO_DOMAIN_METADATA) => {
                        read.push((uuid, None));
                    }
                    Err(error) if error.is(sys::VIR_ERR_NO_DOMAIN) => {}
                    Err(error) => {
                        // A dead connection fails the whole list, one odd domain does not.
                        if !calls.is_alive() {
                            return Err(error);
                        }
                        warn!(domain = uuid, %error, "not readable, left out of the list");
                    }
                }
            }
            Ok(read)
        }));
    }
    let mut fresh = Vec::new();
    for result in futures::future::join_all(jobs).await {
        fresh.extend(result?);
    }
    let mut cache = inner.marks.lock().unwrap_or_else(PoisonError::into_inner);
    for (uuid, marks) in fresh {
        cache.insert((host.name().to_owned(), uuid), marks);
    }
    Ok(())
}

/// The names of instances that have a UID.
pub(crate) fn names_of<'u>(
    uids: impl Iterator<Item = &'u Uid>,
) -> std::collections::BTreeSet<String> {
    uids.map(|uid| InstanceName::for_uid(uid).to_string())
        .collect()
}

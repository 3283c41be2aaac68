//! Whom a wake-up concerns: from an instance's name, a Secret, a provider or an address to the
//! Proxies behind it. Kept in step with the store of objects.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use egress_api::{Mode, PROVIDER_ANNOTATION, Proxy};
use egress_core::{InstanceName, ProxyKey, Uid};
use jiff::Timestamp;
use kube::ResourceExt;

use crate::status::has_usable_address;

/// Older first; the key decides between two of one second.
type Age = (Timestamp, ProxyKey);

/// Who has an instance that several name: the one it was made for, then the oldest, and of one
/// second the one that was taken over already.
type Claim = (bool, Timestamp, bool, ProxyKey);

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Entry {
    instance: Option<String>,
    secret: Option<(String, String)>,
    providers: BTreeSet<String>,
    /// Host and port, and the age that decides who has it.
    address: Option<((String, i32), Age)>,
    instance_uid: Option<(Uid, Claim)>,
    /// What a reconcile looks at in the object; the status is no part of it.
    fingerprint: u64,
}

#[derive(Default)]
struct Inner {
    entries: HashMap<ProxyKey, Entry>,
    by_instance: HashMap<String, BTreeSet<ProxyKey>>,
    by_secret: HashMap<(String, String), BTreeSet<ProxyKey>>,
    by_provider: BTreeMap<String, BTreeSet<ProxyKey>>,
    by_address: HashMap<(String, i32), BTreeSet<Age>>,
    by_instance_uid: HashMap<Uid, BTreeSet<Claim>>,
}

/// See the module.
#[derive(Default)]
pub(crate) struct Index(Mutex<Inner>);

/// What an update of one object changed.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Changed {
    /// The object itself, in more than its status.
    pub object: bool,
    /// Others whose address is (or was) the same.
    pub neighbours: BTreeSet<ProxyKey>,
}

impl Index {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the object over as it is now; None: it is gone.
    pub(crate) fn update(&self, key: &ProxyKey, object: Option<&Proxy>) -> Changed {
        let new = object.map(|o| entry(key, o));
        let mut inner = self.lock();
        let old = inner.entries.get(key).cloned();
        if old == new {
            return Changed::default();
        }
        let fingerprint = |e: &Option<Entry>| e.as_ref().map(|e| e.fingerprint);
        let mut changed = Changed {
            object: fingerprint(&old) != fingerprint(&new),
            neighbours: BTreeSet::new(),
        };
        let address = |e: &Option<Entry>| e.as_ref().and_then(|e| e.address.clone());
        if address(&old) != address(&new) {
            for (address, _) in [address(&old), address(&new)].into_iter().flatten() {
                let there = inner.by_address.get(&address);
                changed
                    .neighbours
                    .extend(there.into_iter().flatten().map(|(_, key)| key.clone()));
            }
            changed.neighbours.remove(key);
        }
        if let Some(old) = old {
            inner.remove(key, &old);
        }
        if let Some(new) = new {
            inner.insert(key, new);
        }
        changed
    }

    /// Every Proxy that was ever taken over and is not known to be gone.
    pub(crate) fn keys(&self) -> Vec<ProxyKey> {
        self.lock().entries.keys().cloned().collect()
    }

    pub(crate) fn by_instance(&self, name: &InstanceName) -> BTreeSet<ProxyKey> {
        let inner = self.lock();
        inner
            .by_instance
            .get(name.as_str())
            .cloned()
            .unwrap_or_default()
    }

    pub(crate) fn by_secret(&self, namespace: &str, name: &str) -> BTreeSet<ProxyKey> {
        let inner = self.lock();
        inner
            .by_secret
            .get(&(namespace.to_owned(), name.to_owned()))
            .cloned()
            .unwrap_or_default()
    }

    pub(crate) fn by_provider(&self, name: &str) -> BTreeSet<ProxyKey> {
        self.lock()
            .by_provider
            .get(name)
            .cloned()
            .unwrap_or_default()
    }

    /// The older Proxy that has the address of `key` too.
    pub(crate) fn older_at_address(&self, key: &ProxyKey) -> Option<ProxyKey> {
        let inner = self.lock();
        let (address, age) = inner.entries.get(key)?.address.clone()?;
        let (_, oldest) = inner
            .by_address
            .get(&address)?
            .first()
            .filter(|first| **first < age)?
            .clone();
        Some(oldest)
    }

    /// The Proxy with a better claim on the instance that `key` names too (a copied annotation).
    pub(crate) fn better_claim(&self, key: &ProxyKey) -> Option<ProxyKey> {
        let inner = self.lock();
        let (uid, claim) = inner.entries.get(key)?.instance_uid.clone()?;
        let best = inner.by_instance_uid.get(&uid)?.first()?;
        (*best < claim).then(|| best.3.clone())
    }
}

impl Inner {
    fn insert(&mut self, key: &ProxyKey, new: Entry) {
        if let Some(name) = &new.instance {
            let keys = self.by_instance.entry(name.clone()).or_default();
            keys.insert(key.clone());
        }
        if let Some(secret) = &new.secret {
            let keys = self.by_secret.entry(secret.clone()).or_default();
            keys.insert(key.clone());
        }
        for provider in &new.providers {
            let keys = self.by_provider.entry(provider.clone()).or_default();
            keys.insert(key.clone());
        }
        if let Some((address, age)) = &new.address {
            let ages = self.by_address.entry(address.clone()).or_default();
            ages.insert(age.clone());
        }
        if let Some((uid, age)) = &new.instance_uid {
            let ages = self.by_instance_uid.entry(uid.clone()).or_default();
            ages.insert(age.clone());
        }
        self.entries.insert(key.clone(), new);
    }

    fn remove(&mut self, key: &ProxyKey, old: &Entry) {
        fn drop_from<K: std::hash::Hash + Eq, V: Ord>(
            map: &mut HashMap<K, BTreeSet<V>>,
            from: &K,
            value: &V,
        ) {
            if let Some(set) = map.get_mut(from) {
                set.remove(value);
                if set.is_empty() {
                    map.remove(from);
                }
            }
        }
        if let Some(name) = &old.instance {
            drop_from(&mut self.by_instance, name, key);
        }
        if let Some(secret) = &old.secret {
            drop_from(&mut self.by_secret, secret, key);
        }
        for provider in &old.providers {
            if let Some(set) = self.by_provider.get_mut(provider) {
                set.remove(key);
                if set.is_empty() {
                    self.by_provider.remove(provider);
                }
            }
        }
        if let Some((address, age)) = &old.address {
            drop_from(&mut self.by_address, address, age);
        }
        if let Some((uid, age)) = &old.instance_uid {
            drop_from(&mut self.by_instance_uid, uid, age);
        }
        self.entries.remove(key);
    }
}

fn entry(key: &ProxyKey, object: &Proxy) -> Entry {
    let created = object
        .metadata
        .creation_timestamp
        .as_ref()
        .map_or(Timestamp::MAX, |t| t.0);
    let age = (created, key.clone());
    let managed = object.spec.mode == Mode::Managed;
    let instance_uid = object.instance_uid().filter(|_| managed);
    let status = object.status.clone().unwrap_or_default();
    let host = if managed {
        status.ip.clone().filter(|_| has_usable_address(&status))
    } else {
        // Known before anything is written of it.
        object.spec.endpoint.as_ref().map(|e| e.host.clone())
    };
    let address = host.filter(|_| !object.is_deleting()).map(|host| {
        let port = status.port.unwrap_or(object.spec.port);
        ((one_spelling(&host), port), age.clone())
    });
    Entry {
        instance: instance_uid
            .as_ref()
            .map(|uid| InstanceName::for_uid(uid).as_str().to_owned()),
        secret: object
            .spec
            .cloud_init
            .as_ref()
            .and_then(|c| c.secret_ref.as_ref())
            .map(|r| (key.namespace.clone(), r.name.clone())),
        providers: object
            .spec
            .provider
            .iter()
            .chain(object.annotations().get(PROVIDER_ANNOTATION))
            .cloned()
            .collect(),
        address,
        instance_uid: instance_uid.map(|uid| {
            let foreign = object.stored_uid().as_ref() != Some(&uid);
            let new = !object.has_finalizer();
            (uid, (foreign, created, new, key.clone()))
        }),
        fingerprint: fingerprint(object),
    }
}

/// `2001:DB8::1`, `[2001:db8::1]` and `2001:db8:0::1` are one address.
fn one_spelling(host: &str) -> String {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    bare.parse::<IpAddr>()
        .map_or_else(|_| bare.to_lowercase(), |address| address.to_string())
}

fn fingerprint(object: &Proxy) -> u64 {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hash = DefaultHasher::new();
    let meta = &object.metadata;
    meta.uid.hash(&mut hash);
    meta.generation.hash(&mut hash);
    meta.deletion_timestamp.is_some().hash(&mut hash);
    meta.finalizers.hash(&mut hash);
    for (name, value) in object.annotations() {
        if name.starts_with("crawl.example.com/") {
            (name, value).hash(&mut hash);
        }
    }
    hash.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::mk_managed;

    fn at(mut proxy: Proxy, ip: &str, created: i64) -> Proxy {
        proxy.status = Some(egress_api::ProxyStatus {
            phase: Some("Ready".into()),
            ip: Some(ip.into()),
            ..Default::default()
        });
        proxy.metadata.creation_timestamp =
            Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(
                Timestamp::from_second(created).unwrap(),
            ));
        proxy
    }

    #[test]
    fn of_two_with_one_address_the_older_has_it() {
        let index = Index::default();
        let old = at(mk_managed("old", "fake-a"), "192.0.2.1", 100);
        let young = at(mk_managed("young", "fake-a"), "192.0.2.1", 200);
        index.update(&young.key(), Some(&young));
        assert_eq!(index.older_at_address(&young.key()), None);
        let changed = index.update(&old.key(), Some(&old));
        assert_eq!(changed.neighbours, BTreeSet::from([young.key()]));
        assert_eq!(index.older_at_address(&young.key()), Some(old.key()));
        assert_eq!(index.older_at_address(&old.key()), None);
        let changed = index.update(&old.key(), None);
        assert_eq!(changed.neighbours, BTreeSet::from([young.key()]));
        assert_eq!(index.older_at_address(&young.key()), None);
        index.update(&young.key(), None);
        let inner = index.lock();
        assert!(inner.entries.is_empty() && inner.by_address.is_empty());
        assert!(inner.by_instance.is_empty() && inner.by_provider.is_empty());
        assert!(inner.by_instance_uid.is_empty() && inner.by_secret.is_empty());
    }

    #[test]
    fn another_port_is_another_address() {
        let index = Index::default();
        let one = at(mk_managed("one", "fake-a"), "127.0.0.1", 100);
        let mut two = at(mk_managed("two", "fake-a"), "127.0.0.1", 200);
        two.spec.port = 3129;
        index.update(&one.key(), Some(&one));
        index.update(&two.key(), Some(&two));
        assert_eq!(index.older_at_address(&two.key()), None);
    }

    #[test]
    fn a_status_alone_is_no_change_of_the_object() {
        let index = Index::default();
        let mut proxy = mk_managed("one", "fake-a");
        assert!(index.update(&proxy.key(), Some(&proxy)).object);
        proxy = at(proxy, "192.0.2.1", 100);
        assert!(!index.update(&proxy.key(), Some(&proxy)).object);
        proxy.metadata.generation = Some(7);
        assert!(index.update(&proxy.key(), Some(&proxy)).object);
    }
}

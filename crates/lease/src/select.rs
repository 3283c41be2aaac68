//! Which proxy a request gets, as a function of what is known.

use std::cmp::Ordering;

use egress_core::{ProxyKey, ProxyRecord};

use crate::contract::{AcquireRequest, NoMatch};
use crate::index::Index;
use crate::time::Mono;

/// The candidate with the fewest active leases, then the lowest latency (an unknown one last),
/// then the smallest id. Otherwise the counts of why there is none.
pub(crate) fn select<'a>(
    index: &Index,
    now: Mono,
    request: &AcquireRequest,
    candidates: &'a [ProxyRecord],
) -> Result<&'a ProxyRecord, NoMatch> {
    let mut none = NoMatch::default();
    let mut best: Option<(usize, &ProxyRecord)> = None;
    for proxy in candidates {
        if proxy.deleting || !matches(request, proxy) {
            continue;
        }
        none.considered += 1;
        let leases = index.held(&proxy.uid);
        // A proxy without an address cannot be used, whatever its last verdict was.
        if !proxy.healthy || proxy.host.is_none() {
            none.unhealthy += 1;
        } else if leases >= usize::try_from(proxy.max_leases).unwrap_or(usize::MAX) {
            none.at_capacity += 1;
        } else if index.cooling(&proxy.uid, request.target.as_ref(), now) {
            none.in_cooldown += 1;
        } else if best.is_none_or(|(of_best, other)| {
            order((leases, proxy), (of_best, other)) == Ordering::Less
        }) {
            best = Some((leases, proxy));
        }
    }
    best.map(|(_, proxy)| proxy).ok_or(none)
}

fn matches(request: &AcquireRequest, proxy: &ProxyRecord) -> bool {
    request
        .selector
        .iter()
        .all(|(key, value)| proxy.attributes.get(key) == Some(value))
}

fn order(a: (usize, &ProxyRecord), b: (usize, &ProxyRecord)) -> Ordering {
    let latency = |proxy: &ProxyRecord| proxy.latency_millis.unwrap_or(u64::MAX);
    a.0.cmp(&b.0)
        .then_with(|| latency(a.1).cmp(&latency(b.1)))
        .then_with(|| by_id(&a.1.key, &b.1.key))
}

/// By the text `namespace/name`, without building it: `a-b/x` comes before `a/x`.
fn by_id(a: &ProxyKey, b: &ProxyKey) -> Ordering {
    fn text(key: &ProxyKey) -> impl Iterator<Item = u8> {
        key.namespace.bytes().chain(*b"/").chain(key.name.bytes())
    }
    text(a).cmp(text(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_compare_as_their_text() {
        let keys = [
            ("a", "x"),
            ("a-b", "x"),
            ("a", "x-1"),
            ("a.b", "y"),
            ("b", "a"),
        ]
        .map(|(namespace, name)| ProxyKey::new(namespace, name));
        for a in &keys {
            for b in &keys {
                assert_eq!(by_id(a, b), a.to_string().cmp(&b.to_string()), "{a} {b}");
            }
        }
    }
}

//! One suite that every [`Provider`] passes, the fake and the real ones alike.
//!
//! A backend's test implements [`Harness`] and calls [`run`], which panics with the name of the
//! check and what it saw.
//!
//! ```ignore
//! #[tokio::test]
//! async fn conforms() {
//!     conformance::run(&mut MyHarness::new().await).await;
//! }
//! ```

#![allow(
    clippy::panic,
    reason = "a test suite: a failed check is a panic that says what was seen"
)]

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use egress_core::spec::Placement;
use egress_core::{
    ErrorClass, InstallationId, InstanceName, ProviderId, ProxyKey, SecretBytes, Uid,
};
use futures::StreamExt;
use tokio::time::{Instant, sleep, timeout};

use crate::contract::{
    CreateRequest, Instance, InstanceEvent, InstanceState, Operation, Provider, ProviderError,
};

/// How long things may take on this backend.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// From create to Running.
    pub running: Duration,
    /// From delete to NotFound.
    pub gone: Duration,
    /// From a stop to its event.
    pub event: Duration,
    /// Between two looks.
    pub poll: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            running: Duration::from_secs(30),
            gone: Duration::from_secs(30),
            event: Duration::from_secs(10),
            poll: Duration::from_millis(20),
        }
    }
}

/// What the suite needs of a backend's test set-up.
#[async_trait]
pub trait Harness: Send {
    /// A fresh provider object of this installation. All that one harness gives look at one
    /// backend, as a restarted operator would.
    async fn provider(&mut self, installation: &InstallationId) -> Arc<dyn Provider>;

    /// A placement that works, different `n` may differ in it.
    fn placement(&self, _n: u32) -> Placement {
        Placement::default()
    }

    /// A placement that names something which does not exist; None: every placement is fine here.
    fn unknown_placement(&self) -> Option<Placement>;

    /// The n-th request; the default is [`request`] with this harness's placement.
    fn request(&self, n: u32, installation: &InstallationId) -> CreateRequest {
        request(n, installation, self.placement(n))
    }

    /// The instance stops, behind the provider's back: a process is killed, a domain destroyed.
    async fn stop(&mut self, instance: &Instance);

    /// The instance is gone without a trace, behind the provider's back.
    async fn vanish(&mut self, instance: &Instance);

    /// What a stopped instance looks like: most backends still have it (Stopped), some have
    /// nothing left of it (false: NotFound is right too).
    fn stopped_remains(&self) -> bool {
        true
    }

    /// Whether instances outlive the provider object that made them.
    fn survives_restart(&self) -> bool {
        true
    }

    /// Whether `events()` tells of a stop.
    fn emits_events(&self) -> bool {
        true
    }

    /// Whether two installations can share this backend.
    fn shared_between_installations(&self) -> bool {
        true
    }

    fn limits(&self) -> Limits {
        Limits::default()
    }

    /// How many instances exist, counted at the backend itself and not through the provider.
    /// None: cannot be counted.
    async fn count_on_backend(&mut self) -> Option<usize> {
        None
    }
}

/// The n-th request: the same `n` is the same Proxy.
pub fn request(n: u32, installation: &InstallationId, placement: Placement) -> CreateRequest {
    let uid = Uid::new(format!("c0f0{n:04x}-0000-4000-8000-{n:012x}"));
    CreateRequest {
        name: InstanceName::for_uid(&uid),
        uid,
        key: ProxyKey::new("default", format!("conformance-{n}")),
        installation: installation.clone(),
        // Another port each, for backends that listen on one address.
        port: u16::try_from(31_000 + n % 1000).unwrap_or(31_000),
        placement,
        user_data: Some(SecretBytes::new(
            "#cloud-config\n# conformance \u{fc}\n".as_bytes(),
        )),
    }
}

/// Runs every check, each leaving the backend empty. Returns the names of the checks that ran.
pub async fn run(harness: &mut dyn Harness) -> Vec<&'static str> {
    let mut ran = Vec::new();
    let me = InstallationId::new("11111111-1111-4111-8111-111111111111");
    let other = InstallationId::new("22222222-2222-4222-8222-222222222222");
    macro_rules! check {
        ($name:ident $(, $arg:expr)*) => {{
            let provider = harness.provider(&me).await;
            let mut suite = Suite {
                check: stringify!($name),
                limits: harness.limits(),
                provider,
            };
            $name(&mut suite, harness, &me $(, $arg)*).await;
            suite.cleaned_up(harness).await;
            ran.push(stringify!($name));
        }};
    }
    check!(get_of_unknown_is_not_found);
    check!(delete_of_unknown_succeeds);
    check!(empty_backend_lists_nothing);
    check!(create_submits_and_becomes_running);
    check!(create_is_idempotent_by_name);
    check!(concurrent_creates_make_one);
    check!(delete_is_idempotent_and_ends_in_not_found);
    check!(create_after_delete_makes_a_new_one);
    check!(list_is_complete_with_marks);
    check!(find_by_name);
    check!(stop_is_seen);
    check!(vanished_is_not_found);
    check!(garbage_collection_spares_what_lives);
    if harness.emits_events() {
        check!(stop_sends_an_event);
        check!(each_event_stream_is_its_own);
    }
    if harness.survives_restart() {
        check!(restart_finds_what_was_made);
    }
    if harness.shared_between_installations() {
        check!(installations_do_not_see_each_other, &other);
    }
    if let Some(placement) = harness.unknown_placement() {
        check!(unknown_placement_is_permanent, &placement);
    }
    ran
}

struct Suite {
    check: &'static str,
    limits: Limits,
    provider: Arc<dyn Provider>,
}

impl Suite {
    #[track_caller]
    fn fail(&self, saw: impl std::fmt::Display) -> ! {
        panic!(
            "conformance of provider {:?} ({}), check {}: {saw}",
            self.provider.name(),
            self.provider.kind(),
            self.check
        )
    }

    #[track_caller]
    fn ok<T>(&self, answer: Result<T, ProviderError>) -> T {
        answer.unwrap_or_else(|e| self.fail(format!("failed ({}): {e}", e.class)))
    }

    #[track_caller]
    fn that(&self, holds: bool, sentence: impl std::fmt::Display) {
        if !holds {
            self.fail(sentence);
        }
    }

    async fn create(&self, request: &CreateRequest) -> ProviderId {
        let started = Instant::now();
        let id = self.ok(self.provider.create(request).await);
        self.that(
            started.elapsed() < self.limits.running,
            "create must submit and return, not wait until the machine runs",
        );
        id
    }

    /// Polls until Running; every state on the way is checked.
    async fn running(&self, id: &ProviderId) -> Instance {
        let deadline = Instant::now() + self.limits.running;
        loop {
            let seen = self.ok(self.provider.get(id).await);
            self.that(&seen.id == id, format!("get({id}) answered {}", seen.id));
            match &seen.state {
                InstanceState::Running { address, .. } => {
                    self.that(
                        !address.is_unspecified()
                            && !address.is_multicast()
                            && !link_local(*address),
                        format!("Running with the address {address}"),
                    );
                    return seen;
                }
                InstanceState::Provisioning(step) => self.that(
                    !step.message().is_empty(),
                    format!("the step {} has no message", step.reason()),
                ),
                InstanceState::Stopped => self.fail("Stopped on the way to Running"),
            }
            self.that(
                Instant::now() < deadline,
                format!(
                    "not Running within {:?}, but {:?}",
                    self.limits.running, seen.state
                ),
            );
            sleep(self.limits.poll).await;
        }
    }

    async fn gone(&self, id: &ProviderId) {
        let deadline = Instant::now() + self.limits.gone;
        loop {
            match self.provider.get(id).await {
                Err(e) if e.class == ErrorClass::NotFound => return,
                Err(e) => self.fail(format!("get after delete ({}): {e}", e.class)),
                Ok(seen) => self.that(
                    Instant::now() < deadline,
                    format!("still {:?} {:?} after delete", seen.state, self.limits.gone),
                ),
            }
            sleep(self.limits.poll).await;
        }
    }

    async fn delete(&self, id: &ProviderId) {
        self.ok(self.provider.delete(id).await);
        self.gone(id).await;
    }

    async fn ids(&self) -> BTreeSet<String> {
        self.ok(self.provider.list().await)
            .into_iter()
            .map(|i| i.id.as_str().to_owned())
            .collect()
    }

    async fn cleaned_up(&self, harness: &mut dyn Harness) {
        let left = self.ids().await;
        self.that(left.is_empty(), format!("left behind: {left:?}"));
        if let Some(count) = harness.count_on_backend().await {
            self.that(
                count == 0,
                format!("the backend still has {count} instances"),
            );
        }
    }
}

fn link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    }
}

/// An id of the provider's own form that names nothing any more.
async fn spent_id(s: &Suite, h: &dyn Harness, me: &InstallationId) -> ProviderId {
    let id = s.create(&h.request(900, me)).await;
    s.delete(&id).await;
    id
}

async fn get_of_unknown_is_not_found(s: &mut Suite, h: &mut dyn Harness, me: &InstallationId) {
    let id = spent_id(s, h, me).await;
    match s.provider.get(&id).await {
        Err(e) => {
            s.that(
                e.class == ErrorClass::NotFound,
                format!("class {}: {e}", e.class),
            );
            s.that(
                e.provider == s.provider.name() && e.operation == Operation::Get,
                format!("the error must name the provider and the operation: {e}"),
            );
        }
        Ok(seen) => s.fail(format!("found {seen:?}")),
    }
    // What is no id of this provider at all is no instance either.
    match s.provider.get(&ProviderId::new("no/such/form")).await {
        Err(e) => s.that(
            e.class == ErrorClass::NotFound,
            format!("an id of another form: class {}: {e}", e.class),
        ),
        Ok(seen) => s.fail(format!("found {seen:?}")),
    }
}

async fn delete_of_unknown_succeeds(s: &mut Suite, h: &mut dyn Harness, me: &InstallationId) {
    let id = spent_id(s, h, me).await;
    s.ok(s.provider.delete(&id).await);
    s.ok(s.provider.delete(&ProviderId::new("no/such/form")).await);
}

async fn empty_backend_lists_nothing(s: &mut Suite, h: &mut dyn Harness, me: &InstallationId) {
    s.that(s.ids().await.is_empty(), "the list is not empty");
    let name = h.request(1, me).name;
    let found = s.ok(s.provider.find(&name).await);
    s.that(found.is_none(), format!("found {found:?}"));
}

async fn create_submits_and_becomes_running(
    s: &mut Suite,
    h: &mut dyn Harness,
    me: &InstallationId,
) {
    let request = h.request(1, me);
    let id = s.create(&request).await;
    let seen = s.running(&id).await;
    s.that(seen.uid == request.uid, format!("uid {}", seen.uid));
    s.that(seen.name == request.name, format!("name {}", seen.name));
    // Once it runs it keeps its address.
    let again = s.running(&id).await;
    s.that(again.state == seen.state, format!("{:?}", again.state));
    s.delete(&id).await;
}

async fn create_is_idempotent_by_name(s: &mut Suite, h: &mut dyn Harness, me: &InstallationId) {
    let request = h.request(1, me);
    let first = s.create(&request).await;
    let early = s.create(&request).await;
    s.that(first == early, format!("{first}, then {early}"));
    let before = s.running(&first).await;
    let late = s.create(&request).await;
    s.that(first == late, format!("{first}, then {late}"));
    let after = s.running(&first).await;
    s.that(
        before.created_at == after.created_at,
        "a repeated create made it anew",
    );
    s.that(s.ids().await.len() == 1, "more than one instance");
    s.delete(&first).await;
}

async fn concurrent_creates_make_one(s: &mut Suite, h: &mut dyn Harness, me: &InstallationId) {
    let request = h.request(1, me);
    let answers = futures::future::join_all((0..8).map(|_| s.provider.create(&request))).await;
    let mut ids = BTreeSet::new();
    for answer in answers {
        match answer {
            Ok(id) => {
                ids.insert(id.as_str().to_owned());
            }
            // The loser of a race may say "again, please", nothing else.
            Err(e) => s.that(
                e.class == ErrorClass::Transient,
                format!("class {}: {e}", e.class),
            ),
        }
    }
    s.that(ids.len() == 1, format!("ids {ids:?}"));
    let listed = s.ids().await;
    s.that(listed == ids, format!("listed {listed:?}, created {ids:?}"));
    for id in ids {
        let id = ProviderId::new(id);
        s.running(&id).await;
        s.delete(&id).await;
    }
}

async fn delete_is_idempotent_and_ends_in_not_found(
    s: &mut Suite,
    h: &mut dyn Harness,
    me: &InstallationId,
) {
    // Once before it runs, once running.
    for wait in [false, true] {
        let id = s.create(&h.request(1, me)).await;
        if wait {
            s.running(&id).await;
        }
        s.ok(s.provider.delete(&id).await);
        s.ok(s.provider.delete(&id).await);
        s.gone(&id).await;
        s.ok(s.provider.delete(&id).await);
    }
}

async fn create_after_delete_makes_a_new_one(
    s: &mut Suite,
    h: &mut dyn Harness,
    me: &InstallationId,
) {
    let mut request = h.request(1, me);
    let id = s.create(&request).await;
    s.running(&id).await;
    s.delete(&id).await;
    request.user_data = Some(SecretBytes::new("#cloud-config\n# another\n"));
    let id = s.create(&request).await;
    s.running(&id).await;
    s.delete(&id).await;
}

async fn list_is_complete_with_marks(s: &mut Suite, h: &mut dyn Harness, me: &InstallationId) {
    let requests: Vec<_> = (1..=3).map(|n| h.request(n, me)).collect();
    let mut ids = BTreeSet::new();
    for request in &requests {
        ids.insert(s.create(request).await.as_str().to_owned());
    }
    s.that(ids.len() == 3, format!("{ids:?}"));
    // Complete at once, not only when they run.
    let listed = s.ids().await;
    s.that(listed == ids, format!("listed {listed:?}, created {ids:?}"));
    for id in &ids {
        s.running(&ProviderId::new(id.clone())).await;
    }
    let listed = s.ok(s.provider.list().await);
    for request in &requests {
        match listed.iter().find(|i| i.name == request.name) {
            Some(i) => {
                s.that(i.uid == request.uid, format!("{}: uid {}", i.name, i.uid));
                s.that(
                    i.created_at.is_some(),
                    format!("{}: no creation time", i.name),
                );
            }
            None => s.fail(format!("{} is not listed", request.name)),
        }
    }
    for id in ids {
        s.delete(&ProviderId::new(id)).await;
    }
}

async fn find_by_name(s: &mut Suite, h: &mut dyn Harness, me: &InstallationId) {
    let request = h.request(1, me);
    let id = s.create(&request).await;
    let found = s.ok(s.provider.find(&request.name).await);
    s.that(
        found
            .as_ref()
            .is_some_and(|i| i.id == id && i.uid == request.uid),
        format!("found {found:?}"),
    );
    let absent = s.ok(s.provider.find(&h.request(2, me).name).await);
    s.that(absent.is_none(), format!("found {absent:?}"));
    s.delete(&id).await;
}

async fn stop_is_seen(s: &mut Suite, h: &mut dyn Harness, me: &InstallationId) {
    let request = h.request(1, me);
    let id = s.create(&request).await;
    let instance = s.running(&id).await;
    h.stop(&instance).await;
    let deadline = Instant::now() + s.limits.event;
    loop {
        match s.provider.get(&id).await {
            Ok(seen) if seen.state == InstanceState::Stopped => break,
            Err(e) if e.class == ErrorClass::NotFound && !h.stopped_remains() => break,
            Err(e) => s.fail(format!("get after a stop ({}): {e}", e.class)),
            Ok(seen) => s.that(Instant::now() < deadline, format!("still {:?}", seen.state)),
        }
        sleep(s.limits.poll).await;
    }
    // And it can be deleted and made anew.
    s.delete(&id).await;
    let id = s.create(&request).await;
    s.running(&id).await;
    s.delete(&id).await;
}

async fn vanished_is_not_found(s: &mut Suite, h: &mut dyn Harness, me: &InstallationId) {
    let id = s.create(&h.request(1, me)).await;
    let instance = s.running(&id).await;
    h.vanish(&instance).await;
    s.gone(&id).await;
    s.ok(s.provider.delete(&id).await);
}

async fn garbage_collection_spares_what_lives(
    s: &mut Suite,
    h: &mut dyn Harness,
    me: &InstallationId,
) {
    let request = h.request(1, me);
    let id = s.create(&request).await;
    s.running(&id).await;
    let live = BTreeSet::from([request.uid.clone()]);
    let deleted = s.ok(s.provider.collect_garbage(&live, Duration::ZERO).await);
    s.that(deleted.is_empty(), format!("deleted {deleted:?}"));
    s.running(&id).await;
    s.delete(&id).await;
}

async fn stop_sends_an_event(s: &mut Suite, h: &mut dyn Harness, me: &InstallationId) {
    let request = h.request(1, me);
    let id = s.create(&request).await;
    let instance = s.running(&id).await;
    let mut events = s.provider.events();
    h.stop(&instance).await;
    let wanted = InstanceEvent::Instance(request.name.clone());
    let came = timeout(s.limits.event, async {
        while let Some(event) = events.next().await {
            if event == wanted || event == InstanceEvent::All {
                return true;
            }
        }
        false
    })
    .await;
    match came {
        Ok(true) => {}
        Ok(false) => s.fail("the stream of events ended"),
        Err(_) => s.fail(format!("no event within {:?} of a stop", s.limits.event)),
    }
    s.delete(&id).await;
}

async fn each_event_stream_is_its_own(s: &mut Suite, h: &mut dyn Harness, me: &InstallationId) {
    let id = s.create(&h.request(1, me)).await;
    let instance = s.running(&id).await;
    let (mut one, mut two) = (s.provider.events(), s.provider.events());
    h.stop(&instance).await;
    for (which, events) in [("first", &mut one), ("second", &mut two)] {
        let event = timeout(s.limits.event, events.next()).await;
        s.that(
            matches!(event, Ok(Some(_))),
            format!("the {which} of two streams got {event:?}"),
        );
    }
    s.delete(&id).await;
}

async fn restart_finds_what_was_made(s: &mut Suite, h: &mut dyn Harness, me: &InstallationId) {
    let request = h.request(1, me);
    let id = s.create(&request).await;
    let before = s.running(&id).await;
    s.provider = h.provider(me).await;
    let after = s.running(&id).await;
    s.that(
        before.uid == after.uid && before.created_at == after.created_at,
        format!("{before:?}, after a restart {after:?}"),
    );
    s.that(s.ids().await.len() == 1, "not listed after a restart");
    let again = s.create(&request).await;
    s.that(again == id, format!("{id}, after a restart {again}"));
    s.delete(&id).await;
}

async fn installations_do_not_see_each_other(
    s: &mut Suite,
    h: &mut dyn Harness,
    me: &InstallationId,
    other: &InstallationId,
) {
    let theirs = h.provider(other).await;
    let id = s.create(&h.request(1, me)).await;
    s.running(&id).await;
    let seen = s.ok(theirs.list().await);
    s.that(seen.is_empty(), format!("the other one lists {seen:?}"));
    let found = s.ok(theirs.find(&h.request(1, me).name).await);
    s.that(found.is_none(), format!("the other one finds {found:?}"));
    let deleted = s.ok(theirs
        .collect_garbage(&BTreeSet::new(), Duration::ZERO)
        .await);
    s.that(
        deleted.is_empty(),
        format!("the other one collected {deleted:?}"),
    );
    // Whether it says so or not, it must not be able to delete it.
    let _ = theirs.delete(&id).await;
    s.running(&id).await;
    let their_id = s.ok(theirs.create(&h.request(2, other)).await);
    s.that(s.ids().await.len() == 1, "we list the other one's");
    s.ok(theirs.delete(&their_id).await);
    let deadline = Instant::now() + s.limits.gone;
    while !s.ok(theirs.list().await).is_empty() {
        s.that(Instant::now() < deadline, "the other one's was not deleted");
        // Some backends only finish a delete when asked about the instance.
        let _ = theirs.get(&their_id).await;
        sleep(s.limits.poll).await;
    }
    s.delete(&id).await;
}

async fn unknown_placement_is_permanent(
    s: &mut Suite,
    h: &mut dyn Harness,
    me: &InstallationId,
    placement: &Placement,
) {
    let mut request = h.request(1, me);
    request.placement = placement.clone();
    match s.provider.create(&request).await {
        Err(e) => {
            s.that(
                e.class == ErrorClass::Permanent,
                format!("class {}: {e}", e.class),
            );
            s.that(
                !e.to_string().contains("#cloud-config"),
                "the error carries cloud-init",
            );
        }
        // The error may come later, where create only submits.
        Ok(id) => {
            let deadline = Instant::now() + s.limits.running;
            loop {
                match s.provider.get(&id).await {
                    Err(e) if e.class == ErrorClass::Permanent => break,
                    Ok(seen) if matches!(seen.state, InstanceState::Provisioning(_)) => {}
                    other => s.fail(format!("{other:?} for an unknown placement")),
                }
                s.that(Instant::now() < deadline, "no Permanent error came");
                sleep(s.limits.poll).await;
            }
            s.delete(&id).await;
        }
    }
}

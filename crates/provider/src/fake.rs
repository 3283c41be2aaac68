//! A backend in memory: deterministic, with fault injection, and a witness of what must never
//! happen.
//!
//! One [`World`] is what exists, whoever looks at it: several providers, operator restarts and
//! installations share it. A [`FakeProvider`] is one configured name on it. The world notes each
//! moment at which one UID has more than one instance (see [`World::violations`]).
//!
//! Each call has an await point before its effect and one after it, so that a test which drops a
//! future at every await point also crashes "after the effect, before the answer".

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use egress_core::clock::Clock;
use egress_core::spec::Placement;
use egress_core::{
    ErrorClass, InstallationId, InstanceName, ProviderId, ProxyKey, SecretBytes, SystemClock, Uid,
};
use futures::StreamExt;
use futures::stream::BoxStream;
use jiff::Timestamp;
use tokio::sync::broadcast;
use tokio_stream::wrappers::BroadcastStream;

use crate::contract::{
    CreateRequest, Instance, InstanceEvent, InstanceState, Operation, Provider, ProviderError, Step,
};

/// The zone that no fake has.
pub const UNKNOWN_ZONE: &str = "nowhere";

/// A failure to come.
#[derive(Debug, Clone)]
pub struct Fault {
    pub class: ErrorClass,
    pub message: String,
    /// The call does its work and then fails: the answer was lost.
    pub after_effect: bool,
}

impl Fault {
    pub fn of(class: ErrorClass) -> Self {
        Self {
            class,
            message: format!("injected {class}"),
            after_effect: false,
        }
    }

    #[must_use]
    pub fn after_effect(mut self) -> Self {
        self.after_effect = true;
        self
    }

    #[must_use]
    pub fn saying(mut self, message: impl Into<String>) -> Self {
        self.message = message.into();
        self
    }
}

/// How instances behave that are created from now on.
#[derive(Debug, Clone)]
pub struct Behaviour {
    /// What `get` answers one after the other before the instance runs.
    pub steps: Vec<Step>,
    /// False: it stays in its last step until [`World::run`].
    pub starts: bool,
    /// How many times `get` still finds an instance after its delete.
    pub polls_until_gone: u32,
}

impl Default for Behaviour {
    fn default() -> Self {
        Self {
            steps: Vec::new(),
            starts: true,
            polls_until_gone: 0,
        }
    }
}

/// One instance as the world knows it.
#[derive(Debug, Clone)]
pub struct Machine {
    pub provider: String,
    pub installation: InstallationId,
    pub name: InstanceName,
    pub uid: Uid,
    pub key: ProxyKey,
    pub created_at: Option<Timestamp>,
    pub port: u16,
    pub placement: Placement,
    pub user_data: Option<SecretBytes>,
    pub address: IpAddr,
    /// Where it listens, when that is not the port that was asked for.
    pub listens_on: Option<u16>,
    pub stopped: bool,
    steps: VecDeque<Step>,
    starts: bool,
    /// Set by a delete: polls left until it is gone.
    going: Option<u32>,
}

impl Machine {
    /// One look at it: false when a delete is through.
    fn is_still_there(&mut self) -> bool {
        match &mut self.going {
            Some(0) => false,
            Some(left) => {
                *left -= 1;
                true
            }
            None => true,
        }
    }

    /// A delete was accepted and the machine is on its way out.
    pub fn is_going(&self) -> bool {
        self.going.is_some()
    }
}

/// Something that belongs to no instance, such as a volume.
#[derive(Debug, Clone)]
pub struct Stray {
    pub name: String,
    pub uid: Option<Uid>,
    pub created_at: Option<Timestamp>,
}

#[derive(Default)]
struct Inner {
    /// By provider and name.
    machines: BTreeMap<(String, InstanceName), Machine>,
    strays: BTreeMap<String, Vec<Stray>>,
    behaviour: Behaviour,
    queued: BTreeMap<(String, &'static str), VecDeque<Fault>>,
    standing: BTreeMap<(String, &'static str), Fault>,
    latency: BTreeMap<(String, &'static str), Duration>,
    calls: BTreeMap<(String, &'static str), u64>,
    created: u64,
    violations: Vec<String>,
    mute: bool,
}

/// Everything that exists. Clones share it.
#[derive(Clone)]
pub struct World {
    inner: Arc<Mutex<Inner>>,
    events: broadcast::Sender<(String, InstanceEvent)>,
    clock: Arc<dyn Clock>,
}

impl Default for World {
    fn default() -> Self {
        Self::new(Arc::new(SystemClock))
    }
}

impl World {
    /// `clock` stamps what is created.
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        Self {
            inner: Arc::default(),
            events: broadcast::channel(1024).0,
            clock,
        }
    }

    /// A configured provider on this world.
    pub fn provider(&self, name: &str, installation: &InstallationId) -> Arc<FakeProvider> {
        Arc::new(FakeProvider {
            name: name.to_owned(),
            installation: installation.clone(),
            world: self.clone(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How what is created from now on behaves.
    pub fn behave(&self, behaviour: Behaviour) {
        self.lock().behaviour = behaviour;
    }

    /// The next call of `operation` at `provider` fails so; calls queue up.
    pub fn fail_next(&self, provider: &str, operation: Operation, fault: Fault) {
        self.lock()
            .queued
            .entry((provider.to_owned(), operation.as_str()))
            .or_default()
            .push_back(fault);
    }

    /// Every call of `operation` at `provider` fails so, until [`World::heal`].
    pub fn fail_always(&self, provider: &str, operation: Operation, fault: Fault) {
        self.lock()
            .standing
            .insert((provider.to_owned(), operation.as_str()), fault);
    }

    /// Ends all injected faults and latencies of `provider`.
    pub fn heal(&self, provider: &str) {
        let mut inner = self.lock();
        inner.queued.retain(|(name, _), _| name != provider);
        inner.standing.retain(|(name, _), _| name != provider);
        inner.latency.retain(|(name, _), _| name != provider);
    }

    /// Each call of `operation` at `provider` takes that long (tokio time) before its effect.
    pub fn slow_down(&self, provider: &str, operation: Operation, by: Duration) {
        self.lock()
            .latency
            .insert((provider.to_owned(), operation.as_str()), by);
    }

    /// How often `operation` was called at `provider`.
    pub fn calls(&self, provider: &str, operation: Operation) -> u64 {
        self.lock()
            .calls
            .get(&(provider.to_owned(), operation.as_str()))
            .copied()
            .unwrap_or_default()
    }

    /// How many machines were ever made.
    pub fn created(&self) -> u64 {
        self.lock().created
    }

    /// What exists now, by provider and name.
    pub fn machines(&self) -> Vec<Machine> {
        self.lock().machines.values().cloned().collect()
    }

    /// The machine made for `uid`, if there is one.
    pub fn machine_of(&self, uid: &Uid) -> Option<Machine> {
        self.lock()
            .machines
            .values()
            .find(|m| &m.uid == uid)
            .cloned()
    }

    /// Each moment at which one UID had more than one machine, in words.
    pub fn violations(&self) -> Vec<String> {
        self.lock().violations.clone()
    }

    /// Changes all machines that `choose` picks, behind the operator's back. Tells nobody: see
    /// [`World::announce`].
    pub fn change(&self, choose: impl Fn(&Machine) -> bool, mut with: impl FnMut(&mut Machine)) {
        self.lock()
            .machines
            .values_mut()
            .filter(|m| choose(m))
            .for_each(&mut with);
    }

    /// The machine of `uid` stops, and an event tells.
    pub fn stop(&self, uid: &Uid) {
        self.change(|m| &m.uid == uid, |m| m.stopped = true);
        self.announce(uid);
    }

    /// The machine of `uid` runs from now on, whatever steps it had left, and an event tells.
    pub fn run(&self, uid: &Uid) {
        self.change(
            |m| &m.uid == uid,
            |m| {
                m.steps.clear();
                m.starts = true;
            },
        );
        self.announce(uid);
    }

    /// The machine of `uid` gets another address, and an event tells.
    pub fn readdress(&self, uid: &Uid, address: IpAddr) {
        self.change(|m| &m.uid == uid, |m| m.address = address);
        self.announce(uid);
    }

    /// The machine of `uid` is gone without a trace, and an event tells.
    pub fn vanish(&self, uid: &Uid) {
        let gone: Vec<_> = {
            let mut inner = self.lock();
            let names: Vec<_> = inner
                .machines
                .iter()
                .filter(|(_, m)| &m.uid == uid)
                .map(|(k, _)| k.clone())
                .collect();
            for key in &names {
                inner.machines.remove(key);
            }
            names
        };
        for (provider, name) in gone {
            self.send(&provider, InstanceEvent::Instance(name));
        }
    }

    /// Puts a machine there that nobody asked for (another installation's, or what a crash left).
    pub fn plant(&self, provider: &str, request: &CreateRequest, created_at: Option<Timestamp>) {
        let mut inner = self.lock();
        let machine = inner.build(provider, request, created_at);
        inner.insert(machine);
    }

    /// Adds something that belongs to no instance.
    pub fn add_stray(&self, provider: &str, stray: Stray) {
        self.lock()
            .strays
            .entry(provider.to_owned())
            .or_default()
            .push(stray);
    }

    /// Names of what belongs to no instance.
    pub fn strays(&self, provider: &str) -> Vec<String> {
        self.lock()
            .strays
            .get(provider)
            .into_iter()
            .flatten()
            .map(|s| s.name.clone())
            .collect()
    }

    /// Events are lost from now on (true), or come again (false).
    pub fn mute(&self, mute: bool) {
        self.lock().mute = mute;
    }

    /// Sends an event for the machine of `uid`.
    pub fn announce(&self, uid: &Uid) {
        let found: Vec<_> = self
            .lock()
            .machines
            .iter()
            .filter(|(_, m)| &m.uid == uid)
            .map(|(k, _)| k.clone())
            .collect();
        for (provider, name) in found {
            self.send(&provider, InstanceEvent::Instance(name));
        }
    }

    /// Tells all watchers of `provider`.
    pub fn send(&self, provider: &str, event: InstanceEvent) {
        if self.lock().mute {
            return;
        }
        // Nobody listening is fine.
        let _ = self.events.send((provider.to_owned(), event));
    }
}

impl Inner {
    fn build(
        &mut self,
        provider: &str,
        request: &CreateRequest,
        created_at: Option<Timestamp>,
    ) -> Machine {
        self.created += 1;
        let [_, b, c, d] = u32::try_from(self.created)
            .unwrap_or(u32::MAX)
            .to_be_bytes();
        Machine {
            provider: provider.to_owned(),
            installation: request.installation.clone(),
            name: request.name.clone(),
            uid: request.uid.clone(),
            key: request.key.clone(),
            created_at,
            port: request.port,
            placement: request.placement.clone(),
            user_data: request.user_data.clone(),
            address: IpAddr::V4(Ipv4Addr::new(10, b, c, d)),
            listens_on: None,
            stopped: false,
            steps: self.behaviour.steps.iter().cloned().collect(),
            starts: self.behaviour.starts,
            going: None,
        }
    }

    fn insert(&mut self, machine: Machine) {
        let others: Vec<_> = self
            .machines
            .values()
            .filter(|m| m.uid == machine.uid)
            .map(|m| format!("{} on {}", m.name, m.provider))
            .collect();
        if !others.is_empty() {
            self.violations.push(format!(
                "{} on {} was created while {} existed for {}",
                machine.name,
                machine.provider,
                others.join(", "),
                machine.uid
            ));
        }
        self.machines
            .insert((machine.provider.clone(), machine.name.clone()), machine);
    }
}

/// One configured provider on a [`World`].
pub struct FakeProvider {
    name: String,
    installation: InstallationId,
    world: World,
}

impl FakeProvider {
    fn error(&self, class: ErrorClass, operation: Operation, message: &str) -> ProviderError {
        ProviderError::new(class, &self.name, operation, message)
    }

    /// Counts, waits, and takes the fault that is due.
    async fn enter(&self, operation: Operation) -> Result<Option<Fault>, ProviderError> {
        let key = (self.name.clone(), operation.as_str());
        let latency = {
            let mut inner = self.world.lock();
            *inner.calls.entry(key.clone()).or_default() += 1;
            inner.latency.get(&key).copied()
        };
        tokio::task::yield_now().await;
        if let Some(latency) = latency {
            tokio::time::sleep(latency).await;
        }
        let fault = {
            let mut inner = self.world.lock();
            inner
                .queued
                .get_mut(&key)
                .and_then(VecDeque::pop_front)
                .or_else(|| inner.standing.get(&key).cloned())
        };
        match fault {
            Some(fault) if !fault.after_effect => {
                Err(self.error(fault.class, operation, &fault.message))
            }
            other => Ok(other),
        }
    }

    /// The answer, unless it is to be lost.
    async fn leave<T>(
        &self,
        operation: Operation,
        fault: Option<Fault>,
        answer: T,
    ) -> Result<T, ProviderError> {
        tokio::task::yield_now().await;
        match fault {
            Some(fault) => Err(self.error(fault.class, operation, &fault.message)),
            None => Ok(answer),
        }
    }

    fn id_of(&self, name: &InstanceName) -> ProviderId {
        ProviderId::new(format!("fake/{}/{name}", self.name))
    }

    fn name_in(&self, id: &ProviderId) -> Option<String> {
        id.as_str()
            .strip_prefix(&format!("fake/{}/", self.name))
            .map(str::to_owned)
    }

    fn show(&self, machine: &Machine) -> Instance {
        let state = if machine.stopped || machine.going.is_some() {
            InstanceState::Stopped
        } else if let Some(step) = machine.steps.front() {
            InstanceState::Provisioning(step.clone())
        } else if machine.starts {
            InstanceState::Running {
                address: machine.address,
                port: machine.listens_on,
            }
        } else {
            InstanceState::Provisioning(Step::WaitingForAddress("waiting for an address".into()))
        };
        Instance {
            id: self.id_of(&machine.name),
            name: machine.name.clone(),
            state,
            uid: machine.uid.clone(),
            created_at: machine.created_at,
        }
    }

    /// The key of this installation's machine of that id.
    fn key_of(&self, inner: &Inner, id: &ProviderId) -> Option<(String, InstanceName)> {
        let wanted = self.name_in(id)?;
        inner
            .machines
            .iter()
            .find(|((provider, name), m)| {
                provider == &self.name
                    && name.as_str() == wanted
                    && m.installation == self.installation
            })
            .map(|(key, _)| key.clone())
    }
}

#[async_trait]
impl Provider for FakeProvider {
    fn name(&self) -> &str {
        &self.name
    }

    fn kind(&self) -> &'static str {
        "fake"
    }

    async fn create(&self, request: &CreateRequest) -> Result<ProviderId, ProviderError> {
        let fault = self
            .enter(Operation::Create)
            .await
            .map_err(|e| e.on(&request.name))?;
        if request.placement.zone.as_deref() == Some(UNKNOWN_ZONE) {
            return Err(self
                .error(
                    ErrorClass::Permanent,
                    Operation::Create,
                    "no zone \"nowhere\": use another placement.zone",
                )
                .on(&request.name));
        }
        {
            let mut inner = self.world.lock();
            let key = (self.name.clone(), request.name.clone());
            match inner.machines.get(&key) {
                Some(there)
                    if there.installation != self.installation || there.uid != request.uid =>
                {
                    return Err(self
                        .error(
                            ErrorClass::Permanent,
                            Operation::Create,
                            "the name is taken by an instance that is not ours",
                        )
                        .on(&request.name));
                }
                Some(there) if there.going.is_some() => {
                    return Err(self
                        .error(
                            ErrorClass::Transient,
                            Operation::Create,
                            "the instance of that name is still being deleted",
                        )
                        .on(&request.name));
                }
                Some(_) => {}
                None => {
                    let mut request = request.clone();
                    request.installation = self.installation.clone();
                    let machine = inner.build(&self.name, &request, Some(self.world.clock.now()));
                    inner.insert(machine);
                }
            }
        }
        self.world
            .send(&self.name, InstanceEvent::Instance(request.name.clone()));
        self.leave(Operation::Create, fault, self.id_of(&request.name))
            .await
            .map_err(|e| e.on(&request.name))
    }

    async fn get(&self, id: &ProviderId) -> Result<Instance, ProviderError> {
        let fault = self.enter(Operation::Get).await.map_err(|e| e.on(id))?;
        let shown = {
            let mut inner = self.world.lock();
            self.key_of(&inner, id).and_then(|key| {
                if !inner.machines.get_mut(&key)?.is_still_there() {
                    inner.machines.remove(&key);
                }
                let machine = inner.machines.get_mut(&key)?;
                let shown = self.show(machine);
                machine.steps.pop_front();
                Some(shown)
            })
        };
        match shown {
            Some(instance) => self
                .leave(Operation::Get, fault, instance)
                .await
                .map_err(|e| e.on(id)),
            None => Err(self
                .error(ErrorClass::NotFound, Operation::Get, "no such instance")
                .on(id)),
        }
    }

    async fn delete(&self, id: &ProviderId) -> Result<(), ProviderError> {
        let fault = self.enter(Operation::Delete).await.map_err(|e| e.on(id))?;
        let event = {
            let mut inner = self.world.lock();
            let polls = inner.behaviour.polls_until_gone;
            self.key_of(&inner, id).map(|key| {
                if polls == 0 {
                    inner.machines.remove(&key);
                } else if let Some(machine) = inner.machines.get_mut(&key) {
                    machine.going.get_or_insert(polls);
                }
                key.1
            })
        };
        if let Some(name) = event {
            self.world.send(&self.name, InstanceEvent::Instance(name));
        }
        self.leave(Operation::Delete, fault, ())
            .await
            .map_err(|e| e.on(id))
    }

    async fn list(&self) -> Result<Vec<Instance>, ProviderError> {
        let fault = self.enter(Operation::List).await?;
        let all = {
            let mut inner = self.world.lock();
            // A list is a look at each: what is on its way out goes on going.
            inner.machines.retain(|_, m| {
                m.provider != self.name || m.installation != self.installation || m.is_still_there()
            });
            inner
                .machines
                .values()
                .filter(|m| m.provider == self.name && m.installation == self.installation)
                .map(|m| self.show(m))
                .collect()
        };
        self.leave(Operation::List, fault, all).await
    }

    fn events(&self) -> BoxStream<'static, InstanceEvent> {
        let mine = self.name.clone();
        BroadcastStream::new(self.world.events.subscribe())
            .filter_map(move |event| {
                let event = match event {
                    Ok((provider, event)) if provider == mine => Some(event),
                    Ok(_) => None,
                    // Lagged: anything may have happened.
                    Err(_) => Some(InstanceEvent::All),
                };
                std::future::ready(event)
            })
            .boxed()
    }

    async fn collect_garbage(
        &self,
        live: &BTreeSet<Uid>,
        grace: Duration,
    ) -> Result<Vec<String>, ProviderError> {
        let fault = self.enter(Operation::List).await?;
        let now = self.world.clock.now();
        let deleted = {
            let mut inner = self.world.lock();
            let strays = inner.strays.entry(self.name.clone()).or_default();
            let (old, keep): (Vec<_>, Vec<_>) = strays.drain(..).partition(|stray| {
                let owned = stray.uid.as_ref().is_some_and(|uid| live.contains(uid));
                let young = stray
                    .created_at
                    .is_some_and(|at| now.duration_since(at).unsigned_abs() < grace);
                !owned && !young
            });
            *strays = keep;
            old.into_iter().map(|s| s.name).collect()
        };
        self.leave(Operation::List, fault, deleted).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::{self, Harness};

    struct FakeHarness {
        world: World,
    }

    #[async_trait]
    impl Harness for FakeHarness {
        async fn provider(&mut self, installation: &InstallationId) -> Arc<dyn Provider> {
            self.world.provider("fake-a", installation)
        }

        fn unknown_placement(&self) -> Option<Placement> {
            Some(Placement {
                zone: Some(UNKNOWN_ZONE.into()),
                ..Placement::default()
            })
        }

        async fn stop(&mut self, instance: &Instance) {
            self.world.stop(&instance.uid);
        }

        async fn vanish(&mut self, instance: &Instance) {
            self.world.vanish(&instance.uid);
        }

        async fn count_on_backend(&mut self) -> Option<usize> {
            Some(self.world.machines().len())
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_fake_conforms() {
        for behaviour in [
            Behaviour::default(),
            Behaviour {
                steps: vec![
                    Step::FetchingImage("42%".into()),
                    Step::Creating("defining".into()),
                ],
                starts: true,
                polls_until_gone: 3,
            },
        ] {
            let world = World::default();
            world.behave(behaviour);
            let mut harness = FakeHarness {
                world: world.clone(),
            };
            let run = conformance::run(&mut harness).await;
            assert!(run.len() >= 12, "{run:?}");
            assert_eq!(world.violations(), Vec::<String>::new());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_fault_after_the_effect_leaves_the_instance() {
        let world = World::default();
        let me = InstallationId::new("i");
        let provider = world.provider("fake-a", &me);
        world.fail_next(
            "fake-a",
            Operation::Create,
            Fault::of(ErrorClass::Transient).after_effect(),
        );
        let request = conformance::request(1, &me, Placement::default());
        let error = provider.create(&request).await.unwrap_err();
        assert_eq!(error.class, ErrorClass::Transient);
        assert_eq!(world.machines().len(), 1);
        provider.create(&request).await.unwrap();
        assert_eq!(world.machines().len(), 1);
        assert_eq!(world.calls("fake-a", Operation::Create), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn two_instances_of_one_uid_are_noticed() {
        let world = World::default();
        let me = InstallationId::new("i");
        let request = conformance::request(1, &me, Placement::default());
        for name in ["fake-a", "fake-b"] {
            world.provider(name, &me).create(&request).await.unwrap();
        }
        assert_eq!(world.violations().len(), 1);
    }
}

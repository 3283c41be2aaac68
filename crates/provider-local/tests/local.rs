//! The provider with real processes on loopback.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that fails by a panic"
)]

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use egress_core::spec::Placement;
use egress_core::{ErrorClass, InstallationId, ProviderId};
use egress_provider::config::{BuildContext, parse};
use egress_provider::conformance::{self, Harness, Limits};
use egress_provider::{CreateRequest, Instance, InstanceEvent, InstanceState, Provider};
use egress_provider_local::LocalType;
use futures::StreamExt;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, sleep, timeout};

const SQUID: &str = "/usr/sbin/squid";

/// A program of this crate's examples, which `cargo test` builds beside the tests.
fn example(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let path = test
        .parent()
        .and_then(Path::parent)
        .unwrap()
        .join("examples")
        .join(name);
    assert!(
        path.is_file(),
        "{} is missing: cargo build --examples",
        path.display()
    );
    path
}

/// Two runs of these tests at one time would want the same addresses: the second waits here.
fn alone_on_this_machine() {
    static LOCK: OnceLock<fs::File> = OnceLock::new();
    LOCK.get_or_init(|| {
        let path = std::env::temp_dir().join("egress-provider-local-tests.lock");
        let file = fs::File::create(path).unwrap();
        file.lock().unwrap();
        file
    });
}

/// A machine of its own: a state directory, and all processes that it ever started.
struct Machine {
    dir: TempDir,
    block: String,
    program: PathBuf,
    first: &'static str,
}

impl Machine {
    /// `net` must be another one in each test: they run beside each other.
    fn new(net: &str, rest: &str) -> Self {
        alone_on_this_machine();
        Self {
            dir: TempDir::new().unwrap(),
            block: format!("{{listenAddresses: [{net}], allowTargets: [127.0.0.0/8] {rest}}}"),
            program: example("forward-proxy"),
            first: "forward-proxy",
        }
    }

    fn local_type(&self) -> LocalType {
        LocalType::new().with_program(self.program.clone(), vec![self.first.to_owned()])
    }

    fn provider(&self) -> Arc<dyn Provider> {
        self.provider_of(&self.local_type(), &installation())
    }

    fn provider_of(&self, local: &LocalType, installation: &InstallationId) -> Arc<dyn Provider> {
        let text = format!(
            "providers: [{{name: here, type: local, local: {}}}]",
            self.block
        );
        let blueprints = parse(&text, &[local]).unwrap();
        let state_dir = self.dir.path().to_owned();
        blueprints[0]
            .blueprint
            .build(BuildContext {
                name: "here".to_owned(),
                installation: installation.clone(),
                runtime_dir: state_dir.join("run"),
                cache_dir: state_dir.join("cache"),
                state_dir,
            })
            .unwrap()
    }

    fn file(&self, instance: &Instance, extension: &str) -> PathBuf {
        self.dir
            .path()
            .join("local/here")
            .join(format!("{}.{extension}", instance.name))
    }

    /// Every process that holds one of this machine's locks, seen from outside.
    fn processes(&self) -> BTreeSet<i32> {
        let mut found = BTreeSet::new();
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse().ok()) else {
                continue;
            };
            let stdin = fs::read_link(entry.path().join("fd/0"));
            if stdin.is_ok_and(|path| path.starts_with(self.dir.path())) {
                found.insert(pid);
            }
        }
        found
    }

    /// Waits until no process is left: one that was killed takes a moment to end.
    async fn empty(&self) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !self.processes().is_empty() {
            let left = self.processes();
            assert!(Instant::now() < deadline, "{left:?} are left");
            sleep(Duration::from_millis(5)).await;
        }
    }

    fn pid_of(&self, instance: &Instance) -> i32 {
        let note = fs::read_to_string(self.file(instance, "lock")).unwrap();
        note.split(' ').next().unwrap().parse().unwrap()
    }

    fn left(&self) -> Vec<String> {
        let entries = fs::read_dir(self.dir.path().join("local/here")).unwrap();
        entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        for pid in self.processes() {
            kill(pid);
        }
    }
}

fn kill(pid: i32) {
    // One that is gone already is fine.
    let _ = kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL);
}

fn installation() -> InstallationId {
    InstallationId::new("installation")
}

fn request(n: u32) -> CreateRequest {
    conformance::request(n, &installation(), Placement::default())
}

async fn running(
    provider: &Arc<dyn Provider>,
    id: &ProviderId,
) -> (Instance, SocketAddr, Option<u16>) {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let instance = provider.get(id).await.unwrap();
        match instance.state {
            InstanceState::Running { address, port } => {
                let listen = SocketAddr::new(address, port.unwrap_or_default());
                return (instance, listen, port);
            }
            ref state => assert!(Instant::now() < deadline, "{state:?}"),
        }
        sleep(Duration::from_millis(10)).await;
    }
}

async fn make(provider: &Arc<dyn Provider>, request: &CreateRequest) -> (Instance, SocketAddr) {
    let id = provider.create(request).await.unwrap();
    let (instance, mut listen, port) = running(provider, &id).await;
    if port.is_none() {
        listen.set_port(request.port);
    }
    (instance, listen)
}

async fn gone(provider: &Arc<dyn Provider>, id: &ProviderId) {
    let deadline = Instant::now() + Duration::from_secs(30);
    provider.delete(id).await.unwrap();
    while provider.get(id).await.map_err(|error| error.class).err() != Some(ErrorClass::NotFound) {
        assert!(Instant::now() < deadline, "{id} is still there");
        sleep(Duration::from_millis(10)).await;
    }
}

/// Asks the proxy for the target and gives what the target saw: the head and the source address.
async fn through(proxy: SocketAddr) -> (String, String, IpAddr) {
    let target = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = target.local_addr().unwrap();
    let mut client = TcpStream::connect(proxy).await.unwrap();
    let asked = format!("GET http://{at}/x HTTP/1.1\r\nHost: {at}\r\nConnection: close\r\n\r\n");
    client.write_all(asked.as_bytes()).await.unwrap();
    let serve = async {
        let (mut stream, peer) = target.accept().await.unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.unwrap());
        }
        stream
            .write_all(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
            .await
            .unwrap();
        (String::from_utf8(head).unwrap(), peer.ip())
    };
    let (head, peer) = timeout(Duration::from_secs(20), serve).await.unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).await.unwrap();
    (head, answer, peer)
}

async fn connect_status(proxy: SocketAddr, target: &str) -> String {
    let mut client = TcpStream::connect(proxy).await.unwrap();
    let asked = format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n");
    client.write_all(asked.as_bytes()).await.unwrap();
    let mut line = [0; 12];
    timeout(Duration::from_secs(20), client.read_exact(&mut line))
        .await
        .unwrap()
        .unwrap();
    String::from_utf8(line.to_vec()).unwrap()
}

#[async_trait]
impl Harness for Machine {
    async fn provider(&mut self, installation: &InstallationId) -> Arc<dyn Provider> {
        self.provider_of(&self.local_type(), installation)
    }

    fn unknown_placement(&self) -> Option<Placement> {
        Some(Placement {
            zone: Some("nowhere".to_owned()),
            ..Placement::default()
        })
    }

    async fn stop(&mut self, instance: &Instance) {
        kill(self.pid_of(instance));
    }

    async fn vanish(&mut self, instance: &Instance) {
        kill(self.pid_of(instance));
        for extension in ["json", "lock", "log"] {
            fs::remove_file(self.file(instance, extension)).unwrap();
        }
        self.empty().await;
    }

    fn limits(&self) -> Limits {
        Limits {
            event: Duration::from_secs(5),
            ..Limits::default()
        }
    }

    async fn count_on_backend(&mut self) -> Option<usize> {
        Some(self.processes().len())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_builtin_proxy_conforms() {
    let mut machine = Machine::new("127.90.0.0/16", "");
    let ran = conformance::run(&mut machine).await;
    assert!(ran.len() >= 17, "{ran:?}");
    assert_eq!(machine.left(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn squid_conforms() {
    if !Path::new(SQUID).is_file() {
        println!("skipped: {SQUID} is not installed");
        return;
    }
    let mut machine = Machine::new("127.91.0.0/16", ", program: squid");
    let ran = conformance::run(&mut machine).await;
    assert!(ran.len() >= 17, "{ran:?}");
}

#[tokio::test]
async fn squid_forwards_and_denies_like_the_builtin_proxy() {
    for (net, rest) in [("127.92.0.0/24", ""), ("127.92.1.0/24", ", program: squid")] {
        if rest.contains("squid") && !Path::new(SQUID).is_file() {
            println!("skipped: {SQUID} is not installed");
            return;
        }
        let rest = format!("{rest}, bindAddresses: {{a: 127.92.9.9}}");
        let machine = Machine::new(net, &rest);
        let provider = machine.provider();
        let (_, listen) = make(&provider, &request(1)).await;
        let (head, answer, peer) = through(listen).await;
        assert!(answer.starts_with("HTTP/1.1 204"), "{answer}");
        assert_eq!(peer, IpAddr::from([127, 92, 9, 9]));
        let seen = head.to_ascii_lowercase();
        assert!(
            !seen.contains("via:") && !seen.contains("forwarded"),
            "{head}"
        );
        for denied in [
            "169.254.169.254:80",
            "[fe80::1]:80",
            "10.0.0.1:80",
            "[::1]:80",
        ] {
            assert_eq!(
                connect_status(listen, denied).await,
                "HTTP/1.1 403",
                "{denied}"
            );
        }
    }
}

#[tokio::test]
async fn each_proxy_has_its_own_address_and_keeps_it_over_a_restart() {
    let machine = Machine::new("127.93.0.0/29", "");
    let provider = machine.provider();
    let mut addresses = BTreeSet::new();
    let mut instances = Vec::new();
    for n in 0..4 {
        let mut request = request(n);
        request.port = 3128;
        let (instance, listen) = make(&provider, &request).await;
        assert_eq!(listen.port(), 3128);
        addresses.insert(listen);
        instances.push(instance);
    }
    assert_eq!(addresses.len(), 4);
    drop(provider);
    let provider = machine.provider();
    let mut listed = provider.list().await.unwrap();
    listed.sort_by_key(|i| instances.iter().position(|j| j.id == i.id));
    assert_eq!(listed, instances);
    // The same one again for the same Proxy.
    gone(&provider, &instances[2].id).await;
    let mut again = request(2);
    again.port = 3128;
    assert!(addresses.contains(&make(&provider, &again).await.1));
    // Two are left; then it says what to do.
    for n in 10..12 {
        let mut request = request(n);
        request.port = 3128;
        make(&provider, &request).await;
    }
    let mut one_too_many = request(12);
    one_too_many.port = 3128;
    let error = provider.create(&one_too_many).await.unwrap_err();
    assert_eq!(error.class, ErrorClass::QuotaExceeded);
    assert!(error.message.contains("widen listenAddresses"), "{error}");
    assert_eq!(
        provider.list().await.unwrap().len(),
        6,
        "a refused one leaves nothing"
    );
}

#[tokio::test]
async fn a_free_port_of_a_range_is_reported() {
    let machine = Machine::new("127.94.0.1", ", portRange: 24000-24001");
    let provider = machine.provider();
    // Somebody else has one of them.
    let _taken = TcpListener::bind("127.94.0.1:24000").await.unwrap();
    let (instance, listen) = make(&provider, &request(1)).await;
    assert_eq!(listen, "127.94.0.1:24001".parse().unwrap());
    let state = InstanceState::Running {
        address: listen.ip(),
        port: Some(24001),
    };
    assert_eq!(instance.state, state);
    through(listen).await;
    let error = provider.create(&request(2)).await.unwrap_err();
    assert_eq!(error.class, ErrorClass::QuotaExceeded);
    assert!(error.message.contains("24000 to 24001"), "{error}");
}

#[tokio::test]
async fn source_addresses_are_chosen_by_zone_or_spread() {
    let binds = ", bindAddresses: {a: 127.95.8.1, b: [127.95.8.2, \"::1\"], off: 192.0.2.1}";
    let machine = Machine::new("127.95.0.0/24", binds);
    let provider = machine.provider();
    let in_zone = |n, zone: &str| {
        let mut request = request(n);
        request.placement.zone = Some(zone.to_owned());
        request
    };
    for (n, zone, source) in [(1, "a", [127, 95, 8, 1]), (2, "b", [127, 95, 8, 2])] {
        let (_, listen) = make(&provider, &in_zone(n, zone)).await;
        assert_eq!(through(listen).await.2, IpAddr::from(source));
    }
    let error = provider.create(&in_zone(3, "c")).await.unwrap_err();
    assert_eq!(error.class, ErrorClass::Permanent);
    assert!(
        error.message.contains("bindAddresses has a, b, off"),
        "{error}"
    );
    // An address that the machine has not got now may come back.
    let error = provider.create(&in_zone(4, "off")).await.unwrap_err();
    assert_eq!(error.class, ErrorClass::Transient);
    assert!(error.message.contains("192.0.2.1"), "{error}");
    assert_eq!(provider.list().await.unwrap().len(), 2);

    let machine = Machine::new(
        "127.95.1.0/24",
        ", bindAddresses: {a: 127.95.9.1, b: 127.95.9.2}",
    );
    let provider = machine.provider();
    let mut sources = BTreeSet::new();
    for n in 0..2 {
        let (_, listen) = make(&provider, &request(n)).await;
        sources.insert(through(listen).await.2);
    }
    assert_eq!(sources.len(), 2, "{sources:?}");
}

#[tokio::test]
async fn a_killed_process_is_told_at_once() {
    let machine = Machine::new("127.96.0.0/24", "");
    for adopted in [false, true] {
        let mut provider = machine.provider();
        let (instance, _) = make(&provider, &request(1)).await;
        if adopted {
            provider = machine.provider();
            running(&provider, &instance.id).await;
        }
        let mut events = provider.events();
        let begin = Instant::now();
        kill(machine.pid_of(&instance));
        loop {
            let event = timeout(Duration::from_secs(5), events.next())
                .await
                .unwrap();
            if event == Some(InstanceEvent::Instance(instance.name.clone()))
                && provider.get(&instance.id).await.unwrap().state == InstanceState::Stopped
            {
                break;
            }
        }
        assert!(
            begin.elapsed() < Duration::from_millis(500),
            "{:?}",
            begin.elapsed()
        );
        gone(&provider, &instance.id).await;
    }
}

#[tokio::test]
async fn an_operator_killed_while_it_creates_leaves_one_process_each() {
    const COUNT: u32 = 20;
    let machine = Machine::new("127.97.0.0/16", "");
    // Killed before the first, in the middle of some, after the last, and at once after each start.
    for lines in [0, 1, 6, 15, 26, 39, 40] {
        let mut operator = Command::new(example("creating-operator"))
            .arg(machine.dir.path())
            .arg(&machine.program)
            .arg(COUNT.to_string())
            .arg(&machine.block)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = BufReader::new(operator.stdout.take().unwrap());
        for _ in 0..lines {
            output.read_line(&mut String::new()).unwrap();
        }
        operator.kill().unwrap();
        operator.wait().unwrap();
        assert!(machine.processes().len() <= COUNT as usize);
    }
    let provider = machine.provider();
    let mut pids = BTreeSet::new();
    let mut addresses = BTreeSet::new();
    for n in 0..COUNT {
        let (instance, listen) = make(&provider, &request(n)).await;
        pids.insert(machine.pid_of(&instance));
        addresses.insert(listen);
    }
    assert_eq!(addresses.len(), COUNT as usize);
    assert_eq!(pids, machine.processes());
    assert_eq!(provider.list().await.unwrap().len(), COUNT as usize);
    for instance in provider.list().await.unwrap() {
        gone(&provider, &instance.id).await;
    }
    assert!(machine.processes().is_empty());
    assert_eq!(machine.left(), Vec::<String>::new());
}

#[tokio::test]
async fn a_crash_between_start_and_note_makes_no_second_process() {
    let machine = Machine::new("127.98.0.0/24", "");
    let provider = machine.provider();
    let (instance, _) = make(&provider, &request(1)).await;
    let pid = machine.pid_of(&instance);
    drop(provider);
    // What a crash right after the start leaves: a held lock without a note.
    fs::File::options()
        .write(true)
        .open(machine.file(&instance, "lock"))
        .unwrap()
        .set_len(0)
        .unwrap();
    let provider = machine.provider();
    let id = provider.create(&request(1)).await.unwrap();
    running(&provider, &id).await;
    assert_eq!(machine.processes(), BTreeSet::from([pid]));
    gone(&provider, &id).await;
    assert!(machine.processes().is_empty());
}

#[tokio::test]
async fn a_crash_before_the_start_is_finished_by_the_next_create() {
    let machine = Machine::new("127.99.0.0/24", "");
    let provider = machine.provider();
    let (instance, listen) = make(&provider, &request(1)).await;
    kill(machine.pid_of(&instance));
    machine.empty().await;
    drop(provider);
    // Only the record was written.
    fs::remove_file(machine.file(&instance, "lock")).unwrap();
    let provider = machine.provider();
    let stopped = provider.get(&instance.id).await.unwrap();
    assert_eq!(stopped.state, InstanceState::Stopped);
    let (again, listen_again) = make(&provider, &request(1)).await;
    assert_eq!(
        (again.created_at, listen_again),
        (instance.created_at, listen)
    );
    assert_eq!(machine.processes().len(), 1);
}

#[tokio::test]
async fn a_recycled_pid_is_never_signalled() {
    let machine = Machine::new("127.100.0.0/24", "");
    let provider = machine.provider();
    let (instance, _) = make(&provider, &request(1)).await;
    kill(machine.pid_of(&instance));
    machine.empty().await;
    drop(provider);
    let mut bystander = Command::new("sleep").arg("60").spawn().unwrap();
    let note = format!("{} 1\n", bystander.id());
    fs::write(machine.file(&instance, "lock"), note).unwrap();
    let provider = machine.provider();
    gone(&provider, &instance.id).await;
    assert!(
        bystander.try_wait().unwrap().is_none(),
        "a stranger was killed"
    );
    bystander.kill().unwrap();
    bystander.wait().unwrap();
}

#[tokio::test]
async fn processes_that_never_work_say_why_and_are_not_started_all_the_time() {
    let mut machine = Machine::new("127.101.0.0/24", "");
    machine.first = "FORWARD_PROXY_FAIL";
    let provider = machine.provider();
    let mut events = provider.events();
    let id = provider.create(&request(1)).await.unwrap();
    let error = loop {
        match provider.get(&id).await {
            Err(error) => break error,
            Ok(instance) => assert_ne!(
                instance.state,
                InstanceState::Running {
                    address: IpAddr::from([127, 101, 0, 1]),
                    port: None
                }
            ),
        }
        timeout(Duration::from_secs(5), events.next())
            .await
            .unwrap();
    };
    assert_eq!(error.class, ErrorClass::Transient);
    assert!(
        error.message.contains("exit status 3") && error.message.contains("failing on purpose"),
        "{error}"
    );
    let stopped = provider.get(&id).await.unwrap();
    assert_eq!(stopped.state, InstanceState::Stopped);
    gone(&provider, &id).await;
    let error = provider.create(&request(1)).await.unwrap_err();
    assert_eq!(error.class, ErrorClass::Transient);
    assert!(error.message.contains("again in"), "{error}");
    assert!(machine.left().is_empty());
    // Another Proxy is not held up by it.
    provider.create(&request(2)).await.unwrap();
}

#[tokio::test]
async fn one_that_does_not_listen_is_provisioning() {
    let mut machine = Machine::new("127.102.0.0/24", "");
    machine.first = "FORWARD_PROXY_MUTE";
    let provider = machine.provider();
    let id = provider.create(&request(1)).await.unwrap();
    let instance = provider.get(&id).await.unwrap();
    match instance.state {
        InstanceState::Provisioning(step) => {
            assert!(
                step.message().contains("to listen on 127.102.0."),
                "{step:?}"
            );
        }
        state => panic!("{state:?}"),
    }
    gone(&provider, &id).await;
    assert!(machine.processes().is_empty());
}

#[tokio::test]
async fn only_what_is_to_end_with_the_operator_ends_with_it() {
    for (net, rest, left) in [
        ("127.103.0.0/24", "", 2),
        ("127.103.1.0/24", ", stopOnExit: true", 0),
    ] {
        let machine = Machine::new(net, rest);
        let local = machine.local_type();
        let provider = machine.provider_of(&local, &installation());
        for n in 0..2 {
            make(&provider, &request(n)).await;
        }
        local.shutdown().await;
        assert!(provider.create(&request(3)).await.is_err());
        drop(provider);
        assert_eq!(machine.processes().len(), left, "{rest}");
    }
}

#[tokio::test]
async fn with_stop_on_exit_they_end_even_if_the_operator_is_killed() {
    let machine = Machine::new("127.104.0.0/24", ", stopOnExit: true");
    let mut operator = Command::new(example("creating-operator"))
        .arg(machine.dir.path())
        .arg(&machine.program)
        .arg("3")
        .arg(&machine.block)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = BufReader::new(operator.stdout.take().unwrap());
    for _ in 0..6 {
        output.read_line(&mut String::new()).unwrap();
    }
    assert_eq!(machine.processes().len(), 3);
    operator.kill().unwrap();
    operator.wait().unwrap();
    machine.empty().await;
}

#[tokio::test]
async fn children_see_nothing_of_the_operators_environment() {
    let machine = Machine::new("127.105.0.0/24", "");
    let provider = machine.provider();
    let (instance, _) = make(&provider, &request(1)).await;
    let environment = fs::read(format!("/proc/{}/environ", machine.pid_of(&instance))).unwrap();
    let names: BTreeSet<String> = String::from_utf8_lossy(&environment)
        .split('\0')
        .filter_map(|variable| variable.split_once('='))
        .map(|(name, _)| name.to_owned())
        .collect();
    assert!(
        names
            .iter()
            .all(|n| ["PATH", "TZ", "LANG", "LD_LIBRARY_PATH"].contains(&n.as_str())),
        "{names:?}"
    );
}

#[tokio::test]
async fn proxies_are_the_operators_own_program_even_when_its_file_was_replaced() {
    let machine = Machine::new("127.106.0.0/24", ", stopOnExit: true");
    let copy = machine.dir.path().join("operator");
    fs::copy(example("creating-operator"), &copy).unwrap();
    let mut operator = Command::new(&copy)
        .arg(machine.dir.path())
        .arg("self")
        .arg("1")
        .arg(&machine.block)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = BufReader::new(operator.stdout.take().unwrap());
    for line in ["creating 0\n", "created 0\n"] {
        let mut read = String::new();
        output.read_line(&mut read).unwrap();
        assert_eq!(read, line);
    }
    assert!(!copy.exists());
    let provider = machine.provider();
    let (instance, listen) = make(&provider, &request(0)).await;
    through(listen).await;
    let command = fs::read(format!("/proc/{}/cmdline", machine.pid_of(&instance))).unwrap();
    let command = String::from_utf8_lossy(&command).replace('\0', " ");
    assert!(
        command.contains("operator forward-proxy --listen 127.106.0."),
        "{command}"
    );
    operator.kill().unwrap();
    operator.wait().unwrap();
}

#[test]
fn the_examples_of_the_reference_are_right_and_no_field_is_missing() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/local-provider.md");
    let text = fs::read_to_string(path).unwrap();
    let examples: Vec<&str> = text
        .split("```yaml\n")
        .skip(1)
        .map(|rest| rest.split("```").next().unwrap())
        .collect();
    assert_eq!(examples.len(), 2);
    let local = LocalType::new();
    for example in examples {
        if let Err(faults) = parse(example, &[&local]) {
            panic!("{faults}\n{example}");
        }
    }
    let unknown = "providers: [{name: a, type: local, local: {x: 1}}]";
    let faults = parse(unknown, &[&local]).err().unwrap().to_string();
    let fields: Vec<&str> = faults
        .split("known here: ")
        .nth(1)
        .unwrap()
        .split(", ")
        .collect();
    assert!(fields.len() >= 9);
    for field in fields {
        assert!(
            text.contains(&format!("| `{field}` |")),
            "{field} is not in the table"
        );
    }
}

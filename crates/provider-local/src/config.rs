//! The `local:` block of the providers file.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use egress_core::{Clock, SystemClock};
use egress_forward_proxy::Net;
use egress_forward_proxy::config::{DEFAULT_MAX_CONNECTIONS, MAX_CONNECTIONS};
use egress_provider::config::{
    BuildContext, Faults, Fields, ProviderBlueprint, ProviderType, is_plain_name,
};
use egress_provider::{Provider, ProviderError};
use serde_json::Value;

use crate::pool::Pool;
use crate::provider::LocalProvider;

/// Each proxy has an address of its own in here, unless configured otherwise.
const DEFAULT_POOL: &str = "127.66.0.0/16";
/// With a range of ports, one address is enough.
const DEFAULT_PORT_RANGE_ADDRESS: &str = "127.0.0.1";
const DEFAULT_SQUID: &str = "/usr/sbin/squid";

/// Which program a proxy is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Program {
    /// The operator's own small forward proxy.
    Builtin,
    Squid(PathBuf),
}

/// The block, read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalConfig {
    pub program: Program,
    pub(crate) pool: Pool,
    /// Source addresses by name; each at most one IPv4 and one IPv6 address.
    pub bind_addresses: BTreeMap<String, Vec<IpAddr>>,
    pub allow_clients: Vec<Net>,
    pub allow_targets: Vec<Net>,
    pub max_connections: usize,
    /// The processes end with the operator.
    pub stop_on_exit: bool,
}

/// What the built-in forward proxy is started as.
#[derive(Debug, Clone)]
pub(crate) struct Builtin {
    pub(crate) program: PathBuf,
    pub(crate) arg0: Option<OsString>,
    /// Before the proxy's own flags.
    pub(crate) args: Vec<String>,
}

/// The type `local`. Keep it to the end: [`LocalType::shutdown`] stops what has to end with the
/// operator.
#[derive(Clone)]
pub struct LocalType {
    builtin: Builtin,
    clock: Arc<dyn Clock>,
    built: Arc<Mutex<Vec<Weak<LocalProvider>>>>,
}

impl Default for LocalType {
    fn default() -> Self {
        Self::new()
    }
}

impl LocalType {
    /// Proxies are this very program, called with `forward-proxy` first.
    pub fn new() -> Self {
        Self {
            builtin: Builtin {
                // Not current_exe(): after an upgrade that names a file that is gone or, worse,
                // another program.
                program: PathBuf::from("/proc/self/exe"),
                arg0: std::env::args_os().next(),
                args: vec!["forward-proxy".to_owned()],
            },
            clock: Arc::new(SystemClock),
            built: Arc::default(),
        }
    }

    /// Proxies are another program, called with `args` before the proxy's own flags.
    #[must_use]
    pub fn with_program(mut self, program: PathBuf, args: Vec<String>) -> Self {
        self.builtin = Builtin {
            program,
            arg0: None,
            args,
        };
        self
    }

    #[must_use]
    pub fn with_clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Stops the processes of all providers that were built from this type and its clones with
    /// `stopOnExit`; the others live on. Call it when the operator ends.
    pub async fn shutdown(&self) {
        let built: Vec<Arc<LocalProvider>> = self
            .built
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .iter()
            .filter_map(Weak::upgrade)
            .collect();
        let stopping = built
            .iter()
            .map(|provider| provider.shutdown(provider.stops_on_exit()));
        futures::future::join_all(stopping).await;
    }
}

impl ProviderType for LocalType {
    fn type_name(&self) -> &'static str {
        "local"
    }

    fn read(&self, fields: &mut Fields<'_>) -> Option<Box<dyn ProviderBlueprint>> {
        Some(Box::new(Blueprint {
            config: read(fields)?,
            of: self.clone(),
        }))
    }
}

struct Blueprint {
    config: LocalConfig,
    of: LocalType,
}

impl ProviderBlueprint for Blueprint {
    fn build(&self, context: BuildContext) -> Result<Arc<dyn Provider>, ProviderError> {
        let provider = LocalProvider::new(
            self.config.clone(),
            self.of.builtin.clone(),
            context,
            Arc::clone(&self.of.clock),
        )?;
        let mut built = self.of.built.lock().unwrap_or_else(PoisonError::into_inner);
        built.retain(|weak| weak.strong_count() > 0);
        built.push(Arc::downgrade(&provider));
        Ok(provider)
    }
}

/// Reads the block. None when a fault leaves nothing to build from.
fn read(fields: &mut Fields<'_>) -> Option<LocalConfig> {
    let program = read_program(fields);
    let nets = fields.list("listenAddresses", |value, path, faults| {
        let net = read_net(value, path, faults)?;
        if let Some(why) = unfit_to_listen(net) {
            faults.add(
                path,
                format!("{net} {why}: give addresses of this machine that crawlers connect to"),
            );
            return None;
        }
        Some(net)
    });
    let ports = read_port_range(fields);
    let nets = if nets.is_empty() {
        let default = match ports {
            None => DEFAULT_POOL,
            Some(_) => DEFAULT_PORT_RANGE_ADDRESS,
        };
        default.parse().into_iter().collect()
    } else {
        nets
    };
    let bind_addresses = fields.map("bindAddresses", read_bind).into_iter().collect();
    let allow_clients = fields.list("allowClients", read_net);
    let allow_targets = fields.list("allowTargets", read_net);
    let limits = *MAX_CONNECTIONS.start() as u64..=*MAX_CONNECTIONS.end() as u64;
    let max_connections = fields
        .optional_int("maxConnections", limits)
        .and_then(|n| usize::try_from(n).ok())
        .unwrap_or(DEFAULT_MAX_CONNECTIONS);
    let stop_on_exit = fields.optional_bool("stopOnExit").unwrap_or(false);
    Some(LocalConfig {
        program: program?,
        pool: Pool { nets, ports },
        bind_addresses,
        allow_clients: if allow_clients.is_empty() {
            Net::loopback()
        } else {
            allow_clients
        },
        allow_targets,
        max_connections,
        stop_on_exit,
    })
}

fn read_program(fields: &mut Fields<'_>) -> Option<Program> {
    let program = fields.optional_str("program");
    let squid = fields.optional_str("squidPath");
    match program.as_deref() {
        None | Some("builtin") => {
            if squid.is_some() {
                fields.fault("squidPath", "is only used with program: squid");
            }
            Some(Program::Builtin)
        }
        Some("squid") => {
            let path = PathBuf::from(squid.as_deref().unwrap_or(DEFAULT_SQUID));
            if !path.is_absolute() {
                fields.fault("squidPath", "must be an absolute path");
            }
            Some(Program::Squid(path))
        }
        Some(other) => {
            fields.fault(
                "program",
                format!("must be builtin or squid, not {other:?}"),
            );
            None
        }
    }
}

fn read_net(value: &Value, path: &str, faults: &mut Faults) -> Option<Net> {
    let Some(text) = value.as_str() else {
        faults.add(path, "must be a string such as \"127.66.0.0/16\"");
        return None;
    };
    match text.parse() {
        Ok(net) => Some(net),
        Err(error) => {
            faults.add(path, error.to_string());
            None
        }
    }
}

/// Why nobody can connect to it.
fn unfit_to_listen(net: Net) -> Option<&'static str> {
    let address = net.first();
    let link_local_v6: Net = Net::new(IpAddr::from([0xfe80, 0, 0, 0, 0, 0, 0, 0]), 10);
    if address.is_unspecified() {
        Some("means every address")
    } else if address.is_multicast() {
        Some("is multicast")
    } else if link_local_v6.contains(address) {
        Some("is link-local")
    } else {
        None
    }
}

fn read_port_range(fields: &mut Fields<'_>) -> Option<RangeInclusive<u16>> {
    let text = fields.optional_str("portRange")?;
    let range = text.split_once('-').and_then(|(low, high)| {
        let low: u16 = low.trim().parse().ok()?;
        let high: u16 = high.trim().parse().ok()?;
        (low > 0 && low <= high).then_some(low..=high)
    });
    if range.is_none() {
        fields.fault(
            "portRange",
            format!("{text:?} is no range of ports: write it as \"20000-20999\""),
        );
    }
    range
}

/// One address, or one of each family.
fn read_bind(name: &str, value: &Value, path: &str, faults: &mut Faults) -> Option<Vec<IpAddr>> {
    if !is_plain_name(name) {
        faults.add(
            path,
            format!("name {name:?} may hold only letters, digits, dot, dash and underscore, and starts with a letter or digit"),
        );
    }
    let texts: Vec<&Value> = match value {
        Value::Array(list) => list.iter().collect(),
        one => vec![one],
    };
    let mut addresses: Vec<IpAddr> = Vec::new();
    for text in texts {
        let parsed = text.as_str().and_then(|text| text.parse::<IpAddr>().ok());
        let Some(address) = parsed.map(|address| address.to_canonical()) else {
            faults.add(path, "must be an address such as \"192.0.2.10\", or a list of one IPv4 and one IPv6 address");
            return None;
        };
        if address.is_unspecified() || address.is_multicast() {
            faults.add(path, format!("{address} cannot be a source address"));
            return None;
        }
        if addresses.iter().any(|a| a.is_ipv4() == address.is_ipv4()) {
            faults.add(
                path,
                "holds two addresses of one family: at most one IPv4 and one IPv6 address",
            );
            return None;
        }
        addresses.push(address);
    }
    if addresses.is_empty() {
        faults.add(path, "holds no address");
        return None;
    }
    Some(addresses)
}

#[cfg(test)]
mod tests {
    use egress_provider::config::parse;

    use super::*;

    fn faults(block: &str) -> Vec<String> {
        let text = format!("providers: [{{name: here, type: local, local: {block}}}]");
        match parse(&text, &[&LocalType::new()]) {
            Ok(_) => Vec::new(),
            Err(faults) => faults.iter().map(ToString::to_string).collect(),
        }
    }

    #[track_caller]
    fn config(block: &str) -> LocalConfig {
        let value: Value = serde_json::from_str(block).unwrap();
        let mut faults = Faults::default();
        let mut fields = Fields::new(&value, "local", &mut faults);
        let config = read(&mut fields).unwrap();
        fields.finish();
        assert!(faults.is_empty(), "{faults}");
        config
    }

    #[test]
    fn an_empty_block_keeps_to_loopback() {
        let config = config("{}");
        assert_eq!(config.program, Program::Builtin);
        assert_eq!(config.pool.nets, ["127.66.0.0/16".parse().unwrap()]);
        assert_eq!(config.pool.ports, None);
        assert_eq!(config.allow_clients, Net::loopback());
        assert!(config.allow_targets.is_empty() && config.bind_addresses.is_empty());
        assert!(!config.stop_on_exit);
        assert_eq!(faults("{}"), Vec::<String>::new());
        assert_eq!(faults("null"), Vec::<String>::new());
    }

    #[test]
    fn every_field_is_read() {
        let config = config(
            r#"{"program": "squid", "squidPath": "/opt/squid", "portRange": "20000-20999",
                "listenAddresses": ["192.0.2.1", "2001:db8::/64"],
                "bindAddresses": {"uplink-a": "192.0.2.10", "b": ["192.0.2.11", "2001:db8::11"]},
                "allowClients": ["10.0.0.0/8"], "allowTargets": ["10.9.0.0/16"],
                "maxConnections": 10, "stopOnExit": true}"#,
        );
        assert_eq!(config.program, Program::Squid("/opt/squid".into()));
        assert_eq!(config.pool.nets.len(), 2);
        assert_eq!(config.pool.ports, Some(20000..=20999));
        assert_eq!(config.bind_addresses["b"].len(), 2);
        assert_eq!(config.allow_clients, ["10.0.0.0/8".parse().unwrap()]);
        assert_eq!(config.allow_targets, ["10.9.0.0/16".parse().unwrap()]);
        assert!(config.stop_on_exit);
        assert_eq!(config.max_connections, 10);
    }

    #[test]
    fn with_a_port_range_one_loopback_address_is_the_default() {
        let config = config(r#"{"portRange": "20000-20999"}"#);
        assert_eq!(config.pool.nets, ["127.0.0.1".parse().unwrap()]);
    }

    #[test]
    fn all_faults_at_once_each_with_its_path() {
        let block = r#"{program: nginx, listenAddresses: [0.0.0.0, fe80::1, 10.0.0.1/8, 7], portRange: "9-1",
            bindAddresses: {"a b": 192.0.2.1, two: [192.0.2.1, 192.0.2.2], none: [], any: "::", bad: x},
            allowClients: [everybody], maxConnections: 0, stopOnExit: 1, listen: x}"#;
        let at = "providers[0] \"here\": local.";
        let fits = "give addresses of this machine that crawlers connect to";
        assert_eq!(
            faults(&block.replace('\n', " ")),
            [
                format!("{at}program: must be builtin or squid, not \"nginx\""),
                format!("{at}listenAddresses[0]: 0.0.0.0/32 means every address: {fits}"),
                format!("{at}listenAddresses[1]: fe80::1/128 is link-local: {fits}"),
                format!(
                    "{at}listenAddresses[2]: \"10.0.0.1/8\" has host bits set: the network is \"10.0.0.0/8\""
                ),
                format!("{at}listenAddresses[3]: must be a string such as \"127.66.0.0/16\""),
                format!("{at}portRange: \"9-1\" is no range of ports: write it as \"20000-20999\""),
                format!(
                    "{at}bindAddresses.a b: name \"a b\" may hold only letters, digits, dot, dash and underscore, and starts with a letter or digit"
                ),
                format!("{at}bindAddresses.any: :: cannot be a source address"),
                format!(
                    "{at}bindAddresses.bad: must be an address such as \"192.0.2.10\", or a list of one IPv4 and one IPv6 address"
                ),
                format!("{at}bindAddresses.none: holds no address"),
                format!(
                    "{at}bindAddresses.two: holds two addresses of one family: at most one IPv4 and one IPv6 address"
                ),
                format!(
                    "{at}allowClients[0]: \"everybody\" is not a network: give an address with a prefix length such as \"10.0.0.0/8\""
                ),
                format!("{at}maxConnections: must be a whole number from 1 to 65536, not 0"),
                format!("{at}stopOnExit: must be true or false, not a number"),
                format!(
                    "{at}listen: unknown field; known here: allowClients, allowTargets, bindAddresses, listenAddresses, maxConnections, portRange, program, squidPath, stopOnExit"
                ),
            ]
        );
        assert_eq!(
            faults("{squidPath: /x}"),
            [format!("{at}squidPath: is only used with program: squid")]
        );
        assert_eq!(
            faults("{program: squid, squidPath: x}"),
            [format!("{at}squidPath: must be an absolute path")]
        );
    }
}

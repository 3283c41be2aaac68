//! The command line. Each flag's text here is also its documentation in docs/reference/flags.md,
//! which is generated and compared by a test.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// Egress proxies as a Kubernetes resource, made real on hosts, clouds and this machine.
#[derive(Debug, Parser)]
#[command(
    name = "egress-proxies-operator",
    version,
    about,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true
)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Option<Command>,
    #[command(flatten)]
    pub run: RunArgs,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the operator (the same as giving no subcommand).
    Run(Box<RunArgs>),
    /// Try it: embedded control plane, local provider, throwaway state; prints what to do next.
    Dev(DevArgs),
    /// Check a providers file and print every fault in it; exit 1 if there is one.
    CheckConfig(CheckConfigArgs),
    /// Check the hosts of a providers file as the operator would reach them, and say what to do
    /// about each fault; exit 1 if there is one.
    Doctor(DoctorArgs),
    /// Apply, list, wait for and delete Proxies where there is no kubectl.
    Client(ClientCommand),
    /// Print the Proxy CustomResourceDefinition as YAML.
    Crd,
    /// Print what the repository keeps generated from the code.
    #[command(hide = true)]
    Generate {
        #[arg(value_enum)]
        what: Generated,
    },
    /// Run one small forward proxy in the foreground (what the local provider starts).
    ForwardProxy(ForwardProxyArgs),
}

/// What `generate` prints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Generated {
    Crd,
    Openapi,
    Flags,
}

/// Where Proxies live.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ControlPlaneChoice {
    /// A Kubernetes cluster: --kubeconfig, the in-cluster service account, or the usual lookup.
    Cluster,
    /// The Kubernetes API that the operator serves itself, kept in the state directory.
    Embedded,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LeaseStoreChoice {
    /// Leases and cooldowns survive a restart.
    Sqlite,
    /// They do not.
    Memory,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormatChoice {
    Text,
    Json,
}

#[derive(Debug, Clone, Args)]
pub struct LogArgs {
    /// What to log: a level (error, warn, info, debug, trace) or target=level pairs, as RUST_LOG.
    #[arg(long, global = true, value_name = "FILTER")]
    pub log: Option<String>,
    /// How to log: text for people, json for machines.
    #[arg(long, global = true, value_enum, default_value = "text")]
    pub log_format: LogFormatChoice,
}

#[derive(Debug, Clone, Args)]
pub struct RunArgs {
    /// Where Proxies live.
    #[arg(
        long,
        value_enum,
        default_value = "cluster",
        help_heading = "Control plane"
    )]
    pub control_plane: ControlPlaneChoice,
    /// Kubeconfig of the cluster (default: the in-cluster service account, then $KUBECONFIG, then
    /// ~/.kube/config).
    #[arg(long, value_name = "FILE", help_heading = "Control plane")]
    pub kubeconfig: Option<PathBuf>,
    /// Only Proxies in this namespace (default: all).
    #[arg(long, value_name = "NAME", help_heading = "Control plane")]
    pub namespace: Option<String>,
    /// Where the embedded Kubernetes API listens, with TLS.
    #[arg(
        long,
        value_name = "ADDR:PORT",
        default_value = "127.0.0.1:6443",
        help_heading = "Control plane"
    )]
    pub api_addr: String,
    /// Unix socket of the embedded Kubernetes API, without TLS; whoever may open it is admin.
    #[arg(long, value_name = "PATH", help_heading = "Control plane")]
    pub api_socket: Option<PathBuf>,
    /// Where the embedded API's admin kubeconfig is written (default: admin.kubeconfig in the
    /// state directory).
    #[arg(long, value_name = "FILE", help_heading = "Control plane")]
    pub admin_kubeconfig: Option<PathBuf>,

    /// What must survive a restart: leases, the installation's identity, the embedded API's data.
    #[arg(
        long,
        value_name = "DIR",
        env = "STATE_DIRECTORY",
        default_value = "/var/lib/egress-proxies-operator",
        help_heading = "State"
    )]
    pub state_dir: PathBuf,
    /// Sockets and other things of this boot (default: run in the state directory).
    #[arg(
        long,
        value_name = "DIR",
        env = "RUNTIME_DIRECTORY",
        help_heading = "State"
    )]
    pub runtime_dir: Option<PathBuf>,
    /// What can be fetched again (default: cache in the state directory).
    #[arg(
        long,
        value_name = "DIR",
        env = "CACHE_DIRECTORY",
        help_heading = "State"
    )]
    pub cache_dir: Option<PathBuf>,
    /// Identity of this installation on the marks of what it creates (default: a UUID made at the
    /// first start and kept in the state directory).
    #[arg(long, value_name = "ID", help_heading = "State")]
    pub installation_id: Option<String>,

    /// The providers file. Read again on SIGHUP and when it changes; a bad new file keeps the old
    /// configuration running.
    #[arg(long, value_name = "FILE", help_heading = "Providers")]
    pub providers_config: Option<PathBuf>,
    /// An instance that is not running after this long is replaced.
    #[arg(long, value_name = "TIME", default_value = "15m", value_parser = duration, help_heading = "Providers")]
    pub provisioning_timeout: Duration,
    /// From one search for orphaned instances to the next.
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = duration, help_heading = "Providers")]
    pub sweep_interval: Duration,
    /// Orphans younger than this are left alone: their create may be in flight.
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = duration, help_heading = "Providers")]
    pub orphan_grace: Duration,

    /// Where the discovery and lease API listens: ADDR:PORT, :PORT for all addresses, or
    /// unix:PATH. May be repeated.
    #[arg(
        long,
        value_name = "ADDR",
        default_value = ":8090",
        help_heading = "Discovery API"
    )]
    pub discovery_addr: Vec<String>,
    /// File with the bearer token of the discovery API, read again when it changes (else
    /// $DISCOVERY_TOKEN; with neither the API is open).
    #[arg(long, value_name = "FILE", help_heading = "Discovery API")]
    pub discovery_token_file: Option<PathBuf>,
    /// Certificate chain (PEM) for TLS on the discovery API; needs --discovery-tls-key.
    #[arg(
        long,
        value_name = "FILE",
        requires = "discovery_tls_key",
        help_heading = "Discovery API"
    )]
    pub discovery_tls_cert: Option<PathBuf>,
    /// Private key (PEM) for TLS on the discovery API; needs --discovery-tls-cert.
    #[arg(
        long,
        value_name = "FILE",
        requires = "discovery_tls_cert",
        help_heading = "Discovery API"
    )]
    pub discovery_tls_key: Option<PathBuf>,

    /// Where leases are kept.
    #[arg(long, value_enum, default_value = "sqlite", help_heading = "Leases")]
    pub lease_store: LeaseStoreChoice,
    /// How long a proxy rests for a target after a rate_limited report.
    #[arg(long, value_name = "TIME", default_value = "15m", value_parser = duration, help_heading = "Leases")]
    pub lease_cooldown: Duration,
    /// How long a proxy rests for a target after a banned report (default: --lease-cooldown).
    #[arg(long, value_name = "TIME", value_parser = duration, help_heading = "Leases")]
    pub ban_cooldown: Option<Duration>,
    /// The longest time to live of a lease.
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = duration, help_heading = "Leases")]
    pub max_lease_ttl: Duration,

    /// How many probes run at one time.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=4096), help_heading = "Health")]
    pub health_workers: u16,
    /// Certificates (PEM) that are trusted for probe targets beside the system's. May be repeated.
    #[arg(long, value_name = "FILE", help_heading = "Health")]
    pub health_ca: Vec<PathBuf>,

    /// Where Prometheus metrics are served (0: nowhere).
    #[arg(
        long,
        value_name = "ADDR:PORT",
        default_value = "0",
        help_heading = "Observability"
    )]
    pub metrics_addr: String,
    #[command(flatten)]
    pub log: LogArgs,
}

impl RunArgs {
    /// As if no flag and no variable were given.
    pub fn defaults() -> Self {
        let mut args = Cli::parse_from(["egress-proxies-operator"]).run;
        args.runtime_dir = None;
        args.cache_dir = None;
        args
    }
}

#[derive(Debug, Clone, Args)]
pub struct DevArgs {
    /// Where the discovery and lease API listens.
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:8090")]
    pub discovery_addr: String,
    /// Where the embedded Kubernetes API listens (default: a free port; the kubeconfig names it).
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:0")]
    pub api_addr: String,
    /// Keep the state here instead of in a directory that is removed at the end.
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// Another providers file than one local provider named "local".
    #[arg(long, value_name = "FILE")]
    pub providers_config: Option<PathBuf>,
    /// Certificates (PEM) that are trusted for probe targets beside the system's. May be repeated.
    #[arg(long, value_name = "FILE")]
    pub health_ca: Vec<PathBuf>,
    /// Where Prometheus metrics are served (0: nowhere).
    #[arg(long, value_name = "ADDR:PORT", default_value = "0")]
    pub metrics_addr: String,
    #[command(flatten)]
    pub log: LogArgs,
}

#[derive(Debug, Clone, Args)]
pub struct CheckConfigArgs {
    /// The providers file.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
}

#[derive(Debug, Clone, Args)]
pub struct DoctorArgs {
    /// The providers file.
    #[arg(long, value_name = "FILE")]
    pub providers_config: PathBuf,
    /// Where the operator keeps what must survive a restart.
    #[arg(
        long,
        value_name = "DIR",
        env = "STATE_DIRECTORY",
        default_value = "/var/lib/egress-proxies-operator"
    )]
    pub state_dir: PathBuf,
    #[command(flatten)]
    pub log: LogArgs,
}

#[derive(Debug, Clone, Args)]
pub struct ClientArgs {
    /// Kubeconfig (default: $KUBECONFIG, then ~/.kube/config).
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Namespace (default: the kubeconfig's; for get all).
    #[arg(long, short, value_name = "NAME")]
    pub namespace: Option<String>,
}

#[derive(Debug, Clone, Args)]
pub struct ClientCommand {
    #[command(flatten)]
    pub common: ClientArgs,
    #[command(subcommand)]
    pub verb: ClientVerb,
}

#[derive(Debug, Clone, Subcommand)]
pub enum ClientVerb {
    /// Create or change what a file (or - for standard input) describes: Proxies and Secrets.
    Apply {
        #[arg(short = 'f', long = "filename", value_name = "FILE")]
        file: PathBuf,
    },
    /// List Proxies, or show one as YAML.
    Get { name: Option<String> },
    /// Wait until a Proxy is Ready.
    Wait {
        name: String,
        #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
        timeout: Duration,
    },
    /// Delete a Proxy and wait until it is gone.
    Delete {
        name: String,
        #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
        timeout: Duration,
    },
}

#[derive(Debug, Clone, Args)]
pub struct ForwardProxyArgs {
    /// Everything after the subcommand, read by the forward proxy itself.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub args: Vec<String>,
}

/// `15m`, `90s`, `1h30m`: more than zero.
fn duration(text: &str) -> Result<Duration, String> {
    let parsed: jiff::SignedDuration = text
        .parse()
        .map_err(|_| "write a time such as 90s, 15m or 1h30m".to_owned())?;
    match Duration::try_from(parsed) {
        Ok(time) if !time.is_zero() => Ok(time),
        _ => Err("must be more than zero, such as 90s, 15m or 1h30m".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn times_are_read_as_people_write_them() {
        assert_eq!(duration("15m").unwrap(), Duration::from_secs(900));
        assert_eq!(duration("1h30m").unwrap(), Duration::from_secs(5400));
        for bad in ["0s", "-5m", "15", "soon", ""] {
            assert!(duration(bad).is_err(), "{bad:?} was accepted");
        }
    }
}

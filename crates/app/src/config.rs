//! From flags to a checked configuration: every fault is told at once, before anything is bound.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use egress_core::SecretBytes;
use egress_discovery::TokenSource;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

use crate::cli::{ControlPlaneChoice, LeaseStoreChoice, RunArgs};
use crate::state::Directories;

/// All faults of the command line, one a line.
#[derive(Debug)]
pub struct ConfigFaults(Vec<String>);

impl fmt::Display for ConfigFaults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("\nerror: "))
    }
}

impl std::error::Error for ConfigFaults {}

/// Where Proxies live.
#[derive(Debug, Clone)]
pub enum ControlPlane {
    Cluster {
        kubeconfig: Option<PathBuf>,
    },
    Embedded {
        addr: SocketAddr,
        socket: Option<PathBuf>,
        kubeconfig: PathBuf,
    },
}

/// A checked configuration.
#[derive(Debug, Clone)]
pub struct Config {
    pub control_plane: ControlPlane,
    pub namespace: Option<String>,
    pub directories: Directories,
    pub installation_id: Option<String>,
    pub providers: ProvidersSource,
    pub provisioning_timeout: Duration,
    pub sweep_interval: Duration,
    pub orphan_grace: Duration,
    pub discovery: egress_discovery::Config,
    pub lease_in_memory: bool,
    pub leases: egress_lease::Config,
    pub health_workers: usize,
    pub health_ca: Vec<CertificateDer<'static>>,
    pub metrics_addr: Option<SocketAddr>,
}

/// Where the providers' configuration comes from.
#[derive(Debug, Clone)]
pub enum ProvidersSource {
    /// No provider: only External Proxies work.
    None,
    File(PathBuf),
    /// Built in (`dev`); never reloaded.
    Text(String),
}

impl Config {
    /// # Errors
    /// All faults together.
    pub fn from_args(args: &RunArgs) -> Result<Self, ConfigFaults> {
        let mut faults = Vec::new();
        let state = args.state_dir.clone();
        let directories = Directories {
            runtime: args
                .runtime_dir
                .clone()
                .unwrap_or_else(|| state.join("run")),
            cache: args
                .cache_dir
                .clone()
                .unwrap_or_else(|| state.join("cache")),
            state: state.clone(),
        };
        let control_plane = match args.control_plane {
            ControlPlaneChoice::Cluster => {
                if let Some(path) = args.kubeconfig.as_ref().filter(|p| !p.exists()) {
                    faults.push(format!("--kubeconfig: {} does not exist", path.display()));
                }
                ControlPlane::Cluster {
                    kubeconfig: args.kubeconfig.clone(),
                }
            }
            ControlPlaneChoice::Embedded => {
                if args.kubeconfig.is_some() {
                    faults.push("--kubeconfig names a cluster, and --control-plane embedded uses none: leave one of them out (the embedded API's own kubeconfig is written to --admin-kubeconfig)".to_owned());
                }
                ControlPlane::Embedded {
                    addr: address("--api-addr", &args.api_addr, &mut faults),
                    socket: args.api_socket.clone(),
                    kubeconfig: args
                        .admin_kubeconfig
                        .clone()
                        .unwrap_or_else(|| state.join("admin.kubeconfig")),
                }
            }
        };
        if let Some(id) = args.installation_id.as_deref()
            && !egress_provider::config::is_plain_name(id)
        {
            faults.push(format!("--installation-id: {id:?} may hold only letters, digits, dot, dash and underscore, at most 63 of them"));
        }
        let metrics_addr = match args.metrics_addr.as_str() {
            "0" | "" => None,
            text => Some(address("--metrics-addr", text, &mut faults)),
        };
        let leases = leases(args);
        faults.extend(leases.faults().iter().map(ToString::to_string));
        let discovery = discovery(args, &mut faults);
        let health_ca = args
            .health_ca
            .iter()
            .flat_map(|p| certificates(p, &mut faults))
            .collect();
        match discovery {
            Some(discovery) if faults.is_empty() => Ok(Self {
                control_plane,
                namespace: args.namespace.clone(),
                directories,
                installation_id: args.installation_id.clone(),
                providers: args
                    .providers_config
                    .clone()
                    .map_or(ProvidersSource::None, ProvidersSource::File),
                provisioning_timeout: args.provisioning_timeout,
                sweep_interval: args.sweep_interval,
                orphan_grace: args.orphan_grace,
                discovery,
                lease_in_memory: args.lease_store == LeaseStoreChoice::Memory,
                leases,
                health_workers: args.health_workers.into(),
                health_ca,
                metrics_addr,
            }),
            _ => Err(ConfigFaults(faults)),
        }
    }
}

/// `ADDR:PORT`, or `:PORT` for all addresses of both families.
pub fn address(flag: &str, text: &str, faults: &mut Vec<String>) -> SocketAddr {
    let unspecified = SocketAddr::from(([0, 0, 0, 0, 0, 0, 0, 0], 0));
    let full = if text.starts_with(':') {
        format!("[::]{text}")
    } else {
        text.to_owned()
    };
    full.parse().unwrap_or_else(|_| {
        faults.push(format!(
            "{flag}: {text:?} is not an address: write ADDR:PORT with a numeric address, such as 127.0.0.1:8090 or [::1]:8090, or :8090 for all addresses"
        ));
        unspecified
    })
}

fn certificates(path: &PathBuf, faults: &mut Vec<String>) -> Vec<CertificateDer<'static>> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    match read {
        Ok(found) if !found.is_empty() => found,
        Ok(_) => {
            faults.push(format!(
                "--health-ca: {} holds no certificate in PEM",
                path.display()
            ));
            Vec::new()
        }
        Err(error) => {
            faults.push(format!(
                "--health-ca: cannot read {}: {error}",
                path.display()
            ));
            Vec::new()
        }
    }
}

fn discovery(args: &RunArgs, faults: &mut Vec<String>) -> Option<egress_discovery::Config> {
    let mut addresses = Vec::new();
    for text in &args.discovery_addr {
        match text.parse() {
            Ok(listen) => addresses.push(listen),
            Err(error) => faults.push(format!("--discovery-addr: {error}")),
        }
    }
    let token = token(args.discovery_token_file.as_ref(), faults);
    let tls = args
        .discovery_tls_cert
        .clone()
        .zip(args.discovery_tls_key.clone())
        .map(|(certificate, key)| egress_discovery::TlsFiles { certificate, key });
    Some(egress_discovery::Config {
        addresses,
        tls,
        token,
        ..egress_discovery::Config::default()
    })
}

fn leases(args: &RunArgs) -> egress_lease::Config {
    let defaults = egress_lease::Config::default();
    egress_lease::Config {
        cooldown: args.lease_cooldown,
        ban_cooldown: args.ban_cooldown.unwrap_or(args.lease_cooldown),
        max_ttl: args.max_lease_ttl,
        // A shorter maximum is meant for leases that name no ttl too.
        default_ttl: defaults.default_ttl.min(args.max_lease_ttl),
    }
}

/// The flag, else the systemd credential `discovery-token`, else `DISCOVERY_TOKEN`.
fn token(file: Option<&PathBuf>, faults: &mut Vec<String>) -> TokenSource {
    if let Some(file) = file {
        return TokenSource::File(file.clone());
    }
    let credential = std::env::var_os("CREDENTIALS_DIRECTORY")
        .map(|dir| PathBuf::from(dir).join("discovery-token"))
        .filter(|path| path.exists());
    if let Some(path) = credential {
        return TokenSource::File(path);
    }
    match std::env::var("DISCOVERY_TOKEN") {
        Ok(token) if token.trim().is_empty() => {
            faults.push(
                "DISCOVERY_TOKEN is set but empty: unset it for an open API, or give the token"
                    .to_owned(),
            );
            TokenSource::None
        }
        Ok(token) => TokenSource::Static(SecretBytes::new(token)),
        Err(_) => TokenSource::None,
    }
}

//! A CA of our own, the server's certificate and the administrator's.
//!
//! Made at first use, kept in `pki/` of the state directory (0600) and used again afterwards. The
//! server's and the administrator's certificates are made anew when they near their end, and the
//! server's when it is to answer to other names.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use data_encoding::BASE64;
use jiff::{SignedDuration, Timestamp};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use serde::{Deserialize, Serialize};

const DAY: i64 = 86_400;
const CA_DAYS: i64 = 3650;
const LEAF_DAYS: i64 = 398;
/// A certificate with less than this left is made anew.
const RENEW_DAYS: i64 = 30;
/// The machine's clock may have been wrong when the certificate was made.
const BACKDATE: SignedDuration = SignedDuration::from_hours(1);

/// Why certificates could not be had.
#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    #[error("cannot read {path}")]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("cannot write {path}")]
    Write {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error(
        "the certificate authority in {path} is damaged: {problem}; restore it, or remove the directory to start with a new one (clients then need the new kubeconfig)"
    )]
    Damaged { path: PathBuf, problem: String },
    #[error("a certificate could not be made: {0}")]
    Make(#[from] rcgen::Error),
    #[error("a certificate's key could not be read: {0}")]
    Key(#[from] rustls_pki_types::pem::Error),
}

/// A certificate with its key, in PEM.
#[derive(Clone, Serialize, Deserialize)]
struct Pair {
    certificate: String,
    key: String,
    not_after: Timestamp,
    names: Vec<String>,
}

impl fmt::Debug for Pair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pair")
            .field("names", &self.names)
            .field("not_after", &self.not_after)
            .finish_non_exhaustive()
    }
}

/// The certificates.
#[derive(Debug)]
pub struct Pki {
    directory: Option<PathBuf>,
    ca: Pair,
    server: Mutex<Option<Pair>>,
    admin: Mutex<Option<Pair>>,
}

/// What a TLS server needs.
pub(crate) struct ServerIdentity {
    pub chain: Vec<CertificateDer<'static>>,
    pub key: PrivateKeyDer<'static>,
    /// From then on another certificate should be used.
    pub renew_at: Timestamp,
}

impl Pki {
    /// Keeps nothing on disk.
    ///
    /// # Errors
    /// When a certificate cannot be made.
    pub fn in_memory(now: Timestamp) -> Result<Self, PkiError> {
        Ok(Self {
            directory: None,
            ca: make_ca(now)?,
            server: Mutex::new(None),
            admin: Mutex::new(None),
        })
    }

    /// Reads the CA from a directory, or makes one there.
    ///
    /// # Errors
    /// When files cannot be read or written, or are damaged.
    pub fn open(directory: &Path, now: Timestamp) -> Result<Self, PkiError> {
        use std::os::unix::fs::DirBuilderExt;
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)
            .map_err(|source| PkiError::Write {
                path: directory.to_owned(),
                source,
            })?;
        let ca = match load(directory, "ca")? {
            Some(ca) => ca,
            None => {
                let ca = make_ca(now)?;
                save(directory, "ca", &ca)?;
                write_private(&directory.join("ca.crt"), &ca.certificate)?;
                ca
            }
        };
        let pki = Self {
            server: Mutex::new(load(directory, "server").ok().flatten()),
            admin: Mutex::new(load(directory, "admin").ok().flatten()),
            directory: Some(directory.to_owned()),
            ca,
        };
        // A damaged CA is told at once, and not by the first client.
        pki.issuer()?;
        Ok(pki)
    }

    /// The CA's certificate, PEM.
    pub fn ca_certificate(&self) -> &str {
        &self.ca.certificate
    }

    fn issuer(&self) -> Result<Issuer<'_, KeyPair>, PkiError> {
        let damaged = |e: rcgen::Error| PkiError::Damaged {
            path: self.directory.clone().unwrap_or_default(),
            problem: e.to_string(),
        };
        let key = KeyPair::from_pem(&self.ca.key).map_err(damaged)?;
        Issuer::from_ca_cert_pem(&self.ca.certificate, key).map_err(damaged)
    }

    /// The server's certificate for these names and addresses.
    pub(crate) fn server_identity(
        &self,
        names: &[String],
        now: Timestamp,
    ) -> Result<ServerIdentity, PkiError> {
        let mut held = self.server.lock().unwrap_or_else(PoisonError::into_inner);
        let pair = match held.as_ref() {
            Some(pair) if !due(pair, now) && names.iter().all(|n| pair.names.contains(n)) => {
                pair.clone()
            }
            _ => {
                let mut params = CertificateParams::new(names.to_vec())?;
                params
                    .distinguished_name
                    .push(DnType::CommonName, "egress-proxies-operator");
                params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
                let pair = self.issue(params, names, now)?;
                self.keep("server", &pair)?;
                *held = Some(pair.clone());
                pair
            }
        };
        let mut chain = Vec::new();
        for certificate in CertificateDer::pem_slice_iter(pair.certificate.as_bytes()) {
            chain.push(certificate?);
        }
        Ok(ServerIdentity {
            chain,
            key: PrivateKeyDer::from_pem_slice(pair.key.as_bytes())?,
            renew_at: renew_at(&pair),
        })
    }

    /// The administrator's certificate and key, PEM.
    fn admin(&self, now: Timestamp) -> Result<Pair, PkiError> {
        let mut held = self.admin.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pair) = held.as_ref().filter(|p| !due(p, now)) {
            return Ok(pair.clone());
        }
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params
            .distinguished_name
            .push(DnType::OrganizationName, "system:masters");
        params.distinguished_name.push(DnType::CommonName, "admin");
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let pair = self.issue(params, &[], now)?;
        self.keep("admin", &pair)?;
        *held = Some(pair.clone());
        Ok(pair)
    }

    fn issue(
        &self,
        mut params: CertificateParams,
        names: &[String],
        now: Timestamp,
    ) -> Result<Pair, PkiError> {
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.use_authority_key_identifier_extension = true;
        let not_after = set_validity(&mut params, now, LEAF_DAYS);
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.issuer()?)?;
        Ok(Pair {
            certificate: certificate.pem(),
            key: key.serialize_pem(),
            not_after,
            names: names.to_vec(),
        })
    }

    fn keep(&self, name: &str, pair: &Pair) -> Result<(), PkiError> {
        match &self.directory {
            Some(directory) => save(directory, name, pair),
            None => Ok(()),
        }
    }

    /// Writes a kubeconfig that carries the CA and the administrator's certificate and key.
    pub(crate) fn write_admin_kubeconfig(
        &self,
        path: &Path,
        server: SocketAddr,
        now: Timestamp,
    ) -> Result<(), PkiError> {
        let admin = self.admin(now)?;
        let encode = |pem: &str| BASE64.encode(pem.as_bytes());
        let text = format!(
            "apiVersion: v1
kind: Config
clusters:
- name: egress-proxies
  cluster:
    server: https://{server}
    certificate-authority-data: {ca}
users:
- name: admin
  user:
    client-certificate-data: {certificate}
    client-key-data: {key}
contexts:
- name: egress-proxies
  context:
    cluster: egress-proxies
    user: admin
    namespace: default
current-context: egress-proxies
",
            ca = encode(&self.ca.certificate),
            certificate = encode(&admin.certificate),
            key = encode(&admin.key),
        );
        write_private(path, &text)
    }
}

fn renew_at(pair: &Pair) -> Timestamp {
    pair.not_after
        .checked_sub(SignedDuration::from_secs(RENEW_DAYS * DAY))
        .unwrap_or(pair.not_after)
}

fn due(pair: &Pair, now: Timestamp) -> bool {
    now >= renew_at(pair)
}

fn make_ca(now: Timestamp) -> Result<Pair, PkiError> {
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params
        .distinguished_name
        .push(DnType::CommonName, "egress-proxies-operator CA");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let not_after = set_validity(&mut params, now, CA_DAYS);
    let key = KeyPair::generate()?;
    let certificate = params.self_signed(&key)?;
    Ok(Pair {
        certificate: certificate.pem(),
        key: key.serialize_pem(),
        not_after,
        names: Vec::new(),
    })
}

fn set_validity(params: &mut CertificateParams, now: Timestamp, days: i64) -> Timestamp {
    let whole = |t: Timestamp| Timestamp::from_second(t.as_second()).unwrap_or(t);
    let from = whole(now.checked_sub(BACKDATE).unwrap_or(now));
    let until = whole(
        now.checked_add(SignedDuration::from_secs(days * DAY))
            .unwrap_or(Timestamp::MAX),
    );
    let date = |t: Timestamp| {
        let civil = t.to_zoned(jiff::tz::TimeZone::UTC);
        // A month and a day of a civil date are small and positive.
        let month = u8::try_from(civil.month()).unwrap_or(1);
        let day = u8::try_from(civil.day()).unwrap_or(1);
        rcgen::date_time_ymd(i32::from(civil.year()), month, day)
    };
    params.not_before = date(from);
    params.not_after = date(until);
    until
}

fn load(directory: &Path, name: &str) -> Result<Option<Pair>, PkiError> {
    let path = directory.join(format!("{name}.json"));
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(PkiError::Read { path, source }),
    };
    serde_json::from_str(&text)
        .map(Some)
        .map_err(|e| PkiError::Damaged {
            path,
            problem: e.to_string(),
        })
}

fn save(directory: &Path, name: &str, pair: &Pair) -> Result<(), PkiError> {
    let path = directory.join(format!("{name}.json"));
    let text = serde_json::to_string_pretty(pair).map_err(|e| PkiError::Damaged {
        path: path.clone(),
        problem: e.to_string(),
    })?;
    write_private(&path, &text)
}

/// Writes a file (0600) beside and renames it, so that there is never half of one.
pub(crate) fn write_private(path: &Path, text: &str) -> Result<(), PkiError> {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;
    let failed = |source| PkiError::Write {
        path: path.to_owned(),
        source,
    };
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    let beside = PathBuf::from(beside);
    // A leftover of a crash may have another mode.
    match std::fs::remove_file(&beside) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(failed(e)),
        _ => {}
    }
    let mut file = std::fs::File::options()
        .create_new(true)
        .write(true)
        .mode(0o600)
        .open(&beside)
        .map_err(failed)?;
    file.write_all(text.as_bytes()).map_err(failed)?;
    file.sync_all().map_err(failed)?;
    std::fs::rename(&beside, path).map_err(failed)
}

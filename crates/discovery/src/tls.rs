//! TLS from files that may be replaced while we serve.

use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use rustls::ServerConfig;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use crate::config::TlsFiles;
use crate::stamp::Stamp;

/// Certificate and key cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("cannot read {}: {source}", path.display())]
    Stat {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("cannot read the certificate chain {}: {source}; it must be PEM", path.display())]
    Certificate {
        path: PathBuf,
        source: rustls_pki_types::pem::Error,
    },
    #[error("{} holds no certificate", path.display())]
    NoCertificate { path: PathBuf },
    #[error("cannot read the private key {}: {source}; it must be PEM", path.display())]
    Key {
        path: PathBuf,
        source: rustls_pki_types::pem::Error,
    },
    #[error(
        "certificate {} and key {} cannot be used: {source}",
        certificate.display(),
        key.display()
    )]
    Pair {
        certificate: PathBuf,
        key: PathBuf,
        source: rustls::Error,
    },
}

/// The configuration of the files as they are.
pub(crate) struct Reloading {
    files: TlsFiles,
    known: Mutex<Known>,
}

struct Known {
    config: Arc<ServerConfig>,
    stamps: [Stamp; 2],
    failing: bool,
}

impl fmt::Debug for Reloading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Reloading").field(&self.files).finish()
    }
}

impl Reloading {
    pub fn new(files: TlsFiles) -> Result<Self, TlsError> {
        let (config, stamps) = load(&files)?;
        Ok(Self {
            files,
            known: Mutex::new(Known {
                config,
                stamps,
                failing: false,
            }),
        })
    }

    /// For the next connection. While the files cannot be used, as between the writes of a
    /// certificate and its key, the last good pair stays.
    pub fn current(&self) -> Arc<ServerConfig> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let unchanged = stamps(&self.files).is_ok_and(|now| {
            now.iter()
                .zip(&known.stamps)
                .all(|(now, before)| now.same_as(before))
        });
        if !unchanged {
            match load(&self.files) {
                Ok((config, stamps)) => {
                    *known = Known {
                        config,
                        stamps,
                        failing: false,
                    };
                }
                Err(error) => {
                    if !known.failing {
                        tracing::warn!(%error, "the last good certificate stays in use");
                    }
                    known.failing = true;
                }
            }
        }
        Arc::clone(&known.config)
    }
}

fn stamps(files: &TlsFiles) -> Result<[Stamp; 2], TlsError> {
    let of = |path: &PathBuf| {
        Stamp::of(path).map_err(|source| TlsError::Stat {
            path: path.clone(),
            source,
        })
    };
    Ok([of(&files.certificate)?, of(&files.key)?])
}

fn load(files: &TlsFiles) -> Result<(Arc<ServerConfig>, [Stamp; 2]), TlsError> {
    let stamps = stamps(files)?;
    let path = &files.certificate;
    let unreadable = |source| TlsError::Certificate {
        path: path.clone(),
        source,
    };
    let chain = CertificateDer::pem_file_iter(path)
        .map_err(unreadable)?
        .collect::<Result<Vec<_>, _>>()
        .map_err(unreadable)?;
    if chain.is_empty() {
        return Err(TlsError::NoCertificate { path: path.clone() });
    }
    let key = PrivateKeyDer::from_pem_file(&files.key).map_err(|source| TlsError::Key {
        path: files.key.clone(),
        source,
    })?;
    let mut config =
        ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, key))
            .map_err(|source| TlsError::Pair {
                certificate: files.certificate.clone(),
                key: files.key.clone(),
                source,
            })?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok((Arc::new(config), stamps))
}

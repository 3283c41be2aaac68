//! The certificates that targets are verified with: the system's, and those of `--health-ca`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::client::Resumption;
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;

/// A file of further roots that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CaError {
    #[error("{}: cannot be read as PEM: {source}", path.display())]
    Read {
        path: PathBuf,
        source: rustls_pki_types::pem::Error,
    },
    #[error("{}: holds no certificate (-----BEGIN CERTIFICATE-----)", path.display())]
    Empty { path: PathBuf },
}

/// The certificates of a PEM file.
///
/// # Errors
/// When the file cannot be read or holds none.
pub fn load_ca_file(path: &Path) -> Result<Vec<CertificateDer<'static>>, CaError> {
    let read = |source| CaError::Read {
        path: path.to_owned(),
        source,
    };
    let certificates = CertificateDer::pem_file_iter(path)
        .map_err(read)?
        .collect::<Result<Vec<_>, _>>()
        .map_err(read)?;
    if certificates.is_empty() {
        return Err(CaError::Empty {
            path: path.to_owned(),
        });
    }
    Ok(certificates)
}

/// A certificate or the cryptography that rustls does not take.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("certificate {index} of the further roots cannot be used: {source}")]
    Root { index: usize, source: rustls::Error },
    #[error("TLS cannot be set up: {0}")]
    Setup(rustls::Error),
}

/// The system's roots and `extra`, always verifying; no session is resumed, because a probe must
/// see the whole way each time and must not be linked with the one before.
///
/// # Errors
/// A root of `extra` that is no certificate. System roots that cannot be read are only logged:
/// http checks and private roots still work.
pub fn client_config(extra: &[CertificateDer<'static>]) -> Result<ClientConfig, TlsError> {
    let mut store = RootCertStore::empty();
    let native = rustls_native_certs::load_native_certs();
    for error in &native.errors {
        tracing::warn!(%error, "a system root certificate cannot be read");
    }
    let (added, _) = store.add_parsable_certificates(native.certs);
    if added == 0 && extra.is_empty() {
        tracing::warn!(
            "no system root certificates were found: every https health check will fail; install \
             ca-certificates, set SSL_CERT_FILE, or give --health-ca"
        );
    }
    for (index, certificate) in extra.iter().enumerate() {
        store
            .add(certificate.clone())
            .map_err(|source| TlsError::Root { index, source })?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(TlsError::Setup)?
        .with_root_certificates(store)
        .with_no_client_auth();
    config.resumption = Resumption::disabled();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_certificates_is_refused_with_its_name() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ca.pem");
        std::fs::write(&path, "not a certificate\n").unwrap();
        let error = load_ca_file(&path).unwrap_err().to_string();
        assert!(
            error.contains("ca.pem") && error.contains("no certificate"),
            "{error}"
        );
        let error = load_ca_file(&directory.path().join("missing.pem")).unwrap_err();
        assert!(error.to_string().contains("missing.pem"), "{error}");
    }

    #[test]
    fn certificates_of_a_file_become_roots() {
        let signed = rcgen::generate_simple_self_signed(vec!["a.test".into()]).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ca.pem");
        let two = format!("{}\n{}", signed.cert.pem(), signed.cert.pem());
        std::fs::write(&path, two).unwrap();
        let loaded = load_ca_file(&path).unwrap();
        assert_eq!(loaded.len(), 2);
        client_config(&loaded).unwrap();
    }
}

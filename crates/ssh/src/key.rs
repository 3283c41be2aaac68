//! The client's private key, read from a file.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use egress_core::ErrorClass;
use russh::keys::{PrivateKey, decode_secret_key};

/// Why a key file gave no key.
#[derive(Debug, Clone, thiserror::Error)]
pub enum KeyError {
    #[error("SSH key {}: {error}", path.display())]
    Read {
        path: PathBuf,
        error: Arc<std::io::Error>,
    },
    #[error(
        "SSH key {} holds a public key: give the private key's file, usually the same name without .pub", path.display()
    )]
    Public { path: PathBuf },
    #[error(
        "SSH key {} is protected by a passphrase, which a service cannot type: make one without, for this use only (ssh-keygen -t ed25519 -N '' -f FILE)", path.display()
    )]
    Passphrase { path: PathBuf },
    #[error("SSH key {} is not a private key in OpenSSH or PEM format: {reason}", path.display())]
    Unreadable { path: PathBuf, reason: String },
}

impl KeyError {
    /// A file that cannot be read may appear; a wrong one stays wrong until somebody replaces it.
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::Read { .. } => ErrorClass::Transient,
            Self::Public { .. } | Self::Passphrase { .. } | Self::Unreadable { .. } => {
                ErrorClass::Permanent
            }
        }
    }
}

/// Reads a private key.
///
/// # Errors
/// [`KeyError`]; the text never holds anything of the key.
pub async fn load(path: &Path) -> Result<PrivateKey, KeyError> {
    let text = tokio::fs::read(path)
        .await
        .map_err(|error| KeyError::Read {
            path: path.to_owned(),
            error: Arc::new(error),
        })?;
    parse(path, &text)
}

fn parse(path: &Path, bytes: &[u8]) -> Result<PrivateKey, KeyError> {
    let unreadable = |reason: &str| KeyError::Unreadable {
        path: path.to_owned(),
        reason: reason.to_owned(),
    };
    let text = std::str::from_utf8(bytes).map_err(|_| unreadable("it is not text"))?;
    let start = text.trim_start();
    if [
        "ssh-",
        "ecdsa-",
        "sk-",
        "---- BEGIN SSH2 PUBLIC",
        "-----BEGIN PUBLIC",
        "-----BEGIN RSA PUBLIC",
    ]
    .iter()
    .any(|public| start.starts_with(public))
    {
        return Err(KeyError::Public {
            path: path.to_owned(),
        });
    }
    if !start.starts_with("-----BEGIN ") && !start.starts_with("PuTTY-") {
        return Err(unreadable("no BEGIN line"));
    }
    // A key that needs a passphrase says so in one of three ways, depending on its format.
    let protected = start.contains("ENCRYPTED");
    match decode_secret_key(text, None) {
        Ok(key) if key.is_encrypted() => Err(KeyError::Passphrase {
            path: path.to_owned(),
        }),
        Ok(key) => Ok(key),
        Err(russh::keys::Error::KeyIsEncrypted) => Err(KeyError::Passphrase {
            path: path.to_owned(),
        }),
        Err(_) if protected => Err(KeyError::Passphrase {
            path: path.to_owned(),
        }),
        // The parser's own text could quote the input: only its kind is told.
        Err(_) => Err(unreadable("the content is damaged or of an unknown kind")),
    }
}

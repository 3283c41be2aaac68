//! Who may use the API.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use egress_core::SecretBytes;
use http::HeaderMap;
use http::header::AUTHORIZATION;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::config::TokenSource;
use crate::stamp::Stamp;

/// The token cannot be used. Never says what it is.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    #[error("cannot read the discovery token from {}: {source}", path.display())]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error(
        "the discovery token file {} is empty: write a token into it, or leave the option out to \
         open the API to everybody",
        path.display()
    )]
    EmptyFile { path: PathBuf },
    #[error("the discovery token is empty: give one, or leave it out to open the API to everybody")]
    Empty,
}

/// Only digests are kept and compared: of equal length, and in constant time.
type Token = [u8; 32];

fn digest(token: &[u8]) -> Token {
    Sha256::digest(token).into()
}

/// Lets requests pass that carry the right token.
pub(crate) struct Guard(Kind);

enum Kind {
    Open,
    Static(Token),
    File { path: PathBuf, known: Mutex<Known> },
}

struct Known {
    token: Token,
    stamp: Stamp,
    /// The last look failed, and a line about it was logged.
    failing: bool,
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Guard")
    }
}

impl Guard {
    pub fn new(source: &TokenSource) -> Result<Self, TokenError> {
        Ok(Self(match source {
            TokenSource::None => Kind::Open,
            TokenSource::Static(secret) => {
                let token = secret.expose_secret().trim_ascii();
                if token.is_empty() {
                    return Err(TokenError::Empty);
                }
                Kind::Static(digest(token))
            }
            TokenSource::File(path) => {
                let (token, stamp) = read(path)?;
                Kind::File {
                    path: path.clone(),
                    known: Mutex::new(Known {
                        token,
                        stamp,
                        failing: false,
                    }),
                }
            }
        }))
    }

    pub fn admits(&self, headers: &HeaderMap) -> bool {
        let token = match &self.0 {
            Kind::Open => return true,
            Kind::Static(token) => *token,
            Kind::File { path, known } => current(path, known),
        };
        let mut values = headers.get_all(AUTHORIZATION).iter();
        let (Some(value), None) = (values.next(), values.next()) else {
            return false;
        };
        bearer(value.as_bytes())
            .is_some_and(|presented| bool::from(digest(presented).ct_eq(&token)))
    }
}

/// The token of `Bearer TOKEN` (RFC 6750, section 2.1; the scheme's case does not matter, RFC
/// 9110, section 11.1).
fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = value.split_at_checked(7)?;
    scheme
        .eq_ignore_ascii_case(b"bearer ")
        .then(|| token.trim_ascii())
}

fn read(path: &Path) -> Result<(Token, Stamp), TokenError> {
    let failed = |source| TokenError::Read {
        path: path.into(),
        source,
    };
    // The stamp first: a change between the two is seen at the next look.
    let stamp = Stamp::of(path).map_err(failed)?;
    let text = SecretBytes::new(std::fs::read(path).map_err(failed)?);
    let token = text.expose_secret().trim_ascii();
    if token.is_empty() {
        return Err(TokenError::EmptyFile { path: path.into() });
    }
    Ok((digest(token), stamp))
}

/// The file's token now. While the file cannot be used the last good one stays: a rotation that
/// is just going on must lock nobody out, and must open nothing.
fn current(path: &Path, known: &Mutex<Known>) -> Token {
    let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
    let unchanged = Stamp::of(path).is_ok_and(|stamp| stamp.same_as(&known.stamp));
    if !unchanged {
        match read(path) {
            Ok((token, stamp)) => {
                if token != known.token {
                    tracing::info!(path = %path.display(), "the discovery token has changed");
                }
                *known = Known {
                    token,
                    stamp,
                    failing: false,
                };
            }
            Err(error) => {
                if !known.failing {
                    tracing::warn!(%error, "the last good token stays in force");
                }
                known.failing = true;
            }
        }
    }
    known.token
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(value: &str) -> HeaderMap {
        HeaderMap::from_iter([(AUTHORIZATION, value.parse().unwrap())])
    }

    #[test]
    fn only_the_right_token_passes() {
        let guard = Guard::new(&TokenSource::Static(SecretBytes::new("s3cret\n"))).unwrap();
        for good in ["Bearer s3cret", "bearer s3cret", "BEARER  s3cret "] {
            assert!(guard.admits(&with(good)), "{good:?}");
        }
        for bad in [
            "Bearer s3cre",
            "Bearer s3crets",
            "Bearer ",
            "Bearer",
            "s3cret",
            "Basic s3cret",
            "Bearers3cret",
        ] {
            assert!(!guard.admits(&with(bad)), "{bad:?}");
        }
        assert!(!guard.admits(&HeaderMap::new()));
        let mut two = with("Bearer s3cret");
        two.append(AUTHORIZATION, "Bearer other".parse().unwrap());
        assert!(!guard.admits(&two));
    }

    #[test]
    fn an_empty_token_is_refused_at_the_start() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), " \n").unwrap();
        for source in [
            TokenSource::Static(SecretBytes::new(" ")),
            TokenSource::File(file.path().into()),
            TokenSource::File("/nonexistent/token".into()),
        ] {
            Guard::new(&source).unwrap_err();
        }
    }

    #[test]
    fn a_file_is_read_again_when_it_changes_and_never_opens_the_api() {
        let directory = tempfile::TempDir::new().unwrap();
        let path = directory.path().join("token");
        std::fs::write(&path, "one\n").unwrap();
        let guard = Guard::new(&TokenSource::File(path.clone())).unwrap();
        assert!(guard.admits(&with("Bearer one")));
        // Same length, at once.
        std::fs::write(&path, "two\n").unwrap();
        assert!(!guard.admits(&with("Bearer one")));
        assert!(guard.admits(&with("Bearer two")));
        // Half-way through a rotation.
        std::fs::write(&path, "").unwrap();
        assert!(guard.admits(&with("Bearer two")));
        assert!(!guard.admits(&with("Bearer ")));
        std::fs::remove_file(&path).unwrap();
        assert!(guard.admits(&with("Bearer two")));
        assert!(!guard.admits(&HeaderMap::new()));
        std::fs::write(&path, "three").unwrap();
        assert!(guard.admits(&with("Bearer three")));
    }
}

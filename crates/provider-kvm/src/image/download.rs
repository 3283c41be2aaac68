//! One file over HTTP: one GET, hashed on the way, resumed by Range where the connection broke.

use std::error::Error as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use data_encoding::HEXLOWER;
use egress_core::ErrorClass;
use reqwest::header::{ACCEPT_ENCODING, CONTENT_RANGE, ETAG, IF_RANGE, LAST_MODIFIED, RANGE};
use reqwest::redirect::Policy;
use reqwest::{Client, Response, StatusCode};
use sha2::{Digest, Sha256, Sha512};
use tokio::sync::mpsc;
use tracing::{debug, info};
use url::Url;

use super::ImageError;
use crate::config::ImageDigest;

const MAX_REDIRECTS: usize = 10;
/// Failures in a row without a single byte in between.
const MAX_FAILURES: u32 = 5;
/// A checksum file is small.
const MAX_CHECKSUM_FILE: usize = 8 * 1024 * 1024;

/// How an HTTP client for images is made.
#[derive(Debug, Clone)]
pub struct HttpConfig {
    pub connect_timeout: Duration,
    /// For each read: a transfer may be slow, but not silent.
    pub read_timeout: Duration,
    /// The pause after a first failure; it doubles.
    pub backoff: Duration,
    /// Trusted beside the system's root certificates.
    pub extra_roots: Vec<rustls::pki_types::CertificateDer<'static>>,
}

impl Default for HttpConfig {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(20),
            read_timeout: Duration::from_secs(60),
            backoff: Duration::from_millis(500),
            extra_roots: Vec::new(),
        }
    }
}

/// Downloads images.
#[derive(Clone)]
pub struct Downloader {
    client: Client,
    config: HttpConfig,
}

#[derive(Debug, thiserror::Error)]
#[error("a redirect from https to http is not followed")]
struct DowngradeRefused;

/// The TLS part of the client could not be made.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    #[error("TLS: {0}")]
    Tls(#[from] rustls::Error),
    #[error("HTTP client: {0}")]
    Client(#[from] reqwest::Error),
}

impl Downloader {
    /// # Errors
    /// [`HttpError`].
    pub fn new(config: HttpConfig) -> Result<Self, HttpError> {
        let mut roots = rustls::RootCertStore::empty();
        let found = rustls_native_certs::load_native_certs();
        for error in &found.errors {
            debug!(%error, "a root certificate was left out");
        }
        roots.add_parsable_certificates(found.certs);
        roots.add_parsable_certificates(config.extra_roots.iter().cloned());
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let redirects = Policy::custom(|attempt| {
            let from_https = attempt.previous().iter().any(|url| url.scheme() == "https");
            if from_https && attempt.url().scheme() != "https" {
                attempt.error(DowngradeRefused)
            } else if attempt.previous().len() > MAX_REDIRECTS {
                attempt.error("too many redirects")
            } else {
                attempt.follow()
            }
        });
        let client = Client::builder()
            .tls_backend_preconfigured(tls)
            .redirect(redirects)
            .connect_timeout(config.connect_timeout)
            .read_timeout(config.read_timeout)
            .user_agent(concat!(
                "egress-proxies-operator/",
                env!("CARGO_PKG_VERSION")
            ))
            .build()?;
        Ok(Self { client, config })
    }

    /// A small text, such as SHA256SUMS.
    ///
    /// # Errors
    /// [`ImageError`].
    pub async fn text(&self, image: &str, url: &Url) -> Result<String, ImageError> {
        let mut failures = 0;
        loop {
            match self.text_once(image, url).await {
                Err(error)
                    if error.class() == ErrorClass::Transient && failures + 1 < MAX_FAILURES =>
                {
                    failures += 1;
                    tokio::time::sleep(self.pause(failures)).await;
                }
                other => return other,
            }
        }
    }

    async fn text_once(&self, image: &str, url: &Url) -> Result<String, ImageError> {
        let mut response = self
            .client
            .get(url.clone())
            .send()
            .await
            .map_err(|error| network(image, url, &error))?;
        check_status(image, url, response.status())?;
        let mut bytes = Vec::new();
        while let Some(chunk) = response
            .chunk()
            .await
            .map_err(|error| network(image, url, &error))?
        {
            if bytes.len() + chunk.len() > MAX_CHECKSUM_FILE {
                return Err(ImageError::Refused {
                    image: image.to_owned(),
                    reason: format!(
                        "{url} is larger than {MAX_CHECKSUM_FILE} bytes: it is no checksum file"
                    ),
                });
            }
            bytes.extend_from_slice(&chunk);
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn pause(&self, failures: u32) -> Duration {
        self.config.backoff * 2_u32.saturating_pow(failures.saturating_sub(1).min(6))
    }

    /// Sends the file's bytes to `out` and returns their digest. Ends quietly, with
    /// [`ImageError::Stopped`], when nobody takes them any more.
    ///
    /// # Errors
    /// [`ImageError`].
    pub async fn download(
        &self,
        image: &str,
        url: &Url,
        long_digest: bool,
        progress: &Progress,
        out: &mpsc::Sender<Bytes>,
    ) -> Result<ImageDigest, ImageError> {
        let mut hash = Hash::new(long_digest);
        let mut received: u64 = 0;
        let mut failures = 0;
        // What tells that the file is still the same when it is asked for again.
        let mut validator: Option<String> = None;
        loop {
            let before = received;
            let result = self
                .stream_once(
                    image,
                    url,
                    &mut received,
                    &mut validator,
                    progress,
                    |bytes| {
                        hash.update(&bytes);
                        out.send(bytes)
                    },
                )
                .await;
            match result {
                Ok(()) => return Ok(hash.finish()),
                Err(error) if error.class() == ErrorClass::Transient => {
                    if matches!(error, ImageError::Stopped { .. }) {
                        return Err(error);
                    }
                    failures = if received > before { 1 } else { failures + 1 };
                    if failures >= MAX_FAILURES {
                        return Err(error);
                    }
                    let pause = self.pause(failures);
                    info!(image, received, ?pause, %error, "image download broke off, going on");
                    tokio::time::sleep(pause).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// One request: from the start, or from where the last one broke off.
    async fn stream_once<'o, S>(
        &self,
        image: &str,
        url: &Url,
        received: &mut u64,
        validator: &mut Option<String>,
        progress: &Progress,
        mut take: impl FnMut(Bytes) -> S,
    ) -> Result<(), ImageError>
    where
        S: Future<Output = Result<(), mpsc::error::SendError<Bytes>>> + 'o,
    {
        // Compression of the transfer would change lengths and offsets.
        let mut request = self
            .client
            .get(url.clone())
            .header(ACCEPT_ENCODING, "identity");
        if *received > 0 {
            request = request.header(RANGE, format!("bytes={received}-"));
            if let Some(validator) = validator.as_deref() {
                request = request.header(IF_RANGE, validator);
            }
        }
        let mut response = request
            .send()
            .await
            .map_err(|error| network(image, url, &error))?;
        let broken = |reason: String| ImageError::Network {
            image: image.to_owned(),
            url: url.to_string(),
            reason,
        };
        let status = response.status();
        let mut skip = 0;
        if *received > 0 && status == StatusCode::RANGE_NOT_SATISFIABLE {
            // All of it was there already, and only the end of the connection was missing.
            let total = content_range(&response).and_then(|(_, total)| total);
            return if total == Some(*received) {
                Ok(())
            } else {
                Err(broken(format!("has no byte {received} any more")))
            };
        }
        check_status(image, url, status)?;
        if *received == 0 {
            *validator = strong_validator(&response);
            progress.set_total(response.content_length());
        } else if status == StatusCode::PARTIAL_CONTENT {
            match content_range(&response) {
                Some((start, _)) if start == *received => {}
                other => {
                    return Err(broken(format!(
                        "byte {received} was asked for, but {other:?} came"
                    )));
                }
            }
        } else {
            // The server does not do ranges, or the file is another one: what is there already is
            // passed over. If the file changed, its digest will tell.
            if strong_validator(&response) != *validator {
                return Err(ImageError::Changed {
                    image: image.to_owned(),
                    url: url.to_string(),
                    first: validator.clone().unwrap_or_default(),
                    second: strong_validator(&response).unwrap_or_default(),
                });
            }
            skip = *received;
        }
        while let Some(mut chunk) = response
            .chunk()
            .await
            .map_err(|error| network(image, url, &error))?
        {
            let passed = usize::try_from(skip).unwrap_or(usize::MAX).min(chunk.len());
            skip -= passed as u64;
            let chunk = chunk.split_off(passed);
            if chunk.is_empty() {
                continue;
            }
            let length = chunk.len() as u64;
            if take(chunk).await.is_err() {
                return Err(ImageError::Stopped {
                    image: image.to_owned(),
                });
            }
            *received += length;
            progress.add(length);
        }
        Ok(())
    }
}

fn check_status(image: &str, url: &Url, status: StatusCode) -> Result<(), ImageError> {
    if status.is_success() {
        return Ok(());
    }
    let class = match status {
        StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS => ErrorClass::Transient,
        _ if status.is_client_error() => ErrorClass::Permanent,
        _ => ErrorClass::Transient,
    };
    Err(ImageError::Status {
        image: image.to_owned(),
        url: url.to_string(),
        status: status.as_u16(),
        class,
    })
}

fn network(image: &str, url: &Url, error: &reqwest::Error) -> ImageError {
    // reqwest's own text stops at "error sending request": the reason is further down.
    let mut reason = error.to_string();
    let mut source = error.source();
    while let Some(inner) = source {
        if inner.is::<DowngradeRefused>() {
            return ImageError::Downgrade {
                image: image.to_owned(),
                url: url.to_string(),
            };
        }
        let text = inner.to_string();
        if !reason.contains(&text) {
            reason.push_str(": ");
            reason.push_str(&text);
        }
        source = inner.source();
    }
    ImageError::Network {
        image: image.to_owned(),
        url: url.to_string(),
        reason,
    }
}

fn strong_validator(response: &Response) -> Option<String> {
    let header = |name| {
        response
            .headers()
            .get(name)?
            .to_str()
            .ok()
            .map(str::to_owned)
    };
    // A weak ETag may not be used with If-Range (RFC 9110, section 13.1.5).
    header(ETAG)
        .filter(|tag: &String| !tag.starts_with("W/"))
        .or_else(|| header(LAST_MODIFIED))
}

/// Start and total of `bytes 10-19/20` or `bytes */20`.
fn content_range(response: &Response) -> Option<(u64, Option<u64>)> {
    let text = response.headers().get(CONTENT_RANGE)?.to_str().ok()?;
    let (range, total) = text.strip_prefix("bytes ")?.split_once('/')?;
    let start = match range.split_once('-') {
        Some((start, _)) => start.parse().ok()?,
        None => 0,
    };
    Some((start, total.parse().ok()))
}

enum Hash {
    Short(Sha256),
    Long(Box<Sha512>),
}

impl Hash {
    fn new(long: bool) -> Self {
        if long {
            Self::Long(Box::default())
        } else {
            Self::Short(Sha256::default())
        }
    }

    fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Short(hash) => hash.update(bytes),
            Self::Long(hash) => hash.update(bytes),
        }
    }

    fn finish(self) -> ImageDigest {
        match self {
            Self::Short(hash) => ImageDigest::Sha256(HEXLOWER.encode(&hash.finalize())),
            Self::Long(hash) => ImageDigest::Sha512(HEXLOWER.encode(&hash.finalize())),
        }
    }
}

/// How far a download is. Shared between who does it and who tells it.
#[derive(Debug, Default)]
pub struct Progress {
    done: AtomicU64,
    /// 0: not known.
    total: AtomicU64,
}

impl Progress {
    fn add(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }

    fn set_total(&self, total: Option<u64>) {
        self.done.store(0, Ordering::Relaxed);
        self.total.store(total.unwrap_or(0), Ordering::Relaxed);
    }

    /// Bytes that came over the network, and how many there are, if that is known.
    pub fn get(&self) -> (u64, Option<u64>) {
        let total = self.total.load(Ordering::Relaxed);
        (
            self.done.load(Ordering::Relaxed),
            (total > 0).then_some(total),
        )
    }
}

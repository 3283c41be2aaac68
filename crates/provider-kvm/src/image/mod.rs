//! The image cache: images come from the network, through the operator, into a host's pool.
//!
//! - [`checksums`]: the digest files that distributions publish.
//! - [`download`]: one file over HTTP, hashed on the way, resumed where it broke.
//! - [`inspect`]: what is in an image's first bytes, and what is refused.
//! - [`pins`]: digests that were seen first, and which volumes are ours.
//! - [`fetch`]: from a URL to a whole base volume.
//! - [`cache`]: which bases there are; one fetch for a host and image, however many ask.

pub mod cache;
pub mod checksums;
pub mod download;
pub mod fetch;
pub mod inspect;
pub mod pins;

use egress_core::ErrorClass;

use crate::host::error::HostError;

/// Why an image did not become a base volume.
#[derive(Debug, Clone, thiserror::Error)]
pub enum ImageError {
    #[error("image {image}: GET {url}: {status}")]
    Status {
        image: String,
        url: String,
        status: u16,
        class: ErrorClass,
    },
    #[error("image {image}: GET {url}: {reason}")]
    Network {
        image: String,
        url: String,
        reason: String,
    },
    #[error("image {image}: {url} redirects from https to http, which is not followed")]
    Downgrade { image: String, url: String },
    #[error("image {image}: {url} has digest {found}, but {expected} was expected ({origin})")]
    Digest {
        image: String,
        url: String,
        expected: String,
        found: String,
        origin: &'static str,
    },
    #[error("image {image}: {url} changed while it was fetched: first {first}, then {second}")]
    Changed {
        image: String,
        url: String,
        first: String,
        second: String,
    },
    #[error("image {image}: {url} holds no digest for {file}")]
    NoChecksum {
        image: String,
        url: String,
        file: String,
    },
    #[error("image {image} is refused: {reason}")]
    Refused { image: String, reason: String },
    #[error("image {image}: cannot be decompressed as {compression}: {reason}")]
    Decompress {
        image: String,
        compression: &'static str,
        reason: String,
        class: ErrorClass,
    },
    #[error(
        "image {image}: pool {pool} on {host} has {available} MiB free, but the image needs at least {needed} MiB"
    )]
    NoSpace {
        image: String,
        host: String,
        pool: String,
        available: u64,
        needed: u64,
    },
    #[error("image {image}: {sent} bytes were sent to {host}, but the volume there has {stored}")]
    SizeMismatch {
        image: String,
        host: String,
        sent: u64,
        stored: u64,
    },
    #[error("image {image}: {source}")]
    Host {
        image: String,
        source: Box<HostError>,
    },
    #[error("image {image}: {reason}")]
    Volume {
        image: String,
        reason: String,
        class: ErrorClass,
    },
    #[error("image {image}: cannot record its digest in {path}: {reason}")]
    Pins {
        image: String,
        path: String,
        reason: String,
    },
    #[error("image {image}: the fetch was stopped")]
    Stopped { image: String },
}

impl ImageError {
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::Status { class, .. }
            | Self::Volume { class, .. }
            | Self::Decompress { class, .. } => *class,
            Self::Host { source, .. } => source.class(),
            Self::NoSpace { .. } => ErrorClass::QuotaExceeded,
            Self::Downgrade { .. }
            | Self::Digest { .. }
            | Self::NoChecksum { .. }
            | Self::Refused { .. } => ErrorClass::Permanent,
            Self::Network { .. }
            | Self::Changed { .. }
            | Self::SizeMismatch { .. }
            | Self::Pins { .. }
            | Self::Stopped { .. } => ErrorClass::Transient,
        }
    }
}

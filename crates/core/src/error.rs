//! What an error from a backend means for what happens next.

use std::fmt;

/// The four classes. Everything above a provider decides by class alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorClass {
    /// A normal answer: the thing asked for does not exist.
    NotFound,
    /// The backend is full (quota, disk, memory): retried slowly.
    QuotaExceeded,
    /// May go away by itself: retried with backoff. What nobody classified is this.
    Transient,
    /// Will not go away until something that a person controls changes.
    Permanent,
}

impl ErrorClass {
    /// The metric label and log field.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NotFound => "not_found",
            Self::QuotaExceeded => "quota_exceeded",
            Self::Transient => "transient",
            Self::Permanent => "permanent",
        }
    }
}

impl fmt::Display for ErrorClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

//! Bytes that must never be seen in a log, an event, a span or an error.

use std::fmt;

/// Secret bytes (cloud-init, a token, a key). `Debug` shows only the length.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct SecretBytes(Vec<u8>);

impl SecretBytes {
    pub fn new(bytes: impl Into<Vec<u8>>) -> Self {
        Self(bytes.into())
    }

    /// The bytes themselves. The name is long so that each use is seen in review.
    pub fn expose_secret(&self) -> &[u8] {
        &self.0
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Debug for SecretBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SecretBytes({} bytes)", self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_tells_only_the_length() {
        let shown = format!("{:?}", SecretBytes::new("#cloud-config\npassword: hunter2"));
        assert_eq!(shown, "SecretBytes(31 bytes)");
    }
}

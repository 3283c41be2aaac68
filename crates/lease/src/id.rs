//! Lease ids.

use data_encoding::BASE32_NOPAD;

use crate::contract::LeaseId;

impl LeaseId {
    /// 160 bits from the operating system's generator by way of a CSPRNG: whoever does not hold
    /// an id cannot guess it.
    pub(crate) fn random() -> Self {
        let bytes: [u8; 20] = rand::random();
        Self(BASE32_NOPAD.encode(&bytes).to_ascii_lowercase())
    }
}

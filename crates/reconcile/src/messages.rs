//! The `MESSAGE_ID` of each kind of event that an administrator searches a journal for. The
//! journal's catalog explains them under the same ids.

/// A Proxy became Ready.
pub const PROXY_READY: &str = "5a2c7f0b8d6e4b3f9c1d2e7a60b4f801";
/// A Proxy became Unhealthy.
pub const PROXY_UNHEALTHY: &str = "5a2c7f0b8d6e4b3f9c1d2e7a60b4f802";
/// An instance is replaced by a new one.
pub const INSTANCE_REPLACED: &str = "5a2c7f0b8d6e4b3f9c1d2e7a60b4f803";
/// An instance that belonged to no Proxy was deleted.
pub const ORPHAN_DELETED: &str = "5a2c7f0b8d6e4b3f9c1d2e7a60b4f804";
/// A provider answers with transient errors.
pub const PROVIDER_UNREACHABLE: &str = "5a2c7f0b8d6e4b3f9c1d2e7a60b4f805";
/// A Proxy was released although its instance may still be there.
pub const INSTANCE_ABANDONED: &str = "5a2c7f0b8d6e4b3f9c1d2e7a60b4f806";
/// A Proxy failed and waits for a change.
pub const PROXY_FAILED: &str = "5a2c7f0b8d6e4b3f9c1d2e7a60b4f807";

//! The embedded control plane: the part of the Kubernetes API that Proxies need, in one process,
//! backed by SQLite.
//!
//! A map of the code, in the order of a request:
//!
//! | module | what |
//! |---|---|
//! | [`serve`](mod@serve), [`pki`] | TLS and unix listeners, who may talk; certificates and kubeconfig |
//! | `handlers` | one set of handlers over all kinds: get, list, watch, create, update, patch, delete |
//! | `request`, `decode`, `protobuf` | path, query, accepted form; bodies |
//! | `registry`, `kinds` | the kinds as rows: from CRDs, and the built-in ones |
//! | `admission`, `schema`, `meta`, `names` | pruning, defaults, schema, CEL, metadata |
//! | `patch`, `apply`, `fields`, `managed` | patches, server-side apply, managed fields |
//! | `storage` | the revision log |
//! | `table`, `jsonpath`, `selectors` | printing and selecting |
//! | `discovery`, `openapi` | what is there |
//! | `collector` | owner references, namespaces, expiry, compaction |
//!
//! It never pretends to be a cluster: there are no pods, no scheduler and no controllers beside the
//! garbage collector.

mod admission;
mod apply;
mod collector;
mod control_plane;
mod decode;
mod discovery;
mod error;
mod fields;
mod handlers;
mod jsonpath;
mod kinds;
mod managed;
mod meta;
mod names;
mod openapi;
mod patch;
pub mod pki;
mod protobuf;
mod registry;
mod request;
mod schema;
mod selectors;
pub mod serve;
mod server;
mod storage;
mod table;

pub use control_plane::{Config, ControlPlane, OpenError, Tuning};
pub use pki::PkiError;
pub use registry::RegistryError;
pub use serve::{ServeError, Token};
pub use server::Clock;
pub use storage::{Storage, StoreError};

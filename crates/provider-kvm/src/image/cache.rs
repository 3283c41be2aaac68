//! Which bases there are, and the fetches under way.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{info, warn};

use super::ImageError;
use super::download::{Downloader, Progress};
use super::fetch::{Fetch, host_error, volume_error};
use super::inspect;
use super::pins::Pins;
use crate::config::{Checksum, Format, ImageDigest, ImageSpec};
use crate::host::{CALL, Host};
use crate::metrics::Metrics;
use crate::storage::{Pool, StorageError};

/// A whole image in a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Base {
    pub volume: String,
    pub path: String,
    pub format: Format,
}

/// A fetch under way, for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FetchStatus {
    pub host: String,
    pub image: String,
    pub done_bytes: u64,
    pub total_bytes: Option<u64>,
}

impl FetchStatus {
    /// Such as `debian-13 on nas1: 42% of 406 MiB`.
    pub fn text(&self) -> String {
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        match self.total_bytes {
            Some(total) => format!(
                "{} on {}: {}% of {} MiB",
                self.image,
                self.host,
                (u128::from(self.done_bytes) * 100 / u128::from(total.max(1))).min(100),
                mib(total)
            ),
            None => format!(
                "{} on {}: {} MiB",
                self.image,
                self.host,
                mib(self.done_bytes)
            ),
        }
    }
}

type Outcome = Option<Result<Base, ImageError>>;

struct Running {
    progress: Arc<Progress>,
    outcome: watch::Receiver<Outcome>,
}

/// All images of one provider, on all of its hosts.
pub struct ImageCache {
    pub(super) downloader: Downloader,
    pub pins: Pins,
    pub(super) metrics: Metrics,
    /// By host and image.
    running: Mutex<BTreeMap<(String, String), Running>>,
    tasks: TaskTracker,
    stop: CancellationToken,
}

/// The name of a base volume: another content is another name.
pub fn base_name(key: &str, digest: &ImageDigest, format: Format) -> String {
    let hex = digest.hex();
    let short = hex.get(..12).unwrap_or(hex);
    format!("base-{key}-{short}.{}", format.as_str())
}

/// Says that a base is whole.
pub fn marker_name(base: &str) -> String {
    format!("{base}.complete")
}

impl ImageCache {
    pub fn new(downloader: Downloader, pins: Pins, metrics: Metrics) -> Arc<Self> {
        Arc::new(Self {
            downloader,
            pins,
            metrics,
            running: Mutex::default(),
            tasks: TaskTracker::new(),
            stop: CancellationToken::new(),
        })
    }

    /// Stops the fetches under way; what they left is not marked and will be fetched anew.
    pub fn stop(&self) {
        self.stop.cancel();
        self.tasks.close();
    }

    /// Fetches under way, in order.
    pub fn status(&self) -> Vec<FetchStatus> {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        running
            .iter()
            .map(|((host, image), fetch)| {
                let (done_bytes, total_bytes) = fetch.progress.get();
                FetchStatus {
                    host: host.clone(),
                    image: image.clone(),
                    done_bytes,
                    total_bytes,
                }
            })
            .collect()
    }

    /// The digest that the image must have, as far as it is known without the network.
    pub fn known_digest(&self, spec: &ImageSpec) -> Option<ImageDigest> {
        match &spec.checksum {
            Checksum::Known(digest) => Some(digest.clone()),
            Checksum::Unknown | Checksum::File(_) => self.pins.pin(&spec.pin_key()),
        }
    }

    /// The base of an image on a host, if it is there and whole.
    ///
    /// # Errors
    /// [`ImageError`]; also when it is there but larger than VMs' disks.
    pub async fn find_base(
        &self,
        host: &Host,
        spec: &ImageSpec,
        disk_bytes: u64,
    ) -> Result<Option<Base>, ImageError> {
        let Some(digest) = self.known_digest(spec) else {
            return Ok(None);
        };
        let formats = match spec.format {
            Some(format) => vec![format],
            None => vec![Format::Qcow2, Format::Raw],
        };
        let names: Vec<(String, Format)> = formats
            .into_iter()
            .map(|format| (base_name(&spec.key, &digest, format), format))
            .collect();
        let pool = host.config.pool.clone();
        let found = host
            .run("virStorageVolLookupByName", CALL, move |calls| {
                let pool = Pool::open(calls, &pool)?;
                for (name, format) in names {
                    if pool.find(&marker_name(&name))?.is_some()
                        && let Some(view) = pool.view(&name)?
                    {
                        let base = Base {
                            volume: name,
                            path: view.path,
                            format,
                        };
                        return Ok(Some((base, view.capacity)));
                    }
                }
                Ok::<_, StorageError>(None)
            })
            .await
            .map_err(|source| host_error(spec, source))?
            .map_err(|error| volume_error(spec, host.name(), &error))?;
        match found {
            Some((base, capacity)) => {
                inspect::fits(capacity, disk_bytes).map_err(|reason| ImageError::Refused {
                    image: spec.key.clone(),
                    reason,
                })?;
                Ok(Some(base))
            }
            None => Ok(None),
        }
    }

    /// The base of an image on a host; fetched where it is not there. However many ask, an image
    /// is fetched once for a host; who stops waiting does not stop the fetch.
    ///
    /// # Errors
    /// [`ImageError`].
    pub async fn ensure(
        self: &Arc<Self>,
        host: &Arc<Host>,
        spec: &ImageSpec,
        disk_bytes: u64,
    ) -> Result<Base, ImageError> {
        if let Some(base) = self.find_base(host, spec, disk_bytes).await? {
            return Ok(base);
        }
        let mut outcome = self.start(host, spec, disk_bytes);
        match outcome.wait_for(Option::is_some).await {
            Ok(result) => result.clone().unwrap_or_else(|| stopped(spec)),
            Err(_) => stopped(spec),
        }
    }

    fn start(
        self: &Arc<Self>,
        host: &Arc<Host>,
        spec: &ImageSpec,
        disk_bytes: u64,
    ) -> watch::Receiver<Outcome> {
        let id = (host.name().to_owned(), spec.key.clone());
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(fetch) = running.get(&id)
            && fetch.outcome.has_changed().is_ok()
        {
            return fetch.outcome.clone();
        }
        let progress = Arc::new(Progress::default());
        let (tell, outcome) = watch::channel(None);
        running.insert(
            id.clone(),
            Running {
                progress: Arc::clone(&progress),
                outcome: outcome.clone(),
            },
        );
        let (cache, host, spec) = (Arc::clone(self), Arc::clone(host), spec.clone());
        self.tasks.spawn(async move {
            let fetch = Fetch {
                cache: &cache,
                host: &host,
                spec: &spec,
                disk_bytes,
                progress: &progress,
            };
            let result = tokio::select! {
                result = fetch.run() => result,
                () = cache.stop.cancelled() => stopped(&spec),
            };
            cache
                .metrics
                .fetch_ended(host.name(), &spec.key, result.is_ok());
            match &result {
                Ok(base) => info!(
                    HOST = host.name(),
                    image = spec.key,
                    volume = base.volume,
                    "image cached"
                ),
                Err(error) => {
                    warn!(HOST = host.name(), image = spec.key, %error, "image fetch failed");
                }
            }
            cache
                .running
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .remove(&id);
            tell.send_replace(Some(result));
        });
        outcome
    }
}

fn stopped(spec: &ImageSpec) -> Result<Base, ImageError> {
    Err(ImageError::Stopped {
        image: spec.key.clone(),
    })
}

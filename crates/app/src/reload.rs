//! The providers file changes: SIGHUP, or a new modification time. A bad new file keeps the old
//! configuration running.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::providers::Loader;

/// How often the file is looked at; a stat, no read.
const LOOK: Duration = Duration::from_secs(2);

/// Watches until cancelled.
pub async fn watch(
    file: Option<PathBuf>,
    loader: Arc<Loader>,
    cancel: CancellationToken,
) -> std::io::Result<()> {
    let mut hangup = signal(SignalKind::hangup())?;
    let mut seen = file.as_deref().and_then(stamp);
    let mut tick = tokio::time::interval(LOOK);
    loop {
        let asked = tokio::select! {
            () = cancel.cancelled() => return Ok(()),
            _ = hangup.recv() => true,
            _ = tick.tick() => false,
        };
        let Some(file) = file.as_deref() else {
            if asked {
                tracing::info!("SIGHUP: no --providers-config is given, nothing to read again");
            }
            continue;
        };
        let now = stamp(file);
        // A file that is away for a moment is being replaced: the next look sees the new one.
        if asked || (now.is_some() && now != seen) {
            seen = now;
            reload(file, &loader);
        }
    }
}

fn stamp(file: &Path) -> Option<(SystemTime, u64)> {
    let meta = std::fs::metadata(file).ok()?;
    Some((meta.modified().ok()?, meta.len()))
}

fn reload(file: &Path, loader: &Loader) {
    match loader.backends().read(file) {
        Ok(blueprints) => {
            let change = loader.apply(blueprints);
            let names: Vec<_> = change.names.into_iter().collect();
            tracing::info!(file = %file.display(), changed = names.join(","), "providers read again");
        }
        Err(error) => {
            tracing::error!(%error, "the new providers file is refused, the old configuration stays");
        }
    }
}

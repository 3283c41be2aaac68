//! How the program tells what it does: logs now, the metrics registry, later traces.
//!
//! [`init`] is called once, first thing in `main`; the returned [`LogControl`] changes the level
//! while the program runs.

use std::fmt;
use std::io::IsTerminal;

use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry, fmt as log_fmt, reload};

/// What applies when neither `--log` nor `RUST_LOG` is given.
pub const DEFAULT_FILTER: &str = "info";

/// `--log-format`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// Readable lines, coloured on a terminal.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

#[derive(Debug, thiserror::Error)]
pub enum InitError {
    #[error(
        "the log filter {filter:?} is not valid ({source}): use a level (error, warn, info, debug, trace) or target=level pairs such as info,egress_reconcile=debug"
    )]
    Filter {
        filter: String,
        source: tracing_subscriber::filter::ParseError,
    },
    #[error("logging was set up twice")]
    Twice,
}

/// Changes the log filter of the running program.
#[derive(Clone)]
pub struct LogControl(reload::Handle<EnvFilter, Registry>);

impl LogControl {
    /// # Errors
    /// When the filter does not parse; the old one stays.
    pub fn set(&self, filter: &str) -> Result<(), InitError> {
        let parsed = parse(filter)?;
        // The only failure is a dropped subscriber, and ours is global.
        let _ = self.0.reload(parsed);
        Ok(())
    }
}

impl fmt::Debug for LogControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LogControl")
    }
}

fn parse(filter: &str) -> Result<EnvFilter, InitError> {
    EnvFilter::builder()
        .parse(filter)
        .map_err(|source| InitError::Filter {
            filter: filter.to_owned(),
            source,
        })
}

/// Sets the global subscriber up; logs go to standard error. `filter` is `--log`, else `RUST_LOG`,
/// else [`DEFAULT_FILTER`].
///
/// # Errors
/// When the filter does not parse, or a subscriber is already set.
pub fn init(filter: Option<&str>, format: LogFormat) -> Result<LogControl, InitError> {
    let from_env = std::env::var("RUST_LOG").ok().filter(|v| !v.is_empty());
    let filter = filter.or(from_env.as_deref()).unwrap_or(DEFAULT_FILTER);
    let (filter, handle) = reload::Layer::new(parse(filter)?);
    let output = match format {
        LogFormat::Json => log_fmt::layer()
            .json()
            .flatten_event(true)
            .with_writer(std::io::stderr)
            .boxed(),
        LogFormat::Text => log_fmt::layer()
            .with_ansi(std::io::stderr().is_terminal())
            .with_target(false)
            .with_writer(std::io::stderr)
            .boxed(),
    };
    tracing_subscriber::registry()
        .with(filter)
        .with(output)
        .try_init()
        .map_err(|_| InitError::Twice)?;
    Ok(LogControl(handle))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bad_filter_says_what_is_possible() {
        let error = parse("info,egress=loud").unwrap_err().to_string();
        assert!(
            error.contains("egress=loud") && error.contains("info, debug, trace"),
            "{error}"
        );
    }
}

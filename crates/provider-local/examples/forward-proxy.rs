//! Nothing but the forward proxy: what the tests run in place of the operator's own binary.
//!
//! `FORWARD_PROXY_FAIL` as the first argument makes it end at once, `FORWARD_PROXY_MUTE` makes it
//! run without ever listening.

use std::process::ExitCode;

fn main() -> ExitCode {
    let mut args: Vec<String> = std::env::args().skip(1).collect();
    match args.first().map(String::as_str) {
        Some("FORWARD_PROXY_FAIL") => {
            eprintln!("failing on purpose");
            return ExitCode::from(3);
        }
        Some("FORWARD_PROXY_MUTE") => loop {
            std::thread::park();
        },
        Some("forward-proxy") => {
            args.remove(0);
        }
        _ => {}
    }
    let served = egress_forward_proxy::Config::from_args(args)
        .map_err(egress_forward_proxy::ServeError::from)
        .and_then(egress_forward_proxy::run_blocking);
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

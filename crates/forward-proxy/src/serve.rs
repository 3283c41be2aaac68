//! Accepting connections and answering requests.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::{Method, Request, Response, StatusCode};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::{Config, ConfigError, Timeouts};
use crate::dial::{Dialer, Resolve, SystemResolver};
use crate::forward::{Body, answer, forward, host_and_port};
use crate::net::Net;
use crate::tunnel::{Watched, tunnel};

/// Bytes of a request's or response's head.
pub(crate) const MAX_HEAD: usize = 32 * 1024;
/// Lines of a head.
pub(crate) const MAX_HEADERS: usize = 128;
/// Clients that are not allowed are told so, but only this many at one time.
const MAX_REFUSALS: usize = 16;
/// After accept() failed for want of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
const BACKLOG: u32 = 1024;
/// Descriptors beside those of connections.
const SPARE_DESCRIPTORS: u64 = 64;

/// Why a proxy did not start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("cannot listen on {address}: {source}")]
    Listen {
        address: SocketAddr,
        source: io::Error,
    },
    #[error("cannot start the runtime: {0}")]
    Runtime(io::Error),
}

/// What all connections of one proxy share.
pub(crate) struct Shared {
    pub(crate) dialer: Dialer,
    pub(crate) timeouts: Timeouts,
    pub(crate) tasks: TaskTracker,
    /// Ends what is still going on after the drain.
    pub(crate) abort: CancellationToken,
    /// No new requests.
    stop: CancellationToken,
    allow_clients: Vec<Net>,
    refusals: Arc<Semaphore>,
}

/// Opens the listeners of `config`.
///
/// # Errors
/// The first address that cannot be listened on.
pub fn bind(config: &Config) -> Result<Vec<TcpListener>, ServeError> {
    config.validate()?;
    let open = |address: SocketAddr| -> io::Result<TcpListener> {
        let socket = if address.is_ipv4() {
            TcpSocket::new_v4()?
        } else {
            let socket = TcpSocket::new_v6()?;
            // `[::]` beside `0.0.0.0` on one port, and no IPv4 client disguised as IPv6.
            SockRef::from(&socket).set_only_v6(true)?;
            socket
        };
        // A restart must not wait for connections of the last run to leave TIME-WAIT.
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        socket.listen(BACKLOG)
    };
    config
        .listen
        .iter()
        .map(|&address| open(address).map_err(|source| ServeError::Listen { address, source }))
        .collect()
}

/// Serves until `cancel`, then lets what is going on finish within `timeouts.drain`.
pub async fn run(config: Config, listeners: Vec<TcpListener>, cancel: CancellationToken) {
    run_with(config, listeners, Arc::new(SystemResolver), cancel).await;
}

/// [`run`] with a resolver of the caller's choice.
pub async fn run_with(
    config: Config,
    listeners: Vec<TcpListener>,
    resolver: Arc<dyn Resolve>,
    cancel: CancellationToken,
) {
    let limit = fitting_connections(config.max_connections);
    let shared = Arc::new(Shared {
        dialer: Dialer::new(&config, resolver),
        timeouts: config.timeouts.clone(),
        tasks: TaskTracker::new(),
        abort: CancellationToken::new(),
        stop: cancel.clone(),
        allow_clients: config.allow_clients,
        refusals: Arc::new(Semaphore::new(MAX_REFUSALS)),
    });
    if let Some(net) = shared.allow_clients.iter().find(|net| net.is_everything()) {
        tracing::warn!(
            allow_client = %net,
            "an open proxy: everybody who reaches it may use it; name the networks of your clients"
        );
    }
    let slots = Arc::new(Semaphore::new(limit));
    for listener in listeners {
        let accepting = accept(Arc::clone(&shared), listener, Arc::clone(&slots));
        shared.tasks.spawn(accepting);
    }
    cancel.cancelled().await;
    shared.tasks.close();
    if tokio::time::timeout(shared.timeouts.drain, shared.tasks.wait())
        .await
        .is_err()
    {
        shared.abort.cancel();
        shared.tasks.wait().await;
    }
}

/// A whole proxy on this thread: binds, serves until SIGTERM or SIGINT, drains. For a process that
/// does nothing else.
///
/// # Errors
/// When the configuration cannot work or an address cannot be listened on.
pub fn run_blocking(config: Config) -> Result<(), ServeError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        // For getaddrinfo only; the default of 512 stacks is no small memory.
        .max_blocking_threads(8)
        .build()
        .map_err(ServeError::Runtime)?;
    runtime.block_on(async {
        use tokio::signal::unix::{SignalKind, signal};
        let mut terminate = signal(SignalKind::terminate()).map_err(ServeError::Runtime)?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(ServeError::Runtime)?;
        let listeners = bind(&config)?;
        let cancel = CancellationToken::new();
        let serving = run(config, listeners, cancel.clone());
        tokio::pin!(serving);
        tokio::select! {
            () = &mut serving => return Ok(()),
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        cancel.cancel();
        serving.await;
        Ok(())
    })
}

/// Raises the soft limit of descriptors as far as the hard one lets it, and gives the number of
/// connections that fit (two descriptors each).
fn fitting_connections(wanted: usize) -> usize {
    let needed = 2 * wanted as u64 + SPARE_DESCRIPTORS;
    let limits = getrlimit(Resource::Nofile);
    let soft = limits.current.unwrap_or(u64::MAX);
    if soft >= needed {
        return wanted;
    }
    let raised = limits.maximum.map_or(needed, |hard| hard.min(needed));
    let new = Rlimit {
        current: Some(raised),
        maximum: limits.maximum,
    };
    let have = match setrlimit(Resource::Nofile, new) {
        Ok(()) => raised,
        Err(_) => soft,
    };
    let fitting = usize::try_from(have.saturating_sub(SPARE_DESCRIPTORS) / 2)
        .unwrap_or(usize::MAX)
        .clamp(1, wanted);
    if fitting < wanted {
        tracing::warn!(
            wanted,
            fitting,
            "the limit of open files (RLIMIT_NOFILE) allows fewer connections"
        );
    }
    fitting
}

/// Small writes go out at once, and a peer that vanished is noticed.
pub(crate) fn tune(stream: &TcpStream) {
    // Failing to tune a socket that has just died is not worth an error: the next use tells.
    let _ = stream.set_nodelay(true);
    let keepalive = TcpKeepalive::new()
        .with_time(Duration::from_secs(60))
        .with_interval(Duration::from_secs(15))
        .with_retries(4);
    let _ = SockRef::from(stream).set_tcp_keepalive(&keepalive);
}

async fn accept(shared: Arc<Shared>, listener: TcpListener, slots: Arc<Semaphore>) {
    loop {
        let accepted = tokio::select! {
            () = shared.stop.cancelled() => return,
            slot = Arc::clone(&slots).acquire_owned() => {
                let Ok(slot) = slot else { return };
                tokio::select! {
                    () = shared.stop.cancelled() => return,
                    accepted = listener.accept() => accepted.map(|(stream, peer)| (slot, stream, peer)),
                }
            }
        };
        match accepted {
            Ok((slot, stream, peer)) => {
                tune(&stream);
                if shared
                    .allow_clients
                    .iter()
                    .any(|net| net.contains(peer.ip()))
                {
                    let shared_too = Arc::clone(&shared);
                    shared.tasks.spawn(async move {
                        serve(shared_too, stream).await;
                        drop(slot);
                    });
                } else {
                    drop(slot);
                    tracing::debug!(client = %peer.ip(), "refused: not an allowed client");
                    if let Ok(permit) = Arc::clone(&shared.refusals).try_acquire_owned() {
                        let shared_too = Arc::clone(&shared);
                        shared.tasks.spawn(async move {
                            refuse(shared_too, stream, peer).await;
                            drop(permit);
                        });
                    }
                }
            }
            Err(error) => {
                tracing::warn!(%error, "accept failed");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

fn http1(timeouts: &Timeouts) -> hyper::server::conn::http1::Builder {
    let mut builder = hyper::server::conn::http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(timeouts.header)
        .max_buf_size(MAX_HEAD)
        .max_headers(MAX_HEADERS)
        .half_close(true)
        .preserve_header_case(true)
        .auto_date_header(false);
    builder
}

/// Tells a client that is not allowed so, whatever it asks.
async fn refuse(shared: Arc<Shared>, stream: TcpStream, peer: SocketAddr) {
    let text = format!("{} is not an allowed client of this proxy", peer.ip());
    let service = service_fn(move |_: Request<Incoming>| {
        let response = answer(StatusCode::FORBIDDEN, &text);
        async move { Ok::<_, Infallible>(response) }
    });
    let mut builder = http1(&shared.timeouts);
    let connection = builder
        .keep_alive(false)
        .header_read_timeout(shared.timeouts.header.min(Duration::from_secs(5)))
        .serve_connection(TokioIo::new(stream), service);
    tokio::select! {
        _ = connection => {}
        () = shared.stop.cancelled() => {}
    }
}

/// What a CONNECT leaves behind for the connection's task.
type Pending = Arc<Mutex<Option<(OnUpgrade, Watched<TcpStream>)>>>;

async fn serve(shared: Arc<Shared>, stream: TcpStream) {
    let pending: Pending = Arc::default();
    let service = service_fn(|request: Request<Incoming>| {
        let shared = Arc::clone(&shared);
        let pending = Arc::clone(&pending);
        async move { Ok::<_, Infallible>(handle(&shared, &pending, request).await) }
    });
    {
        let connection = http1(&shared.timeouts)
            .serve_connection(TokioIo::new(stream), service)
            .with_upgrades();
        let mut connection = pin!(connection);
        let mut stopping = false;
        loop {
            tokio::select! {
                ended = connection.as_mut() => {
                    if let Err(error) = ended {
                        tracing::debug!(%error, "client connection ended");
                    }
                    break;
                }
                () = shared.stop.cancelled(), if !stopping => {
                    stopping = true;
                    connection.as_mut().graceful_shutdown();
                }
                () = shared.abort.cancelled() => return,
            }
        }
    }
    let taken = pending
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .take();
    let Some((upgrade, target)) = taken else {
        return;
    };
    // Still the same task, so that a tunnel is owned, counted and ended like any connection.
    tokio::select! {
        () = shared.abort.cancelled() => {}
        () = async {
            match upgrade.await {
                Ok(client) => tunnel(TokioIo::new(client), target, shared.timeouts.idle).await,
                Err(error) => tracing::debug!(%error, "tunnel not opened"),
            }
        } => {}
    }
}

async fn handle(
    shared: &Arc<Shared>,
    pending: &Pending,
    mut request: Request<Incoming>,
) -> Response<Body> {
    match *request.method() {
        Method::CONNECT => {}
        // It would show the client what the proxy sends, and nobody needs it.
        Method::TRACE => {
            let mut response = answer(StatusCode::METHOD_NOT_ALLOWED, "TRACE is not forwarded");
            response.headers_mut().insert(
                http::header::ALLOW,
                http::HeaderValue::from_static(
                    "CONNECT, GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS",
                ),
            );
            return response;
        }
        _ => return forward(shared, request).await,
    }
    let target = request
        .uri()
        .authority()
        .and_then(|authority| host_and_port(authority, None));
    let Some((host, port)) = target else {
        return answer(
            StatusCode::BAD_REQUEST,
            "CONNECT needs a host and a port, such as example.com:443 or [2001:db8::1]:443",
        );
    };
    match shared.dialer.dial(&host, port).await {
        Ok(stream) => {
            let upgrade = hyper::upgrade::on(&mut request);
            *pending.lock().unwrap_or_else(PoisonError::into_inner) =
                Some((upgrade, Watched::new(stream)));
            let empty = http_body_util::Empty::new().map_err(|never: Infallible| match never {});
            Response::new(empty.boxed())
        }
        Err(error) => answer(error.status(), &error.to_string()),
    }
}

//! One probe, as a crawler's request would go: a connection of its own to the proxy, CONNECT, TLS
//! to the target inside, one GET. The client sends what the request needs and nothing else.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use egress_core::record::host_port;
use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use rustls::ClientConfig;
use rustls_pki_types::ServerName;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncRead, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_rustls::TlsConnector;
use url::{Host, Url};

use crate::contract::ProbeClass;

/// Bytes of one response head; more is no answer of a proxy worth using.
const MAX_HEAD: usize = 32 * 1024;
/// RFC 8305, section 5.
const ATTEMPT_DELAY: Duration = Duration::from_millis(250);
const MAX_ADDRESSES: usize = 8;

/// What one probe is to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbeRequest {
    /// The proxy: a name or an address without brackets.
    pub host: String,
    pub port: u16,
    pub url: Url,
    pub expected_status: u16,
    /// For reaching the proxy.
    pub dial_timeout: Duration,
    /// For all of it.
    pub timeout: Duration,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    pub class: ProbeClass,
    /// What happened, without the class: one short line.
    pub detail: String,
    /// From dialling to the status line; of a success only.
    pub latency: Option<Duration>,
}

impl Outcome {
    pub fn success(status: u16, latency: Duration) -> Self {
        Self {
            class: ProbeClass::Success,
            detail: status.to_string(),
            latency: Some(latency),
        }
    }

    pub fn failure(class: ProbeClass, detail: impl Into<String>) -> Self {
        let mut detail: String = detail.into();
        if let Some((end, _)) = detail.char_indices().nth(160) {
            detail.truncate(end);
        }
        Self {
            class,
            detail: detail.replace(['\r', '\n'], " "),
            latency: None,
        }
    }
}

/// Probes one proxy; the engine's tests script it.
pub trait Probe: Send + Sync + 'static {
    fn probe(&self, request: ProbeRequest) -> BoxFuture<'static, Outcome>;
}

/// The real one.
#[derive(Clone)]
pub struct HttpProbe {
    tls: TlsConnector,
}

impl HttpProbe {
    pub fn new(tls: ClientConfig) -> Self {
        Self {
            tls: TlsConnector::from(Arc::new(tls)),
        }
    }
}

impl Probe for HttpProbe {
    fn probe(&self, request: ProbeRequest) -> BoxFuture<'static, Outcome> {
        let tls = self.tls.clone();
        Box::pin(async move {
            let start = Instant::now();
            let step = AtomicU8::new(Step::Dial as u8);
            match timeout(request.timeout, run(&tls, &request, &step)).await {
                Ok(Ok(status)) if status == request.expected_status => {
                    Outcome::success(status, start.elapsed())
                }
                Ok(Ok(status)) => Outcome::failure(
                    ProbeClass::UnexpectedStatus,
                    format!("{status}, expected {}", request.expected_status),
                ),
                Ok(Err(failure)) => Outcome::failure(failure.0, failure.1),
                Err(_) => Outcome::failure(
                    ProbeClass::Timeout,
                    format!(
                        "{} took longer than {:?}",
                        Step::name(step.load(Ordering::Relaxed)),
                        request.timeout
                    ),
                ),
            }
        })
    }
}

/// How far a probe has come, for the message of one that ran out of time.
#[derive(Clone, Copy)]
enum Step {
    Dial,
    Connect,
    Tls,
    Response,
}

impl Step {
    fn enter(self, at: &AtomicU8) {
        at.store(self as u8, Ordering::Relaxed);
    }

    fn name(step: u8) -> &'static str {
        match step {
            s if s == Self::Dial as u8 => "connecting to the proxy",
            s if s == Self::Connect as u8 => "the proxy's answer to CONNECT",
            s if s == Self::Tls as u8 => "TLS to the target",
            _ => "the response",
        }
    }
}

struct Failure(ProbeClass, String);

fn io_failure(what: &str) -> impl Fn(io::Error) -> Failure + '_ {
    move |error| Failure(ProbeClass::Io, format!("{what}: {}", plain(&error)))
}

/// An I/O error without the number: it says nothing that the text does not.
fn plain(error: &io::Error) -> String {
    let text = error.to_string();
    match text.find(" (os error ") {
        Some(end) => text[..end].to_owned(),
        None => text,
    }
}

/// The status the target answered with.
async fn run(tls: &TlsConnector, request: &ProbeRequest, step: &AtomicU8) -> Result<u16, Failure> {
    let url = &request.url;
    let (Some(host), Some(port)) = (url.host(), url.port_or_known_default()) else {
        return Err(Failure(ProbeClass::Io, format!("{url} names no host")));
    };
    let stream = dial(request).await?;
    // `url` writes an IPv6 host with its brackets.
    let authority = match url.port() {
        Some(port) => format!("{host}:{port}"),
        None => host.to_string(),
    };
    let path = match url.query() {
        Some(query) => format!("{}?{query}", url.path()),
        None => url.path().to_owned(),
    };
    match url.scheme() {
        "https" => {
            Step::Connect.enter(step);
            let tunnel = connect(stream, &format!("{host}:{port}")).await?;
            Step::Tls.enter(step);
            let name = server_name(&host)?;
            let stream = tls.connect(name, tunnel).await.map_err(|error| {
                Failure(
                    ProbeClass::Tls,
                    format!("TLS to the target: {}", plain(&error)),
                )
            })?;
            Step::Response.enter(step);
            get(stream, &path, &authority).await
        }
        _ => {
            Step::Response.enter(step);
            let status = get(stream, &format!("http://{authority}{path}"), &authority).await?;
            if status == 407 {
                return Err(Failure(
                    ProbeClass::AuthRequired,
                    "the proxy asks for credentials (407)".to_owned(),
                ));
            }
            Ok(status)
        }
    }
}

fn server_name(host: &Host<&str>) -> Result<ServerName<'static>, Failure> {
    match host {
        Host::Domain(name) => ServerName::try_from((*name).to_owned()).map_err(|_| {
            Failure(
                ProbeClass::Tls,
                format!("{name} is no name that a certificate can have"),
            )
        }),
        Host::Ipv4(address) => Ok(ServerName::from(IpAddr::V4(*address))),
        Host::Ipv6(address) => Ok(ServerName::from(IpAddr::V6(*address))),
    }
}

/// Connects to the proxy; a dead address family costs a moment and not the probe (RFC 8305).
async fn dial(request: &ProbeRequest) -> Result<TcpStream, Failure> {
    let deadline = Instant::now() + request.dial_timeout;
    let slow = || {
        Failure(
            ProbeClass::Timeout,
            format!(
                "connecting to the proxy took longer than {:?}",
                request.dial_timeout
            ),
        )
    };
    let addresses: Vec<SocketAddr> = match request.host.parse::<IpAddr>() {
        Ok(address) => vec![SocketAddr::new(address, request.port)],
        Err(_) => {
            let looking = tokio::net::lookup_host((request.host.as_str(), request.port));
            match timeout_at(deadline, looking).await {
                Ok(Ok(found)) => in_turns(found.collect()),
                Ok(Err(error)) => {
                    return Err(Failure(
                        ProbeClass::Dial,
                        format!("{} does not resolve: {}", request.host, plain(&error)),
                    ));
                }
                Err(_) => return Err(slow()),
            }
        }
    };
    match timeout_at(deadline, connect_first(addresses)).await {
        Ok(Ok(stream)) => {
            // A request of one packet must not wait for more; failing to say so harms nothing.
            let _ = stream.set_nodelay(true);
            Ok(stream)
        }
        Ok(Err(error)) => Err(Failure(
            ProbeClass::Dial,
            format!(
                "{}: {}",
                host_port(&request.host, request.port),
                plain(&error)
            ),
        )),
        Err(_) => Err(slow()),
    }
}

/// The families in turns, beginning with the resolver's choice.
fn in_turns(found: Vec<SocketAddr>) -> Vec<SocketAddr> {
    let preferred_v4 = found.first().is_some_and(SocketAddr::is_ipv4);
    let (a, b): (Vec<_>, Vec<_>) = found
        .into_iter()
        .partition(|address| address.is_ipv4() == preferred_v4);
    let longest = a.len().max(b.len());
    (0..longest)
        .flat_map(|i| [a.get(i).copied(), b.get(i).copied()])
        .flatten()
        .take(MAX_ADDRESSES)
        .collect()
}

async fn connect_first(addresses: Vec<SocketAddr>) -> io::Result<TcpStream> {
    let mut waiting = addresses.into_iter().peekable();
    let mut attempts = FuturesUnordered::new();
    let mut failure = None;
    loop {
        if let Some(address) = waiting.next() {
            attempts.push(TcpStream::connect(address));
        }
        let ended = if waiting.peek().is_some() {
            match timeout(ATTEMPT_DELAY, attempts.next()).await {
                Ok(ended) => ended,
                Err(_) => continue,
            }
        } else {
            attempts.next().await
        };
        match ended {
            Some(Ok(stream)) => return Ok(stream),
            Some(Err(error)) => {
                failure.get_or_insert(error);
            }
            None => {
                let none = || io::Error::new(io::ErrorKind::NotFound, "the name has no address");
                return Err(failure.unwrap_or_else(none));
            }
        }
    }
}

/// Opens a tunnel. What the proxy sent after its answer stays in the reader: it is the tunnel's.
async fn connect(stream: TcpStream, authority: &str) -> Result<BufReader<TcpStream>, Failure> {
    let mut stream = BufReader::new(stream);
    let head = format!("CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n");
    stream
        .write_all(head.as_bytes())
        .await
        .map_err(io_failure("sending CONNECT to the proxy"))?;
    let what = "the proxy's answer to CONNECT";
    let mut left = MAX_HEAD;
    let status = loop {
        let status = status_line(&mut stream, &mut left, what).await?;
        // The status is all that is wanted of a refusal; the rest may be a page of any size.
        if status >= 300 {
            break status;
        }
        while !line(&mut stream, &mut left, what).await?.is_empty() {}
        if status >= 200 {
            break status;
        }
    };
    match status {
        200..=299 => Ok(stream),
        407 => Err(Failure(
            ProbeClass::AuthRequired,
            "the proxy asks for credentials (407)".to_owned(),
        )),
        status => Err(Failure(
            ProbeClass::ConnectRefused,
            format!("the proxy answered CONNECT with {status}"),
        )),
    }
}

/// Sends one GET and reads the status line that counts (1xx are not final).
async fn get<S>(stream: S, uri: &str, authority: &str) -> Result<u16, Failure>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut stream = BufReader::new(stream);
    let head = format!(
        "GET {uri} HTTP/1.1\r\nHost: {authority}\r\nAccept: */*\r\nConnection: close\r\n\r\n"
    );
    let send = async {
        stream.write_all(head.as_bytes()).await?;
        stream.flush().await
    };
    send.await.map_err(io_failure("sending the request"))?;
    let what = "the response";
    let mut left = MAX_HEAD;
    loop {
        let status = status_line(&mut stream, &mut left, what).await?;
        if status >= 200 {
            return Ok(status);
        }
        while !line(&mut stream, &mut left, what).await?.is_empty() {}
    }
}

/// RFC 9112, section 4: `HTTP/1.x`, a space, three digits.
async fn status_line<S>(stream: &mut S, left: &mut usize, what: &str) -> Result<u16, Failure>
where
    S: AsyncBufRead + Unpin,
{
    let first = line(stream, left, what).await?;
    let status = first
        .strip_prefix(b"HTTP/1.".as_slice())
        .and_then(|rest| match rest {
            [b'0' | b'1', b' ', digits @ ..] => Some(digits),
            _ => None,
        })
        .filter(|rest| rest.get(3).is_none_or(|&b| b == b' '))
        .and_then(|rest| std::str::from_utf8(rest.get(..3)?).ok())
        .filter(|digits| digits.bytes().all(|b| b.is_ascii_digit()))
        .and_then(|digits| digits.parse().ok())
        .filter(|status| *status >= 100);
    status.ok_or_else(|| Failure(ProbeClass::Io, format!("{what} is not HTTP/1.1")))
}

/// One line without its end. A bare LF ends a line too (RFC 9112, section 2.2).
async fn line<S>(stream: &mut S, left: &mut usize, what: &str) -> Result<Vec<u8>, Failure>
where
    S: AsyncBufRead + Unpin,
{
    let mut line = Vec::new();
    loop {
        let available = stream.fill_buf().await.map_err(io_failure(what))?;
        if available.is_empty() {
            return Err(Failure(
                ProbeClass::Io,
                format!("{what}: the connection was closed before it was complete"),
            ));
        }
        let (used, done) = match available.iter().position(|&b| b == b'\n') {
            Some(end) => (end + 1, true),
            None => (available.len(), false),
        };
        if used > *left {
            return Err(Failure(
                ProbeClass::Io,
                format!("{what} has a head of more than {MAX_HEAD} bytes"),
            ));
        }
        *left -= used;
        line.extend_from_slice(&available[..used]);
        stream.consume(used);
        if done {
            line.pop();
            if line.last() == Some(&b'\r') {
                line.pop();
            }
            return Ok(line);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn status_of(text: &str) -> Result<u16, String> {
        let mut left = MAX_HEAD;
        status_line(&mut text.as_bytes(), &mut left, "the response")
            .await
            .map_err(|failure| failure.1)
    }

    #[tokio::test]
    async fn status_lines_are_read_strictly() {
        for (text, status) in [
            ("HTTP/1.1 204 No Content\r\n", 204),
            ("HTTP/1.0 200\n", 200),
            ("HTTP/1.1 503 \r\n", 503),
        ] {
            assert_eq!(status_of(text).await, Ok(status), "{text:?}");
        }
        for text in [
            "HTTP/2 200\r\n",
            "HTTP/1.1 20\r\n",
            "HTTP/1.1 2000\r\n",
            "HTTP/1.1 099 x\r\n",
            "HTTP/1.1  200\r\n",
            "ICY 200 OK\r\n",
            "<html>\r\n",
            "HTTP/1.1 200 OK",
            "",
        ] {
            assert!(status_of(text).await.is_err(), "{text:?} was accepted");
        }
    }

    #[tokio::test]
    async fn a_line_without_an_end_is_given_up() {
        let text = "a".repeat(MAX_HEAD + 1);
        let mut left = MAX_HEAD;
        let failed = line(&mut text.as_bytes(), &mut left, "the response").await;
        assert!(failed.is_err_and(|f| f.1.contains("more than")));
    }

    #[test]
    fn details_are_one_short_line() {
        let outcome = Outcome::failure(ProbeClass::Tls, format!("a\r\nb{}", "ü".repeat(500)));
        assert!(outcome.detail.starts_with("a  b"));
        assert_eq!(outcome.detail.chars().count(), 160);
    }
}

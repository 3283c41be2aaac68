//! An HTTP server for images that can misbehave in every way mirrors do.
//!
//! It speaks HTTP/1.1 by hand: a library would not send an answer that is cut off or lies about
//! its length.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncSeekExt as _, AsyncWriteExt as _};
use tokio::io::{BufReader, SeekFrom};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::process::{Seen, until};

/// How the server treats a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// Answers with this status and no image.
    Status(u16),
    /// Sends this many bytes of the body, then closes; the announced length stays whole.
    CutAt(u64),
    /// As [`Fault::CutAt`], once; later requests (a Range among them) are served well.
    CutOnceAt(u64),
    /// Announces and sends only this many bytes: a truncated file on the mirror.
    ShortFile(u64),
    /// Changes one byte.
    Corrupt,
    /// Says nothing about the length and ends by closing.
    NoLength,
    /// Ignores `Range` and sends all with 200.
    IgnoreRange,
    /// Redirects to this place.
    Redirect(String),
    /// Pauses for that long after each 64 KiB.
    Slow(Duration),
    /// Sends this many bytes and then nothing, the connection open, until [`Mirror::release`].
    HoldAt(u64),
}

/// One request that came in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// `GET` and the like.
    pub method: String,
    /// The path, with its query.
    pub path: String,
    /// First byte that was asked for, with a Range.
    pub from: Option<u64>,
    /// Bytes of the body that were sent.
    pub sent: u64,
}

#[derive(Debug)]
enum Content {
    File(PathBuf),
    Bytes(Vec<u8>),
}

#[derive(Debug)]
struct Shared {
    content: Mutex<BTreeMap<String, Content>>,
    faults: Mutex<BTreeMap<String, Fault>>,
    requests: Mutex<Vec<Request>>,
    released: watch::Sender<bool>,
}

/// A running server; it ends when dropped.
#[derive(Debug)]
pub struct Mirror {
    address: SocketAddr,
    shared: Arc<Shared>,
    _serving: JoinSet<()>,
}

impl Mirror {
    /// Listens on a free loopback port.
    ///
    /// # Errors
    /// When it cannot listen.
    pub async fn start() -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            content: Mutex::default(),
            faults: Mutex::default(),
            requests: Mutex::default(),
            released: watch::Sender::new(false),
        });
        let mut serving = JoinSet::new();
        serving.spawn(accept(listener, Arc::clone(&shared)));
        Ok(Self {
            address,
            shared,
            _serving: serving,
        })
    }

    /// Serves a file under `/NAME` and gives its URL.
    pub fn add_file(&self, name: &str, path: &Path) -> String {
        self.add(name, Content::File(path.to_owned()))
    }

    /// Serves bytes under `/NAME` and gives their URL.
    pub fn add_bytes(&self, name: &str, bytes: impl Into<Vec<u8>>) -> String {
        self.add(name, Content::Bytes(bytes.into()))
    }

    fn add(&self, name: &str, content: Content) -> String {
        held(&self.shared.content).insert(format!("/{name}"), content);
        self.url(name)
    }

    /// The URL of `/NAME`, whether there is something or not.
    pub fn url(&self, name: &str) -> String {
        format!("http://{}/{name}", self.address)
    }

    /// From now on `/NAME` is served so; `None` for well.
    pub fn set_fault(&self, name: &str, fault: Option<Fault>) {
        let mut faults = held(&self.shared.faults);
        match fault {
            Some(fault) => faults.insert(format!("/{name}"), fault),
            None => faults.remove(&format!("/{name}")),
        };
    }

    /// Lets answers that are held go on.
    pub fn release(&self) {
        self.shared.released.send_replace(true);
    }

    /// All requests so far.
    pub fn requests(&self) -> Vec<Request> {
        held(&self.shared.requests).clone()
    }

    /// Waits until that many bytes of `/NAME` were sent in one answer.
    ///
    /// # Errors
    /// When they were not within `limit`.
    pub async fn sent(&self, name: &str, bytes: u64, limit: Duration) -> anyhow::Result<()> {
        let path = format!("/{name}");
        until(
            &format!("{bytes} bytes of {path} are sent"),
            limit,
            async || {
                let most = self
                    .requests()
                    .iter()
                    .filter(|r| r.path == path)
                    .map(|r| r.sent)
                    .max();
                Ok(match most {
                    Some(most) if most >= bytes => Seen::There(()),
                    most => Seen::not_yet(most.unwrap_or(0)),
                })
            },
        )
        .await
    }

    /// How many GET requests came for `/NAME`.
    pub fn gets(&self, name: &str) -> usize {
        let path = format!("/{name}");
        self.requests()
            .iter()
            .filter(|r| r.method == "GET" && r.path == path)
            .count()
    }
}

fn held<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let shared = Arc::clone(&shared);
        connections.spawn(async move {
            // A client that went away is nothing to the server.
            let _ = serve(stream, &shared).await;
        });
        while connections.try_join_next().is_some() {}
    }
}

/// One request a connection, which every client must bear.
async fn serve(stream: TcpStream, shared: &Shared) -> anyhow::Result<()> {
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    stream.read_line(&mut line).await?;
    let mut words = line.split_whitespace();
    let (method, path) = (
        words.next().context("no method")?.to_owned(),
        words.next().context("no path")?.to_owned(),
    );
    let mut from = None;
    loop {
        let mut header = String::new();
        stream.read_line(&mut header).await?;
        if header.trim().is_empty() {
            break;
        }
        let header = header.to_ascii_lowercase();
        if let Some(range) = header.strip_prefix("range: bytes=") {
            from = range
                .split('-')
                .next()
                .and_then(|first| first.trim().parse::<u64>().ok());
        }
    }
    let number = {
        let mut requests = held(&shared.requests);
        let path = path.clone();
        requests.push(Request {
            method: method.clone(),
            path,
            from,
            sent: 0,
        });
        requests.len() - 1
    };
    let fault = {
        let mut faults = held(&shared.faults);
        let fault = faults.get(&path).cloned();
        if matches!(fault, Some(Fault::CutOnceAt(_))) {
            faults.remove(&path);
        }
        fault
    };
    let mut stream = stream.into_inner();
    let sent = answer(&mut stream, shared, &method, &path, from, fault, number).await;
    stream.shutdown().await?;
    sent
}

async fn answer(
    stream: &mut TcpStream,
    shared: &Shared,
    method: &str,
    path: &str,
    from: Option<u64>,
    fault: Option<Fault>,
    number: usize,
) -> anyhow::Result<()> {
    let plain = |status: u16, extra: &str| {
        format!("HTTP/1.1 {status} Answer\r\nContent-Length: 0\r\nConnection: close\r\n{extra}\r\n")
    };
    match &fault {
        Some(Fault::Status(status)) => {
            return Ok(stream.write_all(plain(*status, "").as_bytes()).await?);
        }
        Some(Fault::Redirect(to)) => {
            let location = format!("Location: {to}\r\n");
            return Ok(stream.write_all(plain(302, &location).as_bytes()).await?);
        }
        _ => {}
    }
    let Some(mut body) = open(shared, path).await? else {
        return Ok(stream.write_all(plain(404, "").as_bytes()).await?);
    };
    let whole = match fault {
        Some(Fault::ShortFile(length)) => body.length.min(length),
        _ => body.length,
    };
    let from = from.filter(|_| fault != Some(Fault::IgnoreRange));
    if from.is_some_and(|from| from >= whole) {
        return Ok(stream.write_all(plain(416, "").as_bytes()).await?);
    }
    let start = from.unwrap_or(0);
    let mut head = String::from(if from.is_some() {
        "HTTP/1.1 206 Partial Content\r\n"
    } else {
        "HTTP/1.1 200 OK\r\n"
    });
    if fault != Some(Fault::NoLength) {
        let _ = write!(head, "Content-Length: {}\r\n", whole - start);
    }
    if fault != Some(Fault::IgnoreRange) {
        head.push_str("Accept-Ranges: bytes\r\nETag: \"lab\"\r\n");
    }
    if from.is_some() {
        let _ = write!(
            head,
            "Content-Range: bytes {start}-{}/{whole}\r\n",
            whole - 1
        );
    }
    head.push_str("Content-Type: application/octet-stream\r\nConnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).await?;
    if method == "HEAD" {
        return Ok(());
    }

    body.skip(start).await?;
    let end = match fault {
        Some(Fault::CutAt(at) | Fault::CutOnceAt(at) | Fault::HoldAt(at)) => whole.min(at),
        _ => whole,
    };
    let sent = send(
        stream,
        &mut body,
        start,
        end,
        fault.as_ref(),
        shared,
        number,
    )
    .await?;
    if matches!(fault, Some(Fault::HoldAt(_))) {
        shared
            .released
            .subscribe()
            .wait_for(|released| *released)
            .await?;
        send(stream, &mut body, sent, whole, None, shared, number).await?;
    }
    Ok(())
}

/// Sends from `at` to `end`; gives where it stopped.
async fn send(
    stream: &mut TcpStream,
    body: &mut Body,
    mut at: u64,
    end: u64,
    fault: Option<&Fault>,
    shared: &Shared,
    number: usize,
) -> anyhow::Result<u64> {
    let mut buffer = vec![0; 64 * 1024];
    while at < end {
        let wanted = usize::try_from(end - at)?.min(buffer.len());
        let read = body.read(&mut buffer[..wanted]).await?;
        if read == 0 {
            break;
        }
        // Past the header, so that only the digest tells.
        let victim = body.length / 2;
        if fault == Some(&Fault::Corrupt) && (at..at + read as u64).contains(&victim) {
            buffer[usize::try_from(victim - at)?] ^= 0x5a;
        }
        stream.write_all(&buffer[..read]).await?;
        at += read as u64;
        held(&shared.requests)[number].sent += read as u64;
        if let Some(Fault::Slow(pause)) = fault {
            tokio::time::sleep(*pause).await;
        }
    }
    Ok(at)
}

struct Body {
    length: u64,
    source: Source,
}

enum Source {
    File(tokio::fs::File),
    Bytes(std::io::Cursor<Vec<u8>>),
}

impl Body {
    async fn skip(&mut self, to: u64) -> anyhow::Result<()> {
        match &mut self.source {
            Source::File(file) => file.seek(SeekFrom::Start(to)).await.map(drop)?,
            Source::Bytes(bytes) => bytes.set_position(to),
        }
        Ok(())
    }

    async fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        match &mut self.source {
            Source::File(file) => file.read(into).await,
            Source::Bytes(bytes) => bytes.read(into).await,
        }
    }
}

async fn open(shared: &Shared, path: &str) -> anyhow::Result<Option<Body>> {
    let path = path.split('?').next().unwrap_or(path);
    let file = match held(&shared.content).get(path) {
        None => return Ok(None),
        Some(Content::Bytes(bytes)) => {
            return Ok(Some(Body {
                length: bytes.len() as u64,
                source: Source::Bytes(std::io::Cursor::new(bytes.clone())),
            }));
        }
        Some(Content::File(file)) => file.clone(),
    };
    let file = tokio::fs::File::open(&file)
        .await
        .with_context(|| file.display().to_string())?;
    Ok(Some(Body {
        length: file.metadata().await?.len(),
        source: Source::File(file),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client() -> reqwest::Client {
        let _ = rustls::crypto::ring::default_provider().install_default();
        reqwest::Client::builder().no_proxy().build().unwrap()
    }

    async fn body(url: &str) -> Result<Vec<u8>, reqwest::Error> {
        client()
            .get(url)
            .send()
            .await?
            .bytes()
            .await
            .map(|bytes| bytes.to_vec())
    }

    #[tokio::test]
    async fn each_fault_is_what_it_says() {
        let mirror = Mirror::start().await.unwrap();
        let content: Vec<u8> = (0..200_000_u32).map(|n| n as u8).collect();
        let url = mirror.add_bytes("i", content.clone());
        assert_eq!(body(&url).await.unwrap(), content);

        mirror.set_fault("i", Some(Fault::NoLength));
        let answer = client().get(&url).send().await.unwrap();
        assert_eq!(answer.content_length(), None);
        assert_eq!(answer.bytes().await.unwrap(), content);

        mirror.set_fault("i", Some(Fault::CutOnceAt(70_000)));
        assert!(body(&url).await.is_err(), "cut off");
        let rest = client()
            .get(&url)
            .header("Range", "bytes=70000-")
            .send()
            .await
            .unwrap();
        assert_eq!(rest.status(), 206);
        assert_eq!(rest.bytes().await.unwrap(), content[70_000..]);

        mirror.set_fault("i", Some(Fault::IgnoreRange));
        let all = client()
            .get(&url)
            .header("Range", "bytes=70000-")
            .send()
            .await
            .unwrap();
        assert_eq!(all.status(), 200);
        assert_eq!(all.bytes().await.unwrap(), content);

        mirror.set_fault("i", Some(Fault::ShortFile(10)));
        assert_eq!(body(&url).await.unwrap(), content[..10]);
        mirror.set_fault("i", Some(Fault::Corrupt));
        let corrupt = body(&url).await.unwrap();
        let changed = corrupt
            .iter()
            .zip(&content)
            .filter(|(one, other)| one != other)
            .count();
        assert_eq!((corrupt.len(), changed), (content.len(), 1));

        mirror.set_fault("i", Some(Fault::Redirect(mirror.add_bytes("j", *b"moved"))));
        assert_eq!(body(&url).await.unwrap(), b"moved");
        mirror.set_fault("i", Some(Fault::Status(503)));
        assert_eq!(client().get(&url).send().await.unwrap().status(), 503);
        assert_eq!(
            client()
                .get(mirror.url("none"))
                .send()
                .await
                .unwrap()
                .status(),
            404
        );
        assert_eq!(mirror.gets("i"), 9);
        let cut = mirror.requests()[2].clone();
        assert_eq!((cut.from, cut.sent), (None, 70_000));
    }

    #[tokio::test]
    async fn a_held_answer_goes_on_when_it_is_released() {
        let mirror = Mirror::start().await.unwrap();
        let url = mirror.add_bytes("i", vec![7; 100_000]);
        mirror.set_fault("i", Some(Fault::HoldAt(1_000)));
        let mut answer = client().get(&url).send().await.unwrap();
        assert_eq!(answer.chunk().await.unwrap().unwrap().len(), 1_000);
        mirror.release();
        assert_eq!(answer.bytes().await.unwrap().len(), 99_000);
    }
}

//! What several tests need.
#![allow(dead_code, reason = "each test file uses a part of it")]

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use data_encoding::HEXLOWER;
use sha2::{Digest, Sha256};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// How the mirror answers one path. Each way is one that real mirrors have.
#[derive(Clone, Default)]
pub struct Answer {
    pub body: Arc<Vec<u8>>,
    /// Instead of 200.
    pub status: Option<u16>,
    pub location: Option<String>,
    /// The end of the connection ends the body.
    pub no_length: bool,
    /// Ranges are answered with the whole.
    pub no_ranges: bool,
    /// The first so many answers break off after that many bytes.
    pub break_off: Option<(usize, usize)>,
    pub etag: Option<String>,
}

impl Answer {
    pub fn of(body: impl Into<Vec<u8>>) -> Self {
        Self {
            body: Arc::new(body.into()),
            ..Self::default()
        }
    }
}

/// Paths that were asked for, with the start of the range.
type Requests = Vec<(String, Option<u64>)>;

/// A small HTTP server on loopback.
#[derive(Clone)]
pub struct Mirror {
    pub address: SocketAddr,
    answers: Arc<Mutex<BTreeMap<String, Answer>>>,
    requests: Arc<Mutex<Requests>>,
}

impl Mirror {
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mirror = Self {
            address: listener.local_addr().unwrap(),
            answers: Arc::default(),
            requests: Arc::default(),
        };
        let serving = mirror.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let serving = serving.clone();
                tokio::spawn(async move {
                    let _ = serving.serve(stream).await;
                });
            }
        });
        mirror
    }

    pub fn set(&self, path: &str, answer: Answer) {
        self.answers.lock().unwrap().insert(path.to_owned(), answer);
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Paths that were asked for, with the start of the range.
    pub fn requests(&self) -> Requests {
        self.requests.lock().unwrap().clone()
    }

    pub fn count(&self, path: &str) -> usize {
        self.requests().iter().filter(|(p, _)| p == path).count()
    }

    async fn serve(&self, mut stream: TcpStream) -> std::io::Result<()> {
        loop {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                if stream.read(&mut byte).await? == 0 {
                    return Ok(());
                }
                head.push(byte[0]);
            }
            let head = String::from_utf8_lossy(&head).into_owned();
            let path = head.split(' ').nth(1).unwrap_or_default().to_owned();
            let range = head
                .to_ascii_lowercase()
                .lines()
                .find_map(|l| l.strip_prefix("range: bytes=").map(str::to_owned))
                .and_then(|r| r.trim_end_matches('-').parse::<u64>().ok());
            self.requests.lock().unwrap().push((path.clone(), range));
            let (answer, broken) = {
                let mut answers = self.answers.lock().unwrap();
                match answers.get_mut(&path) {
                    None => (
                        Answer {
                            status: Some(404),
                            ..Answer::default()
                        },
                        None,
                    ),
                    Some(answer) => {
                        let broken = match &mut answer.break_off {
                            Some((0, _)) | None => None,
                            Some((left, after)) => {
                                *left -= 1;
                                Some(*after)
                            }
                        };
                        (answer.clone(), broken)
                    }
                }
            };
            let total = answer.body.len();
            let start = match range {
                Some(start) if !answer.no_ranges => usize::try_from(start).unwrap(),
                _ => 0,
            };
            let mut out = String::new();
            let ranged = range.is_some() && !answer.no_ranges;
            if ranged && start >= total {
                out.push_str(&format!(
                    "HTTP/1.1 416 Range Not Satisfiable\r\ncontent-range: bytes */{total}\r\ncontent-length: 0\r\n\r\n"
                ));
                stream.write_all(out.as_bytes()).await?;
                continue;
            }
            let status = answer.status.unwrap_or(if ranged { 206 } else { 200 });
            out.push_str(&format!("HTTP/1.1 {status} X\r\n"));
            if let Some(location) = &answer.location {
                out.push_str(&format!("location: {location}\r\n"));
            }
            if let Some(etag) = &answer.etag {
                out.push_str(&format!("etag: {etag}\r\n"));
            }
            if ranged {
                out.push_str(&format!(
                    "content-range: bytes {start}-{}/{total}\r\n",
                    total - 1
                ));
            }
            let body = &answer.body[start..];
            if answer.no_length {
                out.push_str("connection: close\r\n");
            } else {
                out.push_str(&format!("content-length: {}\r\n", body.len()));
            }
            out.push_str("\r\n");
            stream.write_all(out.as_bytes()).await?;
            match broken {
                Some(after) => {
                    stream.write_all(&body[..after.min(body.len())]).await?;
                    return Ok(());
                }
                None => stream.write_all(body).await?,
            }
            if answer.no_length {
                return Ok(());
            }
        }
    }
}

pub fn sha256(bytes: &[u8]) -> String {
    HEXLOWER.encode(&Sha256::digest(bytes))
}

/// A qcow2 image of a given virtual size, made by QEMU's own tool, with something in it.
pub fn qcow2(dir: &std::path::Path, virtual_size: &str, content: usize) -> Vec<u8> {
    let raw = dir.join("raw");
    let mut bytes = vec![0_u8; content];
    let mut state = 1_u64;
    for chunk in bytes.chunks_mut(8) {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let value = state.to_be_bytes();
        chunk.copy_from_slice(&value[..chunk.len()]);
    }
    std::fs::write(&raw, &bytes).unwrap();
    let path = dir.join("image.qcow2");
    let run = |args: &[&std::ffi::OsStr]| {
        let out = std::process::Command::new("qemu-img")
            .args(args)
            .output()
            .expect("qemu-img: install qemu-utils");
        assert!(
            out.status.success(),
            "{}",
            String::from_utf8_lossy(&out.stderr)
        );
    };
    run(&[
        "convert".as_ref(),
        "-f".as_ref(),
        "raw".as_ref(),
        "-O".as_ref(),
        "qcow2".as_ref(),
        raw.as_ref(),
        path.as_ref(),
    ]);
    run(&[
        "resize".as_ref(),
        "-q".as_ref(),
        "-f".as_ref(),
        "qcow2".as_ref(),
        path.as_ref(),
        virtual_size.as_ref(),
    ]);
    std::fs::read(path).unwrap()
}

//! Telling HTTP/2 from HTTP/1 on a connection without ALPN.
//!
//! HTTP/2 with prior knowledge starts with a fixed preface (RFC 9113, section 3.4). What was read
//! to see it is given to the server again. hyper-util's automatic server does the same, but lets
//! a client that sends nothing wait forever.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Version {
    Http1,
    Http2,
}

/// A connection whose first bytes were read already.
pub(crate) struct Rewound<I> {
    first: Bytes,
    io: I,
}

impl<I> Rewound<I> {
    pub fn new(io: I) -> Self {
        Self {
            first: Bytes::new(),
            io,
        }
    }
}

/// Reads until the version is plain. None: the client went without a word.
pub(crate) async fn sniff<I: AsyncRead + Unpin>(
    mut io: I,
) -> io::Result<Option<(Version, Rewound<I>)>> {
    let mut first = BytesMut::with_capacity(PREFACE.len());
    loop {
        let mut rest = (&mut io).take((PREFACE.len() - first.len()) as u64);
        if rest.read_buf(&mut first).await? == 0 {
            return Ok(None);
        }
        let version = if first == PREFACE {
            Version::Http2
        } else if PREFACE.starts_with(&first) {
            continue;
        } else {
            Version::Http1
        };
        let first = first.freeze();
        return Ok(Some((version, Rewound { first, io })));
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for Rewound<I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.first.is_empty() {
            return Pin::new(&mut self.io).poll_read(cx, buffer);
        }
        let length = self.first.len().min(buffer.remaining());
        buffer.put_slice(&self.first[..length]);
        self.first.advance(length);
        Poll::Ready(Ok(()))
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for Rewound<I> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn sniffed(chunks: &[&[u8]]) -> Option<(Version, Vec<u8>)> {
        let mut io = tokio_test_io(chunks);
        let (version, mut rewound) = sniff(&mut io).await.unwrap()?;
        let mut all = Vec::new();
        rewound.read_to_end(&mut all).await.unwrap();
        Some((version, all))
    }

    /// One read a chunk.
    fn tokio_test_io(chunks: &[&[u8]]) -> impl AsyncRead + Unpin {
        let chunks: Vec<io::Result<Bytes>> = chunks
            .iter()
            .map(|chunk| Ok(Bytes::copy_from_slice(chunk)))
            .collect();
        tokio_util::io::StreamReader::new(futures::stream::iter(chunks))
    }

    #[tokio::test]
    async fn the_preface_decides_and_nothing_is_lost() {
        let more = [PREFACE, b"rest"].concat();
        let (early, late) = more.split_at(5);
        for chunks in [vec![&more[..]], vec![early, late]] {
            let (version, all) = sniffed(&chunks).await.unwrap();
            assert_eq!((version, all), (Version::Http2, more.clone()));
        }
        for text in ["GET / HTTP/1.1\r\n\r\n", "PRI * HTTP/1.1\r\n\r\n", "P x"] {
            let (version, all) = sniffed(&[text.as_bytes()]).await.unwrap();
            assert_eq!((version, &all[..]), (Version::Http1, text.as_bytes()));
        }
        assert_eq!(sniffed(&[]).await, None);
        assert_eq!(sniffed(&[b"PRI"]).await, None);
    }
}

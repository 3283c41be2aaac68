//! From a URL to a whole base volume.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use async_compression::tokio::bufread::{GzipDecoder, XzDecoder, ZstdDecoder};
use bytes::{Bytes, BytesMut};
use egress_core::ErrorClass;
use futures::StreamExt as _;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::io::StreamReader;
use tokio_util::task::AbortOnDropHandle;
use tracing::warn;

use super::ImageError;
use super::cache::{Base, ImageCache, base_name, marker_name};
use super::checksums;
use super::download::Progress;
use super::inspect::{self, Inspected};
use crate::config::{Checksum, Compression, Format, ImageDigest, ImageSpec};
use crate::host::calls::Calls;
use crate::host::error::{HostError, LibvirtError};
use crate::host::session::Session;
use crate::host::{Host, LONG_CALL};
use crate::storage::{Pool, StorageError, Upload};

/// Bytes on their way to the host at a time: this and a few small buffers are all that is held of
/// an image.
const CHUNK: usize = 256 * 1024;
const CHUNKS: usize = 4;
/// A host that takes nothing for so long is given up.
const STALL: Duration = Duration::from_secs(120);
/// An upload itself has no deadline but that.
const FOREVER: Duration = Duration::from_secs(7 * 24 * 3600);

pub(super) fn host_error(spec: &ImageSpec, source: HostError) -> ImageError {
    ImageError::Host {
        image: spec.key.clone(),
        source: Box::new(source),
    }
}

pub(super) fn volume_error(spec: &ImageSpec, host: &str, error: &StorageError) -> ImageError {
    ImageError::Volume {
        image: spec.key.clone(),
        reason: format!("host {host}: {error}"),
        class: error.class(),
    }
}

/// What goes to the thread that uploads.
enum Piece {
    Data(Bytes),
    End,
}

/// Volume, format, bytes sent.
type Uploaded = (String, Format, u64);

/// Where an image's bytes go.
enum Sink<'s> {
    Nowhere,
    Volume {
        session: &'s Session,
        digest: &'s ImageDigest,
    },
}

/// One fetch.
pub(super) struct Fetch<'f> {
    pub cache: &'f ImageCache,
    pub host: &'f Arc<Host>,
    pub spec: &'f ImageSpec,
    pub disk_bytes: u64,
    pub progress: &'f Arc<Progress>,
}

impl Fetch<'_> {
    /// # Errors
    /// [`ImageError`].
    pub(super) async fn run(&self) -> Result<Base, ImageError> {
        let (expected, origin) = self.expected().await?;
        let (digest, origin) = match expected {
            Some(digest) => (digest, origin),
            None => {
                // The volume's name needs the digest, which only the whole file tells: it is read
                // once for that, and once more to be kept.
                let digest = self.probe().await?;
                self.pin(&digest)?;
                (digest, "what the first read found")
            }
        };
        let base = self.store(&digest, origin).await?;
        if matches!(self.spec.checksum, Checksum::File(_)) {
            self.pin(&digest)?;
        }
        Ok(base)
    }

    fn pin(&self, digest: &ImageDigest) -> Result<(), ImageError> {
        self.cache
            .pins
            .set_pin(&self.spec.pin_key(), digest)
            .map_err(|error| ImageError::Pins {
                image: self.spec.key.clone(),
                path: self.cache.pins.path().display().to_string(),
                reason: error.to_string(),
            })
    }

    async fn expected(&self) -> Result<(Option<ImageDigest>, &'static str), ImageError> {
        let pinned = || self.cache.pins.pin(&self.spec.pin_key());
        match &self.spec.checksum {
            Checksum::Known(digest) => Ok((Some(digest.clone()), "configured")),
            Checksum::Unknown => Ok((
                pinned(),
                "recorded at the first fetch: ask for a refresh of the image if it changed upstream",
            )),
            Checksum::File(url) => {
                if let Some(digest) = pinned() {
                    return Ok((
                        Some(digest),
                        "recorded at the first fetch: ask for a refresh of the image if it changed upstream",
                    ));
                }
                let text = self.cache.downloader.text(&self.spec.key, url).await?;
                let file = self
                    .spec
                    .url
                    .path_segments()
                    .and_then(|mut s| s.next_back())
                    .unwrap_or_default();
                let file = percent_decode(file);
                let digest =
                    checksums::find(&text, &file).ok_or_else(|| ImageError::NoChecksum {
                        image: self.spec.key.clone(),
                        url: url.to_string(),
                        file,
                    })?;
                Ok((Some(digest), "from the checksum file"))
            }
        }
    }

    /// Reads the whole file for its digest only. A header that would be refused is refused here.
    async fn probe(&self) -> Result<ImageDigest, ImageError> {
        let (digest, _) = self.through(false, Sink::Nowhere).await?;
        Ok(digest)
    }

    /// Downloads and hashes, and hands what comes out of decompression to `sink`.
    async fn through(
        &self,
        long_digest: bool,
        sink: Sink<'_>,
    ) -> Result<(ImageDigest, Option<Uploaded>), ImageError> {
        let (out, pieces) = mpsc::channel::<Bytes>(CHUNKS);
        let (downloader, progress) = (self.cache.downloader.clone(), Arc::clone(self.progress));
        let (image, url) = (self.spec.key.clone(), self.spec.url.clone());
        // A task of its own, so that hashing and sending go on side by side. The sender goes with
        // its end: the reader then sees the end of the file.
        let download = AbortOnDropHandle::new(tokio::spawn(async move {
            downloader
                .download(&image, &url, long_digest, &progress, &out)
                .await
        }));
        let consumed = self.consume(pieces, sink).await;
        let stopped = ImageError::Stopped {
            image: self.spec.key.clone(),
        };
        // A download that failed ends what reads from it, and its own error is the cause. One that
        // only waits for the network while nobody wants its bytes any more is not waited for.
        let downloaded = match &consumed {
            Ok(_) => download.await.unwrap_or(Err(stopped)),
            Err(_) => match tokio::time::timeout(Duration::from_secs(1), download).await {
                Ok(Ok(ended)) => ended,
                Ok(Err(_)) | Err(_) => Err(stopped),
            },
        };
        match (downloaded, consumed) {
            (Ok(digest), Ok(value)) => Ok((digest, value)),
            // Nobody took the bytes any more: why, the other side knows.
            (Err(ImageError::Stopped { .. }) | Ok(_), Err(error)) => Err(error),
            (Err(error), _) => Err(error),
        }
    }

    async fn consume(
        &self,
        pieces: mpsc::Receiver<Bytes>,
        sink: Sink<'_>,
    ) -> Result<Option<Uploaded>, ImageError> {
        let stream = ReceiverStream::new(pieces).map(Ok::<_, std::io::Error>);
        let mut raw = StreamReader::new(stream);
        let result = {
            let mut decoder: Box<dyn AsyncRead + Unpin + Send + '_> = match self.spec.compression {
                Compression::None => Box::new(&mut raw),
                Compression::Xz => {
                    let mut decoder = XzDecoder::new(&mut raw);
                    decoder.multiple_members(true);
                    Box::new(decoder)
                }
                Compression::Gz => {
                    let mut decoder = GzipDecoder::new(&mut raw);
                    decoder.multiple_members(true);
                    Box::new(decoder)
                }
                Compression::Zstd => {
                    let mut decoder = ZstdDecoder::new(&mut raw);
                    decoder.multiple_members(true);
                    Box::new(decoder)
                }
            };
            match sink {
                Sink::Nowhere => {
                    self.head(&mut *decoder).await?;
                    tokio::io::copy(&mut *decoder, &mut tokio::io::sink())
                        .await
                        .map_err(|error| self.decompress_error(&error))?;
                    None
                }
                Sink::Volume { session, digest } => {
                    Some(self.upload(session, digest, &mut *decoder).await?)
                }
            }
        };
        // What a decompressor does not want still belongs to the digest.
        let _ = tokio::io::copy(&mut raw, &mut tokio::io::sink()).await;
        Ok(result)
    }

    fn decompress_error(&self, error: &std::io::Error) -> ImageError {
        ImageError::Decompress {
            image: self.spec.key.clone(),
            compression: self.spec.compression.as_str(),
            reason: error.to_string(),
            // A file that ends early may be whole the next time; another format stays another.
            class: match error.kind() {
                std::io::ErrorKind::UnexpectedEof => ErrorClass::Transient,
                _ => ErrorClass::Permanent,
            },
        }
    }

    /// The first bytes, looked at.
    async fn head(
        &self,
        reader: &mut (dyn AsyncRead + Unpin + Send),
    ) -> Result<(BytesMut, Inspected), ImageError> {
        let mut head = BytesMut::with_capacity(inspect::HEAD);
        while head.len() < inspect::HEAD {
            let read = (&mut *reader)
                .take((inspect::HEAD - head.len()) as u64)
                .read_buf(&mut head)
                .await
                .map_err(|error| self.decompress_error(&error))?;
            if read == 0 {
                break;
            }
        }
        let inspected =
            inspect::inspect(&head, self.spec.format, self.disk_bytes).map_err(|reason| {
                ImageError::Refused {
                    image: self.spec.key.clone(),
                    reason,
                }
            })?;
        Ok((head, inspected))
    }

    /// Downloads the image into the host's pool, checks it, marks it.
    async fn store(&self, digest: &ImageDigest, origin: &'static str) -> Result<Base, ImageError> {
        let session = self
            .host
            .own_session()
            .await
            .map_err(|source| host_error(self.spec, source))?;
        let long = matches!(digest, ImageDigest::Sha512(_));
        let sink = Sink::Volume {
            session: &session,
            digest,
        };
        let uploaded = self.through(long, sink).await;
        let (found, (volume, format, sent)) = match uploaded {
            Ok((found, Some(uploaded))) => (found, uploaded),
            Ok((_, None)) => return Err(self.nothing_uploaded()),
            Err(error) => {
                self.discard(digest).await;
                return Err(error);
            }
        };
        if found != *digest {
            self.discard(digest).await;
            return Err(ImageError::Digest {
                image: self.spec.key.clone(),
                url: self.spec.url.to_string(),
                expected: digest.to_string(),
                found: found.to_string(),
                origin,
            });
        }
        let result = self.complete(&session, &volume, format, sent).await;
        if result.is_err() {
            self.discard(digest).await;
        }
        result
    }

    fn nothing_uploaded(&self) -> ImageError {
        ImageError::Stopped {
            image: self.spec.key.clone(),
        }
    }

    async fn on<T: Send + 'static>(
        &self,
        session: &Session,
        rpc: &'static str,
        within: Duration,
        job: impl FnOnce(&Calls<'_>) -> Result<T, StorageError> + Send + 'static,
    ) -> Result<T, ImageError> {
        session
            .run(rpc, within, job)
            .await
            .map_err(|source| host_error(self.spec, source))?
            .map_err(|error| volume_error(self.spec, self.host.name(), &error))
    }

    /// Sends what comes out of `reader` into the base volume, after its first bytes were looked at.
    async fn upload(
        &self,
        session: &Session,
        digest: &ImageDigest,
        reader: &mut (dyn AsyncRead + Unpin + Send),
    ) -> Result<Uploaded, ImageError> {
        let (head, inspected) = self.head(reader).await?;
        let format = inspected.format;
        let volume = base_name(&self.spec.key, digest, format);
        let pool = self.host.config.pool.clone();
        self.cache
            .pins
            .add_base(self.host.name(), &pool, &volume)
            .map_err(|error| ImageError::Pins {
                image: self.spec.key.clone(),
                path: self.cache.pins.path().display().to_string(),
                reason: error.to_string(),
            })?;
        // Packed, it is at least as long as what travels.
        let total = self.progress.get().1;
        let exact = total.filter(|_| self.spec.compression == Compression::None);
        let (job_pool, job_volume, image) = (pool.clone(), volume.clone(), self.spec.key.clone());
        {
            let _pool = self.host.pool_lock.lock().await;
            self.on(session, "virStorageVolCreateXML", LONG_CALL, move |calls| {
                let pool = Pool::open(calls, &job_pool)?;
                // No marker: an earlier attempt was cut off.
                pool.delete(&marker_name(&job_volume))?;
                pool.delete(&job_volume)?;
                pool.require(total.unwrap_or(0), &format!("image {image}"))?;
                pool.create_raw(&job_volume, exact.unwrap_or(512)).map(drop)
            })
            .await?;
        }
        let (pieces, mut taken) = mpsc::channel::<Piece>(CHUNKS);
        let busy = Arc::new(Busy::default());
        let (job_pool, job_volume, job_busy) = (pool, volume.clone(), Arc::clone(&busy));
        let sending = session.run("virStorageVolUpload", FOREVER, move |calls| {
            let pool = Pool::open(calls, &job_pool)?;
            let Some(vol) = pool.find(&job_volume)? else {
                return Err(LibvirtError::odd("virStorageVolUpload", "the volume is gone").into());
            };
            let mut upload = Upload::begin(calls, &vol, &job_volume)?;
            while let Some(piece) = taken.blocking_recv() {
                match piece {
                    Piece::Data(bytes) => {
                        job_busy.begin();
                        upload.send(&bytes)?;
                        job_busy.end();
                    }
                    Piece::End => {
                        job_busy.begin();
                        let finished = upload.finish();
                        job_busy.end();
                        return finished.map_err(StorageError::from);
                    }
                }
            }
            // The sender went away without an end: dropping the upload aborts it.
            Err(LibvirtError::odd("virStorageVolUpload", "the download ended early").into())
        });
        let feeding = self.feed(reader, head, format, pieces);
        let watching = busy.stalled();
        tokio::pin!(sending, feeding);
        let outcome = async {
            let mut fed = None;
            loop {
                tokio::select! {
                    sent = &mut sending => {
                        return match sent {
                            Ok(Ok(())) => match fed {
                                Some(bytes) => Ok(bytes),
                                None => feeding.await,
                            },
                            Ok(Err(error)) => match fed {
                                // Feeding failed first: its error is the cause.
                                None if matches!(&error, StorageError::Libvirt(e) if e.message == "the download ended early") => feeding.await,
                                _ => Err(volume_error(self.spec, self.host.name(), &error)),
                            },
                            Err(source) => Err(host_error(self.spec, source)),
                        };
                    }
                    result = &mut feeding, if fed.is_none() => {
                        match result {
                            Ok(bytes) => fed = Some(bytes),
                            Err(error) => return Err(error),
                        }
                    }
                }
            }
        };
        let sent = tokio::select! {
            outcome = outcome => outcome?,
            () = watching => {
                session.abort();
                return Err(host_error(self.spec, HostError::Deadline {
                    host: self.host.name().to_owned(),
                    rpc: "virStreamSend",
                    after: STALL,
                }));
            }
        };
        Ok((volume, format, sent))
    }

    /// Cuts the stream into pieces for the uploading thread; returns how many bytes there were.
    async fn feed(
        &self,
        reader: &mut (dyn AsyncRead + Unpin + Send),
        head: BytesMut,
        format: Format,
        pieces: mpsc::Sender<Piece>,
    ) -> Result<u64, ImageError> {
        let mut sent = 0_u64;
        let mut told = 0_u64;
        let mut next = head;
        loop {
            if next.is_empty() {
                break;
            }
            sent += next.len() as u64;
            if format == Format::Raw {
                inspect::fits(sent, self.disk_bytes).map_err(|reason| ImageError::Refused {
                    image: self.spec.key.clone(),
                    reason,
                })?;
            }
            if pieces.send(Piece::Data(next.freeze())).await.is_err() {
                // The thread ended, and says why itself.
                return Ok(sent);
            }
            let (done, total) = self.progress.get();
            self.cache.metrics.fetched(
                self.host.name(),
                &self.spec.key,
                done.saturating_sub(told),
                // A ratio for people: its last digits do not matter.
                total.map(|total| done as f64 / total.max(1) as f64),
            );
            told = done;
            next = BytesMut::with_capacity(CHUNK);
            while next.len() < CHUNK {
                let read = (&mut *reader)
                    .take((CHUNK - next.len()) as u64)
                    .read_buf(&mut next)
                    .await
                    .map_err(|error| self.decompress_error(&error))?;
                if read == 0 {
                    break;
                }
            }
        }
        let _ = pieces.send(Piece::End).await;
        Ok(sent)
    }

    /// Compares what the host has with what was sent, and only then writes the marker.
    async fn complete(
        &self,
        session: &Session,
        volume: &str,
        format: Format,
        sent: u64,
    ) -> Result<Base, ImageError> {
        let pool = self.host.config.pool.clone();
        let name = volume.to_owned();
        let view = {
            let _pool = self.host.pool_lock.lock().await;
            self.on(session, "virStoragePoolRefresh", LONG_CALL, move |calls| {
                let pool = Pool::open(calls, &pool)?;
                pool.refresh()?;
                pool.view(&name)
            })
            .await?
        };
        let mismatch = |stored| ImageError::SizeMismatch {
            image: self.spec.key.clone(),
            host: self.host.name().to_owned(),
            sent,
            stored,
        };
        let view = view.ok_or_else(|| mismatch(0))?;
        match view.physical {
            Some(stored) if stored != sent => return Err(mismatch(stored)),
            _ => {}
        }
        let (pool, marker) = (self.host.config.pool.clone(), marker_name(volume));
        let _pool = self.host.pool_lock.lock().await;
        self.on(session, "virStorageVolCreateXML", LONG_CALL, move |calls| {
            let pool = Pool::open(calls, &pool)?;
            match pool.find(&marker)? {
                Some(_) => Ok(()),
                None => pool.create_raw(&marker, 512).map(drop),
            }
        })
        .await?;
        Ok(Base {
            volume: volume.to_owned(),
            path: view.path,
            format,
        })
    }

    /// Removes what is not whole, as far as that is possible now; the next fetch does it otherwise.
    async fn discard(&self, digest: &ImageDigest) {
        let names = [Format::Qcow2, Format::Raw].map(|f| base_name(&self.spec.key, digest, f));
        let pool = self.host.config.pool.clone();
        let _pool = self.host.pool_lock.lock().await;
        let removed = self
            .host
            .run("virStorageVolDelete", LONG_CALL, move |calls| {
                let pool = Pool::open(calls, &pool)?;
                for name in names {
                    if pool.find(&marker_name(&name))?.is_none() {
                        pool.delete(&name)?;
                    }
                }
                Ok::<_, StorageError>(())
            })
            .await;
        match removed {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                warn!(image = self.spec.key, %error, "a cut-off base volume stays for now");
            }
            Err(error) => {
                warn!(image = self.spec.key, %error, "a cut-off base volume stays for now");
            }
        }
    }
}

/// Notices when the host takes nothing.
#[derive(Default)]
struct Busy {
    sending: AtomicBool,
    count: AtomicU64,
}

impl Busy {
    fn begin(&self) {
        self.count.fetch_add(1, Ordering::Relaxed);
        self.sending.store(true, Ordering::Release);
    }

    fn end(&self) {
        self.sending.store(false, Ordering::Release);
    }

    /// Completes when one and the same send took too long.
    async fn stalled(&self) {
        loop {
            let before = self.count.load(Ordering::Relaxed);
            tokio::time::sleep(STALL).await;
            if self.sending.load(Ordering::Acquire) && self.count.load(Ordering::Relaxed) == before
            {
                return;
            }
        }
    }
}

fn percent_decode(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, tail)) = rest.split_first() {
        let hex = tail.get(..2).and_then(|h| std::str::from_utf8(h).ok());
        match (first, hex.and_then(|h| u8::from_str_radix(h, 16).ok())) {
            (b'%', Some(byte)) => {
                bytes.push(byte);
                rest = tail.get(2..).unwrap_or_default();
            }
            _ => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

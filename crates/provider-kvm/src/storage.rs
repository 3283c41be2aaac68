//! A host's storage pool and its volumes. Everything here blocks: it runs on a connection's own
//! threads.

use std::time::Duration;

use egress_core::ErrorClass;
use jiff::Timestamp;
use virt::storage_pool::StoragePool;
use virt::storage_vol::StorageVol;
use virt::stream::Stream;
use virt::sys;

use crate::config::Format;
use crate::host::calls::Calls;
use crate::host::error::LibvirtError;
use crate::xml::Element;

/// A pool that is busy with another job is asked so often, with this pause.
const BUSY_TRIES: u32 = 40;
const BUSY_PAUSE: Duration = Duration::from_millis(250);
/// Sent to a stream at a time; libvirt cuts it into messages of that size anyway.
const SEND: usize = 256 * 1024;

/// What is wrong with a pool or a volume.
#[derive(Debug, Clone, thiserror::Error)]
pub enum StorageError {
    #[error(
        "storage pool {pool:?} does not exist; there are: {known}. Define it (virsh pool-define-as {pool} dir --target /var/lib/libvirt/images; virsh pool-autostart {pool}) or name another in the host's pool setting"
    )]
    NoPool { pool: String, known: String },
    #[error("storage pool {pool:?} is not active and could not be started: {error}")]
    Inactive { pool: String, error: LibvirtError },
    #[error(
        "volume {volume} in pool {pool} is not the operator's: {why}. It is left untouched; remove or rename it"
    )]
    Conflict {
        pool: String,
        volume: String,
        why: String,
    },
    #[error("pool {pool} has {available} MiB free, but {needed} MiB are asked for {what}")]
    NoSpace {
        pool: String,
        what: String,
        available: u64,
        needed: u64,
    },
    #[error(transparent)]
    Libvirt(#[from] LibvirtError),
}

impl StorageError {
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::NoPool { .. } | Self::Conflict { .. } => ErrorClass::Permanent,
            Self::NoSpace { .. } => ErrorClass::QuotaExceeded,
            Self::Inactive { .. } => ErrorClass::Transient,
            // Here something is always there to be found: gone means it changed under us.
            Self::Libvirt(error) if error.is_gone() => ErrorClass::Transient,
            Self::Libvirt(error) => error.class(),
        }
    }
}

/// An active pool.
pub struct Pool<'c> {
    calls: &'c Calls<'c>,
    pool: StoragePool,
    name: String,
}

/// What libvirt knows of a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeView {
    pub name: String,
    pub path: String,
    /// As libvirt found it in the content: `qcow2`, `raw`, `iso`.
    pub format: String,
    /// What a guest sees.
    pub capacity: u64,
    /// Length of the file.
    pub physical: Option<u64>,
    /// Path of the volume that this one is laid over.
    pub backing: Option<String>,
    pub modified: Option<Timestamp>,
}

impl VolumeView {
    fn parse(xml: &str) -> Option<Self> {
        let root = Element::parse(xml).ok()?;
        let bytes = |name: &str| root.text_at(&[name]).and_then(|t| t.parse().ok());
        // `<mtime>` is seconds, with a fraction.
        let modified = root
            .text_at(&["target", "timestamps", "mtime"])
            .and_then(|t| t.split('.').next()?.parse().ok())
            .and_then(|seconds| Timestamp::from_second(seconds).ok());
        Some(Self {
            name: root.text_at(&["name"])?.to_owned(),
            path: root.text_at(&["target", "path"])?.to_owned(),
            format: root
                .find(&["target", "format"])
                .and_then(|f| f.get("type"))
                .unwrap_or("raw")
                .to_owned(),
            capacity: bytes("capacity").unwrap_or(0),
            physical: bytes("physical"),
            backing: root
                .text_at(&["backingStore", "path"])
                .filter(|t| !t.is_empty())
                .map(str::to_owned),
            modified,
        })
    }
}

impl<'c> Pool<'c> {
    /// Finds the pool, and starts it where it is not active.
    ///
    /// # Errors
    /// [`StorageError`]: missing and not to be started are two different answers.
    pub fn open(calls: &'c Calls<'c>, name: &str) -> Result<Self, StorageError> {
        let found = calls.rpc("virStoragePoolLookupByName", name, |conn| {
            conn.lookup_storage_pool_by_name(name)
        });
        let pool = match found {
            Ok(pool) => pool,
            Err(error) if error.is(sys::VIR_ERR_NO_STORAGE_POOL) => {
                let known = calls
                    .rpc("virConnectListAllStoragePools", "all", |conn| {
                        conn.list_all_storage_pools(0)
                    })?
                    .iter()
                    .filter_map(|pool| pool.name().ok())
                    .collect::<Vec<_>>()
                    .join(", ");
                return Err(StorageError::NoPool {
                    pool: name.to_owned(),
                    known: if known.is_empty() {
                        "none".to_owned()
                    } else {
                        known
                    },
                });
            }
            Err(error) => return Err(error.into()),
        };
        if !calls.rpc("virStoragePoolIsActive", name, |_| pool.is_active())? {
            let started = calls.rpc("virStoragePoolCreate", name, |_| {
                pool.create(sys::VIR_STORAGE_POOL_CREATE_NORMAL)
            });
            if let Err(error) = started
                && !calls.rpc("virStoragePoolIsActive", name, |_| pool.is_active())?
            {
                return Err(StorageError::Inactive {
                    pool: name.to_owned(),
                    error,
                });
            }
        }
        Ok(Self {
            calls,
            pool,
            name: name.to_owned(),
        })
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Bytes left.
    ///
    /// # Errors
    /// [`StorageError`].
    pub fn available(&self) -> Result<u64, StorageError> {
        let info = self
            .calls
            .rpc("virStoragePoolGetInfo", &self.name, |_| self.pool.info())?;
        Ok(info.available)
    }

    /// # Errors
    /// [`StorageError::NoSpace`] with both numbers.
    pub fn require(&self, needed: u64, what: &str) -> Result<(), StorageError> {
        let available = self.available()?;
        if needed <= available {
            return Ok(());
        }
        Err(StorageError::NoSpace {
            pool: self.name.clone(),
            what: what.to_owned(),
            available: available >> 20,
            needed: needed.div_ceil(1 << 20),
        })
    }

    /// Looks at the files anew: what libvirt knows of a volume is otherwise what it saw last.
    ///
    /// # Errors
    /// [`StorageError`].
    pub fn refresh(&self) -> Result<(), StorageError> {
        Ok(retry_busy(|| {
            self.calls.rpc("virStoragePoolRefresh", &self.name, |_| {
                self.pool.refresh(0)
            })
        })?)
    }

    /// # Errors
    /// [`StorageError`].
    pub fn find(&self, volume: &str) -> Result<Option<StorageVol>, StorageError> {
        let found = self.calls.rpc("virStorageVolLookupByName", volume, |_| {
            self.pool.lookup_storage_vol_by_name(volume)
        });
        match found {
            Ok(found) => Ok(Some(found)),
            Err(error) if error.is(sys::VIR_ERR_NO_STORAGE_VOL) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// # Errors
    /// [`StorageError`].
    pub fn view(&self, volume: &str) -> Result<Option<VolumeView>, StorageError> {
        match self.find(volume)? {
            Some(found) => self.view_of(&found, volume).map(Some),
            None => Ok(None),
        }
    }

    fn view_of(&self, found: &StorageVol, name: &str) -> Result<VolumeView, StorageError> {
        let rpc = "virStorageVolGetXMLDesc";
        let xml = self.calls.rpc(rpc, name, |_| found.xml_desc(0))?;
        VolumeView::parse(&xml).ok_or_else(|| {
            LibvirtError::odd(
                rpc,
                format!("the description of volume {name} is not readable"),
            )
            .into()
        })
    }

    /// The names of all volumes.
    ///
    /// # Errors
    /// [`StorageError`].
    pub fn names(&self) -> Result<Vec<String>, StorageError> {
        let volumes = self
            .calls
            .rpc("virStoragePoolListAllVolumes", &self.name, |_| {
                self.pool.list_all_volumes(0)
            })?;
        Ok(volumes.iter().filter_map(|v| v.name().ok()).collect())
    }

    /// A volume of raw bytes, `capacity` long.
    ///
    /// # Errors
    /// [`StorageError`].
    pub fn create_raw(&self, volume: &str, capacity: u64) -> Result<StorageVol, StorageError> {
        let xml = Element::new("volume")
            .child(Element::new("name").text(volume))
            .child(
                Element::new("capacity")
                    .attr("unit", "bytes")
                    .text(capacity.to_string()),
            )
            .child(Element::new("allocation").attr("unit", "bytes").text("0"))
            .child(Element::new("target").child(Element::new("format").attr("type", "raw")))
            .to_document();
        self.create(volume, &xml)
    }

    /// A qcow2 volume over another one.
    ///
    /// # Errors
    /// [`StorageError`].
    pub fn create_overlay(
        &self,
        volume: &str,
        capacity: u64,
        backing: &str,
        backing_format: Format,
    ) -> Result<StorageVol, StorageError> {
        let format = |name: &str| Element::new("format").attr("type", name);
        let xml = Element::new("volume")
            .child(Element::new("name").text(volume))
            .child(
                Element::new("capacity")
                    .attr("unit", "bytes")
                    .text(capacity.to_string()),
            )
            .child(Element::new("allocation").attr("unit", "bytes").text("0"))
            .child(Element::new("target").child(format("qcow2")))
            .child(
                Element::new("backingStore")
                    .child(Element::new("path").text(backing))
                    .child(format(backing_format.as_str())),
            )
            .to_document();
        self.create(volume, &xml)
    }

    fn create(&self, volume: &str, xml: &str) -> Result<StorageVol, StorageError> {
        tracing::trace!(volume, xml, "volume document");
        Ok(retry_busy(|| {
            self.calls.rpc("virStorageVolCreateXML", volume, |_| {
                StorageVol::create_xml(&self.pool, xml, 0)
            })
        })?)
    }

    /// Writes a volume's whole content.
    ///
    /// # Errors
    /// [`StorageError`].
    pub fn upload(
        &self,
        vol: &StorageVol,
        volume: &str,
        content: &[u8],
    ) -> Result<(), StorageError> {
        let mut upload = Upload::begin(self.calls, vol, volume)?;
        for chunk in content.chunks(SEND) {
            upload.send(chunk)?;
        }
        upload.finish()?;
        Ok(())
    }

    /// Deletes a volume; true when there was one.
    ///
    /// # Errors
    /// [`StorageError`].
    pub fn delete(&self, volume: &str) -> Result<bool, StorageError> {
        let Some(found) = self.find(volume)? else {
            return Ok(false);
        };
        let deleted = retry_busy(|| {
            self.calls
                .rpc("virStorageVolDelete", volume, |_| found.delete(0))
        });
        match deleted {
            Ok(()) => Ok(true),
            Err(error) if error.is(sys::VIR_ERR_NO_STORAGE_VOL) => Ok(false),
            // The file was removed by hand: libvirt's list still has it until it looks anew.
            Err(error) if error.message.contains("No such file") => {
                self.refresh()?;
                Ok(false)
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// An upload under way.
pub struct Upload<'c> {
    calls: &'c Calls<'c>,
    stream: Option<Stream>,
    volume: String,
}

impl<'c> Upload<'c> {
    /// # Errors
    /// What libvirt said.
    pub fn begin(
        calls: &'c Calls<'c>,
        vol: &StorageVol,
        volume: &str,
    ) -> Result<Self, LibvirtError> {
        let stream = calls.rpc("virStreamNew", volume, |conn| Stream::new(conn, 0))?;
        // Length 0: as much as comes.
        calls.rpc("virStorageVolUpload", volume, |_| {
            vol.upload(&stream, 0, 0, 0)
        })?;
        Ok(Self {
            calls,
            stream: Some(stream),
            volume: volume.to_owned(),
        })
    }

    /// # Errors
    /// What libvirt said. The upload is then over.
    pub fn send(&mut self, mut bytes: &[u8]) -> Result<(), LibvirtError> {
        let Some(stream) = &self.stream else {
            return Err(LibvirtError::odd("virStreamSend", "the stream is closed"));
        };
        while !bytes.is_empty() {
            let sent = stream
                .send(bytes)
                .map_err(|error| LibvirtError::new("virStreamSend", &error))?;
            let Ok(sent @ 1..) = usize::try_from(sent) else {
                return Err(LibvirtError::odd("virStreamSend", "nothing was taken"));
            };
            bytes = bytes.get(sent..).unwrap_or_default();
        }
        Ok(())
    }

    /// # Errors
    /// What libvirt said: among others what the host could not write.
    pub fn finish(mut self) -> Result<(), LibvirtError> {
        match self.stream.take() {
            Some(stream) => self
                .calls
                .rpc("virStreamFinish", &self.volume, |_| stream.finish()),
            None => Ok(()),
        }
    }
}

impl Drop for Upload<'_> {
    fn drop(&mut self) {
        if let Some(stream) = self.stream.take() {
            let _ = self
                .calls
                .rpc("virStreamAbort", &self.volume, |_| stream.abort());
        }
    }
}

/// libvirt refuses some jobs while another one runs in the pool (terraform-provider-libvirt#16).
fn retry_busy<T>(mut job: impl FnMut() -> Result<T, LibvirtError>) -> Result<T, LibvirtError> {
    let mut tries = 1;
    loop {
        match job() {
            Err(error) if error.is_pool_busy() && tries < BUSY_TRIES => {
                tries += 1;
                #[allow(
                    clippy::disallowed_methods,
                    reason = "a thread of the connection's own"
                )]
                std::thread::sleep(BUSY_PAUSE);
            }
            other => return other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_is_read() {
        let view = VolumeView::parse(
            "<volume type='file'><name>a.qcow2</name><capacity unit='bytes'>1024</capacity><physical unit='bytes'>512</physical><target><path>/p/a.qcow2</path><format type='qcow2'/><timestamps><mtime>1700000000.123</mtime></timestamps></target><backingStore><path>/p/b</path><format type='raw'/></backingStore></volume>",
        )
        .unwrap();
        assert_eq!((view.capacity, view.physical), (1024, Some(512)));
        assert_eq!(view.backing.as_deref(), Some("/p/b"));
        assert_eq!(
            view.modified,
            Some(Timestamp::from_second(1_700_000_000).unwrap())
        );
        assert!(VolumeView::parse("<volume/>").is_none());
    }
}

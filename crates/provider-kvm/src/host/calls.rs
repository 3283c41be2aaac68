//! libvirt calls, each told: one debug line and one span with the function, what it was about, how
//! long it took, and on failure libvirt's own name and number of the error.

use std::ffi::{CStr, c_int, c_uint};
use std::fmt::Display;
use std::time::Instant;

use tracing::{debug, debug_span};
use virt::connect::Connect;
use virt::domain::Domain;
use virt::sys;

use super::error::LibvirtError;
use crate::metrics::Metrics;

/// A connection, for the time of one job on one of its threads.
pub struct Calls<'c> {
    pub(super) conn: &'c Connect,
    pub(super) host: &'c str,
    pub(super) metrics: &'c Metrics,
}

/// One address of a guest's interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestAddress {
    pub mac: Option<String>,
    pub address: String,
}

impl Calls<'_> {
    /// Makes one libvirt call. `about` names the thing, never its content.
    ///
    /// # Errors
    /// What libvirt said.
    pub fn rpc<T>(
        &self,
        rpc: &'static str,
        about: impl Display,
        call: impl FnOnce(&Connect) -> Result<T, virt::error::Error>,
    ) -> Result<T, LibvirtError> {
        let span = debug_span!(
            "libvirt",
            otel.name = rpc,
            rpc,
            host = self.host,
            otel.kind = "client"
        );
        let _entered = span.enter();
        let started = Instant::now();
        let result = call(self.conn).map_err(|error| LibvirtError::new(rpc, &error));
        let took = started.elapsed();
        self.metrics.call(self.host, rpc, result.is_ok(), took);
        match &result {
            Ok(_) => debug!(rpc, HOST = self.host, about = %about, ?took, "libvirt call"),
            Err(error) => debug!(
                rpc,
                HOST = self.host,
                about = %about,
                ?took,
                error = error.name,
                code = error.number,
                "libvirt call failed: {}",
                error.message
            ),
        }
        result
    }

    /// Whether the connection still stands; asks nobody.
    pub fn is_alive(&self) -> bool {
        self.conn.is_alive().unwrap_or(false)
    }

    pub fn host(&self) -> &str {
        self.host
    }

    /// The running domains with their state, in one round trip.
    ///
    /// # Errors
    /// What libvirt said.
    #[allow(
        unsafe_code,
        reason = "virConnectGetAllDomainStats is wrapped without its content"
    )]
    pub fn active_domain_states(&self) -> Result<Vec<(Domain, u32)>, LibvirtError> {
        self.rpc("virConnectGetAllDomainStats", "active", |conn| {
            let mut records: *mut sys::virDomainStatsRecordPtr = std::ptr::null_mut();
            // SAFETY: the connection is alive for the call; `records` is an out parameter that
            // libvirt fills with a list that virDomainStatsRecordListFree frees.
            let count = unsafe {
                sys::virConnectGetAllDomainStats(
                    conn.as_ptr(),
                    sys::VIR_DOMAIN_STATS_STATE,
                    &raw mut records,
                    sys::VIR_CONNECT_GET_ALL_DOMAINS_STATS_ACTIVE,
                )
            };
            let Ok(count) = usize::try_from(count) else {
                return Err(virt::error::Error::last_error());
            };
            let mut found = Vec::with_capacity(count);
            for i in 0..count {
                // SAFETY: libvirt gave `count` valid records. The domain's reference belongs to
                // the record, so it is taken once more before a wrapper owns it.
                unsafe {
                    let record = *records.add(i);
                    sys::virDomainRef((*record).dom);
                    let domain = Domain::from_ptr((*record).dom);
                    let nparams = usize::try_from((*record).nparams).unwrap_or(0);
                    let mut state = sys::VIR_DOMAIN_NOSTATE;
                    for p in 0..nparams {
                        let param = &*(*record).params.add(p);
                        let name = CStr::from_ptr(param.field.as_ptr());
                        if name == c"state.state" {
                            state = c_uint::try_from(param.value.i).unwrap_or(state);
                        }
                    }
                    found.push((domain, state));
                }
            }
            if !records.is_null() {
                // SAFETY: freed once; the domains above hold references of their own.
                unsafe { sys::virDomainStatsRecordListFree(records) };
            }
            Ok(found)
        })
    }

    /// A guest's addresses as one source knows them.
    ///
    /// # Errors
    /// What libvirt said.
    #[allow(
        unsafe_code,
        reason = "the wrapper of virDomainInterfaceAddresses leaks its result"
    )]
    pub fn interface_addresses(
        &self,
        domain: &Domain,
        source: sys::virDomainInterfaceAddressesSource,
        about: &str,
    ) -> Result<Vec<GuestAddress>, LibvirtError> {
        self.rpc("virDomainInterfaceAddresses", about, |_| {
            let mut interfaces: *mut sys::virDomainInterfacePtr = std::ptr::null_mut();
            // SAFETY: the domain is alive for the call; `interfaces` is an out parameter.
            let count = unsafe {
                sys::virDomainInterfaceAddresses(domain.as_ptr(), &raw mut interfaces, source, 0)
            };
            let Ok(count) = usize::try_from(count) else {
                return Err(virt::error::Error::last_error());
            };
            let mut found = Vec::new();
            for i in 0..count {
                // SAFETY: libvirt gave `count` valid interfaces with `naddrs` addresses each;
                // each is freed once, by libvirt's own function, after its text was copied.
                unsafe {
                    let interface = *interfaces.add(i);
                    let mac = (!(*interface).hwaddr.is_null()).then(|| {
                        CStr::from_ptr((*interface).hwaddr)
                            .to_string_lossy()
                            .into_owned()
                    });
                    for a in 0..(*interface).naddrs as usize {
                        let address = (*(*interface).addrs.add(a)).addr;
                        if !address.is_null() {
                            found.push(GuestAddress {
                                mac: mac.clone(),
                                address: CStr::from_ptr(address).to_string_lossy().into_owned(),
                            });
                        }
                    }
                    sys::virDomainInterfaceFree(interface);
                }
            }
            if !interfaces.is_null() {
                // SAFETY: the array itself was allocated with malloc, as libvirt documents.
                unsafe { libc_free(interfaces.cast()) };
            }
            Ok(found)
        })
    }

    /// Memory in bytes that the host could give to a new guest: free, buffers and page cache.
    ///
    /// # Errors
    /// What libvirt said.
    #[allow(unsafe_code, reason = "virNodeGetMemoryStats is not wrapped")]
    pub fn available_memory(&self) -> Result<u64, LibvirtError> {
        let stats = self.rpc("virNodeGetMemoryStats", "all cells", |conn| {
            let mut count: c_int = 0;
            let cells = sys::VIR_NODE_MEMORY_STATS_ALL_CELLS;
            // SAFETY: with a null list libvirt only tells how long the list must be.
            let first = unsafe {
                sys::virNodeGetMemoryStats(
                    conn.as_ptr(),
                    cells,
                    std::ptr::null_mut(),
                    &raw mut count,
                    0,
                )
            };
            if first < 0 {
                return Err(virt::error::Error::last_error());
            }
            let empty = sys::virNodeMemoryStats {
                field: [0; 80],
                value: 0,
            };
            let mut stats = vec![empty; usize::try_from(count).unwrap_or(0)];
            // SAFETY: the list has `count` elements.
            let second = unsafe {
                sys::virNodeGetMemoryStats(
                    conn.as_ptr(),
                    cells,
                    stats.as_mut_ptr(),
                    &raw mut count,
                    0,
                )
            };
            if second < 0 {
                return Err(virt::error::Error::last_error());
            }
            Ok(stats)
        })?;
        let kib = stats
            .iter()
            .filter(|stat| {
                // SAFETY: libvirt ends each name with a zero within its 80 characters.
                let name = unsafe { CStr::from_ptr(stat.field.as_ptr()) };
                name == c"free" || name == c"buffers" || name == c"cached"
            })
            .fold(0_u64, |sum, stat| sum.saturating_add(stat.value));
        Ok(kib.saturating_mul(1024))
    }
}

#[allow(
    unsafe_code,
    reason = "what libvirt allocated with malloc is freed with free"
)]
unsafe extern "C" {
    #[link_name = "free"]
    fn libc_free(pointer: *mut std::ffi::c_void);
}

//! libvirt's event loop, and the domain events of one connection.

use std::ffi::{CStr, c_int, c_void};
use std::sync::{Arc, OnceLock};

use tracing::{error, trace};
use virt::connect::Connect;
use virt::sys;

/// What is told of each event: the domain's UUID and name.
pub type Sink = Arc<dyn Fn(&str, &str) + Send + Sync>;

/// Starts libvirt's event loop on a thread of its own, once in a process. Without it there are no
/// events and no keepalives on any connection.
///
/// # Errors
/// A text, the same each time.
pub fn ensure_loop() -> Result<(), String> {
    static LOOP: OnceLock<Result<(), String>> = OnceLock::new();
    LOOP.get_or_init(|| {
        // libvirt prints to stderr what it also returns.
        virt::error::clear_error_callback();
        virt::event::event_register_default_impl().map_err(|error| error.to_string())?;
        // It belongs to the library, not to a provider, and lives as long as the process: libvirt
        // has no way to take an event loop back.
        std::thread::Builder::new()
            .name("libvirt-events".to_owned())
            .spawn(|| {
                let mut failures = 0_u32;
                while failures < 100 {
                    match virt::event::event_run_default_impl() {
                        Ok(()) => failures = 0,
                        Err(error) => {
                            failures += 1;
                            error!(%error, "libvirt's event loop");
                        }
                    }
                }
                error!("libvirt's event loop ended: events and keepalives stop");
            })
            .map(drop)
            .map_err(|error| error.to_string())
    })
    .clone()
}

/// Callbacks of one connection, taken back when dropped (which must be before it is closed).
pub struct Registration {
    conn: Connect,
    ids: Vec<c_int>,
}

#[allow(
    unsafe_code,
    reason = "domain event callbacks are not wrapped by the virt crate"
)]
impl Registration {
    /// Registers for lifecycle and guest agent events.
    pub fn new(conn: &Connect, sink: &Sink) -> Self {
        let mut ids = Vec::new();
        let lifecycle: sys::virConnectDomainEventCallback = Some(on_lifecycle);
        let agent: sys::virConnectDomainEventAgentLifecycleCallback = Some(on_agent);
        // SAFETY: libvirt takes every kind of callback as the generic one and calls it back as
        // what the event's id says (libvirt's own VIR_DOMAIN_EVENT_CALLBACK macro does the same).
        let callbacks = unsafe {
            [
                (
                    sys::VIR_DOMAIN_EVENT_ID_LIFECYCLE,
                    std::mem::transmute::<
                        sys::virConnectDomainEventCallback,
                        sys::virConnectDomainEventGenericCallback,
                    >(lifecycle),
                ),
                (
                    sys::VIR_DOMAIN_EVENT_ID_AGENT_LIFECYCLE,
                    std::mem::transmute::<
                        sys::virConnectDomainEventAgentLifecycleCallback,
                        sys::virConnectDomainEventGenericCallback,
                    >(agent),
                ),
            ]
        };
        for (event, callback) in callbacks {
            let opaque = Box::into_raw(Box::new(Arc::clone(sink)));
            let Ok(event) = c_int::try_from(event) else {
                continue;
            };
            // SAFETY: the connection is alive; `opaque` is freed by `free_sink`, which libvirt
            // calls when the callback is taken back or the connection goes.
            let id = unsafe {
                sys::virConnectDomainEventRegisterAny(
                    conn.as_ptr(),
                    std::ptr::null_mut(),
                    event,
                    callback,
                    opaque.cast(),
                    Some(free_sink),
                )
            };
            if id < 0 {
                // SAFETY: not registered, so libvirt will not free it.
                drop(unsafe { Box::from_raw(opaque) });
                trace!(event, "this connection has no such events");
            } else {
                ids.push(id);
            }
        }
        Self {
            conn: conn.clone(),
            ids,
        }
    }
}

#[allow(
    unsafe_code,
    reason = "domain event callbacks are not wrapped by the virt crate"
)]
impl Drop for Registration {
    fn drop(&mut self) {
        for id in self.ids.drain(..) {
            // SAFETY: `conn` holds a reference of its own. A dead connection only returns an error.
            unsafe { sys::virConnectDomainEventDeregisterAny(self.conn.as_ptr(), id) };
        }
    }
}

#[allow(unsafe_code, reason = "called by libvirt")]
unsafe extern "C" fn free_sink(opaque: *mut c_void) {
    // SAFETY: made by `Registration::new` and freed once, here.
    drop(unsafe { Box::from_raw(opaque.cast::<Sink>()) });
}

#[allow(unsafe_code, reason = "called by libvirt")]
unsafe extern "C" fn on_lifecycle(
    _: sys::virConnectPtr,
    domain: sys::virDomainPtr,
    _: c_int,
    _: c_int,
    opaque: *mut c_void,
) -> c_int {
    // SAFETY: as `tell` asks.
    unsafe { tell(domain, opaque) };
    0
}

#[allow(unsafe_code, reason = "called by libvirt")]
unsafe extern "C" fn on_agent(
    _: sys::virConnectPtr,
    domain: sys::virDomainPtr,
    _: c_int,
    _: c_int,
    opaque: *mut c_void,
) {
    // SAFETY: as `tell` asks.
    unsafe { tell(domain, opaque) };
}

/// # Safety
/// `domain` and `opaque` are what libvirt hands to a callback registered by [`Registration::new`].
#[allow(unsafe_code, reason = "called by libvirt")]
unsafe fn tell(domain: sys::virDomainPtr, opaque: *mut c_void) {
    let mut uuid = [0; sys::VIR_UUID_STRING_BUFLEN as usize];
    // SAFETY: libvirt keeps the domain alive during the callback; the name belongs to it, and the
    // buffer has the length that libvirt documents.
    let (name, sink) = unsafe {
        if sys::virDomainGetUUIDString(domain, uuid.as_mut_ptr()) < 0 {
            return;
        }
        let name = sys::virDomainGetName(domain);
        if name.is_null() {
            return;
        }
        (CStr::from_ptr(name), &*opaque.cast::<Sink>())
    };
    // SAFETY: libvirt ended it with a zero.
    let uuid = unsafe { CStr::from_ptr(uuid.as_ptr()) };
    if let (Ok(uuid), Ok(name)) = (uuid.to_str(), name.to_str()) {
        sink(uuid, name);
    }
}

//! Guest images, built from the packages of the machine's own Debian mirror and kept in the cache.
//!
//! - [`light`]: one kernel with everything in its initrd. Some 24 MB, up in seconds under software
//!   emulation. For everything that is about the host and not about the guest.
//! - [`full`]: a real Debian with systemd, cloud-init, the guest agent and Squid.
//!
//! Both are GPT images with an EFI system partition that holds one unified kernel image. No loop
//! device, no mount, no boot loader is needed to make them.

mod cpio;
mod disk;
pub mod full;
mod kernel;
pub mod light;
mod packages;

use std::path::PathBuf;

/// A bootable image on this machine.
#[derive(Debug, Clone)]
pub struct Image {
    /// The qcow2 file, to be copied and never changed.
    pub path: PathBuf,
}

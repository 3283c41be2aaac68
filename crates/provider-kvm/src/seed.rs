//! The NoCloud seed: what cloud-init in the guest reads.
//!
//! Built in memory and the same byte for byte each time. Layout and names:
//! <https://cloudinit.readthedocs.io/en/latest/reference/datasources/nocloud.html>.

use data_encoding::BASE64;
use hadris_fs::{Content, NoClock, Node, Tree};
use hadris_iso::{IsoId, IsoOptions};
use hadris_storage::{BlockSize, MemDevice};

const SECTOR: BlockSize = match BlockSize::new(2048) {
    Some(size) => size,
    None => panic!("2048 is a power of two"),
};

/// Installs and starts the guest agent; a script, because cloud-init drops vendor-data settings
/// that the user's own document also has, whatever the merge settings, but runs scripts of both
/// (cloud-init#3411).
pub const AGENT_SCRIPT: &str = include_str!("agent.sh");

/// Separates the parts of a multipart vendor-data.
const BOUNDARY: &str = "==egress-vendor-data==";

/// The image could not be laid out.
#[derive(Debug, Clone, thiserror::Error)]
#[error("the seed image could not be built: {0}")]
pub struct SeedError(String);

/// What goes into a seed.
#[derive(Clone, Copy)]
pub struct Seed<'s> {
    /// instance-id and host name.
    pub instance: &'s str,
    /// Untouched.
    pub user_data: &'s [u8],
    pub vendor_data: Option<&'s [u8]>,
    pub network_config: Option<&'s [u8]>,
    pub install_guest_agent: bool,
}

impl Seed<'_> {
    /// The ISO 9660 image, label `cidata`.
    ///
    /// # Errors
    /// [`SeedError`].
    pub fn build(&self) -> Result<Vec<u8>, SeedError> {
        let mut tree = Tree::new();
        let mut file = |name: &str, content: Vec<u8>| {
            tree.insert(name, Node::file(Content::bytes(content)))
                .map_err(|error| SeedError(format!("{name}: {error}")))
        };
        file("meta-data", self.meta_data().into_bytes())?;
        file("user-data", self.user_data.to_vec())?;
        file("vendor-data", self.vendor_data())?;
        if let Some(config) = self.network_config {
            file("network-config", config.to_vec())?;
        }
        let options = IsoOptions::default()
            .with_id(IsoId::Volume, "cidata")
            .with_joliet()
            .with_rock_ridge()
            // No clock: the same content is the same image.
            .with_time(NoClock::TIME);
        let plan = hadris_iso::plan(&tree, &options).map_err(|e| SeedError(e.to_string()))?;
        let size = usize::try_from(plan.size()).map_err(|e| SeedError(e.to_string()))?;
        let mut device = MemDevice::new(vec![0; size], SECTOR);
        hadris_iso::sync::write(&mut device, &tree, &options)
            .map_err(|e| SeedError(e.to_string()))?;
        Ok(device.into_inner())
    }

    fn meta_data(&self) -> String {
        format!("instance-id: {0}\nlocal-hostname: {0}\n", self.instance)
    }

    fn vendor_data(&self) -> Vec<u8> {
        match (self.install_guest_agent, self.vendor_data) {
            (true, None) => AGENT_SCRIPT.as_bytes().to_vec(),
            (true, Some(own)) => multipart(own).into_bytes(),
            (false, Some(own)) => own.to_vec(),
            (false, None) => Vec::new(),
        }
    }
}

/// Both, as MIME. cloud-init takes a document for MIME when it finds `MIME-Version:` in its first
/// bytes, and looks into a text/plain part to see what it is.
fn multipart(own: &[u8]) -> String {
    let part = |kind: &str, name: &str, content: &[u8]| {
        let mut encoded = String::new();
        for line in BASE64.encode(content).as_bytes().chunks(76) {
            encoded.push_str(&String::from_utf8_lossy(line));
            encoded.push('\n');
        }
        format!(
            "--{BOUNDARY}\nContent-Type: {kind}; charset=\"utf-8\"\nMIME-Version: 1.0\nContent-Transfer-Encoding: base64\nContent-Disposition: attachment; filename=\"{name}\"\n\n{encoded}\n"
        )
    };
    format!(
        "MIME-Version: 1.0\nContent-Type: multipart/mixed; boundary=\"{BOUNDARY}\"\n\n{}{}--{BOUNDARY}--\n",
        part(
            "text/x-shellscript",
            "10-guest-agent.sh",
            AGENT_SCRIPT.as_bytes()
        ),
        part("text/plain", "20-vendor-data", own),
    )
}

#[cfg(test)]
mod tests;

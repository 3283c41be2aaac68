//! What QEMU on a host can do, as libvirt tells it.

use crate::host::calls::Calls;
use crate::host::error::LibvirtError;
use crate::xml::Element;

/// Of one kind of domain (`kvm`, `qemu`) on q35.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// A UEFI firmware is installed.
    pub uefi: bool,
    /// One of them works without secure boot.
    pub uefi_without_secure_boot: bool,
}

impl Capabilities {
    /// # Errors
    /// The host has no such domains (for `kvm`: no hardware virtualisation), or libvirt's own.
    pub fn read(calls: &Calls<'_>, kind: &'static str) -> Result<Self, LibvirtError> {
        let rpc = "virConnectGetDomainCapabilities";
        let xml = calls.rpc(rpc, kind, |conn| {
            conn.domain_capabilities(None, Some("x86_64"), Some("q35"), Some(kind), 0)
        })?;
        Self::parse(&xml).map_err(|error| LibvirtError::odd(rpc, error))
    }

    fn parse(xml: &str) -> Result<Self, String> {
        let root = Element::parse(xml).map_err(|error| error.to_string())?;
        let has = |path: &[&str], name: &str, value: &str| {
            root.find(path).is_some_and(|parent| {
                parent
                    .all("enum")
                    .filter(|e| e.get("name") == Some(name))
                    .any(|e| e.all("value").any(|v| v.text.trim() == value))
            })
        };
        let uefi = has(&["os"], "firmware", "efi");
        Ok(Self {
            uefi,
            uefi_without_secure_boot: uefi && has(&["os", "loader"], "secure", "no"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document(firmware: &str, secure: &str) -> String {
        format!(
            "<domainCapabilities><os supported='yes'><enum name='firmware'>{firmware}</enum><loader supported='yes'><value>/x.fd</value><enum name='type'><value>rom</value></enum><enum name='secure'>{secure}</enum></loader></os></domainCapabilities>"
        )
    }

    #[test]
    fn firmware_is_found() {
        for (firmware, secure, expect) in [
            (
                "<value>efi</value><value>bios</value>",
                "<value>yes</value><value>no</value>",
                (true, true),
            ),
            ("<value>efi</value>", "<value>yes</value>", (true, false)),
            ("<value>bios</value>", "<value>no</value>", (false, false)),
            ("", "", (false, false)),
        ] {
            let found = Capabilities::parse(&document(firmware, secure)).unwrap();
            assert_eq!((found.uefi, found.uefi_without_secure_boot), expect);
        }
        assert!(Capabilities::parse("x").is_err());
    }
}

//! Where a new instance listens and where it leaves from.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};

use egress_core::ErrorClass;
use egress_provider::{CreateRequest, Operation, ProviderError};

use crate::pool::number_of;
use crate::record::Record;
use crate::shared::Shared;

impl Shared {
    /// Which of `bindAddresses` the instance leaves from.
    pub(crate) fn choose_bind(
        &self,
        request: &CreateRequest,
        records: &[Record],
    ) -> Result<Option<String>, ProviderError> {
        let known = &self.config.bind_addresses;
        match &request.placement.zone {
            Some(zone) if known.contains_key(zone) => Ok(Some(zone.clone())),
            Some(zone) => {
                let known: Vec<&str> = known.keys().map(String::as_str).collect();
                let message = if known.is_empty() {
                    format!(
                        "placement.zone {zone:?} names no source address: this provider has no \
                         bindAddresses; remove the zone or configure them"
                    )
                } else {
                    format!(
                        "placement.zone {zone:?} names no source address: bindAddresses has {}",
                        known.join(", ")
                    )
                };
                Err(self.error(
                    ErrorClass::Permanent,
                    Operation::Create,
                    request.name.as_str(),
                    message,
                ))
            }
            None => {
                // The least used; among equals by the name, so that few proxies spread too.
                let turn = usize::try_from(number_of(&request.name) % known.len().max(1) as u64)
                    .unwrap_or_default();
                let used = |name: &str| {
                    records
                        .iter()
                        .filter(|r| r.bind.as_deref() == Some(name))
                        .count()
                };
                let names: Vec<&String> = known.keys().collect();
                let (early, late) = names.split_at(turn);
                Ok(late
                    .iter()
                    .chain(early)
                    .min_by_key(|name| used(name))
                    .map(|name| (*name).clone()))
            }
        }
    }

    /// The first free address and port.
    pub(crate) fn choose_listen(
        &self,
        request: &CreateRequest,
        records: &[Record],
    ) -> Result<SocketAddr, ProviderError> {
        let used: BTreeSet<SocketAddr> = records.iter().map(Record::listen).collect();
        let candidates = self
            .config
            .pool
            .candidates(&request.name, request.port, &used);
        let fail = |class, message: String| {
            Err(self.error(class, Operation::Create, request.name.as_str(), message))
        };
        let mut last = None;
        for candidate in candidates {
            match TcpListener::bind(candidate) {
                Ok(_) => return Ok(candidate),
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    return fail(
                        ErrorClass::Permanent,
                        format!(
                            "port {} may not be listened on ({error}): choose a port from 1024 \
                             on, or give the operator CAP_NET_BIND_SERVICE",
                            candidate.port()
                        ),
                    );
                }
                Err(error) => last = Some((candidate, error)),
            }
        }
        match last {
            Some((candidate, error)) if error.kind() == io::ErrorKind::AddrNotAvailable => fail(
                ErrorClass::Transient,
                format!(
                    "{} is not an address of this machine now: check listenAddresses",
                    candidate.ip()
                ),
            ),
            Some((candidate, error)) if error.kind() != io::ErrorKind::AddrInUse => fail(
                ErrorClass::Transient,
                format!("{candidate} cannot be listened on: {error}"),
            ),
            _ => fail(
                ErrorClass::QuotaExceeded,
                match &self.config.pool.ports {
                    Some(ports) => format!(
                        "no free port: all from {} to {} are taken; widen portRange",
                        ports.start(),
                        ports.end()
                    ),
                    None => format!(
                        "no free address for port {}: all are taken; widen listenAddresses",
                        request.port
                    ),
                },
            ),
        }
    }

    /// Without this address every connection would fail; an uplink may come back by itself.
    pub(crate) fn check_source(
        &self,
        record: &Record,
        address: IpAddr,
    ) -> Result<(), ProviderError> {
        UdpSocket::bind(SocketAddr::new(address, 0))
            .map(|_| ())
            .map_err(|error| {
                self.error(
                    ErrorClass::Transient,
                    Operation::Create,
                    record.name().as_str(),
                    format!(
                        "source address {address} cannot be used: {error}; check bindAddresses"
                    ),
                )
                .caused_by(error)
            })
    }
}

//! What is run for an instance.

use std::path::{Path, PathBuf};

use egress_core::ErrorClass;
use egress_forward_proxy::{Config, Timeouts};
use egress_provider::{Operation, ProviderError};

use crate::config::Program;
use crate::record::{Record, write_durably};
use crate::shared::Shared;
use crate::squid;
use crate::supervise::Command;

impl Shared {
    /// What the process of this record is to be told.
    pub(crate) fn proxy_config(&self, record: &Record) -> Result<Config, ProviderError> {
        let bind_addresses = match &record.bind {
            None => Vec::new(),
            Some(name) => self
                .config
                .bind_addresses
                .get(name)
                .cloned()
                .ok_or_else(|| {
                    self.error(
                        ErrorClass::Permanent,
                        Operation::Create,
                        record.name().as_str(),
                        format!("bindAddresses has {name:?} no more"),
                    )
                })?,
        };
        for address in &bind_addresses {
            self.check_source(record, *address)?;
        }
        Ok(Config {
            listen: vec![record.listen()],
            bind_addresses,
            allow_clients: self.config.allow_clients.clone(),
            allow_targets: self.config.allow_targets.clone(),
            max_connections: self.config.max_connections,
            timeouts: Timeouts::default(),
        })
    }

    pub(crate) fn conf_path(&self, name: &str) -> PathBuf {
        self.records.dir().join(format!("{name}.conf"))
    }

    pub(crate) fn command(&self, record: &Record) -> Result<Command, ProviderError> {
        let proxy = self.proxy_config(record)?;
        let name = record.name();
        let (program, arg0, args) = match &self.config.program {
            Program::Builtin => {
                let args = self.builtin.args.iter().cloned();
                (
                    self.builtin.program.clone(),
                    self.builtin.arg0.clone(),
                    args.chain(proxy.to_args()).collect(),
                )
            }
            Program::Squid(path) => {
                self.check_squid(path, name.as_str())?;
                let conf = self.conf_path(name.as_str());
                write_durably(&conf, squid::config(&proxy).as_bytes())
                    .map_err(|error| self.io(Operation::Create, name.as_str(), error))?;
                let args = vec![
                    "-N".to_owned(),
                    "-d1".to_owned(),
                    "-n".to_owned(),
                    squid::service_name(name.as_str()),
                    "-f".to_owned(),
                    conf.to_string_lossy().into_owned(),
                ];
                (path.clone(), None, args)
            }
        };
        Ok(Command {
            program,
            arg0,
            args: args.into_iter().map(Into::into).collect(),
            die_with_parent: self.config.stop_on_exit,
        })
    }

    pub(crate) fn check_squid(&self, path: &Path, instance: &str) -> Result<(), ProviderError> {
        if path.is_file() {
            return Ok(());
        }
        Err(self.error(
            ErrorClass::Permanent,
            Operation::Create,
            instance,
            format!(
                "{} is not there: install squid, set squidPath, or use program: builtin",
                path.display()
            ),
        ))
    }
}

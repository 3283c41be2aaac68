//! The configuration that Squid is run with: one small forward proxy, nothing cached, nothing kept.

use std::fmt::Write as _;

use egress_forward_proxy::Config;
use egress_forward_proxy::policy::TargetPolicy;

/// More would make Squid size its tables for it (squid#2483).
const MAX_FILE_DESCRIPTORS: usize = 8192;

/// `squid.conf` for what the built-in proxy would be told.
pub(crate) fn config(proxy: &Config) -> String {
    let mut text = String::from("# Written by the operator; changes are lost.\n");
    let mut line = |content: String| {
        text.push_str(&content);
        text.push('\n');
    };
    for listen in &proxy.listen {
        line(format!("http_port {listen}"));
    }
    line(format!("acl clients src {}", joined(&proxy.allow_clients)));
    // By the resolved address: a name can mean anything (squid#1161). The last ones are the
    // link-local IPv4 addresses as NAT64 and 6to4 write them.
    line(format!(
        "acl never dst {} 64:ff9b::a9fe:0/112 2002:a9fe::/32",
        joined(TargetPolicy::never())
    ));
    line(format!("acl inner dst {}", joined(TargetPolicy::inner())));
    if !proxy.allow_targets.is_empty() {
        line(format!("acl allowed dst {}", joined(&proxy.allow_targets)));
    }
    line("acl everything src all".to_owned());
    line("http_access deny !clients".to_owned());
    line("http_access deny never".to_owned());
    if !proxy.allow_targets.is_empty() {
        line("http_access allow allowed".to_owned());
    }
    line("http_access deny inner".to_owned());
    line("http_access allow everything".to_owned());
    source_addresses(proxy, &mut line);
    let descriptors = (2 * proxy.max_connections + 64).min(MAX_FILE_DESCRIPTORS);
    line(format!("max_filedescriptors {descriptors}"));
    for fixed in [
        "visible_hostname proxy",
        "via off",
        "forwarded_for delete",
        "httpd_suppress_version_string on",
        "shutdown_lifetime 1 second",
        "pid_filename none",
        "cache deny all",
        "cache_mem 0 MB",
        "memory_pools off",
        "digest_generation off",
        "access_log none",
        "cache_store_log none",
        "cache_log /dev/null",
        "coredump_dir none",
        "netdb_filename none",
        "pinger_enable off",
        "icp_port 0",
        "htcp_port 0",
        "connect_timeout 10 seconds",
        "forward_timeout 30 seconds",
        "request_header_max_size 32 KB",
        "client_lifetime 1 day",
    ] {
        line(fixed.to_owned());
    }
    text
}

/// With an address of one family only, the other family is given a source from which nothing is
/// reached: else such a target would be reached by another path than the one that was asked for.
fn source_addresses(proxy: &Config, line: &mut impl FnMut(String)) {
    if proxy.bind_addresses.is_empty() {
        return;
    }
    let of = |v4: bool| proxy.bind_addresses.iter().find(|a| a.is_ipv4() == v4);
    let v4 = of(true).map_or_else(|| "127.0.0.1".to_owned(), ToString::to_string);
    let v6 = of(false).map_or_else(|| "::1".to_owned(), ToString::to_string);
    line(format!("tcp_outgoing_address {v4}"));
    line(format!("tcp_outgoing_address {v6}"));
}

fn joined<T: std::fmt::Display>(items: impl IntoIterator<Item = T>) -> String {
    items.into_iter().fold(String::new(), |mut all, item| {
        if !all.is_empty() {
            all.push(' ');
        }
        // Writing into a string cannot fail.
        let _ = write!(all, "{item}");
        all
    })
}

/// Squid keeps shared memory by this name: two of one name disturb each other.
pub(crate) fn service_name(instance: &str) -> String {
    instance
        .chars()
        .filter(char::is_ascii_alphanumeric)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_its_clients_and_denies_metadata_before_anything_is_allowed() {
        let mut proxy = Config::new("[::1]:3128".parse().unwrap());
        proxy.allow_targets = vec!["127.0.0.0/8".parse().unwrap()];
        proxy.bind_addresses = vec!["192.0.2.7".parse().unwrap()];
        let text = config(&proxy);
        let access: Vec<&str> = text
            .lines()
            .filter(|l| l.starts_with("http_access"))
            .collect();
        assert_eq!(
            access,
            [
                "http_access deny !clients",
                "http_access deny never",
                "http_access allow allowed",
                "http_access deny inner",
                "http_access allow everything",
            ]
        );
        for wanted in [
            "http_port [::1]:3128",
            "acl clients src 127.0.0.0/8 ::1/128",
            "tcp_outgoing_address 192.0.2.7",
            "tcp_outgoing_address ::1",
            "max_filedescriptors 2112",
            "shutdown_lifetime 1 second",
            "pid_filename none",
            "via off",
            "forwarded_for delete",
        ] {
            assert!(
                text.lines().any(|l| l == wanted),
                "{wanted:?} is not in\n{text}"
            );
        }
        let never = text.lines().find(|l| l.starts_with("acl never")).unwrap();
        assert!(never.contains("169.254.0.0/16") && never.contains("fe80::/10"));
    }

    #[test]
    fn descriptors_are_capped() {
        let mut proxy = Config::new("127.0.0.1:1".parse().unwrap());
        proxy.max_connections = 60_000;
        assert!(config(&proxy).contains("max_filedescriptors 8192\n"));
    }
}

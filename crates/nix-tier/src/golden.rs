//! What the modules render, as it is checked in under `tests/golden/MACHINE/`.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

/// Set to write the golden files anew instead of comparing.
pub const BLESS: &str = "EGRESS_BLESS";

/// Where a machine's golden files are.
pub fn dir(host: &str) -> PathBuf {
    crate::root().join("tests/golden").join(host)
}

/// The golden files of a machine, by name.
///
/// # Errors
/// When they cannot be read.
pub fn read(host: &str) -> Result<BTreeMap<String, String>> {
    let mut files = BTreeMap::new();
    collect(&dir(host), &dir(host), &mut files)?;
    Ok(files)
}

fn collect(base: &Path, dir: &Path, files: &mut BTreeMap<String, String>) -> Result<()> {
    let entries = fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))?;
    for entry in entries {
        let path = entry?.path();
        if path.is_dir() {
            collect(base, &path, files)?;
        } else {
            let name = path.strip_prefix(base)?.to_string_lossy().into_owned();
            files.insert(name, fs::read_to_string(&path)?);
        }
    }
    Ok(())
}

/// Compares, or writes when [`BLESS`] is set; gives a sentence for each difference.
///
/// # Errors
/// When files cannot be read or written.
pub fn compare(host: &str, rendered: &BTreeMap<String, String>) -> Result<Vec<String>> {
    let rendered: BTreeMap<String, String> = rendered
        .iter()
        .filter(|(name, _)| is_ours(name))
        .map(|(name, text)| (name.clone(), normal(text)))
        .collect();
    if std::env::var_os(BLESS).is_some() {
        if dir(host).exists() {
            fs::remove_dir_all(dir(host))?;
        }
        for (name, text) in &rendered {
            let path = dir(host).join(name);
            if let Some(parent) = path.parent() {
                fs::create_dir_all(parent)?;
            }
            fs::write(path, text)?;
        }
        return Ok(Vec::new());
    }
    let golden = read(host)?;
    let mut faults = Vec::new();
    for (name, text) in &rendered {
        match golden.get(name) {
            None => faults.push(format!("{host}/{name} is rendered and has no golden file")),
            Some(golden) if golden != text => {
                faults.push(format!(
                    "{host}/{name} differs:\n{}",
                    difference(golden, text)
                ));
            }
            Some(_) => {}
        }
    }
    for name in golden.keys().filter(|name| !rendered.contains_key(*name)) {
        faults.push(format!(
            "{host}/{name} has a golden file and is not rendered"
        ));
    }
    Ok(faults)
}

/// sshd's whole configuration is mostly nixpkgs' own and changes with it; our part of it is
/// `ssh/match.conf`.
fn is_ours(name: &str) -> bool {
    name != "ssh/sshd_config"
}

/// Lines of one and not of the other, in order.
fn difference(golden: &str, rendered: &str) -> String {
    let only = |of: &str, other: &str, sign: char| -> String {
        let there: std::collections::BTreeSet<&str> = other.lines().collect();
        of.lines()
            .filter(|line| !there.contains(line))
            .map(|line| format!("  {sign} {line}\n"))
            .collect()
    };
    only(golden, rendered, '-') + &only(rendered, golden, '+')
}

/// Without what differs between stores and nixpkgs versions: hashes, versions, and the environment
/// that NixOS gives to every service.
pub fn normal(text: &str) -> String {
    let kept = text.lines().filter(|line| {
        !["PATH", "LOCALE_ARCHIVE", "TZDIR"]
            .iter()
            .any(|name| line.starts_with(&format!("Environment=\"{name}=")))
    });
    let mut out: String = kept
        .map(|line| store_paths(line, plain_name) + "\n")
        .collect();
    while out.ends_with("\n\n") {
        out.pop();
    }
    out
}

/// Every store path replaced, for what is run here: programs by one that is there.
pub fn runnable(text: &str, program: &str) -> String {
    text.lines()
        .map(|line| store_paths(line, |_, _| program.to_owned()) + "\n")
        .collect()
}

/// `/nix/store/NAME/rest`, without hash and version.
fn plain_name(name: &str, rest: &str) -> String {
    let version = name
        .match_indices('-')
        .find(|(at, _)| name[at + 1..].starts_with(|c: char| c.is_ascii_digit()));
    let name = version.map_or(name, |(at, _)| &name[..at]);
    format!("/nix/store/{name}{rest}")
}

/// Calls `replace` with the name and what follows it, for each store path of any store.
fn store_paths(line: &str, replace: impl Fn(&str, &str) -> String) -> String {
    const STORE: &str = "/store/";
    const HASH: usize = 32;
    let end_of = |text: &str| {
        text.find(|c: char| c.is_whitespace() || "\"':;,)<>".contains(c))
            .unwrap_or(text.len())
    };
    let mut out = String::new();
    let mut left = line;
    while let Some(at) = left.find(STORE) {
        let after = &left[at + STORE.len()..];
        let is_path = after.len() > HASH
            && after.is_char_boundary(HASH)
            && after[..HASH]
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit())
            && after[HASH..].starts_with('-');
        if !is_path {
            out.push_str(&left[..at + STORE.len()]);
            left = after;
            continue;
        }
        let before = &left[..at];
        // The store's own directory is part of the path: back to where the word begins.
        let start = before
            .rfind(|c: char| c.is_whitespace() || "\"'=:(>".contains(c))
            .map_or(0, |delimiter| delimiter + 1);
        out.push_str(&before[..start]);
        let path = &after[HASH + 1..];
        let path = &path[..end_of(path)];
        let (name, rest) = path
            .find('/')
            .map_or((path, ""), |slash| path.split_at(slash));
        out.push_str(&replace(name, rest));
        left = &after[HASH + 1 + path.len()..];
    }
    out + left
}

#[cfg(test)]
mod tests {
    use super::*;

    const HASH: &str = "vkjqn4avqv1n344xj3kmsfm51mbc6m4k";

    #[test]
    fn store_paths_lose_hash_version_and_place() {
        let line = format!(
            "ExecStart=\"/root/x/store/{HASH}-tool-0.1.0/bin/tool\" /nix/store/{HASH}-run.sh a"
        );
        assert_eq!(
            normal(&line),
            "ExecStart=\"/nix/store/tool/bin/tool\" /nix/store/run.sh a\n"
        );
        assert_eq!(
            runnable(&line, "/bin/true"),
            "ExecStart=\"/bin/true\" /bin/true a\n"
        );
    }

    #[test]
    fn other_paths_stay() {
        let line = "ExecStart=/usr/store/short /data/store/UPPERCASEUPPERCASEUPPERCASEUPPE-x";
        assert_eq!(normal(line), format!("{line}\n"));
    }

    #[test]
    fn what_nixos_gives_to_every_service_is_left_out() {
        assert_eq!(
            normal("Environment=\"PATH=/x\"\nType=exec\n\n"),
            "Type=exec\n"
        );
    }
}

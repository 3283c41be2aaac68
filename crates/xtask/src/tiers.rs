//! `cargo xtask test`: the tiers, their times, and the closing line.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::ValueEnum;

use crate::run::{self, Counts, cargo};
use crate::setup;

#[derive(clap::Args)]
pub struct Args {
    /// The tiers to run (default: all).
    tiers: Vec<Tier>,
    /// The inner loop: unit tests only, without lints.
    #[arg(long)]
    fast: bool,
    /// Name the tiers and what each needs, and run nothing.
    #[arg(long)]
    list: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
enum Tier {
    Unit,
    Local,
    Kvm,
    Kubernetes,
    Systemd,
    Nix,
}

impl Tier {
    const ALL: [Self; 6] = [
        Self::Unit,
        Self::Local,
        Self::Kvm,
        Self::Kubernetes,
        Self::Systemd,
        Self::Nix,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Unit => "unit",
            Self::Local => "local",
            Self::Kvm => "kvm",
            Self::Kubernetes => "kubernetes",
            Self::Systemd => "systemd",
            Self::Nix => "nix",
        }
    }

    fn what(self) -> &'static str {
        match self {
            Self::Unit => "formatting, lints, generated files, and all unit and property tests",
            Self::Local => {
                "the operator, kubectl and real proxies on loopback; real Squid, sshd; needs Debian packages, installed when missing"
            }
            Self::Kvm => {
                "libvirtd, QEMU, OVMF, guests and sshd in a network namespace; needs root and Debian packages, installed when missing"
            }
            Self::Kubernetes => "a real kube-apiserver with etcd (not written yet)",
            Self::Systemd => "a real systemd with journald and D-Bus (not written yet)",
            Self::Nix => "the flake and the NixOS modules (not written yet)",
        }
    }

    fn run(self) -> Result<Counts> {
        match self {
            Self::Unit => unit(),
            Self::Local => local(),
            Self::Kvm => kvm(),
            Self::Kubernetes | Self::Systemd | Self::Nix => Ok(Counts {
                skipped: vec![format!(
                    "the {} tier: its tests are not written yet",
                    self.name()
                )],
                ..Counts::default()
            }),
        }
    }
}

pub fn run(args: &Args) -> Result<bool> {
    if args.list {
        for tier in Tier::ALL {
            println!("{:<11} {}", tier.name(), tier.what());
        }
        return Ok(true);
    }
    setup::ensure(setup::BUILD)?;
    let wanted: BTreeSet<Tier> = args.tiers.iter().copied().collect();
    let mut total = Counts::default();
    let mut times: Vec<(&str, Duration, Counts)> = Vec::new();
    if args.fast {
        let start = Instant::now();
        let counts = unit_tests()?;
        times.push(("unit", start.elapsed(), counts));
    } else {
        let chosen = Tier::ALL
            .into_iter()
            .filter(|t| wanted.is_empty() || wanted.contains(t));
        for tier in chosen {
            println!("== {}: {}", tier.name(), tier.what());
            let start = Instant::now();
            let counts = tier.run()?;
            times.push((tier.name(), start.elapsed(), counts));
        }
    }
    println!(
        "\n{:<12} {:>8} {:>7} {:>7} {:>8}",
        "tier", "time", "passed", "failed", "skipped"
    );
    for (name, time, counts) in &times {
        println!(
            "{name:<12} {:>6.1} s {:>7} {:>7} {:>8}",
            time.as_secs_f64(),
            counts.passed,
            counts.failed,
            counts.skipped.len()
        );
        total.add(counts);
    }
    if !total.skipped.is_empty() {
        println!("\nskipped:");
        for reason in &total.skipped {
            println!("  {reason}");
        }
    }
    println!("\n{} passed, {} failed", total.passed, total.failed);
    Ok(total.failed == 0)
}

pub fn lint_only() -> Result<bool> {
    setup::ensure(setup::BUILD)?;
    let counts = lint()?;
    println!("\n{} passed, {} failed", counts.passed, counts.failed);
    Ok(counts.failed == 0)
}

fn unit() -> Result<Counts> {
    let mut counts = lint()?;
    counts.add(&unit_tests()?);
    counts.add(&generated()?);
    Ok(counts)
}

fn lint() -> Result<Counts> {
    let mut counts = Counts::default();
    let mut fmt = cargo();
    fmt.args(["fmt", "--all", "--check"]);
    counts.add(&run::check("cargo fmt", fmt)?);
    let mut clippy = cargo();
    clippy.args([
        "clippy",
        "--workspace",
        "--all-targets",
        "--locked",
        "--",
        "-D",
        "warnings",
    ]);
    counts.add(&run::check("cargo clippy", clippy)?);
    let mut doc = cargo();
    doc.args([
        "doc",
        "--workspace",
        "--no-deps",
        "--locked",
        "--document-private-items",
    ])
    .env("RUSTDOCFLAGS", "-D warnings");
    counts.add(&run::check("cargo doc", doc)?);
    let has_deny = std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|p| p.join("cargo-deny").exists()));
    if has_deny {
        let mut deny = cargo();
        deny.args(["deny", "--offline", "check", "licenses", "sources", "bans"]);
        counts.add(&run::check("cargo deny", deny)?);
    } else {
        counts.skipped.push(
            "cargo deny: cargo-deny is not installed (cargo install --locked cargo-deny)"
                .to_owned(),
        );
    }
    Ok(counts)
}

fn unit_tests() -> Result<Counts> {
    let mut command = cargo();
    command.args([
        "test",
        "--workspace",
        "--lib",
        "--bins",
        "--locked",
        "--no-fail-fast",
    ]);
    command.args(["--", "--show-output"]);
    run::tests("unit", command)
}

fn generated() -> Result<Counts> {
    let same = crate::generate::run(true)?;
    Ok(Counts {
        passed: usize::from(same),
        failed: usize::from(!same),
        ..Counts::default()
    })
}

fn local() -> Result<Counts> {
    setup::ensure(setup::LOCAL)?;
    let bins = run::build(false)?;
    let mut command = cargo();
    command.args([
        "test",
        "--workspace",
        "--test",
        "*",
        "--locked",
        "--no-fail-fast",
    ]);
    command.args(["--", "--show-output"]);
    operator_env(&mut command, &bins);
    let mut counts = run::tests("local", command)?;
    let mut demo = std::process::Command::new(bins.join("egress-demo"));
    demo.current_dir(run::root());
    operator_env(&mut demo, &bins);
    counts.add(&run::check("demo", demo)?);
    Ok(counts)
}

fn kvm() -> Result<Counts> {
    let bins = run::build(false)?;
    let mut command = cargo();
    command.args([
        "test",
        "--package",
        "egress-e2e",
        "--test",
        "kvm",
        "--locked",
        "--no-fail-fast",
    ]);
    command.args(["--", "--nocapture", "--test-threads=1"]);
    command.env("EGRESS_TIER_KVM", "1");
    operator_env(&mut command, &bins);
    run::tests("kvm", command)
}

fn operator_env(command: &mut std::process::Command, bins: &Path) {
    command.env("EGRESS_OPERATOR_BIN", bins.join("egress-proxies-operator"));
}

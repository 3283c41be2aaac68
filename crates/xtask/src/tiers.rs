//! `cargo xtask test`: the tiers, their times, and the closing line.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::ValueEnum;

use crate::run::{self, Counts, TestProgram, cargo};
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
            Self::Kubernetes => {
                "a real kube-apiserver with etcd, built from Go modules and cached; needs Go"
            }
            Self::Systemd => "a real systemd with journald and D-Bus (not written yet)",
            Self::Nix => {
                "the flake and the NixOS modules: parsed, evaluated with NIXPKGS=, rendered files run for real"
            }
        }
    }

    fn run(self, programs: &[TestProgram], bins: &Path) -> Result<Counts> {
        let chosen = programs.iter().filter(|p| self.has(p));
        let mut counts = Counts::default();
        match self {
            Self::Unit => {
                counts.add(&lint()?);
                counts.add(&generated(bins)?);
            }
            Self::Local => setup::ensure(setup::LOCAL)?,
            Self::Systemd => counts
                .skipped
                .push("the systemd tier: its tests are not written yet".to_owned()),
            // Its tests run real libvirt and sshd too.
            Self::Nix => {
                setup::ensure(setup::LOCAL)?;
                setup::ensure(setup::NIX)?;
            }
            Self::Kvm | Self::Kubernetes => {}
        }
        for program in chosen {
            let mut command = program.command();
            command.env("EGRESS_OPERATOR_BIN", bins.join("egress-proxies-operator"));
            match self {
                Self::Kvm => {
                    command
                        .env("EGRESS_TIER_KVM", "1")
                        .args(["--nocapture", "--test-threads=1"]);
                }
                Self::Kubernetes => {
                    command
                        .env("EGRESS_TIER_KUBERNETES", "1")
                        .arg("--show-output");
                }
                Self::Nix => {
                    command.env("EGRESS_TIER_NIX", "1");
                    command.args(["--show-output", "--test-threads=1"]);
                }
                Self::Unit | Self::Local | Self::Systemd => {
                    command.arg("--show-output");
                }
            }
            counts.add(&run::tests(program, command)?);
        }
        if self == Self::Local {
            let mut demo = std::process::Command::new(bins.join("egress-demo"));
            demo.env("EGRESS_OPERATOR_BIN", bins.join("egress-proxies-operator"));
            counts.add(&run::check("demo", demo)?);
        }
        Ok(counts)
    }

    /// Whether a test program belongs to this tier: each belongs to exactly one.
    fn has(self, program: &TestProgram) -> bool {
        let tier = match (program.package.as_str(), program.target.as_str()) {
            _ if !program.integration => Self::Unit,
            ("egress-e2e", "kvm") => Self::Kvm,
            ("egress-kube-suite", _) => Self::Kubernetes,
            ("egress-nix-tier", _) => Self::Nix,
            _ => Self::Local,
        };
        tier == self
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
    let start = Instant::now();
    let programs = run::build_tests(args.fast)?;
    if args.fast {
        let mut counts = Counts::default();
        for program in &programs {
            let mut command = program.command();
            command.arg("--show-output");
            counts.add(&run::tests(program, command)?);
        }
        times.push(("unit", start.elapsed(), counts));
    } else {
        let bins = run::build(false)?;
        times.push(("build", start.elapsed(), Counts::default()));
        let chosen = Tier::ALL
            .into_iter()
            .filter(|t| wanted.is_empty() || wanted.contains(t));
        for tier in chosen {
            println!("== {}: {}", tier.name(), tier.what());
            let start = Instant::now();
            let counts = tier.run(&programs, &bins)?;
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

fn generated(bins: &Path) -> Result<Counts> {
    let same = crate::generate::compare(bins)?;
    println!("  generated files: {}", if same { "ok" } else { "FAILED" });
    Ok(Counts {
        passed: usize::from(same),
        failed: usize::from(!same),
        ..Counts::default()
    })
}

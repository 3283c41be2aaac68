//! What the modules, the flake and the documents evaluate to.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use egress_nix_tier::exec::{find, output, run, within};
use egress_nix_tier::{eval, golden, root, skipped};

use crate::{EVALUATION, nixpkgs, tier, tools, vm_tests};

#[test]
fn nix_code_parses_and_is_formatted() {
    if !tier() {
        return;
    }
    let files = eval::all_files().unwrap();
    assert!(files.len() > 50, "only {} files were found", files.len());
    run(tools().nix("nix-instantiate").arg("--parse").args(&files)).unwrap();
    println!("{} Nix files parse", files.len());

    let home = std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cargo/bin"));
    let installed = |program: &str| {
        find(program).or_else(|| {
            home.as_ref()
                .map(|dir| dir.join(program))
                .filter(|p| p.exists())
        })
    };
    match installed("nixfmt") {
        Some(nixfmt) => {
            run(Command::new(nixfmt).arg("--check").args(&files)).unwrap();
            println!("{} Nix files are formatted", files.len());
        }
        None => skipped(
            "formatting of Nix code",
            "no nixfmt (cargo install nixfmt_rs)",
        ),
    }
    match installed("deadnix") {
        Some(deadnix) => {
            run(Command::new(deadnix).arg("--fail").args(&files)).unwrap();
        }
        None => skipped("unused Nix code", "no deadnix (cargo install deadnix)"),
    }
}

#[test]
fn each_assertion_says_what_to_do() {
    if !tier() {
        return;
    }
    let Some(nixpkgs) = nixpkgs("assertions", false) else {
        return;
    };
    let tools = tools();
    let _one = EVALUATION.lock();
    let examples = eval::failing(&tools, &nixpkgs).unwrap();
    let mut wrong = Vec::new();
    for (name, example) in &examples {
        let says = |sentence: &String| example.says.iter().all(|text| sentence.contains(text));
        if example.failed.len() != 1 || !example.failed.iter().all(says) {
            wrong.push(format!(
                "{name}: should say {:?}, says {:?}",
                example.says, example.failed
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let held = eval::attribute(&tools, &nixpkgs, "assertions").unwrap();
    let most = held
        .as_object()
        .into_iter()
        .flatten()
        .filter_map(|(_, count)| count.as_u64())
        .max();
    println!(
        "assertions: {} failing examples, each with its own sentence; {} hold on the largest machine",
        examples.len(),
        most.unwrap_or_default()
    );
}

#[test]
fn machines_evaluate_and_render_what_is_checked_in() {
    if !tier() {
        return;
    }
    let Some(nixpkgs) = nixpkgs("golden files against the NixOS modules", true) else {
        return;
    };
    let tools = tools();
    let _one = EVALUATION.lock();
    let mut faults = Vec::new();
    let names = eval::host_names().unwrap();
    let mut files = 0;
    for name in &names {
        let host = eval::host(&tools, &nixpkgs, name).unwrap();
        faults.extend(host.failed.iter().map(|f| format!("{name}: {f}")));
        faults.extend(host.warnings.iter().map(|w| format!("{name}: {w}")));
        faults.extend(golden::compare(name, &host.files).unwrap());
        files += host.files.len();
        guests_survive(name, &host.upstream, &mut faults);
        no_store_path_in_libvirt(name, &host.files, &mut faults);
        access_is_last(name, &host.files, &mut faults);
    }
    assert!(
        faults.is_empty(),
        "{}\nEGRESS_BLESS=1 writes the golden files",
        faults.join("\n")
    );
    println!(
        "evaluations: {} machines, {files} rendered files",
        names.len()
    );
}

/// Restarting libvirtd must not stop libvirt-guests, which would shut the guests down
/// (nixpkgs#485136), nor may a switch restart either (nixpkgs#92764).
fn guests_survive(host: &str, units: &BTreeMap<String, String>, faults: &mut Vec<String>) {
    if let Some(guests) = units.get("libvirt-guests.service") {
        for key in ["Requires=", "BindsTo=", "PartOf="] {
            if guests
                .lines()
                .any(|l| l.starts_with(key) && l.contains("libvirtd.service"))
            {
                faults.push(format!(
                    "{host}: libvirt-guests.service has {key} libvirtd.service"
                ));
            }
        }
    }
    for name in [
        "libvirt-guests.service",
        "libvirtd.service",
        "br0-netdev.service",
    ] {
        if let Some(unit) = units.get(name)
            && !unit.lines().any(|line| {
                // A reload of a bridge moves ports and leaves it as it is: nixpkgs#198267.
                line == "X-RestartIfChanged=false" || line == "X-ReloadIfChanged=true"
            })
        {
            faults.push(format!("{host}: a switch restarts {name}"));
        }
    }
    if let Some(unit) = units.get("libvirtd.service")
        && !unit.lines().any(|line| line == "KillMode=process")
    {
        faults.push(format!("{host}: stopping libvirtd.service stops guests"));
    }
}

/// nixpkgs#378894: what libvirt keeps outlives a generation.
fn no_store_path_in_libvirt(
    host: &str,
    files: &BTreeMap<String, String>,
    faults: &mut Vec<String>,
) {
    for (name, text) in files
        .iter()
        .filter(|(name, _)| name.starts_with("libvirt/"))
    {
        if text.contains("/store/") {
            faults.push(format!("{host}/{name} names the Nix store"));
        }
    }
}

/// Whatever follows a Match line belongs to it.
fn access_is_last(host: &str, files: &BTreeMap<String, String>, faults: &mut Vec<String>) {
    if let (Some(whole), Some(block)) = (files.get("ssh/sshd_config"), files.get("ssh/match.conf"))
        && !whole.trim_end().ends_with(block.trim_end())
    {
        faults.push(format!(
            "{host}: sshd's configuration does not end with our block:\n{whole}"
        ));
    }
}

#[test]
fn the_option_reference_is_what_the_modules_say() {
    if !tier() {
        return;
    }
    let Some(nixpkgs) = nixpkgs("option reference", true) else {
        return;
    };
    let tools = tools();
    let _one = EVALUATION.lock();
    let options = eval::attribute(&tools, &nixpkgs, "options").unwrap();
    let text = options["text"].as_str().unwrap();
    let path = root().join("docs/reference/nixos-options.md");
    if std::env::var_os(golden::BLESS).is_some() {
        fs::write(&path, text).unwrap();
    }
    assert!(
        fs::read_to_string(&path).unwrap() == text,
        "docs/reference/nixos-options.md is not what the modules say; EGRESS_BLESS=1 writes it"
    );
    println!("options: {}", options["count"]);
}

#[test]
fn every_output_of_the_flake_evaluates() {
    if !tier() {
        return;
    }
    let Some(nixpkgs) = nixpkgs("nix flake check --no-build", true) else {
        return;
    };
    let tools = tools();
    let _one = EVALUATION.lock();
    // A copy without build output: a path: flake is copied whole into the store.
    let copy = tempfile::tempdir().unwrap();
    for entry in [
        "flake.nix",
        "Cargo.toml",
        "Cargo.lock",
        "crates",
        "modules",
        "nix",
        "tests",
        "docs",
        "deploy",
        ".cargo",
        "LICENSE",
    ] {
        let from = root().join(entry);
        if from.exists() {
            run(Command::new("cp").arg("-r").arg(from).arg(copy.path())).unwrap();
        }
    }
    let checked = output(
        tools
            .nix("nix")
            .args(["--extra-experimental-features", "nix-command flakes"])
            .args(["flake", "check", "--no-build", "--no-write-lock-file"])
            .args(["--override-input", "nixpkgs"])
            .arg(format!("path:{}", nixpkgs.0.display()))
            .arg(format!("path:{}", copy.path().display())),
    )
    .unwrap();
    let said = String::from_utf8_lossy(&checked.stderr);
    assert!(checked.status.success(), "{said}");
    let evaluated = said
        .lines()
        .filter(|line| line.starts_with("derivation evaluated to"))
        .count();
    println!("flake: every output evaluates, {evaluated} derivations");
    // `tests/` is found automatically: a check for each file in it.
    for test in vm_tests() {
        let name = format!("checks.x86_64-linux.vm-{test}...");
        assert!(said.contains(&name), "no {name} in:\n{said}");
    }
}

#[test]
fn examples_in_documents_and_templates_are_right() {
    if !tier() {
        return;
    }
    let Some(nixpkgs) = nixpkgs("examples in documents", false) else {
        return;
    };
    let tools = tools();
    let _one = EVALUATION.lock();
    let dir = tempfile::tempdir().unwrap();
    let mut examples: Vec<PathBuf> = ["host/configuration", "fleet/operator", "fleet/hypervisor"]
        .iter()
        .map(|name| root().join(format!("nix/templates/{name}.nix")))
        .collect();
    for document in ["nixos", "appliance", "upgrade"] {
        let text = fs::read_to_string(root().join(format!("docs/howto/{document}.md"))).unwrap();
        for (number, block) in nix_blocks(&text).iter().enumerate() {
            let path = dir.path().join(format!("{document}-{number}.nix"));
            fs::write(&path, block).unwrap();
            examples.push(path);
        }
    }
    assert!(
        examples.len() > 8,
        "only {} examples were found",
        examples.len()
    );
    for file in &examples {
        let failed = eval::example(&tools, &nixpkgs, file).unwrap();
        assert!(failed.is_empty(), "{}: {failed:?}", file.display());
    }
    println!(
        "{} examples in documents and templates evaluate",
        examples.len()
    );
}

/// The ```nix blocks of a document: each a module.
fn nix_blocks(text: &str) -> Vec<String> {
    text.split("```nix\n")
        .skip(1)
        .filter_map(|rest| Some(rest.split_once("\n```")?.0.to_owned()))
        .collect()
}

#[test]
fn scripts_of_the_vm_tests_are_python() {
    if !tier() {
        return;
    }
    let Some(nixpkgs) = nixpkgs("scripts of the VM tests", true) else {
        return;
    };
    let tools = tools();
    let _one = EVALUATION.lock();
    let scripts = eval::attribute(&tools, &nixpkgs, "scripts").unwrap();
    let scripts = scripts.as_object().unwrap();
    let mut names: Vec<&String> = scripts.keys().collect();
    let mut expected = vm_tests();
    names.sort();
    expected.sort();
    assert_eq!(names, expected.iter().collect::<Vec<_>>());
    for (name, script) in scripts {
        let parsed = within(
            Command::new("python3").args(["-c", "import ast, sys; ast.parse(sys.stdin.read())"]),
            script.as_str().unwrap(),
            Duration::from_secs(30),
        )
        .unwrap();
        assert_eq!(parsed.success, Some(true), "{name}: {}", parsed.stderr);
    }
    println!("{} VM test scripts parse", scripts.len());
}

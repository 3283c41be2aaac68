use std::process::Command;

use gpt_disk_io::BlockIo;
use gpt_disk_types::{BlockSize as DiskBlockSize, Lba};

use super::*;

fn seed(user_data: &[u8]) -> Seed<'_> {
    Seed {
        instance: "proxy-aaaabbbbccccdddd",
        user_data,
        vendor_data: None,
        network_config: None,
        install_guest_agent: true,
    }
}

/// The image as a disk for `iso9660-rs`, a reader that shares no code with the writer.
struct Disk(Vec<u8>);

impl BlockIo for Disk {
    type Error = std::convert::Infallible;

    fn block_size(&self) -> DiskBlockSize {
        DiskBlockSize::new(2048).unwrap()
    }

    fn num_blocks(&mut self) -> Result<u64, Self::Error> {
        Ok(self.0.len() as u64 / 2048)
    }

    fn read_blocks(&mut self, start: Lba, out: &mut [u8]) -> Result<(), Self::Error> {
        let at = usize::try_from(start.0).unwrap() * 2048;
        out.copy_from_slice(&self.0[at..at + out.len()]);
        Ok(())
    }

    fn write_blocks(&mut self, _: Lba, _: &[u8]) -> Result<(), Self::Error> {
        unreachable!("only read")
    }

    fn flush(&mut self) -> Result<(), Self::Error> {
        Ok(())
    }
}

#[test]
fn the_same_content_is_the_same_image() {
    let one = seed(b"#cloud-config\n").build().unwrap();
    assert_eq!(one, seed(b"#cloud-config\n").build().unwrap());
    assert_ne!(one, seed(b"#cloud-config\nx").build().unwrap());
    assert_eq!(one.len() % 2048, 0);
    assert!(one.len() < 1024 * 1024, "{}", one.len());
}

#[test]
fn an_independent_reader_finds_label_and_content() {
    for user_data in [
        Vec::new(),
        b"#cloud-config\n".to_vec(),
        vec![0xa5; 300 * 1024],
    ] {
        let mut disk = Disk(seed(&user_data).build().unwrap());
        let volume = iso9660::mount(&mut disk, 0).unwrap();
        assert_eq!(
            String::from_utf8_lossy(&volume.volume_id).trim_end(),
            "cidata"
        );
        // This reader shows the plain tree: names cut to 8.3 there, but the content is the same.
        let mut contents = Vec::new();
        let entries: Vec<_> = iso9660::directory::iterator::DirectoryIterator::new(
            &mut disk,
            volume.root_extent_lba,
            volume.root_extent_len,
        )
        .filter_map(Result::ok)
        .filter(iso9660::FileEntry::is_file)
        .collect();
        for entry in &entries {
            let content = if entry.size == 0 {
                Vec::new()
            } else {
                iso9660::read_file_vec(&mut disk, entry).unwrap()
            };
            contents.push(content);
        }
        assert_eq!(contents.len(), 3, "{entries:?}");
        assert!(
            contents.contains(&user_data),
            "user-data of {} bytes",
            user_data.len()
        );
        let meta = b"instance-id: proxy-aaaabbbbccccdddd\nlocal-hostname: proxy-aaaabbbbccccdddd\n";
        assert!(contents.contains(&meta.to_vec()));
        assert!(contents.contains(&AGENT_SCRIPT.as_bytes().to_vec()));
    }
}

/// What other programs read out of the image, by the name that Linux shows.
fn read_with(tool: &str, args: &[&str], image: &[u8]) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("seed.iso");
    std::fs::write(&path, image).unwrap();
    let args = args
        .iter()
        .map(|a| a.replace("IMAGE", path.to_str().unwrap()));
    let out = Command::new(tool)
        .args(args)
        .output()
        .unwrap_or_else(|error| panic!("{tool}: {error} (install genisoimage and xorriso)"));
    assert!(
        out.status.success(),
        "{tool}: {}",
        String::from_utf8_lossy(&out.stderr)
    );
    out.stdout
}

#[test]
fn other_programs_find_the_exact_names_in_both_trees() {
    for user_data in [
        Vec::new(),
        vec![b'x'; 300 * 1024],
        b"#cloud-config\n".to_vec(),
    ] {
        let mut seed = seed(&user_data);
        seed.network_config = Some(b"version: 2\n");
        let image = seed.build().unwrap();
        for tree in ["-R", "-J"] {
            let listed = read_with("isoinfo", &["-f", tree, "-i", "IMAGE"], &image);
            let listed = String::from_utf8(listed).unwrap();
            let mut names: Vec<&str> = listed.lines().collect();
            names.sort_unstable();
            assert_eq!(
                names,
                [
                    "/meta-data",
                    "/network-config",
                    "/user-data",
                    "/vendor-data"
                ],
                "{tree}"
            );
            let read = read_with(
                "isoinfo",
                &[tree, "-x", "/user-data", "-i", "IMAGE"],
                &image,
            );
            assert!(
                read == user_data,
                "{tree}: {} bytes for {}",
                read.len(),
                user_data.len()
            );
        }
        let label = read_with("isoinfo", &["-d", "-i", "IMAGE"], &image);
        assert!(String::from_utf8_lossy(&label).contains("Volume id: cidata"));
        let listed = read_with(
            "xorriso",
            &["-indev", "IMAGE", "-find", "/", "-type", "f"],
            &image,
        );
        assert!(String::from_utf8_lossy(&listed).contains("/vendor-data"));
    }
}

#[test]
fn vendor_data_alone_or_as_a_multipart() {
    let mut seed = seed(b"");
    assert!(seed.vendor_data().starts_with(b"#!/bin/sh\n"));
    seed.vendor_data = Some(b"#cloud-config\npackages: [x]\n");
    let both = String::from_utf8(seed.vendor_data()).unwrap();
    assert!(
        both.starts_with("MIME-Version: 1.0\n"),
        "cloud-init looks at the first bytes only"
    );
    assert!(both.contains("text/x-shellscript") && both.contains("text/plain"));
    assert_eq!(both.matches(BOUNDARY).count(), 4);
    seed.install_guest_agent = false;
    assert_eq!(seed.vendor_data(), b"#cloud-config\npackages: [x]\n");
    seed.vendor_data = None;
    assert_eq!(seed.vendor_data(), b"");
}

#[test]
fn the_multipart_is_what_pythons_mime_parser_reads() {
    let mut seed = seed(b"");
    let own = "#cloud-config\nfoo: \"bär\"\n";
    seed.vendor_data = Some(own.as_bytes());
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("m"), seed.vendor_data()).unwrap();
    let script = "import email,sys\nm=email.message_from_string(open(sys.argv[1]).read())\nfor p in m.walk():\n  if not p.is_multipart():\n    print(p.get_content_type(), p.get_filename()); sys.stdout.write(p.get_payload(decode=True).decode())\n";
    let out = Command::new("python3")
        .args(["-c", script])
        .arg(dir.path().join("m"))
        .output()
        .unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    assert_eq!(
        text,
        format!(
            "text/x-shellscript 10-guest-agent.sh\n{AGENT_SCRIPT}text/plain 20-vendor-data\n{own}"
        )
    );
}

#[test]
fn the_agent_script_is_a_shell_script() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("agent.sh");
    std::fs::write(&path, AGENT_SCRIPT).unwrap();
    let checked = Command::new("sh").arg("-n").arg(&path).status().unwrap();
    assert!(checked.success());
}

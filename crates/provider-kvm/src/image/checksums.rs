//! SHA256SUMS and SHA512SUMS files, in the forms that distributions publish: `HASH  name`,
//! `HASH *name` (coreutils), `SHA256 (name) = HASH` (BSD, Fedora), inside or outside of a
//! PGP-signed message. The signature is not checked: trust comes from https.

use crate::config::ImageDigest;

/// The digest of the file of that name. When a file lists both kinds, the longer wins.
pub fn find(text: &str, file: &str) -> Option<ImageDigest> {
    let mut found: Option<ImageDigest> = None;
    for line in text.lines() {
        let line = line.trim();
        if let Some(digest) = digest_of(line, file)
            && found
                .as_ref()
                .is_none_or(|f| f.hex().len() < digest.hex().len())
        {
            found = Some(digest);
        }
    }
    found
}

fn digest_of(line: &str, file: &str) -> Option<ImageDigest> {
    if let Some((tag, rest)) = line.split_once(" (") {
        let (name, hex) = rest.rsplit_once(") = ")?;
        let digest = ImageDigest::parse(hex.trim())?;
        let right = match &digest {
            ImageDigest::Sha256(_) => tag.eq_ignore_ascii_case("SHA256"),
            ImageDigest::Sha512(_) => tag.eq_ignore_ascii_case("SHA512"),
        };
        return (right && is_file(name, file)).then_some(digest);
    }
    let (hex, name) = line.split_once(char::is_whitespace)?;
    let name = name.trim_start();
    let name = name.strip_prefix('*').unwrap_or(name);
    is_file(name, file)
        .then(|| ImageDigest::parse(hex))
        .flatten()
}

/// Some lists are written relative to a folder: `./name`.
fn is_file(name: &str, file: &str) -> bool {
    name == file || name.strip_prefix("./") == Some(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";

    #[test]
    fn the_forms_that_distributions_publish() {
        let b = "B".repeat(64);
        let long = "c".repeat(128);
        for text in [
            format!("{b}  other.img\n{A}  x.img\n"),
            format!("{A} *x.img\n"),
            format!("{A} ./x.img\n"),
            format!("SHA256 (other.img) = {b}\nSHA256 (x.img) = {A}\n"),
            format!(
                "-----BEGIN PGP SIGNED MESSAGE-----\nHash: SHA256\n\n# x.img: 3 bytes\nSHA256 (x.img) = {A}\n-----BEGIN PGP SIGNATURE-----\n\niQ=\n-----END PGP SIGNATURE-----\n"
            ),
            format!("{A}\tx.img\r\n"),
        ] {
            assert_eq!(
                find(&text, "x.img"),
                Some(ImageDigest::Sha256(A.into())),
                "{text}"
            );
        }
        assert_eq!(
            find(&format!("{A}  x.img\n{long}  x.img\n"), "x.img"),
            Some(ImageDigest::Sha512(long))
        );
        // Upper case is the same digest.
        assert_eq!(
            find(&format!("{b}  x\n"), "x").unwrap().hex(),
            "b".repeat(64)
        );
    }

    #[test]
    fn what_is_no_digest_of_that_file_is_none() {
        for text in [
            String::new(),
            format!("{A}  xx.img\n"),
            format!("{A}  dir/x.img\n"),
            format!("MD5 (x.img) = {}\n", "a".repeat(32)),
            format!("SHA512 (x.img) = {A}\n"),
            format!("{}  x.img\n", "g".repeat(64)),
            "<html>x.img</html>".into(),
        ] {
            assert_eq!(find(&text, "x.img"), None, "{text}");
        }
    }
}

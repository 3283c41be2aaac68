//! Downloads against a mirror that has the faults real ones have.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod support;

use std::time::Duration;

use bytes::Bytes;
use egress_core::ErrorClass;
use egress_provider_kvm::image::ImageError;
use egress_provider_kvm::image::download::{Downloader, HttpConfig, Progress};
use support::{Answer, Mirror, sha256};
use tokio::sync::mpsc;
use url::Url;

fn downloader() -> Downloader {
    Downloader::new(HttpConfig {
        connect_timeout: Duration::from_secs(5),
        read_timeout: Duration::from_secs(5),
        backoff: Duration::from_millis(5),
        extra_roots: Vec::new(),
    })
    .unwrap()
}

fn body() -> Vec<u8> {
    (0..300_000_u32).flat_map(u32::to_be_bytes).collect()
}

async fn get(mirror: &Mirror, path: &str) -> Result<(String, Vec<u8>), ImageError> {
    let (out, mut pieces) = mpsc::channel::<Bytes>(4);
    let collected = tokio::spawn(async move {
        let mut all = Vec::new();
        while let Some(piece) = pieces.recv().await {
            all.extend_from_slice(&piece);
        }
        all
    });
    let url = Url::parse(&mirror.url(path)).unwrap();
    let progress = Progress::default();
    let digest = downloader()
        .download("img", &url, false, &progress, &out)
        .await;
    drop(out);
    let all = collected.await.unwrap();
    digest.map(|digest| (digest.hex().to_owned(), all))
}

#[tokio::test]
async fn one_get_is_enough() {
    let mirror = Mirror::start().await;
    let no_length = Answer {
        no_length: true,
        ..Answer::of(body())
    };
    mirror.set("/plain", Answer::of(body()));
    mirror.set("/no-length", no_length);
    for path in ["/plain", "/no-length"] {
        let (digest, all) = get(&mirror, path).await.unwrap();
        assert!(all == body(), "{path}");
        assert_eq!(digest, sha256(&body()), "{path}");
        assert_eq!(mirror.count(path), 1, "{path}");
    }
}

#[tokio::test]
async fn a_broken_transfer_goes_on_where_it_was() {
    let mirror = Mirror::start().await;
    let broken = Answer {
        break_off: Some((3, 200_000)),
        etag: Some("\"a\"".into()),
        ..Answer::of(body())
    };
    mirror.set("/ranges", broken.clone());
    mirror.set(
        "/no-ranges",
        Answer {
            no_ranges: true,
            break_off: Some((2, 200_000)),
            ..broken
        },
    );
    for path in ["/ranges", "/no-ranges"] {
        let (digest, all) = get(&mirror, path).await.unwrap();
        assert!(all == body(), "{path}: {} bytes", all.len());
        assert_eq!(digest, sha256(&body()));
    }
    let starts: Vec<_> = mirror
        .requests()
        .into_iter()
        .filter(|(path, _)| path == "/ranges")
        .map(|(_, start)| start)
        .collect();
    assert_eq!(starts, [None, Some(200_000), Some(400_000), Some(600_000)]);
}

#[tokio::test]
async fn a_mirror_that_always_breaks_off_is_given_up_but_not_for_ever() {
    let mirror = Mirror::start().await;
    mirror.set(
        "/x",
        Answer {
            break_off: Some((usize::MAX, 0)),
            ..Answer::of(body())
        },
    );
    let error = get(&mirror, "/x").await.unwrap_err();
    assert_eq!(error.class(), ErrorClass::Transient);
    assert_eq!(mirror.count("/x"), 5);
}

#[tokio::test]
async fn a_file_that_changes_in_between_is_noticed() {
    let mirror = Mirror::start().await;
    mirror.set(
        "/x",
        Answer {
            break_off: Some((1, 1000)),
            no_ranges: true,
            etag: Some("\"old\"".into()),
            ..Answer::of(body())
        },
    );
    let changing = mirror.clone();
    let swap = tokio::spawn(async move {
        while changing.count("/x") == 0 {
            tokio::task::yield_now().await;
        }
        changing.set(
            "/x",
            Answer {
                no_ranges: true,
                etag: Some("\"new\"".into()),
                ..Answer::of(vec![1; 2000])
            },
        );
    });
    let error = get(&mirror, "/x").await.unwrap_err();
    swap.await.unwrap();
    assert!(matches!(error, ImageError::Changed { .. }), "{error}");
}

#[tokio::test]
async fn statuses_have_their_classes() {
    let mirror = Mirror::start().await;
    for (status, class, tries) in [
        (404, ErrorClass::Permanent, 1),
        (403, ErrorClass::Permanent, 1),
        (408, ErrorClass::Transient, 5),
        (429, ErrorClass::Transient, 5),
        (500, ErrorClass::Transient, 5),
        (503, ErrorClass::Transient, 5),
    ] {
        let path = format!("/{status}");
        mirror.set(
            &path,
            Answer {
                status: Some(status),
                ..Answer::of("x")
            },
        );
        let error = get(&mirror, &path).await.unwrap_err();
        assert_eq!(error.class(), class, "{status}");
        assert_eq!(mirror.count(&path), tries, "{status}");
        assert!(error.to_string().contains(&status.to_string()), "{error}");
    }
}

#[tokio::test]
async fn redirects_are_followed_up_to_a_point() {
    let mirror = Mirror::start().await;
    let to = |location: String| Answer {
        status: Some(302),
        location: Some(location),
        ..Answer::default()
    };
    mirror.set("/a", to(mirror.url("/b")));
    mirror.set("/b", Answer::of(body()));
    mirror.set("/loop", to("/loop".to_owned()));
    assert!(get(&mirror, "/a").await.unwrap().1 == body());
    let error = get(&mirror, "/loop").await.unwrap_err();
    assert!(error.to_string().contains("redirect"), "{error}");
}

#[tokio::test]
async fn a_dead_mirror_is_transient_and_says_why() {
    let mut gone = Mirror::start().await;
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let dead = listener.local_addr().unwrap();
    drop(listener);
    gone.address = dead;
    let error = get(&gone, "/x").await.unwrap_err();
    assert_eq!(error.class(), ErrorClass::Transient);
    assert!(error.to_string().contains("refused"), "{error}");
}

#[tokio::test]
async fn a_checksum_file_that_is_no_text_of_that_kind_is_refused() {
    let mirror = Mirror::start().await;
    mirror.set("/SUMS", Answer::of(vec![b'x'; 9 * 1024 * 1024]));
    let url = Url::parse(&mirror.url("/SUMS")).unwrap();
    let error = downloader().text("img", &url).await.unwrap_err();
    assert_eq!(error.class(), ErrorClass::Permanent);
}

/// A mirror behind TLS that redirects to a plain one.
#[tokio::test]
async fn https_works_and_never_falls_to_http() {
    let plain = Mirror::start().await;
    plain.set("/file", Answer::of(body()));
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let root = made.cert.der().clone();
    let key = rustls::pki_types::PrivatePkcs8KeyDer::from(made.signing_key.serialize_der());
    let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
    let tls = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![root.clone()], key.into())
        .unwrap();
    let acceptor = tokio_rustls::TlsAcceptor::from(std::sync::Arc::new(tls));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    // TLS ends here; what is inside goes to the plain mirror.
    let inner = plain.address;
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let Ok(mut stream) = acceptor.accept(stream).await else {
                    return;
                };
                let mut plain = tokio::net::TcpStream::connect(inner).await.unwrap();
                let _ = tokio::io::copy_bidirectional(&mut stream, &mut plain).await;
            });
        }
    });
    plain.set(
        "/down",
        Answer {
            status: Some(302),
            location: Some(plain.url("/file")),
            ..Answer::default()
        },
    );
    let trusting = Downloader::new(HttpConfig {
        backoff: Duration::from_millis(5),
        extra_roots: vec![root],
        ..HttpConfig::default()
    })
    .unwrap();
    let fetch = async |downloader: &Downloader, path: &str| {
        let (out, mut pieces) = mpsc::channel::<Bytes>(4);
        tokio::spawn(async move { while pieces.recv().await.is_some() {} });
        let url = Url::parse(&format!("https://localhost:{port}{path}")).unwrap();
        downloader
            .download("img", &url, false, &Progress::default(), &out)
            .await
    };
    let digest = fetch(&trusting, "/file").await.unwrap();
    assert_eq!(digest.hex(), sha256(&body()));
    let error = fetch(&trusting, "/down").await.unwrap_err();
    assert!(matches!(error, ImageError::Downgrade { .. }), "{error}");
    assert_eq!(error.class(), ErrorClass::Permanent);
    // The certificate is checked.
    let error = fetch(&downloader(), "/file").await.unwrap_err();
    assert!(error.to_string().contains("certificate"), "{error}");
}

//! Plain forwarding: a request with an absolute `http://` URI.

use std::sync::Arc;

use bytes::Bytes;
use http::header::{CONNECTION, CONTENT_LENGTH, HOST, HeaderMap, HeaderName, HeaderValue};
use http::uri::{Authority, PathAndQuery};
use http::{Request, Response, StatusCode, Uri, Version};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;

use crate::serve::{MAX_HEAD, MAX_HEADERS, Shared};
use crate::tunnel::Watched;

pub(crate) type Body = BoxBody<Bytes, hyper::Error>;

/// A short answer of the proxy's own.
pub(crate) fn answer(status: StatusCode, text: &str) -> Response<Body> {
    let body = Full::new(Bytes::from(format!("{text}\n")));
    let mut response = Response::new(body.map_err(|never| match never {}).boxed());
    *response.status_mut() = status;
    response.headers_mut().insert(
        http::header::CONTENT_TYPE,
        HeaderValue::from_static("text/plain; charset=utf-8"),
    );
    response
}

/// Host (without brackets) and port of an authority; None when it has a user or no usable port.
pub(crate) fn host_and_port(authority: &Authority, default: Option<u16>) -> Option<(String, u16)> {
    let text = authority.as_str();
    let host = authority.host();
    if text.contains('@') || host.is_empty() {
        return None;
    }
    let port = match text.strip_prefix(host)? {
        "" => default?,
        rest => rest.strip_prefix(':')?.parse().ok()?,
    };
    let bare = match host.strip_prefix('[').and_then(|h| h.strip_suffix(']')) {
        // Brackets hold an IPv6 address and nothing else.
        Some(inner) => inner.parse::<std::net::Ipv6Addr>().ok()?.to_string(),
        None => host.to_owned(),
    };
    (port != 0).then_some((bare, port))
}

/// Fetches what the request asks for.
pub(crate) async fn forward(shared: &Arc<Shared>, request: Request<Incoming>) -> Response<Body> {
    let (mut parts, body) = request.into_parts();
    let (Some(scheme), Some(authority)) = (parts.uri.scheme_str(), parts.uri.authority().cloned())
    else {
        return answer(
            StatusCode::BAD_REQUEST,
            "this is a proxy: the request needs an absolute URI such as http://example.com/, or CONNECT",
        );
    };
    if scheme != "http" {
        return answer(
            StatusCode::BAD_REQUEST,
            "only http:// is forwarded; use CONNECT for everything else",
        );
    }
    let Some((host, port)) = host_and_port(&authority, Some(80)) else {
        return answer(
            StatusCode::BAD_REQUEST,
            "the URI names no usable host and port",
        );
    };
    let stream = match shared.dialer.dial(&host, port).await {
        Ok(stream) => Watched::new(stream),
        Err(error) => return answer(error.status(), &error.to_string()),
    };
    let activity = stream.activity();

    // The URI decides over a Host header that says something else (RFC 9112, section 3.2.2).
    let Ok(host_header) = HeaderValue::from_str(authority.as_str()) else {
        return answer(
            StatusCode::BAD_REQUEST,
            "the URI names no usable host and port",
        );
    };
    let path = parts
        .uri
        .path_and_query()
        .cloned()
        .unwrap_or_else(|| PathAndQuery::from_static("/"));
    parts.uri = Uri::from(path);
    parts.version = Version::HTTP_11;
    strip_hop_by_hop(&mut parts.headers);
    parts.headers.insert(HOST, host_header);

    let handshake = hyper::client::conn::http1::Builder::new()
        .preserve_header_case(true)
        .max_buf_size(MAX_HEAD)
        .max_headers(MAX_HEADERS)
        .handshake(TokioIo::new(stream))
        .await;
    let (mut sender, connection) = match handshake {
        Ok(pair) => pair,
        Err(error) => return answer(StatusCode::BAD_GATEWAY, &upstream_failed(&error)),
    };
    // The connection must be driven while the body flows, after this function has returned.
    let idle = shared.timeouts.idle;
    let watch = Arc::clone(&activity);
    let abort = shared.abort.clone();
    shared.tasks.spawn(async move {
        tokio::select! {
            _ = connection => {}
            () = watch.idle_for(idle) => {}
            () = abort.cancelled() => {}
        }
    });
    let response = tokio::select! {
        response = sender.send_request(Request::from_parts(parts, body)) => response,
        () = activity.idle_for(shared.timeouts.response) => {
            return answer(StatusCode::GATEWAY_TIMEOUT, "the target did not answer in time");
        }
    };
    match response {
        Ok(mut response) => {
            strip_hop_by_hop(response.headers_mut());
            *response.version_mut() = Version::HTTP_11;
            response.map(BodyExt::boxed)
        }
        Err(error) => answer(StatusCode::BAD_GATEWAY, &upstream_failed(&error)),
    }
}

fn upstream_failed(error: &hyper::Error) -> String {
    format!("the target's answer could not be read: {error}")
}

/// Removes what concerns one connection only (RFC 9110, section 7.6.1).
fn strip_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in named {
        headers.remove(name);
    }
    // With both, the length is a lie or an attack (RFC 9112, section 6.3): the body that was read
    // decides.
    if headers.remove("transfer-encoding").is_some() {
        headers.remove(CONTENT_LENGTH);
    }
    for name in [
        "connection",
        "keep-alive",
        "proxy-connection",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "upgrade",
    ] {
        headers.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn authorities_give_host_and_port_or_nothing() {
        for (text, expected) in [
            ("example.com:443", Some(("example.com", 443))),
            ("example.com", Some(("example.com", 80))),
            ("[::1]:443", Some(("::1", 443))),
            ("[2001:db8::1]", Some(("2001:db8::1", 80))),
            ("user@example.com:443", None),
            ("example.com:0", None),
            ("example.com:99999", None),
            ("[example.com]:443", None),
        ] {
            let found = text
                .parse::<Authority>()
                .ok()
                .and_then(|a| host_and_port(&a, Some(80)));
            let found = found.as_ref().map(|(h, p)| (h.as_str(), *p));
            assert_eq!(found, expected, "{text}");
        }
    }

    #[test]
    fn what_concerns_one_connection_is_not_passed_on() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("connection", "close, X-Secret"),
            ("x-secret", "1"),
            ("proxy-authorization", "Basic eA=="),
            ("proxy-connection", "keep-alive"),
            ("keep-alive", "1"),
            ("te", "trailers"),
            ("upgrade", "h2c"),
            ("transfer-encoding", "chunked"),
            ("content-length", "5"),
            ("accept", "*/*"),
        ] {
            headers.insert(
                HeaderName::from_static(name),
                HeaderValue::from_static(value),
            );
        }
        strip_hop_by_hop(&mut headers);
        assert_eq!(
            headers.keys().map(HeaderName::as_str).collect::<Vec<_>>(),
            ["accept"]
        );
    }
}

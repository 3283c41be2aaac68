//! The OpenAPI document, made from the handlers and their types.

use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityRequirement, SecurityScheme};
use utoipa::{Modify, OpenApi};

use crate::{error, leases, proxies, router, watch, wire};

#[derive(OpenApi)]
#[openapi(
    info(
        title = "egress-proxies discovery and leases",
        description = "Finds proxies, leases them, and hears how they did. Every refusal is \
                       `{\"error\", \"message\"}`; an unknown path is 404 `not_found`, a wrong \
                       method 405 `method_not_allowed` with `Allow`.",
        license(name = "Apache-2.0", identifier = "Apache-2.0"),
    ),
    paths(
        proxies::list,
        proxies::get,
        leases::acquire,
        leases::get,
        leases::renew,
        leases::release,
        leases::report,
        watch::watch,
        router::healthz,
        router::readyz,
        router::document,
    ),
    components(schemas(wire::Removed, wire::ProxyList, error::ErrorBody)),
    tags(
        (name = "proxies", description = "What there is"),
        (name = "leases", description = "Using it"),
        (name = "state", description = "The API itself"),
    ),
    modifiers(&Bearer),
)]
struct Document;

struct Bearer;

impl Modify for Bearer {
    fn modify(&self, document: &mut utoipa::openapi::OpenApi) {
        let scheme = SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer));
        document
            .components
            .get_or_insert_default()
            .add_security_scheme("token", scheme);
        // An empty requirement beside it: without a configured token none is needed.
        document.security = Some(vec![
            SecurityRequirement::new("token", Vec::<String>::new()),
            SecurityRequirement::default(),
        ]);
    }
}

/// The OpenAPI 3.1 document as indented JSON, ending in a newline.
pub fn openapi() -> String {
    let document = Document::openapi();
    // Strings and maps with string keys: it cannot fail, and a test reads the result.
    let mut text = serde_json::to_string_pretty(&document).unwrap_or_default();
    text.push('\n');
    text
}

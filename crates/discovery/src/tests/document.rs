//! The OpenAPI document and the reference page, held against what is served.

use std::collections::{BTreeMap, BTreeSet};

use egress_core::SecretBytes;
use hyper::body::Incoming;
use serde_json::json;

use super::*;

fn document() -> Value {
    serde_json::from_str(&openapi()).unwrap()
}

/// `GET /v1/proxies` and so on, with the operation.
fn operations(document: &Value) -> Vec<(Method, String, Value)> {
    let paths = document["paths"].as_object().unwrap();
    let mut operations = Vec::new();
    for (path, item) in paths {
        for (method, operation) in item.as_object().unwrap() {
            let method = method.to_uppercase().parse().unwrap();
            operations.push((method, path.clone(), operation.clone()));
        }
    }
    operations
}

/// The schema that a `$ref` names, or itself.
fn resolve<'a>(document: &'a Value, schema: &'a Value) -> &'a Value {
    match schema["$ref"].as_str() {
        None => schema,
        Some(reference) => {
            let pointer = reference.strip_prefix('#').unwrap();
            let found = document.pointer(pointer);
            found.unwrap_or_else(|| panic!("{reference} leads nowhere"))
        }
    }
}

/// Checks a value as far as our schemas go, unknown fields included.
fn check(document: &Value, schema: &Value, value: &Value) -> Result<(), String> {
    let schema = resolve(document, schema);
    if let Some(choices) = schema["oneOf"].as_array() {
        let fits = |choice| check(document, choice, value).is_ok();
        return match choices.iter().any(fits) {
            true => Ok(()),
            false => Err(format!("{value} fits none of {choices:?}")),
        };
    }
    if let Some(allowed) = schema["enum"].as_array()
        && !allowed.contains(value)
    {
        return Err(format!("{value} is none of {allowed:?}"));
    }
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    let kinds: Vec<_> = match &schema["type"] {
        Value::String(one) => vec![one.as_str()],
        Value::Array(many) => many.iter().filter_map(Value::as_str).collect(),
        _ => return Ok(()),
    };
    if !kinds.contains(&kind) {
        return Err(format!("{value} is no {kinds:?}"));
    }
    if let Value::Array(items) = value {
        for item in items {
            check(document, &schema["items"], item)?;
        }
    }
    let Value::Object(fields) = value else {
        return Ok(());
    };
    for required in schema["required"].as_array().into_iter().flatten() {
        if !fields.contains_key(required.as_str().unwrap()) {
            return Err(format!("{required} is missing in {value}"));
        }
    }
    for (name, value) in fields {
        let field = match schema["properties"].get(name) {
            Some(field) => field,
            None => match schema.get("additionalProperties") {
                Some(rest) => rest,
                None if schema.get("properties").is_none() => continue,
                None => return Err(format!("{name} is not in the schema")),
            },
        };
        check(document, field, value).map_err(|error| format!("{name}: {error}"))?;
    }
    Ok(())
}

#[test]
fn the_checker_finds_faults() {
    let document = document();
    let schema = json!({"$ref": "#/components/schemas/ProxyList"});
    let proxy = json!({
        "id": "a/b", "port": 1, "phase": "Ready", "healthy": true, "activeLeases": 0,
        "maxLeases": 1,
    });
    let list = |proxy: &Value| json!({"proxies": [proxy], "count": 1});
    check(&document, &schema, &list(&proxy)).unwrap();
    for (field, value) in [
        ("phase", json!("Lost")),
        ("port", json!("1")),
        ("other", json!(1)),
        ("attributes", json!({"a": 1})),
    ] {
        let mut bad = proxy.clone();
        bad[field] = value;
        check(&document, &schema, &list(&bad)).unwrap_err();
    }
    let mut bad = proxy.clone();
    bad.as_object_mut().unwrap().remove("id");
    check(&document, &schema, &list(&bad)).unwrap_err();
}

#[test]
fn the_document_is_whole() {
    let document = document();
    assert!(document["openapi"].as_str().unwrap().starts_with("3.1."));
    let served: BTreeSet<_> = operations(&document)
        .into_iter()
        .map(|(method, path, _)| format!("{method} {path}"))
        .collect();
    // What the router has; a new route belongs here and into the document.
    let expected = [
        "DELETE /v1/leases/{id}",
        "GET /healthz",
        "GET /openapi.json",
        "GET /readyz",
        "GET /v1/leases/{id}",
        "GET /v1/proxies",
        "GET /v1/proxies/{namespace}/{name}",
        "GET /v1/watch",
        "POST /v1/leases",
        "POST /v1/leases/{id}/renew",
        "POST /v1/leases/{id}/report",
    ];
    assert_eq!(served, expected.map(str::to_owned).into());
    let mut ids = BTreeSet::new();
    for (method, path, operation) in operations(&document) {
        let open = matches!(path.as_str(), "/healthz" | "/readyz");
        let told = operation["responses"].get("401").is_some();
        assert_eq!(told, !open, "{method} {path}: 401");
        assert_eq!(
            operation["security"] == json!([{}]),
            open,
            "{method} {path}"
        );
        assert!(operation["summary"].is_string(), "{method} {path}");
        let id = operation["operationId"].as_str().unwrap().to_owned();
        assert!(ids.insert(id), "{method} {path}: its operationId is taken");
    }
    fn references(document: &Value, value: &Value) {
        resolve(document, value);
        match value {
            Value::Object(fields) => fields.values().for_each(|v| references(document, v)),
            Value::Array(items) => items.iter().for_each(|v| references(document, v)),
            _ => {}
        }
    }
    references(&document, &document);
}

/// Calls every operation in several ways, good and bad; each answer must be one that the document
/// names, of the schema that it names.
#[tokio::test]
async fn every_operation_answers_as_documented() {
    let document = document();
    let world = World::with(Config {
        token: TokenSource::Static(SecretBytes::new("t")),
        ..loopback()
    })
    .await;
    let mut seen: BTreeMap<String, BTreeSet<u16>> = BTreeMap::new();
    for (method, path, operation) in operations(&document) {
        for ready in [true, false] {
            world.directory.put(ProxyRecord {
                attributes: BTreeMap::from([("country".into(), "DE".into())]),
                ..proxy("p1", 2)
            });
            *world.directory.not_ready.lock().unwrap() = None;
            let kept = {
                let candidates = [proxy("kept", 1000)];
                world.directory.put(candidates[0].clone());
                let request = egress_lease::testing::request();
                match world.store.acquire(&request, &candidates).unwrap() {
                    egress_lease::Acquired::New(lease) => lease.id.0,
                    again @ egress_lease::Acquired::Again(_) => panic!("{again:?}"),
                }
            };
            if !ready {
                *world.directory.not_ready.lock().unwrap() = Some("testing".into());
            }
            let example = |schema: &Value| -> Value {
                let schema = resolve(&document, schema);
                let properties = schema["properties"].as_object().unwrap();
                let of = |(name, field): (&String, &Value)| {
                    let field = resolve(&document, field);
                    let value = match field.get("example") {
                        Some(example) => example.clone(),
                        None => field["enum"][0].clone(),
                    };
                    (name.clone(), value)
                };
                Value::Object(properties.iter().map(of).collect())
            };
            let content = &operation["requestBody"]["content"]["application/json"];
            let body = content
                .get("schema")
                .map(|schema| example(schema).to_string());
            let bodies: Vec<Option<String>> = match body {
                None => vec![None],
                Some(example) => [
                    "{}",
                    "{",
                    "{\"ttlSeconds\":0}",
                    "{\"selector\":{\"no\":\"1\"}}",
                ]
                .map(str::to_owned)
                .into_iter()
                .chain([example, " ".repeat(70_000)])
                .map(Some)
                .collect(),
            };
            for body in bodies {
                for id in ["nobodys", &kept] {
                    for (name, authorized) in [("p1", true), ("p9", true), ("p1", false)] {
                        let full = path
                            .replace("{namespace}", "default")
                            .replace("{name}", name)
                            .replace("{id}", id);
                        let mut request = request(method.clone(), &full, body.as_deref());
                        if authorized {
                            let value = "Bearer t".parse().unwrap();
                            request.headers_mut().insert("authorization", value);
                        }
                        let what = format!("{method} {full} {body:.60?}");
                        let (status, answer) = first_bytes(&world, request).await;
                        seen.entry(format!("{method} {path}"))
                            .or_default()
                            .insert(status);
                        let response = &operation["responses"][status.to_string()];
                        assert!(response.is_object(), "{what}: {status} is undocumented");
                        let content = &response["content"];
                        if let Some(json) = content.get("application/json") {
                            let value = serde_json::from_slice(&answer).unwrap();
                            check(&document, &json["schema"], &value)
                                .unwrap_or_else(|error| panic!("{what}: {status}: {error}"));
                        } else if content.get("text/event-stream").is_none() {
                            let expected = match status {
                                200 => &b"ok"[..],
                                _ => b"",
                            };
                            assert_eq!(answer, expected, "{what}");
                        }
                    }
                }
            }
        }
    }
    // It was no test of refusals only.
    let of = |operation: &str| seen[operation].iter().copied().collect::<Vec<_>>();
    assert_eq!(of("POST /v1/leases"), [201, 400, 401, 409, 413, 503]);
    assert_eq!(of("GET /v1/leases/{id}"), [200, 401, 404, 503]);
    assert_eq!(of("DELETE /v1/leases/{id}"), [204, 401]);
    assert_eq!(of("POST /v1/leases/{id}/report"), [204, 400, 401, 404, 413]);
    assert_eq!(
        of("POST /v1/leases/{id}/renew"),
        [200, 400, 401, 404, 413, 503]
    );
    assert_eq!(of("GET /v1/watch"), [200, 401, 503]);
}

/// A whole answer, or the first of a stream without end.
async fn first_bytes(world: &World, request: Request<Body>) -> (u16, Vec<u8>) {
    let io = TokioIo::new(world.connect().await);
    let (mut sender, connection) = hyper::client::conn::http1::handshake(io).await.unwrap();
    tokio::spawn(connection);
    let response = sender.send_request(request).await.unwrap();
    let status = response.status().as_u16();
    let stream = response
        .headers()
        .get("content-type")
        .is_some_and(|kind| kind == "text/event-stream");
    let body: Incoming = response.into_body();
    let bytes = if stream {
        let mut body = body;
        let frame = tokio::time::timeout(PATIENCE, body.frame()).await.unwrap();
        frame.unwrap().unwrap().into_data().unwrap()
    } else {
        body.collect().await.unwrap().to_bytes()
    };
    (status, bytes.to_vec())
}

const PAGE: &str = include_str!("../../../../docs/reference/http-api.md");

/// The words of a command line, with `'` and `"` as a shell takes them.
fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    for c in line.chars() {
        match (quote, c) {
            (Some(q), c) if c == q => quote = None,
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, ' ') => words.extend(word.take()),
            (_, c) => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}

/// The request that a curl command of the page makes.
fn curl(line: &str) -> Request<Body> {
    let mut words = words(line).into_iter();
    assert_eq!(words.next().as_deref(), Some("curl"));
    let mut builder = Request::builder().header("host", "x");
    let (mut method, mut body, mut path) = (None, None, None);
    while let Some(word) = words.next() {
        match word.as_str() {
            "-s" | "-sN" | "-si" => {}
            "-X" => method = words.next(),
            "-H" => {
                let header = words.next().unwrap();
                let (name, value) = header.split_once(": ").unwrap();
                builder = builder.header(name, value);
            }
            "-d" => body = words.next(),
            url => path = Some(url.strip_prefix("$API").unwrap().to_owned()),
        }
    }
    let method = method.unwrap_or_else(|| if body.is_some() { "POST" } else { "GET" }.to_owned());
    builder
        .method(method.as_str())
        .uri(path.unwrap())
        .body(Body::from(body.unwrap_or_default()))
        .unwrap()
}

/// Runs every example of the page, in order, against a fleet of two.
#[tokio::test]
async fn the_examples_of_the_page_are_true() {
    let world = World::with(Config {
        token: TokenSource::Static(SecretBytes::new("t0ken")),
        ..loopback()
    })
    .await;
    world.directory.put(ProxyRecord {
        attributes: BTreeMap::from([("country".into(), "DE".into())]),
        ..proxy("p1", 1)
    });
    world.directory.put(ProxyRecord {
        host: Some("2001:db8::2".into()),
        latency_millis: Some(35),
        ..proxy("p2", 1)
    });
    let mut variables = BTreeMap::from([("$TOKEN".to_owned(), "t0ken".to_owned())]);
    let mut examples = 0;
    for block in PAGE.split("```console\n").skip(1) {
        let block = block.split("```").next().unwrap();
        for example in block.split("$ curl").skip(1) {
            let (command, output) = example.split_once('\n').unwrap();
            let fill = |text: &str| {
                let mut text = text.to_owned();
                for (name, value) in &variables {
                    text = text.replace(name, value);
                }
                text
            };
            let command = fill(&format!("curl{command}"));
            let (status, answer) = first_bytes(&world, curl(&command)).await;
            let answer = String::from_utf8(answer).unwrap();
            // A name that is not known yet is what the answer gives.
            let id = serde_json::from_str::<Value>(&answer)
                .ok()
                .and_then(|json| Some(json["leaseID"].as_str()?.to_owned()));
            for name in ["$LEASE", "$SECOND"] {
                if let Some(id) = &id
                    && output.contains(&format!("\"leaseID\":\"{name}\""))
                    && !variables.contains_key(name)
                {
                    variables.insert(name.to_owned(), id.clone());
                }
            }
            let mut expected = output.trim_end().to_owned();
            for (name, value) in &variables {
                expected = expected.replace(name, value);
            }
            let shown = match status {
                204 => "HTTP/1.1 204 No Content".to_owned(),
                _ => answer.trim_end().to_owned(),
            };
            assert_eq!(shown, expected, "{command}");
            examples += 1;
        }
    }
    assert_eq!(examples, 20, "were examples left out?");
}

#[test]
fn the_page_names_every_error_and_every_call() {
    // Each code stands once in the source, behind its status.
    let codes: Vec<_> = include_str!("../error.rs")
        .split("StatusCode::")
        .skip(1)
        .filter_map(|rest| rest.split('"').nth(1).filter(|_| rest.contains(", \"")))
        .filter(|code| code.chars().all(|c| c.is_ascii_lowercase() || c == '_'))
        .collect();
    assert!(codes.len() >= 20, "{codes:?}");
    for code in codes {
        assert!(PAGE.contains(&format!("| `{code}` |")), "{code} is missing");
    }
    for (method, path, _) in operations(&document()) {
        let call = format!("`{method} {path}`");
        assert!(PAGE.contains(&call), "{call} is missing");
    }
}

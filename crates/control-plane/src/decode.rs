//! Bodies of requests, as JSON values.

use std::fmt;

use http::HeaderMap;
use http::header::CONTENT_TYPE;
use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use crate::error::{ApiError, ApiResult};
use crate::protobuf;
use crate::schema::child;

/// The most that a body may hold, as in kube-apiserver.
pub(crate) const MAX_BODY: usize = 3 * 1024 * 1024;
/// What bodies may be.
pub(crate) const ACCEPTED: &str = "application/json, application/yaml";

/// Below this, floating point numbers hold whole numbers exactly (2^53).
const MAX_WHOLE: f64 = 9_007_199_254_740_992.0;

/// A decoded body.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Body {
    pub value: Value,
    /// Sentences about fields that were given more than once; the last one counts.
    pub duplicates: Vec<String>,
}

/// The media type without its parameters.
pub(crate) fn media_type(headers: &HeaderMap) -> &str {
    headers
        .get(CONTENT_TYPE)
        .and_then(|v| v.to_str().ok())
        .and_then(|v| v.split(';').next())
        .map(str::trim)
        .unwrap_or_default()
}

/// Decodes an object by its content type.
pub(crate) fn object(headers: &HeaderMap, bytes: &[u8]) -> ApiResult<Body> {
    match media_type(headers) {
        "" | "application/json" => json(bytes),
        "application/yaml" | "application/x-yaml" | "text/yaml" => yaml(bytes),
        protobuf::MEDIA_TYPE => protobuf::decode(bytes).map(|value| Body {
            value,
            duplicates: Vec::new(),
        }),
        _ => Err(ApiError::unsupported_media_type(ACCEPTED)),
    }
}

pub(crate) fn json(bytes: &[u8]) -> ApiResult<Body> {
    let fault = |e: &serde_json::Error| {
        let text = if e.is_eof() {
            "unexpected end of JSON input".to_owned()
        } else {
            e.to_string()
        };
        ApiError::bad_request(format!(
            "couldn't get version/kind; json parse error: {text}"
        ))
    };
    let mut duplicates = Vec::new();
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let value = Tracked {
        path: String::new(),
        duplicates: &mut duplicates,
    }
    .deserialize(&mut deserializer)
    .map_err(|e| fault(&e))?;
    deserializer.end().map_err(|e| fault(&e))?;
    Ok(Body { value, duplicates })
}

pub(crate) fn yaml(bytes: &[u8]) -> ApiResult<Body> {
    let text = std::str::from_utf8(bytes)
        .map_err(|e| ApiError::bad_request(format!("yaml: the body is not UTF-8: {e}")))?;
    let fault = |e: &dyn fmt::Display| {
        ApiError::bad_request(format!("error converting YAML to JSON: yaml: {e}"))
    };
    match serde_saphyr::from_str::<Value>(text) {
        Ok(value) => Ok(Body {
            value,
            duplicates: Vec::new(),
        }),
        Err(error) => {
            // The last one counts, and the first that comes twice is told.
            let Some(twice) = duplicate_key(&error.to_string()) else {
                return Err(fault(&error));
            };
            let options = serde_saphyr::options! {
                duplicate_keys: serde_saphyr::options::DuplicateKeyPolicy::LastWins,
            };
            let value = serde_saphyr::from_str_with_options::<Value>(text, options)
                .map_err(|e| fault(&e))?;
            Ok(Body {
                value,
                duplicates: vec![twice],
            })
        }
    }
}

/// What a real server says of a key that comes twice, from `... line 10 column 3: duplicate mapping
/// key: port, ...`.
fn duplicate_key(error: &str) -> Option<String> {
    let (place, rest) = error.split_once(": duplicate mapping key: ")?;
    let line = place.rsplit_once("line ")?.1.split(' ').next()?;
    let key = rest.split([',', '\n']).next()?;
    Some(format!("line {line}: key {key:?} already set in map"))
}

/// Begin of a body, for messages about it.
pub(crate) fn summary(bytes: &[u8]) -> String {
    const MAX: usize = 30;
    let more = if bytes.len() > MAX { " ..." } else { "" };
    let head = &bytes[..bytes.len().min(MAX)];
    match bytes.first() {
        None => "<empty>".to_owned(),
        Some(b'{') => format!("{}{more}", String::from_utf8_lossy(head)),
        Some(_) => format!("{}{more}", data_encoding::HEXLOWER.encode(head)),
    }
}

/// Reads a value and notes the fields that come twice.
struct Tracked<'a> {
    path: String,
    duplicates: &'a mut Vec<String>,
}

impl<'de> DeserializeSeed<'de> for Tracked<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Tracked<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON value")
    }

    fn visit_bool<E>(self, v: bool) -> Result<Value, E> {
        Ok(v.into())
    }

    fn visit_i64<E>(self, v: i64) -> Result<Value, E> {
        Ok(v.into())
    }

    fn visit_u64<E>(self, v: u64) -> Result<Value, E> {
        Ok(v.into())
    }

    fn visit_f64<E>(self, v: f64) -> Result<Value, E> {
        // Go writes a whole number without a fraction, however it came.
        if v.fract() == 0.0 && v.abs() < MAX_WHOLE {
            return Ok((v as i64).into());
        }
        Ok(Number::from_f64(v).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, v: &str) -> Result<Value, E> {
        Ok(v.into())
    }

    fn visit_string<E>(self, v: String) -> Result<Value, E> {
        Ok(v.into())
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(Tracked {
            path: format!("{}[{}]", self.path, list.len()),
            duplicates: &mut *self.duplicates,
        })? {
            list.push(item);
        }
        Ok(list.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            let path = child(&self.path, &key);
            let value = entries.next_value_seed(Tracked {
                path: path.clone(),
                duplicates: &mut *self.duplicates,
            })?;
            if map.insert(key, value).is_some() {
                self.duplicates.push(format!("duplicate field {path:?}"));
            }
        }
        Ok(map.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn duplicate_fields_are_noted_and_the_last_counts() {
        let body = json(br#"{"spec":{"port":1,"port":2,"list":[{"a":1,"a":3}]}}"#).unwrap();
        assert_eq!(
            body.duplicates,
            [
                "duplicate field \"spec.port\"",
                "duplicate field \"spec.list[0].a\""
            ]
        );
        assert_eq!(body.value["spec"]["port"], 2);
        assert!(json(b"{").is_err());
        assert!(json(b"{} x").is_err());
    }

    #[test]
    fn a_key_that_comes_twice_in_yaml_is_told_and_the_last_counts() {
        let body = yaml(b"a: 1\nport: 1\nport: 2\n").unwrap();
        assert_eq!(body.value["port"], 2);
        assert_eq!(body.duplicates, ["line 3: key \"port\" already set in map"]);
        assert_eq!(
            json(br#"{"port":3128.0}"#).unwrap().value["port"].to_string(),
            "3128"
        );
    }

    #[test]
    fn yaml_and_json_give_the_same() {
        let body = yaml(b"spec:\n  port: 1\n  on: \"yes\"\n  none: null\n").unwrap();
        assert_eq!(
            body.value,
            serde_json::json!({"spec": {"port": 1, "on": "yes", "none": null}})
        );
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, "application/cbor".parse().unwrap());
        assert_eq!(object(&headers, b"").unwrap_err().code, 415);
    }
}

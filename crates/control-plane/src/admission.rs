//! What an object goes through between being decoded and being stored: shape, defaults, rules.

use kube::core::cel::ErrorKind;
use serde_json::Value;

use crate::error::{ApiError, ApiResult, Fault, FieldError};
use crate::meta;
use crate::registry::Kind;
use crate::request::FieldValidation;

/// Checks `apiVersion` and `kind`, and fills them in when absent.
pub(crate) fn type_meta(kind: &Kind, object: &mut Value) -> ApiResult<()> {
    let Some(map) = object.as_object_mut() else {
        return Err(ApiError::bad_request(
            "the body must be an object, with apiVersion and kind",
        ));
    };
    let api_version = kind.api_version();
    let given = |map: &serde_json::Map<String, Value>, field: &str| {
        map.get(field)
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned()
    };
    let (version, name) = (given(map, "apiVersion"), given(map, "kind"));
    if !version.is_empty() && version != api_version {
        return Err(ApiError::bad_request(format!(
            "the API version in the data ({version}) does not match the expected API version ({api_version})"
        )));
    }
    if kind.custom && !name.is_empty() && name != kind.kind {
        let object_name = map["metadata"]["name"].as_str().unwrap_or_default();
        return Err(ApiError::invalid(
            &kind.group,
            &name,
            object_name,
            &[FieldError::invalid(
                "kind",
                name.as_str(),
                format!("must be {}", kind.kind),
            )],
        ));
    }
    if !name.is_empty() && name != kind.kind {
        return Err(ApiError::bad_request(format!(
            "the object provided is unrecognized (must be of type {}): kind is {name:?}",
            kind.kind
        )));
    }
    map.insert("apiVersion".to_owned(), api_version.into());
    map.insert("kind".to_owned(), kind.kind.clone().into());
    Ok(())
}

/// An object of a custom kind says what it is; of built-in kinds the path says it.
pub(crate) fn check_kind(kind: &Kind, object: &Value, bytes: &[u8]) -> ApiResult<()> {
    let missing = |field: &str| object[field].as_str().unwrap_or_default().is_empty();
    if !kind.custom {
        return Ok(());
    }
    if missing("kind") {
        let text = if bytes.first() == Some(&b'{') {
            String::from_utf8_lossy(bytes).into_owned()
        } else {
            object.to_string()
        };
        return Err(unrecognized(
            kind,
            &format!("Object 'Kind' is missing in '{text}'"),
            bytes,
        ));
    }
    if missing("apiVersion") {
        return Err(ApiError::bad_request(format!(
            "the API version in the data () does not match the expected API version ({})",
            kind.api_version()
        )));
    }
    Ok(())
}

pub(crate) fn unrecognized(kind: &Kind, because: &str, bytes: &[u8]) -> ApiError {
    ApiError::bad_request(format!(
        "the object provided is unrecognized (must be of type {}): {because} ({})",
        kind.kind,
        crate::decode::summary(bytes)
    ))
}

/// Removes what the schema does not know. What that was is refused, told as warnings, or ignored.
/// The warnings come back.
pub(crate) fn shape(
    kind: &Kind,
    object: &mut Value,
    duplicates: &[String],
    validation: FieldValidation,
    patched: bool,
) -> ApiResult<Vec<String>> {
    let found = crate::schema::type_name(&object["metadata"]);
    if !matches!(found, "object" | "null") {
        let found = if matches!(found, "integer" | "boolean") {
            found
                .replace("integer", "number")
                .replace("boolean", "bool")
        } else {
            found.to_owned()
        };
        return Err(cannot_be_handled(
            kind,
            &format!("json: cannot unmarshal {found} into Go value of type v1.ObjectMeta"),
        ));
    }
    let (unknown_metadata, faults) = meta::normalize(object);
    if let Some(fault) = faults.first() {
        return Err(cannot_be_handled(kind, &format!("json: {fault}")));
    }
    let schema = kind.schema();
    let mut strict: Vec<String> = duplicates.to_vec();
    strict.extend(
        schema
            .prune(object, true)
            .into_iter()
            .chain(unknown_metadata)
            .map(|path| format!("unknown field {path:?}")),
    );
    if !kind.custom {
        drop_empty(object);
        // A typed server fails to decode what has a wrong type, before any other rule.
        let wrong = schema
            .validate(object, None, "")
            .into_iter()
            .find(|f| f.kind == Fault::TypeInvalid || f.detail.contains("must be of type"));
        if let Some(fault) = wrong {
            return Err(cannot_be_handled(kind, &format!("json: {fault}")));
        }
    }
    if strict.is_empty() {
        return Ok(Vec::new());
    }
    match validation {
        FieldValidation::Ignore => Ok(Vec::new()),
        FieldValidation::Warn => Ok(strict),
        FieldValidation::Strict => {
            let yaml = if strict.first().is_some_and(|s| s.starts_with("line ")) {
                "yaml: unmarshal errors:\n  "
            } else {
                ""
            };
            let text = format!("strict decoding error: {yaml}{}", strict.join(", "));
            Err(if patched {
                ApiError::invalid(
                    "",
                    "",
                    "",
                    &[FieldError::invalid("patch", object.to_string(), text)],
                )
            } else {
                cannot_be_handled(kind, &text)
            })
        }
    }
}

fn cannot_be_handled(kind: &Kind, because: &str) -> ApiError {
    ApiError::bad_request(format!(
        "{0} in version {1:?} cannot be handled as a {0}: {because}",
        kind.kind, kind.version
    ))
}

/// Typed objects have no nulls and no empty maps and lists at their top level.
fn drop_empty(object: &mut Value) {
    if let Value::Object(map) = object {
        map.retain(|name, v| {
            name == "metadata"
                || !match v {
                    Value::Null => true,
                    Value::Object(m) => m.is_empty(),
                    Value::Array(a) => a.is_empty(),
                    _ => false,
                }
        });
    }
}

/// Fills in defaults of a CRD.
pub(crate) fn fill_defaults(kind: &Kind, object: &mut Value) {
    if kind.custom {
        let schema = kind.schema();
        schema.drop_nulls(object);
        schema.fill(object);
    }
}

/// All rules beside those of metadata, whose faults are given and lead the list; the second list is
/// warnings: rules that an unchanged value has broken all along.
pub(crate) fn validate(
    kind: &Kind,
    object: &Value,
    old: Option<&Value>,
    mut faults: Vec<FieldError>,
) -> (Vec<FieldError>, Vec<String>) {
    let schema = kind.schema();
    let mut warnings = Vec::new();
    if kind.custom {
        warnings.extend(meta::finalizer_warnings(object, old));
    }
    faults.extend((kind.strategy.validate)(object, old));
    if !kind.custom {
        faults.extend(
            schema
                .validate(object, old, "")
                .into_iter()
                .filter(|f| f.field != "metadata"),
        );
        return (faults, warnings);
    }
    faults.extend(schema.validate(object, old, ""));
    let duplicated_before = old.is_some_and(|o| !schema.duplicates(o, "").is_empty());
    if !duplicated_before {
        faults.extend(schema.duplicates(object, ""));
    }
    if faults.iter().any(|f| f.kind.blocks_rules()) {
        if has_rules(kind) {
            faults.push(FieldError::invalid(
                "",
                Value::Null,
                "some validation rules were not checked because the object was invalid; correct the existing errors to complete validation",
            ));
        }
    } else {
        rules(kind, object, old, &mut faults, &mut warnings);
    }
    (faults, warnings)
}

fn has_rules(kind: &Kind) -> bool {
    matches!(&kind.source, crate::registry::Source::Inline(json)
        if json.to_string().contains("x-kubernetes-validations"))
}

fn rules(
    kind: &Kind,
    object: &Value,
    old: Option<&Value>,
    faults: &mut Vec<FieldError>,
    warnings: &mut Vec<String>,
) {
    let Some(rules) = kind.rules() else {
        return;
    };
    let Err(broken) = rules
        .validator
        .validate_compiled(&rules.compiled, object, old)
    else {
        return;
    };
    for error in &broken {
        let value = at(object, &error.field_path);
        let shown = value.filter(|v| !v.is_object() && !v.is_array()).cloned();
        let fault = match error.reason.as_deref() {
            Some("FieldValueForbidden") => Fault::Forbidden,
            Some("FieldValueRequired") => Fault::Required,
            Some("FieldValueDuplicate") => Fault::Duplicate,
            _ => Fault::Invalid,
        };
        let fault = FieldError::new(
            error.field_path.as_str(),
            fault,
            shown,
            error.message.as_str(),
        );
        let unchanged = old
            .and_then(|o| at(o, &error.field_path))
            .is_some_and(|before| Some(before) == value);
        if error.kind == ErrorKind::ValidationFailure
            && unchanged
            && !error.rule.contains("oldSelf")
        {
            warnings.push(fault.to_string());
        } else {
            faults.push(fault);
        }
    }
}

/// The value at `spec.a[0].b`.
fn at<'a>(object: &'a Value, path: &str) -> Option<&'a Value> {
    if path.is_empty() {
        return Some(object);
    }
    path.parse::<crate::jsonpath::JsonPath>()
        .ok()?
        .first(object)
}

//! get and list.

use axum::response::{IntoResponse, Response};
use bytes::BytesMut;
use data_encoding::BASE64URL_NOPAD;
use http::StatusCode;
use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{Call, encode, internal};
use crate::error::{ApiError, ApiResult, Fault, FieldError};
use crate::request::{Encoding, Form};
use crate::selectors::{FieldSelector, LabelSelector};
use crate::storage::{Key, Range, Record, StoreError};
use crate::table;

/// Records that are read from the store at once; the rest of a list follows in further turns, so
/// that a long list does not hold up writes.
const CHUNK: usize = 500;

/// What a `continue` token says.
#[derive(Debug, Serialize, Deserialize, PartialEq)]
pub(super) struct Continue {
    /// The revision of the list; -1: whatever is newest.
    rv: i64,
    namespace: String,
    name: String,
}

const CONTINUE_EXPIRED: &str = "The provided continue parameter is too old to display a consistent list result. You can start a new list without the continue parameter, or use the continue token in this response to retrieve the remainder of the results. Continuing with the provided token results in an inconsistent list - objects that were created, modified, or deleted between the time the first chunk was returned and now may show up in the list.";

impl Continue {
    fn encode(&self) -> String {
        BASE64URL_NOPAD.encode(json!(self).to_string().as_bytes())
    }

    fn decode(text: &str) -> ApiResult<Self> {
        BASE64URL_NOPAD
            .decode(text.trim_end_matches('=').as_bytes())
            .ok()
            .and_then(|bytes| serde_json::from_slice(&bytes).ok())
            .ok_or_else(|| ApiError::bad_request("continue key is not valid"))
    }
}

/// Both selectors of a request.
pub(super) struct Selection {
    pub labels: LabelSelector,
    pub fields: FieldSelector,
}

impl Selection {
    pub fn is_everything(&self) -> bool {
        self.labels.is_empty() && self.fields.is_empty()
    }

    pub fn matches(&self, object: &Value) -> bool {
        self.labels.matches(object) && self.fields.matches(object)
    }
}

/// What a list holds, its revision and the token for more.
pub(super) struct Listed<T> {
    pub items: Vec<T>,
    pub revision: u64,
    next: Option<Continue>,
    remaining: Option<u64>,
}

impl Call<'_> {
    pub(super) async fn find(&self, key: &Key) -> ApiResult<Record> {
        self.server
            .store
            .get(key)
            .await
            .map_err(internal)?
            .ok_or_else(|| ApiError::not_found(self.kind, &key.name))
    }

    pub(super) async fn get(&self, name: &str) -> ApiResult<Response> {
        let asked = self
            .query
            .revision()
            .map_err(|e| ApiError::untyped(e.message))?;
        if let Some(asked) = asked {
            let newest = self.server.store.revision();
            if asked > newest {
                return Err(ApiError::too_large_resource_version(asked, newest));
            }
        }
        let record = self.find(&self.key(name)).await?;
        Ok(self.reply(StatusCode::OK, self.shown(&record)?, &[]))
    }

    pub(super) fn selection(&self) -> ApiResult<Selection> {
        let mut fields = self
            .query
            .get("fieldSelector")
            .unwrap_or_default()
            .to_owned();
        // A collection asked for by one name is a list of one.
        if let Some(name) = &self.path.name {
            fields = format!("metadata.name={name}");
        }
        Ok(Selection {
            labels: LabelSelector::parse(self.query.get("labelSelector").unwrap_or_default())?,
            fields: FieldSelector::parse(&fields, self.kind)?,
        })
    }

    pub(super) async fn list(&self) -> ApiResult<Response> {
        if self.query.get("sendInitialEvents").is_some() {
            return Err(list_options(FieldError::forbidden(
                "sendInitialEvents",
                "sendInitialEvents is forbidden for list",
            )));
        }
        if self.answer.form == Form::Partial && self.answer.single {
            return Err(ApiError::not_acceptable_list());
        }
        let plain = self.answer.form == Form::Object && self.answer.encoding == Encoding::Json;
        if plain && self.kind.custom && self.selection()?.is_everything() {
            return self.list_as_stored().await;
        }
        let listed = self.listed().await?;
        let metadata = self.list_metadata(&listed);
        let list = match self.answer.form {
            Form::Table => table::table(
                self.kind,
                listed.items.iter(),
                &metadata,
                self.include(),
                self.server.now(),
                true,
            ),
            Form::Partial => json!({
                "kind": "PartialObjectMetadataList",
                "apiVersion": "meta.k8s.io/v1",
                "metadata": metadata,
                "items": listed.items.iter().map(table::partial).collect::<Vec<_>>(),
            }),
            Form::Object => json!({
                "kind": self.kind.list_kind,
                "apiVersion": self.kind.api_version(),
                "metadata": metadata,
                "items": items(listed.items, self.kind.custom),
            }),
        };
        Ok(encode(StatusCode::OK, &list, self.answer.encoding))
    }

    /// Objects go out as they are stored, without being read: the common list of a client that
    /// keeps a copy of everything.
    async fn list_as_stored(&self) -> ApiResult<Response> {
        let listed = self
            .records(|record| Ok(Some(record.value.clone())))
            .await?;
        let metadata = self.list_metadata(&listed);
        let size: usize = listed.items.iter().map(|i| i.len() + 1).sum();
        let head = format!(
            "{{\"apiVersion\":{},\"items\":[",
            Value::from(self.kind.api_version())
        );
        let tail = format!(
            "],\"kind\":{},\"metadata\":{metadata}}}\n",
            Value::from(self.kind.list_kind.as_str())
        );
        let mut bytes = BytesMut::with_capacity(head.len() + size + tail.len());
        bytes.extend_from_slice(head.as_bytes());
        for (index, item) in listed.items.iter().enumerate() {
            if index > 0 {
                bytes.extend_from_slice(b",");
            }
            bytes.extend_from_slice(item);
        }
        bytes.extend_from_slice(tail.as_bytes());
        let headers = [
            (CONTENT_TYPE, "application/json"),
            (CACHE_CONTROL, "no-cache, private"),
        ];
        Ok((StatusCode::OK, headers, bytes.freeze()).into_response())
    }

    pub(super) fn list_metadata<T>(&self, listed: &Listed<T>) -> Value {
        let mut metadata = json!({"resourceVersion": listed.revision.to_string()});
        match &listed.next {
            Some(next) => metadata["continue"] = next.encode().into(),
            // Lists of custom resources say so, those of built-in kinds do not.
            None if self.kind.custom && self.answer.form == Form::Object => {
                metadata["continue"] = "".into();
            }
            None => {}
        }
        if let Some(remaining) = listed.remaining {
            metadata["remainingItemCount"] = remaining.into();
        }
        metadata
    }

    /// Reads the objects that the query asks for.
    pub(super) async fn listed(&self) -> ApiResult<Listed<Value>> {
        let selection = self.selection()?;
        self.records(|record| {
            let object = self.shown(record)?;
            Ok(selection.matches(&object).then_some(object))
        })
        .await
    }

    /// Reads the records that the query asks for and `take` wants.
    async fn records<T>(
        &self,
        take: impl Fn(&Record) -> ApiResult<Option<T>>,
    ) -> ApiResult<Listed<T>> {
        let counts = self.selection()?.is_everything();
        let asked = self.query.revision().map_err(|e| {
            ApiError::bad_request(format!("invalid resource version: {}", e.message))
        })?;
        let limit = self
            .query
            .number("limit")?
            // "Any" revision comes from a cache in kube-apiserver, which does not cut.
            .filter(|_| asked != Some(0) || self.query.get("resourceVersionMatch").is_some())
            .and_then(|l| usize::try_from(l).ok())
            .unwrap_or(0);
        let (revision, after) = match self.query.get("continue") {
            Some(_) if asked.is_some_and(|r| r != 0) => {
                return Err(ApiError::bad_request(
                    "specifying resource version is not allowed when using continue",
                ));
            }
            Some(token) => {
                let token = Continue::decode(token)?;
                (
                    u64::try_from(token.rv).ok(),
                    Some((token.namespace, token.name)),
                )
            }
            None => (self.list_revision(asked)?, None),
        };
        let wanted = if limit == 0 { usize::MAX } else { limit };
        let mut range = Range {
            resource: self.kind.resource.clone(),
            namespace: self.path.namespace.clone(),
            after,
            limit: CHUNK.min(wanted),
            revision,
        };
        let mut items = Vec::new();
        loop {
            let page = match self.server.store.list(range.clone()).await {
                Err(StoreError::Compacted { .. }) if range.after.is_some() => {
                    return Err(expired_token(range.after.unwrap_or_default()));
                }
                other => other.map_err(internal)?,
            };
            range.revision = Some(page.revision);
            for record in &page.records {
                range.after = Some((record.key.namespace.clone(), record.key.name.clone()));
                if let Some(item) = take(record)? {
                    items.push(item);
                    if items.len() == wanted {
                        break;
                    }
                }
            }
            let cut = page.records.last().is_some_and(|last| {
                range
                    .after
                    .as_ref()
                    .is_some_and(|(ns, n)| (ns, n) != (&last.key.namespace, &last.key.name))
            });
            let more = page.more || cut;
            if !more || items.len() >= wanted {
                let (next, remaining) = if more && items.len() >= wanted {
                    self.rest(&range, page.revision, counts).await?
                } else {
                    (None, None)
                };
                return Ok(Listed {
                    items,
                    revision: page.revision,
                    next,
                    remaining,
                });
            }
            range.limit = CHUNK;
        }
    }

    async fn rest(
        &self,
        range: &Range,
        revision: u64,
        counts: bool,
    ) -> ApiResult<(Option<Continue>, Option<u64>)> {
        let (namespace, name) = range.after.clone().unwrap_or_default();
        let next = Continue {
            rv: i64::try_from(revision).unwrap_or(-1),
            namespace,
            name,
        };
        // With a selector nobody knows without reading on.
        let remaining = if counts {
            Some(
                self.server
                    .store
                    .count(range.clone())
                    .await
                    .map_err(internal)?,
            )
        } else {
            None
        };
        Ok((Some(next), remaining))
    }

    /// Which revision a list shows, by resourceVersion and resourceVersionMatch.
    fn list_revision(&self, asked: Option<u64>) -> ApiResult<Option<u64>> {
        let newest = self.server.store.revision();
        let matching = self.query.get("resourceVersionMatch");
        match (asked, matching) {
            (None, Some(_)) => Err(list_options(FieldError::forbidden(
                "resourceVersionMatch",
                "resourceVersionMatch is forbidden unless resourceVersion is provided",
            ))),
            (Some(asked), _) if asked > newest => {
                Err(ApiError::too_large_resource_version(asked, newest))
            }
            (Some(0), Some("Exact")) => Err(list_options(FieldError::forbidden(
                "resourceVersionMatch",
                "resourceVersionMatch \"exact\" is forbidden for resourceVersion \"0\"",
            ))),
            (Some(asked), Some("Exact")) => Ok(Some(asked)),
            (_, None | Some("NotOlderThan")) => Ok(None),
            (_, Some(other)) => Err(list_options(FieldError::new(
                "resourceVersionMatch",
                Fault::NotSupported,
                Some(other.into()),
                "supported values: \"Exact\", \"NotOlderThan\", \"\"",
            ))),
        }
    }
}

/// A fault of the options of a list.
fn list_options(fault: FieldError) -> ApiError {
    ApiError::invalid("meta.k8s.io", "ListOptions", "", &[fault])
}

/// Items of a built-in kind's list carry no type.
pub(super) fn items(objects: Vec<Value>, custom: bool) -> Vec<Value> {
    if custom {
        return objects;
    }
    objects
        .into_iter()
        .map(|mut object| {
            if let Value::Object(map) = &mut object {
                map.remove("kind");
                map.remove("apiVersion");
            }
            object
        })
        .collect()
}

fn expired_token((namespace, name): (String, String)) -> ApiError {
    let mut error = ApiError::expired(CONTINUE_EXPIRED);
    error.continue_token = Some(
        Continue {
            rv: -1,
            namespace,
            name,
        }
        .encode(),
    );
    error
}

//! The kinds that are served: rows, not special cases.
//!
//! A row says how a kind is named, where it is stored, what its schema is, how it prints and what
//! is special about it ([`Strategy`]). Handlers, discovery, OpenAPI, tables and validation work from
//! the row alone. A row comes from a CustomResourceDefinition or from [`crate::kinds`].

use std::sync::{Arc, OnceLock};

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::core::cel::{CompiledSchema, Validator, compile_schema};
use serde_json::Value;

use crate::error::FieldError;
use crate::kinds;
use crate::schema::Schema;
use crate::table::Columns;

/// How names of a kind must look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NameRule {
    /// RFC 1123 subdomain, 253 characters.
    Subdomain,
    /// RFC 1123 label, 63 characters.
    Label,
}

/// What is special about a kind. Everything not said here is the same for all.
pub(crate) struct Strategy {
    pub names: NameRule,
    /// `metadata.generation` counts changes outside of metadata and status.
    pub generation: bool,
    /// An update without a resourceVersion overwrites.
    pub unconditional_update: bool,
    /// Strategic merge patches are taken.
    pub strategic_patch: bool,
    pub prepare: fn(&mut Value, Option<&Value>),
    pub validate: fn(&Value, Option<&Value>) -> Vec<FieldError>,
    /// Paths that a fieldSelector may name, beside metadata.name and metadata.namespace, and what
    /// they read.
    pub fields: &'static [(&'static str, &'static str)],
    /// Objects vanish when they were not written for so long.
    pub ttl: Option<std::time::Duration>,
}

/// Another shape of the same stored objects: `events.k8s.io/v1` of core events.
pub(crate) struct View {
    /// From what is stored to what is shown.
    pub show: fn(&mut Value),
    /// From what is sent to what is stored.
    pub store: fn(&mut Value),
}

/// Where a kind's schema comes from.
pub(crate) enum Source {
    /// The schema itself, from a CRD.
    Inline(Value),
    /// A type of k8s-openapi: adds it to the generator and returns its name.
    Generated(kinds::Generate),
}

/// One served kind.
pub(crate) struct Kind {
    pub group: String,
    pub version: String,
    pub kind: String,
    pub list_kind: String,
    pub plural: String,
    pub singular: String,
    pub short_names: Vec<String>,
    pub categories: Vec<String>,
    pub namespaced: bool,
    /// Name of the stored resource; shared by the views of it.
    pub resource: Arc<str>,
    /// From a CustomResourceDefinition.
    pub custom: bool,
    /// Has a status subresource.
    pub status: bool,
    pub columns: Columns,
    pub source: Source,
    pub strategy: Strategy,
    pub view: Option<View>,
    /// Selectable fields of a CRD: name and path.
    pub selectable: Vec<String>,
    schema: OnceLock<Schema>,
    rules: OnceLock<Rules>,
}

/// The CEL rules of a kind, compiled.
pub(crate) struct Rules {
    pub compiled: CompiledSchema,
    pub validator: Validator,
}

impl Kind {
    /// `proxies.crawl.example.com`, `secrets`.
    pub fn qualified_resource(&self) -> String {
        if self.group.is_empty() {
            self.plural.clone()
        } else {
            format!("{}.{}", self.plural, self.group)
        }
    }

    /// `crawl.example.com/v1alpha1`, `v1`.
    pub fn api_version(&self) -> String {
        if self.group.is_empty() {
            self.version.clone()
        } else {
            format!("{}/{}", self.group, self.version)
        }
    }

    pub fn schema(&self) -> &Schema {
        self.schema.get_or_init(|| match &self.source {
            Source::Inline(json) => Schema::parse(json, &Value::Null),
            Source::Generated(generate) => {
                let (name, definitions) = kinds::definitions(&[*generate]);
                let root = name.first().map(|n| definitions[n.as_str()].clone());
                Schema::parse(&root.unwrap_or(Value::Null), &definitions)
            }
        })
    }

    /// The rules of a CRD's schema; None for built-in kinds.
    pub fn rules(&self) -> Option<&Rules> {
        let Source::Inline(json) = &self.source else {
            return None;
        };
        Some(self.rules.get_or_init(|| Rules {
            compiled: compile_schema(json),
            validator: Validator::new(),
        }))
    }
}

/// A CRD that cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    #[error("CustomResourceDefinition {name}: {problem}")]
    Definition { name: String, problem: String },
}

/// All kinds.
pub(crate) struct Registry {
    kinds: Vec<Arc<Kind>>,
}

impl Registry {
    pub fn new(crds: &[CustomResourceDefinition]) -> Result<Self, RegistryError> {
        let mut kinds: Vec<Arc<Kind>> = kinds::builtin().into_iter().map(Arc::new).collect();
        for crd in crds {
            for kind in from_crd(crd)? {
                kinds.push(Arc::new(kind));
            }
        }
        Ok(Self { kinds })
    }

    pub fn find(&self, group: &str, version: &str, plural: &str) -> Option<&Arc<Kind>> {
        self.kinds
            .iter()
            .find(|k| k.group == group && k.version == version && k.plural == plural)
    }

    pub fn by_kind(&self, api_version: &str, kind: &str) -> Option<&Arc<Kind>> {
        self.kinds
            .iter()
            .find(|k| k.kind == kind && k.api_version() == api_version)
    }

    /// The kind whose form is the stored one.
    pub fn by_resource(&self, resource: &str) -> Option<&Arc<Kind>> {
        self.kinds
            .iter()
            .find(|k| *k.resource == *resource && k.view.is_none())
    }

    pub fn iter(&self) -> impl Iterator<Item = &Arc<Kind>> {
        self.kinds.iter()
    }

    /// Groups with their versions, the core group first, each once, in order.
    pub fn groups(&self) -> Vec<(String, String)> {
        let mut groups: Vec<(String, String)> = Vec::new();
        for kind in &self.kinds {
            let pair = (kind.group.clone(), kind.version.clone());
            if !groups.contains(&pair) {
                groups.push(pair);
            }
        }
        groups
    }
}

fn from_crd(crd: &CustomResourceDefinition) -> Result<Vec<Kind>, RegistryError> {
    let name = crd.metadata.name.clone().unwrap_or_default();
    let fault = |problem: &str| RegistryError::Definition {
        name: name.clone(),
        problem: problem.to_owned(),
    };
    let names = &crd.spec.names;
    let mut kinds = Vec::new();
    for version in crd.spec.versions.iter().filter(|v| v.served) {
        if !version.storage {
            return Err(fault(
                "only one served version is supported, and it must be the stored one",
            ));
        }
        let schema = version
            .schema
            .as_ref()
            .and_then(|s| s.open_api_v3_schema.as_ref())
            .ok_or_else(|| fault("spec.versions[].schema.openAPIV3Schema is missing"))?;
        let schema = serde_json::to_value(schema)
            .map_err(|e| fault(&format!("the schema cannot be read: {e}")))?;
        let columns = version
            .additional_printer_columns
            .clone()
            .unwrap_or_default();
        kinds.push(Kind {
            group: crd.spec.group.clone(),
            version: version.name.clone(),
            kind: names.kind.clone(),
            list_kind: names
                .list_kind
                .clone()
                .unwrap_or_else(|| format!("{}List", names.kind)),
            plural: names.plural.clone(),
            singular: names
                .singular
                .clone()
                .unwrap_or_else(|| names.kind.to_lowercase()),
            short_names: names.short_names.clone().unwrap_or_default(),
            categories: names.categories.clone().unwrap_or_default(),
            namespaced: crd.spec.scope == "Namespaced",
            resource: format!("{}.{}", names.plural, crd.spec.group).into(),
            custom: true,
            status: version
                .subresources
                .as_ref()
                .is_some_and(|s| s.status.is_some()),
            columns: Columns::from_crd(&columns)
                .map_err(|e| fault(&format!("printer column: {e}")))?,
            source: Source::Inline(schema),
            strategy: Strategy {
                names: NameRule::Subdomain,
                generation: true,
                unconditional_update: false,
                strategic_patch: false,
                prepare: |_, _| {},
                validate: |_, _| Vec::new(),
                fields: &[],
                ttl: None,
            },
            view: None,
            selectable: version
                .selectable_fields
                .iter()
                .flatten()
                .map(|f| f.json_path.trim_start_matches('.').to_owned())
                .collect(),
            schema: OnceLock::new(),
            rules: OnceLock::new(),
        });
    }
    if kinds.is_empty() {
        return Err(fault("no version is served"));
    }
    Ok(kinds)
}

/// A built-in kind with the common values; [`crate::kinds`] sets the rest.
pub(crate) fn builtin_kind(
    group: &str,
    kind: &str,
    plural: &str,
    generate: kinds::Generate,
    columns: Columns,
    strategy: Strategy,
) -> Kind {
    Kind {
        group: group.to_owned(),
        version: "v1".to_owned(),
        kind: kind.to_owned(),
        list_kind: format!("{kind}List"),
        plural: plural.to_owned(),
        singular: kind.to_lowercase(),
        short_names: Vec::new(),
        categories: Vec::new(),
        namespaced: true,
        resource: plural.into(),
        custom: false,
        status: false,
        columns,
        source: Source::Generated(generate),
        strategy,
        view: None,
        selectable: Vec::new(),
        schema: OnceLock::new(),
        rules: OnceLock::new(),
    }
}

//! The built-in kinds.

mod config;
mod events;
mod namespaces;

use schemars::generate::{SchemaGenerator, SchemaSettings};
use serde_json::Value;

use crate::registry::Kind;

/// Adds a type of k8s-openapi to a generator; the name of its definition.
pub(crate) type Generate = fn(&mut SchemaGenerator) -> String;

fn generate<T: schemars::JsonSchema>(generator: &mut SchemaGenerator) -> String {
    generator.subschema_for::<T>();
    T::schema_name().into_owned()
}

/// The definitions of types, with all that they refer to, in the form of OpenAPI v3.
pub(crate) fn definitions(types: &[Generate]) -> (Vec<String>, Value) {
    let mut settings = SchemaSettings::openapi3();
    settings.meta_schema = None;
    let mut generator = settings.into_generator();
    let names = types.iter().map(|t| t(&mut generator)).collect();
    let mut definitions = Value::Object(generator.take_definitions(true));
    patch_strategies(&mut definitions);
    (names, definitions)
}

/// What k8s-openapi leaves out of its schemas and merging needs: the keys of metadata's lists.
fn patch_strategies(definitions: &mut Value) {
    let fields = definitions
        .get_mut("io.k8s.apimachinery.pkg.apis.meta.v1.FieldsV1")
        .and_then(Value::as_object_mut);
    if let Some(fields) = fields {
        fields.insert(
            "x-kubernetes-preserve-unknown-fields".to_owned(),
            true.into(),
        );
    }
    // References are taken or left as a whole.
    for name in [
        "io.k8s.apimachinery.pkg.apis.meta.v1.OwnerReference",
        "io.k8s.api.core.v1.ObjectReference",
    ] {
        if let Some(reference) = definitions.get_mut(name).and_then(Value::as_object_mut) {
            reference.insert("x-kubernetes-map-type".to_owned(), "atomic".into());
        }
    }
    let meta = &mut definitions["io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"]["properties"];
    if let Some(owners) = meta
        .get_mut("ownerReferences")
        .and_then(Value::as_object_mut)
    {
        owners.insert("x-kubernetes-list-type".to_owned(), "map".into());
        owners.insert("x-kubernetes-list-map-keys".to_owned(), vec!["uid"].into());
        owners.insert("x-kubernetes-patch-merge-key".to_owned(), "uid".into());
        owners.insert("x-kubernetes-patch-strategy".to_owned(), "merge".into());
    }
    if let Some(finalizers) = meta.get_mut("finalizers").and_then(Value::as_object_mut) {
        finalizers.insert("x-kubernetes-list-type".to_owned(), "set".into());
        finalizers.insert("x-kubernetes-patch-strategy".to_owned(), "merge".into());
    }
}

/// The schema of `metadata`, which is the same for every kind.
pub(crate) fn metadata_schema() -> &'static crate::schema::Schema {
    static SCHEMA: std::sync::OnceLock<crate::schema::Schema> = std::sync::OnceLock::new();
    SCHEMA.get_or_init(|| {
        let (names, definitions) = definitions(&[METADATA]);
        let root = names.first().map(|n| definitions[n.as_str()].clone());
        crate::schema::Schema::parse(&root.unwrap_or(Value::Null), &definitions)
    })
}

pub(crate) const METADATA: Generate =
    generate::<k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta>;

pub(crate) fn builtin() -> Vec<Kind> {
    vec![
        config::config_maps(),
        events::core_events(),
        namespaces::namespaces(),
        config::secrets(),
        events::grouped_events(),
    ]
}

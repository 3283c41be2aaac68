//! Prints the Proxy CustomResourceDefinition as YAML.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let crd = serde_json::to_value(egress_api::crd())?;
    println!("{}", serde_saphyr::to_string(&crd)?);
    Ok(())
}

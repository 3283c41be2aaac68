//! A small client for machines without kubectl: Proxies and Secrets, applied, listed, awaited and
//! deleted.

use std::io::Read;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use egress_api::Proxy;
use kube::api::{Api, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Client, ResourceExt};

use crate::cli::{ClientArgs, ClientCommand, ClientVerb};

/// A client for `--kubeconfig`, else the usual lookup.
pub async fn connect(args: &ClientArgs) -> Result<Client> {
    let config = match &args.kubeconfig {
        Some(path) => {
            let kubeconfig = Kubeconfig::read_from(path)
                .with_context(|| format!("cannot read the kubeconfig {}", path.display()))?;
            kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default())
                .await
                .with_context(|| format!("the kubeconfig {} cannot be used", path.display()))?
        }
        None => kube::Config::infer()
            .await
            .context("no cluster is configured: give --kubeconfig, or set KUBECONFIG")?,
    };
    Ok(Client::try_from(config)?)
}

pub async fn run(command: &ClientCommand) -> Result<()> {
    let client = connect(&command.common).await?;
    let namespace = command
        .common
        .namespace
        .clone()
        .unwrap_or_else(|| client.default_namespace().to_owned());
    let proxies: Api<Proxy> = Api::namespaced(client.clone(), &namespace);
    match &command.verb {
        ClientVerb::Apply { file } => apply(&client, &namespace, &read(file)?).await,
        ClientVerb::Get { name: Some(name) } => {
            print!("{}", yaml(&proxies.get(name).await.map_err(plain)?)?);
            Ok(())
        }
        ClientVerb::Get { name: None } => {
            let list = match &command.common.namespace {
                Some(_) => proxies.list(&ListParams::default()).await,
                None => Api::<Proxy>::all(client).list(&ListParams::default()).await,
            };
            print_table(&list.map_err(plain)?.items);
            Ok(())
        }
        ClientVerb::Wait { name, timeout } => wait_ready(&proxies, name, *timeout).await,
        ClientVerb::Delete { name, timeout } => delete(&proxies, name, *timeout).await,
    }
}

fn read(file: &Path) -> Result<String> {
    if file == Path::new("-") {
        let mut text = String::new();
        std::io::stdin()
            .read_to_string(&mut text)
            .context("cannot read standard input")?;
        return Ok(text);
    }
    std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))
}

fn yaml<T: serde::Serialize>(object: &T) -> Result<String> {
    serde_saphyr::to_string(object).context("cannot write YAML")
}

/// The server's own sentence, without the client's wrapping.
fn plain(error: kube::Error) -> anyhow::Error {
    match error {
        kube::Error::Api(status) => anyhow!("{}", status.message),
        other => other.into(),
    }
}

async fn apply(client: &Client, namespace: &str, text: &str) -> Result<()> {
    let objects: Vec<DynamicObject> =
        serde_saphyr::from_multiple(text).context("not a list of Kubernetes objects in YAML")?;
    if objects.is_empty() {
        bail!("no objects in the file");
    }
    for object in objects {
        let kind = object
            .types
            .as_ref()
            .map(|t| (t.api_version.as_str(), t.kind.as_str()));
        let resource = match kind {
            Some(("crawl.example.com/v1alpha1", "Proxy")) => ApiResource::erase::<Proxy>(&()),
            Some(("v1", "Secret")) => {
                ApiResource::from_gvk(&GroupVersionKind::gvk("", "v1", "Secret"))
            }
            Some((version, kind)) => {
                bail!(
                    "{version} {kind} is not known here: only Proxies and Secrets; use kubectl for others"
                )
            }
            None => bail!("an object without apiVersion and kind"),
        };
        let name = object.name_any();
        let namespace = object.namespace().unwrap_or_else(|| namespace.to_owned());
        let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), &namespace, &resource);
        let what = format!("{}/{name}", resource.kind.to_lowercase());
        if api.get_opt(&name).await.map_err(plain)?.is_some() {
            api.patch(&name, &PatchParams::default(), &Patch::Merge(&object))
                .await
                .map_err(plain)?;
            println!("{what} configured");
        } else {
            api.create(&PostParams::default(), &object)
                .await
                .map_err(plain)?;
            println!("{what} created");
        }
    }
    Ok(())
}

fn print_table(proxies: &[Proxy]) {
    if proxies.is_empty() {
        println!("No proxies found.");
        return;
    }
    println!(
        "{:<32} {:<9} {:<14} {:<13} {:<18} READY",
        "NAME", "MODE", "PROVIDER", "PHASE", "IP"
    );
    for proxy in proxies {
        let status = proxy.status.as_ref();
        let ready = status
            .and_then(|s| s.conditions.iter().find(|c| c.type_ == "Ready"))
            .map_or("Unknown", |c| c.status.as_str());
        println!(
            "{:<32} {:<9} {:<14} {:<13} {:<18} {ready}",
            proxy.key().to_string(),
            format!("{:?}", proxy.spec.mode),
            proxy.spec.provider.as_deref().unwrap_or("-"),
            status.and_then(|s| s.phase.as_deref()).unwrap_or("-"),
            status.and_then(|s| s.ip.as_deref()).unwrap_or("-"),
        );
    }
}

async fn wait_ready(proxies: &Api<Proxy>, name: &str, timeout: Duration) -> Result<()> {
    let ready = |proxy: Option<&Proxy>| {
        proxy.is_some_and(|p| {
            p.status.as_ref().is_some_and(|s| {
                s.conditions
                    .iter()
                    .any(|c| c.type_ == "Ready" && c.status == "True")
            })
        })
    };
    let wait = kube::runtime::wait::await_condition(proxies.clone(), name, ready);
    match tokio::time::timeout(timeout, wait).await {
        Ok(Ok(_)) => {
            println!("proxy/{name} is ready");
            Ok(())
        }
        Ok(Err(error)) => Err(error.into()),
        Err(_) => {
            let why = proxies
                .get_opt(name)
                .await
                .map_err(plain)?
                .and_then(|p| p.status)
                .and_then(|s| s.conditions.into_iter().find(|c| c.type_ == "Ready"))
                .map_or_else(
                    || "there is no such Proxy".to_owned(),
                    |c| format!("{}: {}", c.reason, c.message),
                );
            bail!("proxy/{name} is not ready after {timeout:?}: {why}")
        }
    }
}

async fn delete(proxies: &Api<Proxy>, name: &str, timeout: Duration) -> Result<()> {
    let uid = proxies
        .get(name)
        .await
        .map_err(plain)?
        .uid()
        .unwrap_or_default();
    proxies
        .delete(name, &DeleteParams::default())
        .await
        .map_err(plain)?;
    let gone = kube::runtime::wait::await_condition(
        proxies.clone(),
        name,
        kube::runtime::conditions::is_deleted(&uid),
    );
    match tokio::time::timeout(timeout, gone).await {
        Ok(result) => {
            result?;
            println!("proxy/{name} deleted");
            Ok(())
        }
        Err(_) => {
            bail!("proxy/{name} is still there after {timeout:?}: see kubectl describe px {name}")
        }
    }
}

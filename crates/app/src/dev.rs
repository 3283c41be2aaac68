//! `dev`: the whole thing with throwaway state, to try it.

use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::cli::DevArgs;
use crate::config::{Config, ConfigFaults, ProvidersSource};
use crate::run::App;

/// One provider named "local". Its proxies may reach loopback targets, since a target of one's own
/// is what a first try has, and only clients on this machine reach them; they end with `dev`.
const PROVIDERS: &str = "
providers:
  - name: local
    type: local
    local:
      stopOnExit: true
      allowTargets: [127.0.0.0/8, '::1/128']
";

pub async fn run(args: &DevArgs) -> Result<()> {
    let (state, throwaway) = match &args.state_dir {
        Some(dir) => (dir.clone(), None),
        None => {
            let dir = tempfile::Builder::new()
                .prefix("egress-proxies-dev-")
                .tempdir()
                .context("cannot make a directory for the throwaway state; set TMPDIR")?;
            (dir.path().to_owned(), Some(dir))
        }
    };
    let config = configuration(args, state)?;
    let app = App::build(config).await?;
    let told = app.addresses();
    let result = app
        .run(move || {
            println!("{}", banner(&told.kubeconfig, &told.discovery));
        })
        .await;
    if let Some(dir) = throwaway {
        dir.close().context("cannot remove the throwaway state")?;
    }
    result
}

fn configuration(args: &DevArgs, state: PathBuf) -> Result<Config, ConfigFaults> {
    let mut run = crate::cli::RunArgs::defaults();
    run.control_plane = crate::cli::ControlPlaneChoice::Embedded;
    run.state_dir = state;
    run.discovery_addr = vec![args.discovery_addr.clone()];
    run.api_addr.clone_from(&args.api_addr);
    run.health_ca.clone_from(&args.health_ca);
    run.metrics_addr.clone_from(&args.metrics_addr);
    run.providers_config.clone_from(&args.providers_config);
    let mut config = Config::from_args(&run)?;
    if args.providers_config.is_none() {
        config.providers = ProvidersSource::Text(PROVIDERS.to_owned());
    }
    Ok(config)
}

fn banner(kubeconfig: &str, discovery: &str) -> String {
    format!(
        "
The operator is ready. In another terminal:

  export KUBECONFIG={kubeconfig}
  kubectl apply -f - <<'EOF'
  apiVersion: crawl.example.com/v1alpha1
  kind: Proxy
  metadata: {{name: p1}}
  spec: {{mode: Managed, provider: local, attributes: {{geo: de}}}}
  EOF
  kubectl wait --for=condition=Ready px/p1 --timeout=30s
  kubectl get px -o wide
  curl -s -X POST {discovery}/v1/leases -H 'content-type: application/json' -d '{{\"selector\":{{\"geo\":\"de\"}}}}'

Ctrl-C ends it, with everything that it started.
"
    )
}

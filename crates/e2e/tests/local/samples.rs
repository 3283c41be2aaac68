//! Every sample manifest is applied, and every sample configuration is checked.

use anyhow::{Context as _, Result, ensure};

use crate::harness::{Local, operator};

fn samples() -> Result<Vec<std::path::PathBuf>> {
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/samples");
    let mut found: Vec<_> = std::fs::read_dir(dir)?
        .map(|e| e.map(|e| e.path()))
        .collect::<Result<_, _>>()?;
    found.sort();
    Ok(found)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sample_proxies_are_accepted() -> Result<()> {
    let mut local = Local::start(true).await?;
    let kubeconfig = local.dir.path().join("state/admin.kubeconfig");
    let kubeconfig = kubeconfig.to_str().context("utf-8")?;
    let mut applied = 0;
    for path in samples()? {
        let name = path.file_name().and_then(|n| n.to_str()).context("utf-8")?;
        if name.contains("providers") {
            continue;
        }
        // The samples' own health checks lead to the internet: nothing of them may run here.
        let mut text = std::fs::read_to_string(&path)?
            .replace("proxy.example.com", "127.0.0.1")
            .replace(
                "https://www.gstatic.com/generate_204",
                "https://localhost:1/",
            );
        if !text.contains("healthCheck:") {
            let own = "mode: Managed\n  healthCheck: {url: 'https://localhost:1/'}";
            text = text.replace("mode: Managed", own);
        }
        ensure!(text.contains("kind:"), "{name} is no manifest");
        let file = local.dir.path().join(name);
        std::fs::write(&file, text)?;
        let file = file.to_str().context("utf-8")?;
        let (code, _, errors) =
            operator(&["client", "--kubeconfig", kubeconfig, "apply", "-f", file]).await?;
        assert_eq!(code, 0, "{name}: {errors}");
        applied += 1;
    }
    assert!(applied >= 2, "the samples were not found");
    local.stop().await
}

#[tokio::test]
async fn sample_provider_files_have_no_faults() -> Result<()> {
    for path in samples()? {
        let name = path
            .file_name()
            .and_then(|n| n.to_str())
            .context("utf-8")?
            .to_owned();
        if name.contains("providers") {
            let (code, _, errors) =
                operator(&["check-config", path.to_str().context("utf-8")?]).await?;
            assert_eq!(code, 0, "{name}: {errors}");
        }
    }
    Ok(())
}

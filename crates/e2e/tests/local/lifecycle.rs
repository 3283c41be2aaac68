//! Lives of Proxies: crashes, killed processes, idle fleets.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use egress_e2e::process::{Seen, until};
use rustix::process::Signal;
use serde_json::Value;
use tokio::sync::Mutex;

use crate::harness::{Local, PATIENCE, signal};

/// One at a time: each wants the machine for itself.
static ALONE: Mutex<()> = Mutex::const_new(());

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_in_the_middle_of_creating_twenty() -> Result<()> {
    let _alone = ALONE.lock().await;
    let mut local = Local::start(false).await?;
    local.create("first", 2).await?;
    local.all_ready(1).await?;
    let lease = local.lease("shop.example").await?;
    for n in 1..20 {
        local.create(&format!("p{n}"), 2).await?;
    }
    // In the middle: some are there and some are not.
    until("five processes are there", PATIENCE, async || {
        let there = local.processes().len();
        Ok(if there >= 5 {
            Seen::There(())
        } else {
            Seen::not_yet(there)
        })
    })
    .await?;
    local.kill().await?;
    let before: BTreeSet<i32> = local.processes().into_iter().collect();
    local.run().await?;
    local.all_ready(20).await?;
    let after: BTreeSet<i32> = local.processes().into_iter().collect();
    assert_eq!(after.len(), 20, "one process for each Proxy");
    assert!(
        before.is_subset(&after),
        "what was there is adopted: {before:?} in {after:?}"
    );
    let id = lease["leaseID"].as_str().context("no leaseID")?;
    let kept = local
        .discovery("GET", &format!("/v1/leases/{id}"), None)
        .await?;
    assert_eq!(kept.status, 200, "the lease survives: {}", kept.text());

    for n in 1..20 {
        local.delete(&format!("p{n}")).await?;
    }
    local.delete("first").await?;
    until("every process is gone", PATIENCE, async || {
        let list = local.proxies().await?;
        let left = local.processes().len() + list["items"].as_array().map_or(0, Vec::len);
        Ok(if left == 0 {
            Seen::There(())
        } else {
            Seen::not_yet(left)
        })
    })
    .await?;
    local.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_process_is_replaced_at_once() -> Result<()> {
    let _alone = ALONE.lock().await;
    let mut local = Local::start(true).await?;
    // A long interval: neither a probe nor a poll can be what notices it.
    local.create("p1", 60).await?;
    local.all_ready(1).await?;
    let before = local.processes();
    assert_eq!(before.len(), 1);
    signal(before[0], Signal::KILL);
    let limit = Duration::from_secs(5);
    until("Ready again on a new process", limit, async || {
        let now = local.processes();
        let list = local
            .discovery("GET", "/v1/proxies?healthy=true", None)
            .await?
            .success()?;
        let done = now.len() == 1 && now != before && list["count"] == 1;
        Ok(if done {
            Seen::There(())
        } else {
            Seen::not_yet(format!("{now:?} {list}"))
        })
    })
    .await?;
    local.all_ready(1).await?;
    local.stop().await?;
    ensure!(
        local.processes().is_empty(),
        "stopOnExit leaves nothing running"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_fleet_writes_nothing() -> Result<()> {
    let _alone = ALONE.lock().await;
    let mut local = Local::start(true).await?;
    for n in 0..100 {
        local.create(&format!("p{n}"), 5).await?;
    }
    local.all_ready(100).await?;
    // Events of the start are written a little later than what they tell of, and a latency that was
    // measured while a hundred processes started is corrected once, after five rounds of probes.
    tokio::time::sleep(Duration::from_secs(30)).await;
    let before = local.proxies().await?;
    // The minute itself is what is tested: twelve rounds of probes for each of the hundred.
    tokio::time::sleep(Duration::from_secs(60)).await;
    let after = local.proxies().await?;
    // On a machine that is busy with other things a latency may change materially, and is written:
    // that is the one write that an idle fleet may cause.
    let latencies = latency_changes(&before, &after);
    let writes = revision(&after) - revision(&before);
    println!("{writes} writes, {latencies} Proxies with another latency");
    assert!(
        writes == 0 || (latencies > 0 && writes <= 5 * latencies),
        "an idle fleet wrote {writes} times: {}\n{}",
        difference(&before, &after),
        local.log()
    );
    local.stop().await
}

fn revision(list: &Value) -> u64 {
    list["metadata"]["resourceVersion"]
        .as_str()
        .and_then(|r| r.parse().ok())
        .unwrap_or_default()
}

/// How many Proxies differ, when they differ in a latency by more than half and by 20 ms, and in
/// nothing else.
#[track_caller]
fn latency_changes(before: &Value, after: &Value) -> u64 {
    let mut count = 0;
    let items = |list: &Value| list["items"].as_array().cloned().unwrap_or_default();
    for (mut old, mut new) in items(before).into_iter().zip(items(after)) {
        if old == new {
            continue;
        }
        let latency = |p: &Value| p["status"]["latencyMillis"].as_u64().unwrap_or_default();
        let (was, is) = (latency(&old), latency(&new));
        assert!(
            was.abs_diff(is) >= 20,
            "{was} ms became {is} ms: not worth a write"
        );
        for proxy in [&mut old, &mut new] {
            proxy["status"]["latencyMillis"] = Value::Null;
            proxy["metadata"]["resourceVersion"] = Value::Null;
            proxy["metadata"]["managedFields"] = Value::Null;
        }
        assert_eq!(old, new, "more than a latency changed");
        count += 1;
    }
    count
}

/// The statuses that differ between two lists of the same Proxies.
fn difference(before: &Value, after: &Value) -> String {
    let items = |list: &Value| list["items"].as_array().cloned().unwrap_or_default();
    let changed: Vec<String> = items(before)
        .iter()
        .zip(items(after))
        .filter(|(old, new)| old["status"] != new["status"])
        .map(|(old, new)| {
            format!(
                "{}: {} became {}",
                old["metadata"]["name"], old["status"], new["status"]
            )
        })
        .collect();
    format!(
        "{} Proxies changed; {}",
        changed.len(),
        changed.first().cloned().unwrap_or_default()
    )
}

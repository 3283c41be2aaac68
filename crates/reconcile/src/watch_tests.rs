use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use k8s_openapi::api::core::v1::ConfigMap;
use kube::core::{Status, TypeMeta};
use prometheus_client::registry::Registry;
use serde_json::json;
use tokio::sync::mpsc;

use super::*;

/// One answer to a watch.
enum Answer {
    /// These events, then the end; or, when true, silence for ever.
    Events(Vec<WatchEvent<ConfigMap>>, bool),
    Refused(u16),
    /// The call itself hangs.
    Hang,
}

#[derive(Default)]
struct Inner {
    answers: VecDeque<Answer>,
    /// `list` and `watch@version`, as they came.
    calls: Vec<String>,
    pages: Vec<Vec<ConfigMap>>,
}

#[derive(Clone, Default)]
struct Scripted(Arc<Mutex<Inner>>);

fn mk(name: &str, version: &str) -> ConfigMap {
    serde_json::from_value(json!({"metadata": {"name": name, "resourceVersion": version}})).unwrap()
}

fn bookmark(version: &str) -> WatchEvent<ConfigMap> {
    serde_json::from_value(json!({
        "type": "BOOKMARK",
        "object": {"apiVersion": "v1", "kind": "ConfigMap",
                   "metadata": {"resourceVersion": version}},
    }))
    .unwrap()
}

fn refused(code: u16) -> kube::Error {
    kube::Error::Api(Box::new(Status::failure("no", "Injected").with_code(code)))
}

impl Source for Scripted {
    type Object = ConfigMap;

    async fn list(&self, params: &ListParams) -> kube::Result<ObjectList<ConfigMap>> {
        let mut inner = self.0.lock().unwrap();
        let page: usize = params
            .continue_token
            .as_deref()
            .map_or(0, |token| token.parse().unwrap());
        inner.calls.push(format!("list {page}"));
        let items = inner.pages.get(page).cloned().unwrap_or_default();
        Ok(ObjectList {
            types: TypeMeta::list::<ConfigMap>(),
            metadata: ListMeta {
                continue_: (page + 1 < inner.pages.len()).then(|| (page + 1).to_string()),
                resource_version: Some("100".into()),
                ..ListMeta::default()
            },
            items,
        })
    }

    async fn watch(
        &self,
        _params: &WatchParams,
        version: &str,
    ) -> kube::Result<BoxStream<'static, kube::Result<WatchEvent<ConfigMap>>>> {
        let answer = {
            let mut inner = self.0.lock().unwrap();
            inner.calls.push(format!("watch@{version}"));
            inner.answers.pop_front()
        };
        match answer {
            Some(Answer::Events(events, silent)) => {
                let events = futures::stream::iter(events.into_iter().map(Ok));
                Ok(if silent {
                    events.chain(futures::stream::pending()).boxed()
                } else {
                    events.boxed()
                })
            }
            Some(Answer::Refused(code)) => Err(refused(code)),
            Some(Answer::Hang) => std::future::pending().await,
            None => Ok(futures::stream::pending().boxed()),
        }
    }

    fn version(object: &ConfigMap) -> Option<String> {
        object.metadata.resource_version.clone()
    }
}

/// Runs the script until nothing is left of it, and returns the calls, what was told, the state.
async fn run(
    answers: impl IntoIterator<Item = Answer>,
    pages: Vec<Vec<ConfigMap>>,
) -> (Vec<String>, Vec<String>, WatchState) {
    let source = Scripted::default();
    {
        let mut inner = source.0.lock().unwrap();
        inner.answers = answers.into_iter().collect();
        inner.pages = pages;
    }
    let (told, mut heard) = mpsc::unbounded_channel();
    let state = watch::Sender::new(WatchState::Starting);
    let watcher = Watcher {
        source: source.clone(),
        resource: "configmaps",
        labels: "",
        deadline: Duration::from_secs(15),
        timeout: Duration::from_secs(60),
        backoff: Backoff::default(),
        metrics: Metrics::register(&mut Registry::default()),
        state: state.clone(),
    };
    let cancel = CancellationToken::new();
    let task = tokio::spawn(watcher.run(cancel.clone(), move |change| {
        let _ = told.send(match change {
            Change::Listing => "listing".to_owned(),
            Change::Listed => "listed".to_owned(),
            Change::Applied(o) => format!("+{}", o.metadata.name.unwrap()),
            Change::Deleted(o) => format!("-{}", o.metadata.name.unwrap()),
        });
    }));
    // Paused time: far beyond every deadline, and before the last, endless watch is given up.
    while !source.0.lock().unwrap().answers.is_empty() {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    tokio::time::sleep(Duration::from_secs(80)).await;
    cancel.cancel();
    task.await.unwrap();
    let mut all = Vec::new();
    while let Ok(one) = heard.try_recv() {
        all.push(one);
    }
    let calls = source.0.lock().unwrap().calls.clone();
    let state = state.borrow().clone();
    (calls, all, state)
}

#[tokio::test(start_paused = true)]
async fn pages_then_events_then_on_from_the_last_version() {
    let (calls, told, state) = run(
        [Answer::Events(
            vec![
                WatchEvent::Added(mk("c", "101")),
                WatchEvent::Deleted(mk("a", "102")),
                bookmark("150"),
            ],
            false,
        )],
        vec![vec![mk("a", "1")], vec![mk("b", "2")]],
    )
    .await;
    assert_eq!(calls[..4], ["list 0", "list 1", "watch@100", "watch@150"]);
    assert_eq!(told, ["listing", "+a", "+b", "listed", "+c", "-a"]);
    assert_eq!(state, WatchState::Watching);
}

/// kube#1798: a connection that died in silence.
#[tokio::test(start_paused = true)]
async fn silence_is_noticed_and_no_new_list_is_needed() {
    let (calls, _, _) = run(
        [Answer::Events(
            vec![WatchEvent::Added(mk("c", "101"))],
            true,
        )],
        vec![vec![]],
    )
    .await;
    assert_eq!(calls[..3], ["list 0", "watch@100", "watch@101"]);
    assert!(calls[3..].iter().all(|c| c == "watch@101"), "{calls:?}");
}

/// kube#1615: a 410, as an answer and within a stream.
#[tokio::test(start_paused = true)]
async fn a_forgotten_version_is_one_new_list() {
    let gone = WatchEvent::Error(Box::new(
        Status::failure("too old", "Expired").with_code(410),
    ));
    let (calls, told, state) = run(
        [Answer::Events(vec![gone], false), Answer::Refused(410)],
        vec![vec![mk("a", "1")]],
    )
    .await;
    assert_eq!(
        calls[..6],
        [
            "list 0",
            "watch@100",
            "list 0",
            "watch@100",
            "list 0",
            "watch@100"
        ]
    );
    assert_eq!(told.iter().filter(|t| *t == "listed").count(), 3);
    assert_eq!(state, WatchState::Watching);
}

#[tokio::test(start_paused = true)]
async fn a_forbidden_watch_is_told_at_once_and_lists_go_on() {
    let (calls, told, _) = run(
        (0..10).map(|_| Answer::Refused(403)),
        vec![vec![mk("a", "1")]],
    )
    .await;
    assert_eq!(calls.iter().filter(|c| c.starts_with("list")).count(), 11);
    assert!(told.iter().filter(|t| *t == "listed").count() >= 10);
    let source = Scripted::default();
    source
        .0
        .lock()
        .unwrap()
        .answers
        .push_back(Answer::Refused(403));
    let state = watch::Sender::new(WatchState::Starting);
    let mut changes = state.subscribe();
    let watcher = Watcher {
        source,
        resource: "configmaps",
        labels: "",
        deadline: Duration::from_secs(15),
        timeout: Duration::from_secs(60),
        backoff: Backoff::default(),
        metrics: Metrics::register(&mut Registry::default()),
        state,
    };
    let cancel = CancellationToken::new();
    let task = tokio::spawn(watcher.run(cancel.clone(), |_| {}));
    changes.changed().await.unwrap();
    let said = changes.borrow().clone();
    assert!(
        matches!(&said, WatchState::Failing(why) if why.contains("may not watch configmaps")),
        "{said:?}"
    );
    cancel.cancel();
    task.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_call_that_hangs_and_an_error_go_on_without_a_new_list() {
    let error = WatchEvent::Error(Box::new(Status::failure("oops", "Internal").with_code(500)));
    let (calls, told, state) = run(
        [
            Answer::Hang,
            Answer::Refused(503),
            Answer::Events(vec![WatchEvent::Added(mk("c", "101")), error], false),
        ],
        vec![vec![]],
    )
    .await;
    assert_eq!(
        calls[..5],
        ["list 0", "watch@100", "watch@100", "watch@100", "watch@101"]
    );
    assert_eq!(told.iter().filter(|t| *t == "+c").count(), 1);
    assert_eq!(state, WatchState::Watching);
}

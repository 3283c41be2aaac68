use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::json;

use super::*;

fn open(storage: &Storage) -> Store {
    Store::open(storage, Arc::new(|| 0)).unwrap()
}

fn key(namespace: &str, name: &str) -> Key {
    Key {
        resource: "things".into(),
        namespace: namespace.to_owned(),
        name: name.to_owned(),
    }
}

fn put(key: &Key, expect: Expect, value: u32) -> Write {
    Write {
        key: key.clone(),
        expect,
        object: json!({"metadata": {"name": key.name, "uid": key.name}, "value": value}),
        delete: false,
        guard: None,
    }
}

fn everything() -> Range {
    Range {
        resource: "things".into(),
        namespace: None,
        after: None,
        limit: usize::MAX - 1,
        revision: None,
    }
}

#[derive(Debug, Clone)]
enum Step {
    Put(u8, u32),
    Delete(u8),
    /// A write that expects what is not there.
    Stale(u8),
    Compact(u8),
    Reopen,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0..6_u8, any::<u32>()).prop_map(|(k, v)| Step::Put(k, v)),
        3 => (0..6_u8).prop_map(Step::Delete),
        1 => (0..6_u8).prop_map(Step::Stale),
        1 => (0..20_u8).prop_map(Step::Compact),
        1 => Just(Step::Reopen),
    ];
    prop::collection::vec(step, 1..60)
}

/// What the store should be: the state at each revision, and what each revision did.
#[derive(Debug, Default)]
struct Model {
    states: Vec<BTreeMap<String, (u64, u32)>>,
    events: Vec<(u64, String, bool, bool)>,
    oldest: u64,
}

impl Model {
    fn now(&self) -> BTreeMap<String, (u64, u32)> {
        self.states.last().cloned().unwrap_or_default()
    }
}

fn shown(page: &Page) -> BTreeMap<String, (u64, u32)> {
    page.records
        .iter()
        .map(|r| {
            let object = r.object().unwrap();
            let value = u32::try_from(object["value"].as_u64().unwrap()).unwrap();
            assert_eq!(
                object["metadata"]["resourceVersion"],
                r.revision.to_string()
            );
            (r.key.name.clone(), (r.revision, value))
        })
        .collect()
}

async fn check(store: &Store, model: &Model, first: u64) {
    assert_eq!(shown(&store.list(everything()).await.unwrap()), model.now());
    // Every revision that is kept can be listed as it was; older ones are refused.
    for (at, state) in model.states.iter().enumerate() {
        let revision = first + at as u64;
        let page = store
            .list(Range {
                revision: Some(revision),
                ..everything()
            })
            .await;
        match page {
            Ok(page) => {
                assert!(revision >= model.oldest);
                assert_eq!(&shown(&page), state, "at {revision}");
            }
            Err(StoreError::Compacted { .. }) => assert!(revision < model.oldest),
            Err(e) => panic!("{e}"),
        }
    }
    // Who reads on from any kept revision gets each event once, in order, in batches of any size.
    for batch in [1, 3, 1000] {
        for from in model.oldest.max(first)..=store.revision() {
            let mut after = from;
            let mut seen = Vec::new();
            while after < store.revision() {
                let (events, complete) = store
                    .events(Some(&"things".into()), after, batch)
                    .await
                    .unwrap();
                assert!(events.len() <= batch);
                for e in &events {
                    seen.push((e.revision, e.key.name.clone(), e.created, e.deleted));
                    assert_eq!(e.previous.is_none(), e.created, "{e:?}");
                }
                assert!(complete > after);
                after = complete;
            }
            let expected: Vec<_> = model
                .events
                .iter()
                .filter(|e| e.0 > from)
                .cloned()
                .collect();
            assert_eq!(seen, expected, "from {from} by {batch}");
        }
    }
    if model.oldest > first {
        let before = store.events(None, model.oldest - 1, 10).await;
        assert!(
            matches!(before, Err(StoreError::Compacted { .. })),
            "{before:?}"
        );
    }
}

async fn run(steps: Vec<Step>) {
    let directory = tempfile::tempdir().unwrap();
    let storage = Storage::Directory(directory.path().to_owned());
    let mut store = open(&storage);
    let first = store.revision();
    let mut model = Model {
        states: vec![BTreeMap::new()],
        oldest: 0,
        ..Model::default()
    };
    for step in steps {
        match step {
            Step::Put(k, value) => {
                let name = format!("k{k}");
                let key = key("", &name);
                let current = model.now().get(&name).copied();
                let expect = current.map_or(Expect::Absent, |(rev, _)| Expect::Revision(rev));
                let record = store.write(put(&key, expect, value)).await.unwrap();
                assert_eq!(record.revision, first + model.states.len() as u64);
                let mut state = model.now();
                state.insert(name.clone(), (record.revision, value));
                model.states.push(state);
                model
                    .events
                    .push((record.revision, name, current.is_none(), false));
            }
            Step::Delete(k) => {
                let name = format!("k{k}");
                let Some((revision, value)) = model.now().get(&name).copied() else {
                    continue;
                };
                let mut write = put(&key("", &name), Expect::Revision(revision), value);
                write.delete = true;
                let record = store.write(write).await.unwrap();
                let mut state = model.now();
                state.remove(&name);
                model.states.push(state);
                model.events.push((record.revision, name, false, true));
            }
            Step::Stale(k) => {
                let name = format!("k{k}");
                let wrong = match model.now().get(&name) {
                    Some((revision, _)) if k % 2 == 0 => Expect::Revision(revision + 1000),
                    Some(_) => Expect::Absent,
                    None => Expect::Revision(1),
                };
                let refused = store.write(put(&key("", &name), wrong, 0)).await;
                assert!(
                    matches!(refused, Err(WriteError::Changed(_))),
                    "{refused:?}"
                );
            }
            Step::Compact(back) => {
                let revision = store.revision().saturating_sub(u64::from(back));
                model.oldest = store.compact(revision).await.unwrap().max(model.oldest);
                assert!(model.oldest >= revision);
            }
            Step::Reopen => {
                let before = store.revision();
                store.close().await;
                drop(store);
                store = open(&storage);
                assert_eq!(store.revision(), before);
            }
        }
    }
    check(&store, &model, first).await;
    store.close().await;
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn the_store_is_what_its_model_says(steps in steps()) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(run(steps));
    }
}

#[tokio::test]
async fn pages_follow_each_other_by_namespace_and_name() {
    let store = open(&Storage::Memory);
    for (namespace, name) in [("b", "1"), ("a", "2"), ("a-b", "1"), ("a", "1"), ("b", "2")] {
        store
            .write(put(&key(namespace, name), Expect::Absent, 0))
            .await
            .unwrap();
    }
    let mut range = Range {
        limit: 2,
        ..everything()
    };
    let mut seen = Vec::new();
    loop {
        let page = store.list(range.clone()).await.unwrap();
        seen.extend(
            page.records
                .iter()
                .map(|r| format!("{}/{}", r.key.namespace, r.key.name)),
        );
        let last = page.records.last().unwrap();
        range.after = Some((last.key.namespace.clone(), last.key.name.clone()));
        assert_eq!(
            store.count(range.clone()).await.unwrap(),
            5 - seen.len() as u64
        );
        if !page.more {
            break;
        }
    }
    assert_eq!(seen, ["a/1", "a/2", "a-b/1", "b/1", "b/2"]);
}

#[tokio::test]
async fn a_second_process_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let storage = Storage::Directory(directory.path().to_owned());
    let store = open(&storage);
    let Err(error) = Store::open(&storage, Arc::new(|| 0)) else {
        panic!("opened twice")
    };
    assert!(
        error
            .to_string()
            .contains("another process is using this state directory"),
        "{error}"
    );
    store.close().await;
    drop(store);
    // The lock goes with the thread.
    open(&storage).close().await;
}

#[test]
fn a_file_that_is_no_database_is_told_and_left_alone() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("control-plane.db");
    let garbage = vec![b'x'; 8192];
    std::fs::write(&path, &garbage).unwrap();
    let Err(error) = Store::open(
        &Storage::Directory(directory.path().to_owned()),
        Arc::new(|| 0),
    ) else {
        panic!("opened garbage")
    };
    let text = error.to_string();
    assert!(
        text.contains("control-plane.db") && text.contains("not a database"),
        "{text}"
    );
    assert_eq!(std::fs::read(&path).unwrap(), garbage);
}

#[tokio::test]
async fn a_full_disk_refuses_the_write_and_loses_nothing() {
    let store = open(&Storage::Memory);
    store
        .write(put(&key("", "before"), Expect::Absent, 1))
        .await
        .unwrap();
    store
        .ask(|database| {
            database.limit_pages()?;
            Ok(())
        })
        .await
        .unwrap();
    let before = store.revision();
    let mut big = put(&key("", "big"), Expect::Absent, 1);
    big.object["blob"] = "x".repeat(4 << 20).into();
    let Err(error) = store.write(big).await else {
        panic!("written to a full disk")
    };
    assert!(error.to_string().contains("full"), "{error}");
    assert_eq!(store.revision(), before);
    let page = store.list(everything()).await.unwrap();
    assert_eq!(page.records.len(), 1);
}

#[tokio::test]
async fn a_guard_that_changed_stops_the_write() {
    let store = open(&Storage::Memory);
    let guard = key("", "guard");
    let first = store.write(put(&guard, Expect::Absent, 1)).await.unwrap();
    let mut write = put(&key("", "a"), Expect::Absent, 1);
    write.guard = Some((guard.clone(), first.revision));
    store.write(write).await.unwrap();
    store
        .write(put(&guard, Expect::Revision(first.revision), 2))
        .await
        .unwrap();
    let mut write = put(&key("", "b"), Expect::Absent, 1);
    write.guard = Some((guard, first.revision));
    assert!(matches!(store.write(write).await, Err(WriteError::Guard)));
}

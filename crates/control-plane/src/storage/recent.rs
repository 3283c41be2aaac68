//! The newest events in memory, so that a watcher that keeps up never asks the database.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use super::Record;

/// What is held at most; older events are read from the log.
const MAX_EVENTS: usize = 1024;
const MAX_BYTES: usize = 1024 * 1024;

#[derive(Debug)]
struct Inner {
    events: VecDeque<Arc<Record>>,
    bytes: usize,
    /// Every event after this revision is here.
    floor: u64,
    newest: u64,
}

#[derive(Debug)]
pub(super) struct Recent(Mutex<Inner>);

impl Recent {
    pub fn new(newest: u64) -> Self {
        Self(Mutex::new(Inner {
            events: VecDeque::new(),
            bytes: 0,
            floor: newest,
            newest,
        }))
    }

    /// Takes the events of one commit.
    pub fn push(&self, events: &[Record]) {
        let mut inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for event in events {
            inner.bytes += size(event);
            inner.newest = event.revision;
            inner.events.push_back(Arc::new(event.clone()));
        }
        while inner.events.len() > MAX_EVENTS || inner.bytes > MAX_BYTES {
            let Some(oldest) = inner.events.pop_front() else {
                break;
            };
            inner.bytes -= size(&oldest);
            inner.floor = oldest.revision;
        }
    }

    /// None when the answer is not all here.
    pub fn after(
        &self,
        resource: Option<&Arc<str>>,
        after: u64,
        limit: usize,
    ) -> Option<(Vec<Arc<Record>>, u64)> {
        let inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if after < inner.floor {
            return None;
        }
        if after > inner.newest {
            return Some((Vec::new(), after));
        }
        let start = inner.events.partition_point(|e| e.revision <= after);
        let mut found = Vec::new();
        for event in inner.events.range(start..) {
            if resource.is_some_and(|r| **r != *event.key.resource) {
                continue;
            }
            if found.len() == limit {
                let complete = found.last().map_or(after, |e: &Arc<Record>| e.revision);
                return Some((found, complete));
            }
            found.push(Arc::clone(event));
        }
        Some((found, inner.newest))
    }

    /// What the log has forgotten must not be answered from here either.
    pub fn compact(&self, oldest: u64) {
        let mut inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        while inner.events.front().is_some_and(|e| e.revision <= oldest) {
            if let Some(event) = inner.events.pop_front() {
                inner.bytes -= size(&event);
            }
        }
        inner.floor = inner.floor.max(oldest);
    }
}

fn size(record: &Record) -> usize {
    record.value.len() + record.previous.as_ref().map_or(0, bytes::Bytes::len) + 200
}

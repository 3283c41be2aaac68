//! Telling subscribers which proxies to look at. Each has a set of its own: a key that is told twice
//! before it is read is read once, and none is ever dropped, however slow the reader is.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use egress_core::ProxyKey;
use futures::stream::BoxStream;
use tokio::sync::Notify;

#[derive(Default)]
struct Queue {
    keys: BTreeSet<ProxyKey>,
    /// Where the last one was taken: the next is taken after it, so that keys that are told over
    /// and over do not hold up those behind them.
    last: Option<ProxyKey>,
    closed: bool,
}

#[derive(Default)]
struct Subscriber {
    queue: Mutex<Queue>,
    wake: Notify,
}

impl Subscriber {
    fn with<T>(&self, f: impl FnOnce(&mut Queue) -> T) -> T {
        f(&mut self.queue.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// None: closed. Some(None): nothing now.
    fn pop(&self) -> Option<Option<ProxyKey>> {
        self.with(|queue| {
            let next = match &queue.last {
                Some(last) => {
                    use std::ops::Bound::{Excluded, Unbounded};
                    queue
                        .keys
                        .range((Excluded(last), Unbounded))
                        .next()
                        .or_else(|| queue.keys.first())
                }
                None => queue.keys.first(),
            }
            .cloned();
            match next {
                Some(key) => {
                    queue.keys.remove(&key);
                    queue.last = Some(key.clone());
                    Some(Some(key))
                }
                None if queue.closed => None,
                None => Some(None),
            }
        })
    }
}

/// Those who listen. Whoever dropped their stream is forgotten.
#[derive(Default)]
pub(crate) struct Transitions {
    subscribers: Mutex<Vec<Weak<Subscriber>>>,
}

impl Transitions {
    /// A stream of its own that begins with `known`.
    pub(crate) fn subscribe(
        &self,
        known: impl IntoIterator<Item = ProxyKey>,
    ) -> BoxStream<'static, ProxyKey> {
        let subscriber = Arc::new(Subscriber::default());
        subscriber.with(|queue| queue.keys.extend(known));
        self.subscribers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(Arc::downgrade(&subscriber));
        Box::pin(futures::stream::unfold(subscriber, |subscriber| async {
            loop {
                // `notify_one` leaves a permit behind when nobody waits: nothing falls between the
                // look and the wait.
                match subscriber.pop()? {
                    Some(key) => return Some((key, subscriber)),
                    None => subscriber.wake.notified().await,
                }
            }
        }))
    }

    pub(crate) fn tell(&self, key: &ProxyKey) {
        self.each(|queue| {
            queue.keys.insert(key.clone());
        });
    }

    /// Streams end once they are read empty.
    pub(crate) fn close(&self) {
        self.each(|queue| queue.closed = true);
    }

    fn each(&self, mut change: impl FnMut(&mut Queue)) {
        self.subscribers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .retain(|weak| match weak.upgrade() {
                Some(subscriber) => {
                    subscriber.with(&mut change);
                    subscriber.wake.notify_one();
                    true
                }
                None => false,
            });
    }
}

#[cfg(test)]
mod tests {
    use futures::{FutureExt, StreamExt};

    use super::*;

    fn key(name: &str) -> ProxyKey {
        ProxyKey::new("default", name)
    }

    #[tokio::test]
    async fn each_subscriber_gets_each_key_once_however_slow() {
        let transitions = Transitions::default();
        let mut fast = transitions.subscribe([]);
        let mut slow = transitions.subscribe([key("known")]);
        for _ in 0..1000 {
            transitions.tell(&key("a"));
            assert_eq!(fast.next().await, Some(key("a")));
        }
        transitions.tell(&key("b"));
        assert_eq!(fast.next().await, Some(key("b")));
        let got: Vec<_> = [slow.next().await, slow.next().await, slow.next().await]
            .into_iter()
            .flatten()
            .collect();
        assert_eq!(got, [key("a"), key("b"), key("known")]);
        assert!(slow.next().now_or_never().is_none());
    }

    #[tokio::test]
    async fn a_key_told_over_and_over_does_not_hold_up_the_others() {
        let transitions = Transitions::default();
        let mut stream = transitions.subscribe([key("a"), key("b")]);
        assert_eq!(stream.next().await, Some(key("a")));
        transitions.tell(&key("a"));
        assert_eq!(stream.next().await, Some(key("b")));
        assert_eq!(stream.next().await, Some(key("a")));
    }

    #[tokio::test]
    async fn a_closed_stream_ends_after_what_was_told() {
        let transitions = Transitions::default();
        let mut stream = transitions.subscribe([]);
        transitions.tell(&key("a"));
        transitions.close();
        assert_eq!(stream.next().await, Some(key("a")));
        assert_eq!(stream.next().await, None);
        drop(stream);
        transitions.tell(&key("a"));
        assert!(transitions.subscribers.lock().unwrap().is_empty());
    }
}

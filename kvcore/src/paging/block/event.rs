//! Events for routers, which report the keys that can now be found in a pool and the keys that no longer can.

use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::base::BlockId;
use crate::paging::BlockKey;

/// A change in the keys that can be found in a pool.
///
/// A pool's events reach a sink in order: a key is reported as stored before it is reported as removed. With
/// [`super::Duplicates::Keep`], each block of a key is reported separately: the key can be found as long as
/// it was reported as stored more often than as removed.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum KvEvent {
    /// Blocks can now be found under these keys. Each key is the child of the previous key.
    Stored {
        /// Key of the block before the first of these blocks, or `None` if the caller did not provide it.
        parent: Option<BlockKey>,
        /// The keys, in order.
        keys: Vec<BlockKey>,
        /// The blocks that are registered under the keys.
        blocks: Vec<BlockId>,
    },
    /// A key can no longer be found: its block was evicted or cleared, or has expired.
    Removed {
        /// The key.
        key: BlockKey,
        /// The block that was registered under the key.
        block: BlockId,
    },
    /// No keys are left: the pool was cleared while no block with a key was held or pinned. If a block with a
    /// key is held or pinned, each cleared key is reported as removed instead.
    Cleared,
}

/// Receives a pool's events.
///
/// The pool calls `record` for one event at a time, in order, after it has released its locks: a sink may call
/// the pool. The thread that is in `record` also delivers the events of other threads, so `record` should
/// return soon. If it panics, the event is lost, and the operation that caused the event is unaffected.
pub trait EventSink: Send + Sync + fmt::Debug {
    /// Receives one event.
    fn record(&self, event: KvEvent);
}

// Decision: docs/decisions/paging.md#events-are-queued-under-the-locks-of-the-pool
/// The events that a pool has not yet delivered to its sink.
#[derive(Debug)]
pub(super) struct Outbox {
    sink: Arc<dyn EventSink>,
    /// The events, oldest first, and whether a thread is delivering one.
    waiting: Mutex<(VecDeque<KvEvent>, bool)>,
}

impl Outbox {
    pub(super) fn new(sink: Arc<dyn EventSink>) -> Self {
        Self { sink, waiting: Mutex::default() }
    }

    /// Adds an event. The caller holds the locks that determine the order of events.
    pub(super) fn push(&self, event: KvEvent) {
        self.waiting.lock().0.push_back(event);
    }

    /// Delivers all events, unless another call is delivering them. The caller holds no locks of the pool.
    pub(super) fn deliver(&self) {
        let mut waiting = self.waiting.lock();
        while !waiting.1
            && let Some(event) = waiting.0.pop_front()
        {
            waiting.1 = true;
            drop(waiting);
            let _ = catch_unwind(AssertUnwindSafe(|| self.sink.record(event)));
            waiting = self.waiting.lock();
            waiting.1 = false;
        }
    }
}

/// A bounded queue of events, for a router's publisher to drain.
///
/// ```
/// use std::sync::Arc;
/// use kvcore::{BlockPool, EventQueue, KeyScope, KvEvent, PoolConfig};
///
/// let events = Arc::new(EventQueue::new(1000));
/// let pool = BlockPool::with_config(0..4, PoolConfig::default().events(events.clone()))?;
/// let key = KeyScope::new("m", b"w").root().child(&[1, 2]);
/// drop(pool.allocate(1)?.register(None, &[key])?);
/// pool.clear_cached();
/// let (seen, lost) = events.drain();
/// assert!(matches!(seen[..], [KvEvent::Stored { .. }, KvEvent::Cleared]) && lost == 0);
/// # Ok::<(), kvcore::Error>(())
/// ```
#[derive(Debug)]
pub struct EventQueue {
    capacity: usize,
    inner: Mutex<(VecDeque<KvEvent>, u64)>,
}

impl EventQueue {
    /// Creates a queue that keeps the newest `capacity` events, or one event if `capacity` is 0.
    pub fn new(capacity: usize) -> Self {
        Self { capacity: capacity.max(1), inner: Mutex::default() }
    }

    /// Returns all events, oldest first, and removes them. Also returns the number of events that were lost
    /// since the last call because the queue was full. After a loss, a router must forget everything it knew
    /// about this pool.
    pub fn drain(&self) -> (Vec<KvEvent>, u64) {
        let mut inner = self.inner.lock();
        let lost = std::mem::take(&mut inner.1);
        (inner.0.drain(..).collect(), lost)
    }
}

impl EventSink for EventQueue {
    fn record(&self, event: KvEvent) {
        let mut inner = self.inner.lock();
        if inner.0.len() == self.capacity {
            inner.0.pop_front();
            inner.1 += 1;
        }
        inner.0.push_back(event);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_sent_as_json() {
        let key = crate::paging::KeyScope::new("m", b"").root();
        let event =
            KvEvent::Stored { parent: Some(key), keys: vec![key.child(&[1])], blocks: vec![BlockId(7)] };
        let json = serde_json::to_string(&event).unwrap();
        assert!(
            json.starts_with(r#"{"event":"stored","parent":""#) && json.ends_with(r#""blocks":[7]}"#),
            "{json}"
        );
        assert_eq!(serde_json::from_str::<KvEvent>(&json).unwrap(), event);
        assert!(
            serde_json::from_str::<KvEvent>(
                &json.replace("stored\",\"parent\":\"", "stored\",\"parent\":\"x")
            )
            .is_err()
        );
    }

    #[test]
    fn a_full_queue_counts_lost_events() {
        let queue = EventQueue::new(2);
        for _ in 0..5 {
            queue.record(KvEvent::Cleared);
        }
        assert_eq!(queue.drain(), (vec![KvEvent::Cleared; 2], 3));
        assert_eq!(queue.drain(), (vec![], 0));
    }
}

//! What routers want to know: which keys a pool holds from now on, and which no more.

use std::collections::VecDeque;
use std::fmt;

use parking_lot::Mutex;

use crate::base::BlockId;
use crate::paging::BlockKey;

/// A change of what can be found in a pool.
///
/// Events of one pool reach a sink in an order in which each key is stored before it is removed. Under
/// [`super::Duplicates::Keep`] each block of a key is stored and removed by itself: a key is found as long as
/// it was stored more often than removed.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum KvEvent {
    /// Blocks can be found under these keys, each the child of the one before.
    Stored {
        /// Key of the block before the first one; `None` if the caller gave none.
        parent: Option<BlockKey>,
        /// Keys in order.
        keys: Vec<BlockKey>,
        /// The blocks that hold them.
        blocks: Vec<BlockId>,
    },
    /// A key is not found any more: its block was evicted, cleared, or has expired.
    Removed {
        /// The key.
        key: BlockKey,
        /// The block that held it.
        block: BlockId,
    },
    /// No key is left: the pool was cleared while nobody held a block with a key. If somebody does, each key
    /// that goes is removed by itself.
    Cleared,
}

/// Receives the events of a pool.
///
/// The pool calls it under its locks: it must return at once and must not call the pool.
pub trait EventSink: Send + Sync + fmt::Debug {
    /// One more event.
    fn record(&self, event: KvEvent);
}

/// A bounded queue of events, to be drained by a router's publisher.
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
    /// A queue that keeps the newest `capacity` events.
    pub fn new(capacity: usize) -> Self {
        Self { capacity: capacity.max(1), inner: Mutex::default() }
    }

    /// Takes all events, oldest first, and how many were lost before them because nobody drained the
    /// queue in time. After a loss a router must forget what it knew of this pool.
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
    fn a_full_queue_counts_what_it_lost() {
        let queue = EventQueue::new(2);
        for _ in 0..5 {
            queue.record(KvEvent::Cleared);
        }
        assert_eq!(queue.drain(), (vec![KvEvent::Cleared; 2], 3));
        assert_eq!(queue.drain(), (vec![], 0));
    }
}

//! The rules of a pool, and the context in which its shards apply them.

use super::FreeOrder;
use super::clock::Clock;
use super::event::Outbox;
use super::index::Index;

/// The pool settings that its shards use.
#[derive(Debug)]
pub(super) struct Rules {
    /// ID of the pool's first block.
    pub(super) first: u32,
    pub(super) free_order: FreeOrder,
    /// Time to live in milliseconds.
    pub(super) ttl: Option<u64>,
    pub(super) events: Option<Outbox>,
    /// The clock, if the pool needs the time.
    pub(super) clock: Option<std::sync::Arc<dyn Clock>>,
}

/// The context that a shard's methods need besides the shard itself.
///
/// # Drop behaviour
/// Delivers the pool's events, so it must be dropped after the locks of the shards.
pub(super) struct Moment<'a> {
    /// The time in milliseconds, or 0 if the pool does not need the time.
    pub(super) now: u64,
    pub(super) rules: &'a Rules,
    pub(super) index: &'a Index,
}

impl Drop for Moment<'_> {
    fn drop(&mut self) {
        if let Some(events) = &self.rules.events {
            events.deliver();
        }
    }
}

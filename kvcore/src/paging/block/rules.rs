//! The rules of a pool, and the moment at which its shards apply them.

use super::FreeOrder;
use super::clock::Clock;
use super::event::EventSink;
use super::index::Index;

/// The settings of the pool that its shards use.
#[derive(Debug)]
pub(super) struct Rules {
    /// First block id of the pool.
    pub(super) first: u32,
    pub(super) free_order: FreeOrder,
    /// Time to live in milliseconds.
    pub(super) ttl: Option<u64>,
    pub(super) events: Option<std::sync::Arc<dyn EventSink>>,
    /// Present only if the pool needs the time.
    pub(super) clock: Option<std::sync::Arc<dyn Clock>>,
}

/// Everything outside a shard that a change of its blocks depends on.
#[derive(Clone, Copy)]
pub(super) struct Moment<'a> {
    /// The time in milliseconds, or 0 if the pool needs no time.
    pub(super) now: u64,
    pub(super) rules: &'a Rules,
    pub(super) index: &'a Index,
}

//! Which cached block goes first.

use std::fmt;

mod lru;

pub use lru::Lru;

/// An order over cached blocks, identified by their index in the pool.
///
/// The pool calls it under its lock: keep every method short. The caller guarantees that `insert`
/// and `remove` alternate for an index, and that every index is below the pool's size.
pub trait EvictionPolicy: Send + fmt::Debug {
    /// The last holder of the block has gone.
    fn insert(&mut self, block: u32);

    /// The block has a holder again.
    fn remove(&mut self, block: u32);

    /// Takes the block that is to go next.
    fn evict(&mut self) -> Option<u32>;

    /// Blocks in the order.
    fn len(&self) -> usize;

    /// Whether no block is in the order.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

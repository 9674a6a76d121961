//! Blocks: ids, the pool that owns their states, and the guards that move them through life.
//!
//! ```text
//!            allocate            complete            register(key) / share
//!   Free ───────────────► Mutable ───────► Complete ───────────────────────► Shared (n holders)
//!    ▲                       │                │                                │          ▲
//!    │◄──────── drop ────────┴───── drop ─────┘          last holder drops     │          │ lookup
//!    │                                                                         ▼          │
//!    │◄──────────────────────── evicted, or nothing retains it ───────────── Cached ──────┘
//! ```
//!
//! Each state has its own guard type and each step consumes the guard of the state before, so an
//! illegal step does not compile. Dropping a guard returns the block; there is no other way to free
//! one, hence no double free. What keeps a block without holders alive is a *claim*: its key in the
//! pool's index (evictable by the pool), or a [`RetainedRun`] held by a cache that evicts by itself.
//!
//! A block cannot be filled after it was completed:
//!
//! ```compile_fail,E0382
//! let pool = kvcore::BlockPool::new(0..1)?;
//! let block = pool.allocate(1)?.remove(0);
//! let complete = block.complete();
//! block.complete(); // moved
//! # Ok::<(), kvcore::Error>(())
//! ```
//!
//! and a shared one offers no way back to a mutable one:
//!
//! ```compile_fail,E0599
//! let pool = kvcore::BlockPool::new(0..1)?;
//! let shared = pool.allocate(1)?.remove(0).complete().share();
//! shared.complete();
//! # Ok::<(), kvcore::Error>(())
//! ```

use std::fmt;

mod evict;
mod guard;
mod pool;
mod run;
mod state;
mod table;

pub use evict::{EvictionPolicy, Lru};
pub use guard::{CompleteBlock, MutableBlock, SharedBlock};
pub use pool::{BlockPool, PoolCounts};
pub use run::{RetainedRun, SharedRun};
pub use table::{BlockTable, PADDING_SLOT};

/// A physical block of an arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

impl BlockId {
    /// The id as an index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

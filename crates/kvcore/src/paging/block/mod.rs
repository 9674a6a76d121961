//! Blocks: ids, the pool that owns their states, and the guards that move them through life.
//!
//! ```text
//!            allocate            complete            register(key) / share
//!   Free ───────────────► Mutable ───────► Complete ───────────────────────► Shared (n holders)
//!    ▲                       │                │                                │          ▲
//!    │◄──────── drop ────────┴───── drop ─────┘          last holder drops     │          │ lookup
//!    │                                                                         ▼          │
//!    │◄──────────────────────── evicted, or nothing claims it ────────────── Cached ──────┘
//! ```
//!
//! One step leads back: the only holder of a block that has no key and no pin may fill it further
//! ([`SharedBlocks::reclaim_last`]); nobody else can have read it.
//!
//! Each state has its own guard type, which holds any number of blocks, and each step consumes the
//! guard of the state before, so an illegal step does not compile. Dropping a guard returns the blocks;
//! there is no other way to free one, hence no double free. What keeps a block without holders alive is
//! a *claim*: its key in the pool's index (evictable by the pool), or a pin ([`PinnedBlocks`]).
//!
//! Blocks cannot be filled after they were completed:
//!
//! ```compile_fail,E0382
//! let pool = kvcore::BlockPool::new(0..1)?;
//! let blocks = pool.allocate(1)?;
//! let complete = blocks.complete();
//! blocks.complete(); // moved
//! # Ok::<(), kvcore::Error>(())
//! ```
//!
//! and shared ones offer no way back to mutable ones:
//!
//! ```compile_fail,E0599
//! let pool = kvcore::BlockPool::new(0..1)?;
//! let shared = pool.allocate(1)?.complete().share();
//! shared.complete();
//! # Ok::<(), kvcore::Error>(())
//! ```

mod check;
mod clock;
mod config;
mod event;
mod evict;
mod guard;
mod index;
mod pin;
mod pool;
mod shard;
mod table;

pub use clock::{Clock, ManualClock, SystemClock};
pub use config::{Duplicates, FreeOrder, PoolConfig};
pub use event::{EventQueue, EventSink, KvEvent};
pub use evict::{Entry, EvictionPolicy, Lru, PolicyKind, PriorityLru, Retention, S3Fifo, TinyLfu};
pub use guard::{CompleteBlocks, MutableBlocks, Rejected, SharedBlocks};
pub use pin::PinnedBlocks;
pub use pool::{BlockPool, Lookups, PoolCounts};
pub use table::{BlockTable, TailCopy};

//! Blocks: IDs, the pool that owns their states, and the guards that change their states.
//!
//! ```text
//!          allocate             register(keys) / share                last holder drops, claimed
//!   Free ────────────► Mutable ─────────────────────► Shared         ─────────────────────────────► Cached
//!                                                   (n holders)      ◄─────────────────────────────
//!                                                                               lookup
//!   and back:
//!   Mutable ─► Free      the guard is dropped
//!   Shared  ─► Free      the last holder is dropped, and nothing claims the block
//!   Shared  ─► Mutable   SharedBlocks::reclaim_last
//!   Cached  ─► Mutable   evicted for an allocation
//!   Cached  ─► Free      expired, or the last claim ends
//! ```
//!
//! Only the sole holder of a block with neither key nor pin may continue filling it
//! ([`SharedBlocks::reclaim_last`]), because nothing else can read the block.
//!
//! The states Mutable and Shared each have a guard type, which holds any number of blocks. A state change
//! consumes the guard of the previous state, so an illegal change does not compile. Dropping a guard returns
//! the blocks, and nothing else frees them, so no block is freed twice. A block without holders is kept alive
//! by a *claim*: its key in the pool's index (the pool may evict the block) or a pin ([`PinnedBlocks`]).
//!
//! Only a guard of mutable blocks issues write permits ([`MutableBlocks::write_slots`],
//! [`MutableBlocks::write_pairs`]). Sharing, splitting or dropping the guard voids the permits. A
//! [`BlockTable`] that shares its first blocks voids only the permits for those blocks. Shared blocks have no
//! method that permits writes:
//!
//! ```compile_fail,E0599
//! let pool = kvcore::BlockPool::new(0..1)?;
//! let shared = pool.allocate(1)?.share();
//! shared.write_slots(16, [0]);
//! # Ok::<(), kvcore::Error>(())
//! ```

mod chains;
mod check;
mod clock;
mod config;
mod counts;
mod event;
mod evict;
mod guard;
mod index;
mod pin;
mod pool;
mod rules;
mod shard;
mod table;

pub use clock::{Clock, ManualClock, SystemClock};
pub use config::{Duplicates, FreeOrder, PoolConfig};
pub use counts::PoolCounts;
pub use event::{EventQueue, EventSink, KvEvent};
pub use evict::{EvictionPolicy, Lru, PolicyEntry, PolicyKind, PriorityLru, Retention, S3Fifo, TinyLfu};
pub use guard::{MutableBlocks, Rejected, SharedBlocks};
pub use pin::PinnedBlocks;
pub use pool::{BlockPool, Lookups};
pub use table::{BlockTable, TailCopy};

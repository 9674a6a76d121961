//! The data structures of an engine: keys, the block pool and its policies, block tables, caches, prefixes,
//! sleep, and the batch that a model processes.

pub mod batch;
pub mod block;
pub mod cache;
pub mod key;
mod sleep;
mod sync;

pub use batch::{BatchRows, GroupInput, Logits, SequenceInput, StepBatch};
pub use block::{
    BlockPool, BlockTable, Clock, Duplicates, EventQueue, EventSink, EvictionPolicy, FreeOrder, KvEvent,
    Lookups, Lru, ManualClock, MutableBlocks, PinnedBlocks, PolicyEntry, PolicyKind, PoolConfig, PoolCounts,
    PriorityLru, Rejected, Retention, S3Fifo, SharedBlocks, SystemClock, TailCopy, TinyLfu,
};
pub use cache::*;
pub use key::{BlockKey, KeyScheme, KeyScope, PromptKeys, VllmChain, VllmExtras};
pub use sleep::{ReservedArena, SleepingBlocks};

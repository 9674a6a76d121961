//! Device-agnostic structures of a KV cache for LLM inference.
//!
//! ```text
//!   tokens ──► BlockKey chain ──► BlockPool ──► BlockTable ──► SlotMapping ──► Scatter ─┐
//!                                   │  guards: Mutable → Complete → Shared → Cached    │
//!                                   ▼                                                  ▼
//!                                Segment { blocks, logical order, offset } ──► Attend ◄─ KvArena
//! ```
//!
//! This crate knows no device API, no async runtime and no model. A backend implements
//! [`Backend`], [`Stream`] and [`Kernels`]; an engine keeps sequences in a [`PagedKvCache`] (or a
//! [`StaticKvCache`]) and hands operations to a stream.
//!
//! ```
//! use kvcore::{BlockPool, BlockTable};
//!
//! let pool = BlockPool::new(0..4)?;
//! let mut table = BlockTable::new(&pool, 16)?;
//! let slots = table.grow(20)?;                       // 20 tokens over two blocks
//! assert_eq!(slots.len(), 20);
//! drop(table);                                       // both blocks are free again
//! assert_eq!(pool.counts().free, 4);
//! # Ok::<(), kvcore::Error>(())
//! ```

#![forbid(unsafe_code)]

pub mod backend;
pub mod block;
pub mod cache;
mod dtype;
mod error;
pub mod forward;
pub mod kernels;
pub mod key;
mod layout;
pub mod metrics;
pub mod parallel;
mod profile;
pub mod quant;
pub mod rope;
pub mod storage;
mod sync;
pub mod tensor;

pub use backend::{
    Backend, Capabilities, CounterSnapshot, Event, MemoryKind, ReservedStorage, Storage, Stream,
    allocate_tensor,
};
pub use block::{
    BlockId, BlockPool, BlockTable, Clock, CompleteBlocks, Duplicates, EventQueue, EventSink, EvictionPolicy,
    FreeOrder, KvEvent, Lookups, Lru, ManualClock, MutableBlocks, PADDING_SLOT, PinnedBlocks, PolicyKind,
    PoolConfig, PoolCounts, PriorityLru, Rejected, Retention, S3Fifo, SharedBlocks, SystemClock, TailCopy,
    TinyLfu,
};
pub use cache::{
    BlockManager, BlockManagerConfig, CacheChoice, CacheConfig, CacheKind, DEFAULT_MAX_BLOCKS, DenseKv,
    DenseSequence, GroupBlocks, GroupKind, GroupedPrefix, KvCache, KvExtents, LayerViews, MaxLen,
    PagedCacheConfig, PagedKvCache, PagedSequences, Placement, Places, PrefixFill, PrefixGroups,
    SealedPrefix, SequenceId, SequenceStart, SingleSequence, SlotMapping, SpannedArena, SpannedPart,
    StaticCacheConfig, StaticKvCache, SwappedSequence,
};
pub use dtype::DType;
pub use error::{Error, Result};
pub use forward::{Logits, SequenceInput};
pub use kernels::{Kernels, KvArena, KvPlane, Segment};
pub use key::{BlockKey, KeyScheme, KeyScope, VllmChain, VllmExtras};
pub use layout::{BlockOrder, KvLayout, KvShape, PlaneStrides, ScaleLayout};
pub use metrics::{Exposition, Latencies, LatencyHistogram, MetricKind};
pub use parallel::{
    HeadShare, Piece, PieceMerger, PiecePlace, PrefillPlan, RankCache, RankInfo, ReceivedMatrix,
};
pub use profile::{ProfileReport, Profiler, Span, SpanStats};
pub use quant::{Fp8Kind, KvFormat, ScaleScope};
pub use rope::{KeyForm, LayerRopes, Pairing, Regime, Rope, RopeConfig, RopeFamily, RopeScaling};
pub use storage::{
    BlockState, Goal, OwnedStorage, PoolMetrics, RequestId, ReservedArena, SleepingBlocks, StorageManager,
    Target, Tier, TierAction, TierThresholds,
};
pub use tensor::TensorView;

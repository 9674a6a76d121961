//! Position-independent chunk caching.
//!
//! A prompt is a system prompt, chunks (documents) and a question. Chunks do not see each other, so a
//! chunk's KV depends on its own tokens and, in one mode, on the system prompt. It is computed once,
//! stored with its keys rotated for a *virtual* place, and used by any number of requests at any
//! offset at the same time: the query is rotated instead of the keys, and no KV byte moves.
//!
//! ```text
//!   system ##  chunk A  ##  chunk B  ## question
//!     │           │            │           │
//!  PrefixFill ChunkHash ──► ChunkCacheManager       Assembler::assemble
//!     │         hit │ miss → reservation   │
//!     ▼             ▼                      ▼
//!  Segment(0)  Segment(offset)  …   SequenceInput ──► one forward pass ──► Assembly::commit
//! ```
//!
//! When reuse equals computing anew under the same mask is said by [`ReuseCell::exactness`].
//!
//! ```
//! use kvchunk::{ChunkedPrompt, PositionPlan, ReuseCell};
//! let prompt = ChunkedPrompt::new(vec![1, 2, 3], vec![vec![4; 5], vec![5; 8]], vec![6])?;
//! let plan = PositionPlan::new(&prompt, ReuseCell::default(), 1024)?;
//! assert_eq!(plan.question_position, 3 + 8); // after the longest chunk
//! # Ok::<(), kvchunk::Error>(())
//! ```

#![forbid(unsafe_code)]

mod assembly;
mod cache;
mod config;
mod error;
mod hash;
mod pool;
mod position;
mod prompt;
mod recompute;
mod replica;
mod scaling;
mod sleep;

pub use assembly::{
    AssembledPrompt, Assembler, Assembly, ChunkReport, ChunkSpan, LocalRank, RankAgreement, Recomputation,
    RotatedCopy, Scratch,
};
pub use cache::{
    Acquired, ChunkCacheManager, ChunkCacheMetrics, ChunkHashIndex, ChunkInfo, ChunkKvCache,
    ChunkReservation, ChunkWaiter, ColdRule, NotWoken, PoolSleep, SleepStore, Sleeping, Tenant, TenantId,
    WeakChunkCache,
};
pub use config::{ChunkCacheConfig, ComputeMode, Exactness, PositionStrategy, ReuseCell};
pub use error::{Error, Result};
pub use hash::{ChunkContext, ChunkHash, ChunkHasher, ChunkPiece, HashAlgorithm};
pub use pool::ChunkBlockPool;
pub use position::{ChunkPlace, MergedKvCache, PositionPlan, PositionReindexer, ReindexedChunkKv};
pub use prompt::{ChunkedPrompt, DEFAULT_SEPARATOR, SplitPrompt};
pub use recompute::{DeviationCheck, DeviationOf, Deviations, Recompute, RecomputeStrategy, TokenSelection};
pub use replica::{
    ChunkParcel, LocalReplica, RemoteLookup, ReplicaDevice, ReplicaId, ReplicaLink, ReplicaTransport,
};
pub use scaling::ContextScaling;
pub use sleep::{ArenaSleep, SleepForm, SleepUsage};

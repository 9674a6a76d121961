//! Position-independent chunk caching.
//!
//! A prompt consists of a system prompt, chunks (documents) and a question. Chunks do not see each other, so
//! a chunk's KV depends only on its own tokens and, in some compute modes, on the system prompt. A chunk's KV
//! is computed once and stored with its keys rotated for a *virtual* position. Any number of requests can use
//! it at the same time, at any offset: attention rotates the query instead of the keys, so no KV bytes move.
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
//! [`ReuseCell::exactness`] describes when reuse gives the same result as a computation from scratch with the
//! same mask.
//!
//! A *chunk cache* finds a document anywhere in a prompt. A *prefix cache* finds only the start of a prompt.
//!
//! ```
//! use kvchunk::{ChunkedPrompt, PositionPlan, ReuseCell};
//!
//! let prompt = ChunkedPrompt::new(vec![1, 2, 3], vec![vec![4; 5], vec![5; 8]], vec![6])?;
//! let plan = PositionPlan::new(&prompt, ReuseCell::default(), 1024)?;
//! assert_eq!(plan.question_position, 3 + 8); // after the longest chunk
//! # Ok::<(), kvchunk::Error>(())
//! ```
//!
//! # Modules
//!
//! - `prompt`: the parts of a prompt, and how a string is split into them
//! - `prefix`: a system prompt, cached to the exact token
//! - `config`: settings, compute modes, position strategies and their exactness
//! - `hash`: the identity of a piece's bytes
//! - `position`: planned positions, placed pieces and merged runs
//! - `pool`: the blocks that hold chunks
//! - `cache`: lookup, acquisition, single flight, tenants, eviction and metrics
//! - `sleep`: moving pieces, or the whole pool, to a lower memory tier
//! - `assembly`: a prompt as segments and inputs; copy-on-write, scratch blocks and rotated copies
//! - `recompute`: strategies that choose the tokens to recompute
//! - `scaling`: the temperature and the scale of the question's attention to chunks
//! - `ranks`: one lookup for all ranks of a model
//! - `replica`: chunks shared between caches of one model
//! - [`metrics`]: latencies, goals and the Prometheus format
//! - `error`: the error type
//!
//! # Glossary
//!
//! - **document**: text that the question is about. This crate sees only its tokens, the *chunk*.
//! - **chunk**: the tokens of one document in one prompt. Long chunks are stored in several *pieces*.
//! - **context** ([`ChunkContext`]): everything that a chunk's key covers apart from chunk tokens: the root
//!   key, the compute mode, the system prompt and the position. In [`ContextScaling`], *context* means all
//!   chunks together, as in APE.
//! - **piece** ([`ChunkPiece`]): the part of a chunk that is stored under one key. A piece is stored once;
//!   every use of it is a separate *segment*.
//! - **segment** ([`kvcore::Segment`]): a run of cached tokens as one request uses it: its blocks, length,
//!   logical start and offset. Several segments may read the blocks of one piece.
//! - **placed piece** ([`PlacedPiece`]): a hold on a piece, together with the position where a prompt uses
//!   the piece. A placed piece becomes a segment.
//! - **run** ([`MergedRun`]): the slots and positions of all parts of a prompt, in token order; also called
//!   the merged KV. Kernels that do not read segments use a run instead.
//! - **place** ([`ChunkPlace`]): the planned logical index of one chunk, and the positions where it is stored
//!   and used.
//! - **span** ([`ChunkSpan`]): one chunk of an assembled prompt, as recompute strategies see it. A place is
//!   planned; a span also records whether the KV already matches full attention.
//! - **cell** ([`ReuseCell`]): a compute mode combined with a position strategy. The cell determines the
//!   exactness of reuse.
//! - **reservation** ([`ChunkReservation`]): writable blocks for a missing piece, owned by the request that
//!   computes it.
//! - **flight** ([`ChunkWaiter`]): work in progress on a piece, which is being computed, put to sleep or
//!   woken. The thread that does the work owns the blocks; other requests wait for the flight.
//! - **hold** ([`PieceHold`]): read-only use of a stored piece. A reservation may be written to; a hold
//!   prevents blocks from being overwritten or evicted.
//! - **parcel** ([`ChunkParcel`]): the bytes of a piece on their way to another replica. A sleeping piece
//!   stays with its own cache.
//! - **rank** ([`RankAgreement`]): one part of a model that is split over several devices or threads. A piece
//!   is a hit on all ranks or on none.
//! - **replica** ([`ReplicaId`]): a whole model with its own cache. Ranks share one request; replicas share
//!   only chunks.

#![forbid(unsafe_code)]

mod assembly;
mod cache;
mod config;
mod error;
mod hash;
pub mod metrics;
mod pool;
mod position;
mod prefix;
mod prompt;
mod ranks;
mod recompute;
mod replica;
mod scaling;
mod sleep;
mod tier;

pub use assembly::{
    AssembledPrompt, Assembler, Assembly, ChunkReport, PinnedParts, Recomputation, RotatedCopy,
    ScratchBlocks, recomputed_root,
};
pub use cache::{
    Acquired, ChunkCacheManager, ChunkCacheMetrics, ChunkHashIndex, ChunkInfo, ChunkReservation, ChunkWaiter,
    PieceHeat, PieceHold, Tenant, TenantId, TenantKeys, WeakChunkCache,
};
pub use config::{
    ChunkCacheConfig, ComputeMode, Exactness, HashAlgorithm, PositionStrategy, Reuse, ReuseCell,
};
pub use error::{Error, Result};
pub use hash::{ChunkContext, ChunkHash, ChunkHasher, ChunkPiece};
pub use pool::ChunkBlockPool;
pub use position::{ChunkPlace, MergedRun, PlacedPiece, PositionPlan, PositionReindexer};
pub use prefix::{PrefixFill, SealedPrefix};
pub use prompt::{ChunkedPrompt, DEFAULT_SEPARATOR, SplitPrompt};
pub use ranks::{CollectiveRank, RankAgreement};
pub use recompute::{
    AttentionCheck, ChunkSpan, DeviationCheck, DeviationOf, Evidence, Findings, Recompute, RecomputeStrategy,
    TokenScores, TokenSelection,
};
pub use replica::{
    BufferMemory, ChunkParcel, LocalReplica, RemoteLookup, ReplicaDevice, ReplicaId, ReplicaLink,
    ReplicaTransport,
};
pub use scaling::ContextScaling;
pub use sleep::{ArenaSleep, ColdRule, NotWoken, PoolSleep, SleepForm, SleepStore, SleepUsage, Sleeping};
pub use tier::{
    Adopted, Adoption, BeganFetch, LoadRule, MissReason, PrefillRate, TierFetch, TierLink, TierMetrics,
};

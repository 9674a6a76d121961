//! The settings of an engine.

use std::fmt;
use std::time::Duration;

use kvchunk::{ChunkCacheConfig, ChunkCacheManager, SleepForm};
use kvcore::{CacheKind, DType, KeyForm, KvFormat, MaxLen, PolicyKind};
use kvmanager::TierThresholds;
use serde::Serialize;

/// The settings of an engine, such as the memory and the layout of its caches.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineConfig {
    /// The format of the stored keys and values. If it is an fp8 format, a pass over 256 sample tokens
    /// determines its scales when the engine is created.
    pub kv_format: KvFormat,
    /// The form in which keys are stored: rotated or unrotated.
    pub keys: KeyForm,
    /// The number of tokens per block.
    pub block_size: usize,
    /// The kind of cache that holds sequences. A static or a grouped cache does not keep chunks, so a chunked
    /// prompt must request full attention. A grouped cache is for models whose layers attend to different
    /// tokens: layers with a window free the blocks that leave it, and the other layers keep everything.
    pub cache: CacheKind,
    /// The maximum length of a sequence in a static cache.
    pub max_len: MaxLen,
    /// The length of a typical request in tokens, including its answer. A grouped cache divides its memory
    /// between its groups for requests of this length. In a group with a window, a request uses blocks for at
    /// most `window + step_tokens` tokens. If most requests are longer, some blocks of the groups with a
    /// window stay unused; if most are shorter, some blocks of the other groups do.
    pub typical_len: usize,
    /// The memory for keys and values, in bytes. `None` allocates enough for eight prompts of the model's
    /// maximum length, but at most [`DEFAULT_KV_MEMORY`].
    pub kv_memory: Option<usize>,
    /// The eviction policy for the cached blocks of sequences. [`ChunkCacheConfig::cache_policy`] is the
    /// policy for chunks.
    pub cache_policy: PolicyKind,
    /// The time after which a cached block expires; `None` means never.
    pub cache_ttl: Option<Duration>,
    /// The settings of the chunk cache.
    pub chunks: ChunkCacheConfig,
    /// The host memory in which chunks sleep, or `None` if they do not sleep. Chunks fall asleep when the
    /// [thresholds](ChunkSleep::thresholds) say so, or when the caller says so through
    /// [`sleep_cold_chunks`](kvchunk::ChunkCacheManager::sleep_cold_chunks) on
    /// [`Engine::chunks`](crate::Engine::chunks). A hit wakes a sleeping chunk.
    pub chunk_sleep: Option<ChunkSleep>,
    /// True if whole pools can [sleep](crate::Engine::sleep). If true, the engine reserves address space, so
    /// that it can release memory and later get it back at the same addresses.
    pub enable_sleep_mode: bool,
    /// A salt that keeps this engine's cached contents apart from the contents of engines for other tenants.
    /// It is part of every key. The engine's operator must choose it, never a client.
    pub tenant_salt: Vec<u8>,
    /// The maximum number of captured decode-step graphs to keep, if the backend and the dense steps support
    /// capture. If 0, every step runs operation by operation. The answers do not depend on this setting.
    pub graphs: usize,
    /// The limits on requests that are answered at the same time.
    pub scheduling: Scheduling,
    /// The maximum amount of host memory for preempted requests, in bytes. A preempted request's blocks are
    /// copied there if, according to the engine's measurements, this takes less time than recomputing them.
    /// The memory is allocated when it is first needed; 0 allocates none.
    pub swap_memory: usize,
    /// True if the profiler records spans.
    pub profile: bool,
}

/// The settings for chunks that sleep in host memory while they are rarely used.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ChunkSleep {
    /// The form in which chunks are stored while they sleep.
    pub form: SleepForm,
    /// The maximum amount of host memory, in bytes. `None` means as much as the chunk pool has on the device.
    /// This memory is allocated all at once, unless chunks are compressed.
    pub memory: Option<usize>,
    /// After each step, a few chunks move if these thresholds ask for it: the coldest ones to host memory when the chunk
    /// pool on the device fills, the coldest ones out of host memory when that fills, and hot ones back to the device.
    /// With a form that is not exact, chunks therefore become approximate by themselves. A chunk that leaves host memory
    /// is still on the disk, if it was saved there. With thresholds of 1, nothing moves.
    pub thresholds: TierThresholds,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            kv_format: KvFormat::Dense(DType::F32),
            keys: KeyForm::default(),
            block_size: 16,
            cache: CacheKind::Paged,
            max_len: MaxLen::Model,
            typical_len: DEFAULT_TYPICAL_LEN,
            kv_memory: None,
            cache_policy: PolicyKind::Lru,
            cache_ttl: None,
            chunks: ChunkCacheConfig::default(),
            chunk_sleep: None,
            enable_sleep_mode: false,
            tenant_salt: Vec::new(),
            graphs: DEFAULT_GRAPHS,
            scheduling: Scheduling::default(),
            swap_memory: DEFAULT_SWAP_MEMORY,
            profile: false,
        }
    }
}

/// The limits on requests that are answered at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scheduling {
    /// The maximum number of tokens per pass. A longer prompt is computed in pieces, so activations need
    /// memory for at most this many rows, and running answers continue between the pieces.
    pub step_tokens: usize,
    /// The maximum number of answers that run at once.
    pub running: usize,
    /// The number of blocks that must stay free for running requests when a request is admitted.
    pub watermark: usize,
}

impl Default for Scheduling {
    fn default() -> Self {
        Self { step_tokens: 512, running: 256, watermark: 4 }
    }
}

/// The default of [`EngineConfig::graphs`]. The decode steps of a single request need about five graphs by
/// the time the request has 4,000 tokens.
pub const DEFAULT_GRAPHS: usize = 16;

/// The default of [`EngineConfig::swap_memory`] in bytes: 512 MiB.
pub const DEFAULT_SWAP_MEMORY: usize = 512 << 20;

/// The default of [`EngineConfig::typical_len`] in tokens.
pub const DEFAULT_TYPICAL_LEN: usize = 2048;

/// The maximum memory for keys and values if [`EngineConfig::kv_memory`] is `None`, in bytes: 2 GiB.
pub const DEFAULT_KV_MEMORY: usize = 2 << 30;

/// A pool that can sleep as a whole. Its [`name`](Self::name) is its tag in
/// [`ReservedArena::asleep`](kvcore::ReservedArena::asleep).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PoolTag {
    /// The pool of sequences and system prompts. Its cached contents are discarded when it sleeps, as in
    /// vLLM.
    KvCache,
    /// The pool of chunks. The chunks are copied to host memory and restored bit for bit.
    ChunkCache,
}

impl PoolTag {
    /// Both pools.
    pub const ALL: [Self; 2] = [Self::KvCache, Self::ChunkCache];

    /// Returns the pool's name: `kv_cache` or `chunk_cache`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::KvCache => "kv_cache",
            Self::ChunkCache => ChunkCacheManager::POOL_TAG,
        }
    }
}

impl fmt::Display for PoolTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

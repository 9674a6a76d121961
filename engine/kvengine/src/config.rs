//! The settings of an engine.

use std::fmt;
use std::time::Duration;

use kvchunk::{ChunkCacheConfig, ChunkCacheManager, SleepForm};
use kvcore::{CacheKind, DType, KeyForm, KvFormat, MaxLen, PolicyKind};
use serde::Serialize;

/// The settings of an engine: the memory of its caches, and their layout.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineConfig {
    /// The format in which keys and values are stored. The scales of an fp8 format are set when the engine is
    /// made, by a pass over 256 sample tokens.
    pub kv_format: KvFormat,
    /// The form in which keys are stored, rotated or not.
    pub keys: KeyForm,
    /// The number of tokens per block.
    pub block_size: usize,
    /// The kind of cache that holds sequences. A static or a grouped cache keeps no chunks, so a chunked
    /// prompt must ask for full attention. A grouped cache is for models whose layers attend to different
    /// tokens: layers with a window free the blocks that leave the window, and the other layers keep
    /// everything.
    pub cache: CacheKind,
    /// The longest sequence of a static cache.
    pub max_len: MaxLen,
    /// The length in tokens, prompt and answer, of a typical request. A grouped cache divides its memory
    /// between its groups for requests of this length. In a group with a window, a request takes blocks for
    /// at most `window + step_tokens` tokens. Longer requests leave blocks of window groups unused, and
    /// shorter requests leave blocks of the other groups unused.
    pub typical_len: usize,
    /// The memory for keys and values in bytes. `None` takes enough for eight prompts of the model's longest
    /// length, or at most [`DEFAULT_KV_MEMORY`].
    pub kv_memory: Option<usize>,
    /// The order in which cached blocks of sequences are evicted. The order for chunks is
    /// [`ChunkCacheConfig::cache_policy`].
    pub cache_policy: PolicyKind,
    /// The time after which a cached block expires; `None` for never.
    pub cache_ttl: Option<Duration>,
    /// The settings of the chunk cache.
    pub chunks: ChunkCacheConfig,
    /// The place in host memory where chunks sleep; `None` for none. Chunks fall asleep by a call of
    /// [`sleep_cold_chunks`](kvchunk::ChunkCacheManager::sleep_cold_chunks) on
    /// [`Engine::chunks`](crate::Engine::chunks). A hit wakes them.
    pub chunk_sleep: Option<ChunkSleep>,
    /// Lets whole pools [sleep](crate::Engine::sleep). The engine then reserves address space, so that memory
    /// can be released and come back at the same addresses.
    pub enable_sleep_mode: bool,
    /// The salt that separates tenants in keys. The operator of the engine chooses it, never a client.
    pub tenant_salt: Vec<u8>,
    /// The largest number of graphs of decode steps, where backend and dense steps can be captured. 0 runs
    /// every step operation by operation. Answers are the same.
    pub graphs: usize,
    /// The limits on requests that are answered at the same time.
    pub scheduling: Scheduling,
    /// The largest number of bytes of host memory for preempted requests. Their blocks are copied there if
    /// that takes less time than recomputing them, as the engine measures. The memory is allocated when it is
    /// first needed; 0 allocates none.
    pub swap_memory: usize,
    /// Turns on the recording of spans.
    pub profile: bool,
}

/// Host memory for chunks that are seldom used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkSleep {
    /// The form in which chunks sleep.
    pub form: SleepForm,
    /// The largest number of bytes of host memory. `None` takes as many as the chunk pool has on the device.
    /// All of it is allocated at once, unless chunks are compressed.
    pub memory: Option<usize>,
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
    /// The largest number of tokens in a pass. A longer prompt is computed in pieces: activations then need
    /// memory for this many rows only, and running answers continue between two pieces.
    pub step_tokens: usize,
    /// The largest number of answers that run at once.
    pub running: usize,
    /// The number of blocks that an admission leaves free for running requests.
    pub watermark: usize,
}

impl Default for Scheduling {
    fn default() -> Self {
        Self { step_tokens: 512, running: 256, watermark: 4 }
    }
}

/// The number of graphs that an engine keeps by default. The steps of a request of 4,000 tokens need five.
pub const DEFAULT_GRAPHS: usize = 16;

/// The default of [`EngineConfig::swap_memory`] in bytes: 512 MiB.
pub const DEFAULT_SWAP_MEMORY: usize = 512 << 20;

/// The default of [`EngineConfig::typical_len`] in tokens.
pub const DEFAULT_TYPICAL_LEN: usize = 2048;

/// The largest memory in bytes that an engine takes for keys and values by default: 2 GiB.
pub const DEFAULT_KV_MEMORY: usize = 2 << 30;

/// A pool that can sleep as a whole, named by its tag in
/// [`ReservedArena::asleep`](kvcore::ReservedArena::asleep).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PoolTag {
    /// The pool of sequences and system prompts. Its cached contents are forgotten, as in vLLM.
    KvCache,
    /// The pool of chunks. The chunks are copied to host memory, and are found again bit for bit.
    ChunkCache,
}

impl PoolTag {
    /// Both pools.
    pub const ALL: [Self; 2] = [Self::KvCache, Self::ChunkCache];

    /// Returns the tag as a word: `kv_cache` or `chunk_cache`.
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

//! The settings of an engine.

use std::time::Duration;

use kvchunk::{ChunkCacheConfig, SleepForm};
use kvcore::{CacheKind, DType, KeyForm, KvFormat, MaxLen, PolicyKind};

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
    /// The kind of cache that holds sequences. A static or a grouped cache keeps no chunks, so a chunked prompt must ask
    /// for full attention. A grouped cache is for models whose layers attend to different tokens: layers with a window let go of
    /// what lies behind it, while the others keep everything.
    pub cache: CacheKind,
    /// The longest sequence of a static cache.
    pub max_len: MaxLen,
    /// The length in tokens, prompt and answer, of the requests that a grouped cache divides its memory for. Each group of layers
    /// gets the blocks of as many requests of this length as all groups together have room for: of a group with a window those of
    /// `window + step_tokens` tokens, if that is less, of another one those of all tokens. Longer requests leave blocks of
    /// windows unused, shorter ones those of the other groups.
    pub typical_len: usize,
    /// The memory for keys and values in bytes. `None` takes enough for eight prompts of the model's longest
    /// length, or at most [`DEFAULT_KV_MEMORY`].
    pub kv_memory: Option<usize>,
    /// The order in which blocks of sequences that no request holds are given up. That of chunks is
    /// [`ChunkCacheConfig::cache_policy`].
    pub cache_policy: PolicyKind,
    /// The time after which such a block is no longer found; `None` for never.
    pub cache_ttl: Option<Duration>,
    /// The settings of the chunk cache.
    pub chunks: ChunkCacheConfig,
    /// The place where chunks sleep; `None` for none. Chunks fall asleep by a call of
    /// [`sleep_cold_chunks`](kvchunk::ChunkCacheManager::sleep_cold_chunks) on [`Engine::chunks`](crate::Engine::chunks). A hit wakes them.
    pub chunk_sleep: Option<ChunkSleep>,
    /// Lets whole pools [sleep](crate::Engine::sleep). For this, address space is reserved, so that memory can be
    /// released and come back at the same addresses.
    pub enable_sleep_mode: bool,
    /// The salt that separates tenants in keys. The operator of the engine chooses it, never a client.
    pub tenant_salt: Vec<u8>,
    /// The largest number of graphs of decode steps, where backend and dense steps can be captured. 0 runs every step
    /// operation by operation. Answers are the same.
    pub graphs: usize,
    /// The limits of requests that are answered at once.
    pub scheduling: Scheduling,
    /// The largest number of bytes of host memory for requests that give way where device memory is short. Their blocks go there if
    /// that costs less than computing them again, by times that the engine measures. Taken when it is first needed; 0 takes none.
    pub swap_memory: usize,
    /// Turns on the recording of spans.
    pub profile: bool,
}

/// A place in host memory for chunks that are seldom used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkSleep {
    /// The form in which chunks sleep.
    pub form: SleepForm,
    /// The largest number of bytes of host memory. `None` takes as many as chunks have on the device. All of
    /// it is allocated at once, unless chunks are compressed.
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

/// The limits of requests that are answered at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scheduling {
    /// The largest number of tokens of a pass. A longer prompt is computed in pieces, so that activations need memory for as many
    /// rows, and running answers go on between two pieces.
    pub step_tokens: usize,
    /// The largest number of answers that run at once.
    pub running: usize,
    /// The number of blocks that a newly admitted request leaves to running ones.
    pub watermark: usize,
}

impl Default for Scheduling {
    fn default() -> Self {
        Self { step_tokens: 512, running: 256, watermark: 4 }
    }
}

/// The number of graphs that an engine keeps by default. The steps of a request of 4,000 tokens need five.
pub const DEFAULT_GRAPHS: usize = 16;

/// The largest host memory in bytes that requests which give way take by default: 512 MiB.
pub const DEFAULT_SWAP_MEMORY: usize = 512 << 20;

/// The length in tokens of the requests that a grouped cache divides its memory for by default.
pub const DEFAULT_TYPICAL_LEN: usize = 2048;

/// The largest memory in bytes that an engine takes for keys and values by default: 2 GiB.
pub const DEFAULT_KV_MEMORY: usize = 2 << 30;

//! The settings of a chunk cache and of chunk reuse.

use std::time::Duration;

use kvcore::PolicyKind;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::prompt::DEFAULT_SEPARATOR;

mod algorithm;
mod cell;
mod reuse;

pub use algorithm::HashAlgorithm;
pub use cell::{ComputeMode, Exactness, PositionStrategy, ReuseCell};
pub use reuse::Reuse;

/// The settings of a chunk cache. A setting missing from a stored config has its default value.
///
/// ```
/// use kvchunk::{ChunkCacheConfig, HashAlgorithm};
/// let config: ChunkCacheConfig = serde_json::from_str(r#"{"max_chunks": 100, "hash_algorithm": "sha256"}"#).unwrap();
/// assert_eq!((config.max_chunks, config.max_chunk_tokens), (100, 4096));
/// assert_eq!(config.hash_algorithm, HashAlgorithm::Sha256);
/// config.check()?;
/// # Ok::<(), kvchunk::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ChunkCacheConfig {
    /// True if the chunk cache is on. If false, every chunked prompt is recomputed with the same mask.
    #[serde(rename = "enable_chunk_cache")]
    pub enabled: bool,
    /// The fraction of the KV memory that is reserved for chunks, above 0 and below 1.
    #[serde(alias = "chunk_cache_gpu_memory_utilization")]
    pub memory_share: f64,
    /// The maximum number of pieces to keep, awake or asleep. Each piece of an oversized chunk counts.
    pub max_chunks: usize,
    /// The maximum number of tokens per piece. A longer chunk is stored in several pieces. Later pieces see
    /// earlier ones, so this limit never changes an answer.
    pub max_chunk_tokens: usize,
    /// The separator between the parts of a prompt, for the program that splits the prompt
    /// ([`SplitPrompt`](crate::SplitPrompt)). Caches and engines only see tokens and never read this field.
    #[serde(alias = "chunk_separator")]
    pub separator: String,
    /// The hash algorithm for chunks.
    #[serde(alias = "chunk_hash_algo")]
    pub hash_algorithm: HashAlgorithm,
    /// The positions that chunks get when they are used. `virtual` is accepted as another name for the
    /// default strategy, although chunks are stored at virtual positions under every strategy except the
    /// absolute one.
    pub position_strategy: PositionStrategy,
    /// The tokens that a chunk sees while its KV is computed.
    pub compute_mode: ComputeMode,
    /// The policy that chooses the next piece to evict.
    pub cache_policy: PolicyKind,
    /// True to measure the times of lookups, placements, computations and wakes.
    #[serde(alias = "log_chunk_cache_stats")]
    pub stats: bool,
    /// The maximum time in milliseconds that a request waits for pieces that other requests are computing.
    /// After that, the request computes the pieces itself. This is also the maximum time that a request to
    /// wake a piece waits for threads that are moving pieces.
    pub max_wait_ms: u64,
    /// True if a piece that is missing under this system prompt may be replaced with a piece that was
    /// computed with another system prompt of at most the same length. The error of such a hit is unbounded,
    /// and the hit counts as approximate.
    pub cross_system_reuse: bool,
}

impl Default for ChunkCacheConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            memory_share: 0.15,
            max_chunks: 500,
            max_chunk_tokens: 4096,
            separator: DEFAULT_SEPARATOR.to_owned(),
            hash_algorithm: HashAlgorithm::default(),
            position_strategy: PositionStrategy::default(),
            compute_mode: ComputeMode::default(),
            cache_policy: PolicyKind::default(),
            stats: true,
            max_wait_ms: 60_000,
            cross_system_reuse: false,
        }
    }
}

impl ChunkCacheConfig {
    /// Returns [`max_wait_ms`](Self::max_wait_ms) as a duration.
    pub fn max_wait(&self) -> Duration {
        Duration::from_millis(self.max_wait_ms)
    }

    /// Returns the compute mode and position strategy as one cell.
    pub fn cell(&self) -> ReuseCell {
        ReuseCell { mode: self.compute_mode, strategy: self.position_strategy }
    }

    /// Checks that every value is valid.
    ///
    /// # Errors
    /// Returns [`Error::Zero`] if `max_chunks` or `max_chunk_tokens` is 0, [`Error::NotAShare`] if
    /// `memory_share` is not above 0 and below 1, and [`Error::EmptySeparator`] if the separator is empty.
    pub fn check(&self) -> Result<()> {
        for (what, value) in [("max_chunks", self.max_chunks), ("max_chunk_tokens", self.max_chunk_tokens)] {
            if value == 0 {
                return Err(Error::Zero { what });
            }
        }
        if !(self.memory_share > 0.0 && self.memory_share < 1.0) {
            return Err(Error::NotAShare { what: "memory_share", value: self.memory_share });
        }
        if self.separator.is_empty() {
            return Err(Error::EmptySeparator);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_the_seeds() {
        let c = ChunkCacheConfig::default();
        assert_eq!((c.enabled, c.memory_share, c.max_chunks, c.max_chunk_tokens), (true, 0.15, 500, 4096));
        assert_eq!((c.separator.as_str(), c.cache_policy, c.stats), ("##", PolicyKind::Lru, true));
        assert_eq!((c.hash_algorithm, c.cross_system_reuse), (HashAlgorithm::Blake3, false));
        assert_eq!((c.cell(), c.max_wait()), (ReuseCell::default(), Duration::from_secs(60)));
    }

    #[test]
    fn the_seeds_recommended_configuration_is_read_word_for_word() {
        let seed = r###"{"chunk_cache_gpu_memory_utilization": 0.15, "max_chunks": 500, "max_chunk_tokens": 4096,
            "chunk_separator": "##", "chunk_hash_algo": "xxhash", "position_strategy": "virtual",
            "cache_policy": "lru", "log_chunk_cache_stats": true}"###;
        let config: ChunkCacheConfig = serde_json::from_str(seed).unwrap();
        config.check().unwrap();
        let same = ChunkCacheConfig { hash_algorithm: HashAlgorithm::Xxh3, ..ChunkCacheConfig::default() };
        assert_eq!(config, same, "its defaults are ours, but for the hash");
        assert_eq!(config.position_strategy, PositionStrategy::Overlapped);
        assert!(serde_json::to_string(&config).unwrap().contains(r#""position_strategy":"overlapped""#));
    }

    #[test]
    fn configs_are_stored_read_back_and_take_the_seeds_names() {
        let config = ChunkCacheConfig { max_chunks: 7, stats: false, ..ChunkCacheConfig::default() };
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<ChunkCacheConfig>(&text).unwrap(), config);
        let seed = r#"{"enable_chunk_cache": false, "chunk_cache_gpu_memory_utilization": 0.3,
            "chunk_separator": "@@", "chunk_hash_algo": "xxh3-128", "log_chunk_cache_stats": false}"#;
        let config: ChunkCacheConfig = serde_json::from_str(seed).unwrap();
        assert_eq!((config.enabled, config.memory_share, config.stats), (false, 0.3, false));
        assert_eq!((config.separator.as_str(), config.hash_algorithm), ("@@", HashAlgorithm::Xxh3));
        assert!(serde_json::from_str::<ChunkCacheConfig>(r#"{"max_chunk": 1}"#).is_err());
    }

    #[test]
    fn values_outside_their_domain_are_named() {
        let named = |config: ChunkCacheConfig| config.check().unwrap_err().to_string();
        let good = ChunkCacheConfig::default;
        assert!(named(ChunkCacheConfig { max_chunks: 0, ..good() }).contains("max_chunks"));
        assert!(named(ChunkCacheConfig { max_chunk_tokens: 0, ..good() }).contains("max_chunk_tokens"));
        for share in [0.0, 1.0, -0.1, f64::NAN] {
            assert!(named(ChunkCacheConfig { memory_share: share, ..good() }).contains("memory_share"));
        }
        assert!(named(ChunkCacheConfig { separator: String::new(), ..good() }).contains("separator"));
    }
}

//! What a chunk cache did, in numbers.

use serde::Serialize;

/// Counts since the cache was made, and what it holds now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct ChunkCacheMetrics {
    /// Pieces of chunks that were looked up.
    pub lookups: u64,
    /// Found.
    pub hits: u64,
    /// Not found, or found under the same key with other tokens.
    pub misses: u64,
    /// Pieces stored.
    pub insertions: u64,
    /// Pieces evicted to make room.
    pub evictions: u64,
    /// Pieces that were computed for one request only, since nothing could be evicted.
    pub uncached: u64,
    /// Tokens of pieces found.
    pub tokens_reused: u64,
    /// Tokens of pieces stored.
    pub tokens_computed: u64,
    /// Pieces held now.
    pub cached_chunks: usize,
    /// Blocks of the pool.
    pub total_blocks: usize,
    /// Blocks of the pool in use or cached.
    pub used_blocks: usize,
}

impl ChunkCacheMetrics {
    /// Hits per lookup; 0 before the first lookup.
    pub fn hit_rate(&self) -> f64 {
        ratio(self.hits as f64, self.lookups as f64)
    }

    /// Used blocks per block.
    pub fn memory_utilization(&self) -> f64 {
        ratio(self.used_blocks as f64, self.total_blocks as f64)
    }
}

fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

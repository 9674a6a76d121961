//! How chunks are computed, where they are used, and how long pieces are.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// What a chunk sees while its KV is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ComputeMode {
    /// The system prompt and itself; stored at the positions right after the system prompt. The key
    /// contains the system prompt.
    #[default]
    WithSystem,
    /// Itself only; stored at positions `0..n`. Serves under any system prompt.
    Alone,
}

/// Where chunks stand in position space when they are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PositionStrategy {
    /// Every chunk right after the system prompt; the question after the longest chunk.
    #[default]
    Overlapped,
    /// One chunk after the other, as in an ordinary prompt.
    Sequential,
}

/// How exact reuse in a cell is, against a reference under the mask "chunks do not see each other".
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Exactness {
    /// Equal to a forward pass with that mask and these positions, to rounding.
    Exact,
    /// Equal only to a pass in two phases: chunks at the positions they were stored for, the
    /// question at sequential positions over all keys. Not to any single pass.
    TwoPhase,
}

/// Strategy and mode together: the cell of the exactness table a request is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct ReuseCell {
    /// What chunks see.
    pub mode: ComputeMode,
    /// Where they are used.
    pub strategy: PositionStrategy,
}

impl ReuseCell {
    /// All four cells.
    pub const ALL: [Self; 4] = [
        Self { mode: ComputeMode::WithSystem, strategy: PositionStrategy::Overlapped },
        Self { mode: ComputeMode::Alone, strategy: PositionStrategy::Overlapped },
        Self { mode: ComputeMode::Alone, strategy: PositionStrategy::Sequential },
        Self { mode: ComputeMode::WithSystem, strategy: PositionStrategy::Sequential },
    ];

    /// How exact reuse in this cell is.
    pub fn exactness(self) -> Exactness {
        match (self.mode, self.strategy) {
            (ComputeMode::WithSystem, PositionStrategy::Sequential) => Exactness::TwoPhase,
            _ => Exactness::Exact,
        }
    }
}

/// Settings of a chunk cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkCacheConfig {
    /// Most chunks kept; the least recently used go first.
    pub max_chunks: usize,
    /// Longer chunks are stored in pieces of this many tokens; later pieces see earlier ones, so the
    /// limit never changes an answer.
    pub max_chunk_tokens: usize,
}

impl Default for ChunkCacheConfig {
    fn default() -> Self {
        Self { max_chunks: 500, max_chunk_tokens: 4096 }
    }
}

impl ChunkCacheConfig {
    /// Checks that no limit is zero.
    pub fn check(&self) -> Result<()> {
        for (what, value) in [("max_chunks", self.max_chunks), ("max_chunk_tokens", self.max_chunk_tokens)] {
            if value == 0 {
                return Err(Error::Zero { what });
            }
        }
        Ok(())
    }
}

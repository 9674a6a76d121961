//! Compute modes, position strategies, and the exactness of reuse in each combination.

use serde::{Deserialize, Serialize};

/// The tokens that a chunk sees while its KV is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ComputeMode {
    /// A chunk sees the system prompt and itself. It is stored at the positions right after the system
    /// prompt, and its key contains the system prompt.
    #[default]
    WithSystem,
    /// A chunk sees only itself. It is stored at positions `0..n` and serves under any system prompt.
    Alone,
}

/// The positions that chunks take when they are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PositionStrategy {
    /// Every chunk starts right after the system prompt. The question starts after the longest chunk.
    #[default]
    #[serde(alias = "virtual")]
    Overlapped,
    /// Chunks follow one another, as in an ordinary prompt.
    Sequential,
    /// Chunks follow one another, as under [`Sequential`](Self::Sequential), but each is stored at the
    /// position where it is used. The position is part of the key, so only the same position in another
    /// prompt is a hit.
    Absolute,
}

/// The exactness of reuse in a cell, compared with a reference under the mask "chunks do not see each other".
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Exactness {
    /// Reuse equals one forward pass with that mask and these positions, to rounding.
    Exact,
    /// Reuse equals only a pass in two phases: chunk rows at their stored positions, question rows at
    /// sequential positions over all keys. No single pass gives the same result.
    TwoPhase,
}

/// A compute mode with a position strategy: one cell of the exactness table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct ReuseCell {
    /// The tokens that a chunk sees while its KV is computed.
    pub mode: ComputeMode,
    /// The positions that chunks take when they are used.
    pub strategy: PositionStrategy,
}

impl ReuseCell {
    /// All six cells: each of the two modes with each of the three strategies.
    pub const ALL: [Self; 6] = {
        use ComputeMode::{Alone, WithSystem};
        use PositionStrategy::{Absolute, Overlapped, Sequential};
        [
            Self { mode: WithSystem, strategy: Overlapped },
            Self { mode: Alone, strategy: Overlapped },
            Self { mode: Alone, strategy: Sequential },
            Self { mode: WithSystem, strategy: Sequential },
            Self { mode: WithSystem, strategy: Absolute },
            Self { mode: Alone, strategy: Absolute },
        ]
    };

    /// Returns the exactness of reuse in this cell.
    pub fn exactness(self) -> Exactness {
        match (self.mode, self.strategy) {
            (ComputeMode::WithSystem, PositionStrategy::Sequential) => Exactness::TwoPhase,
            _ => Exactness::Exact,
        }
    }
}

//! How chunks are computed and where they are used, and how exact their reuse is.

use serde::{Deserialize, Serialize};

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
    #[serde(alias = "virtual")]
    Overlapped,
    /// One chunk after the other, as in an ordinary prompt.
    Sequential,
    /// As sequential, and every chunk is stored where it is used: the position is part of its key, and
    /// only the same place in another prompt is a hit.
    Absolute,
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
    /// All six cells.
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

    /// How exact reuse in this cell is.
    pub fn exactness(self) -> Exactness {
        match (self.mode, self.strategy) {
            (ComputeMode::WithSystem, PositionStrategy::Sequential) => Exactness::TwoPhase,
            _ => Exactness::Exact,
        }
    }
}

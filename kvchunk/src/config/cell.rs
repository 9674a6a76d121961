//! Compute modes, position strategies, and the exactness of reuse in each combination.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::Error;

/// The tokens that a chunk sees while its KV is computed.
///
/// ```
/// use kvchunk::ComputeMode;
/// for name in ["with-system", "alone", "sink:4", "behind:3", "slots:4"] {
///     assert_eq!(name.parse::<ComputeMode>()?.to_string(), name);
/// }
/// assert_eq!(ComputeMode::Sink(4).seen(100), 4);
/// assert!("sink:0".parse::<ComputeMode>().is_err(), "that is alone");
/// # Ok::<(), kvchunk::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum ComputeMode {
    /// A chunk sees the system prompt and itself. It is stored at the positions right after the system
    /// prompt, and its key covers the system prompt.
    #[default]
    WithSystem,
    /// A chunk sees only itself. It is stored at positions `0..n` and can be used with any system prompt.
    Alone,
    /// A chunk sees the first tokens of the system prompt, at least one, and itself. It is stored at the
    /// positions right after them, and can be used with any system prompt that starts with them. These tokens
    /// absorb the attention that a model gives to the first tokens of its input (Xiao et al., 2023), instead
    /// of the chunk's own first tokens.
    Sink(u32),
    /// A chunk sees the system prompt, the first *N* [decoys](crate::ChunkedPrompt::with_decoys) of the prompt,
    /// at least one, and itself. The question never sees the decoys. A chunk is stored at the positions right
    /// after the decoys, and its key covers the system prompt and the decoys.
    ///
    /// A model distinguishes entities by their order. Chunks that are computed separately all look like the
    /// first document, so the model mixes up their facts. A chunk after decoys looks like a later document.
    Behind(u32),
    /// Each chunk of a prompt is computed in a slot of its own, of *N* slots. In slot *s*, which counts from
    /// 0, a chunk is computed as with [`Behind`](Self::Behind) *N* + *s* decoys, under the same key. The model
    /// can thus tell the chunks of one prompt apart by their order. A prompt has at most *N* chunks in this
    /// mode, and needs 2*N* − 1 decoys.
    ///
    /// A chunk gets a slot in which it is stored, if there is one that no other chunk of the prompt needs.
    Slots(u32),
}

impl ComputeMode {
    /// Returns the number of system prompt tokens that a chunk sees if the system prompt has `system` tokens.
    pub fn seen(self, system: usize) -> usize {
        match self {
            Self::WithSystem | Self::Behind(_) | Self::Slots(_) => system,
            Self::Alone => 0,
            Self::Sink(tokens) => system.min(tokens as usize),
        }
    }

    /// Returns the number of decoys that a prompt must have.
    pub fn num_decoys(self) -> usize {
        match self {
            Self::Behind(decoys) => decoys as usize,
            Self::Slots(slots) => (2 * slots as usize).saturating_sub(1),
            Self::WithSystem | Self::Alone | Self::Sink(_) => 0,
        }
    }

    /// Returns the mode in which a chunk is computed in a slot. The slot only matters for
    /// [`Slots`](Self::Slots).
    pub(crate) fn in_slot(self, slot: u32) -> Self {
        match self {
            Self::Slots(slots) => Self::Behind(slots.saturating_add(slot)),
            other => other,
        }
    }
}

impl fmt::Display for ComputeMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WithSystem => f.write_str("with-system"),
            Self::Alone => f.write_str("alone"),
            Self::Sink(tokens) => write!(f, "sink:{tokens}"),
            Self::Behind(decoys) => write!(f, "behind:{decoys}"),
            Self::Slots(slots) => write!(f, "slots:{slots}"),
        }
    }
}

impl FromStr for ComputeMode {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let count = |name: &str| text.strip_prefix(name)?.parse().ok().filter(|&count| count > 0);
        let counted = || {
            let sink = || count("sink:").map(Self::Sink);
            sink().or_else(|| count("behind:").map(Self::Behind)).or_else(|| count("slots:").map(Self::Slots))
        };
        match text {
            "with-system" => Ok(Self::WithSystem),
            "alone" => Ok(Self::Alone),
            _ => counted().ok_or_else(|| Error::UnknownMode(text.to_owned())),
        }
    }
}

impl TryFrom<String> for ComputeMode {
    type Error = Error;

    fn try_from(text: String) -> Result<Self, Error> {
        text.parse()
    }
}

impl From<ComputeMode> for String {
    fn from(mode: ComputeMode) -> Self {
        mode.to_string()
    }
}

/// The positions that chunks get when they are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PositionStrategy {
    // Decision: docs/decisions/chunks.md#virtual-is-read-as-overlapped
    /// Every chunk starts right after the system prompt. The question starts after the longest chunk.
    #[default]
    #[serde(alias = "virtual")]
    Overlapped,
    /// Chunks follow one another, as in an ordinary prompt.
    Sequential,
    /// Chunks follow one another, as with [`Sequential`](Self::Sequential), but each is stored at the
    /// position where it is used. The key covers the position, so another prompt hits only at the same
    /// position.
    Absolute,
}

/// The exactness of reuse in a cell, compared with computing the prompt from scratch with a mask under which
/// chunks do not see each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Exactness {
    /// Up to rounding, reuse gives the same result as one forward pass with that mask and these positions.
    Exact,
    /// Reuse matches only a pass in two phases: chunk rows at their stored positions, then question rows at
    /// sequential positions over all keys. No single pass gives the same result.
    TwoPhase,
}

/// A compute mode together with a position strategy: one cell of the exactness table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct ReuseCell {
    /// The tokens that a chunk sees while its KV is computed.
    pub mode: ComputeMode,
    /// The positions that chunks get when they are used.
    pub strategy: PositionStrategy,
}

impl ReuseCell {
    /// Every chunk sees the system prompt and starts right after it.
    pub const OVERLAPPED_WITH_SYSTEM: Self =
        Self { mode: ComputeMode::WithSystem, strategy: PositionStrategy::Overlapped };
    /// Every chunk sees only itself, and all chunks start at the same position.
    pub const OVERLAPPED_ALONE: Self =
        Self { mode: ComputeMode::Alone, strategy: PositionStrategy::Overlapped };
    /// Chunks see only themselves and follow one another.
    pub const SEQUENTIAL_ALONE: Self =
        Self { mode: ComputeMode::Alone, strategy: PositionStrategy::Sequential };
    /// Chunks see the system prompt and follow one another.
    pub const SEQUENTIAL_WITH_SYSTEM: Self =
        Self { mode: ComputeMode::WithSystem, strategy: PositionStrategy::Sequential };
    /// Chunks see the system prompt, and are reused only at the same position.
    pub const ABSOLUTE_WITH_SYSTEM: Self =
        Self { mode: ComputeMode::WithSystem, strategy: PositionStrategy::Absolute };
    /// Chunks see only themselves, and are reused only at the same position.
    pub const ABSOLUTE_ALONE: Self = Self { mode: ComputeMode::Alone, strategy: PositionStrategy::Absolute };

    /// All combinations of the two modes without a parameter and the three strategies.
    pub const ALL: [Self; 6] = [
        Self::OVERLAPPED_WITH_SYSTEM,
        Self::OVERLAPPED_ALONE,
        Self::SEQUENTIAL_ALONE,
        Self::SEQUENTIAL_WITH_SYSTEM,
        Self::ABSOLUTE_WITH_SYSTEM,
        Self::ABSOLUTE_ALONE,
    ];

    /// Returns the exactness of reuse in this cell.
    pub fn exactness(self) -> Exactness {
        match (self.mode, self.strategy) {
            // The chunk is used at a different distance from the tokens that it saw than it was computed at.
            (
                ComputeMode::WithSystem
                | ComputeMode::Behind(_)
                | ComputeMode::Slots(_)
                | ComputeMode::Sink(_),
                PositionStrategy::Sequential,
            )
            | (ComputeMode::Sink(_), PositionStrategy::Overlapped) => Exactness::TwoPhase,
            _ => Exactness::Exact,
        }
    }
}

//! The reasons why a part of a prompt was not found.

use std::fmt;

use kvtier::Missed;
use serde::Serialize;

/// The reason why a part of a prompt was not found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MissReason {
    /// Nothing with these tokens is known.
    New,
    /// The part was stored, and has left to make room.
    Evicted,
    /// The tokens are stored behind another system prompt, in another mode, or at another position.
    OtherContext,
    /// The tokens are stored for another model, tokenizer or format.
    OtherModel,
    /// The record on the disk has the same key, but other tokens or another layout.
    TokensDiffer,
    /// The part is on the disk, but computing it takes less time.
    Slower,
    /// The bytes on the disk are not those that were written.
    Damaged,
    /// The disk had not answered when the request stopped waiting.
    Deadline,
    /// The disk refused.
    Failed,
}

impl MissReason {
    /// Returns the name, as in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::New => "new",
            Self::Evicted => "evicted",
            Self::OtherContext => "other_context",
            Self::OtherModel => "other_model",
            Self::TokensDiffer => "tokens_differ",
            Self::Slower => "slower",
            Self::Damaged => "damaged",
            Self::Deadline => "deadline",
            Self::Failed => "failed",
        }
    }
}

impl fmt::Display for MissReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl From<&Missed> for MissReason {
    fn from(missed: &Missed) -> Self {
        match missed {
            Missed::Absent => Self::New,
            Missed::Evicted => Self::Evicted,
            Missed::OtherModel => Self::OtherModel,
            Missed::OtherContext => Self::OtherContext,
            Missed::Differs => Self::TokensDiffer,
            Missed::Damaged => Self::Damaged,
            Missed::Late => Self::Deadline,
            Missed::Failed(_) => Self::Failed,
        }
    }
}

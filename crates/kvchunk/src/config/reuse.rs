//! A way of reuse: everything that a request says of its chunks beside their tokens.

use serde::{Deserialize, Serialize};

use super::ReuseCell;
use crate::recompute::Recompute;
use crate::scaling::ContextScaling;

/// A way in which the chunks of a prompt are reused: where they stand, what they have seen, which of their tokens are computed
/// anew, and how the question attends to them.
///
/// ```
/// use kvchunk::Reuse;
/// let way: Reuse = serde_json::from_str(
///     r#"{"cell": {"mode": "with-system", "strategy": "sequential"}, "recompute": "question:0.2"}"#,
/// ).unwrap();
/// assert!(way.scaling.is_plain());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reuse {
    /// The compute mode and the position strategy.
    pub cell: ReuseCell,
    /// The strategy that chooses tokens to recompute.
    #[serde(default)]
    pub recompute: Recompute,
    /// The temperature and scale of the question's attention to chunks.
    #[serde(default)]
    pub scaling: ContextScaling,
}

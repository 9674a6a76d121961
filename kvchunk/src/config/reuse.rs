//! The reuse settings: everything that a request specifies about its chunks apart from their tokens.

use serde::{Deserialize, Serialize};

use super::ReuseCell;
use crate::recompute::Recompute;
use crate::scaling::ContextScaling;

/// The settings for reusing a prompt's chunks: the positions they get, the tokens they see, the tokens that
/// are recomputed, and how the question attends to them.
///
/// ```
/// use kvchunk::Reuse;
/// let way: Reuse = serde_json::from_str(
///     r#"{"cell": {"mode": "with-system", "strategy": "sequential"}, "recompute": "question:0.2"}"#,
/// ).unwrap();
/// assert!(way.scaling.is_plain());
/// ```
///
/// The default gave the answers closest to full attention on a published model (docs/quality.md). The default
/// is not exact with any mask; [`plain`](Self::plain) reuse is exact in most cells.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
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

impl Reuse {
    /// Returns the settings for plain reuse in a cell, which recomputes and scales nothing.
    ///
    /// ```
    /// use kvchunk::{Exactness, Recompute, Reuse, ReuseCell};
    /// let plain = Reuse::plain(ReuseCell::default());
    /// assert_eq!((plain.recompute, plain.cell.exactness()), (Recompute::None, Exactness::Exact));
    /// assert_ne!(Reuse::default().recompute, Recompute::None);
    /// ```
    pub fn plain(cell: ReuseCell) -> Self {
        Self { cell, recompute: Recompute::None, scaling: ContextScaling::default() }
    }
}

// Decision: docs/decisions/chunks.md#the-default-is-the-best-measured-strategy
impl Default for Reuse {
    fn default() -> Self {
        let recompute = Recompute::Question { share: 0.5, from: None };
        Self { recompute, ..Self::plain(ReuseCell::SEQUENTIAL_WITH_SYSTEM) }
    }
}

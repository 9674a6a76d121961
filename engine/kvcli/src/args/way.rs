//! Options that say how documents are reused.

use std::path::PathBuf;

use clap::Args;
use kvchunk::{ComputeMode, ContextScaling, PositionStrategy, Recompute, Reuse, ReuseCell};

use super::{Positions, mode, positive, recompute};

/// The heading of these options in the help.
const WAY: &str = "How documents are reused (as --positions sequential --chunks with-system --recompute question:0.5, if none is given)";

/// The way in which documents are reused.
#[derive(Debug, Args)]
pub(crate) struct WayArgs {
    /// Positions of documents: all right after the system prompt; one after the other; or one after the
    /// other, and found again only at the same position. Sequential, if another option of these is given.
    #[arg(long, value_enum, help_heading = WAY)]
    positions: Option<Positions>,

    /// Tokens that documents see while they are computed, beside themselves: the system prompt (with-system, without the
    /// option), nothing (alone), or the first K tokens of the system prompt (sink:K), so that they serve under each that begins
    /// with these. What equals one pass: docs/exactness.md.
    #[arg(long, help_heading = WAY, value_name = "MODE", value_parser = mode)]
    chunks: Option<ComputeMode>,

    /// Document tokens to recompute with everything before them in sight: none (if another option of these is given); the first
    /// K of each document (link:K); the share R that deviates most at a layer (blend:R, blend:R@LAYER,
    /// blend:R@LAYER:keys|values|both); the share R that the question attends to most (question:R), or of which it would
    /// see the largest error (joint:R@LAYER); a random share (random:R@SEED); or full.
    #[arg(long, help_heading = WAY, value_name = "STRATEGY", value_parser = recompute)]
    recompute: Option<Recompute>,

    /// The way that kvc tune wrote for this model, in place of the other options.
    #[arg(long, help_heading = WAY, value_name = "FILE", conflicts_with_all = ["positions", "chunks", "recompute", "context_temperature",
        "context_scale"])]
    pub(crate) reuse: Option<PathBuf>,

    /// Divides the question's logits over documents; below 1, attention to them is sharper (APE).
    #[arg(long, help_heading = WAY, value_name = "T", default_value_t = 1.0, value_parser = positive)]
    context_temperature: f32,

    /// Multiplies the log-sum-exp of all documents together (APE).
    #[arg(long, help_heading = WAY, value_name = "S", default_value_t = 1.0, value_parser = positive)]
    context_scale: f32,
}

impl WayArgs {
    /// Returns the way that the options ask for, but for a file.
    pub(crate) fn asked_for(&self) -> Reuse {
        let scaling = ContextScaling { temperature: self.context_temperature, scale: self.context_scale };
        Reuse { scaling, ..way(self.positions, self.chunks, self.recompute) }
    }
}

/// Returns the way that is named in parts: the default if no part is.
pub(crate) fn way(
    positions: Option<Positions>,
    chunks: Option<ComputeMode>,
    recompute: Option<Recompute>,
) -> Reuse {
    if positions.is_none() && chunks.is_none() && recompute.is_none() {
        return Reuse::default();
    }
    let strategy = positions.map_or(PositionStrategy::Sequential, Into::into);
    let cell = ReuseCell { mode: chunks.unwrap_or_default(), strategy };
    Reuse { recompute: recompute.unwrap_or_default(), ..Reuse::plain(cell) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_taken_whole_or_not_at_all() {
        assert_eq!(way(None, None, None), Reuse::default());
        let plain = way(Some(Positions::Overlapped), None, None);
        assert_eq!((plain.recompute, plain.cell.strategy), (Recompute::None, PositionStrategy::Overlapped));
        let full = way(None, None, Some(Recompute::Full));
        assert_eq!((full.recompute, full.cell), (Recompute::Full, Reuse::default().cell));
        assert_eq!(way(None, Some(ComputeMode::Alone), None).cell.strategy, PositionStrategy::Sequential);
    }
}

//! Options that specify how documents are reused.

use std::path::PathBuf;

use clap::Args;
use kvchunk::{ComputeMode, ContextScaling, PositionStrategy, Recompute, Reuse, ReuseCell};

use super::{Positions, mode, positive, recompute};

/// The heading of this group of options in the help text.
const WAY: &str = "How documents are reused (default: behind three or more --decoys; without them, half of the document tokens are recomputed)";

/// Options for the reuse of documents.
#[derive(Debug, Args)]
pub(crate) struct WayArgs {
    /// Positions of documents. overlapped: all right after the system prompt. sequential: one after another.
    /// absolute: one after another, and reused only at the same position. Default if another option of this
    /// group is given: sequential.
    #[arg(long, value_enum, help_heading = WAY)]
    positions: Option<Positions>,

    /// Tokens that documents see besides their own while they are computed: the system prompt
    /// (with-system, the default), nothing (alone), the first K tokens of the system prompt (sink:K), for use
    /// under every system prompt that starts with them, the system prompt and N decoys (behind:N), which the
    /// question never sees, or the system prompt and N decoys or more, a different number for each of up to N
    /// documents (slots:N). See docs/exactness.md for the exact cases.
    #[arg(long, help_heading = WAY, value_name = "MODE", value_parser = mode)]
    chunks: Option<ComputeMode>,

    /// Document tokens to recompute while they see everything before them: none (the default if another
    /// option of this group is given); the first K of each document (link:K); the share R that deviates most
    /// at a layer (blend:R, blend:R@LAYER, blend:R@LAYER:keys|values|both); the share R that the question
    /// attends to most (question:R), or whose error it would see most (joint:R@LAYER); a random share
    /// (random:R@SEED); or full.
    #[arg(long, help_heading = WAY, value_name = "STRATEGY", value_parser = recompute)]
    recompute: Option<Recompute>,

    /// File with a decoy for --chunks behind:N (N decoys) or slots:N (2 N - 1 decoys), or directory of such
    /// files. May be repeated. Decoys of the same kind as the documents keep the most answers. Without
    /// another option of this group, three decoys or more imply --chunks behind:3. With another option, decoys
    /// are used only by behind:N and slots:N. Default: the decoys in the file given with --reuse, or 7 built-in
    /// texts.
    #[arg(long, help_heading = WAY, value_name = "FILE|DIR")]
    pub(crate) decoys: Vec<PathBuf>,

    /// File that `kvc tune` wrote for this model; replaces the other options of this group.
    #[arg(long, help_heading = WAY, value_name = "FILE", conflicts_with_all = ["positions", "chunks", "recompute", "context_temperature",
        "context_scale"])]
    pub(crate) reuse: Option<PathBuf>,

    /// Temperature of the question's attention to documents. Attention logits are divided by this
    /// temperature; below 1, attention is sharper (APE).
    #[arg(long, help_heading = WAY, value_name = "T", default_value_t = 1.0, value_parser = positive)]
    context_temperature: f32,

    /// Factor on the log-sum-exp of all documents together (APE).
    #[arg(long, help_heading = WAY, value_name = "S", default_value_t = 1.0, value_parser = positive)]
    context_scale: f32,
}

impl WayArgs {
    /// Returns the reuse settings from the options other than the file. `usual` are the settings without any
    /// option.
    pub(crate) fn asked_for(&self, usual: Reuse) -> Reuse {
        let scaling = ContextScaling { temperature: self.context_temperature, scale: self.context_scale };
        Reuse { scaling, ..way(usual, self.positions, self.chunks, self.recompute) }
    }

    /// Returns true if no option of this group chooses a strategy.
    pub(crate) fn is_usual(&self) -> bool {
        self.reuse.is_none() && self.positions.is_none() && self.chunks.is_none() && self.recompute.is_none()
    }
}

/// Returns the usual reuse settings if no argument is given. Otherwise, missing arguments default to
/// sequential positions, the default compute mode and no recomputation.
pub(crate) fn way(
    usual: Reuse,
    positions: Option<Positions>,
    chunks: Option<ComputeMode>,
    recompute: Option<Recompute>,
) -> Reuse {
    if positions.is_none() && chunks.is_none() && recompute.is_none() {
        return usual;
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
        let way = |positions, chunks, recompute| way(Reuse::default(), positions, chunks, recompute);
        assert_eq!(way(None, None, None), Reuse::default());
        let plain = way(Some(Positions::Overlapped), None, None);
        assert_eq!((plain.recompute, plain.cell.strategy), (Recompute::None, PositionStrategy::Overlapped));
        let full = way(None, None, Some(Recompute::Full));
        assert_eq!((full.recompute, full.cell), (Recompute::Full, Reuse::default().cell));
        assert_eq!(way(None, Some(ComputeMode::Alone), None).cell.strategy, PositionStrategy::Sequential);
    }
}

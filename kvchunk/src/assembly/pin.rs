//! Claims on the stored parts of a prompt.

use kvcore::PinnedBlocks;

use super::Assembler;
use crate::cache::PieceHold;
use crate::error::Result;
use crate::position::PositionPlan;
use crate::prompt::ChunkedPrompt;

/// A claim on the stored parts of a prompt: the blocks of its system prompt and decoys, and the pieces of its chunks.
/// While it exists, none of them is evicted.
///
/// # Drop behaviour
/// The parts stay cached until room is needed.
#[derive(Debug, Default)]
#[must_use = "dropping the claim allows the parts to be evicted"]
pub struct PinnedParts {
    prefixes: Vec<PinnedBlocks>,
    pieces: Vec<PieceHold>,
}

impl PinnedParts {
    /// Returns the number of blocks of the system prompt that are pinned.
    pub fn system_blocks(&self) -> usize {
        self.prefixes.first().map_or(0, |blocks| blocks.ids().len())
    }

    /// Gives up the claim on the system prompt and the decoys.
    pub fn without_prefixes(self) -> Self {
        Self { prefixes: Vec::new(), ..self }
    }

    /// Returns the pieces that are pinned.
    pub fn pieces(&self) -> &[PieceHold] {
        &self.pieces
    }
}

impl Assembler<'_> {
    /// Pins the parts of a prompt that are stored and awake. Computes nothing, and counts neither hits nor misses.
    ///
    /// # Errors
    /// Returns the errors of [`assemble`](Self::assemble) about the prompt itself.
    pub fn pin(&self, prompt: &ChunkedPrompt, plan: &PositionPlan) -> Result<PinnedParts> {
        let plan = self.in_slots(prompt, plan.clone())?;
        let mut pieces = Vec::new();
        if let Some(cache) = self.chunks {
            self.each_piece(prompt, &plan, |_, _, piece| pieces.extend(cache.hold(piece)))?;
        }
        let pinned = |(keys, _): (Vec<_>, Vec<u32>)| self.main.blocks().lookup_chain(&keys).pin();
        let prefixes = self.prefixes_of(prompt, true)?.into_iter().map(pinned).collect();
        Ok(PinnedParts { prefixes, pieces })
    }
}

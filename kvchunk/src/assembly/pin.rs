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
    /// The pieces of each chunk that are stored.
    chunks: Vec<Vec<PieceHold>>,
}

impl PinnedParts {
    /// Returns the number of blocks of the system prompt that are pinned.
    pub fn system_blocks(&self) -> usize {
        self.prefixes.first().map_or(0, |blocks| blocks.ids().len())
    }

    /// Returns a claim on each chunk alone, in the prompt's order, and gives up the one on the system prompt and the
    /// decoys. A claim is empty if nothing of its chunk is stored.
    pub fn into_chunks(self) -> impl Iterator<Item = Self> {
        self.chunks.into_iter().map(|pieces| Self { prefixes: Vec::new(), chunks: vec![pieces] })
    }

    /// Returns the pieces that are pinned.
    pub fn pieces(&self) -> impl Iterator<Item = &PieceHold> {
        self.chunks.iter().flatten()
    }
}

impl Assembler<'_> {
    /// Pins the parts of a prompt that are stored and awake. Computes nothing, and counts neither hits nor misses.
    ///
    /// # Errors
    /// Returns the errors of [`assemble`](Self::assemble) about the prompt itself.
    pub fn pin(&self, prompt: &ChunkedPrompt, plan: &PositionPlan) -> Result<PinnedParts> {
        let plan = self.in_slots(prompt, plan.clone())?;
        let mut chunks: Vec<Vec<PieceHold>> = Vec::new();
        if let Some(cache) = self.chunks {
            self.each_piece(prompt, &plan, |_, before, piece| {
                if before == 0 {
                    chunks.push(Vec::new());
                }
                chunks.iter_mut().last().into_iter().for_each(|chunk| chunk.extend(cache.hold(piece)));
            })?;
        }
        let pinned = |(keys, _): (Vec<_>, Vec<u32>)| self.main.blocks().lookup_chain(&keys).pin();
        let prefixes = self.prefixes_of(prompt, true)?.into_iter().map(pinned).collect();
        Ok(PinnedParts { prefixes, chunks })
    }
}

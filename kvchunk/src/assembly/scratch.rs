//! Scratch blocks, which temporarily hold the recomputed KV of chunk tokens, so that it can be compared with
//! the stored KV.

use std::sync::Arc;

use kvcore::{BlockPool, MutableBlocks, Segment, SequenceInput, SlotMapping};

use super::assembled::AssembledPrompt;
use crate::error::Result;
use crate::prompt::ChunkedPrompt;
use crate::recompute::{ChunkSpan, TokenSelection};

/// The request's own blocks for every chunk token that full attention would compute differently, and the
/// slots where the same tokens are stored.
///
/// # Drop behaviour
/// The blocks become free, and nothing in them can be found.
#[derive(Debug)]
pub struct ScratchBlocks {
    segments: Arc<[Segment]>,
    inputs: Vec<SequenceInput>,
    stored: Vec<SlotMapping>,
    /// For each input: the index of its chunk, and the number of the chunk's tokens before it.
    places: Vec<(usize, usize)>,
    #[expect(dead_code, reason = "held to keep the blocks as long as the scratch")]
    blocks: MutableBlocks,
}

impl AssembledPrompt {
    /// Allocates scratch blocks from `pool` for all tokens of the chunks whose [`ChunkSpan::is_full`] is
    /// false.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::OutOfBlocks`] if the pool has no room.
    pub fn scratch(&self, prompt: &ChunkedPrompt, pool: &BlockPool) -> Result<ScratchBlocks> {
        let every =
            |span: &ChunkSpan| if span.is_full { Vec::new() } else { (0..span.tokens as u32).collect() };
        let all = TokenSelection::new(self.chunks().iter().map(every));
        let (segments, recomputation, blocks) = self.rewritten(prompt, &all, pool)?;
        let parts = self.places().iter().zip(&self.segments()[1..]);
        let parts = parts.filter(|((chunk, _), _)| !self.chunks()[*chunk].is_full);
        let stored =
            parts.clone().map(|(_, s)| SlotMapping::in_blocks(&s.blocks, self.block_size(), 0..s.len));
        Ok(ScratchBlocks {
            stored: stored.collect::<Result<_, _>>()?,
            places: parts.map(|(place, _)| *place).collect(),
            inputs: recomputation.inputs,
            segments,
            blocks,
        })
    }
}

impl ScratchBlocks {
    /// Returns the segments of the system prompt and the chunks, with the scratch blocks.
    pub fn segments(&self) -> &Arc<[Segment]> {
        &self.segments
    }

    /// Returns the tokens to compute. Row indices count the tokens of all inputs in order.
    pub fn inputs(&self) -> &[SequenceInput] {
        &self.inputs
    }

    /// Returns, for each input, the slots where the same tokens are stored.
    pub fn stored(&self) -> &[SlotMapping] {
        &self.stored
    }

    /// Returns the rows of the selected tokens, in the order of
    /// [`Recomputation::inputs`](super::Recomputation::inputs).
    pub fn rows(&self, selection: &TokenSelection) -> Vec<u32> {
        let (mut rows, mut before) = (Vec::new(), 0);
        for (input, &(chunk, start)) in self.inputs.iter().zip(&self.places) {
            let len = input.tokens.len();
            rows.extend(selection.within(chunk, start..start + len).iter().map(|token| before + token));
            before += len as u32;
        }
        rows
    }

    /// Returns the scratch slots of the given rows. Rows that do not exist are skipped.
    pub fn slots(&self, rows: &[u32]) -> SlotMapping {
        let all = SlotMapping::concat(self.inputs.iter().map(|input| input.slots.mapping()));
        rows.iter().filter_map(|&row| all.slots().get(row as usize).copied()).collect::<Vec<_>>().into()
    }

    /// Arranges `of_rows`, which has one value per row, by chunk and token. Tokens without a row get 0.
    pub fn by_chunk(&self, chunks: &[ChunkSpan], of_rows: &[f32]) -> Vec<Vec<f32>> {
        let mut out: Vec<Vec<f32>> = chunks.iter().map(|span| vec![0.0; span.tokens]).collect();
        let mut rest = of_rows.iter();
        for (input, &(chunk, start)) in self.inputs.iter().zip(&self.places) {
            for (place, value) in out[chunk][start..start + input.tokens.len()].iter_mut().zip(&mut rest) {
                *place = *value;
            }
        }
        out
    }
}

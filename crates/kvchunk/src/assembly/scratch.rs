//! Scratch blocks: all chunk tokens computed anew for a while, beside what is stored.

use kvcore::{BlockPool, MutableBlocks, Segment, SequenceInput, SlotMapping};

use super::assembled::{AssembledPrompt, ChunkSpan};
use crate::error::Result;
use crate::prompt::ChunkedPrompt;
use crate::recompute::TokenSelection;

/// Blocks of a request's own for every chunk token that full attention would compute differently, and where
/// the same tokens are stored.
///
/// # Drop behaviour
/// The blocks are free again; nothing of them can be found.
#[derive(Debug)]
pub struct Scratch {
    segments: Vec<Segment>,
    inputs: Vec<SequenceInput>,
    stored: Vec<SlotMapping>,
    /// Of each input: its chunk, and the chunk's tokens before it.
    places: Vec<(usize, usize)>,
    #[expect(dead_code, reason = "held so that the blocks live as long as the scratch")]
    blocks: MutableBlocks,
}

impl AssembledPrompt {
    /// Scratch blocks out of `pool` for all tokens of chunks that are not [`ChunkSpan::is_full`].
    ///
    /// # Errors
    /// [`kvcore::Error::OutOfBlocks`].
    pub fn scratch(&self, prompt: &ChunkedPrompt, pool: &BlockPool) -> Result<Scratch> {
        let every =
            |span: &ChunkSpan| if span.is_full { Vec::new() } else { (0..span.tokens as u32).collect() };
        let all = TokenSelection::new(self.chunks().iter().map(every));
        let (segments, anew, blocks) = self.rewritten(prompt, &all, pool)?;
        let parts = self.places().iter().zip(&self.segments()[1..]);
        let parts = parts.filter(|((chunk, _), _)| !self.chunks()[*chunk].is_full);
        let stored =
            parts.clone().map(|(_, s)| SlotMapping::in_blocks(&s.blocks, self.block_size(), 0..s.len));
        Ok(Scratch {
            stored: stored.collect::<Result<_, _>>()?,
            places: parts.map(|(place, _)| *place).collect(),
            inputs: anew.inputs,
            segments,
            blocks,
        })
    }
}

impl Scratch {
    /// System prompt and chunks over the scratch blocks.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// The tokens to compute: their rows are numbered through all inputs.
    pub fn inputs(&self) -> &[SequenceInput] {
        &self.inputs
    }

    /// Of each input, the slots at which the same tokens are stored.
    pub fn stored(&self) -> &[SlotMapping] {
        &self.stored
    }

    /// The rows of selected tokens, in the order of [`Recomputation::inputs`](super::Recomputation::inputs).
    pub fn rows(&self, selection: &TokenSelection) -> Vec<u32> {
        let (mut rows, mut before) = (Vec::new(), 0);
        for (input, &(chunk, start)) in self.inputs.iter().zip(&self.places) {
            let len = input.tokens.len();
            rows.extend(selection.within(chunk, start..start + len).iter().map(|token| before + token));
            before += len as u32;
        }
        rows
    }

    /// The scratch slots of rows.
    pub fn slots(&self, rows: &[u32]) -> SlotMapping {
        let all = SlotMapping::concat(self.inputs.iter().map(|input| &input.slots));
        rows.iter().filter_map(|&row| all.slots().get(row as usize).copied()).collect::<Vec<_>>().into()
    }

    /// Numbers of all rows, chunk by chunk; 0 for tokens that have no row.
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

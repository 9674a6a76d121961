//! Assembled prompts, whose system prompt and chunks have been computed and are held. Some of their tokens
//! can be recomputed.

use std::sync::Arc;

use kvcore::{BlockPool, MutableBlocks, Segment, SequenceInput, SlotMapping, WritePairs};

use super::{Assembly, ChunkReport, PieceSource, SystemPart};
use crate::cache::PieceHold;
use crate::error::{Error, Result};
use crate::position::MergedRun;
use crate::prefix::SealedPrefix;
use crate::prompt::ChunkedPrompt;
use crate::recompute::{ChunkSpan, TokenScores, TokenSelection};

/// An assembled prompt. It holds the blocks of its system prompt and chunks until it is dropped.
#[derive(Debug)]
pub struct AssembledPrompt {
    block_size: usize,
    segments: Arc<[Segment]>,
    /// For each segment after the first: the index of its chunk, and the number of the chunk's tokens before
    /// it.
    places: Vec<(usize, usize)>,
    spans: Vec<ChunkSpan>,
    holds: Vec<PieceHold>,
    reports: Vec<ChunkReport>,
    private: Vec<MutableBlocks>,
    #[expect(dead_code, reason = "held to keep the blocks as long as the request")]
    system: SealedPrefix,
}

/// Chunk tokens to recompute into the request's own blocks.
#[derive(Debug)]
#[must_use = "copy the blocks, then compute the inputs"]
pub struct Recomputation {
    /// The copies to make before the inputs are computed, as `(shared block, own block)`.
    pub copies: WritePairs,
    /// The tokens to compute. They see everything before them in the prompt.
    pub inputs: Vec<SequenceInput>,
    /// The total number of tokens in [`inputs`](Self::inputs).
    pub tokens: usize,
}

impl AssembledPrompt {
    pub(super) fn new(assembly: Assembly) -> Result<Self> {
        let (reports, spans) = (assembly.reports(), assembly.chunks());
        let Assembly { block_size, system, chunks, private, mut segments, .. } = assembly;
        let SystemPart::Sealed(system) = system else { return Err(Error::NotReady { pieces: 1 }) };
        // If another request stored the same system prompt first, the first segment must use that request's
        // blocks.
        if segments[0] != system.segment() {
            Arc::make_mut(&mut segments)[0] = system.segment();
        }
        let places = chunks
            .iter()
            .enumerate()
            .flat_map(|(i, chunk)| chunk.with_starts().map(move |(start, _)| (i, start)));
        let holds = chunks.iter().flat_map(|chunk| &chunk.pieces).filter_map(|piece| match &piece.source {
            PieceSource::Cached(hold) => Some(hold.clone()),
            PieceSource::Reserved(_) | PieceSource::Private => None,
        });
        Ok(Self {
            block_size,
            places: places.collect(),
            spans,
            holds: holds.collect(),
            reports,
            segments,
            private,
            system,
        })
    }

    /// Returns the segments of the system prompt and the chunks as the question sees them. The first one is the system
    /// prompt, which may have no tokens.
    pub fn segments(&self) -> &Arc<[Segment]> {
        &self.segments
    }

    /// Returns the chunks, in the prompt's order.
    pub fn chunks(&self) -> &[ChunkSpan] {
        &self.spans
    }

    /// Returns the holds on cached pieces, in the prompt's order.
    pub fn holds(&self) -> &[PieceHold] {
        &self.holds
    }

    /// Returns, for each segment after the first, the index of its chunk and the number of the chunk's tokens
    /// before it.
    pub(super) fn places(&self) -> &[(usize, usize)] {
        &self.places
    }

    /// Adds blocks that belong only to this request, and holds them until this prompt is dropped.
    pub(super) fn hold(&mut self, own: MutableBlocks) {
        self.private.push(own);
    }

    pub(super) fn block_size(&self) -> usize {
        self.block_size
    }

    /// Returns one report per chunk, in the prompt's order.
    pub fn reports(&self) -> &[ChunkReport] {
        &self.reports
    }

    /// Groups per-token values by chunk. `numbers` contains one value for each token of the
    /// [`segments`](Self::segments) after the system prompt, in order.
    pub fn by_chunk(&self, numbers: &[f32]) -> TokenScores {
        let mut chunks: Vec<Vec<f32>> = self.spans.iter().map(|span| vec![0.0; span.tokens]).collect();
        let mut left = numbers;
        for (segment, &(chunk, start)) in self.segments[1..].iter().zip(&self.places) {
            let (own, rest) = left.split_at(segment.len.min(left.len()));
            chunks[chunk][start..start + own.len()].copy_from_slice(own);
            left = rest;
        }
        TokenScores::new(chunks)
    }

    /// Returns the system prompt and the chunks as one run.
    pub fn merged(&self) -> Result<MergedRun> {
        MergedRun::new(&self.segments, self.block_size)
    }

    /// Allocates the request's own blocks from `pool`, one for each block that contains a selected token.
    /// Returns the block copies to make and the tokens to compute. After this call, the
    /// [`segments`](Self::segments) use the new blocks.
    ///
    /// The shared blocks are not changed. Recomputed keys are rotated to stored positions, like the keys
    /// around them, so a piece remains one segment.
    ///
    /// # Errors
    /// If there is an error, the prompt is unchanged.
    ///
    /// - Returns [`kvcore::Error::OutOfBlocks`] if the pool has no room.
    /// - Returns [`Error::NoSuchToken`] if a selected token is not in its chunk.
    pub fn copy_on_write(
        &mut self,
        prompt: &ChunkedPrompt,
        selection: &TokenSelection,
        pool: &BlockPool,
    ) -> Result<Recomputation> {
        let (segments, recomputation, own) = self.rewritten(prompt, selection, pool)?;
        self.segments = segments;
        self.private.push(own);
        Ok(recomputation)
    }

    /// Allocates the request's own blocks for the selected tokens. Returns the segments that use these
    /// blocks, the tokens to compute, and the blocks themselves.
    pub(super) fn rewritten(
        &self,
        prompt: &ChunkedPrompt,
        selection: &TokenSelection,
        pool: &BlockPool,
    ) -> Result<(Arc<[Segment]>, Recomputation, MutableBlocks)> {
        selection.check(prompt)?;
        let mut rewritten = self.segments.to_vec();
        let block_size = self.block_size;
        // For each segment after the system prompt: the selected tokens, counted from the segment's start.
        let selected: Vec<Vec<u32>> = self
            .places
            .iter()
            .zip(&self.segments[1..])
            .map(|(&(chunk, start), segment)| selection.within(chunk, start..start + segment.len))
            .collect();
        let touched: Vec<Vec<usize>> = selected
            .iter()
            .map(|tokens| {
                let mut blocks: Vec<usize> =
                    tokens.iter().map(|&token| token as usize / block_size).collect();
                blocks.dedup();
                blocks
            })
            .collect();
        let own = pool.allocate(touched.iter().map(Vec::len).sum())?;
        let (mut copies, mut inputs, mut fresh) = (Vec::new(), Vec::new(), own.ids().iter());
        let segments = rewritten[1..].iter_mut();
        for (((segment, tokens), touched), &(chunk, start)) in
            segments.zip(&selected).zip(&touched).zip(&self.places)
        {
            if tokens.is_empty() {
                continue;
            }
            let mut blocks = segment.blocks.to_vec();
            for (&block, &target) in touched.iter().zip(&mut fresh) {
                let held = block_size.min(segment.len - block * block_size);
                let recomputed = tokens.iter().filter(|&&token| token as usize / block_size == block).count();
                if recomputed < held {
                    copies.push((blocks[block], target));
                }
                blocks[block] = target;
            }
            segment.blocks = blocks.into();
            let slots =
                SlotMapping::in_blocks(&segment.blocks, block_size, tokens.iter().map(|&t| t as usize))?;
            let slots = own.write_slots(block_size, slots)?;
            let all = &prompt.chunks()[chunk];
            inputs.push(SequenceInput {
                at: Some(tokens.as_slice().into()),
                key_offset: segment.position_offset,
                ..SequenceInput::new(
                    tokens.iter().map(|&token| all[start + token as usize]).collect(),
                    segment.logical_start,
                    segment.stored_start + segment.position_offset,
                    slots,
                    Vec::new(),
                )
            });
        }
        let shared: Arc<[Segment]> = rewritten.as_slice().into();
        for input in &mut inputs {
            input.segments = Arc::clone(&shared);
        }
        let tokens = inputs.iter().map(|input| input.tokens.len()).sum();
        Ok((rewritten.into(), Recomputation { copies: own.write_pairs(copies)?, inputs, tokens }, own))
    }
}

impl TokenSelection {
    /// Checks that every selected token is in its chunk.
    fn check(&self, prompt: &ChunkedPrompt) -> Result<()> {
        for (chunk, tokens) in self.chunks().iter().enumerate() {
            let len = prompt.chunks().get(chunk).map_or(0, Vec::len);
            if let Some(&token) = tokens.last().filter(|&&token| token as usize >= len) {
                return Err(Error::NoSuchToken { chunk, token: token as usize, len });
            }
        }
        Ok(())
    }
}

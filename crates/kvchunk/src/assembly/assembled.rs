//! A prompt whose system part and chunks are all computed and held, and tokens of it computed anew.

use std::sync::Arc;

use kvcore::{BlockId, BlockPool, MutableBlocks, SealedPrefix, Segment, SequenceInput, SlotMapping};

use super::{Assembly, ChunkReport, Source};
use crate::cache::ChunkKvCache;
use crate::error::{Error, Result};
use crate::position::MergedKvCache;
use crate::prompt::ChunkedPrompt;
use crate::recompute::TokenSelection;

/// One chunk of an assembled prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkSpan {
    /// Its tokens.
    pub tokens: usize,
    /// Logical index of its first token.
    pub logical_start: usize,
    /// Position of its first token in this prompt.
    pub position: i64,
    /// Whether its KV is what ordinary full attention gives already: the first chunk, if it saw the system
    /// prompt and stands where it was computed.
    pub is_full: bool,
}

/// A prompt whose parts are held until it is dropped.
#[derive(Debug)]
pub struct AssembledPrompt {
    block_size: usize,
    segments: Vec<Segment>,
    /// Where each segment after the first lies in its chunk: the chunk and the tokens before it.
    places: Vec<(usize, usize)>,
    spans: Vec<ChunkSpan>,
    handles: Vec<ChunkKvCache>,
    reports: Vec<ChunkReport>,
    private: Vec<MutableBlocks>,
    #[expect(dead_code, reason = "held so that the blocks live as long as the request")]
    system: SealedPrefix,
}

/// Tokens of chunks to be computed anew, into blocks of this request's own.
#[derive(Debug)]
#[must_use = "copy the blocks, then compute the inputs"]
pub struct Recomputation {
    /// `(shared block, own block)`: contents to copy before the inputs are computed.
    pub copies: Arc<[(BlockId, BlockId)]>,
    /// The tokens, which see the whole prompt before them.
    pub inputs: Vec<SequenceInput>,
    /// Their number.
    pub tokens: usize,
}

impl AssembledPrompt {
    pub(super) fn new(assembly: Assembly) -> Result<Self> {
        let (reports, spans) = (assembly.reports(), assembly.chunks());
        let Assembly { block_size, system, chunks, private, mut segments, .. } = assembly;
        // Another request may have computed the same system prompt meanwhile: then its blocks stay.
        let system = system.finish()?;
        segments[0] = system.segment();
        let places = chunks
            .iter()
            .enumerate()
            .flat_map(|(i, chunk)| chunk.with_starts().map(move |(start, _)| (i, start)));
        let handles = chunks.iter().flat_map(|chunk| &chunk.pieces).filter_map(|piece| match &piece.source {
            Source::Cached(handle) => Some(handle.clone()),
            Source::Reserved(_) | Source::Private => None,
        });
        Ok(Self {
            block_size,
            places: places.collect(),
            spans,
            handles: handles.collect(),
            reports,
            segments,
            private,
            system,
        })
    }

    /// System prompt and chunks as the question sees them.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// The chunks.
    pub fn chunks(&self) -> &[ChunkSpan] {
        &self.spans
    }

    /// Cached pieces held, in the prompt's order.
    pub fn handles(&self) -> &[ChunkKvCache] {
        &self.handles
    }

    /// Of each segment after the first: its chunk, and the chunk's tokens before it.
    pub(super) fn places(&self) -> &[(usize, usize)] {
        &self.places
    }

    /// Blocks of the request's own, until it ends.
    pub(super) fn hold(&mut self, own: MutableBlocks) {
        self.private.push(own);
    }

    pub(super) fn block_size(&self) -> usize {
        self.block_size
    }

    /// What happened to each chunk.
    pub fn reports(&self) -> &[ChunkReport] {
        &self.reports
    }

    /// System prompt and chunks as one run.
    pub fn merged(&self) -> Result<MergedKvCache> {
        MergedKvCache::new(&self.segments, self.block_size)
    }

    /// Gives the request blocks of its own, out of `pool`, for all that hold one of the selected tokens, and
    /// says what to copy and compute. [`segments`](Self::segments) are over these blocks from now on.
    ///
    /// The shared blocks are not written. Recomputed keys are stored as rotated as the keys beside them, so
    /// that a chunk remains one segment.
    ///
    /// # Errors
    /// [`kvcore::Error::OutOfBlocks`], [`Error::NoSuchToken`]; nothing has changed then.
    pub fn copy_on_write(
        &mut self,
        prompt: &ChunkedPrompt,
        selection: &TokenSelection,
        pool: &BlockPool,
    ) -> Result<Recomputation> {
        let (segments, anew, own) = self.rewritten(prompt, selection, pool)?;
        self.segments = segments;
        self.private.push(own);
        Ok(anew)
    }

    /// The segments over blocks of the request's own where tokens are selected, and those blocks.
    pub(super) fn rewritten(
        &self,
        prompt: &ChunkedPrompt,
        selection: &TokenSelection,
        pool: &BlockPool,
    ) -> Result<(Vec<Segment>, Recomputation, MutableBlocks)> {
        selection.check(prompt)?;
        let mut rewritten = self.segments.clone();
        let block_size = self.block_size;
        // Per segment after the system prompt: the selected tokens, counted from its start.
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
                let anew = tokens.iter().filter(|&&token| token as usize / block_size == block).count();
                if anew < held {
                    copies.push((blocks[block], target));
                }
                blocks[block] = target;
            }
            segment.blocks = blocks.into();
            let slots =
                SlotMapping::in_blocks(&segment.blocks, block_size, tokens.iter().map(|&t| t as usize))?;
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
        for input in &mut inputs {
            input.segments.clone_from(&rewritten);
        }
        let tokens = inputs.iter().map(|input| input.tokens.len()).sum();
        Ok((rewritten, Recomputation { copies: copies.into(), inputs, tokens }, own))
    }
}

impl TokenSelection {
    /// Whether every selected token is in its chunk.
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

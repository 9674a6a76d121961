//! Finding or reserving the pieces of a prompt's chunks.

use std::sync::Arc;
use std::time::Instant;

use kvcore::{SequenceInput, SlotMapping};

use super::{Assembler, Assembly, Own, Piece, Source};
use crate::cache::{Acquired, ChunkKvCache};
use crate::config::{ComputeMode, PositionStrategy};
use crate::error::Result;
use crate::hash::{ChunkContext, ChunkHasher, ChunkPiece, HashAlgorithm};
use crate::position::PositionPlan;
use crate::prompt::ChunkedPrompt;

impl Assembler<'_> {
    /// One hasher for all chunks, or one for each where positions are part of the hash.
    fn hashers(&self, prompt: &ChunkedPrompt, plan: &PositionPlan) -> Vec<ChunkHasher> {
        let (algorithm, block_size) = self.chunks.map_or((HashAlgorithm::default(), 1), |cache| {
            (cache.config().hash_algorithm, cache.pool().block_size())
        });
        let context = ChunkContext::new(self.root, self.cell.mode, prompt.system());
        let hasher = |context| ChunkHasher::new(algorithm, context, block_size);
        match self.cell.strategy {
            PositionStrategy::Absolute => {
                plan.chunks.iter().map(|place| hasher(context.at(place.stored_start))).collect()
            }
            PositionStrategy::Overlapped | PositionStrategy::Sequential => vec![hasher(context)],
        }
    }

    /// Gives blocks to all pieces that have none yet, up to those that other requests compute.
    pub(super) fn resolve(&self, assembly: &mut Assembly, prompt: &ChunkedPrompt) -> Result<()> {
        let hashers = self.hashers(prompt, &assembly.plan);
        let piece_len = self.chunks.map_or(usize::MAX, |cache| cache.config().max_chunk_tokens);
        let hasher = |i: usize| &hashers[i.min(hashers.len() - 1)];
        let pieces: Vec<Vec<ChunkPiece<'_>>> = prompt
            .chunks()
            .iter()
            .enumerate()
            .map(|(i, tokens)| {
                hasher(i).pieces(tokens, piece_len).skip(assembly.chunks[i].pieces.len()).collect()
            })
            .collect();
        // All hits are held before anything is reserved, so that a prompt never evicts its own chunks.
        let hold = |piece: &ChunkPiece<'_>| self.chunks?.hold(self.tenant, piece);
        let held: Vec<Vec<Option<ChunkKvCache>>> =
            pieces.iter().map(|pieces| pieces.iter().map(hold).collect()).collect();
        for (i, (pieces, held)) in pieces.iter().zip(held).enumerate() {
            for (piece, held) in pieces.iter().zip(held) {
                if !self.add(assembly, i, piece, held)? {
                    break;
                }
            }
        }
        assembly.segments = vec![assembly.system.segment()];
        for chunk in &assembly.chunks {
            for (start, piece) in chunk.with_starts() {
                let since = Instant::now();
                assembly.segments.push(chunk.used(piece, start));
                if let (Source::Cached(_), Some(cache)) = (&piece.source, self.chunks) {
                    cache.reindexed(since);
                }
            }
        }
        Ok(())
    }

    /// Gives a chunk's next piece its blocks; `false` if another request computes it.
    fn add(
        &self,
        assembly: &mut Assembly,
        chunk: usize,
        piece: &ChunkPiece<'_>,
        held: Option<ChunkKvCache>,
    ) -> Result<bool> {
        if let Some(cached) = held {
            assembly.add_cached(chunk, cached);
            return Ok(true);
        }
        // The same piece twice in one prompt: two segments over the same blocks.
        let own = assembly.own.get(&piece.hash().key).filter(|own| own.evidence.proves(piece));
        if let Some(Own { piece: known, exact, .. }) = own {
            let (known, exact) = (known.clone(), *exact);
            assembly.chunks[chunk].exact &= exact;
            assembly.reused_tokens += known.len;
            assembly.push(chunk, known);
            return Ok(true);
        }
        let state = &assembly.chunks[chunk];
        let stored_start = state.place.stored_start + state.tokens as i64;
        // What is computed after an approximate piece is no function of its hash: it is not stored.
        let acquired = match self.chunks.filter(|_| state.exact) {
            Some(cache) => cache.acquire(self.tenant, piece, stored_start),
            None => Acquired::NoRoom,
        };
        let computed = match acquired {
            Acquired::Hit(cached) => {
                assembly.add_cached(chunk, cached);
                return Ok(true);
            }
            Acquired::Busy(waiter) => {
                assembly.waiting.push(waiter);
                return Ok(false);
            }
            Acquired::Compute(reservation) => {
                let blocks = Arc::clone(reservation.block_ids());
                assembly.reserved.push(reservation);
                let source = Source::Reserved(assembly.reserved.len() - 1);
                Piece { blocks, len: piece.tokens().len(), stored_start, source }
            }
            Acquired::NoRoom => {
                let needed = self.main.arena().layout().blocks_for(piece.tokens().len());
                let private = self.main.pool().allocate(needed)?;
                let blocks = private.ids().into();
                assembly.private.push(private);
                Piece { blocks, len: piece.tokens().len(), stored_start, source: Source::Private }
            }
        };
        let own =
            Own { evidence: piece.evidence(), piece: computed.clone(), exact: assembly.chunks[chunk].exact };
        assembly.own.insert(piece.hash().key, own);
        assembly.push(chunk, computed.clone());
        assembly.chunks[chunk].hit = false;
        assembly.add_input(chunk, &computed, piece.tokens())?;
        Ok(true)
    }
}

impl Assembly {
    fn push(&mut self, chunk: usize, piece: Piece) {
        let chunk = &mut self.chunks[chunk];
        chunk.tokens += piece.len;
        chunk.pieces.push(piece);
    }

    fn add_cached(&mut self, chunk: usize, cached: ChunkKvCache) {
        self.chunks[chunk].exact &= cached.is_exact();
        self.reused_tokens += cached.num_tokens();
        let piece = Piece {
            blocks: Arc::clone(cached.block_ids()),
            len: cached.num_tokens(),
            stored_start: cached.cached_position_start(),
            source: Source::Cached(cached),
        };
        self.push(chunk, piece);
    }

    /// A piece, the last that its chunk has so far, is to be computed: it sees those before it, and the system
    /// prompt if the mode says so, at the places where its keys are stored.
    fn add_input(&mut self, chunk: usize, piece: &Piece, tokens: &[u32]) -> Result<()> {
        let chunk = &self.chunks[chunk];
        let mut segments = match self.mode {
            ComputeMode::WithSystem => vec![self.system.segment()],
            ComputeMode::Alone => Vec::new(),
        };
        segments.extend(chunk.with_starts().map(|(start, piece)| chunk.stored(piece, start)));
        let start = chunk.tokens - piece.len;
        let slots = SlotMapping::in_blocks(&piece.blocks, self.block_size, 0..piece.len)?;
        let (logical, position) =
            (chunk.place.logical_start + start, chunk.place.stored_start + start as i64);
        self.inputs.push(SequenceInput::new(tokens.to_vec(), logical, position, slots, segments));
        Ok(())
    }
}

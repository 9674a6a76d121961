//! Finding or reserving the pieces of a prompt's chunks.

use std::sync::Arc;

use kvcore::{Segment, SequenceInput, SlotMapping, WriteSlots};

use super::{Assembler, Assembly, OwnPiece, PieceSource, PromptPiece};
use crate::cache::{Acquired, ChunkCacheManager, PieceHold, Tally};
use crate::config::{ComputeMode, PositionStrategy};
use crate::error::Result;
use crate::hash::{ChunkContext, ChunkHasher, ChunkPiece, HashAlgorithm};
use crate::position::{PositionPlan, PositionReindexer};
use crate::prompt::ChunkedPrompt;

/// The result of the search for a piece.
#[derive(Debug)]
enum Found {
    Here(PieceHold),
    /// Held here, but not exact on another rank.
    Approximate(PieceHold),
    /// Held here, but not on all ranks: computed for this request.
    GivenUp,
    Missing,
}

impl Assembler<'_> {
    /// Returns one hasher for all chunks, or one per chunk if positions are part of the hash.
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

    /// Gives blocks to all pieces that have none yet, up to the first piece of each chunk that another
    /// request computes.
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
        let found = self.find(&pieces)?;
        for (i, (pieces, found)) in pieces.iter().zip(found).enumerate() {
            for (piece, found) in pieces.iter().zip(found) {
                if !self.add(assembly, i, piece, found)? {
                    break;
                }
            }
        }
        assembly.segments = vec![assembly.system.segment()];
        for chunk in &assembly.chunks {
            for (start, piece) in chunk.with_starts() {
                let position = chunk.place.used_start + start as i64;
                assembly.segments.push(self.place(piece, position, chunk.place.logical_start + start)?);
            }
        }
        Ok(())
    }

    /// Returns the segment of a piece as the question sees it.
    fn place(&self, piece: &PromptPiece, position: i64, logical: usize) -> Result<Segment> {
        match (&piece.source, self.chunks) {
            (PieceSource::Cached(chunk), Some(cache)) => {
                let placed = cache.reindex(self.reindexer, chunk.clone(), position)?;
                Ok(placed.at_offset_in_merged_kv(logical).segment())
            }
            _ => self.reindexer.place(piece.stored(), position, logical),
        }
    }

    /// Searches for the pieces. All hits are held before anything is reserved, so a prompt never evicts its
    /// own chunks.
    fn find(&self, pieces: &[Vec<ChunkPiece<'_>>]) -> Result<Vec<Vec<Found>>> {
        let tally = if self.ranks.is_some() { Tally::Later } else { Tally::Now };
        let held = |piece: &ChunkPiece<'_>| self.chunks?.hold(self.tenant, piece, tally);
        let found = |piece: &ChunkPiece<'_>| held(piece).map_or(Found::Missing, Found::Here);
        let mut all: Vec<Vec<Found>> =
            pieces.iter().map(|pieces| pieces.iter().map(found).collect()).collect();
        let (Some(ranks), Some(cache)) = (self.ranks, self.chunks) else { return Ok(all) };
        let each = || pieces.iter().flatten();
        for (piece, found) in each().zip(all.iter_mut().flatten()) {
            if let Found::Missing = found
                && let Some(woken) = cache.hold_woken(self.tenant, piece, tally)
            {
                *found = Found::Here(woken);
            }
        }
        // The first half of the flags says that the piece is held here, the second that it is exact.
        let here = all.iter().flatten().map(|found| matches!(found, Found::Here(_)));
        let exact = all.iter().flatten().map(|found| match found {
            Found::Here(chunk) => chunk.is_exact(),
            _ => true,
        });
        let mut flags: Vec<bool> = here.chain(exact).collect();
        ranks.agree(&mut flags)?;
        let (here, exact) = flags.split_at(flags.len() / 2);
        for ((found, here), exact) in all.iter_mut().flatten().zip(here).zip(exact) {
            *found = match std::mem::replace(found, Found::Missing) {
                Found::Here(chunk) if !here => {
                    cache.give_up(self.tenant, chunk);
                    Found::GivenUp
                }
                Found::Here(chunk) => {
                    cache.count_hit(self.tenant, &chunk);
                    if *exact { Found::Here(chunk) } else { Found::Approximate(chunk) }
                }
                found => found,
            };
        }
        Ok(all)
    }

    /// Gives blocks to the next piece of a chunk. Returns false if another request computes the piece.
    fn add(
        &self,
        assembly: &mut Assembly,
        chunk: usize,
        piece: &ChunkPiece<'_>,
        found: Found,
    ) -> Result<bool> {
        let given_up = match found {
            Found::Here(cached) => {
                assembly.add_cached(chunk, cached);
                return Ok(true);
            }
            Found::Approximate(cached) => {
                assembly.chunks[chunk].exact = false;
                assembly.add_cached(chunk, cached);
                return Ok(true);
            }
            Found::GivenUp => true,
            Found::Missing => false,
        };
        // A piece that the prompt contains twice has two segments over the same blocks.
        let own = assembly.own.get(&piece.hash().key).filter(|own| own.evidence.proves(piece));
        if let Some(OwnPiece { piece: known, exact, .. }) = own {
            let (known, exact) = (known.clone(), *exact);
            assembly.chunks[chunk].exact &= exact;
            assembly.reused_tokens += known.len;
            assembly.push(chunk, known);
            return Ok(true);
        }
        let state = &assembly.chunks[chunk];
        let stored_start = state.place.stored_start + state.tokens as i64;
        // A piece that is computed after an approximate one is no function of its hash, so it is not stored.
        let acquired = match self.chunks.filter(|_| state.exact && !given_up) {
            Some(cache) if assembly.overdue.contains(&piece.hash().key) => {
                cache.go_without(self.tenant);
                Acquired::NoRoom
            }
            Some(cache) => self.acquire(cache, piece, stored_start),
            None => Acquired::NoRoom,
        };
        let (computed, slots) = match acquired {
            Acquired::Hit(cached) => {
                assembly.add_cached(chunk, cached);
                return Ok(true);
            }
            Acquired::Busy(waiter) => {
                assembly.waiting.push((piece.hash().key, waiter));
                return Ok(false);
            }
            Acquired::Compute(reservation) => {
                let (blocks, slots) = (Arc::clone(reservation.block_ids()), reservation.write_slots()?);
                assembly.reserved.push(reservation);
                let source = PieceSource::Reserved(assembly.reserved.len() - 1);
                (PromptPiece { blocks, len: piece.tokens().len(), stored_start, source }, slots)
            }
            Acquired::NoRoom => {
                let needed = self.main.arena().layout().blocks_for(piece.tokens().len());
                let (private, block_size) = (self.main.pool().allocate(needed)?, assembly.block_size);
                let blocks: Arc<[_]> = private.ids().into();
                let slots = SlotMapping::in_blocks(&blocks, block_size, 0..piece.tokens().len())?;
                let slots = private.write_slots(block_size, slots)?;
                assembly.private.push(private);
                let source = PieceSource::Private;
                (PromptPiece { blocks, len: piece.tokens().len(), stored_start, source }, slots)
            }
        };
        let own = OwnPiece {
            evidence: piece.evidence(),
            piece: computed.clone(),
            exact: assembly.chunks[chunk].exact,
        };
        assembly.own.insert(piece.hash().key, own);
        assembly.push(chunk, computed.clone());
        assembly.chunks[chunk].hit = false;
        assembly.add_input(self.reindexer, chunk, slots, piece.tokens())?;
        Ok(true)
    }

    /// Acquires a missing piece. Ranks compute the same pieces in the same pass. A piece that they agreed to
    /// compute therefore neither waits for another request nor takes a hit that has come since.
    fn acquire(&self, cache: &ChunkCacheManager, piece: &ChunkPiece<'_>, stored_start: i64) -> Acquired {
        if self.ranks.is_none() {
            return match self.replicas {
                Some(link) => {
                    cache.get_chunk_with_remote_lookup(self.tenant, piece, stored_start, link).acquired
                }
                None => cache.acquire(self.tenant, piece, stored_start),
            };
        }
        match cache.acquire_counted(self.tenant, piece, stored_start, Tally::Later) {
            Acquired::Hit(chunk) => {
                cache.give_up(self.tenant, chunk);
                Acquired::NoRoom
            }
            Acquired::Busy(_) => {
                cache.go_without(self.tenant);
                Acquired::NoRoom
            }
            acquired => acquired,
        }
    }
}

impl Assembly {
    fn push(&mut self, chunk: usize, piece: PromptPiece) {
        let chunk = &mut self.chunks[chunk];
        chunk.tokens += piece.len;
        chunk.pieces.push(piece);
    }

    fn add_cached(&mut self, chunk: usize, cached: PieceHold) {
        self.chunks[chunk].exact &= cached.is_exact();
        self.reused_tokens += cached.num_tokens();
        let piece = PromptPiece {
            blocks: Arc::clone(cached.block_ids()),
            len: cached.num_tokens(),
            stored_start: cached.cached_position_start(),
            source: PieceSource::Cached(cached),
        };
        self.push(chunk, piece);
    }

    /// Adds the input for the last piece that a chunk has so far. The piece sees the chunk's earlier pieces,
    /// and the system prompt if the mode says so, at the positions at which their keys are stored.
    fn add_input(
        &mut self,
        reindexer: &PositionReindexer,
        chunk: usize,
        slots: WriteSlots,
        tokens: &[u32],
    ) -> Result<()> {
        let chunk = &self.chunks[chunk];
        let mut segments = match self.mode {
            ComputeMode::WithSystem => vec![self.system.segment()],
            ComputeMode::Alone => Vec::new(),
        };
        let (logical, stored) = (chunk.place.logical_start, chunk.place.stored_start);
        for (start, piece) in chunk.with_starts() {
            segments.push(reindexer.place(piece.stored(), stored + start as i64, logical + start)?);
        }
        let start = chunk.tokens - tokens.len();
        let (logical, position) = (logical + start, stored + start as i64);
        self.inputs.push(SequenceInput::new(tokens.to_vec(), logical, position, slots, segments));
        Ok(())
    }
}

//! Finds or reserves the pieces of a prompt's chunks.

use std::sync::Arc;

use kvcore::{Segment, SequenceInput, SlotMapping, WriteSlots};

use super::lookup::{FoundPiece, PromptLookup};
use super::slots::choose_slots;
use super::{Assembler, Assembly, OwnPiece, PieceSource, PromptPiece, SystemPart};
use crate::cache::{Acquired, SystemFill, SystemFound};
use crate::config::{ComputeMode, HashAlgorithm, PositionStrategy};
use crate::error::Result;
use crate::hash::{ChunkContext, ChunkHasher, ChunkPiece};
use crate::position::{ChunkPlace, PositionPlan, PositionReindexer};
use crate::prompt::ChunkedPrompt;
use crate::tier::MissReason;

/// Returns a chunk's hasher: its own, or the one of all chunks.
fn hasher_of(hashers: &[ChunkHasher], chunk: usize) -> &ChunkHasher {
    &hashers[chunk.min(hashers.len() - 1)]
}

impl Assembler<'_> {
    /// Returns one hasher for all chunks, or one per chunk if the hashes cover positions or the chunks are in
    /// different slots; see [`hasher_of`].
    fn hashers(&self, prompt: &ChunkedPrompt, plan: &PositionPlan) -> Result<Vec<ChunkHasher>> {
        let (algorithm, block_size) = self.chunks.map_or((HashAlgorithm::default(), 1), |cache| {
            (cache.config().hash_algorithm, cache.pool().block_size())
        });
        let before = prompt.before(self.cell.mode)?;
        let absolute = self.cell.strategy == PositionStrategy::Absolute;
        let hasher = |place: &ChunkPlace| {
            let context = ChunkContext::new(*self.tenant.root(), place.mode, &before[..place.seen]);
            let context = if absolute { context.at(place.stored_start) } else { context };
            ChunkHasher::new(algorithm, context, block_size)
        };
        let several = absolute || plan.chunks.iter().any(|place| place.mode != plan.chunks[0].mode);
        Ok(plan.chunks.iter().take(if several { usize::MAX } else { 1 }).map(hasher).collect())
    }

    /// Calls `each` with every piece of a prompt, after its chunk's place and the number of the chunk's tokens
    /// before it.
    pub(crate) fn each_piece(
        &self,
        prompt: &ChunkedPrompt,
        plan: &PositionPlan,
        mut each: impl FnMut(&ChunkPlace, usize, &ChunkPiece<'_>),
    ) -> Result<()> {
        let hashers = self.hashers(prompt, plan)?;
        let piece_len = self.chunks.map_or(usize::MAX, |cache| cache.config().max_chunk_tokens);
        for (i, (tokens, place)) in prompt.chunks().iter().zip(&plan.chunks).enumerate() {
            let mut before = 0;
            for piece in hasher_of(&hashers, i).pieces(tokens, piece_len) {
                each(place, before, &piece);
                before += piece.tokens().len();
            }
        }
        Ok(())
    }

    // Decision: docs/decisions/chunks.md#a-slot-is-a-number-of-decoys
    /// Returns the plan with every chunk in a slot of its own, so that as many chunks as possible are stored
    /// in their slots. With several ranks, keeps the slots of the plan, because the ranks must agree.
    pub(crate) fn in_slots(&self, prompt: &ChunkedPrompt, plan: PositionPlan) -> Result<PositionPlan> {
        let (ComputeMode::Slots(slots), Some(cache), None) = (self.cell.mode, self.chunks, self.ranks) else {
            return Ok(plan);
        };
        let mut stored = vec![Vec::new(); prompt.chunks().len()];
        for slot in 0..slots {
            let plan = plan.clone().in_slots(prompt, self.cell, vec![slot; stored.len()])?;
            let hashers = self.hashers(prompt, &plan)?;
            for (i, (tokens, slots)) in prompt.chunks().iter().zip(&mut stored).enumerate() {
                let mut pieces = hasher_of(&hashers, i).pieces(tokens, cache.config().max_chunk_tokens);
                let on_disk = |piece: &ChunkPiece<'_>| {
                    piece.resists_collisions()
                        && self.tier.is_some_and(|tier| tier.slab.contains(&piece.hash().key))
                };
                if pieces.all(|piece| cache.contains(&piece) || on_disk(&piece)) {
                    slots.push(slot);
                }
            }
        }
        plan.in_slots(prompt, self.cell, choose_slots(&stored, slots))
    }

    /// Provides blocks for the system prompt and for all pieces that have none yet. In each chunk, stops at
    /// the first piece that another request is computing. Pieces are looked up only after the system prompt
    /// has its blocks.
    pub(super) fn resolve(
        &self,
        lookup: &dyn PromptLookup,
        assembly: &mut Assembly,
        prompt: &ChunkedPrompt,
    ) -> Result<()> {
        if matches!(assembly.system, SystemPart::Missing) && !assembly.find_system(lookup, prompt)? {
            return Ok(());
        }
        let hashers = self.hashers(prompt, &assembly.plan)?;
        let piece_len = self.chunks.map_or(usize::MAX, |cache| cache.config().max_chunk_tokens);
        let pieces: Vec<Vec<ChunkPiece<'_>>> = prompt
            .chunks()
            .iter()
            .enumerate()
            .map(|(i, tokens)| {
                hasher_of(&hashers, i)
                    .pieces(tokens, piece_len)
                    .skip(assembly.chunks[i].pieces.len())
                    .collect()
            })
            .collect();
        let found = lookup.hold(&pieces)?;
        let missing = found.iter().flatten().any(Option::is_none);
        if missing && !assembly.find_decoys(lookup, prompt)? {
            return Ok(());
        }
        for (i, (pieces, found)) in pieces.iter().zip(found).enumerate() {
            for (piece, found) in pieces.iter().zip(found) {
                match found {
                    Some(found) => self.add_found(assembly, i, found),
                    None if self.add_missing(lookup, assembly, i, piece)? => {}
                    None => break,
                }
            }
        }
        if assembly.waiting.is_empty() {
            assembly.segments = self.segments(assembly)?;
        }
        Ok(())
    }

    /// Returns an assembly's segments as the question sees them. All its pieces must have blocks.
    fn segments(&self, assembly: &Assembly) -> Result<Arc<[Segment]>> {
        let mut segments: Vec<Segment> = assembly.system.segment().into_iter().collect();
        for chunk in &assembly.chunks {
            for (start, piece) in chunk.with_starts() {
                let position = chunk.place.used_start + start as i64;
                segments.push(self.place(piece, position, chunk.place.logical_start + start)?);
            }
        }
        Ok(segments.into())
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

    /// Adds a piece that the lookup holds, and counts the hit.
    fn add_found(&self, assembly: &mut Assembly, chunk: usize, found: FoundPiece) {
        if let Some(cache) = self.chunks {
            cache.count_hit(self.tenant.id(), &found.hold);
        }
        assembly.add_cached(chunk, found);
    }

    /// Provides blocks for the next piece of a chunk. Returns false if another request is computing the
    /// piece.
    fn add_missing(
        &self,
        lookup: &dyn PromptLookup,
        assembly: &mut Assembly,
        chunk: usize,
        piece: &ChunkPiece<'_>,
    ) -> Result<bool> {
        // A piece that the prompt contains twice has two segments with the same blocks.
        let own = assembly.own.get(&piece.hash().key).filter(|own| own.evidence.proves(piece));
        if let Some(OwnPiece { piece: known, exact, .. }) = own {
            let (known, exact) = (known.clone(), *exact);
            assembly.chunks[chunk].exact &= exact;
            assembly.reused_tokens += known.len;
            assembly.push(chunk, known);
            return Ok(true);
        }
        if assembly.waiting.iter().any(|(key, _)| *key == piece.hash().key) {
            return Ok(false);
        }
        let state = &assembly.chunks[chunk];
        let stored_start = state.place.stored_start + state.tokens as i64;
        // A piece computed after an approximate one does not depend on its hash alone, so it is not stored.
        let acquired = match self.chunks {
            Some(cache) if state.exact && assembly.overdue.contains(&piece.hash().key) => {
                cache.go_without(self.tenant.id());
                Acquired::NoRoom
            }
            Some(_) if state.exact => lookup.acquire(piece, stored_start),
            _ => Acquired::NoRoom,
        };
        let (computed, slots) = match acquired {
            Acquired::Hit(hold) => {
                assembly.add_cached(chunk, FoundPiece { exact: hold.is_exact(), hold });
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
            Acquired::NoRoom => self.private(assembly, piece, stored_start)?,
        };
        let missed = &mut assembly.chunks[chunk].missed;
        *missed = missed.or_else(|| self.why_missing(piece));
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

    /// Returns why a piece that is to be computed was not found: as the disk says, or the cache if the disk
    /// does not know the piece.
    fn why_missing(&self, piece: &ChunkPiece<'_>) -> Option<MissReason> {
        let of_disk = self.fetched.and_then(|fetched| fetched.reason(&piece.hash().key));
        let of_cache = || self.chunks.map(|cache| cache.why_missing(self.tenant.id(), piece));
        of_disk.filter(|reason| *reason != MissReason::New).or_else(of_cache)
    }

    /// Allocates blocks of the main pool for a piece that is computed only for this request.
    fn private(
        &self,
        assembly: &mut Assembly,
        piece: &ChunkPiece<'_>,
        stored_start: i64,
    ) -> Result<(PromptPiece, WriteSlots)> {
        let (len, block_size) = (piece.tokens().len(), assembly.block_size);
        let private = self.main.blocks().allocate(self.main.arena().layout().blocks_for(len))?;
        let blocks: Arc<[_]> = private.ids().into();
        let slots = SlotMapping::in_blocks(&blocks, block_size, 0..len)?;
        let slots = private.write_slots(block_size, slots)?;
        assembly.private.push(private);
        Ok((PromptPiece { blocks, len, stored_start, source: PieceSource::Private }, slots))
    }
}

impl Assembly {
    fn push(&mut self, chunk: usize, piece: PromptPiece) {
        let chunk = &mut self.chunks[chunk];
        chunk.tokens += piece.len;
        chunk.pieces.push(piece);
    }

    fn add_cached(&mut self, chunk: usize, FoundPiece { hold, exact }: FoundPiece) {
        self.chunks[chunk].exact &= exact;
        self.reused_tokens += hold.num_tokens();
        let piece = PromptPiece {
            blocks: Arc::clone(hold.block_ids()),
            len: hold.num_tokens(),
            stored_start: hold.cached_position_start(),
            source: PieceSource::Cached(hold),
        };
        self.push(chunk, piece);
    }

    /// Adds the forward-pass input for the chunk's last piece. The piece sees the chunk's earlier pieces and,
    /// depending on the mode, some or all of the system prompt and the decoys, all at the positions at which
    /// their keys are stored.
    fn add_input(
        &mut self,
        reindexer: &PositionReindexer,
        chunk: usize,
        slots: WriteSlots,
        tokens: &[u32],
    ) -> Result<()> {
        let chunk = &self.chunks[chunk];
        let ChunkPlace { seen, logical_start, stored_start: stored, .. } = chunk.place;
        let before = if self.has_decoys { &self.decoys } else { &self.system };
        let before = before.segment().filter(|_| seen > 0).map(|segment| Segment { len: seen, ..segment });
        let mut segments: Vec<Segment> = before.into_iter().collect();
        // A decoy that the chunk sees comes before the chunk, as in a prompt that contains it.
        let logical = logical_start.max(seen + logical_start - self.system_len);
        for (start, piece) in chunk.with_starts() {
            segments.push(reindexer.place(piece.stored(), stored + start as i64, logical + start)?);
        }
        let start = chunk.tokens - tokens.len();
        let (logical, position) = (logical + start, stored + start as i64);
        self.inputs.push(SequenceInput::new(tokens.to_vec(), logical, position, slots, segments));
        Ok(())
    }

    /// Provides blocks for the system prompt. Returns false if another request is computing it.
    fn find_system(&mut self, lookup: &dyn PromptLookup, prompt: &ChunkedPrompt) -> Result<bool> {
        if !self.waiting.is_empty() {
            return Ok(false);
        }
        // No piece is looked up before the system prompt has its blocks, so only the system prompt can be
        // overdue.
        let Some(fill) = self.find_prefix(lookup, prompt.system())? else { return Ok(false) };
        self.reused_tokens += fill.prefix.cached();
        self.system = SystemPart::Filling(fill);
        Ok(true)
    }

    /// Provides blocks for the prefix that consists of the system prompt and the decoys. Returns false if
    /// another request is computing it. Does nothing in a mode without decoys.
    fn find_decoys(&mut self, lookup: &dyn PromptLookup, prompt: &ChunkedPrompt) -> Result<bool> {
        if !self.has_decoys || !matches!(self.decoys, SystemPart::Missing) {
            return Ok(true);
        }
        let Some(fill) = self.find_prefix(lookup, &prompt.before(self.mode)?)? else { return Ok(false) };
        self.decoys = SystemPart::Filling(fill);
        Ok(true)
    }

    /// Provides blocks for a prefix, and adds its missing part to the inputs. Returns `None` if another request
    /// is computing it.
    fn find_prefix(&mut self, lookup: &dyn PromptLookup, tokens: &[u32]) -> Result<Option<Box<SystemFill>>> {
        match lookup.fill_system(tokens, self.overdue.is_empty())? {
            SystemFound::Filled(fill) => {
                self.add_prefix(tokens, &fill.prefix);
                Ok(Some(fill))
            }
            SystemFound::Busy(key, waiter) => {
                self.waiting.push((key, waiter));
                Ok(None)
            }
        }
    }
}

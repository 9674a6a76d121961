//! Reindexing places a stored piece at the position where a prompt uses it, without changing any key bytes.

use kvcore::{LayerRopes, Rope, Segment, SlotMapping};

use super::stored::Stored;
use crate::cache::PieceHold;
use crate::error::{Error, Result};

/// Places stored pieces at the positions where prompts use them, within the positions that the model
/// supports.
///
/// Stored keys are unchanged and stay rotated to their virtual positions. Instead, `attend` rotates the
/// *query* to its position minus the piece's offset, which gives the same scores.
#[derive(Debug, Clone)]
pub struct PositionReindexer {
    max_positions: usize,
}

impl PositionReindexer {
    /// Creates a reindexer for a model that uses this rotary embedding in every layer.
    ///
    /// Pieces computed with other frequencies (another regime of dynamic NTK or LongRoPE) have other hashes
    /// and are never found.
    pub fn new(rope: &Rope) -> Self {
        Self { max_positions: rope.max_positions() }
    }

    /// Creates a reindexer for a request's embeddings, one per layer. The layer with the fewest positions
    /// sets the limit.
    pub fn for_layers(ropes: &LayerRopes) -> Self {
        let each = ropes.layers().iter().map(|rope| rope.max_positions());
        Self { max_positions: each.min().unwrap_or(0) }
    }

    /// Places a piece so that its first token is at position `new_position_start` and at index 0 of the
    /// merged KV. To change the index, call [`PlacedPiece::at_offset_in_merged_kv`].
    ///
    /// # Errors
    /// Returns [`Error::TooLong`] if the model does not support one of the positions.
    pub fn reindex(&self, chunk: PieceHold, new_position_start: i64) -> Result<PlacedPiece> {
        self.check(new_position_start, chunk.num_tokens())?;
        Ok(PlacedPiece { original: chunk, new_position_start, offset_in_merged_kv: 0 })
    }

    /// Checks that the model supports the positions of `len` tokens starting at `start`.
    pub(crate) fn check(&self, start: i64, len: usize) -> Result<()> {
        if self.has(start, len as i64) {
            return Ok(());
        }
        let largest = start.saturating_add(len as i64 - 1);
        Err(Error::TooLong { largest, limit: self.max_positions })
    }

    /// Returns the number of positions that the model supports.
    pub fn max_positions(&self) -> usize {
        self.max_positions
    }

    /// Returns the segment of stored keys and values with the first token at `position`, after `logical`
    /// tokens of the merged KV.
    ///
    /// # Errors
    /// Returns the errors of [`reindex`](Self::reindex).
    pub(crate) fn place(&self, stored: Stored<'_>, position: i64, logical: usize) -> Result<Segment> {
        self.check(position, stored.len)?;
        Ok(stored.used_at(position, logical))
    }

    fn has(&self, start: i64, len: i64) -> bool {
        let end = start.checked_add(len).and_then(|end| usize::try_from(end).ok());
        start >= 0 && end.is_some_and(|end| end <= self.max_positions)
    }
}

/// A stored piece, placed at the position where a prompt uses it. Only metadata is added to the original
/// blocks.
#[derive(Debug, Clone)]
#[doc(alias = "ReindexedChunkKV")]
pub struct PlacedPiece {
    original: PieceHold,
    new_position_start: i64,
    offset_in_merged_kv: usize,
}

impl PlacedPiece {
    /// Returns this piece at the logical index `offset`, after `offset` tokens of the merged KV.
    #[must_use]
    pub fn at_offset_in_merged_kv(mut self, offset: usize) -> Self {
        self.offset_in_merged_kv = offset;
        self
    }

    /// Returns the position at which the first token is used.
    pub fn new_position_start(&self) -> i64 {
        self.new_position_start
    }

    /// Returns the distance from the keys' stored positions to the positions where they are used.
    pub fn position_offset(&self) -> i64 {
        self.new_position_start - self.original.cached_position_start()
    }

    /// Returns the slot of each token. The slots do not depend on where the piece is used.
    pub fn slot_mapping(&self) -> Result<SlotMapping> {
        let chunk = &self.original;
        Ok(SlotMapping::in_blocks(chunk.block_ids(), chunk.block_size(), 0..chunk.num_tokens())?)
    }

    /// Returns the segment that `attend` reads.
    pub fn segment(&self) -> Segment {
        self.original.stored().used_at(self.new_position_start, self.offset_in_merged_kv)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Acquired, ChunkBlockPool, ChunkCacheConfig, ChunkCacheManager, ChunkContext, ChunkHasher,
        ComputeMode, HashAlgorithm, TenantId,
    };
    use kvcore::{KeyScope, RopeConfig};
    use std::sync::Arc;

    fn reindexer(max_positions: usize) -> PositionReindexer {
        PositionReindexer::new(&Rope::new(RopeConfig::new(8, 10_000.0), max_positions).unwrap())
    }

    fn chunk(tokens: &[u32]) -> PieceHold {
        let pool = ChunkBlockPool::new(3..9, 4).unwrap();
        let cache = ChunkCacheManager::new(ChunkCacheConfig::default(), pool).unwrap();
        let context = ChunkContext::new(KeyScope::new("m", b"").root(), ComputeMode::Alone, &[]);
        let hasher = ChunkHasher::new(HashAlgorithm::Blake3, context, 4);
        let piece = hasher.pieces(tokens, 4096).next().unwrap();
        match cache.acquire(TenantId::default(), &piece, 2) {
            Acquired::Compute(reservation) => reservation.store(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_piece_is_placed_by_metadata_alone() {
        let (reindexer, chunk) = (reindexer(2000), chunk(&[1; 6]));
        let near = reindexer.reindex(chunk.clone(), 0).unwrap();
        let far = reindexer.reindex(chunk, 1000).unwrap().at_offset_in_merged_kv(17);
        assert_eq!((near.new_position_start(), far.new_position_start()), (0, 1000));
        assert_eq!((near.position_offset(), far.position_offset()), (-2, 998));
        assert!(Arc::ptr_eq(&near.segment().blocks, &far.segment().blocks));
        assert_eq!(near.slot_mapping().unwrap(), far.slot_mapping().unwrap());
        let segment = far.segment();
        assert_eq!((segment.stored_start, segment.position_offset, segment.logical_start), (2, 998, 17));
    }

    #[test]
    fn rule_6_positions_past_the_model_are_errors_and_never_wrap() {
        let reindexer = reindexer(100);
        assert!(reindexer.reindex(chunk(&[1; 6]), 94).is_ok());
        for start in [95, -1, i64::MAX] {
            assert!(matches!(
                reindexer.reindex(chunk(&[1; 6]), start),
                Err(Error::TooLong { limit: 100, .. })
            ));
        }
    }
}

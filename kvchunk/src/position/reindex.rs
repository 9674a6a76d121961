//! Reindexing: placing a stored piece at the position where a prompt uses it. No key byte is touched.

use std::sync::Arc;

use kvcore::{BlockId, LayerRopes, Rope, Segment, SlotMapping};

use crate::cache::PieceHold;
use crate::error::{Error, Result};

/// A reindexer: it places stored pieces, and checks what the rotary embeddings of the model's layers allow.
///
/// Keys stay as they are stored, rotated at their virtual positions. Instead, `attend` rotates the *query* by
/// its position minus the piece's offset, which gives the same scores.
#[derive(Debug, Clone)]
pub struct PositionReindexer {
    ropes: Ropes,
}

/// The rotary embeddings of the layers.
#[derive(Debug, Clone)]
enum Ropes {
    /// One embedding for all layers, however many there are.
    Same(Arc<Rope>),
    Each(LayerRopes),
}

impl Ropes {
    /// Returns all embeddings; there is always at least one.
    fn all(&self) -> &[Arc<Rope>] {
        match self {
            Self::Same(rope) => std::slice::from_ref(rope),
            Self::Each(ropes) => ropes.layers(),
        }
    }

    fn of(&self, layer: usize) -> Option<&Rope> {
        match self {
            Self::Same(rope) => Some(rope),
            Self::Each(ropes) => ropes.layers().get(layer).map(Arc::as_ref),
        }
    }
}

impl PositionReindexer {
    /// Creates a reindexer for a model that has this rotary embedding in every layer. A `Rope` has one vector
    /// of frequencies. Pieces that were computed under other frequencies (another regime of dynamic NTK or
    /// LongRoPE) have other hashes and never come here.
    pub fn new(rope: Arc<Rope>) -> Self {
        Self { ropes: Ropes::Same(rope) }
    }

    /// Creates a reindexer for the embeddings of a request, one per layer. All layers have the same positions
    /// and the same limit, but their frequencies may differ.
    pub fn for_layers(ropes: &LayerRopes) -> Self {
        Self { ropes: Ropes::Each(ropes.clone()) }
    }

    /// Places a piece with its first token at position `new_position_start` and at index 0 of the merged KV.
    /// To place it further on, call [`PlacedPiece::at_offset_in_merged_kv`].
    ///
    /// # Errors
    /// Returns [`Error::TooLong`] if the model does not have one of the positions.
    pub fn reindex(&self, chunk: PieceHold, new_position_start: i64) -> Result<PlacedPiece> {
        self.check(new_position_start, chunk.num_tokens())?;
        Ok(PlacedPiece { original: chunk, new_position_start, offset_in_merged_kv: 0 })
    }

    /// Checks that the model has the positions of `len` tokens from `start`.
    pub(crate) fn check(&self, start: i64, len: usize) -> Result<()> {
        if self.has(start, len as i64) {
            return Ok(());
        }
        let largest = start.saturating_add(len as i64 - 1);
        Err(Error::TooLong { largest, limit: self.max_positions() })
    }

    /// Returns true if keys of a layer that `rotated_by` rotated for `old_offset` can be used at `new_offset`.
    /// For this the layer must rotate now as `rotated_by` does, by the same frequencies, pairs and factor, and
    /// the model must have both positions. Keys of another regime of dynamic NTK or LongRoPE can be used at
    /// no distance. A layer that the model does not have gives false.
    pub fn can_reuse_rope(&self, layer: usize, rotated_by: &Rope, old_offset: i64, new_offset: i64) -> bool {
        self.ropes.of(layer).is_some_and(|rope| rotates_alike(rope, rotated_by))
            && self.has(old_offset, 1)
            && self.has(new_offset, 1)
    }

    /// Returns true if [`can_reuse_rope`](Self::can_reuse_rope) holds for every layer of a piece.
    pub fn can_reuse_ropes(&self, rotated_by: &LayerRopes, old_offset: i64, new_offset: i64) -> bool {
        let layers = rotated_by.layers();
        let as_many = match &self.ropes {
            Ropes::Same(_) => true,
            Ropes::Each(ropes) => ropes.layers().len() == layers.len(),
        };
        let serves = |(layer, rope): (usize, &Arc<Rope>)| {
            self.can_reuse_rope(layer, rope.as_ref(), old_offset, new_offset)
        };
        as_many && layers.iter().enumerate().all(serves)
    }

    /// Returns the number of positions of the model: that of the layer with the fewest.
    pub fn max_positions(&self) -> usize {
        self.ropes.all().iter().map(|rope| rope.max_positions()).min().unwrap_or(0)
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
        start >= 0 && end.is_some_and(|end| end <= self.max_positions())
    }

    /// Computes the cosines and sines of a layer at `positions`, without the attention factor. Both have the
    /// shape `[positions, rotary_dim / 2]`. They are computed for exactly these positions; a position is
    /// never taken modulo the size of a table.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::OutOfRange`] if the model does not have the layer or one of the positions.
    pub fn compute_rope_for_positions(
        &self,
        layer: usize,
        positions: &[i64],
    ) -> Result<(Vec<f32>, Vec<f32>)> {
        let limit = self.ropes.all().len() as i128;
        let missing =
            kvcore::Error::OutOfRange { what: "layer of a rotary embedding", value: layer as i128, limit };
        let rope = self.ropes.of(layer).ok_or(missing)?;
        let table = rope.table(positions.iter().copied())?;
        let half = rope.frequencies().len();
        let (mut cos, mut sin) = (Vec::new(), vec![0.0; positions.len() * half]);
        for (position, sin) in positions.iter().zip(sin.chunks_exact_mut(half)) {
            cos.extend_from_slice(table.at(*position, sin));
        }
        Ok((cos, sin))
    }
}

/// Returns true if two embeddings rotate by the same angles and with the same attention factor.
fn rotates_alike(a: &Rope, b: &Rope) -> bool {
    a.frequencies() == b.frequencies()
        && a.pairing() == b.pairing()
        && a.attention_factor() == b.attention_factor()
}

/// Stored keys and values: their blocks and their position.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stored<'a> {
    pub(crate) blocks: &'a Arc<[BlockId]>,
    pub(crate) len: usize,
    /// The position that the first key is rotated to.
    pub(crate) start: i64,
}

impl Stored<'_> {
    /// Returns the segment of these keys and values, used at the positions from `position` on.
    fn used_at(self, position: i64, logical: usize) -> Segment {
        Segment::new(Arc::clone(self.blocks), self.len, logical, self.start).at_offset(position - self.start)
    }
}

/// A stored piece at the place where a prompt uses it: metadata over the original blocks.
#[derive(Debug, Clone)]
#[doc(alias = "ReindexedChunkKV")]
pub struct PlacedPiece {
    original: PieceHold,
    new_position_start: i64,
    offset_in_merged_kv: usize,
}

impl PlacedPiece {
    /// Returns this piece at the logical index `offset`, that is, after `offset` tokens of the merged KV.
    #[must_use]
    pub fn at_offset_in_merged_kv(mut self, offset: usize) -> Self {
        self.offset_in_merged_kv = offset;
        self
    }

    /// Returns the stored piece, which is unchanged.
    pub fn original_cache(&self) -> &PieceHold {
        &self.original
    }

    /// Returns the position at which the first token is used.
    pub fn new_position_start(&self) -> i64 {
        self.new_position_start
    }

    /// Returns one past the position at which the last token is used.
    pub fn new_position_end(&self) -> i64 {
        self.new_position_start + self.original.num_tokens() as i64
    }

    /// Returns the positions at which all tokens are used.
    pub fn new_positions(&self) -> impl ExactSizeIterator<Item = i64> + use<> {
        let start = self.new_position_start;
        (0..self.original.num_tokens() as u32).map(move |i| start + i64::from(i))
    }

    /// Returns the distance in positions from the stored place of the keys to the place of use.
    pub fn position_offset(&self) -> i64 {
        self.new_position_start - self.original.cached_position_start()
    }

    /// Returns the number of tokens of the merged KV before this piece.
    pub fn offset_in_merged_kv(&self) -> usize {
        self.offset_in_merged_kv
    }

    /// Returns the slot of every token. The slots do not depend on the place of use.
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
    use kvcore::{KeyScope, RopeConfig, RopeFamily, RopeScaling};

    fn reindexer(max_positions: usize) -> PositionReindexer {
        PositionReindexer::new(Arc::new(Rope::new(RopeConfig::new(8, 10_000.0), max_positions).unwrap()))
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
        assert_eq!(
            (near.new_position_start(), far.new_position_start(), far.new_position_end()),
            (0, 1000, 1006)
        );
        assert_eq!(far.new_positions().collect::<Vec<_>>(), [1000, 1001, 1002, 1003, 1004, 1005]);
        assert_eq!((near.position_offset(), far.position_offset(), far.offset_in_merged_kv()), (-2, 998, 17));
        assert!(Arc::ptr_eq(near.original_cache().block_ids(), far.original_cache().block_ids()));
        assert_eq!(near.slot_mapping().unwrap(), far.slot_mapping().unwrap());
        let segment = far.segment();
        assert_eq!((segment.stored_start, segment.position_offset, segment.logical_start), (2, 998, 17));
    }

    #[test]
    fn rule_6_keys_of_other_frequencies_do_not_serve() {
        let rope = |theta, scaling| {
            let config = RopeConfig { scaling, ..RopeConfig::new(8, theta) };
            Arc::new(Rope::new(config, 100).unwrap())
        };
        let plain = rope(10_000.0, RopeScaling::None);
        let reindexer = PositionReindexer::new(Arc::clone(&plain));
        assert!(reindexer.can_reuse_rope(0, &rope(10_000.0, RopeScaling::None), 0, 7));
        assert!(!reindexer.can_reuse_rope(0, &rope(20_000.0, RopeScaling::None), 0, 7), "another model");
        let dynamic = RopeConfig {
            scaling: RopeScaling::DynamicNtk { factor: 4.0, original_max_position: 32 },
            ..RopeConfig::new(8, 10_000.0)
        };
        let regime = |longest| Rope::in_regime(dynamic.clone(), dynamic.regime(longest), 100).unwrap();
        let reindexer = PositionReindexer::new(Arc::new(regime(60)));
        assert!(reindexer.can_reuse_rope(0, &regime(60), 3, 7));
        for longest in [20, 61] {
            assert!(
                !reindexer.can_reuse_rope(0, &regime(longest), 3, 7),
                "another regime, of the same model"
            );
        }
    }

    #[test]
    fn rule_6_every_layer_is_asked_for_its_own_frequencies() {
        let model = |thetas: &[f64]| {
            let layers: Vec<RopeConfig> = thetas.iter().map(|&theta| RopeConfig::new(8, theta)).collect();
            RopeFamily::new(&layers, 100).unwrap().at(100).unwrap()
        };
        let ropes = model(&[10_000.0, 1e6]);
        let reindexer = PositionReindexer::for_layers(&ropes);
        let [local, global] = ropes.layers() else { panic!() };
        let can = |layer, rope: &Arc<Rope>| reindexer.can_reuse_rope(layer, rope, 3, 7);
        assert!(can(0, local) && can(1, global));
        assert!(!can(0, global) && !can(1, local) && !can(2, global), "each by its own");
        assert!(reindexer.can_reuse_ropes(&ropes, 3, 7) && !reindexer.can_reuse_ropes(&ropes, 3, 100));
        for other in [&[10_000.0, 2e6][..], &[10_000.0], &[10_000.0, 1e6, 1e6]] {
            assert!(!reindexer.can_reuse_ropes(&model(other), 3, 7), "{other:?}");
        }
        let at = |layer| reindexer.compute_rope_for_positions(layer, &[5]).unwrap();
        for (layer, rope) in ropes.layers().iter().enumerate() {
            let angle = 5.0 * f64::from(rope.frequencies()[1]);
            let (cos, sin) = at(layer);
            assert!((f64::from(cos[1]) - angle.cos()).abs() < 1e-6, "layer {layer}");
            assert!((f64::from(sin[1]) - angle.sin()).abs() < 1e-6, "layer {layer}");
        }
        assert_ne!(at(0), at(1));
        assert!(reindexer.compute_rope_for_positions(2, &[5]).is_err());
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
        let rope = Rope::new(RopeConfig::new(8, 10_000.0), 50).unwrap();
        let can = |old, new| reindexer.can_reuse_rope(0, &rope, old, new);
        assert!(can(0, 99) && can(99, 0));
        assert!(!can(0, 100) && !can(-1, 5) && !can(i64::MIN, i64::MAX));
        let (cos, sin) = reindexer.compute_rope_for_positions(0, &[0, 3, 99]).unwrap();
        assert_eq!((cos.len(), sin.len()), (12, 12));
        assert_eq!((cos[8], sin[8]), (99f64.cos() as f32, 99f64.sin() as f32));
        assert_eq!((cos[0], sin[0], sin[4]), (1.0, 0.0, 3f64.sin() as f32));
        assert!(reindexer.compute_rope_for_positions(0, &[100]).is_err());
    }
}

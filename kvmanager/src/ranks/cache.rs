//! The cache of one rank: some layers of a model, for the tokens of the prompt so far.

use crate::error::{CoreError, range, too_large};
use crate::ranks::{Piece, PiecePlace};
use crate::{Error, Result};
use kvcore::{KvArena, LayerViews, Segment, StaticKvCache, Stream, TensorView};
use std::ops::Range;

/// K `[layers, batch, capacity, k_heads, k_dim]`, and V likewise, for consecutive layers of a model.
///
/// A rank cache is a [`StaticKvCache`] whose batch entries advance together and whose layers are numbered
/// as in the model. [`into_static`](Self::into_static) returns that cache, for decoding after a prefill
/// without copies. All memory is allocated up front; appending and merging allocate no device memory.
///
/// `append_sequence`, `get_data` and `reset` have the names of the seed. Its `merge_from_ranks` is
/// [`PieceMerger`](super::PieceMerger).
///
/// ```
/// use std::sync::Arc;
/// use kvbackend_cpu::CpuBackend;
/// use kvcore::{Backend, BlockOrder, DType, KvArena, KvLayout, KvShape, MemoryKind, allocate_tensor};
/// use kvmanager::RankCache;
///
/// let backend = CpuBackend::new();
/// let stream = backend.stream()?;
/// let shape = KvShape {
///     num_layers: 12, num_blocks: 1, block_size: 21,        // 12 layers, one batch entry, 21 tokens
///     k_heads: 2, v_heads: 2, k_dim: 8, v_dim: 8,
///     format: DType::F16.into(), order: BlockOrder::TokenMajor,
/// };
/// let arena = KvArena::allocate(backend.as_ref(), MemoryKind::Device, Arc::new(KvLayout::new(shape)?))?;
/// let mut cache = RankCache::new(arena, 24)?;               // the last stage of 36 layers
/// let rows = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::F16, &[1, 7, 2, 8])?;
/// cache.append_sequence(stream.as_ref(), 30, &rows, &rows)?;
/// let (k, _) = cache.append_sequence(stream.as_ref(), 30, &rows, &rows)?;
/// assert_eq!(k.shape(), [1, 14, 2, 8]);
/// assert!(cache.append_sequence(stream.as_ref(), 3, &rows, &rows).is_err()); // another rank's layer
/// # Ok::<(), kvmanager::Error>(())
/// ```
#[derive(Debug)]
pub struct RankCache {
    dense: StaticKvCache,
    first_layer: usize,
}

impl RankCache {
    /// Creates an empty cache over an arena whose blocks are batch entries. Its layers are those of the
    /// model from `first_layer` on.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::InvalidFormat`] for a quantised arena, because pieces move as elements without
    /// scales. Returns [`kvcore::Error::Overflow`] if `first_layer` is too large.
    pub fn new(arena: KvArena, first_layer: usize) -> Result<Self> {
        let shape = arena.layout().shape();
        if shape.format.is_quantized() {
            let reason = "ranks exchange dense keys and values".to_owned();
            return Err(Error::Core(CoreError::InvalidFormat { format: shape.format, reason }));
        }
        first_layer
            .checked_add(shape.num_layers)
            .ok_or(Error::Core(CoreError::Overflow { what: "layers of a rank" }))?;
        Ok(Self { dense: StaticKvCache::new(arena)?, first_layer })
    }

    /// Returns the layers of this rank, numbered as in the model.
    pub fn layers(&self) -> Range<usize> {
        self.first_layer..self.first_layer + self.arena().layout().shape().num_layers
    }

    /// Returns the number of batch entries.
    pub fn batch(&self) -> usize {
        self.dense.max_batch()
    }

    /// Returns the number of tokens that a layer can hold.
    pub fn capacity(&self) -> usize {
        self.dense.max_len()
    }

    /// Returns the arena of the cache. Its blocks are batch entries.
    pub fn arena(&self) -> &KvArena {
        self.dense.arena()
    }

    /// Returns the number in the arena of a layer of the model.
    fn local(&self, layer: usize) -> Result<usize> {
        let layers = self.layers();
        match layer.checked_sub(layers.start) {
            Some(local) if layer < layers.end => Ok(local),
            Some(_) => Err(range("layer", layer, layers.end)),
            None => Err(Error::Core(CoreError::Mismatch {
                what: "layer of an earlier rank; the first one here",
                expected: layers.start,
                got: layer,
            })),
        }
    }

    /// Returns the number of tokens that a layer holds.
    ///
    /// # Errors
    /// Returns an error if the layer is of another rank.
    pub fn len(&self, layer: usize) -> Result<usize> {
        Ok(self.dense.entry_len(self.local(layer)?, 0)?)
    }

    /// Returns whether no layer holds a token.
    pub fn is_empty(&self) -> bool {
        self.layers().all(|layer| self.len(layer) == Ok(0))
    }

    /// Appends new tokens to one layer; `k` and `v` are `[batch, new, heads, dim]`. Returns views of the
    /// layer, as [`get_data`](Self::get_data) does.
    ///
    /// # Errors
    /// Returns an error in the following cases. In all of them the cache is unchanged.
    /// - The layer is of another rank.
    /// - The batch, the heads or the dims differ from the cache's.
    /// - K and V have different numbers of tokens.
    /// - [`Scatter`](kvcore::Scatter) does not accept the element type.
    /// - The tokens exceed the capacity ([`kvcore::Error::TooLarge`]).
    pub fn append_sequence(
        &mut self,
        stream: &dyn Stream,
        layer: usize,
        k: &TensorView,
        v: &TensorView,
    ) -> Result<LayerViews> {
        let (local, len) = (self.local(layer)?, self.len(layer)?);
        Ok(self.dense.update(stream, local, k, v, &vec![len; self.batch()])?)
    }

    /// Returns K and V of one layer up to its length, as views `[batch, len, heads, dim]`. Nothing is
    /// copied.
    ///
    /// The views have the layout of the cache. With one batch entry and
    /// [`BlockOrder::TokenMajor`](kvcore::BlockOrder::TokenMajor), the tokens so far are one run of memory.
    /// With [`BlockOrder::HeadMajor`](kvcore::BlockOrder::HeadMajor), the tokens of each head are.
    /// [`TensorView::contiguous`] returns row-major copies.
    ///
    /// # Errors
    /// Returns an error if the layer is of another rank.
    pub fn get_data(&self, layer: usize) -> Result<LayerViews> {
        Ok(self.dense.views(self.local(layer)?)?)
    }

    /// Returns the tokens of one batch entry in one layer as a segment of an attend over
    /// [`arena`](Self::arena), whose layers count from 0.
    ///
    /// # Errors
    /// Returns an error if the layer is of another rank or the entry is out of range.
    pub fn segment(&self, layer: usize, entry: usize) -> Result<Segment> {
        Ok(self.dense.entry_segment(self.local(layer)?, entry)?)
    }

    /// Returns a part of this cache to send to other ranks, as views. Nothing is copied. The sender MUST
    /// NOT [`reset`](Self::reset) the cache and append to it before the receivers have read the part.
    ///
    /// # Errors
    /// Returns an error if a layer is of another rank, and [`kvcore::Error::TooLarge`] if a layer does not hold
    /// the tokens.
    pub fn piece(&self, place: PiecePlace) -> Result<Piece> {
        for layer in place.layers.clone() {
            let len = self.len(layer)?;
            if place.tokens.end > len {
                return Err(too_large("last token of the piece", place.tokens.end, len));
            }
        }
        let (k, v) = self.region(&place)?;
        Ok(Piece { place, k, v })
    }

    /// Returns the region of a piece: `[layers, batch, tokens, heads, dim]` of K and V, filled or not.
    pub(super) fn region(&self, place: &PiecePlace) -> Result<LayerViews> {
        let start = self.local(place.layers.start)?;
        let end = place.layers.end.saturating_sub(self.first_layer);
        let tokens = &place.tokens;
        let part = |view: &TensorView| view.slice(0, start, end)?.slice(2, tokens.start, tokens.end);
        let (k, v) = self.arena().views()?;
        Ok((part(&k)?, part(&v)?))
    }

    /// Sets the number of tokens that a layer holds, after pieces were copied in.
    pub(super) fn set_len(&mut self, layer: usize, len: usize) -> Result<()> {
        Ok(self.dense.set_layer_len(self.local(layer)?, len)?)
    }

    /// Removes all tokens. The memory stays allocated.
    pub fn reset(&mut self) {
        self.dense.reset();
    }

    /// Returns the underlying static cache with its memory and lengths. Its layers count from 0.
    pub fn into_static(self) -> StaticKvCache {
        self.dense
    }
}

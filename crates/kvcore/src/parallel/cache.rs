//! The cache of one rank: some layers of a model, as long as the prompt is so far.

use std::ops::Range;

use super::{Piece, PiecePlace};
use crate::base::{Error, Result};
use crate::device::{KvArena, Segment, Stream, TensorView};
use crate::paging::{LayerViews, StaticKvCache};

/// K `[layers, batch, k_heads, capacity, k_dim]` and V alike, for consecutive layers of a model.
///
/// It is a [`StaticKvCache`] whose batch entries advance together and whose layers are numbered as in
/// the model; [`into_static`](Self::into_static) gives that cache, for decoding after a prefill
/// without copying. All memory is allocated before; appending and merging allocate none on the
/// device.
///
/// The seed's names are kept: `append_sequence`, `get_data`, `reset`; its `merge_from_ranks` is
/// [`PieceMerger`](super::PieceMerger).
///
/// ```
/// use std::sync::Arc;
/// use kvbackend_cpu::CpuBackend;
/// use kvcore::{Backend, BlockOrder, DType, KvArena, KvLayout, KvShape, MemoryKind, RankCache, allocate_tensor};
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
/// let rows = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::F16, &[1, 2, 7, 8])?;
/// cache.append_sequence(stream.as_ref(), 30, &rows, &rows)?;
/// let (k, _) = cache.append_sequence(stream.as_ref(), 30, &rows, &rows)?;
/// assert_eq!(k.shape(), [1, 2, 14, 8]);
/// assert!(cache.append_sequence(stream.as_ref(), 3, &rows, &rows).is_err()); // another rank's layer
/// # Ok::<(), kvcore::Error>(())
/// ```
#[derive(Debug)]
pub struct RankCache {
    dense: StaticKvCache,
    first_layer: usize,
}

impl RankCache {
    /// An empty cache over an arena whose blocks are batch entries; its layers are those of the model
    /// from `first_layer` on.
    ///
    /// # Errors
    /// [`Error::InvalidFormat`] for a quantised arena: pieces are moved as elements, without scales.
    pub fn new(arena: KvArena, first_layer: usize) -> Result<Self> {
        let shape = arena.layout().shape();
        if shape.format.is_quantized() {
            let reason = "ranks exchange dense keys and values".to_owned();
            return Err(Error::InvalidFormat { format: shape.format, reason });
        }
        first_layer.checked_add(shape.num_layers).ok_or(Error::Overflow { what: "layers of a rank" })?;
        Ok(Self { dense: StaticKvCache::new(arena)?, first_layer })
    }

    /// The layers of this rank, as numbered in the model.
    pub fn layers(&self) -> Range<usize> {
        self.first_layer..self.first_layer + self.arena().layout().shape().num_layers
    }

    /// Batch entries.
    pub fn batch(&self) -> usize {
        self.dense.max_batch()
    }

    /// Tokens that a layer can hold.
    pub fn capacity(&self) -> usize {
        self.dense.max_len()
    }

    /// The memory under the cache: blocks are batch entries.
    pub fn arena(&self) -> &KvArena {
        self.dense.arena()
    }

    /// The number in the arena of a layer of the model.
    fn local(&self, layer: usize) -> Result<usize> {
        let layers = self.layers();
        match layer.checked_sub(layers.start) {
            Some(local) if layer < layers.end => Ok(local),
            Some(_) => Err(Error::range("layer", layer, layers.end)),
            None => Err(Error::Mismatch {
                what: "layer of an earlier rank; the first one here",
                expected: layers.start,
                got: layer,
            }),
        }
    }

    /// Tokens that a layer holds.
    ///
    /// # Errors
    /// A layer of another rank.
    pub fn len(&self, layer: usize) -> Result<usize> {
        self.dense.entry_len(self.local(layer)?, 0)
    }

    /// Whether no layer holds a token.
    pub fn is_empty(&self) -> bool {
        self.layers().all(|layer| self.len(layer) == Ok(0))
    }

    /// Appends the new tokens of one layer (`k` and `v` are `[batch, heads, new, dim]`) and returns
    /// the layer's cache as [`get_data`](Self::get_data) does.
    ///
    /// # Errors
    /// A layer of another rank, another batch, other heads or dim, tokens of K and V that differ in
    /// number, an element type that [`Scatter`](crate::device::Scatter) does not take, and
    /// [`Error::OutOfRange`] past the capacity. The cache is as before then.
    pub fn append_sequence(
        &mut self,
        stream: &dyn Stream,
        layer: usize,
        k: &TensorView,
        v: &TensorView,
    ) -> Result<LayerViews> {
        let (local, len) = (self.local(layer)?, self.len(layer)?);
        self.dense.update(stream, local, k, v, &vec![len; self.batch()])
    }

    /// K and V of one layer up to its length, `[batch, heads, len, dim]`: views, nothing is copied.
    ///
    /// They lie in the cache's own layout. With one batch entry and
    /// [`BlockOrder::TokenMajor`](crate::BlockOrder::TokenMajor) the tokens so far are one run of
    /// memory; with [`BlockOrder::HeadMajor`](crate::BlockOrder::HeadMajor) each head's are.
    /// [`TensorView::contiguous`] gives row-major copies.
    ///
    /// # Errors
    /// A layer of another rank.
    pub fn get_data(&self, layer: usize) -> Result<LayerViews> {
        self.dense.views(self.local(layer)?)
    }

    /// One batch entry's tokens in one layer as a segment of an attend over [`arena`](Self::arena),
    /// whose layers count from 0.
    ///
    /// # Errors
    /// A layer of another rank, an entry out of range.
    pub fn segment(&self, layer: usize, entry: usize) -> Result<Segment> {
        self.dense.entry_segment(self.local(layer)?, entry)
    }

    /// A part of this cache to send to other ranks: views, nothing is copied. The sender must not
    /// [`reset`](Self::reset) and append before the receivers have read it.
    ///
    /// # Errors
    /// Layers of another rank, [`Error::OutOfRange`] for tokens that a layer does not hold.
    pub fn piece(&self, place: PiecePlace) -> Result<Piece> {
        for layer in place.layers.clone() {
            let len = self.len(layer)?;
            if place.tokens.end > len {
                return Err(Error::range("last token of the piece", place.tokens.end, len + 1));
            }
        }
        let (k, v) = self.region(&place)?;
        Ok(Piece { place, k, v })
    }

    /// Where a piece lies: `[layers, batch, heads, tokens, dim]` of K and V, filled or not.
    pub(super) fn region(&self, place: &PiecePlace) -> Result<LayerViews> {
        let start = self.local(place.layers.start)?;
        let end = place.layers.end.saturating_sub(self.first_layer);
        let tokens = &place.tokens;
        let part = |view: &TensorView| view.slice(0, start, end)?.slice(3, tokens.start, tokens.end);
        let (k, v) = self.arena().views()?;
        Ok((part(&k)?, part(&v)?))
    }

    /// Says how many tokens a layer holds, after pieces were copied in.
    pub(super) fn set_len(&mut self, layer: usize, len: usize) -> Result<()> {
        self.dense.set_layer_len(self.local(layer)?, len)
    }

    /// Forgets all tokens; memory stays.
    pub fn reset(&mut self) {
        self.dense.reset();
    }

    /// The same memory and lengths as a static cache, whose layers count from 0.
    pub fn into_static(self) -> StaticKvCache {
        self.dense
    }
}

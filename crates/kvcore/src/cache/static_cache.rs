//! The static cache: every batch entry owns one contiguous stretch of the longest length.

use std::sync::Arc;

use super::{Error, Result};
use crate::backend::Stream;
use crate::block::BlockId;
use crate::error::{product, same};
use crate::kernels::{KvArena, Scatter, Segment};
use crate::layout::PlaneStrides;
use crate::tensor::{Dims, TensorView};

/// K and V of a fixed batch, `[num_layers, max_batch, heads, max_len, dim]`.
///
/// It is a paged cache with one block per batch entry: `num_blocks` of the arena's layout is the
/// batch and `block_size` the longest length. The same kernels therefore serve both, and a
/// [`segment`](Self::segment) of it goes into the same `attend`.
#[derive(Debug)]
pub struct StaticKvCache {
    arena: KvArena,
    /// Tokens held, `[num_layers][max_batch]`.
    lengths: Vec<usize>,
}

impl StaticKvCache {
    /// A cache over an arena whose blocks are batch entries.
    pub fn new(arena: KvArena) -> Result<Self> {
        let s = arena.layout().shape();
        let lengths = vec![0; product("lengths", &[s.num_layers, s.num_blocks])?];
        Ok(Self { arena, lengths })
    }

    /// Batch entries.
    pub fn max_batch(&self) -> usize {
        self.arena.layout().shape().num_blocks
    }

    /// Tokens that an entry can hold.
    pub fn max_len(&self) -> usize {
        self.arena.layout().shape().block_size
    }

    fn index(&self, layer: usize, batch: usize) -> Result<usize> {
        let layers = self.arena.layout().shape().num_layers;
        if layer >= layers {
            return Err(Error::range("layer", layer, layers));
        }
        if batch >= self.max_batch() {
            return Err(Error::range("batch entry", batch, self.max_batch()));
        }
        Ok(layer * self.max_batch() + batch)
    }

    /// Tokens of one entry in one layer.
    pub fn len(&self, layer: usize, batch: usize) -> Result<usize> {
        Ok(self.lengths[self.index(layer, batch)?])
    }

    /// Whether an entry holds no token in a layer.
    pub fn is_empty(&self, layer: usize, batch: usize) -> Result<bool> {
        Ok(self.len(layer, batch)? == 0)
    }

    /// Writes new tokens of one layer at `starts[b]` of each entry, and returns views of everything
    /// up to the longest entry's new end: `([batch, k_heads, len, k_dim], [batch, v_heads, len, v_dim])`.
    ///
    /// `k` and `v` are head-major: `[batch, heads, new, dim]`. Nothing is copied but the new rows.
    ///
    /// # Errors
    /// A layer out of range, a batch that is not the cache's, a start past the entry's end (it would
    /// leave a hole), an end past [`max_len`](Self::max_len). The cache is as before then.
    pub fn update(
        &mut self,
        stream: &dyn Stream,
        layer: usize,
        k: &TensorView,
        v: &TensorView,
        starts: &[usize],
    ) -> Result<(TensorView, TensorView)> {
        self.index(layer, 0)?;
        for view in [k, v] {
            same("rank of [batch, heads, new, dim]", 4, view.shape().len())?;
            same("batch", self.max_batch(), view.shape()[0])?;
        }
        same("new tokens of V", k.shape()[2], v.shape()[2])?;
        same("starts", self.max_batch(), starts.len())?;
        let new = k.shape()[2];
        for (batch, &start) in starts.iter().enumerate() {
            let held = self.len(layer, batch)?;
            if start > held {
                return Err(Error::range("start of the update", start, held + 1));
            }
            if start.saturating_add(new) > self.max_len() {
                let end = start.saturating_add(new);
                return Err(Error::range("length of a static cache", end, self.max_len() + 1));
            }
        }
        let mut ops = Vec::with_capacity(starts.len());
        for (batch, &start) in starts.iter().enumerate() {
            let rows = |view: &TensorView| view.select(0, batch)?.permute(&[1, 0, 2]);
            let first = (batch * self.max_len() + start) as i64;
            let slots = (first..first + new as i64).collect();
            let op = Scatter { arena: self.arena.clone(), layer, k: rows(k)?, v: rows(v)?, slots };
            op.check()?;
            ops.push(op);
        }
        ops.iter().try_for_each(|op| stream.scatter(op))?;
        for (batch, &start) in starts.iter().enumerate() {
            let at = self.index(layer, batch)?;
            self.lengths[at] = start + new;
        }
        self.views(layer)
    }

    /// Views of one layer up to the longest entry: `([batch, k_heads, len, k_dim], [batch, v_heads, len, v_dim])`.
    /// Of a quantised cache these are the codes.
    pub fn views(&self, layer: usize) -> Result<(TensorView, TensorView)> {
        let first = self.index(layer, 0)?;
        let len = self.lengths[first..first + self.max_batch()].iter().copied().max().unwrap_or(0);
        let (layout, s) = (self.arena.layout(), self.arena.layout().shape());
        let view = |storage, strides: PlaneStrides, heads, dim| {
            TensorView::with_strides(
                storage,
                s.format.storage_dtype(),
                Dims::new(&[s.num_blocks, heads, len, dim])?,
                Dims::new(&[strides.block, strides.head, strides.token, 1])?,
                layer * strides.layer,
            )
        };
        Ok((
            view(Arc::clone(self.arena.k()), layout.k_strides(), s.k_heads, s.k_dim)?,
            view(Arc::clone(self.arena.v()), layout.v_strides(), s.v_heads, s.v_dim)?,
        ))
    }

    /// An entry's tokens in one layer as a segment of an attend over [`arena`](Self::arena).
    pub fn segment(&self, layer: usize, batch: usize) -> Result<Segment> {
        let len = self.len(layer, batch)?;
        Ok(Segment::new([BlockId(batch as u32)].into(), len, 0, 0))
    }

    /// The memory under the cache.
    pub fn arena(&self) -> &KvArena {
        &self.arena
    }

    /// Forgets all tokens.
    pub fn reset(&mut self) {
        self.lengths.fill(0);
    }
}

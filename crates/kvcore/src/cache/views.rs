//! A layer of an arena as two tensors.

use std::sync::Arc;

use super::{Error, LayerViews, Result};
use crate::kernels::{KvArena, KvPlane};
use crate::tensor::{Dims, TensorView};

/// K and V of one layer, `[num_blocks, heads, len, dim]`: the first `len` tokens of every block.
pub(super) fn layer_views(arena: &KvArena, layer: usize, len: usize) -> Result<LayerViews> {
    let s = arena.layout().shape();
    if layer >= s.num_layers {
        return Err(Error::range("layer", layer, s.num_layers));
    }
    let view = |plane: KvPlane<'_>| {
        let strides = plane.strides;
        TensorView::with_strides(
            Arc::clone(plane.storage),
            s.format.storage_dtype(),
            Dims::new(&[s.num_blocks, plane.heads, len, plane.dim])?,
            Dims::new(&[strides.block, strides.head, strides.token, 1])?,
            layer * strides.layer,
        )
    };
    Ok((view(arena.k_plane())?, view(arena.v_plane())?))
}

//! Copies rows out of the slots of an arena, for caches whose contents are read back.

use crate::Result;
use kvcore::{Backend, DType, Gather, KvArena, LayerViews, MemoryKind, Stream, allocate_tensor};
use std::sync::Arc;

/// Copies the rows at `slots` to new memory, and returns `([rows, k_heads, k_dim], [rows, v_heads, v_dim])`.
/// The element type is the arena's, or f32 if the arena is quantised. The copy is enqueued on `stream`.
pub(super) fn read_rows(
    backend: &dyn Backend,
    stream: &dyn Stream,
    arena: &KvArena,
    layer: usize,
    slots: &Arc<[i64]>,
) -> Result<LayerViews> {
    let s = arena.layout().shape();
    let dtype = if s.format.is_quantized() { DType::F32 } else { s.format.storage_dtype() };
    let rows = |heads, dim| {
        let shape = [slots.len().max(1), heads, dim];
        allocate_tensor(backend, MemoryKind::Device, dtype, &shape)?.slice(0, 0, slots.len())
    };
    let (k, v) = (rows(s.k_heads, s.k_dim)?, rows(s.v_heads, s.v_dim)?);
    stream.gather(&Gather::new(arena, layer, slots, k.clone(), v.clone()))?;
    Ok((k, v))
}

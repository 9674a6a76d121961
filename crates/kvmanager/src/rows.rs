//! Copies of head-major rows to and from slots of an arena, for caches that read back their contents.

use crate::Result;
use crate::error::same;
use kvcore::{
    Backend, DType, Gather, KvArena, LayerViews, MemoryKind, Scatter, Stream, TensorView, WriteSlots,
    allocate_tensor,
};
use std::sync::Arc;

/// Copies the rows at `slots` into new memory: `([k_heads, rows, k_dim], [v_heads, rows, v_dim])`. The
/// element type is that of the arena, or f32 if the arena is quantised. The copy is enqueued on `stream`.
pub(super) fn read_rows(
    backend: &dyn Backend,
    stream: &dyn Stream,
    arena: &KvArena,
    layer: usize,
    slots: Arc<[i64]>,
) -> Result<LayerViews> {
    let s = arena.layout().shape();
    let dtype = if s.format.is_quantized() { DType::F32 } else { s.format.storage_dtype() };
    let rows = |heads, dim| {
        let shape = [slots.len().max(1), heads, dim];
        allocate_tensor(backend, MemoryKind::Device, dtype, &shape)?.slice(0, 0, slots.len())
    };
    let (k, v) = (rows(s.k_heads, s.k_dim)?, rows(s.v_heads, s.v_dim)?);
    let op = Gather { arena: arena.clone(), layer, slots, k: k.clone(), v: v.clone(), rotation: None };
    stream.gather(&op)?;
    Ok((k.permute(&[1, 0, 2])?, v.permute(&[1, 0, 2])?))
}

/// Writes head-major rows `[heads, rows, dim]` to `slots`.
pub(super) fn write_rows(
    stream: &dyn Stream,
    arena: &KvArena,
    layer: usize,
    k: &TensorView,
    v: &TensorView,
    slots: WriteSlots,
) -> Result<()> {
    let (k, v) = (token_major(k)?, token_major(v)?);
    Ok(stream.scatter(&Scatter { arena: arena.clone(), layer, k, v, slots, rotation: None })?)
}

/// Returns head-major rows `[heads, rows, dim]` as a view `[rows, heads, dim]`, the shape that kernels
/// take. Nothing is moved.
pub(super) fn token_major(rows: &TensorView) -> Result<TensorView> {
    same("rank of [heads, rows, dim]", 3, rows.shape().len())?;
    Ok(rows.permute(&[1, 0, 2])?)
}

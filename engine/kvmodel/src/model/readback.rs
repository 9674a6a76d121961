//! Copies rows of a cache out of its arena, for callers that inspect keys and values instead of attending to
//! them.

use std::ops::Range;
use std::sync::Arc;

use kvcore::{
    ApplyRope, Backend, DType, Gather, KeyForm, KvArena, KvFormat, LayerRopes, MemoryKind, Rotation, Segment,
    Stream, TensorView, allocate_tensor,
};

use super::{ComputeDevice, Model};
use crate::error::Result;

/// Device memory for rows of an arena: keys `[rows, k_heads, k_dim]` and values `[rows, v_heads, v_dim]`.
#[derive(Debug, Clone)]
pub struct KvRows {
    /// The keys.
    pub k: TensorView,
    /// The values.
    pub v: TensorView,
}

impl KvRows {
    /// Allocates rows in an arena's element type, or in f32 if the arena is quantised.
    ///
    /// # Errors
    /// Returns the errors of [`allocate_tensor`].
    pub fn allocate(backend: &dyn Backend, arena: &KvArena, rows: usize) -> Result<Self> {
        let shape = arena.layout().shape();
        let dtype = match shape.format {
            KvFormat::Dense(dtype) => dtype,
            _ => DType::F32,
        };
        let tensor = |heads, dim| allocate_tensor(backend, MemoryKind::Device, dtype, &[rows, heads, dim]);
        Ok(Self { k: tensor(shape.k_heads, shape.k_dim)?, v: tensor(shape.v_heads, shape.v_dim)? })
    }

    /// Fills row `i` from slot `slots[i]` of a layer. If `rotation` is given, rotates the keys on the fly.
    /// There must be as many slots as rows.
    ///
    /// # Errors
    /// Returns the errors of the stream.
    pub fn gather(
        &self,
        stream: &dyn Stream,
        arena: &KvArena,
        layer: usize,
        slots: Arc<[i64]>,
        rotation: Option<Rotation>,
    ) -> Result<()> {
        let (arena, k, v) = (arena.clone(), self.k.clone(), self.v.clone());
        Ok(stream.gather(&Gather { arena, layer, slots, k, v, rotation })?)
    }

    /// Waits for the rows, and returns the keys and values in f32 on the host.
    ///
    /// # Errors
    /// Returns the errors of the stream.
    pub fn read(&self, stream: &dyn Stream) -> Result<(Vec<f32>, Vec<f32>)> {
        Ok((read_f32(stream, &self.k)?, read_f32(stream, &self.v)?))
    }
}

/// Waits for a tensor in f32, f16 or bf16, and returns its elements on the host in f32.
///
/// # Errors
/// Returns the errors of the stream.
pub fn read_f32(stream: &dyn Stream, view: &TensorView) -> Result<Vec<f32>> {
    let mut values = vec![0.0f32; view.len()];
    if view.dtype() == DType::F32 {
        stream.read(view, bytemuck::cast_slice_mut(&mut values))?;
        return Ok(values);
    }
    let mut halves = vec![0u16; view.len()];
    stream.read(view, bytemuck::cast_slice_mut(&mut halves))?;
    let widen = |bits: u16| match view.dtype() {
        DType::F16 => half::f16::from_bits(bits).to_f32(),
        _ => half::bf16::from_bits(bits).to_f32(),
    };
    values.iter_mut().zip(halves).for_each(|(value, bits)| *value = widen(bits));
    Ok(values)
}

impl Model {
    /// Copies the keys and values of some of a segment's tokens in one layer to the host: keys `[tokens,
    /// k_heads, k_dim]`, rotated to the positions that the segment is used at, and values `[tokens,
    /// v_heads, v_dim]` (the latents, with latent attention).
    ///
    /// # Errors
    /// Returns the errors of the backend.
    pub fn keys_in_use(
        &self,
        device: &ComputeDevice,
        ropes: &LayerRopes,
        layer: usize,
        segment: &Segment,
        tokens: Range<usize>,
    ) -> Result<(Vec<f32>, Vec<f32>)> {
        let (place, rope) = (self.place(device, layer), &ropes.layers()[layer]);
        let (arena, stream) = (&device.arenas[place.group], device.stream);
        let block_size = arena.layout().shape().block_size;
        let slot = |token: usize| {
            let block = segment.blocks[token / block_size].index();
            (block * block_size + token % block_size) as i64
        };
        let rotated = device.keys == KeyForm::Rotated && segment.position_offset != 0;
        let rotation = rotated.then(|| Rotation { rope: Arc::clone(rope), delta: segment.position_offset });
        let rows = KvRows::allocate(device.backend, arena, tokens.len())?;
        rows.gather(stream, arena, place.layer, tokens.clone().map(slot).collect(), rotation)?;
        if device.keys == KeyForm::Unrotated {
            let positions = tokens.map(|token| segment.position(token as i64)).collect();
            stream.rope(&ApplyRope { rows: rows.k.clone(), positions, rope: Arc::clone(rope) })?;
        }
        rows.read(stream)
    }
}

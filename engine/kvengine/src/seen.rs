//! Keys as a request sees them, for those who look at attention instead of attending.

use std::ops::Range;
use std::sync::Arc;

use kvcore::{
    ApplyRope, DType, Gather, KeyForm, KvFormat, LayerRopes, MemoryKind, Rotation, Segment, TensorView,
    allocate_tensor,
};

use crate::Engine;
use crate::blend::widened;
use crate::error::Result;

impl Engine {
    /// Reads some tokens of a segment in a layer: keys `[tokens, k_heads, k_dim]`, rotated to their place in the request, and values
    /// `[tokens, v_heads, v_dim]`, which are the latents of latent attention.
    pub(crate) fn keys_at_place(
        &self,
        ropes: &LayerRopes,
        layer: usize,
        segment: &Segment,
        tokens: Range<usize>,
    ) -> Result<(Vec<f32>, Vec<f32>)> {
        let (arena, stream) = (self.caches.sequences().arena(), &self.stream);
        let (shape, rope) = (arena.layout().shape(), &ropes.layers()[layer]);
        let dtype = match shape.format {
            KvFormat::Dense(dtype) => dtype,
            _ => DType::F32,
        };
        let rows = |heads, dim| {
            allocate_tensor(self.backend.as_ref(), MemoryKind::Device, dtype, &[tokens.len(), heads, dim])
        };
        let (k, v) = (rows(shape.k_heads, shape.k_dim)?, rows(shape.v_heads, shape.v_dim)?);
        let slot = |j: usize| {
            let block = segment.blocks[j / shape.block_size].index();
            (block * shape.block_size + j % shape.block_size) as i64
        };
        let turned = self.keys == KeyForm::Rotated && segment.position_offset != 0;
        stream.gather(&Gather {
            arena: arena.clone(),
            layer,
            slots: tokens.clone().map(slot).collect(),
            k: k.clone(),
            v: v.clone(),
            rotation: turned.then(|| Rotation { rope: Arc::clone(rope), delta: segment.position_offset }),
        })?;
        if self.keys == KeyForm::Unrotated {
            let positions = tokens.map(|j| segment.position(j as i64)).collect();
            stream.rope(&ApplyRope { rows: k.clone(), positions, rope: Arc::clone(rope) })?;
        }
        let down = |view: &TensorView| -> Result<Vec<f32>> {
            let mut bytes = vec![0; view.dtype().bytes_for(view.len())?];
            stream.read(view, &mut bytes)?;
            Ok(widened(view.dtype(), &bytes))
        };
        Ok((down(&k)?, down(&v)?))
    }
}

//! The border of the host: buffers in the memory of a backend, into which rows are copied.

use candle_core::{Device, Tensor};
use kvcore::{Backend, DType, MemoryKind, Stream, TensorView, allocate_tensor};

use super::{activation, failed, rows_of, with_values};
use crate::dense::{Activation, AttentionInput, Border, BorderExtents};
use crate::error::Result;

/// The buffers that every layer reuses.
#[derive(Debug)]
pub(super) struct HostBorder {
    q: TensorView,
    /// The latent queries; only with latent attention.
    q_latent: Option<TensorView>,
    k: TensorView,
    v: TensorView,
    out: TensorView,
}

impl HostBorder {
    pub(super) fn new(backend: &dyn Backend, extents: &BorderExtents) -> Result<Self> {
        let BorderExtents { rows, heads, k_heads, v_heads, k_dim, v_dim, latent } = *extents;
        let tensor =
            |heads, dim| allocate_tensor(backend, MemoryKind::Device, DType::F32, &[rows, heads, dim]);
        Ok(Self {
            q: tensor(heads, k_dim)?,
            q_latent: latent.then(|| tensor(heads, v_dim)).transpose()?,
            k: tensor(k_heads, k_dim)?,
            v: tensor(v_heads, v_dim)?,
            out: tensor(heads, v_dim)?,
        })
    }
}

impl Border for HostBorder {
    fn rows(&self) -> usize {
        self.q.shape()[0]
    }

    fn lend(&mut self, stream: &dyn Stream, input: AttentionInput, rows: &Activation) -> Result<TensorView> {
        let buffer = match input {
            AttentionInput::Query => &self.q,
            AttentionInput::LatentQuery => {
                let missing = || failed(candle_core::Error::msg("a border without latent attention"));
                self.q_latent.as_ref().ok_or_else(missing)?
            }
            AttentionInput::Key => &self.k,
            AttentionInput::Value => &self.v,
        };
        let view = buffer.slice(0, 0, rows.rows())?;
        with_values(rows_of(rows)?, |values| Ok(stream.write(&view, bytemuck::cast_slice(values))?))?;
        Ok(view)
    }

    /// What is lent is a copy already.
    fn lend_copy(
        &mut self,
        stream: &dyn Stream,
        input: AttentionInput,
        rows: &Activation,
    ) -> Result<TensorView> {
        self.lend(stream, input, rows)
    }

    fn output(&mut self, _: &dyn Stream, rows: usize) -> Result<TensorView> {
        Ok(self.out.slice(0, 0, rows)?)
    }

    fn take(&mut self, stream: &dyn Stream, output: &TensorView) -> Result<Activation> {
        let mut values = vec![0.0f32; output.len()];
        stream.read(output, bytemuck::cast_slice_mut(&mut values))?;
        activation(Tensor::from_vec(values, output.shape(), &Device::Cpu))
    }
}

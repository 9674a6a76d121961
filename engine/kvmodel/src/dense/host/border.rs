//! The border of the steps on the host: tensors are lent in place or, if the backend's memory is not on the
//! host, copied.

use candle_core::{Device, Tensor};
use kvcore::{Backend, DType, MemoryKind, Stream, TensorView, allocate_tensor};

use super::{OutputTensor, activation, lend_tensor, rows_of, with_values};
use crate::dense::{Activation, AttentionInput, Border, BorderExtents};
use crate::error::{Error, Result};

/// A border between host tensors and a backend.
#[derive(Debug)]
pub(super) struct HostBorder {
    extents: BorderExtents,
    crossing: Crossing,
}

/// The two methods of passing tensors across the border.
#[derive(Debug)]
enum Crossing {
    /// The backend can access host memory: tensors are lent, and the output becomes a tensor.
    Lend { output: Option<OutputTensor> },
    /// Buffers in the backend's memory, reused by every layer.
    Copy(Box<Buffers>),
}

#[derive(Debug)]
struct Buffers {
    q: TensorView,
    /// The latent queries, if the model has latent attention.
    q_latent: Option<TensorView>,
    k: TensorView,
    v: TensorView,
    out: TensorView,
}

impl HostBorder {
    pub(super) fn new(backend: &dyn Backend, extents: &BorderExtents) -> Result<Self> {
        let tensor = |shape: &[usize]| allocate_tensor(backend, MemoryKind::Device, DType::F32, shape);
        let crossing = if backend.shares_host_memory() {
            Crossing::Lend { output: None }
        } else {
            let BorderExtents { rows, heads, k_heads, v_heads, k_dim, v_dim, latent } = *extents;
            Crossing::Copy(Box::new(Buffers {
                q: tensor(&[rows, heads, k_dim])?,
                q_latent: latent.then(|| tensor(&[rows, heads, v_dim])).transpose()?,
                k: tensor(&[rows, k_heads, k_dim])?,
                v: tensor(&[rows, v_heads, v_dim])?,
                out: tensor(&[rows, heads, v_dim])?,
            }))
        };
        Ok(Self { extents: *extents, crossing })
    }

    fn check(&self, input: AttentionInput) -> Result<()> {
        if input == AttentionInput::LatentQuery && !self.extents.latent {
            return Err(Error::NoLatentQueries);
        }
        Ok(())
    }
}

impl Buffers {
    /// Copies rows to an input's buffer.
    fn copy(&self, stream: &dyn Stream, input: AttentionInput, rows: &Activation) -> Result<TensorView> {
        let buffer = match input {
            AttentionInput::Query => &self.q,
            AttentionInput::LatentQuery => self.q_latent.as_ref().unwrap_or(&self.q),
            AttentionInput::Key => &self.k,
            AttentionInput::Value => &self.v,
        };
        let view = buffer.slice(0, 0, rows.rows())?;
        with_values(rows_of(rows)?, |values| Ok(stream.write(&view, bytemuck::cast_slice(values))?))?;
        Ok(view)
    }
}

impl Border for HostBorder {
    fn rows(&self) -> usize {
        self.extents.rows
    }

    fn lend(&mut self, stream: &dyn Stream, input: AttentionInput, rows: &Activation) -> Result<TensorView> {
        self.check(input)?;
        match &self.crossing {
            Crossing::Lend { .. } => lend_tensor(rows_of(rows)?),
            Crossing::Copy(buffers) => buffers.copy(stream, input, rows),
        }
    }

    fn lend_copy(
        &mut self,
        stream: &dyn Stream,
        input: AttentionInput,
        rows: &Activation,
    ) -> Result<TensorView> {
        self.check(input)?;
        match &self.crossing {
            Crossing::Lend { .. } => {
                let copy = |values: &[f32]| OutputTensor::of(values.to_vec(), rows.shape());
                Ok(with_values(rows_of(rows)?, copy)?.view().clone())
            }
            Crossing::Copy(buffers) => buffers.copy(stream, input, rows),
        }
    }

    fn output(&mut self, _: &dyn Stream, rows: usize) -> Result<TensorView> {
        match &mut self.crossing {
            Crossing::Lend { output } => {
                let made = OutputTensor::new(&[rows, self.extents.heads, self.extents.v_dim])?;
                Ok(output.insert(made).view().clone())
            }
            Crossing::Copy(buffers) => Ok(buffers.out.slice(0, 0, rows)?),
        }
    }

    fn take(&mut self, stream: &dyn Stream, output: TensorView) -> Result<Activation> {
        if let Crossing::Lend { output: made } = &mut self.crossing
            && let Some(made) = made.take()
        {
            drop(output);
            stream.synchronize()?;
            return activation(Ok(made.into_tensor()?));
        }
        let mut values = vec![0.0f32; output.len()];
        stream.read(&output, bytemuck::cast_slice_mut(&mut values))?;
        activation(Tensor::from_vec(values, output.shape(), &Device::Cpu))
    }
}

//! The border of the host: tensors lent where they lie, or copied to the memory of a backend that is not on the host.

use candle_core::{Device, Tensor};
use kvbackend_cpu::CpuStorage;
use kvcore::{Backend, DType, MemoryKind, Stream, TensorView, allocate_tensor};

use super::{OutputTensor, activation, failed, lend_tensor, rows_of, with_values};
use crate::dense::{Activation, AttentionInput, Border, BorderExtents};
use crate::error::Result;

/// A border to a backend.
#[derive(Debug)]
pub(super) struct HostBorder {
    extents: BorderExtents,
    way: Way,
}

#[derive(Debug)]
enum Way {
    /// The backend's memory is the host's: tensors are lent, and the output becomes a tensor.
    Lend { output: Option<OutputTensor> },
    /// Buffers in the memory of the backend, which every layer reuses.
    Copy(Box<Buffers>),
}

#[derive(Debug)]
struct Buffers {
    q: TensorView,
    /// The latent queries; only with latent attention.
    q_latent: Option<TensorView>,
    k: TensorView,
    v: TensorView,
    out: TensorView,
}

impl HostBorder {
    pub(super) fn new(backend: &dyn Backend, extents: &BorderExtents) -> Result<Self> {
        let tensor = |shape: &[usize]| allocate_tensor(backend, MemoryKind::Device, DType::F32, shape);
        let probe = tensor(&[1])?;
        let way = if probe.storage().as_any().is::<CpuStorage>() {
            Way::Lend { output: None }
        } else {
            let BorderExtents { rows, heads, k_heads, v_heads, k_dim, v_dim, latent } = *extents;
            Way::Copy(Box::new(Buffers {
                q: tensor(&[rows, heads, k_dim])?,
                q_latent: latent.then(|| tensor(&[rows, heads, v_dim])).transpose()?,
                k: tensor(&[rows, k_heads, k_dim])?,
                v: tensor(&[rows, v_heads, v_dim])?,
                out: tensor(&[rows, heads, v_dim])?,
            }))
        };
        Ok(Self { extents: *extents, way })
    }

    fn check(&self, input: AttentionInput) -> Result<()> {
        if input == AttentionInput::LatentQuery && !self.extents.latent {
            return Err(failed(candle_core::Error::msg("a border without latent attention")));
        }
        Ok(())
    }
}

impl Buffers {
    /// Copies rows to the buffer of an input.
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
        match &self.way {
            Way::Lend { .. } => lend_tensor(rows_of(rows)?),
            Way::Copy(buffers) => buffers.copy(stream, input, rows),
        }
    }

    fn lend_copy(
        &mut self,
        stream: &dyn Stream,
        input: AttentionInput,
        rows: &Activation,
    ) -> Result<TensorView> {
        self.check(input)?;
        match &self.way {
            Way::Lend { .. } => {
                let copy = |values: &[f32]| OutputTensor::of(values.to_vec(), rows.shape());
                Ok(with_values(rows_of(rows)?, copy)?.view().clone())
            }
            Way::Copy(buffers) => buffers.copy(stream, input, rows),
        }
    }

    fn output(&mut self, _: &dyn Stream, rows: usize) -> Result<TensorView> {
        match &mut self.way {
            Way::Lend { output } => {
                let made = OutputTensor::new(&[rows, self.extents.heads, self.extents.v_dim])?;
                Ok(output.insert(made).view().clone())
            }
            Way::Copy(buffers) => Ok(buffers.out.slice(0, 0, rows)?),
        }
    }

    fn take(&mut self, stream: &dyn Stream, output: TensorView) -> Result<Activation> {
        if let Way::Lend { output: made } = &mut self.way
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

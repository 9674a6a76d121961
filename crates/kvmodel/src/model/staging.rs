//! The device buffers of one pass: inputs of the arena, and the output of attention.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use kvcore::{
    ApplyRope, Attend, AttendMla, AttendWork, DType, KeyForm, MemoryKind, Rope, RowRotation, Scatter, Stream,
    TensorView, allocate_tensor,
};

use super::rows::Rows;
use super::{ComputeDevice, FreshKv, Model};
use crate::error::Result;
use crate::layers::{Projected, with_values};

/// The buffers that every layer reuses.
#[derive(Debug)]
pub(super) struct Staging {
    q: TensorView,
    /// The latent queries; only with latent attention.
    q_latent: Option<TensorView>,
    k: TensorView,
    v: TensorView,
    out: TensorView,
    host: Vec<f32>,
}

/// A layer as its attention sees it.
pub(super) struct LayerAttention<'a> {
    pub(super) index: usize,
    pub(super) rope: &'a Arc<Rope>,
    pub(super) window: Option<usize>,
    pub(super) scale: f32,
}

impl Staging {
    /// Allocates buffers for up to `rows` rows of a model.
    pub(super) fn new(model: &Model, device: &ComputeDevice, rows: usize) -> Result<Self> {
        let (config, backend) = (&model.config, device.backend);
        let extents = model.kv_extents(device.arena.layout().shape().format);
        let tensor =
            |heads, dim| allocate_tensor(backend, MemoryKind::Device, DType::F32, &[rows, heads, dim]);
        let latent = || tensor(config.heads, extents.v_dim);
        Ok(Self {
            q: tensor(config.heads, extents.k_dim)?,
            q_latent: config.latent.is_some().then(latent).transpose()?,
            k: tensor(extents.k_heads, extents.k_dim)?,
            v: tensor(extents.v_heads, extents.v_dim)?,
            out: tensor(config.heads, extents.v_dim)?,
            host: Vec::new(),
        })
    }

    /// Returns the number of rows for which there is room.
    pub(super) fn rows(&self) -> usize {
        self.q.shape()[0]
    }

    /// Uploads the keys and values of the rows as they were projected.
    fn upload(
        &self,
        device: &ComputeDevice,
        rows: &Rows,
        projected: &Projected,
    ) -> Result<(TensorView, TensorView)> {
        let count = rows.tokens.len();
        let (k, v) = (self.k.slice(0, 0, count)?, self.v.slice(0, 0, count)?);
        device.profiler.span("copy to device", || {
            upload(device.stream, &k, &projected.k)?;
            upload(device.stream, &v, &projected.v)
        })?;
        Ok((k, v))
    }

    /// Uploads keys and values and scatters them to their slots. The keys are scattered in the form in which
    /// they are stored.
    pub(super) fn store(
        &self,
        device: &ComputeDevice,
        layer: &LayerAttention,
        rows: &Rows,
        projected: &Projected,
    ) -> Result<()> {
        let (k, v) = self.upload(device, rows, projected)?;
        let rotation = (device.keys == KeyForm::Rotated)
            .then(|| RowRotation { rope: Arc::clone(layer.rope), positions: Arc::clone(&rows.positions) });
        let (arena, slots) = (device.arena.clone(), rows.slots.clone());
        let scatter = Scatter { arena, layer: layer.index, k, v, slots, rotation };
        Ok(device.profiler.span("scatter", || device.stream.scatter(&scatter))?)
    }

    /// Returns the keys and values that [`store`](Self::store) would write, in f32 on the host.
    pub(super) fn fresh(
        &self,
        device: &ComputeDevice,
        layer: &LayerAttention,
        rows: &Rows,
        projected: &Projected,
    ) -> Result<FreshKv> {
        let (k, v) = self.upload(device, rows, projected)?;
        if device.keys == KeyForm::Rotated {
            let (positions, rope) = (Arc::clone(&rows.positions), Arc::clone(layer.rope));
            device.stream.rope(&ApplyRope { rows: k.clone(), positions, rope })?;
        }
        let down = |view: &TensorView| -> Result<Vec<f32>> {
            let mut host = vec![0.0f32; view.len()];
            device.stream.read(view, bytemuck::cast_slice_mut(&mut host))?;
            Ok(host)
        };
        Ok(FreshKv { layer: layer.index, rows: rows.tokens.len(), k: down(&k)?, v: down(&v)? })
    }

    /// Returns the attention of `rows`, `[rows, heads, v_dim]`.
    pub(super) fn attend(
        &mut self,
        device: &ComputeDevice,
        layer: &LayerAttention,
        projected: &Projected,
        work: &Arc<AttendWork>,
    ) -> Result<Tensor> {
        let count = work.rows().len();
        let (q, out) = (self.q.slice(0, 0, count)?, self.out.slice(0, 0, count)?);
        let q_latent = self.q_latent.as_ref().map(|view| view.slice(0, 0, count)).transpose()?;
        device.profiler.span("copy to device", || {
            upload(device.stream, &q, &projected.q)?;
            match (&q_latent, &projected.q_latent) {
                (Some(view), Some(tensor)) => upload(device.stream, view, tensor),
                _ => Ok(()),
            }
        })?;
        let attend = Attend {
            arena: device.arena.clone(),
            layer: layer.index,
            q,
            rope: Some(Arc::clone(layer.rope)),
            keys: device.keys,
            work: Arc::clone(work),
            scale: layer.scale,
            window: layer.window,
            softcap: None,
            out: out.clone(),
            lse: None,
        };
        device.profiler.span("attend", || match q_latent {
            Some(q_latent) => device.stream.attend_mla(&AttendMla { attend, q_latent }),
            None => device.stream.attend(&attend),
        })?;
        self.host.resize(out.len(), 0.0);
        device
            .profiler
            .span("copy to host", || device.stream.read(&out, bytemuck::cast_slice_mut(&mut self.host)))?;
        Ok(Tensor::from_slice(&self.host, out.shape(), &Device::Cpu)?)
    }
}

/// Copies a host tensor into a device buffer of the same extents.
fn upload(stream: &dyn Stream, to: &TensorView, from: &Tensor) -> Result<()> {
    with_values(from, |values| Ok(stream.write(to, bytemuck::cast_slice(values))?))
}

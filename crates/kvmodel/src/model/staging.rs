//! Device buffers of one pass: what goes up to the arena and comes down from attention.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use kvcore::{
    ApplyRope, Attend, AttendMla, AttendRows, Backend, DType, KeyForm, KvExtents, MemoryKind, MergeGroup,
    QueryRow, Rope, Scatter, Stream, TensorView, allocate_tensor,
};

use super::rows::Rows;
use super::{ComputeDevice, FreshKv};
use crate::error::Result;
use crate::layers::Projected;

/// Buffers that every layer reuses.
pub(super) struct Staging {
    q: TensorView,
    /// Of latent attention alone.
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
    /// Buffers for `rows` rows with `heads` query heads, over a cache of these extents.
    pub(super) fn new(
        backend: &dyn Backend,
        extents: &KvExtents,
        heads: usize,
        latent: bool,
        rows: usize,
    ) -> Result<Self> {
        let tensor =
            |heads, dim| allocate_tensor(backend, MemoryKind::Device, DType::F32, &[rows, heads, dim]);
        Ok(Self {
            q: tensor(heads, extents.k_dim)?,
            q_latent: latent.then(|| tensor(heads, extents.v_dim)).transpose()?,
            k: tensor(extents.k_heads, extents.k_dim)?,
            v: tensor(extents.v_heads, extents.v_dim)?,
            out: tensor(heads, extents.v_dim)?,
            host: Vec::new(),
        })
    }

    /// Keys and values go up, and keys are brought into the form in which they are stored.
    fn formed(
        &self,
        device: &ComputeDevice,
        layer: &LayerAttention,
        rows: &Rows,
        projected: &Projected,
    ) -> Result<(TensorView, TensorView)> {
        let count = rows.tokens.len();
        let (k, v) = (self.k.slice(0, 0, count)?, self.v.slice(0, 0, count)?);
        device.profiler.span("copy to device", || {
            upload(device.stream, &k, &projected.k)?;
            upload(device.stream, &v, &projected.v)
        })?;
        if device.keys == KeyForm::Rotated {
            let (positions, rope) = (Arc::clone(&rows.positions), Arc::clone(layer.rope));
            let apply = ApplyRope { rows: k.clone(), positions, rope };
            device.profiler.span("rope and scatter", || device.stream.rope(&apply))?;
        }
        Ok((k, v))
    }

    /// Keys and values go up and are scattered to their slots.
    pub(super) fn store(
        &self,
        device: &ComputeDevice,
        layer: &LayerAttention,
        rows: &Rows,
        projected: &Projected,
    ) -> Result<()> {
        let (k, v) = self.formed(device, layer, rows, projected)?;
        let (arena, slots) = (device.arena.clone(), Arc::clone(rows.slots.slots()));
        let scatter = Scatter { arena, layer: layer.index, k, v, slots };
        Ok(device.profiler.span("rope and scatter", || device.stream.scatter(&scatter))?)
    }

    /// The keys and values that [`store`](Self::store) would write, on the host.
    pub(super) fn fresh(
        &self,
        device: &ComputeDevice,
        layer: &LayerAttention,
        rows: &Rows,
        projected: &Projected,
    ) -> Result<FreshKv> {
        let (k, v) = self.formed(device, layer, rows, projected)?;
        let down = |view: &TensorView| -> Result<Vec<f32>> {
            let mut host = vec![0.0f32; view.len()];
            device.stream.read(view, bytemuck::cast_slice_mut(&mut host))?;
            Ok(host)
        };
        Ok(FreshKv { layer: layer.index, rows: rows.tokens.len(), k: down(&k)?, v: down(&v)? })
    }

    /// Attention of `rows`, `[rows, heads, v_dim]`.
    pub(super) fn attend(
        &mut self,
        device: &ComputeDevice,
        layer: &LayerAttention,
        projected: &Projected,
        (rows, batch): (&Arc<[QueryRow]>, &Arc<[AttendRows]>),
        groups: &Arc<[MergeGroup]>,
    ) -> Result<Tensor> {
        let count = rows.len();
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
            rows: Arc::clone(rows),
            batch: Arc::clone(batch),
            groups: Arc::clone(groups),
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
    let values = from.flatten_all()?.to_vec1::<f32>()?;
    Ok(stream.write(to, bytemuck::cast_slice(&values))?)
}

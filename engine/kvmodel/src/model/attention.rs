//! The KV side of a layer: stores the keys and values of its rows, attends with its queries, and reads back
//! fresh keys, values and queries for callers that inspect them.

use std::ops::Range;
use std::sync::Arc;

use kvcore::{ApplyRope, Attend, AttendMla, AttendWork, BatchRows, KeyForm, Rope, Scatter, TensorView};

use super::groups::LayerPlace;
use super::mass::Observation;
use super::readback::read_f32;
use super::{ComputeDevice, Model};
use crate::dense::{Activation, AttentionInput, Border, BorderExtents};
use crate::error::Result;
use crate::layers::Projected;

/// The keys and values of a layer's rows before they are stored.
#[derive(Debug)]
pub struct FreshKv {
    /// The zero-based index of the layer.
    pub layer: usize,
    /// The number of rows in the batch.
    pub rows: usize,
    /// The keys `[rows, k_heads, k_dim]`, in the form in which they would be stored (rotated or not).
    pub k: Vec<f32>,
    /// The values `[rows, v_heads, v_dim]`.
    pub v: Vec<f32>,
}

/// The queries of a layer's rows, rotated to their positions.
#[derive(Debug)]
pub struct FreshQueries {
    /// The number of rows in the batch.
    pub rows: usize,
    /// The queries `[rows, heads, k_dim]`; with latent attention, their rotated part.
    pub q: Vec<f32>,
    /// With latent attention, the part of the queries for the latents, `[rows, heads, v_dim]`.
    pub latent: Option<Vec<f32>>,
}

impl FreshQueries {
    /// Returns the queries of the rows in `rows` and, with latent attention, the part for the latents. The
    /// rows must exist.
    pub fn rows(&self, rows: Range<usize>) -> (&[f32], Option<&[f32]>) {
        let take = |all: &'_ [f32]| -> Range<usize> {
            let width = all.len() / self.rows.max(1);
            rows.start * width..rows.end * width
        };
        (&self.q[take(&self.q)], self.latent.as_deref().map(|latent| &latent[take(latent)]))
    }
}

/// A layer, with everything that its attention needs.
pub(super) struct LayerAttention<'a> {
    pub(super) index: usize,
    pub(super) place: LayerPlace,
    pub(super) rope: &'a Arc<Rope>,
    pub(super) window: Option<usize>,
    pub(super) scale: f32,
}

/// Creates the [`Border`] between the dense steps and the device, for passes of up to `rows` rows.
pub(super) fn border(model: &Model, device: &ComputeDevice, rows: usize) -> Result<Box<dyn Border>> {
    let config = &model.config;
    let kv = model.kv_extents(device.arenas[0].layout().shape().format);
    let extents = BorderExtents {
        rows,
        heads: config.heads,
        k_heads: kv.k_heads,
        v_heads: kv.v_heads,
        k_dim: kv.k_dim,
        v_dim: kv.v_dim,
        latent: config.latent.is_some(),
    };
    model.dense.border(device.backend, &extents)
}

/// Writes keys and values to their slots. Keys are rotated only if the cache stores rotated keys.
pub(super) fn store(
    border: &mut dyn Border,
    device: &ComputeDevice,
    layer: &LayerAttention,
    rows: &BatchRows,
    projected: &Projected,
) -> Result<()> {
    let (k, v) = device.profiler.span("copy to device", || -> Result<_> {
        let k = border.lend(device.stream, AttentionInput::Key, &projected.k)?;
        Ok((k, border.lend(device.stream, AttentionInput::Value, &projected.v)?))
    })?;
    let mut scatter = Scatter::new(
        &device.arenas[layer.place.group],
        layer.place.layer,
        k,
        v,
        rows.slots_in(layer.place.group),
    );
    if device.keys == KeyForm::Rotated {
        scatter = scatter.rotated(layer.rope, rows.positions());
    }
    Ok(device.profiler.span("scatter", || device.stream.scatter(&scatter))?)
}

/// Returns the keys and values that [`store`] would write, in f32 on the host.
pub(super) fn fresh(
    border: &mut dyn Border,
    device: &ComputeDevice,
    layer: &LayerAttention,
    rows: &BatchRows,
    projected: &Projected,
) -> Result<FreshKv> {
    let (k, v) = device.profiler.span("copy to device", || -> Result<_> {
        let k = border.lend_copy(device.stream, AttentionInput::Key, &projected.k)?;
        Ok((k, border.lend(device.stream, AttentionInput::Value, &projected.v)?))
    })?;
    if device.keys == KeyForm::Rotated {
        let (positions, rope) = (Arc::clone(rows.positions()), Arc::clone(layer.rope));
        device.stream.rope(&ApplyRope { rows: k.clone(), positions, rope })?;
    }
    let (k, v) = (read_f32(device.stream, &k)?, read_f32(device.stream, &v)?);
    Ok(FreshKv { layer: layer.index, rows: rows.len(), k, v })
}

/// Returns the queries that [`attend`] would use, rotated to their positions, in f32 on the host.
pub(super) fn queries(
    border: &mut dyn Border,
    device: &ComputeDevice,
    layer: &LayerAttention,
    rows: &BatchRows,
    projected: &Projected,
) -> Result<FreshQueries> {
    let q = border.lend_copy(device.stream, AttentionInput::Query, &projected.q)?;
    let (positions, rope) = (Arc::clone(rows.positions()), Arc::clone(layer.rope));
    device.stream.rope(&ApplyRope { rows: q.clone(), positions, rope })?;
    let q = read_f32(device.stream, &q)?;
    let latent = projected
        .q_latent
        .as_ref()
        .map(|rows| read_f32(device.stream, &border.lend(device.stream, AttentionInput::LatentQuery, rows)?));
    Ok(FreshQueries { rows: rows.len(), q, latent: latent.transpose()? })
}

/// Returns the attention output for the rows of `work`, `[rows, heads, v_dim]`.
pub(super) fn attend(
    border: &mut dyn Border,
    device: &ComputeDevice,
    layer: &LayerAttention,
    projected: &Projected,
    work: &Arc<AttendWork>,
    observed: Option<&mut Observation>,
) -> Result<Activation> {
    let (mut attend, q_latent) = lend(border, device, layer, projected, work)?;
    if let Some(observed) = &observed {
        attend.lse = Some(observed.lse().clone());
    }
    let attended = device.profiler.span("attend", || launch(device, &attend, q_latent.as_ref()));
    attended?;
    if let Some(observed) = observed {
        let add = || observed.add(device, layer.index, &attend, q_latent.as_ref());
        device.profiler.span("attention of the question", add)?;
    }
    let out = attend.out.clone();
    // If other handles to the output existed, the border would have to copy it.
    drop((attend, q_latent));
    device.profiler.span("copy to host", || border.take(device.stream, out))
}

/// Computes attention over `work` only to add up the observed rows' attention weights.
pub(super) fn observe(
    border: &mut dyn Border,
    device: &ComputeDevice,
    layer: &LayerAttention,
    projected: &Projected,
    work: &Arc<AttendWork>,
    observed: &mut Observation,
) -> Result<()> {
    let (mut attend, q_latent) = lend(border, device, layer, projected, work)?;
    attend.lse = Some(observed.lse().clone());
    device.profiler.span("attention of the question", || {
        launch(device, &attend, q_latent.as_ref())?;
        observed.add(device, layer.index, &attend, q_latent.as_ref())
    })
}

/// Lends a layer's queries to the device. Returns the attention operation over `work` and, with latent
/// attention, the latent queries.
fn lend(
    border: &mut dyn Border,
    device: &ComputeDevice,
    layer: &LayerAttention,
    projected: &Projected,
    work: &Arc<AttendWork>,
) -> Result<(Attend, Option<TensorView>)> {
    let (q, q_latent) = device.profiler.span("copy to device", || -> Result<_> {
        let q = border.lend(device.stream, AttentionInput::Query, &projected.q)?;
        let latent = projected.q_latent.as_ref();
        let latent = latent.map(|rows| border.lend(device.stream, AttentionInput::LatentQuery, rows));
        Ok((q, latent.transpose()?))
    })?;
    let out = border.output(device.stream, work.rows().len())?;
    let attend = Attend {
        keys: device.keys,
        scale: layer.scale,
        window: layer.window,
        ..Attend::new(&device.arenas[layer.place.group], layer.place.layer, q, work, out).rotating(layer.rope)
    };
    Ok((attend, q_latent))
}

fn launch(device: &ComputeDevice, attend: &Attend, q_latent: Option<&TensorView>) -> Result<()> {
    Ok(match q_latent.cloned() {
        Some(q_latent) => device.stream.attend_mla(&AttendMla { attend: attend.clone(), q_latent }),
        None => device.stream.attend(attend),
    }?)
}

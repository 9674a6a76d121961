//! Measures the static scales of an fp8 cache on the keys and values of sample tokens.

use std::sync::Arc;

use kvcore::{
    Backend, BlockId, DType, KeyForm, KvArena, KvFormat, KvLayout, MemoryKind, RankInfo, ScaleScope, Segment,
    SequenceInput, Stream, TensorView, WriteSlots,
};
use kvmodel::{ComputeDevice, KvRows, Model, Profiler, read_f32};

use crate::error::Result;

/// The number of sample tokens, unless the model has fewer positions.
const TOKENS: usize = 256;

/// The factor by which keys and values may exceed the sample's largest magnitudes before they saturate. A
/// larger factor costs precision only at the smallest magnitudes.
const HEADROOM: f32 = 2.0;

/// The distance between the IDs of consecutive sample tokens, modulo the vocabulary size: a large prime, to
/// spread the tokens out.
const STEP: usize = 2_654_435_761;

/// The scales of K and of V, in the form that [`KvArena::set_scales`] expects.
#[derive(Debug, Clone)]
pub(super) struct StaticScales {
    pub(super) k: Vec<f32>,
    pub(super) v: Vec<f32>,
}

impl StaticScales {
    /// Sets the scales of `arenas`, which must be one arena for all layers or one arena per group.
    pub(super) fn set(&self, model: &Model, arenas: &[KvArena], stream: &dyn Stream) -> Result<()> {
        if let [arena] = arenas {
            return Ok(arena.set_scales(stream, &self.k, &self.v)?);
        }
        let layers = model.config().num_layers();
        for (arena, group) in arenas.iter().zip(model.groups()) {
            let in_group = |scales: &[f32]| -> Vec<f32> {
                let each = scales.len() / layers;
                group.layers.iter().flat_map(|layer| &scales[layer * each..][..each]).copied().collect()
            };
            arena.set_scales(stream, &in_group(&self.k), &in_group(&self.v))?;
        }
        Ok(())
    }
}

// Decision: docs/decisions/models.md#an-fp8-cache-is-calibrated-with-sample-tokens
/// Runs one pass over sample tokens and returns the scales of an fp8 cache, or `None` for other formats. The
/// memory of the pass is freed before the call returns.
pub(super) fn calibrate(
    model: &Model,
    (backend, stream): (&dyn Backend, &dyn Stream),
    (format, keys): (KvFormat, KeyForm),
) -> Result<Option<StaticScales>> {
    let KvFormat::Fp8 { kind, scales } = format else { return Ok(None) };
    let tokens = TOKENS.min(model.config().max_positions);
    let shape = model.kv_extents(DType::F32).shape(&RankInfo::default(), 1, tokens)?;
    let layout = Arc::new(KvLayout::new(shape)?);
    let arena = KvArena::allocate(backend, MemoryKind::Device, layout)?;
    let profiler = Profiler::disabled();
    let device =
        ComputeDevice { backend, stream, arenas: std::slice::from_ref(&arena), keys, profiler: &profiler };
    let slots: Arc<[i64]> = (0..tokens as i64).collect();
    let own = Segment::new([BlockId(0)].into(), tokens, 0, 0);
    let sample = (0..tokens).map(|i| (i * STEP % model.config().vocab_size) as u32).collect();
    let input = SequenceInput::new(sample, 0, 0, WriteSlots::unchecked(Arc::clone(&slots)), [own]);
    model.forward(&device, &model.ropes(tokens)?, &[input], &mut ())?;

    let rows = KvRows::allocate(backend, &arena, tokens)?;
    let mut found = StaticScales { k: Vec::new(), v: Vec::new() };
    for layer in 0..arena.layout().shape().num_layers {
        rows.gather(stream, &arena, layer, Arc::clone(&slots), None)?;
        for (view, found) in [(&rows.k, &mut found.k), (&rows.v, &mut found.v)] {
            let by_head = largest(stream, view)?;
            // With a power of two as the scale, elements are rounded in the same way as without a scale.
            let scale = |largest: f32| kind.scale_for(HEADROOM * largest).log2().ceil().exp2();
            match scales {
                ScaleScope::PerHead => found.extend(by_head.into_iter().map(scale)),
                ScaleScope::PerTensor => found.push(scale(by_head.into_iter().fold(0.0, f32::max))),
            }
        }
    }
    Ok(Some(found))
}

/// Returns the largest magnitude of each head in `view`, which has the shape `[rows, heads, dim]`.
fn largest(stream: &dyn Stream, view: &TensorView) -> Result<Vec<f32>> {
    let (heads, dim) = (view.shape()[1], view.shape()[2]);
    let mut largest = vec![0.0f32; heads];
    for row in read_f32(stream, view)?.chunks_exact(heads * dim) {
        for (largest, head) in largest.iter_mut().zip(row.chunks_exact(dim)) {
            *largest = head.iter().fold(*largest, |most, x| most.max(x.abs()));
        }
    }
    Ok(largest)
}

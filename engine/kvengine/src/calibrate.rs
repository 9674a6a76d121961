//! Static scales of an fp8 cache, from the keys and values of sample tokens.

use std::sync::Arc;

use kvcore::{
    Backend, BlockId, DType, Gather, KeyForm, KvArena, KvFormat, KvLayout, MemoryKind, RankInfo, ScaleScope,
    Segment, SequenceInput, Stream, TensorView, WriteSlots, allocate_tensor,
};
use kvmodel::{ComputeDevice, Model, Profiler};

use crate::error::Result;

/// The number of sample tokens, if the model has as many positions.
const TOKENS: usize = 256;

/// The factor by which keys and values may exceed those of the sample before they saturate. A larger factor
/// costs precision only at the smallest magnitudes.
const HEADROOM: f32 = 2.0;

/// The step between sample tokens in the vocabulary: a large prime, so that they are spread over it.
const STEP: usize = 2_654_435_761;

/// The scales of K and of V, as [`KvArena::set_scales`] takes them.
#[derive(Debug, Clone)]
pub(crate) struct StaticScales {
    pub(crate) k: Vec<f32>,
    pub(crate) v: Vec<f32>,
}

// Decision: docs/decisions/models.md#an-fp8-cache-is-calibrated-with-sample-tokens
/// Returns the scales of an fp8 cache from one pass over sample tokens, and `None` for another format. The
/// memory of the pass is free again when the call returns.
pub(crate) fn calibrate(
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

    let s = arena.layout().shape();
    let rows = |heads, dim| allocate_tensor(backend, MemoryKind::Device, DType::F32, &[tokens, heads, dim]);
    let (k, v) = (rows(s.k_heads, s.k_dim)?, rows(s.v_heads, s.v_dim)?);
    let mut found = StaticScales { k: Vec::new(), v: Vec::new() };
    for layer in 0..s.num_layers {
        let (arena, slots) = (arena.clone(), Arc::clone(&slots));
        stream.gather(&Gather { arena, layer, slots, k: k.clone(), v: v.clone(), rotation: None })?;
        for (view, scales_of) in [(&k, &mut found.k), (&v, &mut found.v)] {
            let of_heads = largest(stream, view)?;
            // Under a power of two, elements are rounded as without a scale.
            let scale = |largest: f32| kind.scale_for(HEADROOM * largest).log2().ceil().exp2();
            match scales {
                ScaleScope::PerHead => scales_of.extend(of_heads.into_iter().map(scale)),
                ScaleScope::PerTensor => scales_of.push(scale(of_heads.into_iter().fold(0.0, f32::max))),
            }
        }
    }
    Ok(Some(found))
}

/// Returns the largest magnitude of each head of rows `[rows, heads, dim]`.
fn largest(stream: &dyn Stream, view: &TensorView) -> Result<Vec<f32>> {
    let (heads, dim) = (view.shape()[1], view.shape()[2]);
    let mut host = vec![0.0f32; view.len()];
    stream.read(view, bytemuck::cast_slice_mut(&mut host))?;
    let mut largest = vec![0.0f32; heads];
    for row in host.chunks_exact(heads * dim) {
        for (largest, head) in largest.iter_mut().zip(row.chunks_exact(dim)) {
            *largest = head.iter().fold(*largest, |most, x| most.max(x.abs()));
        }
    }
    Ok(largest)
}

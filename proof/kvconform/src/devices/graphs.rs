//! Captured graphs on a double: their launches and their memory.

use std::sync::Arc;

use kvcore::{
    Attend, AttendRows, AttendWork, Backend, BlockId, BlockOrder, DType, Graph, GraphCache, GraphKey,
    GraphRun, KeyForm, KvArena, KvShape, MemoryKind, QueryRow, Result, Rope, RopeConfig, RowRotation,
    Scatter, Segment, StepInputs, Stream, TensorView, WriteSlots, allocate_tensor,
};

use super::{DeviceRig, DriverDouble, DriverFault, EAGER, LAZY, same, same_bytes};
use crate::bench::{Bench, Outcome, ensure};
use crate::cases::graphs::{DecodeStep, LAYERS, own_tokens as step};
use crate::raw::{self, download, noise, upload};

/// The number of elements per head in the steps of [`OneRow`].
pub const DIM: usize = 64;

/// The number of layers in the steps of [`OneRow`].
const ROW_LAYERS: usize = 3;

/// Decode steps of one sequence, for a backend's tests: each layer stores a row of two heads with [`DIM`]
/// elements in a pool of 32 blocks of 16 tokens, and attends with the same row as its queries.
#[derive(Debug)]
pub struct OneRow {
    /// The stream on which the steps run.
    pub stream: Arc<dyn Stream>,
    arena: KvArena,
    /// The RoPE for keys and queries.
    pub rope: Arc<Rope>,
    rows: TensorView,
    /// The last layer's output.
    pub out: TensorView,
}

impl OneRow {
    /// Allocates the pool, the row and the output on a device.
    ///
    /// # Errors
    /// Returns the errors of the allocations and of copying the row.
    pub fn new(backend: &dyn Backend) -> Result<Self> {
        let shape = KvShape {
            num_layers: ROW_LAYERS,
            num_blocks: 32,
            block_size: 16,
            k_heads: 2,
            v_heads: 2,
            k_dim: DIM,
            v_dim: DIM,
            format: DType::BF16.into(),
            order: BlockOrder::TokenMajor,
        };
        let number = |byte| (f32::from(byte) / 128.0 - 1.0).to_ne_bytes();
        let bytes: Vec<u8> = noise(3, 2 * DIM).into_iter().flat_map(number).collect();
        Ok(Self {
            arena: raw::arena(backend, shape)?,
            stream: backend.stream()?,
            rope: Arc::new(Rope::new(RopeConfig::new(DIM, 10_000.0), 4096)?),
            rows: upload(backend, DType::F32, &[1, 2, DIM], &bytes)?,
            out: allocate_tensor(backend, MemoryKind::Device, DType::F32, &[1, 2, DIM])?,
        })
    }

    /// Enqueues all layers of a step.
    ///
    /// # Errors
    /// Returns the errors of the stream.
    pub fn enqueue(&self, step: &StepInputs) -> Result<()> {
        for layer in 0..ROW_LAYERS {
            let (rope, positions) = (Arc::clone(&self.rope), Arc::clone(&step.positions));
            self.stream.scatter(&Scatter {
                arena: self.arena.clone(),
                layer,
                k: self.rows.clone(),
                v: self.rows.clone(),
                slots: step.slots.clone(),
                rotation: Some(RowRotation { rope, positions }),
            })?;
            self.attend(layer, step)?;
        }
        Ok(())
    }

    /// Enqueues the attention of one layer.
    ///
    /// # Errors
    /// Returns the errors of the stream.
    pub fn attend(&self, layer: usize, step: &StepInputs) -> Result<()> {
        self.stream.attend(&Attend {
            arena: self.arena.clone(),
            layer,
            q: self.rows.clone(),
            rope: Some(Arc::clone(&self.rope)),
            keys: KeyForm::Rotated,
            work: Arc::clone(&step.work),
            scale: 0.125,
            window: None,
            softcap: None,
            out: self.out.clone(),
            lse: None,
        })
    }

    /// Captures a step.
    ///
    /// # Errors
    /// Returns the errors of the capture.
    pub fn capture(&self, step: &StepInputs) -> Result<Arc<dyn Graph>> {
        self.stream.capture(step, &mut || self.enqueue(step))
    }
}

/// Returns a step for [`OneRow`] at position `at`, over `at + 1` tokens.
#[must_use]
pub fn row_step(at: usize) -> StepInputs {
    let blocks: Arc<[BlockId]> = (0..=at / 16).map(|block| BlockId(block as u32)).collect();
    let row = QueryRow { logical: at, position: at as i64 };
    let entry = AttendRows::new(0..1, [Segment::new(blocks, at + 1, 0, 0)]);
    StepInputs {
        tokens: [(at % 7) as u32].into(),
        positions: [row.position].into(),
        slots: WriteSlots::unchecked(vec![at as i64]),
        work: Arc::new(AttendWork::new([row], [entry])),
    }
}

/// Opens a device as a bench with bf16 elements.
fn bench<R: DeviceRig>(rig: &R, device: usize) -> Outcome<Bench> {
    Ok(Bench::new(rig.open(device)?, DType::BF16)?)
}

fn decode(bench: &Bench) -> Outcome<DecodeStep<'_>> {
    DecodeStep::new(bench, DType::BF16.into(), (64, 64))
}

pub(super) fn a_replay_is_one_copy_and_one_launch<R: DeviceRig>(
    rig: &R,
    double: &dyn DriverDouble,
) -> Outcome {
    let b = bench(rig, LAZY)?;
    let decode = decode(&b)?;
    decode.enqueue(&step(100))?;
    let (mut cache, mut runs) = (GraphCache::new(2), Vec::new());
    double.queued(LAZY);
    for n in 21..27 {
        let (step, stream) = (step(n), b.stream.as_ref());
        let key = GraphKey::of(&step, DType::BF16);
        let run = cache.run(stream, key, &step, &mut || decode.enqueue(&step))?.0;
        let queued = double.queued(LAZY);
        let fits = match run {
            GraphRun::Eager => queued.kernels >= 2 * LAYERS && queued.graphs == 0,
            GraphRun::Captured => queued.graphs == 1,
            GraphRun::Replayed => (queued.graphs, queued.uploads, queued.kernels) == (1, 1, 0),
        };
        ensure(fits, || format!("{run:?} enqueued {queued:?}"))?;
        runs.push(run);
    }
    same("runs", &runs[..3], &[GraphRun::Eager, GraphRun::Captured, GraphRun::Replayed])?;
    Ok(b.stream.synchronize()?)
}

pub(super) fn a_graph_keeps_its_memory_and_gives_it_back<R: DeviceRig>(
    rig: &R,
    double: &dyn DriverDouble,
) -> Outcome {
    for device in [EAGER, LAZY] {
        let before = double.live(device);
        let b = bench(rig, device)?;
        let decode = decode(&b)?;
        decode.enqueue(&step(41))?;
        let expected = download(b.stream.as_ref(), &decode.out)?;
        let graph = decode.capture(&step(21))?;
        let out = decode.out.clone();
        drop(decode);
        // Other work takes memory and replaces the lists that the stream keeps.
        let other = |i| upload(b.backend.as_ref(), DType::U8, &[4096], &noise(i, 4096));
        let taken = (0..20).map(other).collect::<kvcore::Result<Vec<_>>>()?;
        for _ in 0..40 {
            graph.replay(&step(41))?;
        }
        drop(taken);
        // A replay may outlive its graph.
        drop(graph);
        same_bytes(&format!("device {device}"), &download(b.stream.as_ref(), &out)?, &expected)?;
        drop((out, b));
        same(&format!("left on device {device}"), double.live(device), before)?;
    }
    Ok(())
}

pub(super) fn a_dropped_graph_leaves_nothing_of_the_driver<R: DeviceRig>(
    rig: &R,
    double: &dyn DriverDouble,
) -> Outcome {
    let b = bench(rig, EAGER)?;
    let decode = decode(&b)?;
    decode.enqueue(&step(5))?;
    let mut live = Vec::new();
    for _ in 0..32 {
        let graph = decode.capture(&step(5))?;
        graph.replay(&step(5))?;
        drop(graph);
        b.stream.synchronize()?;
        // An allocation waits for all earlier frees. The tensor lives until the count is taken, so that its
        // own free cannot fall before the count in one round and after it in another.
        let fence = b.tensor(DType::U8, &[64])?;
        live.push(double.live(EAGER));
        drop(fence);
    }
    // The count may rise by a few: a stream keeps its batches' events, and creates one more whenever all of
    // them are in flight. An object left behind by each graph would add one per graph.
    let (first, last) = (live[0], live[31]);
    ensure(last.objects < first.objects + 8 && last.bytes == first.bytes, || format!("{live:?}"))
}

pub(super) fn a_step_whose_capture_finds_no_memory_runs_as_before<R: DeviceRig>(
    rig: &R,
    double: &dyn DriverDouble,
) -> Outcome {
    let b = bench(rig, EAGER)?;
    let decode = decode(&b)?;
    let (mut cache, key) = (GraphCache::new(2), GraphKey::of(&step(4), DType::BF16));
    let mut run = |n: usize| -> Outcome<(GraphRun, u64)> {
        let inputs = step(n);
        let run = cache.run(b.stream.as_ref(), key, &inputs, &mut || decode.enqueue(&inputs))?.0;
        Ok((run, cache.counts().refused))
    };
    same("at first", run(4)?, (GraphRun::Eager, 0))?;
    let (function, code) = double.fault(DriverFault::DeviceMemory);
    double.fail(function, 1, code);
    same("without memory", run(5)?, (GraphRun::Eager, 1))?;
    same("it is not tried again", run(6)?, (GraphRun::Eager, 1))?;
    let got = download(b.stream.as_ref(), &decode.out)?;
    decode.enqueue(&step(6))?;
    same_bytes("the step without a graph", &got, &download(b.stream.as_ref(), &decode.out)?)
}

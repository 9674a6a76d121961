//! The number of launches per operation, as recorded by the driver's test double.

use std::sync::Arc;

use kvcore::{
    Attend, AttendRows, AttendWork, Backend, BlockId, BlockOrder, CopyBlocks, DType, KeyForm, KvArena,
    KvShape, MemoryKind, QueryRow, Rope, RopeConfig, RotateKeys, Rotation, RowRotation, Scatter, Segment,
    Stream, TensorView, WritePairs, WriteSlots, allocate_tensor,
};

use crate::common::{arena, noise, opened, upload};
use crate::double::{Double, LAZY, alone};

const HEADS: usize = 4;
const DIM: usize = 64;
const LAYERS: usize = 6;
const BLOCKS: usize = 64;

struct Bench {
    backend: Arc<kvbackend_cuda::CudaBackend>,
    stream: Arc<dyn Stream>,
    arena: KvArena,
    rope: Arc<Rope>,
}

impl Bench {
    fn new() -> Self {
        let backend = opened(LAZY).unwrap();
        let shape = KvShape {
            num_layers: LAYERS,
            num_blocks: BLOCKS,
            block_size: 16,
            k_heads: HEADS,
            v_heads: HEADS,
            k_dim: DIM,
            v_dim: DIM,
            format: DType::BF16.into(),
            order: BlockOrder::TokenMajor,
        };
        let arena = arena(backend.as_ref(), shape);
        let stream = backend.stream().unwrap();
        let rope = Arc::new(Rope::new(RopeConfig::new(DIM, 10_000.0), 4096).unwrap());
        Self { backend, stream, arena, rope }
    }

    fn rows(&self, seed: u64, rows: usize, heads: usize) -> TensorView {
        let bytes: Vec<u8> = noise(seed, rows * heads * DIM)
            .iter()
            .flat_map(|&byte| (f32::from(byte) / 128.0 - 1.0).to_ne_bytes())
            .collect();
        upload(self.backend.as_ref(), DType::F32, &[rows, heads, DIM], &bytes)
    }

    /// Runs a decode step of `batch` sequences, each over `chunks` chunks at different positions and its own
    /// last block. Returns the tasks that each layer enqueued.
    fn step(&self, double: &Double, batch: usize, chunks: usize) -> Vec<Vec<Vec<String>>> {
        let (k, v, q) =
            (self.rows(1, batch, HEADS), self.rows(2, batch, HEADS), self.rows(3, batch, 2 * HEADS));
        let out =
            allocate_tensor(self.backend.as_ref(), MemoryKind::Device, DType::F32, &[batch, 2 * HEADS, DIM])
                .unwrap();
        let last = chunks * 40;
        let entry = |row: usize| {
            let chunk = |i: usize| {
                let blocks: Arc<[BlockId]> = (0..3).map(|b| BlockId((3 * i + b) as u32)).collect();
                Segment::new(blocks, 40, 40 * i, 0).at_offset(40 * i as i64)
            };
            let own = Segment::new([BlockId((BLOCKS - 1 - row) as u32)].into(), 1, last, last as i64);
            AttendRows::new(row..row + 1, (0..chunks).map(chunk).chain([own]).collect::<Vec<_>>())
        };
        let rows = vec![QueryRow { logical: last, position: last as i64 }; batch];
        let work = Arc::new(AttendWork::new(rows, (0..batch).map(entry).collect::<Vec<_>>()));
        let slots: Vec<i64> = (0..batch).map(|row| 16 * (BLOCKS - 1 - row) as i64).collect();
        let slots = WriteSlots::unchecked(slots);
        let positions: Arc<[i64]> = vec![last as i64; batch].into();
        // The first step loads kernels and allocates memory.
        let mut layers = Vec::new();
        double.trace(LAZY);
        for layer in 0..LAYERS {
            let rotation =
                Some(RowRotation { rope: Arc::clone(&self.rope), positions: Arc::clone(&positions) });
            let (k, v, slots) = (k.clone(), v.clone(), slots.clone());
            self.stream
                .scatter(&Scatter { arena: self.arena.clone(), layer, k, v, slots, rotation })
                .unwrap();
            let op = Attend {
                arena: self.arena.clone(),
                layer,
                q: q.clone(),
                rope: Some(Arc::clone(&self.rope)),
                keys: KeyForm::Rotated,
                work: Arc::clone(&work),
                scale: 0.125,
                window: None,
                softcap: None,
                out: out.clone(),
                lse: None,
            };
            self.stream.attend(&op).unwrap();
            layers.push(double.trace(LAZY));
        }
        self.stream.synchronize().unwrap();
        layers
    }
}

fn kernels(trace: &[Vec<String>]) -> Vec<&str> {
    trace.iter().filter(|line| line[0] == "kernel").map(|line| line[1].as_str()).collect()
}

#[test]
fn a_decode_step_takes_a_number_of_launches_that_does_not_grow_with_batch_or_chunks() {
    let Some((double, _alone)) = alone() else { return };
    let bench = Bench::new();
    bench.step(double, 1, 1);
    let few: Vec<usize> = bench.step(double, 1, 1).iter().map(|layer| kernels(layer).len()).collect();
    let many: Vec<usize> = bench.step(double, 8, 12).iter().map(|layer| kernels(layer).len()).collect();
    assert!(
        few.iter().chain(&many).all(|&launches| launches <= 3),
        "{few:?} {many:?}: scatter, attend, merge"
    );
}

#[test]
fn lists_go_up_once_a_step_and_no_chunk_is_copied() {
    let Some((double, _alone)) = alone() else { return };
    let bench = Bench::new();
    bench.step(double, 4, 6);
    let layers = bench.step(double, 4, 6);
    let copies = |layer: &Vec<Vec<String>>| layer.iter().filter(|line| line[0].starts_with("memcpy")).count();
    assert!(copies(&layers[0]) <= 3, "slots, positions and a plan: {:?}", layers[0]);
    for layer in &layers[1..] {
        assert_eq!(copies(layer), 0, "{layer:?}");
    }
    // Chunks at other positions must be read in place, so that only the new rows are written.
    for name in layers.iter().flat_map(|layer| kernels(layer)) {
        assert!(name.starts_with("attend") || name.starts_with("merge") || name == "convert_dense", "{name}");
    }
}

#[test]
fn blocks_of_all_layers_and_planes_are_one_launch() {
    let Some((double, _alone)) = alone() else { return };
    let bench = Bench::new();
    let pairs =
        || WritePairs::unchecked((0..20u32).map(|i| (BlockId(i), BlockId(i + 30))).collect::<Vec<_>>());
    double.trace(LAZY);
    bench.stream.copy_blocks(&CopyBlocks { arena: bench.arena.clone(), pairs: pairs() }).unwrap();
    let trace = double.trace(LAZY);
    assert_eq!(kernels(&trace), ["copy_wide"]);
    let rotation = Rotation { rope: Arc::clone(&bench.rope), delta: 40 };
    let (src, dst) = (bench.arena.clone(), bench.arena.clone());
    bench.stream.rotate_keys(&RotateKeys { src, dst, layer: 2, pairs: pairs(), rotation }).unwrap();
    let trace = double.trace(LAZY);
    assert_eq!(kernels(&trace), ["convert_dense"], "keys turn and values are copied in one");
    bench.stream.synchronize().unwrap();
}

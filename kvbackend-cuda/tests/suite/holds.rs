//! Memory that enqueued work holds in addition to its operation's storages: attention plans, scratch memory,
//! angles, weights. The device in these tests runs nothing before a wait. By then, memory that is not held
//! has been freed or overwritten.

use std::sync::Arc;

use kvbackend_cuda::CudaBackend;
use kvbackend_cuda::dense::{CudaSteps, StoredKind};
use kvcore::{
    ApplyRope, Attend, AttendRows, AttendWork, Backend, BlockId, BlockOrder, DType, KeyForm, KvArena,
    KvShape, MemoryKind, QueryRow, Rope, RopeConfig, Segment, Stream, TensorView, allocate_tensor,
};

use crate::common::{arena, download, noise, opened, upload};
use crate::double::{LAZY, alone};

const HEADS: usize = 16;
const DIM: usize = 128;
const BLOCK: usize = 16;
const BLOCKS: usize = 160;

struct Bench {
    backend: Arc<CudaBackend>,
    stream: Arc<dyn Stream>,
    arena: KvArena,
    q: TensorView,
}

fn floats(seed: u64, n: usize) -> Vec<u8> {
    noise(seed, n).iter().flat_map(|&byte| (f32::from(byte) / 128.0 - 1.0).to_ne_bytes()).collect()
}

impl Bench {
    fn new() -> Self {
        let backend = opened(LAZY).unwrap();
        let shape = KvShape {
            num_layers: 1,
            num_blocks: BLOCKS,
            block_size: BLOCK,
            k_heads: 2,
            v_heads: 2,
            k_dim: DIM,
            v_dim: DIM,
            format: DType::F32.into(),
            order: BlockOrder::TokenMajor,
        };
        let (arena, stream) = (arena(backend.as_ref(), shape), backend.stream().unwrap());
        for (storage, seed) in arena.storages().zip(1..) {
            let view = TensorView::new(Arc::clone(storage), DType::F32, &[storage.len() / 4]).unwrap();
            stream.write(&view, &floats(seed, view.len())).unwrap();
        }
        let q = upload(backend.as_ref(), DType::F32, &[1, HEADS, DIM], &floats(9, HEADS * DIM));
        stream.synchronize().unwrap();
        Self { backend, stream, arena, q }
    }

    /// Enqueues the attention of one query over `tokens` tokens, starting at block `first`, and returns its
    /// output.
    fn attend(&self, first: u32, tokens: usize) -> TensorView {
        let blocks: Arc<[BlockId]> = (first..first + tokens.div_ceil(BLOCK) as u32).map(BlockId).collect();
        let row = QueryRow { logical: tokens, position: tokens as i64 };
        let entry = AttendRows::new(0..1, [Segment::new(blocks, tokens, 0, 0)]);
        let shape = [1, HEADS, DIM];
        let out = allocate_tensor(self.backend.as_ref(), MemoryKind::Device, DType::F32, &shape).unwrap();
        let attend = Attend {
            arena: self.arena.clone(),
            layer: 0,
            q: self.q.clone(),
            rope: None,
            keys: KeyForm::Rotated,
            work: Arc::new(AttendWork::new([row], [entry])),
            scale: 0.1,
            window: None,
            softcap: None,
            out: out.clone(),
            lse: None,
        };
        self.stream.attend(&attend).unwrap();
        out
    }

    /// Returns the outputs of calls that are enqueued one after another, with a wait after each one or only
    /// at the end.
    fn outputs(&self, calls: &[(u32, usize)], waiting: bool) -> Vec<Vec<u8>> {
        let enqueue = |&(first, tokens): &(u32, usize)| {
            let out = self.attend(first, tokens);
            if waiting {
                self.stream.synchronize().unwrap();
            }
            out
        };
        let outputs: Vec<_> = calls.iter().map(enqueue).collect();
        outputs.iter().map(|out| download(self.stream.as_ref(), out)).collect()
    }
}

#[test]
fn weights_stay_until_their_products_are_done() {
    let Some((_, _alone)) = alone() else { return };
    let bench = Bench::new();
    let steps = CudaSteps::new(&bench.backend).unwrap();
    let weight = || steps.weight(StoredKind::F32, 40, DIM, &floats(3, 40 * DIM)).unwrap();
    // A kernel computes the product with few rows, and cuBLAS the product with many rows.
    for rows in [2, 20] {
        let x = steps.rows(&[rows, DIM]).unwrap();
        steps.stream().write(&x, &floats(5, rows * DIM)).unwrap();
        let mut values = [Vec::new(), Vec::new()];
        let kept = weight();
        steps.read(&steps.project(&x, &kept, None).unwrap(), &mut values[0]).unwrap();
        let gone = weight();
        let product = steps.project(&x, &gone, None).unwrap();
        drop(gone);
        // An allocation waits for all earlier frees.
        drop(bench.backend.allocate(MemoryKind::Device, 64).unwrap());
        steps.read(&product, &mut values[1]).unwrap();
        assert_eq!(values[0], values[1], "{rows} rows");
    }
}

#[test]
fn plans_stay_until_their_work_is_done() {
    let Some((_, _alone)) = alone() else { return };
    let calls: Vec<_> = (0..40).map(|i| (i, 40 + 3 * i as usize)).collect();
    let bench = Bench::new();
    assert_eq!(bench.outputs(&calls, false), bench.outputs(&calls, true));
}

#[test]
fn memory_between_kernels_stays_until_their_work_is_done() {
    let Some((_, _alone)) = alone() else { return };
    // Each call has more parts than the previous one, and needs new memory.
    let calls = [(0, 300), (3, 1100), (1, 2500)];
    let bench = Bench::new();
    let got = bench.outputs(&calls, false);
    assert_eq!(got, Bench::new().outputs(&calls, true));
}

#[test]
fn angles_stay_until_their_work_is_done() {
    let Some((_, _alone)) = alone() else { return };
    let bench = Bench::new();
    let run = |rope: &Arc<Rope>, position: i64, waiting: bool| {
        let rows = upload(bench.backend.as_ref(), DType::F32, &[1, 1, DIM], &floats(4, DIM));
        let apply = ApplyRope { rows: rows.clone(), positions: [position].into(), rope: Arc::clone(rope) };
        bench.stream.rope(&apply).unwrap();
        if waiting {
            bench.stream.synchronize().unwrap();
        }
        rows
    };
    let rope = || Arc::new(Rope::new(RopeConfig::new(DIM, 10_000.0), 1 << 14).unwrap());
    // The table grows with each position, and the backend drops the previous table.
    let outputs = |waiting| -> Vec<Vec<u8>> {
        let rope = rope();
        let rows: Vec<_> = [9, 700, 9000].map(|position| run(&rope, position, waiting)).into();
        rows.iter().map(|rows| download(bench.stream.as_ref(), rows)).collect()
    };
    assert_eq!(outputs(false), outputs(true));
}

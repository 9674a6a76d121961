//! Kernels against `memcpy` of the same bytes, both on one thread and on all, and attention against a streaming
//! read of the KV bytes, both on all threads; limits are measured in the same run.
//!
//! `--mib N` sets the largest size of each side (default 64), `--context N` the longest context of a decode step
//! (default 16,384).
#![allow(clippy::expect_used, reason = "a benchmark fails by panicking")]

use std::hint::black_box;
use std::sync::Arc;

use rayon::prelude::*;

use kvbackend_cpu::{CpuBackend, CpuOptions};
use kvcore::kernels::{
    ApplyRope, Attend, AttendRows, CopyBlocks, CopyTensor, Gather, MergeGroup, QueryRow, RotateKeys,
    Rotation, Scatter,
};
use kvcore::{
    Backend, BlockId, BlockOrder, DType, KeyForm, KvArena, KvLayout, KvShape, MemoryKind, Rope, RopeConfig,
    Segment, Stream, TensorView, allocate_tensor,
};

mod measure;

use measure::{memcpy_seconds, option, row, shuffled, time};

const HEADS: usize = 8;
const DIM: usize = 128;
const BLOCK: usize = 16;

/// All threads reading everything: the least that one decode step must do.
fn read_seconds(bytes: usize) -> f64 {
    let src = vec![1u64; bytes / 8];
    time(|| {
        let sum = |part: &[u64]| {
            part.chunks_exact(8).fold([0u64; 8], |mut s, c| {
                s.iter_mut().zip(c).for_each(|(a, b)| *a = a.wrapping_add(*b));
                s
            })
        };
        let sums: Vec<[u64; 8]> = black_box(&src).par_chunks(1 << 16).map(sum).collect();
        black_box(sums);
    })
}

fn all_threads() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

struct Setup {
    backend: Arc<CpuBackend>,
    stream: Arc<dyn Stream>,
    arena: KvArena,
    tokens: usize,
    /// Blocks in the order in which a pool in use hands them out.
    order: Vec<u32>,
}

impl Setup {
    fn new(dtype: DType, mib: usize, threads: usize) -> kvcore::Result<Self> {
        let row = HEADS * DIM * dtype.bits() / 8;
        let tokens = (mib << 20) / (2 * row) / BLOCK * BLOCK;
        let options = CpuOptions { threads: Some(threads), ..CpuOptions::default() };
        let backend = CpuBackend::with_options(&options)?;
        let layout = KvLayout::new(KvShape {
            num_layers: 1,
            // a second half, so that copies have somewhere to go
            num_blocks: 2 * tokens / BLOCK,
            block_size: BLOCK,
            k_heads: HEADS,
            v_heads: HEADS,
            k_dim: DIM,
            v_dim: DIM,
            format: dtype.into(),
            order: BlockOrder::TokenMajor,
        })?;
        let arena = KvArena::allocate(backend.as_ref(), MemoryKind::Device, Arc::new(layout))?;
        let order = shuffled((tokens / BLOCK) as u32);
        let stream = backend.stream()?;
        Ok(Self { backend, stream, arena, tokens, order })
    }

    fn rows(&self, heads: usize) -> kvcore::Result<TensorView> {
        let dtype = self.arena.layout().shape().format.storage_dtype();
        allocate_tensor(self.backend.as_ref(), MemoryKind::Device, dtype, &[self.tokens, heads, DIM])
    }

    fn slots(&self) -> Arc<[i64]> {
        self.order
            .iter()
            .flat_map(|&b| (0..BLOCK as i64).map(move |i| i64::from(b) * BLOCK as i64 + i))
            .collect()
    }

    fn pairs(&self) -> Arc<[(BlockId, BlockId)]> {
        let half = self.order.len() as u32;
        self.order.iter().enumerate().map(|(i, &from)| (BlockId(from), BlockId(half + i as u32))).collect()
    }
}

fn movement(dtype: DType, mib: usize, threads: usize) -> kvcore::Result<()> {
    let s = Setup::new(dtype, mib, threads)?;
    let bytes = s.tokens * HEADS * DIM * 2 * dtype.bits() / 8;
    let memcpy = memcpy_seconds(bytes, threads);
    let (k, v) = (s.rows(HEADS)?, s.rows(HEADS)?);
    let report = |what: &str, bytes: usize, seconds: f64| {
        let limit = memcpy * bytes as f64 / (s.tokens * HEADS * DIM * 2 * dtype.bits() / 8) as f64;
        row(&format!("{what} {dtype}, {threads} threads"), bytes, seconds, "memcpy", limit);
    };
    let scatter = Scatter { arena: s.arena.clone(), layer: 0, k: k.clone(), v: v.clone(), slots: s.slots() };
    report("scatter", bytes, time(|| s.stream.scatter(&scatter).expect("scatter")));
    let gather =
        Gather { arena: s.arena.clone(), layer: 0, k: k.clone(), v, slots: s.slots(), rotation: None };
    report("gather", bytes, time(|| s.stream.gather(&gather).expect("gather")));
    let copy = CopyBlocks { arena: s.arena.clone(), pairs: s.pairs() };
    report("copy_blocks", bytes, time(|| s.stream.copy_blocks(&copy).expect("copy")));
    for (what, axes) in [("heads before tokens", [1, 0, 2]), ("tokens innermost", [1, 2, 0])] {
        let src = k.permute(&axes)?;
        let dst = allocate_tensor(s.backend.as_ref(), MemoryKind::Device, dtype, src.shape())?;
        let copy = CopyTensor { src, dst };
        let seconds = time(|| s.stream.copy_tensor(&copy).expect("copy"));
        report(&format!("copy_tensor ({what})"), bytes / 2, seconds);
    }
    let rope = Arc::new(Rope::new(RopeConfig::new(DIM, 500_000.0), 1 << 20)?);
    let positions = (0..s.tokens as i64).map(|i| i % 8192).collect();
    let op = ApplyRope { rows: k, positions, rope: Arc::clone(&rope) };
    report("rope", bytes / 2, time(|| s.stream.rope(&op).expect("rope")));
    let rotation = Rotation { rope, delta: 777 };
    let (src, dst) = (s.arena.clone(), s.arena.clone());
    let op = RotateKeys { src, dst, layer: 0, pairs: s.pairs(), rotation };
    report("rotate_keys (K rotated, V copied)", bytes, time(|| s.stream.rotate_keys(&op).expect("rotate")));
    Ok(())
}

fn decode(dtype: DType, context: usize) -> kvcore::Result<()> {
    let row_bytes = 2 * HEADS * DIM * dtype.bits() / 8;
    let s = Setup::new(dtype, (context * row_bytes).div_ceil(1 << 20), all_threads())?;
    let bytes = context * row_bytes;
    let tensor = |dtype| allocate_tensor(s.backend.as_ref(), MemoryKind::Device, dtype, &[1, 4 * HEADS, DIM]);
    let blocks: Arc<[BlockId]> = s.order.iter().map(|&b| BlockId(b)).collect();
    let segment = Segment::new(blocks, context, 0, 0);
    let op = Attend {
        arena: s.arena.clone(),
        layer: 0,
        q: tensor(DType::F32)?,
        rope: Some(Arc::new(Rope::new(RopeConfig::new(DIM, 500_000.0), 1 << 20)?)),
        keys: KeyForm::default(),
        rows: [QueryRow { logical: context, position: context as i64 }].into(),
        batch: [AttendRows::new(0..1, [segment])].into(),
        groups: [MergeGroup::default()].into(),
        scale: 0.088,
        window: None,
        softcap: None,
        out: tensor(DType::F32)?,
        lse: None,
    };
    let seconds = time(|| s.stream.attend(&op).expect("attend"));
    row(&format!("attend, decode, GQA 4, {dtype}"), bytes, seconds, "streaming read", read_seconds(bytes));
    Ok(())
}

fn main() -> kvcore::Result<()> {
    let (mib, context) = (option("--mib", 64), option("--context", 16 * 1024));
    for dtype in [DType::BF16, DType::F32] {
        for size in [mib / 4, mib / 2, mib] {
            for threads in [1, all_threads()] {
                movement(dtype, size.max(1), threads)?;
            }
        }
        for context in [context / 16, context / 4, context] {
            decode(dtype, context.max(BLOCK))?;
        }
    }
    Ok(())
}

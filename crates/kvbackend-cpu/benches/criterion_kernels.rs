//! Kernels at a few sizes, timed for people: `cargo bench -p kvbackend-cpu --bench criterion_kernels`.
//!
//! Tokens have 8 heads of 128 in bf16 and lie in blocks of 16; throughput is of the K and V bytes that a kernel
//! reads. Regressions are caught by `cargo xtask instructions`, comparisons are made by `cargo xtask bench`.
#![allow(missing_docs, reason = "what the macros make has none")]
#![allow(clippy::expect_used, reason = "a benchmark fails by panicking")]

use std::sync::Arc;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvbackend_cpu::CpuBackend;
use kvcore::kernels::{
    ApplyRope, Attend, AttendRows, CopyBlocks, Gather, MergeGroup, QueryRow, RotateKeys, Rotation, Scatter,
};
use kvcore::{
    Backend, BlockId, BlockOrder, DType, KeyForm, KvArena, KvLayout, KvShape, MemoryKind, Result, Rope,
    RopeConfig, Segment, Stream, TensorView, allocate_tensor,
};

const HEADS: usize = 8;
const QUERY_HEADS: usize = 32;
const DIM: usize = 128;
const BLOCK: usize = 16;

/// An arena for `tokens` and as many again, in no order.
struct Lab {
    backend: Arc<CpuBackend>,
    stream: Arc<dyn Stream>,
    arena: KvArena,
    rope: Arc<Rope>,
    tokens: usize,
}

impl Lab {
    fn new(tokens: usize) -> Result<Self> {
        let backend = CpuBackend::new();
        let layout = KvLayout::new(KvShape {
            num_layers: 1,
            num_blocks: 2 * tokens / BLOCK,
            block_size: BLOCK,
            k_heads: HEADS,
            v_heads: HEADS,
            k_dim: DIM,
            v_dim: DIM,
            format: DType::BF16.into(),
            order: BlockOrder::TokenMajor,
        })?;
        let arena = KvArena::allocate(backend.as_ref(), MemoryKind::Device, Arc::new(layout))?;
        let rope = Arc::new(Rope::new(RopeConfig::new(DIM, 500_000.0), 1 << 17)?);
        Ok(Self { stream: backend.stream()?, backend, arena, rope, tokens })
    }

    fn rows(&self, rows: usize, heads: usize) -> Result<TensorView> {
        allocate_tensor(self.backend.as_ref(), MemoryKind::Device, DType::BF16, &[rows, heads, DIM])
    }

    /// Blocks, each 7 further on than the one before.
    fn order(&self) -> impl Iterator<Item = u32> {
        let blocks = (self.tokens / BLOCK) as u32;
        (0..blocks).map(move |i| i * 7 % blocks)
    }

    fn pairs(&self) -> Arc<[(BlockId, BlockId)]> {
        let half = (self.tokens / BLOCK) as u32;
        self.order().zip(half..).map(|(from, to)| (BlockId(from), BlockId(to))).collect()
    }

    /// The last `rows` tokens attend to all.
    fn attend(&self, rows: usize) -> Result<Attend> {
        let blocks: Arc<[BlockId]> = self.order().map(BlockId).collect();
        let row = |i: usize| QueryRow { logical: i, position: i as i64 };
        Ok(Attend {
            arena: self.arena.clone(),
            layer: 0,
            q: self.rows(rows, QUERY_HEADS)?,
            rope: Some(Arc::clone(&self.rope)),
            keys: KeyForm::default(),
            rows: (self.tokens - rows..self.tokens).map(row).collect(),
            batch: [AttendRows::new(0..rows, [Segment::new(blocks, self.tokens, 0, 0)])].into(),
            groups: [MergeGroup::default()].into(),
            scale: 0.088,
            window: None,
            softcap: None,
            out: self.rows(rows, QUERY_HEADS)?,
            lse: None,
        })
    }
}

fn moves(c: &mut Criterion) {
    let mut group = c.benchmark_group("moves, tokens");
    for tokens in [16usize, 512, 16_384] {
        let lab = Lab::new(tokens).expect("memory");
        let (k, v) = (lab.rows(tokens, HEADS).expect("memory"), lab.rows(tokens, HEADS).expect("memory"));
        let of = |block: u32| (0..BLOCK as i64).map(move |i| i64::from(block) * BLOCK as i64 + i);
        let slots: Arc<[i64]> = lab.order().flat_map(of).collect();
        let (arena, layer, stream) = (lab.arena.clone(), 0, &lab.stream);
        group.throughput(Throughput::Bytes((tokens * 2 * HEADS * DIM * 2) as u64));

        let op = Scatter { arena, layer, k: k.clone(), v: v.clone(), slots: Arc::clone(&slots) };
        group.bench_function(BenchmarkId::new("scatter", tokens), |b| {
            b.iter(|| stream.scatter(&op).expect("scatter"));
        });
        let op = Gather { arena: lab.arena.clone(), layer, k: k.clone(), v, slots, rotation: None };
        group.bench_function(BenchmarkId::new("gather", tokens), |b| {
            b.iter(|| stream.gather(&op).expect("gather"));
        });
        let op = CopyBlocks { arena: lab.arena.clone(), pairs: lab.pairs() };
        group.bench_function(BenchmarkId::new("copy_blocks", tokens), |b| {
            b.iter(|| stream.copy_blocks(&op).expect("copy"));
        });
        let rotation = Rotation { rope: Arc::clone(&lab.rope), delta: 777 };
        let (src, dst) = (lab.arena.clone(), lab.arena.clone());
        let op = RotateKeys { src, dst, layer, pairs: lab.pairs(), rotation };
        group.bench_function(BenchmarkId::new("rotate_keys", tokens), |b| {
            b.iter(|| stream.rotate_keys(&op).expect("rotate"));
        });
        group.throughput(Throughput::Bytes((tokens * HEADS * DIM * 2) as u64));
        let positions = (0..tokens as i64).collect();
        let op = ApplyRope { rows: k, positions, rope: Arc::clone(&lab.rope) };
        group.bench_function(BenchmarkId::new("rope", tokens), |b| {
            b.iter(|| stream.rope(&op).expect("rope"));
        });
    }
    group.finish();
}

fn attention(c: &mut Criterion) {
    let mut group = c.benchmark_group("attend, rows of tokens");
    group.sample_size(10);
    for (rows, tokens) in [(1usize, 1024usize), (1, 8192), (256, 256), (512, 512)] {
        let lab = Lab::new(tokens).expect("memory");
        let op = lab.attend(rows).expect("memory");
        group.throughput(Throughput::Bytes((tokens * 2 * HEADS * DIM * 2) as u64));
        group.bench_function(BenchmarkId::from_parameter(format!("{rows} of {tokens}")), |b| {
            b.iter(|| lab.stream.attend(&op).expect("attend"));
        });
    }
    group.finish();
}

criterion_group!(benches, moves, attention);
criterion_main!(benches);

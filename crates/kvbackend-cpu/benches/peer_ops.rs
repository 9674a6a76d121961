//! The operations that `tools/peers/torch_ops.py` measures in torch and `tools/peers/hf_cache.py` in Hugging Face
//! caches, by the CPU backend.
//!
//! `--threads N` sets the threads (default 1), `--only PREFIX` limits what is run. Prints one JSON object a line, as
//! `kernels_against_memcpy` does, against `memcpy` of the same bytes with the same threads.
#![allow(clippy::expect_used, reason = "a benchmark fails by panicking")]

use std::sync::Arc;
use std::time::Instant;

use kvbackend_cpu::{CpuBackend, CpuOptions};
use kvcore::kernels::{Attend, AttendRows, Gather, MergeGroup, QueryRow, Scatter};
use kvcore::{
    Backend, BlockId, BlockOrder, BlockPool, DType, KeyForm, KvArena, KvLayout, KvShape, MemoryKind,
    PagedKvCache, Result, Segment, SequenceStart, Stream, TensorView, allocate_tensor,
};

mod measure;

use measure::{memcpy_seconds, option, row, shuffled, time};

const HEADS: usize = 8;
const QUERY_HEADS: usize = 32;
const DIM: usize = 128;
const BLOCK: usize = 16;
const DTYPE: DType = DType::BF16;

/// Tokens in blocks of an arena twice their size, in the order in which a pool in use hands them out.
struct Lab {
    backend: Arc<CpuBackend>,
    stream: Arc<dyn Stream>,
    arena: KvArena,
    blocks: Vec<u32>,
    tokens: usize,
    threads: usize,
}

impl Lab {
    fn new(tokens: usize, threads: usize) -> Result<Self> {
        let backend =
            CpuBackend::with_options(&CpuOptions { threads: Some(threads), ..CpuOptions::default() })?;
        let layout = KvLayout::new(KvShape {
            num_layers: 1,
            num_blocks: 2 * tokens / BLOCK,
            block_size: BLOCK,
            k_heads: HEADS,
            v_heads: HEADS,
            k_dim: DIM,
            v_dim: DIM,
            format: DTYPE.into(),
            order: BlockOrder::TokenMajor,
        })?;
        let arena = KvArena::allocate(backend.as_ref(), MemoryKind::Device, Arc::new(layout))?;
        let blocks = shuffled((2 * tokens / BLOCK) as u32)[..tokens / BLOCK].to_vec();
        Ok(Self { stream: backend.stream()?, backend, arena, blocks, tokens, threads })
    }

    fn rows(&self, rows: usize, heads: usize) -> Result<TensorView> {
        allocate_tensor(self.backend.as_ref(), MemoryKind::Device, DTYPE, &[rows, heads, DIM])
    }

    fn report(&self, what: &str, seconds: f64) {
        let bytes = self.tokens * 2 * HEADS * DIM * DTYPE.bits() / 8;
        row(what, bytes, seconds, "memcpy", memcpy_seconds(bytes, self.threads));
    }
}

fn moves(tokens: usize, threads: usize) -> Result<()> {
    let lab = Lab::new(tokens, threads)?;
    let (k, v) = (lab.rows(tokens, HEADS)?, lab.rows(tokens, HEADS)?);
    let of = |&block: &u32| (0..BLOCK as i64).map(move |i| i64::from(block) * BLOCK as i64 + i);
    let slots: Arc<[i64]> = lab.blocks.iter().flat_map(of).collect();
    let (arena, layer) = (lab.arena.clone(), 0);
    let op = Scatter { arena, layer, k: k.clone(), v: v.clone(), slots: Arc::clone(&slots) };
    lab.report(&format!("scatter {tokens}"), time(|| lab.stream.scatter(&op).expect("scatter")));
    let op = Gather { arena: lab.arena.clone(), layer, k, v, slots, rotation: None };
    lab.report(&format!("gather {tokens}"), time(|| lab.stream.gather(&op).expect("gather")));
    Ok(())
}

/// The last `rows` tokens attend to all of `tokens`, causally, with queries that are rotated already.
fn attend(what: &str, rows: usize, tokens: usize, threads: usize) -> Result<()> {
    let lab = Lab::new(tokens, threads)?;
    let blocks: Arc<[BlockId]> = lab.blocks.iter().map(|&block| BlockId(block)).collect();
    let row = |i: usize| QueryRow { logical: i, position: i as i64 };
    let op = Attend {
        arena: lab.arena.clone(),
        layer: 0,
        q: lab.rows(rows, QUERY_HEADS)?,
        rope: None,
        keys: KeyForm::default(),
        rows: (tokens - rows..tokens).map(row).collect(),
        batch: [AttendRows::new(0..rows, [Segment::new(blocks, tokens, 0, 0)])].into(),
        groups: [MergeGroup::default()].into(),
        scale: 1.0 / (DIM as f32).sqrt(),
        window: None,
        softcap: None,
        out: lab.rows(rows, QUERY_HEADS)?,
        lse: None,
    };
    lab.report(&format!("{what} {tokens}"), time(|| lab.stream.attend(&op).expect("attend")));
    Ok(())
}

/// Tokens that are appended one by one.
const STEPS: usize = 256;

/// A sequence of `context` tokens grows by a slot of its table and a row that is scattered there, as a decode step
/// does in each layer; the median of the steps.
fn append(context: usize) -> Result<()> {
    let lab = Lab::new((context + STEPS).next_multiple_of(BLOCK), 1)?;
    let blocks = lab.arena.layout().shape().num_blocks as u32;
    let mut cache = PagedKvCache::new(lab.arena.clone(), BlockPool::new(0..blocks)?)?;
    let sequence = cache.create(SequenceStart::default())?;
    let mut write = |k: &TensorView, v: &TensorView| {
        let slots = cache.grow(sequence, k.shape()[0])?;
        cache.write(sequence, lab.stream.as_ref(), 0, k.clone(), v.clone(), &slots)
    };
    write(&lab.rows(context, HEADS)?, &lab.rows(context, HEADS)?)?;
    let (k, v) = (lab.rows(1, HEADS)?, lab.rows(1, HEADS)?);
    let mut seconds = Vec::with_capacity(STEPS);
    for _ in 0..STEPS {
        let start = Instant::now();
        write(&k, &v)?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    seconds.sort_by(f64::total_cmp);
    let bytes = 2 * HEADS * DIM * DTYPE.bits() / 8;
    row(&format!("append {context}"), bytes, seconds[STEPS / 2], "memcpy", memcpy_seconds(bytes, 1));
    Ok(())
}

fn main() -> Result<()> {
    let threads = option("--threads", 1);
    let args: Vec<String> = std::env::args().collect();
    let only = args.iter().position(|arg| arg == "--only").and_then(|i| args.get(i + 1));
    let wanted = |name: &str| only.is_none_or(|only| name.starts_with(only.as_str()));
    if wanted("moves") {
        moves(4096, threads)?;
    }
    for context in [1024, 4096, 16_384] {
        if wanted("append") {
            append(context)?;
        }
    }
    for tokens in [4096, 16_384] {
        if wanted("decode") {
            attend("decode", 1, tokens, threads)?;
        }
    }
    for tokens in [512, 2048] {
        if wanted("prefill") {
            attend("prefill", tokens, tokens, threads)?;
        }
    }
    Ok(())
}

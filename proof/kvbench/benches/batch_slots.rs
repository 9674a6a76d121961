//! Measures issuing the slots of a whole batch's decode step and writing them in one layer, compared with
//! a bare scatter of the same number of rows.
//!
//! Prints one JSON object per line, like `kernels_against_memcpy`. `--sequences N` sets the largest batch
//! (default 256); a quarter and a half of it are measured first. A token has 4 heads of 64 elements in f32,
//! for K and for V. The sequences start with 100 tokens.

use std::sync::Arc;
use std::time::Instant;

use kvbackend_cpu::{CpuBackend, CpuOptions};
use kvbench::option;
use kvcore::{
    Backend, BlockOrder, BlockPool, DType, KvArena, KvLayout, KvShape, MemoryKind, PagedKvCache, Result,
    Scatter, SequenceStart, WriteSlots, allocate_tensor,
};

const HEADS: usize = 4;
const DIM: usize = 64;
const BLOCK: usize = 16;
const CONTEXT: usize = 100;
/// The number of steps timed together, equal to the tokens per block. The first step takes a new block for
/// every sequence.
const STEPS: usize = BLOCK;
/// The number of measurements, of which the fastest is reported.
const ROUNDS: usize = 40;

fn main() -> Result<()> {
    let most = option("--sequences", 256).max(4);
    for sequences in [most / 4, most / 2, most] {
        measure(sequences)?;
    }
    Ok(())
}

fn measure(sequences: usize) -> Result<()> {
    let backend = CpuBackend::with_options(&CpuOptions { threads: Some(1), ..CpuOptions::default() })?;
    let stream = backend.stream()?;
    let blocks = sequences * (CONTEXT + STEPS).div_ceil(BLOCK);
    let layout = KvLayout::new(KvShape {
        num_layers: 1,
        num_blocks: blocks,
        block_size: BLOCK,
        k_heads: HEADS,
        v_heads: HEADS,
        k_dim: DIM,
        v_dim: DIM,
        format: DType::F32.into(),
        order: BlockOrder::TokenMajor,
    })?;
    let arena = KvArena::allocate(backend.as_ref(), MemoryKind::Device, Arc::new(layout))?;
    let mut cache = PagedKvCache::new(arena, BlockPool::new(0..blocks as u32)?)?;
    let rows = || allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::F32, &[sequences, HEADS, DIM]);
    let (k, v) = (rows()?, rows()?);
    let scatter = |cache: &PagedKvCache, slots: &WriteSlots| {
        let (arena, layer, slots) = (cache.arena().clone(), 0, slots.clone());
        stream.scatter(&Scatter { arena, layer, k: k.clone(), v: v.clone(), slots, rotation: None })
    };
    let ids = (0..sequences).map(|_| cache.create(SequenceStart::default())).collect::<Result<Vec<_>>>()?;
    let mut slots = WriteSlots::default();
    cache.grow_batch(&ids.iter().map(|&id| (id, CONTEXT)).collect::<Vec<_>>(), &mut slots)?;
    let batch: Vec<_> = ids.into_iter().map(|id| (id, 1)).collect();
    let (mut whole, mut alone) = (f64::INFINITY, f64::INFINITY);
    for _ in 0..ROUNDS {
        let started = Instant::now();
        for _ in 0..STEPS {
            cache.grow_batch(&batch, &mut slots)?;
            scatter(&cache, &slots)?;
        }
        whole = whole.min(started.elapsed().as_secs_f64() / STEPS as f64);
        let bare = WriteSlots::unchecked(slots.mapping().clone());
        let started = Instant::now();
        for _ in 0..STEPS {
            scatter(&cache, &bare)?;
        }
        alone = alone.min(started.elapsed().as_secs_f64() / STEPS as f64);
        batch.iter().try_for_each(|&(id, _)| cache.truncate(id, CONTEXT))?;
    }
    let line = serde_json::json!({
        "what": "slots of a decode step, minted for the batch and written", "size": sequences, "unit": "sequences",
        "seconds": whole, "limit": "the bare scatter", "limit_seconds": alone, "ratio": alone / whole,
    });
    println!("{line}");
    Ok(())
}

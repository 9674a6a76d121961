//! Paged decoding with prefix sharing, fork and rollback: `cargo run --release --example paged_decode`.
//!
//! Random rows replace a model; the rest is what an engine does in each step.

use std::sync::Arc;

use kvbackend_cpu::CpuBackend;
use kvcore::{
    Attend, AttendRows, AttendWork, Backend, BlockOrder, BlockPool, DType, KeyScope, KvArena, KvLayout,
    KvShape, MemoryKind, PagedKvCache, PromptKeys, QueryRow, Result, Rope, RopeConfig, Scatter, SequenceId,
    Stream, TensorView, WriteSlots, allocate_tensor,
};

const LAYERS: usize = 2;
const HEADS: usize = 4;
const DIM: usize = 32;

/// The parts of an engine that all steps share.
struct Engine {
    backend: Arc<CpuBackend>,
    stream: Arc<dyn Stream>,
    rope: Arc<Rope>,
}

impl Engine {
    fn rows(&self, rows: usize) -> Result<TensorView> {
        let view =
            allocate_tensor(self.backend.as_ref(), MemoryKind::Device, DType::F32, &[rows, HEADS, DIM])?;
        let bytes: Vec<u8> = (0..view.len()).flat_map(|i| ((i as f32) * 0.37).sin().to_le_bytes()).collect();
        self.stream.write(&view, &bytes)?;
        Ok(view)
    }

    /// Writes the keys and values of new tokens in every layer. The keys are rotated on the fly.
    fn store(&self, cache: &PagedKvCache, slots: &WriteSlots, first: usize) -> Result<()> {
        let positions: Arc<[i64]> = (first as i64..(first + slots.len()) as i64).collect();
        for layer in 0..LAYERS {
            let (k, v) = (self.rows(slots.len())?, self.rows(slots.len())?);
            let scatter = Scatter::new(cache.arena(), layer, k, v, slots);
            self.stream.scatter(&scatter.rotated(&self.rope, &positions))?;
        }
        Ok(())
    }

    /// Decodes one token of a sequence: takes a slot, stores keys and values, and attends to all tokens so
    /// far.
    fn step(&self, cache: &mut PagedKvCache, id: SequenceId) -> Result<()> {
        let position = cache.len(id)?;
        let slots = cache.grow(id, 1)?;
        self.store(cache, &slots, position)?;
        // The work is prepared once and used by every layer.
        let row = QueryRow { logical: position, position: position as i64 };
        let work = Arc::new(AttendWork::new([row], [AttendRows::new(0..1, [cache.segment(id)?])]));
        for layer in 0..LAYERS {
            let attend = Attend::new(cache.arena(), layer, self.rows(1)?, &work, self.rows(1)?);
            self.stream.attend(&attend.rotating(&self.rope))?;
        }
        Ok(())
    }
}

fn main() -> Result<()> {
    let backend = CpuBackend::new();
    let engine = Engine {
        stream: backend.stream()?,
        rope: Arc::new(Rope::new(RopeConfig::new(DIM, 10_000.0), 4096)?),
        backend,
    };
    let shape = KvShape {
        num_layers: LAYERS,
        num_blocks: 64,
        block_size: 16,
        k_heads: HEADS,
        v_heads: HEADS,
        k_dim: DIM,
        v_dim: DIM,
        format: DType::BF16.into(),
        order: BlockOrder::TokenMajor,
    };
    let layout = Arc::new(KvLayout::new(shape)?);
    let arena = KvArena::allocate(engine.backend.as_ref(), MemoryKind::Device, layout)?;
    let mut cache = PagedKvCache::new(arena, BlockPool::new(0..64)?)?;
    let root = KeyScope::new("my-model", b"digest of its weights").tenant_salt(b"alice").root();

    // The prompts share their first three blocks (48 tokens), so the second prompt computes only its last 12
    // tokens.
    let prompt: Vec<u32> = (0..60).collect();
    let (first, cached, slots) = cache.admit(&PromptKeys::new(root, &prompt, 16), prompt.len())?;
    engine.store(&cache, &slots, cached)?;
    cache.commit(first, &prompt[cached..])?;
    println!("first prompt:  {cached} of {} tokens cached", prompt.len());
    let other: Vec<u32> = (0..50).chain(900..910).collect();
    let (second, cached, slots) = cache.admit(&PromptKeys::new(root, &other, 16), other.len())?;
    engine.store(&cache, &slots, cached)?;
    cache.commit(second, &other[cached..])?;
    println!("second prompt: {cached} of {} tokens cached", other.len());

    // Two answers to the second prompt. The fork shares all blocks; the first write copies the last block.
    let twin = cache.fork(second)?;
    for id in [second, twin] {
        let copied = cache.copy_on_write(&[id], engine.stream.as_ref())? > 0;
        for _ in 0..5 {
            engine.step(&mut cache, id)?;
        }
        println!("{id:?}: {} tokens, last block copied: {copied}", cache.len(id)?);
    }

    // Speculative decoding: three of the five tokens were wrong.
    cache.truncate(twin, 62)?;
    engine.step(&mut cache, twin)?;
    println!("{twin:?}: {} tokens after a rollback and a step", cache.len(twin)?);

    engine.stream.synchronize()?;
    for id in [first, second, twin] {
        cache.free(id)?;
    }
    let counts = cache.pool().counts();
    println!("at the end: {} blocks free, {} cached for later prompts", counts.free, counts.cached);
    Ok(())
}

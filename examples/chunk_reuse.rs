//! Two prompts with the same documents in a different order: `cargo run --release --example chunk_reuse`.
//!
//! The first prompt computes its documents. The second prompt finds both documents and reads them at other
//! positions without a copy, because attention rotates the query instead of the keys. In place of a model,
//! keys and values are made up from the tokens. Everything else is what an engine does.

use std::sync::Arc;

use kvbackend_cpu::CpuBackend;
use kvchunk::{
    Assembler, ChunkBlockPool, ChunkCacheConfig, ChunkCacheManager, ChunkedPrompt, PositionReindexer, Result,
    ReuseCell, TenantKeys,
};
use kvcore::{
    Attend, AttendRows, AttendWork, Backend, BlockOrder, BlockPool, DType, KeyForm, KeyScope, KvArena,
    KvLayout, KvShape, LayerRopes, MemoryKind, PagedKvCache, QueryRow, Rope, RopeConfig, RopeFamily,
    RowRotation, Scatter, Segment, SequenceStart, Stream, TensorView, WriteSlots, allocate_tensor,
};

const BLOCKS: usize = 64;
const BLOCK_SIZE: usize = 16;
const HEADS: usize = 2;
const DIM: usize = 32;

/// The device of an engine, with memory for keys and values of one layer.
struct Device {
    backend: Arc<CpuBackend>,
    stream: Arc<dyn Stream>,
    arena: KvArena,
    ropes: LayerRopes,
}

impl Device {
    fn new() -> Result<Self> {
        let shape = KvShape {
            num_layers: 1,
            num_blocks: BLOCKS,
            block_size: BLOCK_SIZE,
            k_heads: HEADS,
            v_heads: HEADS,
            k_dim: DIM,
            v_dim: DIM,
            format: DType::F32.into(),
            order: BlockOrder::TokenMajor,
        };
        let backend = CpuBackend::new();
        let layout = Arc::new(KvLayout::new(shape)?);
        let arena = KvArena::allocate(backend.as_ref(), MemoryKind::Device, layout)?;
        let ropes = RopeFamily::new(&[RopeConfig::new(DIM, 10_000.0)], 4096)?.at(4096)?;
        Ok(Self { stream: backend.stream()?, backend, arena, ropes })
    }

    fn rope(&self) -> Arc<Rope> {
        Arc::clone(&self.ropes.layers()[0])
    }

    /// Returns one row per token, computed from the token and a phase.
    fn rows(&self, tokens: &[u32], phase: f32) -> Result<TensorView> {
        let shape = [tokens.len(), HEADS, DIM];
        let view = allocate_tensor(self.backend.as_ref(), MemoryKind::Device, DType::F32, &shape)?;
        let row = |token: u32| {
            (0..HEADS * DIM).map(move |i| (phase + token as f32 * 0.71 + i as f32 * (0.3 + phase)).sin())
        };
        let bytes: Vec<u8> = tokens.iter().flat_map(|&token| row(token)).flat_map(f32::to_le_bytes).collect();
        self.stream.write(&view, &bytes)?;
        Ok(view)
    }

    /// Computes keys and values of tokens and writes them to slots. The keys are rotated for `positions`.
    fn fill(&self, tokens: &[u32], positions: Arc<[i64]>, slots: WriteSlots) -> Result<()> {
        let rotation = Some(RowRotation { rope: self.rope(), positions });
        let (k, v) = (self.rows(tokens, 0.1)?, self.rows(tokens, 0.2)?);
        Ok(self.stream.scatter(&Scatter { arena: self.arena.clone(), layer: 0, k, v, slots, rotation })?)
    }

    /// Returns the attention output of one token over segments.
    fn attend(&self, token: u32, at: QueryRow, segments: Arc<[Segment]>) -> Result<Vec<f32>> {
        let out = self.rows(&[0], 0.0)?;
        self.stream.attend(&Attend {
            arena: self.arena.clone(),
            layer: 0,
            q: self.rows(&[token], 0.3)?,
            rope: Some(self.rope()),
            keys: KeyForm::Rotated,
            work: Arc::new(AttendWork::new([at], [AttendRows::new(0..1, segments)])),
            scale: 1.0 / (DIM as f32).sqrt(),
            window: None,
            softcap: None,
            out: out.clone(),
            lse: None,
        })?;
        let mut bytes = vec![0; HEADS * DIM * 4];
        self.stream.read(&out, &mut bytes)?;
        Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }
}

/// Returns the attention output of the prompt's question over a context that is recomputed in one sequence.
fn recomputed(
    device: &Device,
    main: &mut PagedKvCache,
    prompt: &ChunkedPrompt,
    at: QueryRow,
) -> Result<Vec<f32>> {
    let all = prompt.flatten();
    let context = &all[..all.len() - prompt.question().len()];
    let id = main.create(SequenceStart::default())?;
    let slots = main.grow(id, context.len())?;
    device.fill(context, (0..context.len() as i64).collect(), slots)?;
    let out = device.attend(prompt.question()[0], at, [main.segment(id)?].into())?;
    main.free(id)?;
    Ok(out)
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

fn main() -> Result<()> {
    let device = Device::new()?;
    // One arena, two pools: an `attend` reads blocks of both.
    let (main_blocks, chunk_blocks) = ChunkBlockPool::split(BLOCKS, 0.25)?;
    let mut main = PagedKvCache::new(device.arena.clone(), BlockPool::new(main_blocks)?)?;
    let chunks =
        ChunkCacheManager::new(ChunkCacheConfig::default(), ChunkBlockPool::new(chunk_blocks, BLOCK_SIZE)?)?;
    let reindexer = PositionReindexer::for_layers(&device.ropes);
    // Documents follow one another: in another order, a document is at another position.
    let cell = ReuseCell::SEQUENTIAL_WITH_SYSTEM;

    let (system, question): (Vec<u32>, Vec<u32>) = ((1..9).collect(), vec![900]);
    let (cats, dogs): (Vec<u32>, Vec<u32>) = ((100..140).collect(), (200..224).collect());
    println!("prompt  computed  reused  document  tokens  found  blocks          position  offset");
    let orders = [(1, [("cats", &cats), ("dogs", &dogs)]), (2, [("dogs", &dogs), ("cats", &cats)])];
    for (number, documents) in orders {
        let tokens = documents.map(|(_, tokens)| tokens.clone()).to_vec();
        let prompt = ChunkedPrompt::new(system.clone(), tokens, question.clone())?;
        let assembler = Assembler {
            chunks: Some(&chunks),
            tenant: TenantKeys::shared(KeyScope::new("my-model", b"digest of its weights").root()),
            main: main.kv_pool().clone(),
            prefixes: true,
            cell,
            reindexer: &reindexer,
            ranks: None,
            replicas: None,
            tier: None,
            fetched: None,
        };
        // Looks up all parts. The assembly's inputs are the missing parts, with a slot for each token.
        let assembly = assembler.assemble(&prompt)?;
        assert!(assembly.is_ready(), "no other request computes a piece of this prompt");
        let mut computed = 0;
        for input in assembly.inputs() {
            device.fill(&input.tokens, input.key_positions().collect(), input.slots.clone())?;
            computed += input.tokens.len();
        }
        let reused = assembly.reused_tokens();
        let at = QueryRow {
            logical: assembly.plan().question_logical,
            position: assembly.plan().question_position,
        };
        // From now on, other requests also find the parts, which stay held until `held` is dropped.
        let mut held = assembly.commit()?;
        let segments = &held.segments()[1..]; // the first segment is the system prompt
        for ((report, segment), (name, _)) in held.reports().iter().zip(segments).zip(documents) {
            let blocks: Vec<usize> = segment.blocks.iter().map(|block| block.index()).collect();
            println!(
                "{number:>6}  {computed:>8}  {reused:>6}  {name:<8}  {:>6}  {:<5}  {:<14}  {:>8}  {:>6}",
                report.tokens,
                report.hit,
                format!("{blocks:?}"),
                report.position,
                segment.position_offset,
            );
        }
        assert_eq!((computed, reused), if number == 1 { (72, 0) } else { (0, 72) });

        // The answer equals attention over keys rotated for these positions, although no stored key has
        // moved.
        let answer = device.attend(question[0], at, Arc::clone(held.segments()))?;
        let recomputed = recomputed(&device, &mut main, &prompt, at)?;
        let error = largest_difference(&answer, &recomputed);
        assert!(error < 1e-4, "attention differs by {error}");
        println!(
            "        attention matches attention over recomputed keys: the largest difference is {error:.0e}"
        );

        // A kernel that does not read segments takes a copy: one run of blocks, with keys rotated for this
        // prompt.
        let copy = held.rotated_copy(KeyForm::Rotated, main.pool())?;
        copy.enqueue(device.backend.as_ref(), device.stream.as_ref(), &device.arena, &device.ropes)?;
        let answer = device.attend(question[0], at, [copy.segment_by_position()?].into())?;
        let error = largest_difference(&answer, &recomputed);
        assert!(error < 1e-4, "attention over the copy differs by {error}");
        println!("        {} tokens copied for a kernel without segments: {error:.0e}", copy.copied_tokens());
    }
    Ok(())
}

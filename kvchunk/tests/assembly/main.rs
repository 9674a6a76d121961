//! Prompts assembled without a model: hits, waits and agreements.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod pools;
mod ranks;
mod waiting;

use std::sync::Arc;

use kvbackend_cpu::CpuBackend;
use kvchunk::{
    AssembledPrompt, Assembler, Assembly, ChunkBlockPool, ChunkCacheConfig, ChunkCacheManager, ChunkedPrompt,
    PositionPlan, PositionReindexer, RankAgreement, ReuseCell, TenantKeys,
};
use kvcore::{
    BlockKey, BlockOrder, BlockPool, DType, KeyScope, KvArena, KvLayout, KvShape, MemoryKind, PagedKvCache,
    Rope, RopeConfig,
};

const BLOCK: usize = 4;

/// A main cache and a chunk cache over one arena.
struct World {
    main: PagedKvCache,
    cache: ChunkCacheManager,
    reindexer: PositionReindexer,
    root: BlockKey,
}

impl World {
    fn new(main: u32, chunks: u32, config: ChunkCacheConfig) -> Self {
        let shape = KvShape {
            num_layers: 1,
            num_blocks: (main + chunks) as usize,
            block_size: BLOCK,
            k_heads: 1,
            v_heads: 1,
            k_dim: 8,
            v_dim: 8,
            format: DType::F32.into(),
            order: BlockOrder::TokenMajor,
        };
        let layout = Arc::new(KvLayout::new(shape).unwrap());
        let arena = KvArena::allocate(CpuBackend::new().as_ref(), MemoryKind::Device, layout).unwrap();
        let pool = ChunkBlockPool::new(main..main + chunks, BLOCK).unwrap();
        Self {
            main: PagedKvCache::new(arena, BlockPool::new(0..main).unwrap()).unwrap(),
            cache: ChunkCacheManager::new(config, pool).unwrap(),
            reindexer: PositionReindexer::new(&Rope::new(RopeConfig::new(8, 10_000.0), 1024).unwrap()),
            root: KeyScope::new("m", b"w").root(),
        }
    }

    fn assembler(&self) -> Assembler<'_> {
        Assembler {
            chunks: Some(&self.cache),
            tenant: TenantKeys::shared(self.root),
            main: self.main.kv_pool().clone(),
            prefixes: true,
            cell: ReuseCell::default(),
            reindexer: &self.reindexer,
            ranks: None,
            replicas: None,
            tier: None,
            fetched: None,
        }
    }

    /// Assembles and commits the prompt, as if all missing parts had been computed.
    fn run(&self, prompt: &ChunkedPrompt) -> AssembledPrompt {
        self.assembler().assemble(prompt).unwrap().commit().unwrap()
    }

    fn check(&self) {
        self.cache.check_invariants().unwrap();
        self.main.pool().check_invariants().unwrap();
    }
}

/// Returns a prompt with a five-token system prompt and seven-token chunks. Each chunk repeats one token.
fn prompt(chunks: &[u32]) -> ChunkedPrompt {
    ChunkedPrompt::new(vec![1; 5], chunks.iter().map(|&token| vec![token; 7]).collect(), vec![9]).unwrap()
}

fn tokens_of(assembly: &Assembly) -> Vec<usize> {
    assembly.inputs().iter().map(|input| input.tokens.len()).collect()
}

fn hits(held: &AssembledPrompt) -> Vec<bool> {
    held.reports().iter().map(|report| report.hit).collect()
}

#[test]
fn without_chunks_the_system_prompt_is_cached_all_the_same() {
    let w = World::new(16, 8, ChunkCacheConfig { enabled: false, ..ChunkCacheConfig::default() });
    let without = |prefixes| Assembler {
        chunks: Some(&w.cache).filter(|cache| cache.config().enabled),
        prefixes,
        ..w.assembler()
    };
    let first = without(true).assemble(&prompt(&[2])).unwrap();
    assert_eq!(tokens_of(&first), [5, 7]);
    drop(first.commit().unwrap());
    let second = without(true).assemble(&prompt(&[2])).unwrap();
    assert_eq!((tokens_of(&second), second.reused_tokens()), (vec![7], 5), "its chunk is computed again");
    drop(second);
    let third = without(false).assemble(&prompt(&[2])).unwrap();
    assert_eq!(tokens_of(&third), [5, 7], "each has a switch of its own");
    drop(third);
    w.check();
}

#[test]
fn placements_of_a_request_are_those_of_the_reindexer_and_are_timed() {
    let w = World::new(16, 8, ChunkCacheConfig::default());
    drop(w.run(&prompt(&[2, 3])));
    assert_eq!(w.cache.metrics().reindexes.count(), 0, "what is computed is not moved");
    let cell = ReuseCell { strategy: kvchunk::PositionStrategy::Sequential, ..ReuseCell::default() };
    let held = Assembler { cell, ..w.assembler() }.assemble(&prompt(&[3, 2])).unwrap().commit().unwrap();
    let placed = held.holds().iter().zip([5, 12]).map(|(chunk, position)| {
        let placed = w.reindexer.reindex(chunk.clone(), position).unwrap();
        placed.at_offset_in_merged_kv(position as usize).segment()
    });
    assert_eq!(held.segments()[1..], placed.collect::<Vec<_>>());
    assert_eq!((hits(&held), w.cache.metrics().reindexes.count()), (vec![true, true], 2));
}

#[test]
fn a_plan_is_made_once_and_still_checked_against_the_models_positions() {
    let w = World::new(16, 8, ChunkCacheConfig::default());
    let plan = |limit| PositionPlan::new(&prompt(&[2]), ReuseCell::default(), limit).unwrap();
    let assembly = w.assembler().assemble_at(&prompt(&[2]), plan(1024)).unwrap();
    assert_eq!(*assembly.plan(), plan(1024));
    drop(assembly);
    let far = PositionPlan { end: 1025, ..plan(1024) };
    let refused = w.assembler().assemble_at(&prompt(&[2]), far).unwrap_err();
    assert_eq!(refused, kvchunk::Error::TooLong { largest: 1024, limit: 1024 });
    w.check();
}

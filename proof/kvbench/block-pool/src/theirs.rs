//! `kvbm_logical::BlockManager` with its LRU backend. It has no frequency tracker, because LRU does not need
//! one.

use kvbm_logical::{BlockManager, BlockRegistry, SequenceHash};

use crate::{BATCH, PROMPTS_PER_POOL, Pool};

/// The type parameter that tells kvbm-logical's memory tiers apart. There is only one here.
#[derive(Clone)]
pub struct PeerTier;

/// The manager, with the hashes of every prompt that a run may use.
pub struct Theirs {
    manager: BlockManager<PeerTier>,
    hashes: Vec<SequenceHash>,
}

impl Theirs {
    fn hashes(&self, prompt: usize) -> &[SequenceHash] {
        &self.hashes[prompt * BATCH..][..BATCH]
    }

    fn store(&self, prompt: usize) {
        let size = self.manager.block_size();
        let Some(blocks) = self.manager.allocate_blocks(BATCH) else { panic!("the manager has no room") };
        let staged = blocks
            .into_iter()
            .zip(self.hashes(prompt))
            .map(|(block, &hash)| block.stage(hash, size).unwrap_or_else(|_| panic!("a block was refused")));
        drop(self.manager.register_blocks(staged.collect()));
    }
}

impl Pool for Theirs {
    fn new(blocks: usize) -> Self {
        let prompts = blocks / BATCH * PROMPTS_PER_POOL;
        let hash = |i: usize| {
            let mixed = (i as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            let parent = (!i.is_multiple_of(BATCH)).then(|| (i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15));
            SequenceHash::new(mixed, parent, (i % BATCH) as u64)
        };
        let manager = BlockManager::<PeerTier>::builder()
            .block_count(blocks)
            .block_size(16)
            .registry(BlockRegistry::new())
            .with_lru_backend()
            .build();
        let Ok(manager) = manager else { panic!("the manager cannot be built") };
        Self { manager, hashes: (0..prompts * BATCH).map(hash).collect() }
    }

    fn alloc_free(&self, blocks: usize) {
        assert!(self.manager.allocate_blocks(blocks).is_some());
    }

    fn grow(&self) {
        let mut own = Vec::with_capacity(BATCH);
        for _ in 0..BATCH {
            own.extend(self.manager.allocate_blocks(1).into_iter().flatten());
        }
        assert_eq!(own.len(), BATCH);
    }

    fn fill(&self, prompt: usize) {
        self.store(prompt);
    }

    fn hit(&self, prompt: usize) {
        let held = self.manager.match_blocks(self.hashes(prompt));
        assert_eq!(held.len(), BATCH);
    }

    fn churn(&self, prompt: usize) {
        self.store(prompt);
    }
}

//! `kvcore::BlockPool`.

use kvcore::{BlockKey, BlockPool, KeyScope};

use crate::{BATCH, PROMPTS_PER_POOL, Pool};

/// The pool, with the keys of every prompt that a run may use.
pub struct Ours {
    pool: BlockPool,
    keys: Vec<BlockKey>,
}

impl Ours {
    fn keys(&self, prompt: usize) -> &[BlockKey] {
        &self.keys[prompt * BATCH..][..BATCH]
    }

    fn store(&self, prompt: usize) {
        let stored = self.pool.allocate(BATCH).map(|blocks| blocks.register(None, self.keys(prompt)));
        assert!(matches!(stored, Ok(Ok(_))), "the pool makes room");
    }
}

impl Pool for Ours {
    fn new(blocks: usize) -> Self {
        let prompts = blocks / BATCH * PROMPTS_PER_POOL;
        let root = KeyScope::new("model", b"weights").root();
        let keys = (0..prompts * BATCH).map(|i| root.child(&[i as u32])).collect();
        let pool = BlockPool::new(0..blocks as u32);
        Self { pool: pool.unwrap_or_else(|error| panic!("{error}")), keys }
    }

    fn alloc_free(&self, blocks: usize) {
        let blocks = self.pool.allocate(blocks);
        assert!(blocks.is_ok());
    }

    fn grow(&self) {
        let sequence = self.pool.allocate(1);
        let grown = sequence.and_then(|mut own| (1..BATCH).try_for_each(|_| own.allocate(1)));
        assert!(grown.is_ok());
    }

    fn fill(&self, prompt: usize) {
        self.store(prompt);
    }

    fn hit(&self, prompt: usize) {
        let held = self.pool.lookup_chain(self.keys(prompt));
        assert_eq!(held.len(), BATCH);
    }

    fn churn(&self, prompt: usize) {
        self.store(prompt);
    }
}

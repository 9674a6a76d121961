//! Hot paths of the block pool and of block keys.

use std::hint::black_box;

use kvcore::{BlockKey, BlockPool, KeyScope};

/// The number of tokens per block.
const BLOCK: usize = 16;

/// Returns `n` tokens without a pattern.
pub(crate) fn tokens(n: u32) -> Vec<u32> {
    (0..n).map(|i| i.wrapping_mul(2_654_435_761) >> 15).collect()
}

/// A pool of 4,096 blocks in which one prompt of 2,048 tokens is cached.
pub struct PoolPath {
    pool: BlockPool,
    keys: Vec<BlockKey>,
}

impl PoolPath {
    /// Fills the pool and runs each path once.
    pub fn new() -> Self {
        let pool = BlockPool::new(0..4096).unwrap_or_else(|error| panic!("{error}"));
        let keys = KeyScope::new("model", b"weights").root().chain(&tokens(2048), BLOCK);
        let stored = pool.allocate(keys.len()).map(|blocks| blocks.register(None, &keys));
        assert!(matches!(stored, Ok(Ok(_))), "an empty pool has room");
        drop(stored);
        let path = Self { pool, keys };
        path.alloc_free(path.keys.len());
        path.hit();
        path
    }

    /// Allocates `n` blocks and frees them.
    pub fn alloc_free(&self, n: usize) {
        let blocks = self.pool.allocate(n);
        assert!(black_box(&blocks).is_ok());
    }

    /// Acquires the blocks of the cached prompt and releases them.
    pub fn hit(&self) {
        let held = self.pool.lookup_chain(&self.keys);
        assert_eq!(black_box(&held).len(), self.keys.len());
    }
}

impl Default for PoolPath {
    fn default() -> Self {
        Self::new()
    }
}

/// A prompt of 8,192 tokens.
pub struct Keys {
    root: BlockKey,
    tokens: Vec<u32>,
}

impl Keys {
    /// Creates the prompt, and computes its keys once.
    pub fn new() -> Self {
        let keys = Self { root: KeyScope::new("model", b"weights").root(), tokens: tokens(8192) };
        keys.chain();
        keys
    }

    /// Computes the 256-bit keys of all of the prompt's blocks.
    pub fn chain(&self) {
        drop(black_box(self.root.chain(black_box(&self.tokens), BLOCK)));
    }
}

impl Default for Keys {
    fn default() -> Self {
        Self::new()
    }
}

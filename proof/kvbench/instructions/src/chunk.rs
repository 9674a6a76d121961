//! Reuse of a stored chunk: hashing, lookup, token comparison, placement, segment.

use std::hint::black_box;

use kvchunk::{
    Acquired, ChunkBlockPool, ChunkCacheConfig, ChunkCacheManager, ChunkContext, ChunkHasher, ComputeMode,
    HashAlgorithm, PositionReindexer, TenantId,
};
use kvcore::{BlockKey, KeyScope, Rope, RopeConfig};

use crate::blocks::tokens;

const BLOCK: usize = 16;
/// The number of tokens in the chunk.
const CHUNK: usize = 4096;
/// The number of tokens in the system prompt that the chunk was computed under.
const SYSTEM: u32 = 200;

/// A cache that holds a chunk of 4,096 tokens and a hundred small ones.
pub struct ChunkReuse {
    cache: ChunkCacheManager,
    reindexer: PositionReindexer,
    root: BlockKey,
    system: Vec<u32>,
    tokens: Vec<u32>,
}

impl ChunkReuse {
    /// Stores the chunks and uses the large one once.
    pub fn new() -> Self {
        let made = Self::try_new().unwrap_or_else(|error| panic!("{error}"));
        made.run();
        made
    }

    fn try_new() -> kvchunk::Result<Self> {
        let rope = Rope::new(RopeConfig::new(64, 500_000.0), 1 << 20)?;
        let config = ChunkCacheConfig {
            hash_algorithm: HashAlgorithm::Blake3,
            max_chunks: 200,
            ..ChunkCacheConfig::default()
        };
        let reuse = Self {
            cache: ChunkCacheManager::new(config, ChunkBlockPool::new(0..1024, BLOCK)?)?,
            reindexer: PositionReindexer::new(&rope),
            root: KeyScope::new("model", b"weights").root(),
            system: (0..SYSTEM).collect(),
            tokens: tokens(CHUNK as u32),
        };
        let hasher = reuse.hasher();
        let others: Vec<Vec<u32>> = (0..100).map(|i| vec![i; 20]).collect();
        for tokens in others.iter().chain([&reuse.tokens]) {
            for piece in hasher.pieces(tokens, CHUNK) {
                let at = i64::from(SYSTEM);
                if let Acquired::Compute(reserved) = reuse.cache.acquire(TenantId::default(), &piece, at) {
                    drop(reserved.store());
                }
            }
        }
        Ok(reuse)
    }

    fn hasher(&self) -> ChunkHasher {
        let context = ChunkContext::new(self.root, ComputeMode::WithSystem, &self.system);
        ChunkHasher::new(HashAlgorithm::Blake3, context, BLOCK)
    }

    /// Uses the large chunk at another position.
    pub fn run(&self) {
        let hasher = self.hasher();
        for piece in hasher.pieces(black_box(&self.tokens), CHUNK) {
            let hit = self.cache.acquire(TenantId::default(), &piece, i64::from(SYSTEM));
            let Acquired::Hit(chunk) = hit else { panic!("the chunk is stored") };
            let placed = self.reindexer.reindex(chunk, 1217).map(|placed| placed.segment());
            assert!(black_box(&placed).is_ok());
        }
    }
}

impl Default for ChunkReuse {
    fn default() -> Self {
        Self::new()
    }
}

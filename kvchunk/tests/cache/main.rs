//! The chunk cache as its users see it: hits, evictions, waits and sleep.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod collisions;
mod flight;
mod keeping;
mod moving;
mod sleeping;
mod stress;
mod tenants;
mod times;

use std::sync::Arc;
use std::time::Duration;

use kvchunk::{
    Acquired, ChunkBlockPool, ChunkCacheConfig, ChunkCacheManager, ChunkContext, ChunkHash, ChunkHasher,
    ChunkPiece, ChunkReservation, ComputeMode, HashAlgorithm, PieceHold, SleepStore, Sleeping, TenantId,
};
use kvcore::{BlockId, BlockKey, KeyScope, ManualClock, MutableBlocks};

const BLOCK: usize = 4;

fn root(salt: &[u8]) -> BlockKey {
    KeyScope::new("m", b"w").tenant_salt(salt).root()
}

/// Returns the error of a computation that is made to fail.
fn refusal() -> kvchunk::Error {
    kvcore::Error::Device { backend: "test", reason: "on purpose".to_owned() }.into()
}

/// Returns a hold on a piece: immediately, after another request has computed the piece, or after `compute`
/// has filled its blocks. Returns `None` if there is no room for it.
fn get_or_compute(
    cache: &ChunkCacheManager,
    tenant: TenantId,
    piece: &ChunkPiece<'_>,
    compute: impl FnOnce(&ChunkReservation) -> kvchunk::Result<()>,
) -> kvchunk::Result<Option<PieceHold>> {
    loop {
        match cache.acquire(tenant, piece, 0) {
            Acquired::Hit(hold) => return Ok(Some(hold)),
            Acquired::Compute(reservation) => {
                compute(&reservation)?;
                return Ok(Some(reservation.store()));
            }
            Acquired::Busy(waiter) => waiter.wait(),
            Acquired::NoRoom => return Ok(None),
        }
    }
}

/// A cache over `blocks` blocks of four tokens, with a clock that is advanced by tests.
struct World {
    cache: ChunkCacheManager,
    clock: ManualClock,
    hasher: ChunkHasher,
    tenant: TenantId,
}

impl World {
    fn new(blocks: u32) -> Self {
        Self::with(blocks, ChunkCacheConfig::default(), None)
    }

    fn with(blocks: u32, config: ChunkCacheConfig, sleep: Option<Arc<dyn SleepStore>>) -> Self {
        let clock = ManualClock::default();
        let pool = ChunkBlockPool::new(0..blocks, BLOCK).unwrap();
        let hasher = hasher(config.hash_algorithm, ComputeMode::Alone, &[]);
        let cache = ChunkCacheManager::build(config, pool, sleep, Arc::new(clock.clone())).unwrap();
        Self { cache, clock, hasher, tenant: TenantId::default() }
    }

    fn hash(&self, tokens: &[u32]) -> ChunkHash {
        self.hasher.pieces(tokens, usize::MAX).next().unwrap().hash()
    }

    fn acquire(&self, tokens: &[u32]) -> Acquired {
        let piece = self.hasher.pieces(tokens, usize::MAX).next().unwrap();
        self.cache.acquire(self.tenant, &piece, 0)
    }

    fn lookup(&self, tokens: &[u32]) -> Option<PieceHold> {
        self.cache.lookup(self.tenant, &self.hasher.pieces(tokens, usize::MAX).next().unwrap())
    }

    fn reserve(&self, tokens: &[u32]) -> ChunkReservation {
        match self.acquire(tokens) {
            Acquired::Compute(reservation) => reservation,
            other => panic!("{other:?}"),
        }
    }

    fn store(&self, tokens: &[u32]) -> PieceHold {
        self.reserve(tokens).store()
    }

    fn hit(&self, tokens: &[u32]) -> PieceHold {
        match self.acquire(tokens) {
            Acquired::Hit(chunk) => chunk,
            other => panic!("{other:?}"),
        }
    }

    fn advance(&self, seconds: u64) {
        self.clock.advance(Duration::from_secs(seconds));
    }

    fn check(&self) {
        self.cache.check_invariants().unwrap();
    }

    fn free(&self) -> usize {
        self.cache.pool().num_free_blocks()
    }
}

fn hasher(algorithm: HashAlgorithm, mode: ComputeMode, system: &[u32]) -> ChunkHasher {
    ChunkHasher::new(algorithm, ChunkContext::new(root(b""), mode, system), BLOCK)
}

/// A memory that logs its calls, and refuses or fails if a test requests it.
#[derive(Debug, Default)]
struct Memory {
    room: std::sync::atomic::AtomicUsize,
    damaged: std::sync::atomic::AtomicBool,
    log: parking_lot::Mutex<Vec<String>>,
}

impl Memory {
    fn with_room(pieces: usize) -> Arc<Self> {
        Arc::new(Self { room: pieces.into(), ..Self::default() })
    }
}

#[derive(Debug)]
struct Saved {
    memory: Arc<Memory>,
    blocks: usize,
    exact: bool,
}

/// A store over a [`Memory`] that tests share.
#[derive(Debug)]
struct Store {
    memory: Arc<Memory>,
    exact: bool,
}

impl SleepStore for Store {
    fn save(&self, blocks: &[BlockId]) -> kvchunk::Result<Box<dyn Sleeping>> {
        use std::sync::atomic::Ordering::SeqCst;
        let room = |n: usize| n.checked_sub(1);
        if self.memory.room.fetch_update(SeqCst, SeqCst, room).is_err() {
            return Err(kvchunk::Error::SleepFull { asked: blocks.len(), free: 0, limit: 0 });
        }
        self.memory.log.lock().push(format!("save {}", blocks.len()));
        Ok(Box::new(Saved { memory: Arc::clone(&self.memory), blocks: blocks.len(), exact: self.exact }))
    }
}

impl Sleeping for Saved {
    fn restore(&self, blocks: &MutableBlocks) -> kvchunk::Result<()> {
        if self.memory.damaged.load(std::sync::atomic::Ordering::SeqCst) {
            return Err(kvchunk::Error::Damaged("on purpose".to_owned()));
        }
        self.memory.log.lock().push(format!("restore {}", blocks.len()));
        Ok(())
    }

    fn bytes(&self) -> usize {
        self.blocks
    }

    fn is_exact(&self) -> bool {
        self.exact
    }
}

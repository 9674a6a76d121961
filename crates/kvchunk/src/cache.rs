//! The chunk cache: an index from keys to stored pieces, and the pool they lie in.
//!
//! The pool is the cache's own: filling it never evicts a block of the main pool, nor the reverse.
//! A *piece* is a chunk, or a part of an oversized one. Requests hold pieces by [`ChunkHandle`];
//! a piece that nobody holds stays cached until the least recently used go to make room.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvcore::{BlockId, BlockPool, MutableBlocks, PinnedBlocks, SharedBlocks, SlotMapping};

use crate::config::ChunkCacheConfig;
use crate::error::Result;
use crate::key::ChunkKey;
use crate::metrics::ChunkCacheMetrics;

/// A hold on a stored piece. Cloning it adds a holder; its blocks are never written again.
#[derive(Debug, Clone)]
pub struct ChunkHandle(Arc<Held>);

#[derive(Debug)]
struct Held {
    ids: Arc<[BlockId]>,
    #[expect(dead_code, reason = "held so that the blocks live as long as the handle")]
    blocks: SharedBlocks,
    tokens: usize,
}

impl ChunkHandle {
    fn new(blocks: SharedBlocks, tokens: usize) -> Self {
        Self(Arc::new(Held { ids: blocks.ids().into(), blocks, tokens }))
    }

    /// The physical blocks, in order.
    pub fn blocks(&self) -> &Arc<[BlockId]> {
        &self.0.ids
    }

    /// Tokens stored.
    pub fn tokens(&self) -> usize {
        self.0.tokens
    }
}

/// Blocks for a piece that is about to be computed.
///
/// # Drop behaviour
/// The blocks are free again; nothing of the piece can be found.
#[derive(Debug)]
#[must_use = "dropping it gives the blocks back"]
pub struct ChunkReservation {
    key: ChunkKey,
    tokens: Arc<[u32]>,
    blocks: MutableBlocks,
}

impl ChunkReservation {
    /// The piece's tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The blocks to fill, in order.
    pub fn ids(&self) -> Arc<[BlockId]> {
        self.blocks.ids().into()
    }
}

/// The slots of `tokens` tokens in `blocks`.
pub(crate) fn slots(blocks: &[BlockId], block_size: usize, tokens: usize) -> SlotMapping {
    let slot = |token: usize| {
        blocks[token / block_size].index() as i64 * block_size as i64 + (token % block_size) as i64
    };
    (0..tokens).map(slot).collect::<Vec<_>>().into()
}

#[derive(Debug)]
struct Entry {
    tokens: Arc<[u32]>,
    pinned: PinnedBlocks,
    /// When it was used last; also its place in the order.
    tick: u64,
}

#[derive(Debug, Default)]
struct Index {
    entries: HashMap<ChunkKey, Entry>,
    /// Keys by tick, oldest first.
    order: BTreeMap<u64, ChunkKey>,
    next_tick: u64,
    metrics: ChunkCacheMetrics,
}

/// A cache of chunk pieces. All methods take `&self`; its lock is never held while a model computes.
#[derive(Debug)]
pub struct ChunkCache {
    config: ChunkCacheConfig,
    pool: BlockPool,
    block_size: usize,
    index: Mutex<Index>,
}

impl ChunkCache {
    /// An empty cache over `pool`, whose blocks hold `block_size` tokens.
    ///
    /// # Errors
    /// [`crate::Error::Zero`] for a limit or a block size of 0.
    pub fn new(config: ChunkCacheConfig, pool: BlockPool, block_size: usize) -> Result<Self> {
        config.check()?;
        if block_size == 0 {
            return Err(crate::Error::Zero { what: "block_size" });
        }
        Ok(Self { config, pool, block_size, index: Mutex::default() })
    }

    /// The settings.
    pub fn config(&self) -> &ChunkCacheConfig {
        &self.config
    }

    /// The cache's own blocks.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Tokens per block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    fn index(&self) -> MutexGuard<'_, Index> {
        // Every change below is complete before anything can panic, so a poisoned lock is sound.
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The piece stored under `key`, if its tokens are `tokens`: a hash alone is never trusted.
    pub fn lookup(&self, key: &ChunkKey, tokens: &[u32]) -> Option<ChunkHandle> {
        let mut guard = self.index();
        let index = &mut *guard;
        index.metrics.lookups += 1;
        let tick = index.next_tick;
        let Some(entry) = index.entries.get_mut(key).filter(|entry| *entry.tokens == *tokens) else {
            index.metrics.misses += 1;
            return None;
        };
        index.next_tick += 1;
        index.metrics.hits += 1;
        index.metrics.tokens_reused += tokens.len() as u64;
        index.order.remove(&entry.tick);
        index.order.insert(tick, *key);
        entry.tick = tick;
        Some(ChunkHandle::new(entry.pinned.share(), tokens.len()))
    }

    /// Blocks for a piece, evicting pieces that nobody holds as needed. `None` when even that does
    /// not make room: the request then takes the uncached path.
    pub fn reserve(&self, key: ChunkKey, tokens: &[u32]) -> Option<ChunkReservation> {
        let needed = tokens.len().div_ceil(self.block_size);
        let mut index = self.index();
        let counts = self.pool.counts();
        // A request that finds no room even so must not empty the cache on its way.
        if needed <= counts.free + counts.cached {
            loop {
                if let Ok(blocks) = self.pool.allocate(needed) {
                    return Some(ChunkReservation { key, tokens: tokens.into(), blocks });
                }
                if !index.evict_oldest() {
                    break;
                }
            }
        }
        index.metrics.uncached += 1;
        None
    }

    /// Stores a piece whose blocks have been filled; the handle holds it.
    ///
    /// If another request stored the same piece meanwhile, that one stays; if the cache is full of
    /// pieces in use, none goes. In both cases these blocks are freed with the handle's last clone.
    pub fn insert(&self, reservation: ChunkReservation) -> ChunkHandle {
        let ChunkReservation { key, tokens, blocks } = reservation;
        let blocks = blocks.share();
        let len = tokens.len();
        let mut guard = self.index();
        let index = &mut *guard;
        index.metrics.tokens_computed += len as u64;
        // Under a colliding key with other tokens the older piece stays: never serve one for the other.
        let room = index.entries.len() < self.config.max_chunks || index.evict_oldest();
        if room && !index.entries.contains_key(&key) {
            let tick = index.next_tick;
            index.next_tick += 1;
            index.metrics.insertions += 1;
            index.order.insert(tick, key);
            index.entries.insert(key, Entry { tokens, pinned: blocks.pin(), tick });
        }
        ChunkHandle::new(blocks, len)
    }

    /// Evicts the least recently used piece that nobody holds; `false` if there is none.
    pub fn evict_lru(&self) -> bool {
        self.index().evict_oldest()
    }

    /// Forgets every piece. Those that requests hold are freed when the last of these ends.
    pub fn clear(&self) {
        let mut index = self.index();
        index.entries.clear();
        index.order.clear();
    }

    /// Counts so far, and what is held now.
    pub fn metrics(&self) -> ChunkCacheMetrics {
        let index = self.index();
        let counts = self.pool.counts();
        ChunkCacheMetrics {
            cached_chunks: index.entries.len(),
            total_blocks: counts.total,
            used_blocks: counts.total - counts.free,
            ..index.metrics
        }
    }
}

impl Index {
    fn evict_oldest(&mut self) -> bool {
        let idle = |key: &ChunkKey| self.entries.get(key).is_some_and(|entry| !entry.pinned.is_held());
        let Some((&tick, &key)) = self.order.iter().find(|(_, key)| idle(key)) else { return false };
        self.order.remove(&tick);
        self.entries.remove(&key);
        self.metrics.evictions += 1;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvcore::KeyScope;

    fn cache(blocks: u32, max_chunks: usize) -> ChunkCache {
        let config = ChunkCacheConfig { max_chunks, ..ChunkCacheConfig::default() };
        ChunkCache::new(config, BlockPool::new(0..blocks).unwrap(), 4).unwrap()
    }

    fn key(tokens: &[u32]) -> ChunkKey {
        KeyScope::new("m", b"w").root().child(tokens)
    }

    fn store(cache: &ChunkCache, tokens: &[u32]) -> ChunkHandle {
        let reservation = cache.reserve(key(tokens), tokens).expect("room");
        cache.insert(reservation)
    }

    #[test]
    fn the_least_recently_used_goes_first_and_held_ones_never() {
        let cache = cache(6, 10);
        let (a, b, c) = ([1; 5], [2; 5], [3; 5]);
        drop(store(&cache, &a));
        let held = store(&cache, &b);
        drop(store(&cache, &c));
        assert!(cache.lookup(&key(&a), &a).is_some(), "a is used again, so c is the oldest idle one");
        drop(store(&cache, &[4; 5]));
        assert!(cache.lookup(&key(&c), &c).is_none());
        assert!(cache.lookup(&key(&a), &a).is_some() && cache.lookup(&key(&b), &b).is_some());
        drop(held);
        cache.pool().check_invariants().unwrap();
        let m = cache.metrics();
        assert_eq!((m.evictions, m.insertions, m.cached_chunks), (1, 4, 3));
        assert_eq!((m.lookups, m.hits, m.misses), (4, 3, 1));
    }

    #[test]
    fn nothing_to_evict_means_no_room_and_nothing_lost() {
        let cache = cache(2, 10);
        let held = store(&cache, &[1; 8]);
        assert!(cache.reserve(key(&[2]), &[2]).is_none());
        assert!(cache.reserve(key(&[3; 9]), &[3; 9]).is_none(), "larger than the pool");
        drop(held);
        assert!(cache.reserve(key(&[3; 9]), &[3; 9]).is_none());
        let held = cache.lookup(&key(&[1; 8]), &[1; 8]).expect("a hopeless request evicts nothing");
        drop(held);
        cache.pool().check_invariants().unwrap();
    }

    #[test]
    fn the_number_of_chunks_is_limited() {
        let cache = cache(100, 2);
        for i in 0..5 {
            drop(store(&cache, &[i; 3]));
        }
        assert_eq!((cache.metrics().cached_chunks, cache.metrics().evictions), (2, 3));
        // a prompt of five: all reserved before any is stored
        let reservations: Vec<_> = (10..15).map(|i| cache.reserve(key(&[i; 3]), &[i; 3]).unwrap()).collect();
        let held: Vec<_> = reservations.into_iter().map(|r| cache.insert(r)).collect();
        assert_eq!((cache.metrics().cached_chunks, held.len()), (2, 5));
        drop(held);
        assert_eq!(cache.pool().counts().cached, 2);
        cache.pool().check_invariants().unwrap();
    }

    #[test]
    fn an_abandoned_reservation_leaves_nothing() {
        let cache = cache(4, 10);
        drop(cache.reserve(key(&[1; 9]), &[1; 9]));
        assert_eq!(cache.pool().counts().free, 4);
        assert!(cache.lookup(&key(&[1; 9]), &[1; 9]).is_none());
    }

    #[test]
    fn a_collision_is_a_miss_and_the_stored_chunk_stays() {
        let cache = cache(8, 10);
        let same_key = key(&[1, 2]);
        let first = cache.insert(cache.reserve(same_key, &[1, 2]).unwrap());
        assert!(cache.lookup(&same_key, &[3, 4]).is_none(), "another chunk's KV must not be served");
        let other = cache.insert(cache.reserve(same_key, &[3, 4]).unwrap());
        assert_ne!(first.blocks(), other.blocks());
        drop(other);
        assert!(cache.lookup(&same_key, &[1, 2]).is_some() && cache.lookup(&same_key, &[3, 4]).is_none());
        cache.pool().check_invariants().unwrap();
    }

    #[test]
    fn clear_lets_held_chunks_live_until_their_holders_end() {
        let cache = cache(4, 10);
        let held = store(&cache, &[1; 8]);
        cache.clear();
        assert_eq!((cache.pool().counts().shared, cache.metrics().cached_chunks), (2, 0));
        drop(held);
        assert_eq!(cache.pool().counts().free, 4);
        cache.pool().check_invariants().unwrap();
    }
}

//! Pieces that are being moved: accounting, waiting, eviction order, and stores whose code uses the cache.

use super::*;
use kvchunk::{ColdRule, Error, WeakChunkCache};
use kvcore::{Clock, MutableBlocks};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

/// The cache that a store belongs to. It is set after the cache is built.
#[derive(Debug, Default, Clone)]
struct Later(Arc<OnceLock<WeakChunkCache>>);

impl Later {
    fn set(&self, cache: &ChunkCacheManager) {
        self.0.set(cache.downgrade()).unwrap();
    }

    /// Returns `None` before the cache is built and after it is dropped.
    fn get(&self) -> Option<ChunkCacheManager> {
        self.0.get()?.upgrade()
    }
}

/// A store that uses the cache in every call that the cache makes.
#[derive(Debug, Default)]
struct Meddler {
    cache: Later,
    calls: Arc<AtomicUsize>,
    clears: Clears,
}

/// The moment at which the store clears the cache.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
enum Clears {
    #[default]
    Never,
    FallingAsleep,
    Waking,
}

#[derive(Debug)]
struct Meddled(Later, Arc<AtomicUsize>, Clears);

impl Meddler {
    fn world(blocks: u32, config: ChunkCacheConfig, clears: Clears) -> (World, Arc<AtomicUsize>) {
        let store = Self { clears, ..Self::default() };
        let (later, calls) = (store.cache.clone(), Arc::clone(&store.calls));
        let w = World::with(blocks, config, Some(Arc::new(store)));
        later.set(&w.cache);
        (w, calls)
    }
}

fn meddle(cache: &Later, calls: &AtomicUsize) {
    calls.fetch_add(1, SeqCst);
    let cache = cache.get().unwrap();
    cache.check_invariants().unwrap();
    assert!(cache.metrics().used_blocks > 0 || cache.metrics().sleeping_chunks == 0);
}

impl SleepStore for Meddler {
    fn save(&self, _: &[BlockId]) -> kvchunk::Result<Box<dyn Sleeping>> {
        meddle(&self.cache, &self.calls);
        if self.clears == Clears::FallingAsleep {
            self.cache.get().unwrap().clear();
        }
        Ok(Box::new(Meddled(self.cache.clone(), Arc::clone(&self.calls), self.clears)))
    }
}

impl Sleeping for Meddled {
    fn restore(&self, _: &MutableBlocks) -> kvchunk::Result<()> {
        meddle(&self.0, &self.1);
        if self.2 == Clears::Waking {
            self.0.get().unwrap().clear();
        }
        Ok(())
    }

    fn bytes(&self) -> usize {
        self.0.get().unwrap().metrics().cached_chunks
    }

    fn is_exact(&self) -> bool {
        self.0.get().unwrap().check_invariants().is_ok()
    }
}

impl Drop for Meddled {
    fn drop(&mut self) {
        self.1.fetch_add(1, SeqCst);
        self.0.get().map(|cache| cache.metrics());
    }
}

#[test]
fn accounts_are_right_at_every_moment_and_a_store_may_use_the_cache() {
    let config = ChunkCacheConfig { max_chunks: 2, ..ChunkCacheConfig::default() };
    let (w, calls) = Meddler::world(8, config, Clears::Never);
    drop(w.store(&[1; 8]));
    let under_way = w.reserve(&[2; 4]);
    assert_eq!(w.cache.sleep_cold_chunks(ColdRule::EVERYTHING).unwrap(), 1);
    assert_eq!(calls.load(SeqCst), 1, "saved");
    let woken = w.hit(&[1; 8]);
    assert_eq!(calls.load(SeqCst), 3, "restored, and what was saved is dropped");
    drop((woken, under_way.store()));
    assert_eq!(w.cache.sleep_cold_chunks(ColdRule::EVERYTHING).unwrap(), 2);
    drop(w.store(&[3; 4]));
    assert_eq!((calls.load(SeqCst), w.cache.metrics().evictions), (6, 1), "a sleeper made place");
    assert!(w.cache.evict_lru() && w.cache.evict_lru());
    assert_eq!(calls.load(SeqCst), 7);
    drop(w.store(&[4; 4]));
    w.cache.sleep_cold_chunks(ColdRule::EVERYTHING).unwrap();
    w.cache.clear();
    assert_eq!((calls.load(SeqCst), w.free()), (9, 8));
    w.check();
}

#[test]
fn a_piece_that_is_cleared_while_it_falls_asleep_is_gone() {
    let (w, calls) = Meddler::world(8, ChunkCacheConfig::default(), Clears::FallingAsleep);
    drop(w.store(&[1; 8]));
    assert_eq!(w.cache.sleep_cold_chunks(ColdRule::EVERYTHING).unwrap(), 1);
    assert_eq!((calls.load(SeqCst), w.cache.metrics().cached_chunks, w.free()), (2, 0, 8));
    w.check();
}

#[test]
fn a_piece_that_is_cleared_while_it_wakes_for_a_request_is_its_until_it_ends() {
    let (w, _) = Meddler::world(8, ChunkCacheConfig::default(), Clears::Waking);
    drop(w.store(&[1; 8]));
    w.cache.sleep_cold_chunks(ColdRule::EVERYTHING).unwrap();
    let held = w.hit(&[1; 8]);
    assert_eq!((w.cache.metrics().cached_chunks, w.cache.tenant_metrics(w.tenant).used_blocks), (0, 2));
    w.check();
    drop(held);
    assert_eq!((w.free(), w.cache.tenant_metrics(w.tenant).used_blocks), (8, 0));
    w.check();
}

#[test]
fn a_woken_chunk_is_not_cold_at_once() {
    let store = Store { memory: Memory::with_room(10), exact: true };
    let w = World::with(8, ChunkCacheConfig::default(), Some(Arc::new(store)));
    drop(w.store(&[1; 8]));
    w.advance(100);
    assert_eq!(w.cache.sleep_cold_chunks(ColdRule::default()).unwrap(), 1);
    w.advance(100);
    assert_eq!(w.cache.wake_up_chunks(&[w.hash(&[1; 8])]), []);
    w.advance(59);
    assert_eq!(w.cache.sleep_cold_chunks(ColdRule::default()).unwrap(), 0);
    w.advance(1);
    assert_eq!(w.cache.sleep_cold_chunks(ColdRule::default()).unwrap(), 1, "seldom used, and a minute ago");
}

/// A clock that puts every piece without holders to sleep whenever the time is read.
#[derive(Debug, Default)]
struct Lullaby {
    cache: Later,
    sings: AtomicBool,
    sung: AtomicUsize,
}

impl Clock for Lullaby {
    fn millis(&self) -> u64 {
        let Some(cache) = self.cache.get() else { return 0 };
        // With this limit, a cache that retries forever fails instead of hanging.
        if self.sung.load(SeqCst) < 1000 && !self.sings.swap(true, SeqCst) {
            self.sung.fetch_add(1, SeqCst);
            let _ = cache.sleep_cold_chunks(ColdRule::EVERYTHING);
            self.sings.store(false, SeqCst);
        }
        0
    }
}

#[test]
fn a_hit_on_a_sleeper_holds_it_before_anybody_can_put_it_back() {
    let clock = Arc::new(Lullaby::default());
    let store = Store { memory: Memory::with_room(usize::MAX), exact: true };
    let pool = ChunkBlockPool::new(0..8, BLOCK).unwrap();
    let config = ChunkCacheConfig::default();
    let cache = ChunkCacheManager::build(config, pool, Some(Arc::new(store)), clock.clone()).unwrap();
    let hasher = hasher(HashAlgorithm::Blake3, ComputeMode::Alone, &[]);
    let piece = hasher.pieces(&[1; 8], usize::MAX).next().unwrap();
    let acquire = || cache.acquire(TenantId::default(), &piece, 0);
    let Acquired::Compute(reservation) = acquire() else { panic!() };
    drop(reservation.store());
    clock.cache.set(&cache);
    for round in 1..4 {
        let Acquired::Hit(chunk) = acquire() else { panic!() };
        assert_eq!((cache.metrics().woken, cache.metrics().hit_count), (round, round));
        drop(chunk);
    }
    assert!(clock.sung.load(SeqCst) < 100, "no look was in vain");
    cache.check_invariants().unwrap();
}

#[test]
fn a_hit_on_a_sleeper_ends_while_a_thread_puts_everything_to_sleep() {
    let store = Store { memory: Memory::with_room(usize::MAX), exact: true };
    let w = World::with(8, ChunkCacheConfig::default(), Some(Arc::new(store)));
    drop(w.store(&[1; 8]));
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(SeqCst) {
                w.cache.sleep_cold_chunks(ColdRule::EVERYTHING).unwrap();
            }
        });
        for _ in 0..2000 {
            match w.acquire(&[1; 8]) {
                Acquired::Hit(chunk) => assert_eq!(chunk.num_tokens(), 8),
                Acquired::Busy(waiter) => waiter.wait(),
                other => panic!("{other:?}"),
            }
        }
        done.store(true, SeqCst);
    });
    assert!(w.cache.metrics().hit_count > 100);
    w.check();
}

#[test]
fn pieces_that_a_full_store_refuses_keep_their_place() {
    let memory = Memory::with_room(0);
    let store = Store { memory, exact: true };
    let w = World::with(6, ChunkCacheConfig::default(), Some(Arc::new(store)));
    for chunk in 1..4 {
        drop(w.store(&[chunk; 8]));
    }
    w.advance(100);
    for _ in 0..2 {
        assert!(matches!(w.cache.sleep_cold_chunks(ColdRule::default()), Err(Error::SleepFull { .. })));
        w.check();
    }
    for chunk in 1..4 {
        drop(w.store(&[chunk + 10; 8]));
        let left: Vec<u32> = (1..4).filter(|&old| w.cache.index().contains(&w.hash(&[old; 8]))).collect();
        assert_eq!(left, (chunk + 1..4).collect::<Vec<_>>(), "the oldest went");
    }
    w.check();
}

/// A store that does not return until a test allows it.
#[derive(Debug, Default)]
struct Endless(AtomicBool);

#[derive(Debug)]
struct Nothing;

impl SleepStore for Endless {
    fn save(&self, _: &[BlockId]) -> kvchunk::Result<Box<dyn Sleeping>> {
        while !self.0.load(SeqCst) {
            std::thread::yield_now();
        }
        Ok(Box::new(Nothing))
    }
}

impl Sleeping for Nothing {
    fn restore(&self, _: &MutableBlocks) -> kvchunk::Result<()> {
        Ok(())
    }
    fn bytes(&self) -> usize {
        0
    }
}

#[test]
fn who_wakes_a_piece_that_is_moved_waits_no_longer_than_the_limit() {
    let limit = std::time::Duration::from_millis(30);
    let (store, config) =
        (Arc::new(Endless::default()), ChunkCacheConfig { max_wait_ms: 30, ..Default::default() });
    let w = World::with(8, config, Some(store.clone()));
    drop((w.store(&[1; 8]), w.store(&[2; 8])));
    std::thread::scope(|scope| {
        scope.spawn(|| w.cache.sleep_cold_chunks(ColdRule::EVERYTHING).unwrap());
        while w.cache.metrics().sleeping_chunks == 0 {
            std::thread::yield_now();
        }
        let moved = w.cache.chunks().into_iter().find(|chunk| chunk.asleep).unwrap().chunk_hash;
        let since = std::time::Instant::now();
        let why = w.cache.wake_up_chunks(&[moved, moved]);
        assert_eq!(why, [moved, moved].map(|hash| (hash, kvchunk::NotWoken::Moving { limit })));
        assert!(since.elapsed() >= limit, "it did wait");
        assert!(why[0].1.to_string().contains("max_wait_ms"), "{}", why[0].1);
        store.0.store(true, SeqCst);
    });
    let all: Vec<_> = w.cache.chunks().into_iter().map(|chunk| chunk.chunk_hash).collect();
    assert_eq!(w.cache.wake_up_chunks(&all), []);
    w.check();
}

//! The whole pool falls asleep, and wakes at the same addresses.

use super::*;
use kvbackend_cpu::ThreadCommunicator;
use kvchunk::{
    Assembler, ChunkedPrompt, CollectiveRank, Error, NotWoken, PositionReindexer, ReuseCell, TenantKeys,
};
use kvcore::{BlockPool, PagedKvCache, Rope, RopeConfig};
use rstest::rstest;

#[rstest]
fn the_pool_sleeps_and_every_piece_is_found_again_bit_for_bit(
    #[values(Execution::Immediate, Execution::Deferred)] execution: Execution,
    #[values("f32", "bf16", "int8:8")] format: &str,
) {
    let w = World::plain(format, execution);
    let (first, last) = (POOL.start - 1, POOL.end);
    let chunks: Vec<Vec<u32>> = (0..12).map(tokens).collect();
    let look = |chunk: &Vec<u32>| {
        let held = w.hit(chunk);
        (Arc::clone(held.block_ids()), w.bytes(held.block_ids()), w.answer(&held))
    };
    for chunk in &chunks {
        drop(w.store(chunk));
    }
    drop(w.store(&[9; 16])); // sleeps in the store
    w.clock.advance(Duration::from_secs(7200));
    let before: Vec<_> = chunks.iter().map(look).collect();
    let rule = ColdRule { min_accesses: 1, ..ColdRule::default() };
    assert_eq!(w.cache.sleep_cold_chunks(rule).unwrap(), 1);
    // Touch every page, so that all pages have memory before the pool falls asleep.
    for storage in w.arena().storages() {
        let mut bytes = vec![0; storage.len()];
        let view = TensorView::new(Arc::clone(storage), DType::U8, &[bytes.len()]).unwrap();
        w.stream.read(&view, &mut bytes).unwrap();
        w.stream.write(&view, &bytes).unwrap();
        w.stream.synchronize().unwrap();
    }
    let around = [first, last].map(|block| w.bytes(&[BlockId(block)]));
    let addresses: Vec<u64> = w.arena().storages().map(|storage| storage.address()).collect();
    let (resident, mapped, free) = (w.resident(), w.reserved.mapped_bytes(), w.free());

    let slept = w.cache.sleep_pool(&w.reserved, w.stream.as_ref()).unwrap();
    assert!(slept.released_bytes * 4 > POOL.len() * w.arena().layout().block_bytes(), "{slept:?}");
    let kept: usize = before.iter().map(|(ids, ..)| ids.len()).sum();
    assert_eq!(slept.saved_bytes, kept * w.arena().layout().block_bytes());
    assert_eq!(w.resident(), resident - slept.released_bytes);
    assert_eq!(w.reserved.mapped_bytes(), mapped - slept.released_bytes);
    assert_eq!(w.reserved.asleep(), [("chunk_cache".to_owned(), POOL)]);
    assert!(!w.cache.is_pool_awake());
    for chunk in chunks.iter().chain([&vec![9; 16], &tokens(500)]) {
        assert!(matches!(w.acquire(chunk), Acquired::NoRoom) && w.lookup(chunk).is_none());
    }
    let asleep = w.hash(&[9; 16]);
    assert_eq!(w.cache.wake_up_chunks(&[asleep]), [(asleep, NotWoken::PoolAsleep)]);
    assert_eq!(w.sleep_all().unwrap(), 0, "nothing is awake");
    assert_eq!([first, last].map(|block| w.bytes(&[BlockId(block)])), around);
    w.check();

    assert_eq!(w.cache.wake_pool(w.stream.as_ref()), Ok(true));
    assert_eq!(w.cache.wake_pool(w.stream.as_ref()), Ok(false));
    assert!(w.arena().storages().map(|storage| storage.address()).eq(addresses));
    assert_eq!((w.reserved.mapped_bytes(), w.free()), (mapped, free));
    for (chunk, (ids, bytes, answer)) in chunks.iter().zip(&before) {
        assert_eq!(&look(chunk), &(Arc::clone(ids), bytes.clone(), answer.clone()));
    }
    assert_eq!(w.cache.wake_up_chunks(&[asleep]), []);
    assert_eq!([first, last].map(|block| w.bytes(&[BlockId(block)])), around);
    w.check();
}

#[test]
fn a_pool_in_use_does_not_sleep_and_says_why() {
    let w = World::plain("f32", Execution::Immediate);
    let sleep = || w.cache.sleep_pool(&w.reserved, w.stream.as_ref());
    let in_use = |held, flights, others| Err(Error::PoolInUse { held, flights, others });
    let (a, b) = (w.store(&tokens(1)), w.store(&tokens(2)));
    let clone = a.clone();
    assert_eq!(sleep(), in_use(2, 0, 0));
    drop(b);
    let reservation = w.reserve(&tokens(3));
    assert_eq!(sleep(), in_use(1, 1, 0));
    drop(reservation);
    w.cache.clear();
    assert_eq!(sleep(), in_use(0, 0, a.block_ids().len()), "held, but no longer stored");
    drop((a, clone));
    let taken = w.cache.pool().allocate_blocks(3).unwrap();
    assert_eq!(sleep(), in_use(0, 0, 3));
    drop(taken);
    assert!(w.cache.is_pool_awake());
    assert_eq!(sleep().unwrap().saved_bytes, 0, "an empty pool sleeps, too");
    assert_eq!(sleep(), Err(Error::PoolAsleep));
    assert_eq!(w.cache.wake_pool(w.stream.as_ref()), Ok(true));
    drop(w.store(&tokens(1)));
    w.check();
}

#[test]
fn an_arena_without_the_pools_blocks_is_refused_and_the_pool_stays_awake() {
    let w = World::over(40..129, "f32", Execution::Immediate, SleepForm::Plain, 1 << 20);
    let refused = w.cache.sleep_pool(&w.reserved, w.stream.as_ref());
    assert!(matches!(refused, Err(Error::Core(kvcore::Error::OutOfRange { value: 128, .. }))));
    assert!(w.cache.is_pool_awake());
    let w = World::plain("f32", Execution::Immediate);
    let other = w.reserved.sleep("other", 100..110, &[], w.stream.as_ref()).unwrap();
    let refused = w.cache.sleep_pool(&w.reserved, w.stream.as_ref());
    assert!(matches!(refused, Err(Error::Core(kvcore::Error::Asleep { start: 100, .. }))));
    drop(other);
    drop(w.store(&tokens(1)));
    w.check();
}

#[test]
fn pieces_may_be_evicted_and_cleared_while_the_pool_sleeps() {
    let w = World::plain("bf16", Execution::Deferred);
    for chunk in 0..4 {
        drop(w.store(&tokens(chunk)));
    }
    let kept = w.bytes(w.hit(&tokens(3)).block_ids());
    w.cache.sleep_pool(&w.reserved, w.stream.as_ref()).unwrap();
    assert!(w.cache.evict_lru(), "the oldest");
    w.check();
    assert_eq!(w.cache.wake_pool(w.stream.as_ref()), Ok(true));
    assert!(w.lookup(&tokens(0)).is_none());
    assert_eq!(w.bytes(w.hit(&tokens(3)).block_ids()), kept);
    w.cache.sleep_pool(&w.reserved, w.stream.as_ref()).unwrap();
    w.cache.clear();
    assert_eq!(w.cache.wake_pool(w.stream.as_ref()), Ok(true));
    assert_eq!((w.free(), w.cache.metrics().cached_chunks), (POOL.len(), 0));
    w.check();
}

#[test]
fn a_cache_that_ends_asleep_gives_the_arena_its_memory_back() {
    let w = World::plain("f32", Execution::Immediate);
    let mapped = w.reserved.mapped_bytes();
    drop(w.store(&tokens(1)));
    assert!(w.cache.sleep_pool(&w.reserved, w.stream.as_ref()).unwrap().released_bytes > 0);
    let World { cache, reserved, .. } = w;
    drop(cache);
    assert_eq!((reserved.mapped_bytes(), reserved.asleep()), (mapped, vec![]));
}

/// A sleep store that tries to put the whole pool to sleep while it saves a piece.
#[derive(Debug)]
struct Meddler {
    cache: parking_lot::Mutex<Option<ChunkCacheManager>>,
    reserved: ReservedArena,
    stream: Arc<dyn Stream>,
    refusals: parking_lot::Mutex<Vec<Error>>,
}

impl kvchunk::SleepStore for Meddler {
    fn save(&self, _: &[BlockId]) -> kvchunk::Result<Box<dyn kvchunk::Sleeping>> {
        let cache = self.cache.lock().clone().unwrap();
        let refused = cache.sleep_pool(&self.reserved, self.stream.as_ref());
        self.refusals.lock().push(refused.unwrap_err());
        Err(Error::SleepFull { asked: 1, free: 0, limit: 0 })
    }
}

#[test]
fn a_piece_on_its_way_keeps_the_pool_awake() {
    let w = World::plain("f32", Execution::Immediate);
    let meddler = Arc::new(Meddler {
        cache: parking_lot::Mutex::default(),
        reserved: w.reserved.clone(),
        stream: w.stream.clone(),
        refusals: parking_lot::Mutex::default(),
    });
    let pool = ChunkBlockPool::new(POOL, BLOCK).unwrap();
    let (clock, config) = (Arc::new(w.clock.clone()), ChunkCacheConfig::default());
    let cache = ChunkCacheManager::build(config, pool, Some(meddler.clone()), clock).unwrap();
    *meddler.cache.lock() = Some(cache.clone());
    let w = World { cache, ..w };
    drop(w.store(&tokens(1)));
    assert!(matches!(w.sleep_all(), Err(Error::SleepFull { .. })));
    assert_eq!(*meddler.refusals.lock(), [Error::PoolInUse { held: 0, flights: 1, others: 0 }]);
    w.check();
    w.cache.sleep_pool(&w.reserved, w.stream.as_ref()).unwrap();
    meddler.cache.lock().take(); // the cache holds the meddler
}

#[test]
fn a_rank_wakes_no_piece_into_a_pool_that_sleeps() {
    let w = World::plain("f32", Execution::Immediate);
    let main = PagedKvCache::new(w.arena().clone(), BlockPool::new(0..POOL.start).unwrap()).unwrap();
    let rope = Rope::new(RopeConfig::new(DIM, 10_000.0), 64).unwrap();
    let reindexer = PositionReindexer::new(&rope);
    let alone = ThreadCommunicator::group(1, Duration::from_secs(20)).unwrap().remove(0);
    let rank = CollectiveRank::new(Arc::new(alone), CpuBackend::new()).unwrap();
    let assembler = Assembler {
        chunks: Some(&w.cache),
        tenant: TenantKeys::shared(KeyScope::new("m", b"w").root()),
        main: main.kv_pool().clone(),
        prefixes: true,
        cell: ReuseCell::default(),
        reindexer: &reindexer,
        ranks: Some(&rank),
        replicas: None,
        tier: None,
        fetched: None,
    };
    let prompt = ChunkedPrompt::new(vec![1; 5], vec![vec![2; 8]], vec![3]).unwrap();
    let hits = || assembler.assemble(&prompt).unwrap().commit().unwrap().reports()[0].hit;
    assert_eq!((hits(), hits()), (false, true));
    assert_eq!(w.sleep_all().unwrap(), 1);
    w.cache.sleep_pool(&w.reserved, w.stream.as_ref()).unwrap();
    assert!(!hits());
    assert_eq!(w.cache.metrics().woken, 0);
    w.cache.wake_pool(w.stream.as_ref()).unwrap();
    assert!(hits(), "the piece slept on");
    assert_eq!(w.cache.metrics().woken, 1);
    w.check();
}

//! The pieces of a chunk cache move between device and host memory as the thresholds say.

use std::sync::Arc;
use std::time::Duration;

use kvbackend_cpu::CpuBackend;
use kvchunk::{
    Acquired, ArenaSleep, ChunkBlockPool, ChunkCacheConfig, ChunkCacheManager, ChunkContext, ChunkHasher,
    ComputeMode, HashAlgorithm, PieceHold, SleepForm, SleepStore, TenantId,
};
use kvcore::{Backend, BlockOrder, DType, KeyScope, KvArena, KvLayout, KvShape, ManualClock, MemoryKind};
use kvmanager::{Tier, TierMoves, TierThresholds};
use proptest::prelude::*;

/// The number of blocks on the device, and as many bytes as so many blocks need on the host.
const BLOCKS: usize = 40;

/// A chunk cache whose pieces of two blocks can sleep, with a clock that is advanced by tests.
struct World {
    cache: ChunkCacheManager,
    sleep: Arc<ArenaSleep>,
    clock: ManualClock,
    hasher: ChunkHasher,
    thresholds: TierThresholds,
}

impl World {
    fn new(host_blocks: usize) -> Self {
        let backend = CpuBackend::new();
        let shape = KvShape {
            num_layers: 1,
            num_blocks: BLOCKS,
            block_size: 4,
            k_heads: 1,
            v_heads: 1,
            k_dim: 4,
            v_dim: 4,
            format: DType::F32.into(),
            order: BlockOrder::TokenMajor,
        };
        let layout = Arc::new(KvLayout::new(shape).unwrap());
        let budget = host_blocks * layout.block_bytes();
        let arena = KvArena::allocate(backend.as_ref(), MemoryKind::Device, layout).unwrap();
        let stream = backend.stream().unwrap();
        let sleep = Arc::new(ArenaSleep::new(backend, arena, stream, SleepForm::Plain, budget).unwrap());
        let (clock, store) = (ManualClock::default(), Arc::clone(&sleep) as Arc<dyn SleepStore>);
        let pool = ChunkBlockPool::new(0..BLOCKS as u32, 4).unwrap();
        let config = ChunkCacheConfig::default();
        let cache = ChunkCacheManager::build(config, pool, Some(store), Arc::new(clock.clone())).unwrap();
        let context = ChunkContext::new(KeyScope::new("m", b"w").root(), ComputeMode::Alone, &[]);
        let hasher = ChunkHasher::new(HashAlgorithm::default(), context, 4);
        Self { cache, sleep, clock, hasher, thresholds: TierThresholds::default() }
    }

    /// Uses a document of eight tokens, and computes it if it is not there. Returns `None` if there is no room.
    fn use_document(&self, number: u32) -> Option<PieceHold> {
        let tokens = [number; 8];
        let piece = self.hasher.pieces(&tokens, usize::MAX).next().unwrap();
        match self.cache.acquire(TenantId::default(), &piece, 0) {
            Acquired::Hit(hold) => Some(hold),
            Acquired::Compute(reservation) => Some(reservation.store()),
            Acquired::NoRoom => None,
            Acquired::Busy(_) => panic!("nobody else computes"),
        }
    }

    fn plan(&self, most: usize) -> TierMoves {
        TierMoves::plan(&self.thresholds, &self.cache, self.sleep.usage(), most).unwrap()
    }

    /// Moves pieces until nothing is left to move.
    fn tend(&self) {
        for _ in 0..1000 {
            let moves = self.plan(4);
            if moves.is_empty() || !moves.carry_out(&self.cache).is_ok_and(|moved| moved > 0) {
                return;
            }
            self.cache.check_invariants().unwrap();
        }
        panic!("the moves have no end");
    }

    fn used(&self) -> usize {
        BLOCKS - self.cache.pool().num_free_blocks()
    }

    /// Returns the documents that are asleep, or awake.
    fn documents(&self, asleep: bool) -> Vec<u32> {
        let is_here = |number: &u32| {
            let tokens = [*number; 8];
            let hash = self.hasher.pieces(&tokens, usize::MAX).next().unwrap().hash();
            self.cache.index().get(&hash).is_some_and(|info| info.asleep == asleep)
        };
        (0..100).filter(is_here).collect()
    }
}

#[test]
fn the_coldest_documents_leave_the_device_and_then_the_host() {
    let world = World::new(20);
    for number in 0..17 {
        world.use_document(number);
        world.clock.advance(Duration::from_secs(1));
    }
    assert!(world.plan(4).is_empty(), "34 of 40 blocks are 85 %");
    world.use_document(0);
    world.use_document(17);
    let moves = world.plan(4);
    assert_eq!((moves.sleep.len(), moves.leave.len(), moves.wake.len()), (1, 0, 0));
    world.tend();
    assert_eq!((world.documents(true), world.used()), (vec![1], 34), "the first one was used again");
    for number in 18..26 {
        world.use_document(number);
        world.tend();
        world.clock.advance(Duration::from_secs(1));
    }
    assert_eq!(world.documents(true), (1..10).collect::<Vec<_>>(), "18 of 20 blocks are 90 %");
    world.use_document(26);
    world.tend();
    assert_eq!(world.documents(true), (2..11).collect::<Vec<_>>());
    assert!(!world.documents(false).contains(&1), "it has left");
    assert_eq!(world.cache.metrics().evictions, 1);
}

#[test]
fn a_hot_document_wakes_before_a_request_asks_and_a_cold_one_does_not() {
    let world = World::new(40);
    for number in 0..3 {
        world.use_document(number);
    }
    world.use_document(1);
    let all: Vec<_> = world.cache.chunks().iter().map(|info| info.chunk_hash).collect();
    assert_eq!(world.cache.sleep_chunks(&all), Ok(3));
    world.tend();
    assert_eq!((world.documents(true), world.documents(false)), (vec![0, 2], vec![1]));
    world.cache.sleep_chunks(&all).unwrap();
    world.clock.advance(Duration::from_secs(300));
    world.tend();
    assert_eq!(world.documents(false), [], "after five minutes, two uses are no longer hot");
    assert_eq!(world.cache.metrics().woken, 1);
}

#[test]
fn nothing_wakes_into_a_crowded_device_and_held_pieces_stay() {
    let world = World::new(40);
    world.use_document(90);
    world.use_document(90);
    let hot: Vec<_> = world.cache.chunks().iter().map(|info| info.chunk_hash).collect();
    world.cache.sleep_chunks(&hot).unwrap();
    let held: Vec<_> = (0..17).map(|number| world.use_document(number).unwrap()).collect();
    assert!(world.plan(4).is_empty(), "waking would exceed 85 %");
    let more = [world.use_document(17).unwrap(), world.use_document(18).unwrap()];
    assert!(world.plan(4).is_empty(), "all are held");
    drop((held, more));
    world.tend();
    assert_eq!((world.used(), world.documents(false).contains(&90)), (34, false));
}

#[test]
fn a_host_without_room_leaves_pieces_where_they_are() {
    let world = World::new(1);
    for number in 0..20 {
        world.use_document(number);
    }
    let moves = world.plan(4);
    assert!(matches!(moves.carry_out(&world.cache), Err(kvchunk::Error::SleepFull { .. })));
    assert_eq!((world.documents(false).len(), world.documents(true).len()), (20, 0));
    world.cache.check_invariants().unwrap();
}

proptest! {
    #[test]
    fn after_any_use_both_tiers_are_at_their_thresholds(
        host in 4_usize..60,
        uses in prop::collection::vec((0_u32..50, 0_u64..400, 0_usize..4), 1..150),
    ) {
        let world = World::new(host);
        let mut held = Vec::new();
        for (number, seconds, hold) in uses {
            world.clock.advance(Duration::from_secs(seconds));
            held.extend(world.use_document(number));
            held.truncate(hold);
            world.tend();
            world.cache.check_invariants().unwrap();
            let usage = world.sleep.usage();
            let bytes = usage.limit_bytes / host;
            let over = |tier, used, total| world.thresholds.blocks_to_offload(tier, used, total).unwrap();
            prop_assert_eq!(over(Tier::Host, usage.host_bytes, usage.limit_bytes), 0);
            // A piece of two blocks stays on the device only if the host has no room for it at its threshold.
            let fits = over(Tier::Host, 2 * bytes, usage.limit_bytes) == 0;
            prop_assert!(over(Tier::Device, world.used(), BLOCKS) == 0 || !fits);
            let hot = world.cache.chunks().into_iter().filter(|info| info.asleep && info.heat > 0.70).count();
            prop_assert!(hot == 0 || world.used() + 2 > BLOCKS * 85 / 100, "{hot} hot pieces sleep");
        }
        drop(held);
    }
}

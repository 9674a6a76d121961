//! Eight threads make 10⁵ calls each, for three tenants, on a pool that is always too small and sometimes
//! asleep.

use super::*;
use kvbackend_cpu::CpuBackend;
use kvchunk::{ColdRule, Error, PositionReindexer, Tenant};
use kvcore::{
    Backend, BlockOrder, DType, KvLayout, KvShape, MemoryKind, MutableBlocks, ReservedArena, Rope,
    RopeConfig, Stream,
};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst};

const THREADS: u64 = 8;
const CALLS: u64 = 100_000;
const CHUNKS: u32 = 40;
const BLOCKS: u32 = 24;
const TENANTS: usize = 3;
/// The number of calls after which all threads drop their holds and the pool sleeps.
const SLEEP_EVERY: u64 = 10_000;
/// The number of calls that a thread makes between putting the pool to sleep and waking it.
const ASLEEP_FOR: u64 = 100;

/// The contents of the blocks, and the chunks that are being computed.
struct Contents {
    blocks: Vec<AtomicU64>,
    computing: Vec<AtomicU32>,
    /// True while the pool's blocks have no memory.
    asleep: AtomicBool,
}

/// A store that saves and restores the shared [`Contents`].
#[derive(Debug)]
struct Sleeper(Arc<Contents>);

#[derive(Debug)]
struct Dormant(Arc<Contents>, Vec<u64>);

impl std::fmt::Debug for Contents {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Contents")
    }
}

impl SleepStore for Sleeper {
    fn save(&self, blocks: &[BlockId]) -> kvchunk::Result<Box<dyn Sleeping>> {
        let saved = blocks.iter().map(|block| self.0.blocks[block.index()].load(SeqCst)).collect();
        Ok(Box::new(Dormant(Arc::clone(&self.0), saved)))
    }
}

impl Sleeping for Dormant {
    fn restore(&self, blocks: &MutableBlocks) -> kvchunk::Result<()> {
        for (block, value) in blocks.ids().iter().zip(&self.1) {
            self.0.blocks[block.index()].store(*value, SeqCst);
        }
        Ok(())
    }

    fn bytes(&self) -> usize {
        8 * self.1.len()
    }
}

/// One of a tenant's chunks.
#[derive(Clone, Copy, Debug)]
struct Which {
    tenant: usize,
    chunk: u32,
}

impl Which {
    /// Draws a random chunk. Chunks with low numbers are drawn more often.
    fn draw(random: u64) -> Self {
        let chunk = ((random >> 8) % u64::from(CHUNKS)) * ((random >> 40) % 100) / 100;
        Self { tenant: (random >> 34) as usize % TENANTS, chunk: chunk as u32 }
    }

    fn tokens(self) -> Vec<u32> {
        vec![self.chunk + 1; 1 + self.chunk as usize % 15]
    }

    /// Returns the value that a block of the chunk must contain.
    fn expected(self, block: usize) -> u64 {
        (self.tenant as u64) << 48 | u64::from(self.chunk) << 32 | block as u64
    }
}

impl Contents {
    fn new() -> Self {
        Self {
            blocks: (0..BLOCKS).map(|_| AtomicU64::new(u64::MAX)).collect(),
            computing: (0..CHUNKS * TENANTS as u32).map(|_| AtomicU32::new(0)).collect(),
            asleep: AtomicBool::new(false),
        }
    }

    fn verify(&self, which: Which, blocks: &[BlockId]) {
        assert!(!self.asleep.load(SeqCst), "{which:?} of a pool that sleeps");
        for (i, block) in blocks.iter().enumerate() {
            assert_eq!(self.blocks[block.index()].load(SeqCst), which.expected(i), "{which:?}");
        }
    }

    fn compute(&self, which: Which, reservation: &ChunkReservation) {
        let computing = &self.computing[which.tenant * CHUNKS as usize + which.chunk as usize];
        assert_eq!(computing.fetch_add(1, SeqCst), 0, "{which:?} twice at once");
        for (i, block) in reservation.block_ids().iter().enumerate() {
            self.blocks[block.index()].store(which.expected(i), SeqCst);
            std::thread::yield_now(); // gives the other threads time to ask for the chunk, too
        }
        computing.fetch_sub(1, SeqCst);
    }
}

/// A barrier for all threads. It opens early if one of the threads has failed.
#[derive(Default)]
struct Meeting {
    come: AtomicU64,
    failed: AtomicBool,
}

impl Meeting {
    fn wait(&self) {
        let all = self.come.fetch_add(1, SeqCst) / THREADS * THREADS + THREADS;
        while self.come.load(SeqCst) < all && !self.failed.load(SeqCst) {
            std::thread::yield_now();
        }
    }
}

/// A guard for a working thread. Dropping it signals the other threads that this thread has ended, for any
/// reason.
struct Working<'a>(&'a Stress);

impl Drop for Working<'_> {
    fn drop(&mut self) {
        self.0.meeting.failed.fetch_or(std::thread::panicking(), SeqCst);
        self.0.working.fetch_sub(1, SeqCst);
    }
}

/// The state that all threads share.
struct Stress {
    world: World,
    contents: Arc<Contents>,
    tenants: [TenantId; TENANTS],
    /// The hashers of each tenant: one that resists collisions, and one that does not. Each chunk uses only
    /// one of the two hashers.
    hashers: [[ChunkHasher; 2]; TENANTS],
    reindexer: PositionReindexer,
    arena: ReservedArena,
    stream: Arc<dyn Stream>,
    meeting: Meeting,
    working: AtomicU64,
    /// The number of chunks that [`get_or_compute`] returned.
    placed: AtomicU64,
    pool_slept: AtomicU64,
}

impl Stress {
    fn new() -> Self {
        let contents = Arc::new(Contents::new());
        let config = ChunkCacheConfig { max_chunks: 15, ..ChunkCacheConfig::default() };
        let world = World::with(BLOCKS, config, Some(Arc::new(Sleeper(Arc::clone(&contents)))));
        let quota = |tag, most| Tenant { max_blocks: Some(most), ..Tenant::new(tag) };
        let others = [quota("alice", 8), quota("bob", 12)];
        let [alice, bob] = others.each_ref().map(|tenant| world.cache.add_tenant(tenant.clone()).unwrap());
        let salted = |root| {
            [HashAlgorithm::Blake3, HashAlgorithm::Xxh3].map(|algorithm| {
                ChunkHasher::new(algorithm, ChunkContext::new(root, ComputeMode::Alone, &[]), BLOCK)
            })
        };
        let roots = [root(b""), others[0].root(&root(b"")), others[1].root(&root(b""))];
        let shape = KvShape {
            num_layers: 1,
            num_blocks: BLOCKS as usize,
            block_size: BLOCK,
            k_heads: 1,
            v_heads: 1,
            k_dim: 8,
            v_dim: 8,
            format: DType::F32.into(),
            order: BlockOrder::TokenMajor,
        };
        let (backend, layout) = (CpuBackend::new(), Arc::new(KvLayout::new(shape).unwrap()));
        let rope = Rope::new(RopeConfig::new(8, 10_000.0), 1024).unwrap();
        Self {
            world,
            contents,
            tenants: [TenantId::default(), alice, bob],
            hashers: roots.map(salted),
            reindexer: PositionReindexer::new(&rope),
            stream: backend.stream().unwrap(),
            arena: ReservedArena::create(backend, MemoryKind::Device, layout).unwrap(),
            meeting: Meeting::default(),
            working: AtomicU64::new(THREADS),
            placed: AtomicU64::new(0),
            pool_slept: AtomicU64::new(0),
        }
    }

    /// Waits until all threads have dropped their holds. If `first` is true, this thread then puts the pool
    /// to sleep. Returns `first` when the pool is asleep.
    fn fall_asleep(&self, first: bool) -> bool {
        self.meeting.wait();
        if first {
            self.world.cache.sleep_pool(&self.arena, self.stream.as_ref()).unwrap();
            self.contents.asleep.store(true, SeqCst);
            self.pool_slept.fetch_add(1, SeqCst);
        }
        self.meeting.wait();
        first
    }

    fn wake(&self) {
        self.contents.asleep.store(false, SeqCst);
        assert_eq!(self.world.cache.wake_pool(self.stream.as_ref()), Ok(true));
    }

    /// Makes one call. Pieces that it gets are added to `held`.
    fn call(&self, random: u64, held: &mut Vec<(Which, PieceHold)>) {
        let (cache, which) = (&self.world.cache, Which::draw(random));
        let (tokens, tenant) = (which.tokens(), self.tenants[which.tenant]);
        let piece = self.hashers[which.tenant][which.chunk as usize % 2].pieces(&tokens, 64).next().unwrap();
        let rule = ColdRule { min_accesses: 3, spare_younger_than: Duration::ZERO, ..ColdRule::default() };
        let cancelled = random & 0x700 == 0;
        match random % 64 {
            0 => drop(cache.evict_lru()),
            1 => drop(cache.sleep_cold_chunks(rule)),
            2 => drop(cache.wake_up_chunks(&[piece.hash()])),
            3 if random >> 60 == 0 => cache.clear(),
            3 if random >> 60 < 3 => cache.clear_tenant(tenant),
            4 if random >> 58 == 0 && !held.is_empty() => {
                let error = cache.sleep_pool(&self.arena, self.stream.as_ref()).unwrap_err();
                let refused =
                    matches!(error, Error::PoolInUse { .. } | Error::PoolAsleep | Error::PoolMoving);
                assert!(refused, "{error}");
            }
            4..8 => drop(
                cache.lookup(tenant, &piece).inspect(|found| self.contents.verify(which, found.block_ids())),
            ),
            8..20 => {
                let compute = |reservation: &ChunkReservation| {
                    if cancelled {
                        return Err(refusal());
                    }
                    self.contents.compute(which, reservation);
                    Ok(())
                };
                let position = (random >> 50) as i64 % 512;
                match get_or_compute(cache, tenant, &piece, compute) {
                    Ok(Some(hold)) => {
                        let placed = cache.reindex(&self.reindexer, hold, position).unwrap();
                        assert_eq!(placed.new_position_start(), position);
                        self.contents.verify(which, &placed.segment().blocks);
                        self.placed.fetch_add(1, SeqCst);
                    }
                    Ok(None) => held.clear(),
                    Err(error) => assert_eq!(error, refusal()),
                }
            }
            _ => match cache.acquire(tenant, &piece, 0) {
                Acquired::Hit(found) => {
                    self.contents.verify(which, found.block_ids());
                    held.push((which, found));
                }
                Acquired::Compute(_) if cancelled => {}
                Acquired::Compute(reservation) => {
                    self.contents.compute(which, &reservation);
                    held.push((which, reservation.store()));
                }
                Acquired::Busy(waiter) => waiter.wait(),
                Acquired::NoRoom => held.clear(),
            },
        }
        if held.len() > 1 {
            let (which, first) = held.remove(0);
            self.contents.verify(which, first.block_ids());
        }
    }

    fn work(&self, thread: u64) {
        let _working = Working(self);
        let mut random = 0x1234_5678_9abc_def1 ^ (thread << 7);
        let mut held = Vec::new();
        let mut wake_at = None;
        for call in 1..=CALLS {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            self.call(random, &mut held);
            if wake_at == Some(call) {
                self.wake();
            }
            if call % SLEEP_EVERY == 0 && call < CALLS {
                held.clear();
                let first = self.fall_asleep(call / SLEEP_EVERY % THREADS == thread);
                wake_at = first.then_some(call + ASLEEP_FOR);
            }
        }
    }
}

#[test]
fn eight_threads_under_memory_pressure_get_every_answer_right() {
    let s = Stress::new();
    let checks = AtomicU64::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while s.working.load(SeqCst) > 0 {
                s.world.check();
                checks.fetch_add(1, SeqCst);
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        for thread in 0..THREADS {
            let s = &s;
            scope.spawn(move || s.work(thread));
        }
    });
    let cache = &s.world.cache;
    s.world.check();
    assert!(checks.into_inner() > 10, "while the others worked");
    let m = cache.metrics();
    assert!(m.hit_count > 1000 && m.evictions > 1000 && m.slept > 100 && m.woken > 10, "{m:?}");
    assert!(m.uncached > 100 && m.shared_flights > 10 && s.placed.into_inner() > 1000, "{m:?}");
    assert_eq!(s.pool_slept.into_inner(), CALLS / SLEEP_EVERY - 1);
    for tenant in s.tenants {
        let m = cache.tenant_metrics(tenant);
        assert!(m.hit_count > 100 && m.evictions > 100 && m.used_blocks <= m.total_blocks, "{m:?}");
    }
    cache.clear();
    assert_eq!(s.world.free(), BLOCKS as usize);
    s.world.check();
}

//! Eight threads, 10⁵ calls each, a pool that is always too small.

use super::*;
use kvchunk::ColdRule;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};

const THREADS: u64 = 8;
const CALLS: u64 = 100_000;
const CHUNKS: u32 = 40;
const BLOCKS: u32 = 24;

/// What the blocks hold, and what is being computed.
struct Contents {
    blocks: Vec<AtomicU64>,
    computing: Vec<AtomicU32>,
}

/// Saves and restores the contents above.
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
    fn restore(&self, blocks: &[BlockId]) -> kvchunk::Result<()> {
        for (block, value) in blocks.iter().zip(&self.1) {
            self.0.blocks[block.index()].store(*value, SeqCst);
        }
        Ok(())
    }

    fn bytes(&self) -> usize {
        8 * self.1.len()
    }
}

/// What a block of a chunk must hold.
fn expected(chunk: u32, block: usize) -> u64 {
    u64::from(chunk) << 32 | block as u64
}

#[test]
fn eight_threads_under_memory_pressure_get_every_answer_right() {
    let contents = Arc::new(Contents {
        blocks: (0..BLOCKS).map(|_| AtomicU64::new(u64::MAX)).collect(),
        computing: (0..CHUNKS).map(|_| AtomicU32::new(0)).collect(),
    });
    let config = ChunkCacheConfig { max_chunks: 15, ..ChunkCacheConfig::default() };
    let w = World::with(BLOCKS, config, Some(Arc::new(Sleeper(Arc::clone(&contents)))));
    let verify = |chunk: u32, held: &ChunkKvCache| {
        for (i, block) in held.block_ids().iter().enumerate() {
            assert_eq!(contents.blocks[block.index()].load(SeqCst), expected(chunk, i), "chunk {chunk}");
        }
    };
    let compute = |chunk: u32, reservation: &ChunkReservation| {
        assert_eq!(contents.computing[chunk as usize].fetch_add(1, SeqCst), 0, "chunk {chunk} twice at once");
        for (i, block) in reservation.block_ids().iter().enumerate() {
            contents.blocks[block.index()].store(expected(chunk, i), SeqCst);
            std::thread::yield_now(); // the others have time to ask for it, too
        }
        contents.computing[chunk as usize].fetch_sub(1, SeqCst);
    };
    let rule = ColdRule { min_accesses: 3, spare_younger_than: Duration::ZERO, ..ColdRule::default() };
    let (working, checks) = (AtomicU64::new(THREADS), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while working.load(SeqCst) > 0 {
                w.check();
                checks.fetch_add(1, SeqCst);
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        for thread in 0..THREADS {
            let (w, verify, compute, working) = (&w, &verify, &compute, &working);
            scope.spawn(move || {
                let mut random = 0x1234_5678_9abc_def1 ^ (thread << 7);
                let mut held: Vec<(u32, ChunkKvCache)> = Vec::new();
                for _ in 0..CALLS {
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    // Low numbers are popular.
                    let chunk = (((random >> 8) % u64::from(CHUNKS)) * ((random >> 40) % 100) / 100) as u32;
                    let tokens = vec![chunk + 1; 1 + chunk as usize % 15];
                    match random % 64 {
                        0 => drop(w.cache.evict_lru()),
                        1 => drop(w.cache.sleep_cold_chunks(rule)),
                        2 => drop(w.cache.wake_up_chunks(&[w.hash(&tokens)])),
                        3 if random >> 60 == 0 => w.cache.clear(),
                        4..8 => drop(w.lookup(&tokens).inspect(|chunk_kv| verify(chunk, chunk_kv))),
                        _ => match w.acquire(&tokens) {
                            Acquired::Hit(found) => {
                                verify(chunk, &found);
                                held.push((chunk, found));
                            }
                            Acquired::Compute(reservation) => {
                                if random & 0x700 == 0 {
                                    continue; // cancelled
                                }
                                compute(chunk, &reservation);
                                held.push((chunk, reservation.store()));
                            }
                            Acquired::Busy(waiter) => waiter.wait(),
                            Acquired::NoRoom => held.clear(),
                        },
                    }
                    if held.len() > 1 {
                        let (chunk, first) = held.remove(0);
                        verify(chunk, &first);
                    }
                }
                working.fetch_sub(1, SeqCst);
            });
        }
    });
    w.check();
    assert!(checks.into_inner() > 10, "while the others worked");
    let m = w.cache.metrics();
    assert!(m.hit_count > 1000 && m.evictions > 1000 && m.slept > 100 && m.woken > 10, "{m:?}");
    w.cache.clear();
    assert_eq!(w.free(), BLOCKS as usize);
    w.check();
}

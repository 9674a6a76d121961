//! Sleep and wake.

use super::*;
use kvchunk::{ColdRule, NotWoken};
use std::sync::atomic::Ordering::SeqCst;

fn world(blocks: u32, memory: &Arc<Memory>, exact: bool) -> World {
    let store = Store { memory: Arc::clone(memory), exact };
    World::with(blocks, ChunkCacheConfig::default(), Some(Arc::new(store)))
}

#[test]
fn cold_chunks_sleep_held_and_new_ones_do_not_and_a_hit_wakes() {
    let memory = Memory::with_room(10);
    let w = world(8, &memory, true);
    drop(w.store(&[1; 8]));
    let held = w.store(&[2; 8]);
    w.advance(100);
    drop(w.store(&[3; 8]));
    assert_eq!(w.cache.sleep_cold_chunks(ColdRule::default()).unwrap(), 1, "one is held, one is new");
    w.check();
    assert_eq!((w.free(), w.cache.metrics().sleeping_chunks, w.cache.metrics().slept), (4, 1, 1));
    assert!(w.lookup(&[1; 8]).is_none(), "a lookup wakes nothing");
    let woken = w.hit(&[1; 8]);
    assert!(woken.is_exact());
    assert_eq!((w.free(), w.cache.metrics().woken, w.cache.metrics().sleeping_chunks), (2, 1, 0));
    assert_eq!(*memory.log.lock(), ["save 2", "restore 2"]);
    drop((held, woken));
    w.check();
}

#[test]
fn often_used_pieces_stay_awake_until_idle() {
    let w = world(8, &Memory::with_room(10), true);
    drop(w.store(&[1; 8]));
    for _ in 0..5 {
        drop(w.hit(&[1; 8]));
    }
    w.advance(3599);
    assert_eq!(w.cache.sleep_cold_chunks(ColdRule::default()).unwrap(), 0);
    w.advance(1);
    assert_eq!(w.cache.sleep_cold_chunks(ColdRule::default()).unwrap(), 1);
    assert_eq!(w.cache.wake_up_chunks(&[w.hash(&[1; 8])]), []);
    assert_eq!(w.cache.wake_up_chunks(&[w.hash(&[1; 8])]), [], "awake already");
    w.check();
}

#[test]
fn waking_says_why_not() {
    let memory = Memory::with_room(10);
    let w = world(4, &memory, true);
    drop(w.store(&[1; 8]));
    w.advance(100);
    w.cache.sleep_cold_chunks(ColdRule::default()).unwrap();
    let (known, unknown) = (w.hash(&[1; 8]), w.hash(&[9; 8]));
    let held = w.store(&[2; 12]);
    assert_eq!(
        w.cache.wake_up_chunks(&[unknown, known]),
        [(unknown, NotWoken::Unknown), (known, NotWoken::NoRoom)]
    );
    assert!(matches!(w.acquire(&[1; 8]), Acquired::NoRoom), "it sleeps on, this request goes without");
    w.check();
    drop(held);
    memory.damaged.store(true, SeqCst);
    let [(_, NotWoken::Lost(error))] = &w.cache.wake_up_chunks(&[known])[..] else { panic!() };
    assert!(error.to_string().contains("on purpose"));
    assert_eq!((w.cache.metrics().lost, w.free()), (1, 4));
    w.check();
}

#[test]
fn rule_8_a_damaged_sleeper_is_recomputed() {
    let memory = Memory::with_room(10);
    let w = world(4, &memory, true);
    drop(w.store(&[1; 8]));
    w.advance(100);
    w.cache.sleep_cold_chunks(ColdRule::default()).unwrap();
    memory.damaged.store(true, SeqCst);
    drop(w.store(&[1; 8]));
    assert_eq!((w.cache.metrics().lost, w.cache.metrics().cached_chunks), (1, 1));
    w.check();
}

#[test]
fn a_full_store_keeps_the_rest_awake_and_quantised_sleep_is_approximate() {
    let memory = Memory::with_room(1);
    let w = world(8, &memory, false);
    drop(w.store(&[1; 8]));
    drop(w.store(&[2; 8]));
    w.advance(100);
    assert_eq!(w.cache.sleep_cold_chunks(ColdRule::default()).unwrap(), 1);
    assert!(matches!(w.cache.sleep_cold_chunks(ColdRule::default()), Err(kvchunk::Error::SleepFull { .. })));
    w.check();
    let hits = [w.hit(&[1; 8]), w.hit(&[2; 8])];
    assert_eq!(hits.iter().filter(|chunk| chunk.is_exact()).count(), 1);
    assert_eq!(w.cache.metrics().approximate_hits, 1);
    assert_eq!(World::new(1).cache.sleep_cold_chunks(ColdRule::default()), Err(kvchunk::Error::NoSleep));
}

#[test]
fn sleepers_go_last_and_clear_takes_them_too() {
    let w = world(4, &Memory::with_room(10), true);
    drop(w.store(&[1; 8]));
    w.advance(100);
    w.cache.sleep_cold_chunks(ColdRule::default()).unwrap();
    drop(w.store(&[2; 8]));
    assert!(w.cache.evict_lru() && w.cache.evict_lru() && !w.cache.evict_lru());
    drop(w.store(&[3; 8]));
    w.advance(100);
    w.cache.sleep_cold_chunks(ColdRule::default()).unwrap();
    w.cache.clear();
    assert_eq!((w.cache.metrics().cached_chunks, w.free()), (0, 4));
    w.check();
}

#[test]
fn sleepers_make_place_when_there_are_as_many_chunks_as_may_be() {
    let store = Store { memory: Memory::with_room(10), exact: true };
    let config = ChunkCacheConfig { max_chunks: 3, ..ChunkCacheConfig::default() };
    let w = World::with(16, config, Some(Arc::new(store)));
    drop(w.store(&[1; 8]));
    drop(w.store(&[2; 8]));
    w.advance(100);
    assert_eq!(w.cache.sleep_cold_chunks(ColdRule::default()).unwrap(), 2);
    for i in 3..6 {
        drop(w.store(&[i; 8]));
    }
    for i in 3..6 {
        assert!(w.lookup(&[i; 8]).is_some(), "what is awake stays, what slept goes");
    }
    assert_eq!(w.cache.metrics().sleeping_chunks, 0);
    w.check();
}

#[derive(Debug)]
struct Panics;

impl SleepStore for Panics {
    fn save(&self, _: &[BlockId]) -> kvchunk::Result<Box<dyn Sleeping>> {
        panic!("on purpose")
    }
}

#[test]
fn a_store_that_panics_has_failed_and_nobody_waits_for_it() {
    let w = World::with(4, ChunkCacheConfig::default(), Some(Arc::new(Panics)));
    drop(w.store(&[1; 8]));
    w.advance(100);
    assert!(matches!(w.cache.sleep_cold_chunks(ColdRule::default()), Err(kvchunk::Error::StorePanicked)));
    drop(w.hit(&[1; 8]));
    w.check();
}

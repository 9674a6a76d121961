//! Latencies are recorded where expected, and only if they are enabled.

use super::*;
use kvchunk::{ColdRule, PositionReindexer};
use kvcore::MutableBlocks;

/// The time that waking takes in this test. Falling asleep takes no time.
const WAKING: Duration = Duration::from_millis(100);

#[derive(Debug)]
struct Slow;

impl SleepStore for Slow {
    fn save(&self, _: &[BlockId]) -> kvchunk::Result<Box<dyn Sleeping>> {
        Ok(Box::new(Self))
    }
}

impl Sleeping for Slow {
    fn restore(&self, _: &MutableBlocks) -> kvchunk::Result<()> {
        std::thread::sleep(WAKING);
        Ok(())
    }

    fn bytes(&self) -> usize {
        0
    }
}

/// Computes a piece, finds it, places it, puts it to sleep, finds it again, puts it to sleep and wakes it.
fn act(stats: bool) -> World {
    let config = ChunkCacheConfig { stats, ..ChunkCacheConfig::default() };
    let w = World::with(8, config, Some(Arc::new(Slow)));
    let rope = kvcore::Rope::new(kvcore::RopeConfig::new(8, 10_000.0), 64).unwrap();
    let reindexer = PositionReindexer::new(&rope);
    let reservation = w.reserve(&[1; 8]);
    std::thread::sleep(Duration::from_millis(10)); // the model at work
    drop(reservation.store());
    w.cache.reindex(&reindexer, w.hit(&[1; 8]), 5).unwrap();
    assert!(w.lookup(&[2; 8]).is_none());
    assert_eq!(w.cache.sleep_cold_chunks(ColdRule::EVERYTHING).unwrap(), 1);
    drop(w.hit(&[1; 8]));
    assert_eq!(w.cache.sleep_cold_chunks(ColdRule::EVERYTHING).unwrap(), 1);
    assert_eq!(w.cache.wake_up_chunks(&[w.hash(&[1; 8])]), []);
    assert_eq!((w.cache.metrics().lookup_count, w.cache.metrics().woken), (4, 2));
    w
}

#[test]
fn times_are_recorded_and_a_lookup_does_not_include_waking() {
    let m = act(true).cache.metrics();
    assert_eq!((m.lookups.count(), m.wakes.count(), m.computes.count(), m.reindexes.count()), (4, 2, 1, 1));
    assert!(m.wakes.sum() >= 2 * WAKING && m.avg_wake_time_ms() >= 100.0, "{:?}", m.wakes);
    assert!(m.computes.sum() >= Duration::from_millis(10));
    assert!(m.lookups.sum() > Duration::ZERO && m.lookups.sum() < WAKING, "{:?}", m.lookups);
    let json = serde_json::to_value(m).unwrap();
    for time in ["lookup_time", "wake_time", "reindex_time", "compute_time"] {
        assert!(json.get(time).is_some(), "{time}");
    }
}

#[test]
fn without_stats_everything_is_counted_and_nothing_timed() {
    let m = act(false).cache.metrics();
    assert_eq!((m.hit_count, m.miss_count, m.slept), (2, 2, 2));
    for times in [m.lookups, m.wakes, m.computes, m.reindexes] {
        assert_eq!((times.count(), times.sum()), (0, Duration::ZERO));
    }
}

//! Single flight: one request computes a piece while the other requests wait. If it fails, the next request
//! takes over.

use super::*;
use std::sync::atomic::{AtomicUsize, Ordering};

#[test]
fn a_second_request_waits_and_finds_what_the_first_computed() {
    let w = World::new(8);
    let first = w.reserve(&[1; 5]);
    let Acquired::Busy(waiter) = w.acquire(&[1; 5]) else { panic!() };
    assert!(!waiter.is_over());
    let stored = first.store();
    assert!(waiter.is_over());
    assert_eq!(w.hit(&[1; 5]).block_ids(), stored.block_ids());
    let m = w.cache.metrics();
    assert_eq!((m.lookup_count, m.hit_count, m.miss_count, m.shared_flights), (2, 1, 1, 1));
}

#[test]
fn when_the_first_fails_the_next_takes_over() {
    let w = World::new(8);
    let first = w.reserve(&[1; 5]);
    let Acquired::Busy(waiter) = w.acquire(&[1; 5]) else { panic!() };
    drop(first); // cancelled in the middle of its computation
    assert!(waiter.is_over());
    drop(w.store(&[1; 5]));
    w.check();
}

#[test]
fn of_eight_threads_that_miss_at_once_one_computes() {
    let w = World::new(64);
    let (computed, failed) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let rope = kvcore::Rope::new(kvcore::RopeConfig::new(8, 10_000.0), 1024).unwrap();
    let reindexer = kvchunk::PositionReindexer::new(&rope);
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (w, computed, failed, reindexer) = (&w, &computed, &failed, &reindexer);
            scope.spawn(move || {
                let piece = w.hasher.pieces(&[9; 30], 64).next().unwrap();
                let position = 10 * thread;
                let got = get_or_compute(&w.cache, w.tenant, &piece, |_| {
                    std::thread::sleep(Duration::from_millis(20));
                    // No lock is held during the computation, so other threads may use the cache.
                    w.cache.metrics();
                    // The first computation fails, and another thread takes over.
                    if failed.fetch_add(1, Ordering::SeqCst) == 0 {
                        return Err(refusal());
                    }
                    computed.fetch_add(1, Ordering::SeqCst);
                    Ok(())
                });
                match got {
                    Ok(hold) => {
                        let placed = w.cache.reindex(reindexer, hold.unwrap(), position).unwrap();
                        assert_eq!(placed.new_position_start(), position);
                    }
                    Err(error) => assert_eq!(error, refusal()),
                }
            });
        }
    });
    assert_eq!((computed.into_inner(), failed.into_inner()), (1, 2));
    assert_eq!(w.cache.metrics().reindexes.count(), 7);
    w.check();
}

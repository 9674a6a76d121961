//! A manager of blocks that are reserved by request.

use kvcore::{BlockId, BlockPool, MutableBlocks};
use std::collections::HashMap;
use std::time::Instant;

use parking_lot::Mutex;

use crate::{Error, PoolMetrics, Result};
use kvchunk::metrics::LatencyHistogram;

/// Reserves blocks of a pool for requests, releases all blocks of a request together, and measures the
/// latency of these calls.
///
/// The manager holds one guard of the pool for each request, all under a single lock. If the pool has no
/// other users, the numbers of available and in-flight blocks always add up to the total number of blocks.
/// Engines that do not need request IDs should use the guards of [`BlockPool`] directly.
///
/// ```
/// use kvcore::BlockPool;
/// use kvmanager::{Error, StorageManager};
/// let manager = StorageManager::new(BlockPool::new(0..8)?);
/// let request = 7;
/// assert_eq!(manager.reserve(request, 3)?.len(), 3);
/// manager.reserve(request, 2)?;                             // adds to the first three
/// assert_eq!((manager.available_count(), manager.inflight_count()), (3, 5));
/// assert!(manager.reserve(8, 4).is_err());                  // all or nothing
/// assert_eq!(manager.release(request)?, 5);
/// assert_eq!(manager.release(request), Err(Error::UnknownRequest(7)));
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug)]
pub struct StorageManager {
    pool: BlockPool,
    // Decision: docs/decisions/managers.md#storagemanager-has-one-lock
    requests: Mutex<Requests>,
    timing: Timing,
}

#[derive(Debug, Default)]
struct Requests {
    held: HashMap<u64, MutableBlocks>,
    // Decision: docs/decisions/managers.md#in-flight-means-held
    in_flight: usize,
    counted: Counted,
}

/// Event counts since the manager was created.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Counted {
    pub(super) reservations: u64,
    pub(super) refused: u64,
    pub(super) releases: u64,
    pub(super) reserved_blocks: u64,
    pub(super) released_blocks: u64,
    pub(super) taken_blocks: u64,
}

#[derive(Debug, Default)]
struct Timing {
    allocation: LatencyHistogram,
    release: LatencyHistogram,
}

impl StorageManager {
    /// Creates a manager for the blocks of a pool. Each reservation and each release reads the clock twice.
    pub fn new(pool: BlockPool) -> Self {
        Self { pool, requests: Mutex::default(), timing: Timing::default() }
    }

    /// Reserves `blocks` more blocks for a request, and returns their IDs. Evicts cached blocks if needed.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::OutOfBlocks`] if there are too few free and evictable blocks. In that case,
    /// nothing is reserved, and the request keeps its earlier blocks.
    pub fn reserve(&self, request: u64, blocks: usize) -> Result<Vec<BlockId>> {
        timed(&self.timing.allocation, || {
            let mut requests = self.requests.lock();
            let reserved = requests.reserve(&self.pool, request, blocks);
            let counted = &mut requests.counted;
            if reserved.is_ok() {
                counted.reservations += 1;
                counted.reserved_blocks += blocks as u64;
                requests.in_flight += blocks;
            } else {
                counted.refused += 1;
            }
            reserved
        })
    }

    /// Frees all blocks of a request, and returns the number of freed blocks.
    ///
    /// # Errors
    /// Returns [`Error::UnknownRequest`] if the request holds no blocks.
    pub fn release(&self, request: u64) -> Result<usize> {
        timed(&self.timing.release, || {
            let mut requests = self.requests.lock();
            let blocks = requests.remove(request)?.len(); // the guard is dropped here, which frees the blocks
            requests.counted.releases += 1;
            requests.counted.released_blocks += blocks as u64;
            Ok(blocks)
        })
    }

    /// Removes a request from the manager, and returns the guard of its blocks, with which the caller can
    /// share the blocks under their keys.
    ///
    /// # Errors
    /// Returns [`Error::UnknownRequest`] if the request holds no blocks.
    pub fn take(&self, request: u64) -> Result<MutableBlocks> {
        let mut requests = self.requests.lock();
        let blocks = requests.remove(request)?;
        requests.counted.taken_blocks += blocks.len() as u64;
        Ok(blocks)
    }

    /// Returns the block IDs of a request, in the order in which they were reserved.
    ///
    /// # Errors
    /// Returns [`Error::UnknownRequest`] if the request holds no blocks.
    pub fn blocks(&self, request: u64) -> Result<Vec<BlockId>> {
        let requests = self.requests.lock();
        let blocks = requests.held.get(&request).ok_or(Error::UnknownRequest(request))?;
        Ok(blocks.ids().to_vec())
    }

    /// Returns the number of blocks that can be reserved: free and evictable blocks.
    pub fn available_count(&self) -> usize {
        let _requests = self.requests.lock(); // no reservation can be in progress while this thread holds the lock
        self.pool.counts().available()
    }

    /// Returns the number of blocks held by requests.
    pub fn inflight_count(&self) -> usize {
        self.requests.lock().in_flight
    }

    /// Returns the pool of the manager.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Returns a snapshot of all metrics. The latencies of calls that end while the snapshot is taken may be
    /// missing.
    pub fn metrics(&self) -> PoolMetrics {
        let requests = self.requests.lock();
        let counted = requests.counted;
        PoolMetrics {
            in_flight: requests.in_flight,
            utilization: share(requests.in_flight, self.pool.range().len()),
            reservations: counted.reservations,
            refused: counted.refused,
            releases: counted.releases,
            reserved_blocks: counted.reserved_blocks,
            released_blocks: counted.released_blocks,
            taken_blocks: counted.taken_blocks,
            allocation: self.timing.allocation.snapshot(),
            release: self.timing.release.snapshot(),
            ..PoolMetrics::of(&self.pool)
        }
    }
}

/// Runs `call`, and records its duration if it succeeds.
fn timed<T>(latencies: &LatencyHistogram, call: impl FnOnce() -> Result<T>) -> Result<T> {
    let start = Instant::now();
    let value = call()?;
    latencies.record(start.elapsed());
    Ok(value)
}

impl Requests {
    fn reserve(&mut self, pool: &BlockPool, request: u64, blocks: usize) -> Result<Vec<BlockId>> {
        if let Some(held) = self.held.get_mut(&request) {
            let before = held.len();
            held.allocate(blocks)?;
            return Ok(held.ids()[before..].to_vec());
        }
        let fresh = pool.allocate(blocks)?;
        let ids = fresh.ids().to_vec();
        self.held.insert(request, fresh);
        Ok(ids)
    }

    fn remove(&mut self, request: u64) -> Result<MutableBlocks> {
        let blocks = self.held.remove(&request).ok_or(Error::UnknownRequest(request))?;
        self.in_flight -= blocks.len();
        Ok(blocks)
    }
}

/// Returns `part / whole`, or 0 if `whole` is 0.
pub(super) fn share(part: usize, whole: usize) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::CoreError;

    fn manager(blocks: u32) -> StorageManager {
        StorageManager::new(BlockPool::new(0..blocks).unwrap())
    }

    const A: u64 = 1;
    const B: u64 = 2;

    #[test]
    fn a_second_reservation_adds_to_the_first() {
        let m = manager(10);
        let mut all = m.reserve(A, 2).unwrap();
        all.extend(m.reserve(A, 3).unwrap());
        assert_eq!(m.blocks(A).unwrap(), all);
        all.sort_unstable();
        all.dedup();
        assert_eq!((all.len(), m.inflight_count(), m.available_count()), (5, 5, 5));
        assert_eq!(m.release(A), Ok(5), "none is lost");
        assert_eq!((m.inflight_count(), m.available_count(), m.metrics().utilization), (0, 10, 0.0));
        m.pool().check_invariants().unwrap();
    }

    #[test]
    fn refused_calls_change_nothing() {
        let m = manager(4);
        m.reserve(A, 3).unwrap();
        let before = (m.blocks(A).unwrap(), m.pool().counts());
        let out = |asked| Err(Error::Core(CoreError::OutOfBlocks { asked, free: 1, evictable: 0, total: 4 }));
        assert_eq!(m.reserve(A, 2), out(2), "to a known request");
        assert_eq!(m.reserve(B, 2), out(2), "to a new one");
        assert_eq!(m.reserve(B, usize::MAX), out(usize::MAX));
        assert_eq!(m.release(B), Err(Error::UnknownRequest(2)));
        assert_eq!(m.blocks(B), Err(Error::UnknownRequest(2)));
        assert!(matches!(m.take(B), Err(Error::UnknownRequest(2))));
        assert_eq!((m.blocks(A).unwrap(), m.pool().counts()), before);
        let metrics = m.metrics();
        assert_eq!((metrics.reservations, metrics.refused, metrics.releases), (1, 3, 0));
        assert_eq!((metrics.allocation.count(), metrics.release.count()), (1, 0), "refusals are not timed");
    }

    #[test]
    fn nothing_reserved_is_a_request_with_no_blocks() {
        let m = manager(2);
        assert_eq!(m.reserve(A, 0), Ok(vec![]));
        assert_eq!((m.blocks(A), m.release(A)), (Ok(vec![]), Ok(0)));
        assert_eq!(m.release(A), Err(Error::UnknownRequest(1)));
    }

    #[test]
    fn blocks_that_are_taken_can_be_shared_and_are_evicted_for_the_next() {
        let m = manager(4);
        m.reserve(A, 3).unwrap();
        let key = kvcore::KeyScope::new("m", b"").root();
        let shared = m.take(A).unwrap().register(None, &[1, 2, 3].map(|n| key.child(&[n]))).unwrap();
        assert_eq!((m.inflight_count(), m.available_count(), m.release(A).is_err()), (0, 1, true));
        drop(shared);
        assert_eq!((m.available_count(), m.pool().counts().cached), (4, 3), "cached ones may be evicted");
        m.reserve(B, 4).unwrap();
        let metrics = m.metrics();
        assert_eq!((metrics.evictions, metrics.taken_blocks, metrics.in_flight), (3, 3, 4));
        assert_eq!(metrics.reserved_blocks, 7);
    }

    #[test]
    fn counters_add_up_under_threads() {
        const THREADS: u64 = 4;
        const ROUNDS: u64 = 300;
        let m = manager(40);
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let m = &m;
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        let request = thread * ROUNDS + round;
                        let (first, second) = (m.reserve(request, 3), m.reserve(request, 4));
                        let expected = first.map_or(0, |b| b.len()) + second.map_or(0, |b| b.len());
                        if expected > 0 {
                            assert_eq!(m.blocks(request).unwrap().len(), expected);
                            assert_eq!(m.release(request), Ok(expected));
                        }
                    }
                });
            }
            for _ in 0..ROUNDS {
                let seen = m.metrics();
                assert_eq!(seen.available + seen.in_flight, seen.total);
                assert_eq!(seen.reserved_blocks - seen.released_blocks, seen.in_flight as u64);
            }
        });
        let end = m.metrics();
        assert_eq!((end.in_flight, end.available), (0, 40));
        assert_eq!(end.reservations + end.refused, 2 * THREADS * ROUNDS);
        assert_eq!(end.reserved_blocks, end.released_blocks);
        assert_eq!((end.allocation.count(), end.release.count()), (end.reservations, end.releases));
        assert!(end.allocation.max() >= end.allocation.quantile(0.5).unwrap());
        m.pool().check_invariants().unwrap();
    }
}

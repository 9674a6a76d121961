//! Checks which pieces are kept, and in which order pieces are evicted.

use super::*;
use kvcore::PolicyKind;

#[test]
fn the_least_recently_used_goes_first_and_held_ones_never() {
    let w = World::new(6);
    let (a, b, c) = ([1; 5], [2; 5], [3; 5]);
    drop(w.store(&a));
    let held = w.store(&b);
    drop(w.store(&c));
    drop(w.hit(&a)); // used again: c is the oldest idle one
    drop(w.store(&[4; 5]));
    assert!(w.lookup(&c).is_none());
    assert!(w.lookup(&a).is_some() && w.lookup(&b).is_some());
    w.check();
    drop(held);
    w.check();
    let m = w.cache.metrics();
    assert_eq!((m.evictions, m.insertions, m.cached_chunks), (1, 4, 3));
    assert_eq!((m.lookup_count, m.hit_count, m.miss_count), (8, 3, 5));
    assert_eq!((m.tokens_computed, m.tokens_reused), (20, 15));
    assert_eq!((m.hit_rate(), m.memory_utilization()), (0.375, 1.0));
    assert_eq!((m.lookups.count(), m.computes.count()), (8, 4));
}

#[test]
fn every_policy_keeps_the_cache_whole() {
    for cache_policy in PolicyKind::ALL {
        let config = ChunkCacheConfig { cache_policy, ..ChunkCacheConfig::default() };
        let w = World::with(20, config, None);
        for round in 0..50u32 {
            let tokens = [round * round % 13; 7];
            match w.acquire(&tokens) {
                Acquired::Hit(chunk) => assert_eq!(chunk.num_tokens(), 7),
                Acquired::Compute(reservation) => drop(reservation.store()),
                other => panic!("{other:?}"),
            }
            w.check();
        }
        assert!(w.cache.metrics().hit_count > 10, "{cache_policy:?}");
        while w.cache.evict_lru() {}
        assert_eq!((w.free(), w.cache.metrics().cached_chunks), (20, 0));
    }
}

#[test]
fn nothing_to_evict_means_no_room_and_nothing_lost() {
    let w = World::new(2);
    let held = w.store(&[1; 8]);
    assert!(matches!(w.acquire(&[2]), Acquired::NoRoom));
    assert!(matches!(w.acquire(&[3; 9]), Acquired::NoRoom), "larger than the pool");
    drop(held);
    assert!(matches!(w.acquire(&[3; 9]), Acquired::NoRoom));
    assert!(w.lookup(&[1; 8]).is_some(), "a hopeless request evicts nothing");
    assert_eq!(w.cache.metrics().uncached, 3);
    w.check();
}

impl World {
    /// Acquires pieces together. Describes each outcome by a letter: a hit, a reservation, busy or no room.
    fn acquire_all(&self, pieces: &[&[u32]]) -> (String, Vec<Acquired>) {
        let pieces: Vec<_> =
            pieces.iter().map(|tokens| (self.hasher.pieces(tokens, usize::MAX).next().unwrap(), 0)).collect();
        let acquired = self.cache.acquire_all(self.tenant, &pieces);
        let letter = |one: &Acquired| match one {
            Acquired::Hit(_) => 'h',
            Acquired::Compute(_) => 'c',
            Acquired::Busy(_) => 'b',
            Acquired::NoRoom => 'n',
        };
        (acquired.iter().map(letter).collect(), acquired)
    }
}

#[test]
fn pieces_that_do_not_fit_together_evict_nothing() {
    let w = World::new(8);
    let (a, b, c, d) = ([1; 8], [2; 8], [3; 8], [4; 16]);
    drop(w.store(&a));
    drop(w.store(&b));
    drop(w.store(&c));
    // One hit, and room for one of the two missing pieces after evictions.
    let (outcomes, acquired) = w.acquire_all(&[&[5; 4], &a, &[6; 24]]);
    assert_eq!((outcomes.as_str(), w.cache.metrics().evictions, w.free()), ("nhn", 0, 2));
    drop(acquired);
    w.check();
    // A repeated piece takes room once.
    let (outcomes, acquired) = w.acquire_all(&[&d, &a, &d, &b]);
    assert_eq!((outcomes.as_str(), w.cache.metrics().evictions), ("chbh", 1));
    // A piece that is being computed takes no room, and pieces of other requests still do.
    let (others, more) = w.acquire_all(&[&d, &c]);
    assert_eq!((others.as_str(), w.cache.metrics().evictions), ("bn", 1));
    drop((acquired, more));
    assert!(w.lookup(&a).is_some() && w.lookup(&b).is_some() && w.lookup(&c).is_none());
    w.check();
}

#[test]
fn pieces_that_are_as_large_as_the_pool_together_fit() {
    let w = World::new(8);
    drop(w.store(&[1; 16]));
    let (outcomes, acquired) = w.acquire_all(&[&[2; 8], &[3; 12], &[4; 12]]);
    assert_eq!((outcomes.as_str(), w.free(), w.cache.metrics().evictions), ("ccc", 0, 1));
    drop(acquired);
    w.check();
}

#[test]
fn the_number_of_chunks_is_limited() {
    let w = World::with(100, ChunkCacheConfig { max_chunks: 2, ..ChunkCacheConfig::default() }, None);
    for i in 0..5 {
        drop(w.store(&[i; 3]));
    }
    assert_eq!((w.cache.metrics().cached_chunks, w.cache.metrics().evictions), (2, 3));
    // A prompt of five chunks reserves all of them before any is stored.
    let reservations: Vec<_> = (10..15).map(|i| w.reserve(&[i; 3])).collect();
    let held: Vec<_> = reservations.into_iter().map(ChunkReservation::store).collect();
    assert_eq!((w.cache.metrics().cached_chunks, held.len()), (2, 5));
    w.check();
    drop(held);
    assert_eq!(w.cache.pool().blocks().counts().cached, 2);
    w.check();
}

#[test]
fn an_abandoned_reservation_leaves_nothing() {
    let w = World::new(4);
    drop(w.reserve(&[1; 9]));
    assert_eq!(w.free(), 4);
    assert!(w.lookup(&[1; 9]).is_none());
    drop(w.reserve(&[1; 9]));
    w.check();
}

#[test]
fn clear_lets_held_chunks_live_until_their_holders_end() {
    let w = World::new(4);
    let held = w.store(&[1; 8]);
    w.cache.clear();
    assert_eq!((w.cache.pool().blocks().counts().shared, w.cache.metrics().cached_chunks), (2, 0));
    let again = w.reserve(&[1; 8]);
    w.check();
    drop((held, again));
    assert_eq!(w.free(), 4);
    w.check();
}

#[test]
fn chunks_are_listed_with_all_their_properties() {
    let w = World::new(8);
    let held = w.store(&[1; 6]);
    w.advance(3);
    drop(w.hit(&[1; 6]));
    w.advance(4);
    let [chunk] = &w.cache.chunks()[..] else { panic!() };
    assert_eq!((chunk.chunk_hash.token_count, chunk.chunk_hash.num_blocks), (6, 2));
    assert_eq!((chunk.ref_count, chunk.access_count, chunk.age_ms, chunk.idle_ms), (1, 1, 7000, 4000));
    assert!(!chunk.asleep && chunk.exact && chunk.tenant == "chunk_cache");
    assert_eq!((held.cached_position_start(), held.num_tokens()), (0, 6));
    assert_eq!(held.chunk_hash(), w.hash(&[1; 6]));
}

#[test]
fn another_systems_chunk_is_an_approximate_hit_if_asked_for() {
    let with = |system: &[u32]| hasher(HashAlgorithm::Blake3, ComputeMode::WithSystem, system);
    for cross_system_reuse in [false, true] {
        let config = ChunkCacheConfig { cross_system_reuse, ..ChunkCacheConfig::default() };
        let mut w = World::with(8, config, None);
        w.hasher = with(&[1, 2, 3]);
        drop(w.store(&[7; 6]));
        w.hasher = with(&[9]);
        match w.acquire(&[7; 6]) {
            Acquired::Hit(chunk) => assert!(cross_system_reuse && !chunk.is_exact()),
            Acquired::Compute(_) => assert!(!cross_system_reuse),
            other => panic!("{other:?}"),
        }
        assert_eq!(w.cache.metrics().approximate_hits, u64::from(cross_system_reuse));
        assert!(matches!(w.acquire(&[8; 6]), Acquired::Compute(_)), "other tokens");
        w.hasher = with(&[1, 2, 3]);
        assert!(w.hit(&[7; 6]).is_exact(), "under its own system it is exact");
        w.check();
    }
}

/// If a chunk moved backward, queries would be rotated to positions beyond the request's last position.
#[test]
fn another_systems_chunk_moves_forward_only() {
    let config = ChunkCacheConfig { cross_system_reuse: true, ..ChunkCacheConfig::default() };
    let mut w = World::with(8, config, None);
    let tokens = [7; 6];
    let acquire = |w: &World, start: i64| {
        let piece = w.hasher.pieces(&tokens, usize::MAX).next().unwrap();
        w.cache.acquire(TenantId::default(), &piece, start)
    };
    w.hasher = hasher(HashAlgorithm::Blake3, ComputeMode::WithSystem, &[1; 5]);
    let Acquired::Compute(reservation) = acquire(&w, 5) else { panic!("nothing is stored") };
    drop(reservation.store());
    for (start, hits) in [(4, false), (5, true), (6, true)] {
        w.hasher = hasher(HashAlgorithm::Blake3, ComputeMode::WithSystem, &vec![2; start as usize]);
        assert_eq!(matches!(acquire(&w, start), Acquired::Hit(_)), hits, "{start}");
    }
    w.check();
}

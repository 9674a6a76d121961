//! A forced hash collision never returns another chunk's KV.

use super::*;

#[test]
fn rule_8_a_collision_is_recomputed_and_the_stored_chunk_stays() {
    let w = World::new(8);
    let a = w.hasher.pieces(&[1, 2, 3, 4], 4).next().unwrap();
    let b = w.hasher.pieces(&[5, 6, 7, 8], 4).next().unwrap().with_hash(a.hash());
    let Acquired::Compute(reservation) = w.cache.acquire(w.tenant, &a, 0) else { panic!() };
    assert!(matches!(w.cache.acquire(w.tenant, &b, 0), Acquired::NoRoom), "beside one under way");
    let held = reservation.store();
    assert!(w.cache.lookup(w.tenant, &b).is_none(), "another chunk's KV must not be served");
    assert!(matches!(w.cache.acquire(w.tenant, &b, 0), Acquired::NoRoom), "computed, not kept");
    assert_eq!(w.cache.lookup(w.tenant, &a).unwrap().block_ids(), held.block_ids());
    w.check();
}

#[test]
fn under_a_weak_hash_a_hit_compares_context_and_all_earlier_tokens() {
    let w = World::new(8);
    let stored = hasher(HashAlgorithm::Xxh3, ComputeMode::WithSystem, &[1, 2]);
    let piece = stored.pieces(&[5, 6, 7, 8], 2).nth(1).unwrap();
    let Acquired::Compute(reservation) = w.cache.acquire(w.tenant, &piece, 0) else { panic!() };
    drop(reservation.store());
    let other_system = hasher(HashAlgorithm::Xxh3, ComputeMode::WithSystem, &[1, 3]);
    let other_root = ChunkHasher::new(
        HashAlgorithm::Xxh3,
        ChunkContext::new(root(b"mallory"), ComputeMode::WithSystem, &[1, 2]),
        BLOCK,
    );
    for (hasher, tokens) in
        [(&other_system, [5, 6, 7, 8]), (&other_root, [5, 6, 7, 8]), (&stored, [5, 9, 7, 8])]
    {
        let forged = hasher.pieces(&tokens, 2).nth(1).unwrap().with_hash(piece.hash());
        assert!(w.cache.lookup(w.tenant, &forged).is_none());
    }
    assert!(w.cache.lookup(w.tenant, &piece).is_some());
}

#[test]
fn two_models_in_one_cache_never_share_a_chunk() {
    let w = World::new(8);
    drop(w.store(&[1; 4]));
    let other = ChunkContext::new(KeyScope::new("other", b"w").root(), ComputeMode::Alone, &[]);
    let other = ChunkHasher::new(HashAlgorithm::Blake3, other, BLOCK);
    let piece = other.pieces(&[1; 4], 64).next().unwrap();
    assert!(matches!(w.cache.acquire(w.tenant, &piece, 0), Acquired::Compute(_)));
}

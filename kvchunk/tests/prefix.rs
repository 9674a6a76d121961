//! Prefixes that are cached to the exact token: the cached part, the part to compute, and a reduced cached
//! part.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use kvbackend_cpu::CpuBackend;
use kvchunk::PrefixFill;
use kvcore::{
    BlockOrder, BlockPool, DType, Error, KeyScope, KvArena, KvLayout, KvShape, MemoryKind, PagedKvCache,
    PromptKeys, SequenceStart,
};

fn cache(blocks: usize) -> PagedKvCache {
    let layout = KvLayout::new(KvShape {
        num_layers: 1,
        num_blocks: blocks,
        block_size: 4,
        k_heads: 1,
        v_heads: 1,
        k_dim: 2,
        v_dim: 2,
        format: DType::F32.into(),
        order: BlockOrder::TokenMajor,
    })
    .unwrap();
    let backend = CpuBackend::new();
    let arena = KvArena::allocate(backend.as_ref(), MemoryKind::Device, Arc::new(layout)).unwrap();
    PagedKvCache::new(arena, BlockPool::new(0..blocks as u32).unwrap()).unwrap()
}

#[test]
fn less_of_a_cached_prefix_may_be_taken_and_known_blocks_stay() {
    let mut cache = cache(8);
    let root = KeyScope::new("m", b"").root();
    let tokens: Vec<u32> = (0..10).collect();
    let known = PrefixFill::new(cache.kv_pool(), Some(root), &tokens).unwrap().finish().unwrap();
    for (most, taken) in [(10, 10), (9, 8), (8, 8), (5, 4), (0, 0)] {
        let mut fill = PrefixFill::new(cache.kv_pool(), Some(root), &tokens).unwrap();
        fill.take_at_most(most).unwrap();
        assert_eq!((fill.cached(), fill.slots().len(), fill.segment().len), (taken, 10 - taken, 10));
        assert_eq!(fill.segment().blocks[..taken / 4], known.segment().blocks[..taken / 4]);
        let filled = fill.finish().unwrap();
        assert_eq!(filled.segment().blocks, known.segment().blocks, "what is known under its key");
    }
    // Other guards hold the prefix and all other blocks, so the fill cannot get its own blocks.
    let mut fill = PrefixFill::new(cache.kv_pool(), Some(root), &tokens).unwrap();
    let taken = cache.pool().allocate(5).unwrap();
    assert!(matches!(fill.take_at_most(0), Err(kvchunk::Error::Core(Error::OutOfBlocks { .. }))));
    drop(fill);
    assert_eq!(known.len(), 10);
    // No other guard holds the prefix, so its blocks are evicted for the fill.
    drop(known);
    let mut fill = PrefixFill::new(cache.kv_pool(), Some(root), &tokens).unwrap();
    fill.take_at_most(0).unwrap();
    assert_eq!((fill.cached(), fill.slots().len()), (0, 10));
    drop((fill, taken));
    assert_eq!(cache.pool().counts().free + cache.pool().counts().cached, 8);
    cache.pool().check_invariants().unwrap();
    let id = cache.create(SequenceStart::default()).unwrap();
    cache.free(id).unwrap();
}

#[test]
fn a_filled_prefix_is_found_to_the_token() {
    let mut cache = cache(8);
    let root = KeyScope::new("m", b"").root();
    let tokens: Vec<u32> = (0..6).collect();
    let fill = PrefixFill::new(cache.kv_pool(), Some(root), &tokens).unwrap();
    assert_eq!((fill.cached(), fill.slots().len()), (0, 6));
    let first = fill.finish().unwrap();
    assert_eq!((first.len(), first.segment().blocks.len()), (6, 2));
    let again = PrefixFill::new(cache.kv_pool(), Some(root), &tokens).unwrap();
    assert_eq!((again.cached(), again.slots().len()), (6, 0));
    let longer = PrefixFill::new(cache.kv_pool(), Some(root), &[0, 1, 2, 3, 4, 5, 6]).unwrap();
    assert_eq!(longer.cached(), 4, "a partial block is only for exactly its tokens");
    let whole = PrefixFill::new(cache.kv_pool(), Some(root), &tokens[..4]).unwrap();
    assert_eq!(whole.cached(), 4);
    let (sequence, cached) = cache.create_with_prefix(&PromptKeys::new(root, &tokens, 4)).unwrap();
    assert_eq!(cached, 4, "ordinary prompts share the full blocks");
    cache.free(sequence).unwrap();
    drop((first, again.finish().unwrap(), longer, whole));
    cache.pool().check_invariants().unwrap();
    assert_eq!(cache.pool().counts().cached, 2);
    drop(PrefixFill::new(cache.kv_pool(), None, &tokens).unwrap().finish().unwrap());
    assert_eq!(cache.pool().counts().cached, 2, "without a root nothing is found or kept");
}

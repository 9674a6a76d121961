//! Tests of a paged cache's sequences and prefixes that use metadata only: the arena has no memory.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use kvcore::{
    BlockKey, BlockOrder, BlockPool, DType, Error, KeyScope, KvArena, KvLayout, KvShape, MemoryKind,
    PagedKvCache, PromptKeys, SequenceId, SequenceStart, Storage,
};

#[derive(Debug)]
struct Nothing(usize, u64);

impl Storage for Nothing {
    fn len(&self) -> usize {
        self.0
    }
    fn address(&self) -> u64 {
        self.1
    }
    fn kind(&self) -> MemoryKind {
        MemoryKind::System
    }
    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

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
    let (k, v) = (Arc::new(Nothing(layout.k_bytes(), 0)), Arc::new(Nothing(layout.v_bytes(), 4096)));
    let arena = KvArena::from_storage(k, v, Arc::new(layout)).unwrap();
    PagedKvCache::new(arena, BlockPool::new(0..blocks as u32).unwrap()).unwrap()
}

fn fill(cache: &mut PagedKvCache, root: BlockKey, tokens: &[u32]) -> (SequenceId, usize) {
    let (id, cached) = cache.create_with_prefix(&PromptKeys::new(root, tokens, 4)).unwrap();
    cache.grow(id, tokens.len() - cached).unwrap();
    cache.commit(id, &tokens[cached..]).unwrap();
    (id, cached)
}

#[test]
fn a_prefix_is_shared_block_by_block_and_one_token_is_left() {
    let mut cache = cache(8);
    let root = KeyScope::new("m", b"").root();
    let tokens: Vec<u32> = (0..8).collect();
    let (a, cached) = fill(&mut cache, root, &tokens);
    assert_eq!(cached, 0);
    let (b, cached) = fill(&mut cache, root, &tokens);
    assert_eq!(cached, 4, "the last block is computed again, so that there are logits");
    assert_eq!(cache.blocks(a).unwrap()[..], cache.blocks(b).unwrap()[..], "and found to be the known one");
    let (c, cached) = fill(&mut cache, root, &[0, 1, 2, 3, 9, 9]);
    assert_eq!((cached, cache.pool().counts().shared), (4, 2));
    for id in [a, b, c] {
        cache.free(id).unwrap();
    }
    assert_eq!(cache.pool().counts().cached, 2);
    cache.pool().check_invariants().unwrap();
}

#[test]
fn after_a_rollback_blocks_are_registered_under_their_contents() {
    let root = KeyScope::new("m", b"").root();
    let mut cache = cache(8);
    let (id, _) = fill(&mut cache, root, &[0, 1, 2, 3, 4, 5]);
    assert!(cache.commit(id, &[9]).is_err(), "a token that was never grown");
    cache.truncate(id, 5).unwrap();
    cache.grow(id, 3).unwrap();
    cache.commit(id, &[7, 8, 9]).unwrap();
    let (other, cached) =
        cache.create_with_prefix(&PromptKeys::new(root, &[0, 1, 2, 3, 4, 7, 8, 9, 0], 4)).unwrap();
    assert_eq!(cached, 8);
    let (stale, cached) =
        cache.create_with_prefix(&PromptKeys::new(root, &[0, 1, 2, 3, 4, 5, 7, 8, 0], 4)).unwrap();
    assert_eq!(cached, 4, "what was rolled back is in no key");
    // Truncate to before a shared block: the key chain must be shortened with the table.
    cache.truncate(id, 4).unwrap();
    cache.grow(id, 4).unwrap();
    cache.commit(id, &[6, 6, 6, 6]).unwrap();
    let (again, cached) =
        cache.create_with_prefix(&PromptKeys::new(root, &[0, 1, 2, 3, 6, 6, 6, 6, 0], 4)).unwrap();
    assert_eq!(cached, 8);
    for id in [id, other, stale, again] {
        cache.free(id).unwrap();
    }
    cache.pool().check_invariants().unwrap();
}

#[test]
fn a_failed_grow_changes_nothing() {
    let mut cache = cache(2);
    let id = cache.create(SequenceStart::default()).unwrap();
    cache.grow(id, 3).unwrap();
    assert!(matches!(cache.grow(id, 6), Err(Error::OutOfBlocks { asked: 2, free: 1, .. })));
    assert_eq!((cache.len(id).unwrap(), cache.pool().counts().free), (3, 1));
    cache.free(id).unwrap();
    assert_eq!(cache.free(id), Err(Error::UnknownSequence(0)));
    assert_eq!(cache.grow(id, 1), Err(Error::UnknownSequence(0)));
    cache.pool().check_invariants().unwrap();
}

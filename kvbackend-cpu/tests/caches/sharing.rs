//! Forks, swaps and prefixes: checks blocks that several sequences share, and their bytes.

use std::sync::Arc;

use kvbackend_cpu::Execution::{self, Deferred, Immediate};
use kvcore::{
    BlockKey, BlockPool, Error, EventQueue, Gather, KeyScheme, KeyScope, KvArena, KvEvent, PagedKvCache,
    PoolConfig, PromptKeys, SequenceId, SequenceStart, VllmChain, VllmExtras, WriteSlots,
};
use rstest::rstest;

use crate::common::{DIM, HEADS, Memory};

fn cache(m: &Memory, blocks: u32) -> PagedKvCache {
    PagedKvCache::new(m.arena(blocks as usize, 4), BlockPool::new(0..blocks).unwrap()).unwrap()
}

pub(crate) fn root() -> BlockKey {
    KeyScope::new("m", b"w").root()
}

/// Admits a whole prompt.
pub(crate) fn admit(
    cache: &mut PagedKvCache,
    scheme: impl Into<KeyScheme>,
    tokens: &[u32],
) -> Result<(SequenceId, usize, WriteSlots), Error> {
    let block_size = cache.kv_pool().block_size();
    cache.admit(&PromptKeys::new(scheme, tokens, block_size), tokens.len())
}

/// Grows a sequence by `tokens` tokens, and writes rows of consecutive numbers starting at `first` to both
/// layers.
pub(crate) fn write(m: &Memory, cache: &mut PagedKvCache, id: SequenceId, tokens: usize, first: f32) {
    let slots = cache.grow(id, tokens).unwrap();
    for layer in 0..2 {
        let rows = m.tensor(&[tokens, HEADS, DIM], first + 0.5 * layer as f32);
        cache.write(id, m.stream.as_ref(), layer, rows.clone(), rows, &slots).unwrap();
    }
}

/// Returns the keys and values of all given slots in both layers.
pub(crate) fn bytes(m: &Memory, arena: &KvArena, slots: &Arc<[i64]>) -> Vec<f32> {
    (0..2)
        .flat_map(|layer| {
            let (k, v) =
                (m.tensor(&[slots.len(), HEADS, DIM], 0.0), m.tensor(&[slots.len(), HEADS, DIM], 0.0));
            let op = Gather {
                arena: arena.clone(),
                layer,
                slots: Arc::clone(slots),
                k: k.clone(),
                v: v.clone(),
                rotation: None,
            };
            m.stream.gather(&op).unwrap();
            [m.values(&k), m.values(&v)].concat()
        })
        .collect()
}

pub(crate) fn contents(m: &Memory, cache: &PagedKvCache, id: SequenceId) -> Vec<f32> {
    let slots = cache.slots(id, 0..cache.len(id).unwrap()).unwrap();
    bytes(m, cache.arena(), slots.slots())
}

#[rstest]
fn forks_share_until_they_write_and_keep_their_own_tokens(
    #[values(Immediate, Deferred)] execution: Execution,
) {
    let m = Memory::new(execution);
    let mut cache = cache(&m, 12);
    let a = cache.create(SequenceStart::default()).unwrap();
    write(&m, &mut cache, a, 6, 10.0);
    let before = contents(&m, &cache, a);
    let twins = [cache.fork(a).unwrap(), cache.fork(a).unwrap()];
    assert_eq!((cache.pool().counts().shared, cache.pool().counts().mutable), (2, 0));
    for (i, id) in [a, twins[0], twins[1]].into_iter().enumerate() {
        assert!(matches!(cache.grow(id, 1), Err(Error::SharedBlock { token: 6, .. })));
        // By the last call, this sequence is the block's only holder, so nothing is copied.
        assert_eq!(cache.copy_on_write(&[id], m.stream.as_ref()), Ok(usize::from(i < 2)));
        assert_eq!(cache.copy_on_write(&[id], m.stream.as_ref()), Ok(0), "once");
        write(&m, &mut cache, id, 1, 100.0 * (i + 1) as f32);
    }
    // The first six tokens are equal, and the seventh differs in each sequence.
    let all: Vec<Vec<f32>> = [a, twins[0], twins[1]].map(|id| contents(&m, &cache, id)).into();
    let row = HEADS * DIM;
    for (i, contents) in all.iter().enumerate() {
        for (part, old) in contents.chunks(7 * row).zip(before.chunks(6 * row)) {
            assert_eq!(part[..6 * row], *old);
            assert_eq!(part[6 * row].floor(), 100.0 * (i + 1) as f32);
        }
    }
    assert_eq!(cache.pool().counts().shared, 1, "the full block is still shared");
    for id in [twins[1], a, twins[0]] {
        cache.free(id).unwrap();
    }
    assert_eq!(cache.pool().counts().free, 12);
    cache.pool().check_invariants().unwrap();
}

#[rstest]
fn a_fork_that_finds_no_block_leaves_both_as_they_were(#[values(Immediate, Deferred)] execution: Execution) {
    let m = Memory::new(execution);
    let mut cache = cache(&m, 2);
    let a = cache.create(SequenceStart::default()).unwrap();
    write(&m, &mut cache, a, 6, 1.0);
    let b = cache.fork(a).unwrap();
    let before = contents(&m, &cache, a);
    assert!(matches!(cache.copy_on_write(&[b], m.stream.as_ref()), Err(Error::OutOfBlocks { .. })));
    assert_eq!((contents(&m, &cache, a), contents(&m, &cache, b)), (before.clone(), before));
    assert_eq!(cache.pool().counts().shared, 2);
}

#[rstest]
fn forks_of_a_prompt_commit_under_the_same_keys(#[values(Immediate, Deferred)] execution: Execution) {
    let m = Memory::new(execution);
    let mut cache = cache(&m, 12);
    let tokens = [1, 2, 3, 4, 5, 6];
    let (a, cached, slots) = admit(&mut cache, root(), &tokens).unwrap();
    assert_eq!((cached, slots.len()), (0, 6));
    cache.commit(a, &tokens).unwrap();
    let b = cache.fork(a).unwrap();
    cache.copy_on_write(&[b], m.stream.as_ref()).unwrap();
    cache.grow(b, 2).unwrap();
    cache.commit(b, &[7, 8]).unwrap();
    let (c, cached, _) = admit(&mut cache, root(), &[1, 2, 3, 4, 5, 6, 7, 8, 9]).unwrap();
    assert_eq!(cached, 8, "the fork's second block is found");
    assert_eq!(cache.blocks(c).unwrap()[..2], cache.blocks(b).unwrap()[..2]);
    for id in [a, b, c] {
        cache.free(id).unwrap();
    }
    cache.pool().check_invariants().unwrap();
}

#[rstest]
fn a_swapped_sequence_comes_back_with_its_bytes_and_its_prefix(
    #[values(Immediate, Deferred)] execution: Execution,
) {
    let m = Memory::new(execution);
    let mut cache = cache(&m, 8);
    let (host, host_pool) = (m.arena(5, 4), BlockPool::new(0..5).unwrap());
    let tokens: Vec<u32> = (0..10).collect();
    let (mut id, _) = cache.create_with_prefix(&PromptKeys::new(root(), &tokens, 4)).unwrap();
    write(&m, &mut cache, id, 10, 3.0);
    cache.commit(id, &tokens).unwrap();
    let before = contents(&m, &cache, id);
    for known in [8, 4, 0] {
        let out = cache.swap_out(id, m.stream.as_ref(), &host, &host_pool).unwrap();
        assert_eq!((out.len(), host_pool.counts().mutable, cache.num_sequences()), (10, 3, 0));
        // Meanwhile, other code allocates blocks of the prefix, so that only `known` tokens of the prefix
        // remain.
        let taken = cache.pool().allocate(8 - known / 4).unwrap();
        assert_eq!(cache.pool().counts().cached, known / 4);
        drop(taken);
        id = cache.swap_in(&out, m.stream.as_ref()).unwrap();
        drop(out);
        assert_eq!(contents(&m, &cache, id), before, "{known} tokens known");
        assert_eq!((host_pool.counts().free, cache.len(id).unwrap()), (5, 10));
        cache.grow(id, 1).unwrap();
        cache.truncate(id, 10).unwrap();
        cache.pool().check_invariants().unwrap();
    }
}

#[rstest]
fn a_swap_without_room_changes_nothing(#[values(Immediate, Deferred)] execution: Execution) {
    let m = Memory::new(execution);
    let mut cache = cache(&m, 4);
    let (host, small) = (m.arena(5, 4), BlockPool::new(0..2).unwrap());
    let id = cache.create(SequenceStart::default()).unwrap();
    write(&m, &mut cache, id, 10, 3.0);
    let before = contents(&m, &cache, id);
    assert!(matches!(
        cache.swap_out(id, m.stream.as_ref(), &host, &small),
        Err(Error::OutOfBlocks { asked: 3, free: 2, .. })
    ));
    let other = m.arena(5, 2);
    assert!(cache.swap_out(id, m.stream.as_ref(), &other, &BlockPool::new(0..5).unwrap()).is_err());
    assert_eq!((contents(&m, &cache, id), small.counts().free), (before.clone(), 2));
    let pool = BlockPool::new(0..5).unwrap();
    let out = cache.swap_out(id, m.stream.as_ref(), &host, &pool).unwrap();
    let hog = cache.pool().allocate(3).unwrap();
    let refused = cache.swap_in(&out, m.stream.as_ref()).unwrap_err();
    assert!(matches!(refused, Error::OutOfBlocks { asked: 3, .. }));
    drop(hog);
    let id = cache.swap_in(&out, m.stream.as_ref()).unwrap();
    drop(out);
    assert_eq!((contents(&m, &cache, id), pool.counts().free), (before, 5));
}

#[rstest]
fn admission_leaves_the_watermark_and_takes_all_or_nothing(
    #[values(Immediate, Deferred)] execution: Execution,
) {
    let m = Memory::new(execution);
    let pool = BlockPool::with_config(0..6, PoolConfig::default().watermark(2)).unwrap();
    let mut cache = PagedKvCache::new(m.arena(6, 4), pool).unwrap();
    let tokens: Vec<u32> = (0..14).collect();
    let (a, _, _) = admit(&mut cache, root(), &tokens).unwrap();
    cache.commit(a, &tokens).unwrap();
    let refused = admit(&mut cache, root(), &[9; 3]);
    assert!(matches!(refused, Err(Error::OutOfBlocks { asked: 3, .. })), "one, and two for who runs");
    assert!(cache.grow(a, 5).is_ok(), "a running sequence may use the watermark");
    cache.free(a).unwrap();
    // A refused prompt changes neither the held blocks nor the next block to evict.
    let counts = cache.pool().counts();
    let long: Vec<u32> = (0..30).collect();
    assert!(admit(&mut cache, root(), &long).is_err());
    assert_eq!((cache.pool().counts(), cache.num_sequences()), (counts, 0));
    let (b, cached, slots) = admit(&mut cache, root(), &tokens).unwrap();
    assert_eq!((cached, slots.len()), (12, 2));
    cache.free(b).unwrap();
    let whole: Vec<u32> = (100..124).collect();
    assert!(admit(&mut cache, root(), &whole).is_ok(), "the watermark is nobody's while nobody runs");
}

#[rstest]
fn a_cache_may_use_vllms_keys_and_tenants_share_nothing(#[values(Immediate, Deferred)] execution: Execution) {
    let m = Memory::new(execution);
    let events = Arc::new(EventQueue::new(100));
    let pool = BlockPool::with_config(0..20, PoolConfig::default().events(events.clone())).unwrap();
    let mut cache = PagedKvCache::new(m.arena(20, 4), pool).unwrap();
    let tokens: Vec<u32> = (100..113).collect();
    let extras = |salt: &str| VllmExtras { cache_salt: Some(salt.to_owned()), ..VllmExtras::default() };
    let scheme = |salt| KeyScheme::vllm(VllmChain::default(), extras(salt));
    let (a, cached, _) = admit(&mut cache, scheme("alice"), &tokens[..6]).unwrap();
    assert_eq!(cached, 0);
    cache.commit(a, &tokens[..6]).unwrap();
    // The tokens are committed in two steps. The salt affects only the key of the first block, wherever a
    // commit begins.
    cache.grow(a, 7).unwrap();
    cache.commit(a, &tokens[6..9]).unwrap();
    cache.commit(a, &tokens[9..]).unwrap();
    let stored: Vec<BlockKey> = events
        .drain()
        .0
        .into_iter()
        .flat_map(|event| match event {
            KvEvent::Stored { keys, .. } => keys,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(stored, VllmChain::default().keys(&tokens, 4, &extras("alice")));
    let (b, cached) = cache.create_with_prefix(&PromptKeys::new(scheme("alice"), &tokens, 4)).unwrap();
    assert_eq!(cached, 12);
    let (c, cached) = cache.create_with_prefix(&PromptKeys::new(scheme("bob"), &tokens, 4)).unwrap();
    assert_eq!(cached, 0, "another tenant");
    // With this crate's own keys, a salt also separates tenants.
    let salted = |salt: &[u8]| KeyScope::new("m", b"w").tenant_salt(salt).root();
    let (d, _, _) = admit(&mut cache, salted(b"alice"), &tokens[..6]).unwrap();
    cache.commit(d, &tokens[..6]).unwrap();
    for (salt, expected) in [(b"alice".as_slice(), 4), (b"bob", 0), (b"", 0)] {
        let (e, cached) = cache.create_with_prefix(&PromptKeys::new(salted(salt), &tokens, 4)).unwrap();
        assert_eq!(cached, expected, "{salt:?}");
        cache.free(e).unwrap();
    }
    for id in [a, b, c, d] {
        cache.free(id).unwrap();
    }
    cache.pool().check_invariants().unwrap();
}

//! Several sequences in one step: slots, copies before a write, and prompts whose keys are computed only
//! once.

use std::sync::Arc;

use kvbackend_cpu::Execution::{self, Deferred, Immediate};
use kvcore::Compared::Number;
use kvcore::{
    BlockPool, Error, EventQueue, KvCache, KvEvent, PagedKvCache, PoolConfig, PromptKeys, SequenceId,
    SequenceStart, StaticKvCache, WriteSlots,
};
use proptest::prelude::*;
use rstest::rstest;

use crate::common::{DIM, HEADS, Memory};
use crate::faulty::{Faulty, refusal};
use crate::sharing::{contents, root, write};

fn cache(m: &Memory, blocks: u32) -> PagedKvCache {
    PagedKvCache::new(m.arena(blocks as usize, 4), BlockPool::new(0..blocks).unwrap()).unwrap()
}

fn sequences(cache: &mut dyn KvCache, count: usize) -> Vec<SequenceId> {
    (0..count).map(|_| cache.create(SequenceStart::default()).unwrap()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Runs steps of random sizes. Each step succeeds for all sequences or changes nothing, and its slots are
    /// the slots of its sequences, in order.
    #[test]
    fn a_batch_grows_as_its_sequences_would_or_not_at_all(
        steps in prop::collection::vec(prop::collection::vec(0usize..9, 5), 1..20),
    ) {
        let m = Memory::new(Immediate);
        let mut cache = cache(&m, 24);
        let ids = sequences(&mut cache, 5);
        let mut slots = WriteSlots::default();
        for growth in steps {
            let batch: Vec<_> = ids.iter().copied().zip(growth).collect();
            let before: Vec<usize> = ids.iter().map(|&id| cache.len(id).unwrap()).collect();
            let missing: usize = batch.iter().map(|&(id, n)| KvCache::missing_blocks(&cache, id, n).unwrap()).sum();
            let (free, old) = (cache.pool().counts().free, slots.to_vec());
            match cache.grow_batch(&batch, &mut slots) {
                Ok(()) => {
                    let own = |(&(id, n), &len): (&(SequenceId, usize), &usize)| cache.slots(id, len..len + n).unwrap().to_vec();
                    prop_assert_eq!(slots.to_vec(), batch.iter().zip(&before).flat_map(own).collect::<Vec<_>>());
                    prop_assert_eq!(cache.pool().counts().free, free - missing);
                    slots.check().unwrap();
                }
                Err(error) => {
                    prop_assert!(missing > free && matches!(error, Error::OutOfBlocks { .. }), "{}", error);
                    let after: Vec<usize> = ids.iter().map(|&id| cache.len(id).unwrap()).collect();
                    prop_assert_eq!((after, slots.to_vec(), cache.pool().counts().free), (before, old, free));
                }
            }
            cache.pool().check_invariants().unwrap();
        }
    }
}

#[test]
fn a_batch_is_refused_for_a_sequence_twice_an_unknown_one_and_a_shared_tail() {
    let m = Memory::new(Immediate);
    let mut paged = cache(&m, 8);
    let mut fixed = StaticKvCache::new(m.arena(3, 10)).unwrap();
    let caches: [&mut dyn KvCache; 2] = [&mut paged, &mut fixed];
    for cache in caches {
        let mut slots = WriteSlots::default();
        let ids = sequences(cache, 2);
        let twice = cache.grow_batch(&[(ids[0], 1), (ids[1], 1), (ids[0], 2)], &mut slots).unwrap_err();
        assert!(matches!(twice, Error::Twice { what: "sequence of a batch", .. }), "{twice}");
        cache.free(ids[1]).unwrap();
        let unknown = cache.grow_batch(&[(ids[0], 1), (ids[1], 1)], &mut slots);
        assert!(matches!(unknown, Err(Error::UnknownSequence(_))));
        assert_eq!((cache.len(ids[0]).unwrap(), slots.len()), (0, 0));
        cache.grow_batch(&[(ids[0], 3)], &mut slots).unwrap();
        assert_eq!((cache.len(ids[0]).unwrap(), slots.len()), (3, 3));
        assert!(cache.grow_batch(&[(ids[0], usize::MAX)], &mut slots).is_err(), "no such length");
    }
    let id = paged.create(SequenceStart::default()).unwrap();
    paged.grow(id, 6).unwrap();
    let (twin, mut slots) = (paged.fork(id).unwrap(), WriteSlots::default());
    let shared = paged.grow_batch(&[(twin, 1)], &mut slots);
    assert!(matches!(shared, Err(Error::SharedBlock { token: 6, .. })));
    paged.grow_batch(&[(twin, 0)], &mut slots).unwrap();
}

/// A batch has the permits of its sequences, so freeing a sequence voids its slots.
#[test]
fn slots_of_a_batch_are_void_as_soon_as_one_of_its_blocks_is_gone() {
    let m = Memory::new(Immediate);
    let mut cache = cache(&m, 8);
    let ids = sequences(&mut cache, 3);
    let mut slots = WriteSlots::default();
    cache.grow_batch(&[(ids[0], 2), (ids[1], 5), (ids[2], 1)], &mut slots).unwrap();
    let rows = m.tensor(&[8, HEADS, DIM], 1.0);
    cache.write(ids[0], m.stream.as_ref(), 0, rows.clone(), rows.clone(), &slots).unwrap();
    cache.free(ids[1]).unwrap();
    assert_eq!(slots.check(), Err(Error::PermitVoid { what: "slots" }));
    let refused = cache.write(ids[0], m.stream.as_ref(), 0, rows.clone(), rows, &slots);
    assert!(matches!(refused, Err(Error::PermitVoid { .. })));
}

#[rstest]
fn forks_get_their_tails_by_one_copy(#[values(Immediate, Deferred)] execution: Execution) {
    let m = Memory::new(execution);
    let mut cache = cache(&m, 12);
    let a = cache.create(SequenceStart::default()).unwrap();
    write(&m, &mut cache, a, 6, 10.0);
    let before = contents(&m, &cache, a);
    let mut all = vec![a];
    all.extend((0..3).map(|_| cache.fork(a).unwrap()));
    let counts = cache.pool().counts();
    let faulty = Faulty::new(&m, "copy_blocks");
    assert_eq!(cache.copy_on_write(&all, &faulty), Err(refusal()));
    assert_eq!(cache.pool().counts(), counts, "nothing has changed");
    let counting = Faulty::new(&m, "nothing");
    assert_eq!(cache.copy_on_write(&all, &counting), Ok(3), "the last takes the block back");
    assert_eq!(counting.launched.into_inner(), 1);
    let mut slots = WriteSlots::default();
    cache.grow_batch(&all.iter().map(|&id| (id, 1)).collect::<Vec<_>>(), &mut slots).unwrap();
    for (i, &id) in all.iter().enumerate() {
        let rows = m.tensor(&[1, HEADS, DIM], 100.0 * (i + 1) as f32);
        for layer in 0..2 {
            cache
                .write(
                    id,
                    m.stream.as_ref(),
                    layer,
                    rows.clone(),
                    rows.clone(),
                    &slots.part(i..i + 1).unwrap(),
                )
                .unwrap();
        }
    }
    let row = HEADS * DIM;
    for (i, &id) in all.iter().enumerate() {
        for (part, old) in contents(&m, &cache, id).chunks(7 * row).zip(before.chunks(6 * row)) {
            assert_eq!((&part[..6 * row], part[6 * row].floor()), (old, 100.0 * (i + 1) as f32));
        }
    }
    for id in all {
        cache.free(id).unwrap();
    }
    assert_eq!(cache.pool().counts().free, 12);
}

#[test]
fn forks_without_room_for_their_tails_stay_as_they_were() {
    let m = Memory::new(Immediate);
    let mut cache = cache(&m, 3);
    let a = cache.create(SequenceStart::default()).unwrap();
    write(&m, &mut cache, a, 6, 1.0);
    let all = [a, cache.fork(a).unwrap(), cache.fork(a).unwrap()];
    let before: Vec<_> = all.iter().map(|&id| contents(&m, &cache, id)).collect();
    assert!(matches!(cache.copy_on_write(&all, m.stream.as_ref()), Err(Error::OutOfBlocks { .. })));
    assert_eq!(all.iter().map(|&id| contents(&m, &cache, id)).collect::<Vec<_>>(), before);
    assert_eq!((cache.pool().counts().shared, cache.pool().counts().free), (2, 1));
}

#[rstest]
fn a_prompt_in_pieces_is_registered_under_the_keys_that_were_made_for_it(
    #[values(Immediate, Deferred)] execution: Execution,
) {
    let m = Memory::new(execution);
    let events = Arc::new(EventQueue::new(100));
    let pool =
        BlockPool::with_config(0..12, PoolConfig::default().events(events.clone()).watermark(1)).unwrap();
    let mut cache = PagedKvCache::new(m.arena(12, 4), pool).unwrap();
    let tokens: Vec<u32> = (0..22).collect();
    let prompt = PromptKeys::new(root(), &tokens, 4);
    let (a, cached, first) = cache.admit(&prompt, 7).unwrap();
    assert_eq!((cached, first.len(), cache.pool().counts().mutable), (0, 7, 2), "blocks of the piece alone");
    cache.commit(a, &tokens[..7]).unwrap();
    for piece in [7..12, 12..22] {
        cache.grow(a, piece.len()).unwrap();
        cache.commit(a, &tokens[piece]).unwrap();
    }
    // The answer fills the prompt's last block and one more block.
    cache.grow(a, 6).unwrap();
    cache.commit(a, &[90, 91, 92, 93, 94, 95]).unwrap();
    let stored = || {
        let keys = |event| match event {
            KvEvent::Stored { keys, .. } => keys,
            other => panic!("{other:?}"),
        };
        events.drain().0.into_iter().flat_map(keys).collect::<Vec<_>>()
    };
    let all: Vec<u32> = tokens.iter().copied().chain(90..96).collect();
    assert_eq!(stored(), root().chain(&all, 4));
    // The next request finds all stored blocks, and allocates blocks only for its piece.
    let (b, cached, slots) = cache.admit(&prompt, 1).unwrap();
    assert_eq!((cached, slots.len(), cache.len(b).unwrap()), (20, 1, 21));
    // Tokens that differ from the prompt's get the keys of the actual tokens.
    let (c, cached, _) = cache.admit(&PromptKeys::new(root(), &tokens[..6], 4), 6).unwrap();
    assert_eq!(cached, 4);
    cache.grow(c, 2).unwrap();
    cache.commit(c, &[70, 71, 72, 73]).unwrap();
    assert_eq!(stored(), [root().child(&tokens[..4]).child(&[70, 71, 72, 73])]);
    let other = PromptKeys::new(root(), &tokens, 8);
    assert!(matches!(
        cache.admit(&other, 1),
        Err(Error::Mismatch { expected: Number(4), got: Number(8), .. })
    ));
    for id in [a, b, c] {
        cache.free(id).unwrap();
    }
    cache.pool().check_invariants().unwrap();
}

//! Sequences whose first blocks have been freed: the blocks that they still hold keep their bytes through
//! forks, swaps, commits and rollbacks.

use kvbackend_cpu::Execution::{self, Deferred, Immediate};
use kvcore::{BlockPool, Error, PagedKvCache, PromptKeys, SequenceId, SequenceStart};
use rstest::rstest;

use crate::common::Memory;
use crate::sharing::{bytes, root, write};

fn cache(m: &Memory, blocks: u32) -> PagedKvCache {
    PagedKvCache::new(m.arena(blocks as usize, 4), BlockPool::new(0..blocks).unwrap()).unwrap()
}

/// Returns the bytes of a sequence's tokens, starting at token `first`.
fn from(m: &Memory, cache: &PagedKvCache, id: SequenceId, first: usize) -> Vec<f32> {
    let slots = cache.slots(id, first..cache.len(id).unwrap()).unwrap();
    bytes(m, cache.arena(), slots.slots())
}

#[rstest]
fn held_blocks_keep_their_bytes_through_all_operations(
    #[values(Immediate, Deferred)] execution: Execution,
    #[values(false, true)] keyed: bool,
) {
    let m = Memory::new(execution);
    let mut cache = cache(&m, 10);
    let (host, host_pool) = (m.arena(5, 4), BlockPool::new(0..5).unwrap());
    let tokens: Vec<u32> = (0..64).collect();
    let mut id = if keyed {
        cache.create_with_prefix(&PromptKeys::new(root(), &tokens[..14], 4)).unwrap().0
    } else {
        cache.create(SequenceStart { logical: 3, position: 100 }).unwrap()
    };
    write(&m, &mut cache, id, 14, 1.0);
    cache.commit(id, &tokens[..14]).unwrap();
    let before = from(&m, &cache, id, 8);
    assert_eq!(cache.free_before(id, 11), Ok(2));
    assert_eq!(cache.free_before(id, 11), Ok(0), "a block goes when its last token does");
    if keyed {
        // A freed block that has a key can be found until it is reused.
        let (again, cached) = cache.create_with_prefix(&PromptKeys::new(root(), &tokens[..14], 4)).unwrap();
        assert_eq!(cached, 12);
        cache.free(again).unwrap();
    }
    let segment = cache.segment(id).unwrap();
    let start = if keyed { (8, 8) } else { (11, 108) };
    assert_eq!((segment.len, segment.blocks.len()), (6, 2));
    assert_eq!((segment.logical_start, segment.stored_start), start);
    assert_eq!((cache.len(id), from(&m, &cache, id, 8)), (Ok(14), before.clone()));
    assert_eq!(cache.slots(id, 7..9).unwrap_err(), Error::TokenFreed { token: 7, first: 8 });
    assert_eq!(cache.truncate(id, 7), Err(Error::TokenFreed { token: 7, first: 8 }));

    let twin = cache.fork(id).unwrap();
    assert_eq!(cache.copy_on_write(&[id, twin], m.stream.as_ref()), Ok(1));
    for sequence in [id, twin] {
        write(&m, &mut cache, sequence, 3, 40.0);
        cache.commit(sequence, &tokens[14..17]).unwrap();
        cache.truncate(sequence, 16).unwrap();
        assert_eq!(from(&m, &cache, sequence, 8)[..6], before[..6]);
    }
    let now = from(&m, &cache, id, 8);
    for _ in 0..2 {
        let out = cache.swap_out(id, m.stream.as_ref(), &host, &host_pool).unwrap();
        assert_eq!((out.len(), out.blocks().len()), (16, 2), "what is held is moved");
        id = cache.swap_in(&out, m.stream.as_ref()).unwrap();
        drop(out);
        assert_eq!((cache.len(id), from(&m, &cache, id, 8)), (Ok(16), now.clone()));
        cache.pool().check_invariants().unwrap();
    }
    // A long answer needs no more blocks than its window does.
    for step in 16..60 {
        write(&m, &mut cache, id, 1, 90.0);
        cache.commit(id, &tokens[step..=step]).unwrap();
        cache.free_before(id, step + 1 - 8).unwrap();
        assert!(cache.blocks(id).unwrap().len() <= 3);
    }
    for sequence in [id, twin] {
        cache.free(sequence).unwrap();
    }
    let counts = cache.pool().counts();
    assert_eq!((counts.mutable, counts.shared), (0, 0));
    cache.pool().check_invariants().unwrap();
}

//! Groups of layers that share sequences: random operations compared with a simple model, prefixes, and
//! groups with different numbers of heads.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvbackend_cpu::Execution::{self, Deferred, Immediate};
use kvcore::Compared::Number;
use kvcore::{
    Attend, AttendRows, AttendWork, BlockOrder, BlockPool, DType, Error, Gather, GroupKind, GroupedKvCache,
    KvArena, KvLayout, KvPool, KvShape, MemoryKind, PagedKvCache, PoolCounts, PromptKeys, QueryRow, Scatter,
    SequenceId, SequenceStart, WriteSlots,
};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rstest::rstest;

use crate::common::{DIM, Memory};
use crate::sharing::root;

const WINDOW: usize = 7;
const KINDS: [GroupKind; 2] = [GroupKind::Full, GroupKind::SlidingWindow { window: WINDOW }];
/// Number of heads in each group.
const HEADS: [usize; 2] = [3, 1];

fn arena(m: &Memory, group: usize, blocks: u32) -> KvArena {
    let shape = KvShape {
        num_layers: 1,
        num_blocks: blocks as usize,
        block_size: 4,
        k_heads: HEADS[group],
        v_heads: HEADS[group],
        k_dim: DIM,
        v_dim: DIM,
        format: DType::F32.into(),
        order: BlockOrder::HeadMajor,
    };
    let layout = Arc::new(KvLayout::new(shape).unwrap());
    KvArena::allocate(m.backend.as_ref(), MemoryKind::System, layout).unwrap()
}

/// Returns a cache whose groups have the given numbers of blocks.
fn cache(m: &Memory, blocks: [u32; 2]) -> GroupedKvCache {
    let group = |(i, &blocks): (usize, &u32)| {
        let pool = BlockPool::new(0..blocks).unwrap();
        (KINDS[i], PagedKvCache::new(arena(m, i, blocks), pool).unwrap())
    };
    GroupedKvCache::new(blocks.iter().enumerate().map(group).collect()).unwrap()
}

/// Writes each token's number to its slot in every group.
fn write(m: &Memory, cache: &GroupedKvCache, slots: &[WriteSlots], tokens: &[u32]) {
    for ((_, group), slots) in cache.groups().iter().zip(slots) {
        let heads = group.arena().layout().shape().k_heads;
        let rows = m.tensor(&[tokens.len(), heads, DIM], 0.0);
        let each = tokens.iter().flat_map(|&token| vec![token as f32; heads * DIM]);
        let bytes: Vec<u8> = each.flat_map(f32::to_le_bytes).collect();
        m.stream.write(&rows, &bytes).unwrap();
        m.stream.scatter(&Scatter::new(group.arena(), 0, rows.clone(), rows, slots)).unwrap();
    }
}

/// Returns the numbers stored in a group for a sequence's tokens, starting at `first`.
fn read(m: &Memory, group: &PagedKvCache, id: SequenceId, first: usize) -> Vec<u32> {
    let slots = Arc::clone(group.slots(id, first..group.len(id).unwrap()).unwrap().slots());
    if slots.is_empty() {
        return Vec::new();
    }
    let heads = group.arena().layout().shape().k_heads;
    let (k, v) = (m.tensor(&[slots.len(), heads, DIM], 0.0), m.tensor(&[slots.len(), heads, DIM], 0.0));
    let arena = group.arena().clone();
    let (of_k, of_v) = (k.clone(), v.clone());
    m.stream.gather(&Gather { arena, layer: 0, slots, k: of_k, v: of_v, rotation: None }).unwrap();
    assert_eq!(m.values(&k), m.values(&v));
    m.values(&k).chunks(heads * DIM).map(|row| row[heads * DIM - 1] as u32).collect()
}

fn counts(cache: &GroupedKvCache) -> Vec<PoolCounts> {
    cache.groups().iter().map(|(_, group)| group.pool().counts()).collect()
}

/// The simple model: the tokens of each sequence, and the index of the first token that the window group must
/// still have.
type Plain = BTreeMap<SequenceId, (Vec<u32>, usize)>;

fn check(m: &Memory, cache: &GroupedKvCache, plain: &Plain) {
    cache.check_invariants().unwrap();
    for (&id, (tokens, first)) in plain {
        for ((_, group), first) in cache.groups().iter().zip([0, *first]) {
            assert_eq!(group.len(id).unwrap(), tokens.len());
            assert_eq!(read(m, group, id, first), tokens[first..], "{id}");
        }
    }
}

#[rstest]
fn random_operations_keep_every_group_or_change_none(
    #[values(0, 1, 2, 3)] seed: u64,
    // In the first case, the full group runs out of blocks first; in the second case, the window group does.
    #[values([24, 60], [60, 14])] blocks: [u32; 2],
    #[values(Immediate, Deferred)] execution: Execution,
) {
    let m = Memory::new(execution);
    let mut rng = StdRng::seed_from_u64(seed);
    let mut cache = cache(&m, blocks);
    let host: Vec<KvPool> = (0..2)
        .map(|group| KvPool::new(arena(&m, group, 20), BlockPool::new(0..20).unwrap()).unwrap())
        .collect();
    let (mut plain, mut refused, mut hits) = (Plain::new(), [0, 0], 0);
    for _ in 0..600 {
        let before = counts(&cache);
        let ids: Vec<SequenceId> = plain.keys().copied().collect();
        let any = (!ids.is_empty()).then(|| ids[rng.random_range(0..ids.len())]);
        let operation = if ids.len() > 8 { 9 } else { rng.random_range(0..10) };
        let result = match (operation, any) {
            (0 | 1, _) | (_, None) => {
                // Some prompts have a common prefix.
                let (kind, len) = (rng.random_range(0..3), rng.random_range(1..28u32));
                let tokens: Vec<u32> = (0..len).map(|i| 100 * kind + i).collect();
                let prompt = PromptKeys::new(root(), &tokens, 4);
                let admitted = cache.admit(&prompt, 40);
                assert!(admitted.is_ok() || counts(&cache) == before, "a refused prompt changes nothing");
                admitted.map(|(id, cached, slots)| {
                    hits += usize::from(cached > 0);
                    write(&m, &cache, &slots, &tokens[cached..]);
                    cache.commit(id, &tokens[cached..]).unwrap();
                    let first = KINDS[1].first_needed(cached);
                    assert!(plain.insert(id, (tokens, first)).is_none());
                })
            }
            (2..5, Some(_)) => {
                let batch: Vec<_> = ids.iter().take(3).map(|&id| (id, rng.random_range(0..6))).collect();
                let ids: Vec<_> = batch.iter().map(|&(id, _)| id).collect();
                let mut slots = Vec::new();
                // A sequence whose blocks were copied before the error keeps the copies.
                if let Err(error) = cache.copy_on_write(&ids, m.stream.as_ref()) {
                    assert!(matches!(error, Error::OutOfBlocks { .. }), "{error}");
                    continue;
                }
                let before = counts(&cache);
                let grown = cache.grow_batch(&batch, &mut slots);
                if grown.is_ok() {
                    let fresh: Vec<u32> =
                        batch.iter().flat_map(|&(_, n)| vec![rng.random_range(500..900); n]).collect();
                    if !fresh.is_empty() {
                        write(&m, &cache, &slots, &fresh);
                    }
                    let mut at = 0;
                    for (id, n) in batch {
                        cache.commit(id, &fresh[at..at + n]).unwrap();
                        plain.get_mut(&id).unwrap().0.extend(&fresh[at..at + n]);
                        at += n;
                    }
                } else {
                    assert_eq!(counts(&cache), before, "a refused step changes nothing");
                }
                grown
            }
            (5, Some(id)) => {
                let (tokens, first) = plain.get_mut(&id).unwrap();
                *first = (*first).max(KINDS[1].first_needed(tokens.len()));
                cache.free_before(id, tokens.len()).map(drop)
            }
            (6, Some(id)) => {
                let (tokens, first) = plain.get_mut(&id).unwrap();
                let len = rng.random_range(0..=tokens.len());
                match cache.truncate(id, len) {
                    Ok(()) => {
                        tokens.truncate(len);
                        *first = (*first).min(len);
                    }
                    Err(error) => {
                        assert!(
                            matches!(error, Error::TokenFreed { .. } | Error::SharedBlock { .. }),
                            "{error}"
                        );
                    }
                }
                Ok(())
            }
            (7, Some(id)) => {
                let twin = cache.fork(id).unwrap();
                let copy = plain[&id].clone();
                plain.insert(twin, copy);
                Ok(())
            }
            (8, Some(id)) => match cache.swap_out(id, m.stream.as_ref(), &host) {
                Ok(swapped) => {
                    let copy = plain.remove(&id).unwrap();
                    let before = counts(&cache);
                    match cache.swap_in(&swapped, m.stream.as_ref()) {
                        Ok(back) => {
                            plain.insert(back, copy);
                        }
                        Err(error) => {
                            assert!(matches!(error, Error::OutOfBlocks { .. }), "{error}");
                            assert_eq!(counts(&cache), before, "nothing comes back, or all");
                        }
                    }
                    Ok(())
                }
                Err(error) => {
                    assert!(matches!(error, Error::OutOfBlocks { total: 20, .. }), "{error}");
                    assert_eq!(counts(&cache), before);
                    Ok(())
                }
            },
            (_, Some(id)) => {
                plain.remove(&id);
                cache.free(id)
            }
        };
        if let Err(error) = result {
            let Error::OutOfBlocks { total, .. } = error else { panic!("{error}") };
            refused[usize::from(total != blocks[0] as usize)] += 1;
        }
        check(&m, &cache, &plain);
    }
    assert!(hits > 5, "{hits} prompts found their beginning");
    assert!(refused[usize::from(blocks[1] < blocks[0])] > 5, "{refused:?} refusals by group");
    for id in plain.into_keys() {
        cache.free(id).unwrap();
    }
    assert!(counts(&cache).iter().all(|counts| counts.free + counts.cached == counts.total));
    assert!(host.iter().all(|pool| pool.blocks().counts().free == 20));
}

#[test]
fn a_prefix_is_found_as_far_as_every_group_has_it() {
    let m = Memory::new(Immediate);
    let mut cache = cache(&m, [40, 10]);
    let tokens: Vec<u32> = (0..32).collect();
    let prompt = PromptKeys::new(root(), &tokens, 4);
    let (id, cached, slots) = cache.admit(&prompt, 32).unwrap();
    assert_eq!((cached, slots[0].len(), slots[1].len()), (0, 32, 32));
    write(&m, &cache, &slots, &tokens);
    cache.commit(id, &tokens).unwrap();
    assert_eq!(cache.free_before(id, 32), Ok(6), "the next token attends to 26 and later ones");
    cache.free(id).unwrap();
    // For a longer prompt, all blocks are found in the full group, and blocks 6 and 7 in the window group.
    let longer = PromptKeys::new(root(), &[&tokens[..], &[90, 91]].concat(), 4);
    let (id, cached) = cache.create_with_prefix(&longer).unwrap();
    let held: Vec<_> = cache.groups().iter().map(|(_, group)| group.blocks(id).unwrap().len()).collect();
    assert_eq!((cached, held), (32, vec![8, 2]));
    for ((_, group), first) in cache.groups().iter().zip([0, 24]) {
        assert_eq!(read(&m, group, id, first), tokens[first..]);
        let segment = group.segment(id).unwrap();
        assert_eq!(
            (segment.logical_start, segment.stored_start, segment.len),
            (first, first as i64, 32 - first)
        );
    }
    // Allocating eight blocks evicts cached blocks of the window group. Prefixes that end in evicted blocks
    // are no longer found in either group.
    let pool = cache.groups()[1].1.pool().clone();
    drop(pool.allocate(8).unwrap());
    for len in [9, 17, 25, 32] {
        let (short, cached) = cache.create_with_prefix(&PromptKeys::new(root(), &tokens[..len], 4)).unwrap();
        assert_eq!(cached, 0, "of {len} tokens");
        cache.free(short).unwrap();
    }
    let (again, cached) = cache.create_with_prefix(&longer).unwrap();
    assert_eq!(cached, 32, "held by the other sequence");
    for id in [id, again] {
        cache.free(id).unwrap();
    }
    // A prefix that is not in the full group is not found, although the window group still has its end.
    cache.groups()[0].1.pool().clear_cached();
    let (none, cached) = cache.create_with_prefix(&longer).unwrap();
    assert_eq!(cached, 0);
    cache.free(none).unwrap();
    cache.check_invariants().unwrap();
    assert!(counts(&cache).iter().all(|counts| counts.mutable + counts.shared == 0));
}

/// A group without enough blocks refuses the request before another group evicts anything for it.
#[rstest]
fn a_refused_admission_changes_no_group(#[values([3, 40], [40, 3])] blocks: [u32; 2]) {
    let m = Memory::new(Immediate);
    let mut cache = cache(&m, blocks);
    let tokens: Vec<u32> = (0..8).collect();
    let (id, _, slots) = cache.admit(&PromptKeys::new(root(), &tokens, 4), 8).unwrap();
    write(&m, &cache, &slots, &tokens);
    cache.commit(id, &tokens).unwrap();
    cache.free(id).unwrap();
    let before = counts(&cache);
    let other: Vec<u32> = (100..160).collect();
    let refused = cache.admit(&PromptKeys::new(root(), &other, 4), 60);
    assert!(matches!(refused, Err(Error::OutOfBlocks { asked: 15, total: 3, .. })), "{refused:?}");
    let id = cache.create(SequenceStart::default()).unwrap();
    let refused = cache.grow(id, 60);
    assert!(matches!(refused, Err(Error::OutOfBlocks { asked: 15, total: 3, .. })), "{refused:?}");
    assert_eq!(counts(&cache), before);
    let mixed = PromptKeys::new(root(), &other, 8);
    assert!(matches!(
        cache.admit(&mixed, 1),
        Err(Error::Mismatch { expected: Number(4), got: Number(8), .. })
    ));
    assert!(matches!(cache.swap_out(id, m.stream.as_ref(), &[]), Err(Error::Mismatch { .. })));
}

/// Each group attends to its own tokens with its own number of heads.
#[test]
fn heads_differ_by_group() {
    let m = Memory::new(Immediate);
    let mut cache = cache(&m, [8, 8]);
    let id = cache.create(SequenceStart::default()).unwrap();
    let tokens: Vec<u32> = (1..=12).collect();
    let slots = cache.grow(id, 12).unwrap();
    write(&m, &cache, &slots, &tokens);
    cache.free_before(id, 11).unwrap();
    for (kind, group) in cache.groups() {
        let heads = group.arena().layout().shape().k_heads;
        let zeros = vec![0u8; heads * DIM * 4];
        let (q, out) = (m.tensor(&[1, heads, DIM], 0.0), m.tensor(&[1, heads, DIM], 0.0));
        m.stream.write(&q, &zeros).unwrap();
        let rows = [QueryRow { logical: 11, position: 11 }];
        let work = AttendWork::new(rows, [AttendRows::new(0..1, [group.segment(id).unwrap()])]);
        let window = match kind {
            GroupKind::SlidingWindow { window } => Some(*window),
            GroupKind::Full | GroupKind::Latent => None,
        };
        let attend = Attend::new(group.arena(), 0, q, &Arc::new(work), out.clone());
        m.stream.attend(&Attend { window, ..attend }).unwrap();
        // A query of zeros gives the mean of the values it attends to: 1 to 12, or the last seven of these.
        let mean = if window.is_some() { 9.0 } else { 6.5 };
        assert!(m.values(&out).iter().all(|x| (x - mean).abs() < 1e-5), "{kind:?}: {:?}", m.values(&out));
    }
}

#[test]
fn groups_that_do_not_fit_each_other_are_refused() {
    let m = Memory::new(Immediate);
    let group = |kind| (kind, PagedKvCache::new(arena(&m, 0, 4), BlockPool::new(0..4).unwrap()).unwrap());
    assert!(matches!(GroupedKvCache::new(vec![]), Err(Error::Zero { .. })));
    let none = GroupKind::SlidingWindow { window: 0 };
    assert!(matches!(GroupedKvCache::new(vec![group(none)]), Err(Error::Zero { what: "window" })));
    let wide = PagedKvCache::new(m.arena(4, 8), BlockPool::new(0..4).unwrap()).unwrap();
    let both = vec![group(GroupKind::Full), (GroupKind::Latent, wide)];
    assert!(matches!(
        GroupedKvCache::new(both),
        Err(Error::Mismatch { expected: Number(4), got: Number(8), .. })
    ));
    let mut used = group(GroupKind::Full);
    used.1.create(SequenceStart::default()).unwrap();
    assert!(matches!(
        GroupedKvCache::new(vec![used]),
        Err(Error::Mismatch { expected: Number(0), got: Number(1), .. })
    ));
}

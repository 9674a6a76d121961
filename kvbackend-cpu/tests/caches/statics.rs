//! The static cache: views of all tokens so far, invalid updates, and a comparison of its bytes with a paged
//! cache's.

use std::sync::Arc;

use kvbackend_cpu::Execution::{self, Deferred, Immediate};
use kvcore::{
    BlockPool, DType, Error, Gather, KvArena, KvCache, PagedKvCache, SequenceStart, StaticKvCache, TensorView,
};
use rstest::rstest;

use crate::common::{DIM, HEADS, Memory};

/// Reads a single element `[batch, token, head, 0]` of a view.
fn at(m: &Memory, view: &TensorView, index: [usize; 3]) -> f32 {
    let row = view.select(0, index[0]).unwrap().select(0, index[1]).unwrap().select(0, index[2]).unwrap();
    m.values(&row)[0]
}

#[rstest]
fn updates_return_views_of_everything_so_far(#[values(Immediate, Deferred)] execution: Execution) {
    let m = Memory::new(execution);
    let mut cache = StaticKvCache::new(m.arena(2, 8)).unwrap();
    let first = m.tensor(&[2, 3, HEADS, DIM], 0.0);
    let (k, _) = cache.update(m.stream.as_ref(), 1, &first, &first, &[0, 0]).unwrap();
    assert_eq!(k.shape(), [2, 3, HEADS, DIM]);
    let second = m.tensor(&[2, 2, HEADS, DIM], 100.0);
    // Entry 1 rolls back one token, and entry 0 grows.
    let (k, v) = cache.update(m.stream.as_ref(), 1, &second, &second, &[3, 2]).unwrap();
    assert_eq!((k.shape(), v.shape()), (&[2, 5, HEADS, DIM][..], &[2, 5, HEADS, DIM][..]));
    assert_eq!(
        (cache.entry_len(1, 0).unwrap(), cache.entry_len(1, 1).unwrap(), cache.entry_len(0, 0).unwrap()),
        (5, 4, 0)
    );
    for (view, batch, head, token, expected) in [
        (&k, 0, 1, 2, 12.0 + 3.0),
        (&k, 0, 0, 3, 100.0),
        (&v, 1, 0, 1, 18.0 + 6.0),
        (&v, 1, 0, 2, 100.0 + 12.0),
        (&v, 1, 1, 3, 100.0 + 12.0 + 6.0 + 3.0),
    ] {
        assert_eq!(at(&m, view, [batch, token, head]), expected, "{batch} {head} {token}");
    }
    assert!(k.storage().address() == cache.arena().k().address(), "a view, not a copy");
}

#[rstest]
fn wrong_updates_change_nothing(#[values(Immediate, Deferred)] execution: Execution) {
    let m = Memory::new(execution);
    let mut cache = StaticKvCache::new(m.arena(2, 4)).unwrap();
    let good = m.tensor(&[2, 3, HEADS, DIM], 1.0);
    cache.update(m.stream.as_ref(), 0, &good, &good, &[0, 0]).unwrap();
    let before = m.values(
        &TensorView::new(Arc::clone(cache.arena().k()), DType::F32, &[2 * 2 * HEADS * 4 * DIM]).unwrap(),
    );
    let long = m.tensor(&[2, 2, HEADS, DIM], 9.0);
    let narrow = m.tensor(&[1, 1, HEADS, DIM], 9.0);
    for (layer, rows, starts) in [
        (2, &good, vec![0, 0]),
        (0, &long, vec![3, 3]),
        (0, &long, vec![0, 4]),
        (0, &narrow, vec![3, 3]),
        (0, &long, vec![0]),
    ] {
        assert!(cache.update(m.stream.as_ref(), layer, rows, rows, &starts).is_err(), "{layer} {starts:?}");
    }
    let hole = cache.update(m.stream.as_ref(), 1, &good, &good, &[0, 1]);
    assert!(matches!(hole, Err(Error::TooLarge { what: "start of the update", .. })));
    let after = m.values(
        &TensorView::new(Arc::clone(cache.arena().k()), DType::F32, &[2 * 2 * HEADS * 4 * DIM]).unwrap(),
    );
    assert_eq!((before, cache.entry_len(0, 0).unwrap()), (after, 3));
    cache.reset();
    assert!(cache.entry_len(0, 1).unwrap() == 0);
}

#[rstest]
fn static_and_paged_hold_the_same_bytes(#[values(Immediate, Deferred)] execution: Execution) {
    let m = Memory::new(execution);
    let mut dense = StaticKvCache::new(m.arena(1, 10)).unwrap();
    let mut paged = PagedKvCache::new(m.arena(8, 4), BlockPool::new(2..8).unwrap()).unwrap();
    let sequence = paged.create(SequenceStart::default()).unwrap();
    let mut written = 0;
    for (step, tokens) in [5, 1, 1, 3].into_iter().enumerate() {
        let slots = paged.grow(sequence, tokens).unwrap();
        for layer in 0..2 {
            let rows = m.tensor(&[1, tokens, HEADS, DIM], (step * 100 + layer * 1000) as f32);
            dense.update(m.stream.as_ref(), layer, &rows, &rows, &[written]).unwrap();
            let rows = rows.select(0, 0).unwrap();
            paged.write(sequence, m.stream.as_ref(), layer, rows.clone(), rows, &slots).unwrap();
        }
        written += tokens;
    }
    for layer in 0..2 {
        let read = |arena: &KvArena, slots: Arc<[i64]>| {
            let (k, v) = (m.tensor(&[10, HEADS, DIM], 0.0), m.tensor(&[10, HEADS, DIM], 0.0));
            let op =
                Gather { arena: arena.clone(), layer, slots, k: k.clone(), v: v.clone(), rotation: None };
            m.stream.gather(&op).unwrap();
            (m.values(&k), m.values(&v))
        };
        let blocks = paged.blocks(sequence).unwrap();
        let slots = (0..10).map(|i| i64::from(blocks[i / 4].0) * 4 + (i % 4) as i64).collect();
        assert_eq!(read(dense.arena(), (0..10).collect()), read(paged.arena(), slots), "layer {layer}");
    }
    let (k, _) = dense.views(1).unwrap();
    assert_eq!(k.shape(), [1, 10, HEADS, DIM]);
}

/// The example of seed 000: five tokens to slots of blocks 5, 12 and 7, given head-major.
#[rstest]
fn sequences_of_a_static_cache_take_entries_and_give_them_back(
    #[values(Immediate, Deferred)] execution: Execution,
) {
    let m = Memory::new(execution);
    let mut cache = StaticKvCache::new(m.arena(2, 8)).unwrap();
    let cache: &mut dyn KvCache = &mut cache;
    let start = SequenceStart { logical: 3, position: 7 };
    let a = cache.create(SequenceStart::default()).unwrap();
    let b = cache.create(start).unwrap();
    assert!(matches!(cache.create(start), Err(Error::TooLarge { value: 3, most: 2, .. })));
    assert_eq!(cache.grow(a, 3).unwrap()[..], [0, 1, 2]);
    assert_eq!(cache.grow(b, 2).unwrap()[..], [8, 9]);
    assert!(cache.grow(b, 7).is_err(), "past the cache");
    let segment = cache.segment(b).unwrap();
    assert_eq!((segment.len, segment.logical_start, segment.stored_start), (2, 3, 7));
    cache.truncate(a, 1).unwrap();
    assert!(cache.truncate(a, 2).is_err());
    cache.free(a).unwrap();
    assert_eq!(cache.free(a), Err(Error::UnknownSequence(0)));
    assert!(cache.grow(a, 1).is_err(), "slots of a freed sequence");
    let c = cache.create(SequenceStart::default()).unwrap();
    assert_eq!((cache.len(c).unwrap(), cache.num_sequences()), (0, 2));
    cache.reset();
    assert_eq!(cache.num_sequences(), 0);
}

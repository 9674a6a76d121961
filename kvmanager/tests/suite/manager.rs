//! Blocks and sequences with IDs (seed 001), and a comparison of the bytes in dense and paged caches.

use kvbackend_cpu::Execution::{self, Deferred, Immediate};
use kvcore::{
    Backend, BlockId, BlockOrder, DType, Error as CoreError, KvShape, LayerViews, StaticKvCache, TensorView,
};
use kvmanager::{BlockManager, Error, PagedSequences};
use rstest::rstest;

use crate::common::{DIM, HEADS, Memory};

fn shape(num_blocks: usize, block_size: usize) -> KvShape {
    KvShape {
        num_layers: 2,
        num_blocks,
        block_size,
        k_heads: HEADS,
        v_heads: HEADS,
        k_dim: DIM,
        v_dim: DIM,
        format: DType::F32.into(),
        order: BlockOrder::HeadMajor,
    }
}

fn manager(m: &Memory, num_blocks: usize, block_size: usize) -> BlockManager {
    BlockManager::new(m.backend.clone(), shape(num_blocks, block_size)).unwrap()
}

/// Returns the values of a strided view as a dense list, copied row by row.
fn dense(m: &Memory, view: &TensorView) -> Vec<f32> {
    let (len, heads) = (view.shape()[0], view.shape()[1]);
    let row = |token, head| m.values(&view.select(0, token).unwrap().select(0, head).unwrap());
    (0..len).flat_map(|token| (0..heads).flat_map(move |head| row(token, head))).collect()
}

#[rstest]
fn blocks_are_allocated_written_read_and_freed_by_number(
    #[values(Immediate, Deferred)] execution: Execution,
) {
    let m = Memory::new(execution);
    let mut blocks = manager(&m, 256, 16);
    assert_eq!((blocks.counts().total, blocks.max_tokens_supported()), (256, 256 * 16));
    assert_eq!(blocks.memory_usage(), 2 * 256 * 16 * HEADS * (DIM + DIM) * 4);
    let ids = blocks.allocate(3).unwrap();
    // Writes 14 tokens and then 5 tokens, across a block boundary.
    let first = m.tensor(&[14, HEADS, DIM], 0.0);
    blocks.write(m.stream.as_ref(), 1, ids[2], 0, &first, &first).unwrap();
    let second = m.tensor(&[5, HEADS, DIM], 1000.0);
    let part = |from, to| second.slice(0, from, to).unwrap();
    blocks.write(m.stream.as_ref(), 1, ids[2], 14, &part(0, 2), &part(0, 2)).unwrap();
    blocks.write(m.stream.as_ref(), 1, ids[0], 0, &part(2, 5), &part(2, 5)).unwrap();
    let (k, v) = blocks.read(m.stream.as_ref(), 1, &[ids[2], ids[0]], 19).unwrap();
    assert_eq!(k.shape(), [19, HEADS, DIM]);
    for view in [&k, &v] {
        assert_eq!(dense(&m, view), [dense(&m, &first), dense(&m, &second)].concat());
    }
    assert_eq!(
        dense(&m, &blocks.read(m.stream.as_ref(), 0, &ids, 3).unwrap().0),
        vec![0.0; HEADS * 3 * DIM],
        "another layer"
    );
    blocks.reset();
    assert_eq!(blocks.counts().free, 256);
}

#[rstest]
fn wrong_numbers_are_errors_and_change_nothing(#[values(Immediate, Deferred)] execution: Execution) {
    let m = Memory::new(execution);
    let mut blocks = manager(&m, 4, 6);
    let ids = blocks.allocate(3).unwrap();
    let before = blocks.counts();
    assert!(matches!(blocks.allocate(2), Err(Error::Core(CoreError::OutOfBlocks { asked: 2, free: 1, .. }))));
    let free = (0..4).map(BlockId).find(|id| !ids.contains(id)).unwrap();
    let stray = BlockId(4);
    assert_eq!(blocks.free(&[ids[0], free]), Err(Error::NotAllocated { block: free }));
    assert_eq!(blocks.free(&[ids[0], ids[1], ids[0]]), Err(Error::NotAllocated { block: ids[0] }));
    assert!(
        matches!(blocks.free(&[stray]), Err(Error::Core(CoreError::ForeignBlock { block, end: 4, .. })) if block == stray)
    );
    let rows = m.tensor(&[3, HEADS, DIM], 5.0);
    assert!(blocks.write(m.stream.as_ref(), 0, free, 0, &rows, &rows).is_err());
    assert!(blocks.write(m.stream.as_ref(), 0, ids[0], 4, &rows, &rows).is_err(), "past the block's end");
    assert!(blocks.write(m.stream.as_ref(), 2, ids[0], 0, &rows, &rows).is_err(), "no such layer");
    assert!(blocks.write(m.stream.as_ref(), 0, ids[0], 0, &rows, &m.tensor(&[2, HEADS, DIM], 0.0)).is_err());
    assert!(
        blocks.read(m.stream.as_ref(), 0, &[free], 1).is_err()
            && blocks.read(m.stream.as_ref(), 0, &ids, 19).is_err()
    );
    assert_eq!(blocks.counts(), before);
    assert!(
        dense(&m, &blocks.read(m.stream.as_ref(), 0, &ids, 18).unwrap().0).iter().all(|x| *x == 0.0),
        "nothing was written"
    );
    blocks.free(&ids).unwrap();
    assert_eq!(blocks.free(&ids[..1]), Err(Error::NotAllocated { block: ids[0] }), "freed twice");
    assert_eq!(blocks.counts().free, 4);
    let refused = BlockManager::new(m.backend.clone(), shape(4, 0));
    assert_eq!(refused.unwrap_err(), Error::Core(CoreError::Zero { what: "block_size" }));
}

fn sequences(m: &Memory, num_blocks: usize, block_size: usize) -> (BlockManager, PagedSequences) {
    let blocks = manager(m, num_blocks, block_size);
    let sequences = PagedSequences::new(&blocks).unwrap();
    (blocks, sequences)
}

/// A static cache with a single entry. The rows of a paged sequence must match it.
struct Dense(StaticKvCache);

impl Dense {
    fn new(m: &Memory, capacity: usize) -> Self {
        Self(StaticKvCache::new(m.arena(1, capacity)).unwrap())
    }

    fn update(
        &mut self,
        m: &Memory,
        layer: usize,
        k: &TensorView,
        v: &TensorView,
        start: usize,
    ) -> LayerViews {
        let (k, v) = (k.unsqueeze(0).unwrap(), v.unsqueeze(0).unwrap());
        let (k, v) = self.0.update(m.stream.as_ref(), layer, &k, &v, &[start]).unwrap();
        (k.select(0, 0).unwrap(), v.select(0, 0).unwrap())
    }

    fn read(&self, layer: usize, len: usize) -> LayerViews {
        let (k, v) = self.0.views(layer).unwrap();
        let first = |view: TensorView| view.select(0, 0).unwrap().slice(0, 0, len).unwrap();
        (first(k), first(v))
    }
}

#[rstest]
fn the_length_advances_once_a_token_whichever_layer_comes_first(
    #[values(Immediate, Deferred)] execution: Execution,
) {
    let m = Memory::new(execution);
    let (blocks, mut all) = sequences(&m, 8, 4);
    let id = all.create(Some(7)).unwrap();
    assert_eq!(all.create(Some(7)), Err(Error::SequenceExists(7)));
    assert_eq!(all.create(None), Ok(8));
    let rows = m.tensor(&[5, HEADS, DIM], 0.0);
    all.append(m.stream.as_ref(), id, 1, &rows, &rows).unwrap();
    assert_eq!((all.len(id).unwrap(), all.layer_len(id, 0).unwrap()), (5, 0));
    all.append(m.stream.as_ref(), id, 0, &rows, &rows).unwrap();
    assert_eq!((all.len(id).unwrap(), all.layer_len(id, 0).unwrap()), (5, 5));
    assert_eq!(blocks.counts().mutable, 2, "layers share blocks");
    assert_eq!(dense(&m, &all.read(m.stream.as_ref(), id, 0, 5).unwrap().1), dense(&m, &rows));
    all.delete(id).unwrap();
    assert_eq!(blocks.counts().free, 8);
    assert_eq!(all.delete(id), Err(Error::Core(CoreError::UnknownSequence(7))));
    assert!(
        all.read(m.stream.as_ref(), id, 0, 0).is_err()
            && all.append(m.stream.as_ref(), id, 0, &rows, &rows).is_err()
    );
}

#[rstest]
fn a_sequence_has_at_most_its_blocks_and_failures_change_nothing(
    #[values(Immediate, Deferred)] execution: Execution,
) {
    let m = Memory::new(execution);
    let (blocks, all) = sequences(&m, 8, 4);
    let mut all = all.max_blocks(2);
    let id = all.create(None).unwrap();
    let rows = m.tensor(&[6, HEADS, DIM], 0.0);
    all.append(m.stream.as_ref(), id, 0, &rows, &rows).unwrap();
    assert_eq!(
        all.append(m.stream.as_ref(), id, 0, &rows, &rows),
        Err(Error::SequenceTooLong { sequence: id, blocks: 3, limit: 2 })
    );
    let wrong = m.tensor(&[1, HEADS + 1, DIM], 0.0);
    assert!(all.append(m.stream.as_ref(), id, 0, &wrong, &wrong).is_err());
    assert!(all.append(m.stream.as_ref(), id, 2, &rows, &rows).is_err());
    let one = m.tensor(&[1, HEADS, DIM], 0.0);
    assert!(all.update(m.stream.as_ref(), id, 0, &one, &one, 7).is_err(), "a hole");
    assert_eq!((all.len(id).unwrap(), blocks.counts().free), (6, 6));
    // By default, 65 blocks are one too many for a sequence.
    let (_, mut many) = sequences(&m, 70, 1);
    let long = many.create(None).unwrap();
    let rows = m.tensor(&[65, HEADS, DIM], 0.0);
    let limit = Err(Error::SequenceTooLong { sequence: long, blocks: 65, limit: 64 });
    assert_eq!(many.append(m.stream.as_ref(), long, 0, &rows, &rows), limit);
}

#[rstest]
fn dense_and_paged_sequences_give_identical_bytes(#[values(Immediate, Deferred)] execution: Execution) {
    let m = Memory::new(execution);
    let (blocks, mut paged) = sequences(&m, 9, 4);
    let other = paged.create(None).unwrap();
    let id = paged.create(None).unwrap();
    let stray = m.tensor(&[3, HEADS, DIM], -50.0);
    let mut fixed = Dense::new(&m, 20);
    let mut at = 0;
    // Tokens are appended in pieces, with another sequence in between. Two tokens are rolled back once and
    // overwritten.
    for (step, (back, tokens)) in [(0, 5), (0, 1), (2, 4), (0, 3)].into_iter().enumerate() {
        at -= back;
        for layer in [1, 0] {
            let rows = m.tensor(&[tokens, HEADS, DIM], (step * 100 + layer * 1000) as f32);
            let values = m.tensor(&[tokens, HEADS, DIM], -((step * 100 + layer * 1000) as f32));
            let a = fixed.update(&m, layer, &rows, &values, at);
            let b = paged.update(m.stream.as_ref(), id, layer, &rows, &values, at).unwrap();
            compare(&m, &a, &b);
        }
        paged.append(m.stream.as_ref(), other, 0, &stray, &stray).unwrap();
        at += tokens;
    }
    for len in [0, 1, 7, at] {
        compare(&m, &fixed.read(1, len), &paged.read(m.stream.as_ref(), id, 1, len).unwrap());
    }
    let past = paged.read(m.stream.as_ref(), id, 0, at + 1);
    assert!(matches!(past, Err(Error::Core(CoreError::TooLarge { .. }))));
    assert_eq!(blocks.counts().mutable, at.div_ceil(4) + 3, "blocks of both sequences");
}

/// Another stream sees the rows if it waits for an event of the writing stream.
#[rstest]
fn blocks_are_read_on_any_stream_that_waits_for_the_writer(
    #[values(Immediate, Deferred)] execution: Execution,
) {
    let m = Memory::new(execution);
    let mut blocks = manager(&m, 3, 4);
    let ids = blocks.allocate(1).unwrap();
    let rows = m.tensor(&[4, HEADS, DIM], 1.0);
    blocks.write(m.stream.as_ref(), 0, ids[0], 0, &rows, &rows).unwrap();
    let other = m.backend.stream().unwrap();
    other.wait_for(&m.stream.record().unwrap()).unwrap();
    let (k, _) = blocks.read(other.as_ref(), 0, &ids, 4).unwrap();
    m.stream.wait_for(&other.record().unwrap()).unwrap();
    assert_eq!(dense(&m, &k), dense(&m, &rows));
}

/// A reset always returns blocks to the pool in the order of their IDs.
#[test]
fn a_reset_frees_blocks_in_one_order() {
    let next = || {
        let m = Memory::new(Immediate);
        let mut blocks = manager(&m, 64, 4);
        let ids = blocks.allocate(64).unwrap();
        blocks.free(&ids[7..23]).unwrap();
        blocks.reset();
        blocks.allocate(64).unwrap()
    };
    let first = next();
    assert!((0..4).all(|_| next() == first));
}

/// Each layer can be rolled back separately. The sequence is as long as its longest layer.
#[rstest]
fn a_sequence_shrinks_with_the_layer_that_is_furthest(#[values(Immediate, Deferred)] execution: Execution) {
    let m = Memory::new(execution);
    let stream = m.stream.as_ref();
    let (blocks, mut paged) = sequences(&m, 9, 4);
    let id = paged.create(None).unwrap();
    let mut fixed = Dense::new(&m, 20);
    let mut lengths = [0; 2];
    let steps = [(0, 0, 11), (1, 0, 9), (0, 2, 1), (1, 3, 2), (0, 3, 10), (1, 1, 1), (0, 0, 1)];
    for (step, (layer, start, tokens)) in steps.into_iter().enumerate() {
        let rows = m.tensor(&[tokens, HEADS, DIM], (step * 100) as f32);
        let a = fixed.update(&m, layer, &rows, &rows, start);
        let b = paged.update(stream, id, layer, &rows, &rows, start).unwrap();
        compare(&m, &a, &b);
        lengths[layer] = start + tokens;
        let furthest = lengths[0].max(lengths[1]);
        assert_eq!((paged.len(id).unwrap(), paged.layer_len(id, layer).unwrap()), (furthest, lengths[layer]));
        assert_eq!(blocks.counts().mutable, furthest.div_ceil(4), "step {step}");
        for (other, &len) in lengths.iter().enumerate() {
            compare(&m, &fixed.read(other, len), &paged.read(stream, id, other, len).unwrap());
        }
    }
    assert_eq!(paged.len(id).unwrap(), 2);
}

fn compare(m: &Memory, a: &LayerViews, b: &LayerViews) {
    assert_eq!((a.0.shape(), a.1.shape()), (b.0.shape(), b.1.shape()));
    assert_eq!((dense(m, &a.0), dense(m, &a.1)), (dense(m, &b.0), dense(m, &b.1)));
}

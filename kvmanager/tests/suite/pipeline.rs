//! Caches of pipeline ranks (seed 002): chunks are appended along the sequence, and pieces are merged by
//! layer.

use kvmanager::{Error, PrefillPlan, RankCache};
use std::ops::Range;
use std::sync::Arc;

use kvbackend_cpu::{CpuBackend, Execution};
use kvcore::{Backend, DType, Error as CoreError, MemoryKind, Stream, TensorView, allocate_tensor};
use proptest::prelude::*;
use rstest::rstest;

const BATCH: usize = 2;
const HEADS: usize = 3;
const DIM: usize = 4;

/// The backend and a stream of one rank.
struct Rank {
    backend: Arc<dyn Backend>,
    stream: Arc<dyn Stream>,
}

impl Rank {
    fn new(execution: Execution) -> Self {
        let backend = CpuBackend::with_execution(execution);
        let stream = backend.stream().unwrap();
        Self { backend, stream }
    }

    fn cache(&self, layers: usize, capacity: usize) -> RankCache {
        RankCache::new(self.backend.as_ref(), DType::F32, [layers, BATCH, HEADS, capacity, DIM]).unwrap()
    }

    fn tensor(&self, dtype: DType, shape: &[usize]) -> TensorView {
        allocate_tensor(self.backend.as_ref(), MemoryKind::Device, dtype, shape).unwrap()
    }

    /// Returns the given layers and tokens as a tensor `[layers, batch, heads, tokens, dim]`, like a model
    /// would compute them. Every element is a different number.
    fn computed(&self, layers: Range<usize>, tokens: Range<usize>) -> TensorView {
        let view = self.tensor(DType::F32, &[layers.len(), BATCH, HEADS, tokens.len(), DIM]);
        let mut bytes = Vec::new();
        for layer in layers {
            for row in 0..BATCH * HEADS {
                for token in tokens.clone() {
                    let first = ((layer * 64 + token) * BATCH * HEADS + row) * DIM;
                    bytes.extend((first..first + DIM).flat_map(|n| (n as f32).to_ne_bytes()));
                }
            }
        }
        self.stream.write(&view, &bytes).unwrap();
        view
    }

    fn bytes(&self, view: &TensorView) -> Vec<u8> {
        let view = view.contiguous(self.backend.as_ref(), self.stream.as_ref()).unwrap();
        let mut bytes = vec![0; view.len() * 4];
        self.stream.read(&view, &mut bytes).unwrap();
        bytes
    }

    /// Returns all bytes of a cache's memory, including bytes that are not readable yet.
    fn memory(&self, cache: &RankCache) -> Vec<u8> {
        let storage = Arc::clone(cache.get_data().unwrap().storage());
        let all = TensorView::new(Arc::clone(&storage), DType::F32, &[storage.len() / 4]).unwrap();
        self.bytes(&all)
    }

    /// Asserts that a cache holds exactly the first `tokens` tokens in all of its layers.
    fn assert_holds(&self, cache: &RankCache, tokens: usize) {
        assert_eq!(cache.len(), tokens);
        let expected = self.computed(0..cache.num_layers(), 0..tokens.max(1)).slice(3, 0, tokens).unwrap();
        assert!(self.bytes(&cache.get_data().unwrap()) == self.bytes(&expected), "{tokens} tokens");
    }
}

fn mismatch(what: &'static str, expected: usize, got: usize) -> Error {
    Error::Core(CoreError::mismatch(what, expected, got))
}

#[rstest]
fn every_rank_ends_with_36_layers_of_21_tokens(
    #[values(Execution::Immediate, Execution::Deferred)] execution: Execution,
) {
    let rank = Rank::new(execution);
    let stream = rank.stream.as_ref();
    let plan = PrefillPlan::even(36, 3, 21, 7).unwrap();
    // Every stage appends its own chunks. The merged cache takes the pieces of all stages, chunk by chunk.
    let mut stages: Vec<RankCache> = (0..3).map(|_| rank.cache(12, 21)).collect();
    let mut merged = rank.cache(36, 21);
    merged.expect(plan.clone()).unwrap();
    let mut unplanned = rank.cache(36, 21);
    for chunk in 0..3 {
        let pieces: Vec<TensorView> = (0..3)
            .map(|stage| {
                let place = plan.place(stage, chunk).unwrap();
                let piece = rank.computed(place.layers, place.tokens);
                stages[stage].append_sequence(stream, &[piece]).unwrap();
                let own = stages[stage].get_data().unwrap();
                own.slice(3, chunk * 7, (chunk + 1) * 7).unwrap()
            })
            .collect();
        merged.merge_from_ranks(stream, &pieces).unwrap();
        unplanned.merge_from_ranks(stream, &pieces).unwrap();
        let len = (chunk + 1) * 7;
        assert_eq!(
            (merged.len(), unplanned.len(), stages[0].len()),
            (len, len, len),
            "merging adds no tokens"
        );
    }
    assert_eq!(
        merged.received().unwrap().to_string(),
        "Chunk    |  PP0  PP1  PP2\n\
         -------------------------\n\
         Chunk0   |    1    1    1\n\
         Chunk1   |    1    1    1\n\
         Chunk2   |    1    1    1\n\
         received: 9/9 (100.0 %)"
    );
    rank.assert_holds(&merged, 21);
    rank.assert_holds(&unplanned, 21);
}

#[test]
fn views_grow_in_place_and_reset_keeps_the_memory() {
    let rank = Rank::new(Execution::Immediate);
    let stream = rank.stream.as_ref();
    let mut cache = rank.cache(2, 10);
    let address = cache.get_data().unwrap().storage().address();
    assert!(cache.is_empty());
    for (tokens, len) in [(0..4, 4), (4..5, 5), (5..10, 10)] {
        cache.append_sequence(stream, &[rank.computed(0..2, tokens)]).unwrap();
        assert_eq!(cache.get_data().unwrap().shape(), [2, BATCH, HEADS, len, DIM]);
        assert_eq!(cache.get_data().unwrap().storage().address(), address, "no other memory");
        rank.assert_holds(&cache, len);
    }
    cache.reset();
    assert!(cache.is_empty() && cache.get_data().unwrap().is_empty());
    // Appends two tensors in a single call, one after the other.
    cache.append_sequence(stream, &[rank.computed(0..2, 0..3), rank.computed(0..2, 3..8)]).unwrap();
    rank.assert_holds(&cache, 8);
    assert_eq!(cache.get_data().unwrap().storage().address(), address);
}

#[test]
fn wrong_appends_change_nothing() {
    let rank = Rank::new(Execution::Immediate);
    let stream = rank.stream.as_ref();
    let mut cache = rank.cache(2, 8);
    cache.append_sequence(stream, &[rank.computed(0..2, 0..6)]).unwrap();
    let before = rank.memory(&cache);
    let right = rank.computed(0..2, 6..8);
    let f32 = |shape: &[usize]| rank.tensor(DType::F32, shape);
    let too_many = Error::Core(CoreError::TooLarge { what: "tokens of the cache", value: 9, most: 8 });
    for (what, tensors, error) in [
        ("tokens past the capacity", vec![rank.computed(0..2, 6..9)], too_many.clone()),
        ("the second tensor past the capacity", vec![right.clone(), right.slice(3, 0, 1).unwrap()], too_many),
        ("another batch", vec![f32(&[2, 1, HEADS, 2, DIM])], mismatch("extent of a tensor copy", BATCH, 1)),
        ("other heads", vec![f32(&[2, BATCH, 1, 2, DIM])], mismatch("extent of a tensor copy", HEADS, 1)),
        ("another dim", vec![f32(&[2, BATCH, HEADS, 2, 8])], mismatch("extent of a tensor copy", DIM, 8)),
        ("other layers", vec![f32(&[1, BATCH, HEADS, 2, DIM])], mismatch("extent of a tensor copy", 2, 1)),
        (
            "another rank of tensor",
            vec![f32(&[BATCH, HEADS, 2, DIM])],
            mismatch("rank of [layers, batch, heads, tokens, dim]", 5, 4),
        ),
        (
            "another element type",
            vec![rank.tensor(DType::F16, &[2, BATCH, HEADS, 2, DIM])],
            Error::Core(CoreError::mismatch("tensor copy", DType::F32, DType::F16)),
        ),
        (
            "the cache's own memory",
            vec![cache.get_data().unwrap().slice(3, 0, 2).unwrap()],
            Error::Core(CoreError::Aliased { what: "source and destination of a tensor copy" }),
        ),
    ] {
        assert_eq!(cache.append_sequence(stream, &tensors), Err(error), "{what}");
        assert!(cache.len() == 6 && rank.memory(&cache) == before, "{what}");
    }
    let layer = || rank.computed(0..1, 6..8);
    for (tensors, error) in [
        (vec![layer()], mismatch("layers of all ranks", 2, 1)),
        (vec![layer(), layer(), layer()], mismatch("layers of all ranks", 2, 3)),
        (vec![layer(), rank.computed(0..1, 6..7)], mismatch("extent of a tensor copy", 2, 1)),
        (vec![], mismatch("layers of all ranks", 2, 0)),
    ] {
        assert_eq!(cache.merge_from_ranks(stream, &tensors), Err(error));
        assert!(cache.len() == 6 && rank.memory(&cache) == before);
    }
    for (shape, what) in [([0, 1, 1, 1, 1], "layers"), ([1, 1, 1, 0, 1], "capacity")] {
        let refused = RankCache::new(rank.backend.as_ref(), DType::F32, shape);
        assert_eq!(refused.unwrap_err(), Error::Core(CoreError::Zero { what }));
    }
}

#[test]
fn wrong_pieces_change_nothing() {
    let rank = Rank::new(Execution::Immediate);
    let stream = rank.stream.as_ref();
    let plan = PrefillPlan::even(5, 2, 7, 3).unwrap(); // layers 0..3 and 3..5; chunks of 3, 3 and 1 tokens
    let mut cache = rank.cache(5, 7);
    let piece = |stage, chunk| {
        let place = plan.place(stage, chunk).unwrap();
        rank.computed(place.layers, place.tokens)
    };
    let outside = |what, value, limit| Error::Core(CoreError::OutOfRange { what, value, limit });
    assert_eq!(cache.accept(stream, 0, 0, &piece(0, 0)), Err(outside("chunk", 0, 0)), "without a plan");
    cache.expect(plan.clone()).unwrap();
    for (stage, chunk) in [(0, 0), (1, 0), (0, 2)] {
        cache.accept(stream, stage, chunk, &piece(stage, chunk)).unwrap();
    }
    // Chunk 0 is complete, one piece of chunk 2 has arrived, and no piece of chunk 1 has.
    rank.assert_holds(&cache, 3);
    let (before, bytes) = (cache.received().unwrap().clone(), rank.memory(&cache));
    let late = |chunk, stage| Error::LatePiece { chunk, stage };
    for (stage, chunk, wrong, error) in [
        (0, 0, piece(0, 0), late(0, 0)),
        (1, 0, piece(1, 0), late(0, 1)),
        (0, 2, piece(0, 2), Error::DuplicatePiece { chunk: 2, stage: 0 }),
        (2, 1, piece(1, 1), outside("stage", 2, 2)),
        (1, 3, piece(1, 1), outside("chunk", 3, 3)),
        (0, 1, piece(1, 1), mismatch("extent of a tensor copy", 3, 2)),
        (1, 2, piece(1, 1), mismatch("extent of a tensor copy", 1, 3)),
        (1, 1, piece(1, 1).select(0, 0).unwrap(), mismatch("rank of a tensor copy", 5, 4)),
    ] {
        assert_eq!(cache.accept(stream, stage, chunk, &wrong), Err(error), "stage {stage} of chunk {chunk}");
        assert!(cache.received() == Some(&before) && cache.len() == 3);
        assert!(rank.memory(&cache) == bytes, "stage {stage} of chunk {chunk} wrote something");
    }
    let both = [piece(0, 1), piece(1, 1)];
    assert_eq!(cache.merge_from_ranks(stream, &both[..1]), Err(mismatch("ranks of the merge", 2, 1)));
    let appended = cache.append_sequence(stream, &[rank.computed(0..5, 3..4)]);
    assert_eq!(appended, Err(mismatch("pieces received", 6, 3)), "tokens are missing before these");
    assert!(cache.received() == Some(&before) && rank.memory(&cache) == bytes);
    assert_eq!(before.missing().collect::<Vec<_>>(), [(1, 0), (1, 1), (2, 1)]);
    cache.merge_from_ranks(stream, &both).unwrap();
    let both = [piece(0, 2), piece(1, 2)];
    let error = Err(Error::DuplicatePiece { chunk: 2, stage: 0 });
    assert_eq!(cache.merge_from_ranks(stream, &both), error, "a stage of the chunk has arrived before");
    cache.accept(stream, 1, 2, &both[1]).unwrap();
    assert_eq!(cache.accept(stream, 1, 2, &both[1]), Err(late(2, 1)), "after the merge is complete");
    rank.assert_holds(&cache, 7);
    cache.reset();
    assert!(cache.received().is_none() && cache.is_empty());
}

#[test]
fn a_merge_has_the_layers_of_the_cache_and_empties_it() {
    let rank = Rank::new(Execution::Immediate);
    let stream = rank.stream.as_ref();
    let plan = PrefillPlan::new(vec![0..2, 2..3], vec![0..3, 3..6]).unwrap();
    let mut cache = rank.cache(4, 9);
    assert_eq!(cache.expect(plan.clone()), Err(mismatch("layers of the plan", 4, 3)));
    let mut small = rank.cache(3, 5);
    let error = CoreError::TooLarge { what: "tokens of the plan", value: 6, most: 5 };
    assert_eq!(small.expect(plan.clone()), Err(Error::Core(error)));
    let mut cache = rank.cache(3, 9);
    cache.append_sequence(stream, &[rank.computed(0..3, 0..2)]).unwrap();
    cache.expect(plan).unwrap();
    assert_eq!((cache.len(), cache.received().unwrap().total()), (0, 4));
    for chunk in 0..2 {
        let tokens = chunk * 3..(chunk + 1) * 3;
        let pieces = [rank.computed(0..2, tokens.clone()), rank.computed(2..3, tokens)];
        cache.merge_from_ranks(stream, &pieces).unwrap();
    }
    cache.append_sequence(stream, &[rank.computed(0..3, 6..9)]).unwrap();
    rank.assert_holds(&cache, 9);
}

/// Cuts `0..n` at the given positions, and returns the parts.
fn cuts(n: usize, at: &[usize]) -> Vec<Range<usize>> {
    let mut at: Vec<usize> = at.iter().map(|cut| cut % n).chain([0, n]).collect();
    at.sort_unstable();
    at.dedup();
    at.windows(2).map(|pair| pair[0]..pair[1]).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn pieces_in_any_order_give_the_bytes_of_one_rank(
        (layers, tokens) in (1..7usize, 1..12usize),
        (stages, chunks) in (prop::collection::vec(0..7usize, 0..3), prop::collection::vec(0..12usize, 0..4)),
        seed in any::<u64>(),
        deferred in any::<bool>(),
    ) {
        let rank = Rank::new(if deferred { Execution::Deferred } else { Execution::Immediate });
        let plan = PrefillPlan::new(cuts(layers, &stages), cuts(tokens, &chunks)).unwrap();
        let mut places: Vec<(usize, usize)> =
            (0..plan.num_stages()).flat_map(|s| (0..plan.num_chunks()).map(move |c| (s, c))).collect();
        places.sort_by_key(|(s, c)| seed.rotate_left((s * 11 + c * 7) as u32).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let mut cache = rank.cache(layers, tokens);
        cache.expect(plan.clone()).unwrap();
        for (n, &(stage, chunk)) in places.iter().enumerate() {
            prop_assert_eq!(cache.received().unwrap().received(), n);
            let place = plan.place(stage, chunk).unwrap();
            cache.accept(rank.stream.as_ref(), stage, chunk, &rank.computed(place.layers, place.tokens)).unwrap();
            // The readable part ends before the first incomplete chunk.
            let complete = cache.received().unwrap().chunks_in_a_row();
            let expected = if complete == 0 { 0 } else { plan.place(0, complete - 1).unwrap().tokens.end };
            rank.assert_holds(&cache, expected);
        }
        prop_assert_eq!(cache.len(), tokens);
    }
}

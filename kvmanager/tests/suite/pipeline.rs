//! Caches of pipeline ranks: chunks appended along the sequence, and pieces merged by layer.

use kvmanager::{Error, Piece, PieceMerger, PiecePlace, PrefillPlan, RankCache};
use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use kvbackend_cpu::{CpuBackend, Execution, ThreadCommunicator};
use kvbackend_cuda::{CudaBackend, CudaOptions, NcclCommunicator};
use kvcore::{
    Backend, BlockOrder, Communicator, DType, Error as CoreError, KvArena, KvFormat, KvLayout, KvShape,
    MemoryKind, Storage, Stream, TensorView, allocate_tensor,
};
use proptest::prelude::*;
use rstest::rstest;

const BATCH: usize = 2;
const HEADS: usize = 3;
const K_DIM: usize = 4;
const V_DIM: usize = 2;

/// The memory and a stream of one rank.
struct Rank {
    backend: Arc<dyn Backend>,
    stream: Arc<dyn Stream>,
    order: BlockOrder,
}

impl Rank {
    fn new(execution: Execution, order: BlockOrder) -> Self {
        Self::on(CpuBackend::with_execution(execution), order)
    }

    fn on(backend: Arc<dyn Backend>, order: BlockOrder) -> Self {
        let stream = backend.stream().unwrap();
        Self { backend, stream, order }
    }

    fn arena(&self, layers: usize, capacity: usize, format: KvFormat) -> KvArena {
        let shape = KvShape {
            num_layers: layers,
            num_blocks: BATCH,
            block_size: capacity,
            k_heads: HEADS,
            v_heads: HEADS,
            k_dim: K_DIM,
            v_dim: V_DIM,
            format,
            order: self.order,
        };
        let layout = Arc::new(KvLayout::new(shape).unwrap());
        KvArena::allocate(self.backend.as_ref(), MemoryKind::Device, layout).unwrap()
    }

    fn cache(&self, layers: Range<usize>, capacity: usize) -> RankCache {
        RankCache::new(self.arena(layers.len(), capacity, DType::F32.into()), layers.start).unwrap()
    }

    /// Returns K and V of one layer for some tokens, as a model would compute them. Every element is a
    /// different number.
    fn computed(&self, layer: usize, tokens: &Range<usize>) -> [TensorView; 2] {
        [K_DIM, V_DIM].map(|dim| {
            let mut bytes = Vec::new();
            for entry in 0..BATCH {
                for token in tokens.clone() {
                    for row in (entry * HEADS..).take(HEADS) {
                        for i in 0..dim {
                            let n = (((layer * 64 + token) * BATCH * HEADS + row) * 8 + dim) * 8 + i;
                            bytes.extend((n as f32).to_ne_bytes());
                        }
                    }
                }
            }
            let view = self.tensor(DType::F32, &[BATCH, tokens.len(), HEADS, dim]);
            self.stream.write(&view, &bytes).unwrap();
            view
        })
    }

    fn tensor(&self, dtype: DType, shape: &[usize]) -> TensorView {
        allocate_tensor(self.backend.as_ref(), MemoryKind::Device, dtype, shape).unwrap()
    }

    fn append(&self, cache: &mut RankCache, layer: usize, tokens: &Range<usize>) {
        let [k, v] = self.computed(layer, tokens);
        cache.append_sequence(self.stream.as_ref(), layer, &k, &v).unwrap();
    }

    /// Returns the bytes of all layers, K before V, in an order that does not depend on the memory layout.
    fn bytes(&self, cache: &RankCache) -> Vec<u8> {
        let mut all = Vec::new();
        for layer in cache.layers() {
            let (k, v) = cache.get_data(layer).unwrap();
            for view in [k, v] {
                let dense = view.contiguous(self.backend.as_ref(), self.stream.as_ref()).unwrap();
                let mut bytes = vec![0; dense.len() * 4];
                self.stream.read(&dense, &mut bytes).unwrap();
                all.extend(bytes);
            }
        }
        all
    }

    /// Returns all bytes of the memory under a cache, readable or not.
    fn memory(&self, cache: &RankCache) -> Vec<Vec<u8>> {
        let read = |storage: &Arc<dyn Storage>| {
            let mut bytes = vec![0; storage.len()];
            let view = TensorView::new(Arc::clone(storage), DType::U8, &[bytes.len()]).unwrap();
            self.stream.read(&view, &mut bytes).unwrap();
            bytes
        };
        cache.arena().storages().map(read).collect()
    }

    /// Returns the cache of a rank that holds the whole model.
    fn whole(&self, plan: &PrefillPlan) -> RankCache {
        let mut cache = self.cache(plan.layers(), plan.num_tokens());
        for chunk in 0..plan.num_chunks() {
            let place = plan.place(0, chunk).unwrap();
            plan.layers().for_each(|layer| self.append(&mut cache, layer, &place.tokens));
        }
        cache
    }

    /// Returns the piece of a stage, from a cache of its own.
    fn piece(&self, place: &PiecePlace) -> Piece {
        let mut own = self.cache(place.layers.clone(), place.tokens.end);
        for layer in place.layers.clone() {
            self.append(&mut own, layer, &(0..place.tokens.end));
        }
        own.piece(place.clone()).unwrap()
    }

    fn merger(&self, plan: &PrefillPlan) -> PieceMerger {
        PieceMerger::new(self.cache(plan.layers(), plan.num_tokens()), plan.clone()).unwrap()
    }
}

/// Runs one stage: computes its layers chunk by chunk, and exchanges each chunk with the other stages.
fn stage(rank: &Rank, communicator: &dyn Communicator, plan: &PrefillPlan) -> PieceMerger {
    let stage = communicator.rank();
    let mut own = rank.cache(plan.place(stage, 0).unwrap().layers, plan.num_tokens());
    let mut merger = rank.merger(plan);
    for chunk in 0..plan.num_chunks() {
        let place = plan.place(stage, chunk).unwrap();
        place.layers.clone().for_each(|layer| rank.append(&mut own, layer, &place.tokens));
        assert_eq!(own.len(place.layers.start).unwrap(), place.tokens.end, "appended along the sequence");
        let piece = own.piece(place).unwrap();
        merger.exchange(communicator, rank.backend.as_ref(), rank.stream.as_ref(), &piece).unwrap();
        assert!(merger.received().is_chunk_complete(chunk).unwrap());
    }
    communicator.wait(rank.stream.as_ref()).unwrap();
    merger
}

/// Runs all stages of a plan, each in a thread with a backend of its own.
fn all_stages(plan: &PrefillPlan, execution: Execution, order: BlockOrder) -> Vec<(Rank, PieceMerger)> {
    let group = ThreadCommunicator::group(plan.num_stages(), Duration::from_secs(60)).unwrap();
    run_stages(plan, group.into_iter().map(|of| (of, Rank::new(execution, order))).collect())
}

/// Runs all stages of a plan, each in a thread.
fn run_stages<C: Communicator>(plan: &PrefillPlan, ranks: Vec<(C, Rank)>) -> Vec<(Rank, PieceMerger)> {
    thread::scope(|scope| {
        let run = |(communicator, rank): (C, Rank)| {
            scope.spawn(move || {
                let merger = stage(&rank, &communicator, plan);
                (rank, merger)
            })
        };
        let ranks: Vec<_> = ranks.into_iter().map(run).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn every_rank_ends_with_36_layers_of_21_tokens() {
    let plan = &PrefillPlan::even(36, 3, 21, 7).unwrap();
    let mergers = all_stages(plan, Execution::Immediate, BlockOrder::TokenMajor);
    let single = Rank::new(Execution::Immediate, BlockOrder::HeadMajor);
    let expected = single.bytes(&single.whole(plan));
    for (rank, merger) in mergers {
        assert_eq!(
            merger.received().to_string(),
            "Chunk    |  PP0  PP1  PP2\n\
             -------------------------\n\
             Chunk0   |    1    1    1\n\
             Chunk1   |    1    1    1\n\
             Chunk2   |    1    1    1\n\
             received: 9/9 (100.0 %)"
        );
        let cache = merger.finish().unwrap();
        assert_eq!(cache.layers(), 0..36);
        assert!(cache.layers().all(|layer| cache.len(layer) == Ok(21)), "21 tokens, not 63");
        assert!(rank.bytes(cache) == expected, "the bytes of a rank that computed everything itself");
    }
}

#[rstest]
fn stages_of_different_sizes_exchange_their_pieces(
    #[values(Execution::Immediate, Execution::Deferred)] execution: Execution,
    #[values(BlockOrder::TokenMajor, BlockOrder::HeadMajor)] order: BlockOrder,
    #[values(1, 2, 5)] stages: usize,
) {
    let plan = PrefillPlan::even(7, stages, 10, 4).unwrap();
    let single = Rank::new(Execution::Immediate, BlockOrder::HeadMajor);
    let expected = single.bytes(&single.whole(&plan));
    for (rank, merger) in all_stages(&plan, execution, order) {
        assert!(rank.bytes(merger.finish().unwrap()) == expected);
    }
}

#[rstest]
fn cards_exchange_their_pieces(#[values(1, 2, 4)] stages: usize) {
    let plan = PrefillPlan::even(7, stages, 10, 4).unwrap();
    let open = |device| CudaBackend::with_options(&CudaOptions { device, ..CudaOptions::default() });
    let backends: kvcore::Result<Vec<_>> = (0..stages).map(open).collect();
    let group = backends
        .and_then(|backends| Ok((NcclCommunicator::group(&backends, Duration::from_secs(60))?, backends)));
    let (group, backends) = match group {
        Ok(found) => found,
        Err(reason @ CoreError::NoDevice { .. }) => return kvconform::skip(reason),
        Err(error) => panic!("{error}"),
    };
    let single = Rank::new(Execution::Immediate, BlockOrder::HeadMajor);
    let expected = single.bytes(&single.whole(&plan));
    let ranks = backends.into_iter().map(|backend| Rank::on(backend, BlockOrder::TokenMajor));
    for (rank, merger) in run_stages(&plan, group.into_iter().zip(ranks).collect()) {
        assert!(rank.bytes(merger.finish().unwrap()) == expected);
    }
}

#[test]
fn an_exchange_of_the_wrong_piece_sends_nothing() {
    let rank = Rank::new(Execution::Immediate, BlockOrder::HeadMajor);
    let plan = PrefillPlan::even(4, 2, 6, 3).unwrap();
    let piece = |stage, chunk| rank.piece(&plan.place(stage, chunk).unwrap());
    let group = |ranks| ThreadCommunicator::group(ranks, Duration::from_millis(20)).unwrap();
    let (three, two) = (group(3), group(2));
    let mut merger = rank.merger(&plan);
    let exchange = |merger: &mut PieceMerger, of: &ThreadCommunicator, piece: &Piece| {
        merger.exchange(of, rank.backend.as_ref(), rank.stream.as_ref(), piece)
    };
    let mismatch = |what, expected, got| Err(Error::Core(CoreError::Mismatch { what, expected, got }));
    let result = exchange(&mut merger, &three[0], &piece(0, 0));
    assert_eq!(result, mismatch("ranks of a pipeline", 2, 3));
    assert_eq!(exchange(&mut merger, &two[0], &piece(1, 0)), mismatch("stage of this rank", 0, 1));
    merger.accept(rank.stream.as_ref(), &piece(1, 0)).unwrap();
    let result = exchange(&mut merger, &two[0], &piece(0, 0));
    assert_eq!(
        result,
        Err(Error::DuplicatePiece { chunk: 0, stage: 1 }),
        "the other stage's piece came before"
    );
    merger.accept(rank.stream.as_ref(), &piece(0, 0)).unwrap();
    let result = exchange(&mut merger, &two[0], &piece(0, 0));
    assert_eq!(result, Err(Error::LatePiece { chunk: 0, stage: 0 }));
    assert_eq!(two[0].check(), Ok(()), "nothing was sent");
    // The other stage does not come.
    let before = merger.received().clone();
    let result = exchange(&mut merger, &two[0], &piece(0, 1));
    assert!(matches!(result, Err(Error::Core(CoreError::RanksTimedOut { rank: 0, .. }))), "{result:?}");
    assert_eq!(*merger.received(), before);
}

#[test]
fn views_grow_in_place_and_reset_keeps_the_memory() {
    let rank = Rank::new(Execution::Immediate, BlockOrder::TokenMajor);
    let mut cache = rank.cache(4..6, 10);
    let address = cache.arena().k().address();
    for (tokens, len) in [(0..4, 4), (4..5, 5), (5..10, 10)] {
        let [k, v] = rank.computed(5, &tokens);
        let (k, v) = cache.append_sequence(rank.stream.as_ref(), 5, &k, &v).unwrap();
        assert_eq!(k.shape(), [BATCH, len, HEADS, K_DIM]);
        assert_eq!(v.shape(), [BATCH, len, HEADS, V_DIM]);
        assert_eq!(k.storage().address(), address, "no other memory");
        for entry in 0..BATCH {
            let tokens = k.select(0, entry).unwrap();
            assert!(tokens.is_contiguous(), "an entry's tokens are one run of memory");
            assert_eq!(cache.segment(5, entry).unwrap().len, len);
        }
    }
    assert_eq!((cache.len(4), cache.len(5), cache.is_empty()), (Ok(0), Ok(10), false));
    let [k, _] = rank.computed(5, &(0..10));
    let dense = |view: &TensorView| {
        let view = view.contiguous(rank.backend.as_ref(), rank.stream.as_ref()).unwrap();
        let mut bytes = vec![0; view.len() * 4];
        rank.stream.read(&view, &mut bytes).unwrap();
        bytes
    };
    assert_eq!(dense(&cache.get_data(5).unwrap().0), dense(&k));
    cache.reset();
    assert!(cache.is_empty() && cache.get_data(5).unwrap().0.is_empty());
    rank.append(&mut cache, 5, &(0..10));
    let fixed = cache.into_static();
    assert_eq!((fixed.entry_len(1, 0), fixed.arena().k().address()), (Ok(10), address));
}

#[test]
fn wrong_appends_change_nothing() {
    let rank = Rank::new(Execution::Immediate, BlockOrder::HeadMajor);
    let mut cache = rank.cache(4..6, 8);
    rank.append(&mut cache, 4, &(0..6));
    let before = rank.memory(&cache);
    let [k, v] = rank.computed(4, &(6..8));
    let [long_k, long_v] = rank.computed(4, &(6..9));
    let f32 = |shape: &[usize]| rank.tensor(DType::F32, shape);
    let half = |dim| rank.tensor(DType::F16, &[BATCH, 2, HEADS, dim]);
    for (what, layer, k, v) in [
        ("a layer before this rank's", 3, k.clone(), v.clone()),
        ("a layer after this rank's", 6, k.clone(), v.clone()),
        ("tokens past the capacity", 4, long_k, long_v),
        ("another batch", 4, f32(&[1, 2, HEADS, K_DIM]), f32(&[1, 2, HEADS, V_DIM])),
        ("other heads", 4, f32(&[BATCH, 2, 1, K_DIM]), v.clone()),
        ("another dim", 4, k.clone(), f32(&[BATCH, 2, HEADS, K_DIM])),
        ("more tokens in V", 4, k.clone(), f32(&[BATCH, 1, HEADS, V_DIM])),
        ("another rank of tensor", 4, f32(&[2, HEADS, K_DIM]), f32(&[2, HEADS, V_DIM])),
        ("another element type", 4, half(K_DIM), half(V_DIM)),
    ] {
        let result = cache.append_sequence(rank.stream.as_ref(), layer, &k, &v);
        assert!(
            matches!(
                result,
                Err(Error::Core(
                    CoreError::OutOfRange { .. }
                        | CoreError::TooLarge { .. }
                        | CoreError::Mismatch { .. }
                        | CoreError::DTypeMismatch { .. }
                ))
            ),
            "{what}: {result:?}"
        );
        assert_eq!((cache.len(4), cache.len(5)), (Ok(6), Ok(0)), "{what}");
    }
    assert!(cache.get_data(6).is_err() && cache.len(3).is_err() && cache.segment(4, BATCH).is_err());
    for (layers, tokens) in [(4..6, 0..1), (4..5, 3..7), (3..5, 0..1), (4..7, 0..1), (5..5, 0..0)] {
        let place = PiecePlace { stage: 0, chunk: 0, layers, tokens };
        let empty = place.layers.is_empty();
        assert_eq!(cache.piece(place.clone()).is_err(), !empty, "{place:?}");
    }
    assert!(rank.memory(&cache) == before);
    let quantised = RankCache::new(rank.arena(1, 4, KvFormat::Int8 { group: 2 }), 0);
    assert!(matches!(quantised, Err(Error::Core(CoreError::InvalidFormat { .. }))));
    let overflow = RankCache::new(rank.arena(1, 4, DType::F32.into()), usize::MAX);
    assert!(matches!(overflow, Err(Error::Core(CoreError::Overflow { .. }))));
}

#[test]
fn wrong_pieces_change_nothing() {
    let rank = Rank::new(Execution::Immediate, BlockOrder::HeadMajor);
    let plan = PrefillPlan::even(5, 2, 7, 3).unwrap();
    let mut merger = rank.merger(&plan);
    let stream = rank.stream.as_ref();
    let piece = |stage, chunk| rank.piece(&plan.place(stage, chunk).unwrap());
    for (stage, chunk) in [(0, 0), (1, 0), (0, 2)] {
        merger.accept(stream, &piece(stage, chunk)).unwrap();
    }
    // chunk 0 is sealed, one stage of chunk 2 has arrived, and none of chunk 1
    let lens =
        |merger: &PieceMerger| (0..5).map(|layer| merger.cache().len(layer).unwrap()).collect::<Vec<_>>();
    assert_eq!(lens(&merger), [3; 5], "tokens behind a gap are not readable");
    let (before, bytes) = (merger.received().clone(), rank.memory(merger.cache()));
    let good = piece(1, 1);
    let place = |change: fn(&mut PiecePlace)| {
        let mut piece = good.clone();
        change(&mut piece.place);
        piece
    };
    let late = |chunk, stage| Error::LatePiece { chunk, stage };
    let mismatch = |what, expected, got| Error::Core(CoreError::Mismatch { what, expected, got });
    let half = |heads| rank.tensor(DType::F16, &[2, BATCH, 3, heads, K_DIM]);
    let wide = rank.tensor(DType::F32, &[2, BATCH, 3, HEADS, K_DIM]);
    for (wrong, error) in [
        (piece(0, 0), late(0, 0)),
        (piece(1, 0), late(0, 1)),
        (piece(0, 2), Error::DuplicatePiece { chunk: 2, stage: 0 }),
        (place(|p| p.stage = 2), Error::Core(CoreError::OutOfRange { what: "stage", value: 2, limit: 2 })),
        (place(|p| p.chunk = 3), Error::Core(CoreError::OutOfRange { what: "chunk", value: 3, limit: 3 })),
        (place(|p| p.layers.start = 2), mismatch("first layer of the piece", 3, 2)),
        (place(|p| p.layers.end = 4), mismatch("end of the layers of the piece", 5, 4)),
        (place(|p| p.tokens.start = 2), mismatch("first token of the piece", 3, 2)),
        (place(|p| p.tokens.end = 7), mismatch("end of the tokens of the piece", 6, 7)),
        (Piece { k: good.v.clone(), ..good.clone() }, mismatch("extent of a tensor copy", K_DIM, V_DIM)),
        (Piece { v: wide, ..good.clone() }, mismatch("extent of a tensor copy", V_DIM, K_DIM)),
        (Piece { k: half(1), ..good.clone() }, mismatch("extent of a tensor copy", HEADS, 1)),
        (
            Piece { k: half(HEADS), ..good.clone() },
            Error::Core(CoreError::DTypeMismatch {
                what: "tensor copy",
                expected: DType::F32,
                got: DType::F16,
            }),
        ),
        (Piece { k: good.k.select(0, 0).unwrap(), ..good.clone() }, mismatch("rank of a tensor copy", 5, 4)),
        (
            merger
                .cache()
                .piece(plan.place(1, 0).unwrap())
                .map(|own| Piece { place: good.place.clone(), ..own })
                .unwrap(),
            Error::Core(CoreError::Aliased { what: "source and destination of a tensor copy" }),
        ),
    ] {
        assert_eq!(merger.accept(stream, &wrong), Err(error), "{:?}", wrong.place);
        assert_eq!((merger.received(), lens(&merger)), (&before, vec![3; 5]));
        assert!(rank.memory(merger.cache()) == bytes, "{:?} wrote something", wrong.place);
    }
    assert_eq!(merger.finish().unwrap_err(), mismatch("pieces received", 6, 3));
    assert_eq!(before.missing().collect::<Vec<_>>(), [(1, 0), (1, 1), (2, 1)]);
    for (stage, chunk) in [(1, 2), (1, 1), (0, 1)] {
        merger.accept(stream, &piece(stage, chunk)).unwrap();
    }
    assert_eq!(lens(&merger), [7; 5]);
    assert_eq!(merger.accept(stream, &good), Err(late(1, 1)), "after the merge is finished");
    assert_eq!(rank.bytes(merger.finish().unwrap()), rank.bytes(&rank.whole(&plan)));
}

#[test]
fn a_merge_begins_with_an_empty_cache_of_the_plans_layers_and_room() {
    let rank = Rank::new(Execution::Immediate, BlockOrder::HeadMajor);
    let plan = PrefillPlan::new(vec![2..4, 4..5], vec![0..3, 3..6]).unwrap();
    let new = |cache| PieceMerger::new(cache, plan.clone()).map(drop);
    let mismatch = |what, expected, got| Err(Error::Core(CoreError::Mismatch { what, expected, got }));
    assert_eq!(new(rank.cache(1..5, 6)), mismatch("first layer of the cache", 2, 1));
    assert_eq!(new(rank.cache(2..6, 6)), mismatch("end of the layers of the cache", 5, 6));
    assert_eq!(
        new(rank.cache(2..5, 5)),
        Err(Error::Core(CoreError::TooLarge { what: "tokens of the plan", value: 6, most: 5 }))
    );
    let mut used = rank.cache(2..5, 9);
    rank.append(&mut used, 4, &(0..1));
    assert_eq!(new(used), mismatch("tokens in the cache before a merge", 0, 1));
    let mut merger = PieceMerger::new(rank.cache(2..5, 9), plan.clone()).unwrap();
    merger.accept(rank.stream.as_ref(), &rank.piece(&plan.place(1, 0).unwrap())).unwrap();
    let mut again = merger.into_cache();
    assert_eq!([2, 3, 4].map(|layer| again.len(layer).unwrap()), [0, 0, 3]);
    again.reset();
    assert_eq!(new(again), Ok(()), "the memory serves another prompt");
}

/// Returns the cuts of `0..n` at some of the places.
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
        shuffle in any::<prop::sample::Index>(),
        seed in any::<u64>(),
        (deferred, token_major) in any::<(bool, bool)>(),
    ) {
        let execution = if deferred { Execution::Deferred } else { Execution::Immediate };
        let order = if token_major { BlockOrder::TokenMajor } else { BlockOrder::HeadMajor };
        let rank = Rank::new(execution, order);
        let plan = PrefillPlan::new(cuts(layers, &stages), cuts(tokens, &chunks)).unwrap();
        let mut places: Vec<(usize, usize)> =
            (0..plan.num_stages()).flat_map(|s| (0..plan.num_chunks()).map(move |c| (s, c))).collect();
        places.sort_by_key(|(s, c)| seed.rotate_left((s * 11 + c * 7) as u32).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let start = shuffle.index(places.len());
        places.rotate_left(start);
        let mut merger = rank.merger(&plan);
        for (n, &(stage, chunk)) in places.iter().enumerate() {
            prop_assert!(merger.finish().is_err());
            prop_assert_eq!(merger.received().received(), n);
            merger.accept(rank.stream.as_ref(), &rank.piece(&plan.place(stage, chunk).unwrap())).unwrap();
            // the readable part is a prefix that has arrived
            for stage in 0..plan.num_stages() {
                let run = merger.received().chunks_in_a_row(stage).unwrap();
                let place = plan.place(stage, run.saturating_sub(1)).unwrap();
                let expected = if run == 0 { 0 } else { place.tokens.end };
                prop_assert_eq!(merger.cache().len(place.layers.start), Ok(expected));
            }
        }
        prop_assert!(rank.bytes(merger.finish().unwrap()) == rank.bytes(&rank.whole(&plan)));
    }
}

//! Other engines' caches: compares every layout, instruction set and number of threads with the reference
//! kernels.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use kvbackend_cpu::{
    CpuBackend, CpuOptions, CpuStorage, ForeignCache, ForeignLoad, ForeignOrder, ForeignPlane, ForeignShape,
    HostView, HostViewMut, KernelSet, SimdLevel, Thresholds,
};
use kvcore::{
    BlockOrder, DType, Error, KvArena, KvLayout, KvShape, LayerRopes, MemoryKind, RopeConfig, RopeFamily,
    Storage, TensorView, WriteSlots,
};
use proptest::prelude::*;

const LAYERS: usize = 2;
const HEADS: usize = 3;
const BLOCKS: usize = 3;
const OWN_BLOCKS: usize = 9;

/// A layout of another engine's keys and values.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Layout {
    /// `[blocks, heads, block, 2 × dim]`: transposed keys, followed by the values.
    Columns,
    /// Blocks and heads like in `Columns`, with keys and values in matrix-unit tiles.
    Tiles,
    /// `[2, blocks, block, heads, dim]`.
    TokenMajor,
    /// `[blocks, 2, heads, block, dim]`.
    HeadMajor,
}

struct Engine {
    cache: ForeignCache,
    memory: Vec<Arc<dyn Storage>>,
}

fn engine(layout: Layout, block_size: usize, dim: usize, dtype: DType) -> Result<Engine, Error> {
    let shape = ForeignShape { num_blocks: BLOCKS, block_size, heads: HEADS, dim, dtype };
    let piece = block_size * dim;
    let elements = BLOCKS * HEADS * 2 * piece;
    let memory: Vec<Arc<dyn Storage>> = (0..LAYERS)
        .map(|_| {
            let bytes = dtype.bytes_for(elements).unwrap();
            Arc::new(CpuStorage::allocate(MemoryKind::System, bytes).unwrap()) as Arc<dyn Storage>
        })
        .collect();
    let planes = |storage: &Arc<dyn Storage>| {
        let plane = |start, block, head, order| ForeignPlane {
            storage: Arc::clone(storage),
            start,
            block,
            head,
            order,
        };
        let (block, head) = (HEADS * 2 * piece, 2 * piece);
        match layout {
            Layout::Columns => [
                plane(0, block, head, ForeignOrder::Columns),
                plane(piece, block, head, ForeignOrder::Rows { token: dim }),
            ],
            Layout::Tiles => [
                plane(0, block, head, ForeignOrder::KeyTiles),
                plane(piece, block, head, ForeignOrder::ValueTiles),
            ],
            Layout::TokenMajor => [0, BLOCKS * HEADS * piece]
                .map(|start| plane(start, HEADS * piece, dim, ForeignOrder::Rows { token: HEADS * dim })),
            Layout::HeadMajor => {
                [0, HEADS * piece].map(|start| plane(start, block, piece, ForeignOrder::Rows { token: dim }))
            }
        }
    };
    Ok(Engine { cache: ForeignCache::new(shape, memory.iter().map(planes).collect())?, memory })
}

impl Engine {
    fn bytes(&self) -> Vec<Vec<u8>> {
        let all = |storage: &Arc<dyn Storage>| {
            let view = TensorView::new(Arc::clone(storage), DType::U8, &[storage.len()]).unwrap();
            HostView::<u8>::of(&view).unwrap().to_vec()
        };
        self.memory.iter().map(all).collect()
    }
}

fn arena(backend: &CpuBackend, dim: usize, dtype: DType, order: BlockOrder, seed: u32) -> KvArena {
    let shape = KvShape {
        num_layers: LAYERS,
        num_blocks: OWN_BLOCKS,
        block_size: 8,
        k_heads: HEADS,
        v_heads: HEADS,
        k_dim: dim,
        v_dim: dim,
        format: dtype.into(),
        order,
    };
    let arena =
        KvArena::allocate(backend, MemoryKind::System, Arc::new(KvLayout::new(shape).unwrap())).unwrap();
    for (i, plane) in [arena.k_plane(), arena.v_plane()].into_iter().enumerate() {
        let bytes = plane.storage.len();
        let view = TensorView::new(Arc::clone(plane.storage), DType::U8, &[bytes]).unwrap();
        let mut bytes = HostViewMut::<u8>::of(&view).unwrap();
        let number = |at: usize| {
            let mixed = (at as u32).wrapping_mul(2_654_435_761).wrapping_add(seed + i as u32 * 977) >> 8;
            (mixed % 2001) as f32 / 1000.0 - 1.0
        };
        match dtype {
            DType::F32 => bytes
                .as_chunks_mut::<4>()
                .0
                .iter_mut()
                .enumerate()
                .for_each(|(at, x)| *x = number(at).to_le_bytes()),
            DType::F16 => bytes
                .as_chunks_mut::<2>()
                .0
                .iter_mut()
                .enumerate()
                .for_each(|(at, x)| *x = half::f16::from_f32(number(at)).to_le_bytes()),
            _ => bytes
                .as_chunks_mut::<2>()
                .0
                .iter_mut()
                .enumerate()
                .for_each(|(at, x)| *x = half::bf16::from_f32(number(at)).to_le_bytes()),
        }
    }
    arena
}

fn contents(arena: &KvArena) -> Vec<Vec<u8>> {
    let of = |storage: &Arc<dyn Storage>| {
        let view = TensorView::new(Arc::clone(storage), DType::U8, &[storage.len()]).unwrap();
        HostView::<u8>::of(&view).unwrap().to_vec()
    };
    vec![of(arena.k_plane().storage), of(arena.v_plane().storage)]
}

fn ropes(dim: usize) -> LayerRopes {
    let layer = |theta| RopeConfig::new(dim, theta);
    RopeFamily::new(&[layer(10_000.0), layer(500.0)], 512).unwrap().at(512).unwrap()
}

fn backends() -> Vec<Arc<CpuBackend>> {
    let made = |simd, threads| {
        let thresholds = Thresholds { bytes_per_thread: 1, stream_bytes: 1 };
        let options =
            CpuOptions { simd: Some(simd), threads: Some(threads), thresholds, ..CpuOptions::default() };
        CpuBackend::with_options(&options).unwrap()
    };
    let levels = SimdLevel::ALL.into_iter().filter(|level| level.is_available());
    levels.flat_map(|level| [made(level, 1), made(level, 3)]).collect()
}

fn reference() -> Arc<CpuBackend> {
    CpuBackend::with_options(&CpuOptions { kernels: KernelSet::Reference, ..CpuOptions::default() }).unwrap()
}

/// Returns distinct slots below `limit`, mostly in runs.
fn slots(limit: usize, count: usize, seed: u64) -> Vec<i64> {
    let mut all: Vec<i64> = (0..limit as i64).collect();
    let mut state = seed | 1;
    for cut in 0..3 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(cut + 1);
        all.rotate_left((state >> 33) as usize % limit);
        if state & 1 == 0 {
            let half = limit / 2;
            all[..half].reverse();
        }
    }
    all.truncate(count);
    all
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn rows_go_and_come_as_by_the_plain_loops(
        layout in prop::sample::select(vec![Layout::Columns, Layout::Tiles, Layout::TokenMajor, Layout::HeadMajor]),
        dtype in prop::sample::select(vec![DType::F32, DType::F16, DType::BF16]),
        dim in prop::sample::select(vec![16usize, 48, 64]),
        block_size in prop::sample::select(vec![16usize, 32]),
        own in prop::sample::select(vec![BlockOrder::TokenMajor, BlockOrder::HeadMajor]),
        (count, delta, seed) in (1usize..40, -300i64..300, any::<u64>()),
    ) {
        prop_assume!(layout != Layout::Tiles || dtype != DType::F32);
        let (ours, mut theirs) = (slots(OWN_BLOCKS * 8, count, seed), slots(BLOCKS * block_size, count, seed >> 7));
        if seed & 2 == 0 {
            theirs[count / 2] = -1;
        }
        let cut = count / 3;
        let load = |range: std::ops::Range<usize>, delta| ForeignLoad {
            from: ours[range.clone()].to_vec().into(), to: theirs[range].to_vec().into(), delta,
        };
        let loads = [load(0..cut, 0), load(cut..count, delta)];
        let plain = reference();
        let from = arena(&plain, dim, dtype, own, 5);
        let expected = engine(layout, block_size, dim, dtype).unwrap();
        expected.cache.load(&plain, &from, &loads, &ropes(dim)).unwrap();
        let kept: Vec<i64> = theirs.iter().copied().filter(|slot| *slot >= 0).collect();
        let back = WriteSlots::unchecked(ours[..kept.len()].to_vec());
        let saved = arena(&plain, dim, dtype, own, 9);
        expected.cache.save(&plain, &saved, &back, &kept.clone().into()).unwrap();
        for backend in backends() {
            let got = engine(layout, block_size, dim, dtype).unwrap();
            got.cache.load(&backend, &from, &loads, &ropes(dim)).unwrap();
            prop_assert!(got.bytes() == expected.bytes(), "{:?}", backend.simd());
            let into = arena(&backend, dim, dtype, own, 9);
            got.cache.save(&backend, &into, &back, &kept.clone().into()).unwrap();
            prop_assert!(contents(&into) == contents(&saved), "{:?}", backend.simd());
        }
    }
}

#[test]
fn rows_loaded_without_a_move_come_back_bit_for_bit() {
    for (layout, dtype) in
        [(Layout::Columns, DType::F32), (Layout::Columns, DType::BF16), (Layout::Tiles, DType::BF16)]
    {
        // Whole blocks are copied, so that cache lines can bypass the caches.
        for backend in backends() {
            let arena = |seed| arena(&backend, 32, dtype, BlockOrder::TokenMajor, seed);
            let (from, to) = (arena(1), arena(2));
            let other = engine(layout, 32, 32, dtype).unwrap();
            let ours: Vec<i64> = (0..OWN_BLOCKS as i64 * 8).collect();
            let load = ForeignLoad { from: ours.clone().into(), to: ours.clone().into(), delta: 0 };
            other.cache.load(&backend, &from, &[load], &ropes(32)).unwrap();
            other.cache.save(&backend, &to, &WriteSlots::unchecked(ours.clone()), &ours.into()).unwrap();
            assert!(contents(&from) == contents(&to), "{layout:?} {dtype:?} {:?}", backend.simd());
        }
    }
}

#[test]
fn wrong_layouts_and_slots_are_refused() {
    let refused = |layout, block_size, dim, dtype| engine(layout, block_size, dim, dtype).err().unwrap();
    assert!(matches!(refused(Layout::Tiles, 32, 32, DType::F32), Error::InvalidStrides { .. }));
    assert!(matches!(
        refused(Layout::Tiles, 24, 32, DType::BF16),
        Error::NotMultiple { what: "block_size", .. }
    ));
    assert!(matches!(refused(Layout::Tiles, 32, 24, DType::BF16), Error::NotMultiple { what: "dim", .. }));
    assert!(matches!(refused(Layout::Columns, 32, 32, DType::U8), Error::NotComputed { .. }));

    let backend = CpuBackend::new();
    let good = engine(Layout::Columns, 32, 32, DType::F32).unwrap();
    let memory = Arc::clone(&good.memory[0]);
    let shape = good.cache.shape().clone();
    let plane = |start, block, order| ForeignPlane {
        storage: Arc::clone(&memory),
        start,
        block,
        head: 32 * 32,
        order,
    };
    let far = plane(memory.len(), 6 * 32 * 32, ForeignOrder::Columns);
    let near = plane(0, 32 * 32, ForeignOrder::Columns);
    let thin = plane(0, 6 * 32 * 32, ForeignOrder::Rows { token: 31 });
    for (wrong, too_far) in [(far, true), (near, false), (thin, false)] {
        let error = ForeignCache::new(shape.clone(), vec![[wrong.clone(), wrong]]).unwrap_err();
        assert_eq!(matches!(error, Error::TooLarge { .. }), too_far, "{error}");
        assert_eq!(matches!(error, Error::InvalidStrides { .. }), !too_far, "{error}");
    }

    let own = arena(&backend, 32, DType::F32, BlockOrder::TokenMajor, 1);
    let load = |from: Vec<i64>, to: Vec<i64>, delta| {
        let load = ForeignLoad { from: from.into(), to: to.into(), delta };
        good.cache.load(&backend, &own, &[load], &ropes(32)).unwrap_err()
    };
    assert!(matches!(load(vec![0, 1], vec![0], 0), Error::Mismatch { .. }));
    assert!(matches!(load(vec![0, 1], vec![5, 5], 0), Error::Twice { number: 5, .. }));
    assert!(matches!(load(vec![0], vec![96], 0), Error::OutOfRange { value: 96, limit: 96, .. }));
    assert!(matches!(load(vec![72], vec![0], 0), Error::OutOfRange { value: 72, limit: 72, .. }));
    assert!(matches!(load(vec![-1], vec![0], 0), Error::OutOfRange { value: -1, .. }));
    assert!(load(vec![0], vec![0], 100_000).to_string().contains("100000"));
    let other = arena(&backend, 16, DType::F32, BlockOrder::TokenMajor, 1);
    let to = WriteSlots::unchecked(vec![0]);
    assert!(matches!(good.cache.save(&backend, &other, &to, &vec![0].into()), Err(Error::Mismatch { .. })));
    let half = arena(&backend, 32, DType::BF16, BlockOrder::TokenMajor, 1);
    assert!(matches!(good.cache.save(&backend, &half, &to, &vec![0].into()), Err(Error::Mismatch { .. })));
}

#[test]
fn planes_that_share_elements_are_refused() {
    let (block_size, dim, dtype) = (32, 16, DType::F32);
    let shape = ForeignShape { num_blocks: BLOCKS, block_size, heads: HEADS, dim, dtype };
    let piece = block_size * dim;
    let elements = 8 * BLOCKS * HEADS * piece;
    let memory: Arc<dyn Storage> =
        Arc::new(CpuStorage::allocate(MemoryKind::System, dtype.bytes_for(elements).unwrap()).unwrap());
    let plane = |start, order| ForeignPlane {
        storage: Arc::clone(&memory),
        start,
        block: HEADS * 2 * piece,
        head: 2 * piece,
        order,
    };
    let (columns, rows) = (ForeignOrder::Columns, ForeignOrder::Rows { token: dim });
    let layer = |start| [plane(start, columns), plane(start + piece, rows)];
    let far = 2 * BLOCKS * HEADS * piece;
    let new = |layers: Vec<[ForeignPlane; 2]>| ForeignCache::new(shape.clone(), layers);
    new(vec![layer(0), layer(far)]).unwrap();
    let aliased = |layers| matches!(new(layers), Err(Error::Aliased { .. }));
    assert!(aliased(vec![layer(0), layer(0)]), "two layers over one memory");
    assert!(aliased(vec![[plane(0, columns), plane(0, rows)]]), "keys that are values");
    assert!(aliased(vec![[plane(0, columns), plane(piece - 1, rows)]]), "a value within the keys");
    assert!(aliased(vec![layer(0), layer(2 * piece)]), "a layer that begins at the second head of another");
    assert!(
        aliased(vec![layer(0), layer(far - 2 * piece)]),
        "a layer that begins at the last head of another"
    );
    assert!(aliased(vec![layer(far), layer(0), layer(far + 1)]), "the third layer");
    let other_distance = ForeignPlane { head: 3 * piece, block: HEADS * 3 * piece, ..plane(piece, rows) };
    assert!(aliased(vec![[plane(0, columns), other_distance]]), "planes that cannot be compared");
}

#[test]
fn an_arena_inside_the_other_engines_cache_is_refused() {
    let backend = CpuBackend::new();
    let arena = arena(&backend, 16, DType::F32, BlockOrder::TokenMajor, 1);
    let elements = arena.k_plane().storage.len() / 4;
    let shape = ForeignShape { num_blocks: 1, block_size: 8, heads: HEADS, dim: 16, dtype: DType::F32 };
    let piece = 8 * 16;
    let plane = |storage: &Arc<dyn Storage>, start| ForeignPlane {
        storage: Arc::clone(storage),
        start,
        block: HEADS * piece,
        head: piece,
        order: ForeignOrder::Rows { token: 16 },
    };
    let (k, v) = (arena.k_plane().storage, arena.v_plane().storage);
    assert!(elements >= LAYERS * HEADS * piece);
    let layers = (0..LAYERS).map(|layer| [k, v].map(|storage| plane(storage, layer * HEADS * piece)));
    let cache = ForeignCache::new(shape, layers.collect()).unwrap();
    let ropes = RopeFamily::new(&vec![RopeConfig::new(16, 10_000.0); LAYERS], 64).unwrap().at(64).unwrap();
    let load = ForeignLoad { from: vec![3].into(), to: vec![0].into(), delta: 0 };
    let loaded = cache.load(&backend, &arena, &[load], &ropes);
    assert!(matches!(loaded, Err(Error::Aliased { .. })), "{loaded:?}");
    let saved = cache.save(&backend, &arena, &WriteSlots::unchecked(vec![3]), &vec![0].into());
    assert!(matches!(saved, Err(Error::Aliased { .. })), "{saved:?}");
}

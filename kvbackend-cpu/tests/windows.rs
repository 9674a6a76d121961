//! Storages over windows of the same lent memory: operands whose windows overlap are refused, and adjacent
//! windows are not.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::ptr::NonNull;
use std::sync::Arc;

use kvbackend_cpu::{CpuBackend, CpuStorage};
use kvcore::{
    Backend, BlockId, BlockOrder, CopyTensor, DType, Error, Gather, KvArena, KvFormat, KvLayout, KvShape,
    MemoryKind, Quantize, Scatter, Storage, Stream, SwapBlocks, TensorView, WritePairs, WriteSlots,
};
use parking_lot::Mutex;

const BLOCKS: usize = 4;
/// Size in bytes of each plane of an f32 arena.
const PLANE: usize = BLOCKS * 2 * 8 * 4;

/// Memory that storages may cover as windows.
struct Lent {
    start: NonNull<u8>,
    owner: Arc<Mutex<Vec<u64>>>,
}

impl Lent {
    fn new() -> Self {
        let mut words = vec![0u64; PLANE];
        Self { start: NonNull::from(words.as_mut_slice()).cast(), owner: Arc::new(Mutex::new(words)) }
    }

    /// Returns a window that begins at byte `start`. Tests must not access windows that overlap other live
    /// windows.
    fn window(&self, start: usize, bytes: usize) -> Arc<dyn Storage> {
        assert!(start + bytes <= 8 * PLANE);
        // SAFETY: `start + bytes` is inside the vector, which lives in the owner, does not move, and is not
        // locked by other code. Tests do not access overlapping windows, because every operation on them is
        // refused.
        let storage = unsafe {
            CpuStorage::from_raw(self.start.add(start), bytes, MemoryKind::Device, self.owner.clone())
        };
        Arc::new(storage.unwrap())
    }

    /// Returns an arena whose K begins at byte `start`, directly followed by V.
    fn arena(&self, start: usize) -> KvArena {
        let (k, v) = (self.window(start, PLANE), self.window(start + PLANE, PLANE));
        KvArena::from_storage(k, v, layout(DType::F32.into())).unwrap()
    }
}

fn layout(format: KvFormat) -> Arc<KvLayout> {
    let shape = KvShape {
        num_layers: 1,
        num_blocks: BLOCKS,
        block_size: 2,
        k_heads: 1,
        v_heads: 1,
        k_dim: 8,
        v_dim: 8,
        format,
        order: BlockOrder::TokenMajor,
    };
    Arc::new(KvLayout::new(shape).unwrap())
}

fn stream() -> Arc<dyn Stream> {
    CpuBackend::new().stream().unwrap()
}

fn pairs() -> WritePairs {
    WritePairs::unchecked([(BlockId(0), BlockId(1))])
}

#[test]
fn blocks_are_not_copied_between_arenas_over_overlapping_windows() {
    let (lent, stream) = (Lent::new(), stream());
    let first = lent.arena(0);
    let swap = |src: &KvArena, dst| stream.swap_blocks(&SwapBlocks { src: src.clone(), dst, pairs: pairs() });
    let aliased = Err(Error::Aliased { what: "arenas of a block copy" });
    for start in [8, PLANE - 8, PLANE, 2 * PLANE - 8] {
        assert_eq!(swap(&first, lent.arena(start)), aliased, "the second arena begins at {start}");
        assert_eq!(swap(&lent.arena(start), first.clone()), aliased, "and the other way round");
    }
    assert_eq!(swap(&first, lent.arena(2 * PLANE)), Ok(()), "neighbours");
    assert_eq!(swap(&first, first.clone()), Ok(()), "one arena");
}

#[test]
fn a_conversion_between_overlapping_windows_is_refused() {
    let (lent, stream) = (Lent::new(), stream());
    let dense = lent.arena(0);
    let small = layout(KvFormat::Int8 { group: 8 });
    let (k_scales, v_scales) = (small.k_scales().unwrap().bytes, small.v_scales().unwrap().bytes);
    let quantised = |k: usize| {
        let v = k + small.k_bytes();
        let scales = v + small.v_bytes();
        KvArena::with_scales(
            lent.window(k, small.k_bytes()),
            lent.window(v, small.v_bytes()),
            lent.window(scales, k_scales),
            lent.window(scales + k_scales, v_scales),
            Arc::clone(&small),
        )
        .unwrap()
    };
    let quantise = |dst| stream.quantize(&Quantize { src: dense.clone(), dst, pairs: pairs() });
    let aliased = Error::Aliased { what: "the dense and the quantised arena" };
    assert_eq!(quantise(quantised(2 * PLANE - 8)), Err(aliased));
    assert_eq!(quantise(quantised(2 * PLANE)), Ok(()));
}

#[test]
fn planes_of_an_arena_do_not_overlap() {
    let lent = Lent::new();
    let arena =
        |v| KvArena::from_storage(lent.window(0, PLANE), lent.window(v, PLANE), layout(DType::F32.into()));
    for v in [0, 8, PLANE - 8] {
        assert_eq!(arena(v).unwrap_err(), Error::Aliased { what: "K, V and their scales" }, "V at {v}");
    }
    assert!(arena(PLANE).is_ok());
}

#[test]
fn tensors_in_overlapping_windows_are_refused() {
    let (lent, stream) = (Lent::new(), stream());
    let view = |start| TensorView::new(lent.window(start, 64), DType::F32, &[16]).unwrap();
    let copy = |from, to| stream.copy_tensor(&CopyTensor { src: view(from), dst: view(to) });
    let aliased = Err(Error::Aliased { what: "source and destination of a tensor copy" });
    assert_eq!((copy(0, 32), copy(60, 0)), (aliased.clone(), aliased));
    assert_eq!(copy(0, 64), Ok(()), "neighbours");
}

#[test]
fn rows_that_overlap_the_arena_are_refused() {
    let (lent, stream) = (Lent::new(), stream());
    let arena = lent.arena(128);
    let scatter = |start| {
        let rows = TensorView::new(lent.window(start, 64), DType::F32, &[2, 1, 8]).unwrap();
        let (k, v) = (rows.clone(), rows);
        let slots = WriteSlots::unchecked([0, 1]);
        stream.scatter(&Scatter { arena: arena.clone(), layer: 0, k, v, slots, rotation: None })
    };
    assert_eq!(scatter(120), Err(Error::Aliased { what: "K rows" }));
    assert_eq!(scatter(64), Ok(()));
}

#[test]
fn gathered_rows_that_overlap_are_refused() {
    let (lent, stream) = (Lent::new(), stream());
    let arena = lent.arena(192);
    let rows = |start| TensorView::new(lent.window(start, 64), DType::F32, &[2, 1, 8]).unwrap();
    let gather = |k, v| stream.gather(&Gather::new(&arena, 0, &vec![0, 1].into(), rows(k), rows(v)));
    let aliased = Err(Error::Aliased { what: "gathered K rows and V rows" });
    for (k, v) in [(0, 0), (0, 32), (60, 0), (64, 124)] {
        assert_eq!(gather(k, v), aliased, "K at {k} and V at {v}");
    }
    assert_eq!(gather(0, 64), Ok(()), "neighbours");
    let alternating = |first| rows(0).slice(0, first, first + 1).unwrap();
    let one = Gather::new(&arena, 0, &vec![0].into(), alternating(0), alternating(1));
    assert_eq!(stream.gather(&one), Ok(()), "rows of one tensor");
}

//! Checks that the cache allocates nothing during a decode step. The allocator counts the allocations of all
//! threads.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvbackend_cpu::{CpuBackend, CpuOptions, Thresholds};
use kvcore::{
    ApplyRope, Attend, AttendRows, AttendWork, Backend, BlockOrder, BlockPool, DType, KeyForm, KvArena,
    KvFormat, KvLayout, KvShape, MemoryKind, PagedKvCache, QueryRow, Rope, RopeConfig, SequenceStart,
    TensorView, WriteSlots, allocate_tensor,
};

/// The system's allocator, which also counts allocations.
struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed to `System` with the arguments of the caller, and counting does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: by contract, `layout` has a size above 0.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: by contract, `ptr` was allocated by this allocator, hence by `System`, with `layout`.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: by contract, `ptr` was allocated by this allocator, hence by `System`, with `layout`, and
        // that `size` is valid.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

const LAYERS: usize = 3;
const HEADS: usize = 4;
const QUERY_HEADS: usize = 16;
const DIM: usize = 64;
const BLOCK: usize = 16;
/// Number of context blocks before the counted steps.
const BEFORE: usize = 80;

/// Returns the number of allocations in each of the `steps` steps that follow `BEFORE` blocks of tokens.
fn steps(format: KvFormat, threads: usize, steps: usize) -> Vec<usize> {
    // Every step is split between the threads, however small it is.
    let thresholds = Thresholds { bytes_per_thread: 1, ..Thresholds::default() };
    let options = CpuOptions { threads: Some(threads), thresholds, ..CpuOptions::default() };
    let backend = CpuBackend::with_options(&options).unwrap();
    let stream = backend.stream().unwrap();
    let shape = KvShape {
        num_layers: LAYERS,
        num_blocks: 2 * BEFORE,
        block_size: BLOCK,
        k_heads: HEADS,
        v_heads: HEADS,
        k_dim: DIM,
        v_dim: DIM,
        format,
        order: BlockOrder::TokenMajor,
    };
    let layout = Arc::new(KvLayout::new(shape).unwrap());
    let arena = KvArena::allocate(backend.as_ref(), MemoryKind::Device, layout).unwrap();
    let mut cache = PagedKvCache::new(arena, BlockPool::new(0..2 * BEFORE as u32).unwrap()).unwrap();
    let rows = |rows: usize, heads: usize| -> TensorView {
        allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::F32, &[rows, heads, DIM]).unwrap()
    };
    let rope = Arc::new(Rope::new(RopeConfig::new(DIM, 10_000.0), 4096).unwrap());
    let id = cache.create(SequenceStart::default()).unwrap();
    let before = cache.grow(id, BEFORE * BLOCK).unwrap();
    for layer in 0..LAYERS {
        let (k, v) = (rows(before.len(), HEADS), rows(before.len(), HEADS));
        cache.write(id, stream.as_ref(), layer, k, v, &before).unwrap();
    }
    // The inputs of the steps are allocated only once, and changed in place.
    let (k, v) = (rows(1, HEADS), rows(1, HEADS));
    let mut slots = WriteSlots::default();
    let mut turn = ApplyRope { rows: k.clone(), positions: [0].into(), rope: Arc::clone(&rope) };
    let mut attend = Attend {
        arena: cache.arena().clone(),
        layer: 0,
        q: rows(1, QUERY_HEADS),
        rope: Some(rope),
        keys: KeyForm::default(),
        work: Arc::new(AttendWork::new(
            [QueryRow { logical: 0, position: 0 }],
            [AttendRows::new(0..1, [cache.segment(id).unwrap()])],
        )),
        scale: 0.125,
        window: None,
        softcap: None,
        out: rows(1, QUERY_HEADS),
        lse: None,
    };
    let mut step = || {
        let position = cache.len(id).unwrap();
        cache.grow_batch(&[(id, 1)], &mut slots).unwrap();
        Arc::get_mut(&mut turn.positions).unwrap()[0] = position as i64;
        Arc::get_mut(&mut attend.work).unwrap().edit(|rows, batch| {
            rows[0] = QueryRow { logical: position, position: position as i64 };
            Arc::get_mut(&mut batch[0].segments).unwrap()[0] = cache.segment(id).unwrap();
        });
        for layer in 0..LAYERS {
            attend.layer = layer;
            stream.rope(&turn).unwrap();
            cache.write(id, stream.as_ref(), layer, k.clone(), v.clone(), &slots).unwrap();
            stream.attend(&attend).unwrap();
        }
    };
    // During the first steps, the buffers of each thread grow to their final size.
    (0..BLOCK).for_each(|_| step());
    let count = |_| {
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        step();
        ALLOCATIONS.load(Ordering::Relaxed) - before
    };
    (0..steps).map(count).collect()
}

/// This is the only test of this program, so no other test allocates at the same time.
#[test]
fn a_decode_step_allocates_only_for_a_new_block() {
    for format in ["f32", "bf16", "int8:32", "fp8-e4m3"] {
        for threads in [1, 2] {
            let counts = steps(format.parse().unwrap(), threads, 2 * BLOCK);
            for (i, count) in counts.iter().enumerate() {
                // A new block extends the block table and, occasionally, reallocates the list of blocks that
                // the sequence holds.
                let limit = if i.is_multiple_of(BLOCK) { 2 } else { 0 };
                assert!(*count <= limit, "{format}, {threads} threads, step {i}: {counts:?}");
            }
        }
    }
}

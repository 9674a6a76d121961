//! The cost of a block besides its KV: the bytes of bookkeeping per block, and the allocations per call.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use kvcore::{BlockPool, KeyScope, PolicyKind, PoolConfig};

struct Counting;

thread_local! {
    /// The bytes that this thread holds, and the allocation calls that it has made.
    static COUNTS: Cell<(isize, usize)> = const { Cell::new((0, 0)) };
}

fn count(bytes: isize, calls: usize) {
    // The counts of a thread no longer exist while the thread ends.
    let _ = COUNTS.try_with(|c| c.set((c.get().0 + bytes, c.get().1 + calls)));
}

// SAFETY: every call is forwarded to the system allocator with unchanged arguments.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize, 1);
        // SAFETY: `layout` has a non-zero size, as the contract of `GlobalAlloc::alloc` requires of the
        // caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count(-(layout.size() as isize), 0);
        // SAFETY: `ptr` was allocated by `System` with this `layout`, because `alloc` returns only such
        // pointers.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const BLOCKS: u32 = 65_536;
const BATCH: usize = 128;

#[test]
fn a_block_costs_at_most_136_bytes_and_a_call_few_allocations() {
    for kind in PolicyKind::ALL {
        let keys = KeyScope::new("m", b"").root().chain(&vec![7; BLOCKS as usize * 16], 16);
        let before = COUNTS.get().0;
        let pool = BlockPool::with_config(0..BLOCKS, PoolConfig::default().policy(kind)).unwrap();
        for (i, keys) in keys.chunks(BATCH).enumerate() {
            let parent = (i * BATCH).checked_sub(1).map(|i| keys[i % BATCH]);
            drop(pool.allocate(BATCH).unwrap().register(parent, keys).unwrap());
        }
        assert_eq!(pool.counts().cached, BLOCKS as usize);
        let bytes = (COUNTS.get().0 - before) as f64 / f64::from(BLOCKS);
        assert!(bytes <= 136.0, "{kind:?}: {bytes:.1} bytes a block");

        // A call on 128 blocks allocates a list of block IDs and one or two small objects.
        let calls = |work: &mut dyn FnMut()| {
            let before = COUNTS.get().1;
            work();
            COUNTS.get().1 - before
        };
        let most = |what: &str, limit: usize, work: &mut dyn FnMut()| {
            let made = calls(work);
            assert!(made <= limit, "{kind:?}: {what} made {made} allocations");
        };
        most("a hit", 4, &mut || drop(pool.lookup_chain(&keys[..BATCH])));
        let mut blocks = None;
        most("an allocation that evicts", 8, &mut || blocks = pool.allocate(BATCH).ok());
        most("a release", 0, &mut || blocks = None);
        let mut growing = pool.allocate(1).unwrap();
        most("a decode step's block", 0, &mut || growing.allocate(1).unwrap());
        println!("{kind:?}: {bytes:.1} bytes a block");
    }
}

#[test]
fn a_pool_of_too_many_blocks_is_refused_before_it_takes_memory() {
    for range in [0..u32::MAX, 0..(1 << 31), 7..(1 << 24) + 8, 0..(1 << 24) + 1] {
        let error = kvcore::BlockPool::new(range.clone()).map(drop).unwrap_err();
        assert!(matches!(error, kvcore::Error::TooLarge { .. }), "{range:?}: {error}");
        assert!(error.to_string().contains("16777216"), "{error}");
    }
}

//! Memory sizes at which indices exceed 32 bits, and unaligned pointers.

use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;

use kvbackend_cpu::CpuStorage;
use kvcore::{
    ApplyRope, BlockId, BlockOrder, CopyBlocks, DType, Error, Gather, KvArena, KvLayout, KvShape, MemoryKind,
    Rope, RopeConfig, Scatter, Storage, TensorView, WritePairs, WriteSlots,
};

use super::{Lab, ways};

/// Uses a pool of 4.5 GiB, but accesses only a few of its pages.
#[test]
fn a_pool_of_more_than_four_gibibytes_is_addressed_right() {
    let shape = KvShape {
        num_layers: 1,
        num_blocks: 9 << 10,
        block_size: 16,
        k_heads: 8,
        v_heads: 1,
        k_dim: 2048,
        v_dim: 1,
        format: DType::BF16.into(),
        order: BlockOrder::TokenMajor,
    };
    let layout = Arc::new(KvLayout::new(shape.clone()).unwrap());
    assert!(layout.k_bytes() > 4 << 30);
    for way in ways() {
        let lab = Lab::new(&way);
        let arena = KvArena::allocate(lab.backend.as_ref(), MemoryKind::Device, Arc::clone(&layout)).unwrap();
        let last = layout.num_slots() as i64 - 1;
        let slots: Arc<[i64]> = [last, 0, last - 17].into();
        let rows = |dim: usize, heads: usize, seed| lab.rows(DType::BF16, [3, heads, dim], 0, seed);
        let (k, v) = (rows(2048, 8, 1), rows(1, 1, 2));
        let op = Scatter {
            arena: arena.clone(),
            layer: 0,
            k: k.clone(),
            v: v.clone(),
            slots: WriteSlots::unchecked(Arc::clone(&slots)),
            rotation: None,
        };
        lab.stream.scatter(&op).unwrap();
        let pairs = [(BlockId(9215), BlockId(4000))];
        lab.stream
            .copy_blocks(&CopyBlocks { arena: arena.clone(), pairs: WritePairs::unchecked(pairs) })
            .unwrap();
        let (got, got_v) = (rows(2048, 8, 3), rows(1, 1, 4));
        let slots = [4000 * 16 + 15, 0, last - 17].into();
        let gather = Gather { arena, layer: 0, slots, k: got.clone(), v: got_v.clone(), rotation: None };
        lab.stream.gather(&gather).unwrap();
        assert!(lab.bytes(k.storage()) == lab.bytes(got.storage()), "{way:?}");
        assert!(lab.bytes(v.storage()) == lab.bytes(got_v.storage()), "{way:?}");
    }
}

/// Memory allocated by other code may begin at any address that is aligned for its elements.
#[test]
fn lent_memory_that_is_not_aligned_to_lines_is_right_or_refused() {
    for (offset, fits) in [(2, true), (34, true), (1, false)] {
        let mut results = Vec::new();
        for way in ways() {
            let lab = Lab::new(&way);
            let mut bytes = vec![0u64; 5000];
            let start = NonNull::new(bytes.as_mut_ptr().cast::<u8>().wrapping_add(offset)).unwrap();
            let owner: Arc<dyn Any + Send + Sync> = Arc::new(std::sync::Mutex::new(bytes));
            // SAFETY: `start` is at most 34 bytes past the start of the vector's 40000 bytes, so at least
            // 39000 bytes follow; the vector lives in `owner`, its memory does not move, and no other code
            // accesses it.
            let storage = unsafe { CpuStorage::from_raw(start, 39_000, MemoryKind::Device, owner) }.unwrap();
            let storage: Arc<dyn Storage> = Arc::new(storage);
            let view = match TensorView::new(storage, DType::BF16, &[37, 4, 130]) {
                Ok(view) => view,
                Err(Error::Misaligned { .. }) if !fits => continue,
                Err(error) => panic!("offset {offset}: {error}"),
            };
            assert!(fits, "offset {offset} was accepted");
            lab.stream.write(&view, &super::encode(DType::BF16, &super::numbers(37 * 4 * 130, 5))).unwrap();
            let rope = Arc::new(Rope::new(RopeConfig::new(130, 100.0), 100).unwrap());
            let op = ApplyRope { rows: view.clone(), positions: (0..37).collect(), rope };
            lab.stream.rope(&op).unwrap();
            results.push(lab.bytes(view.storage()));
        }
        assert!(results.windows(2).all(|pair| pair[0] == pair[1]), "offset {offset}");
    }
}

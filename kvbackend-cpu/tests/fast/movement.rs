//! Checks that moved and rotated rows and blocks match the reference bit for bit.

use std::sync::Arc;

use kvcore::{
    ApplyRope, BlockId, BlockOrder, CopyBlocks, CopyTensor, DType, Gather, KvShape, MemoryKind, Pairing,
    Rope, RopeConfig, RopeScaling, RotateKeys, Rotation, Scatter, SwapBlocks, WritePairs, WriteSlots,
    allocate_tensor,
};
use proptest::prelude::*;
use rstest::rstest;

use super::{compare, encode, equal, numbers, shape};

/// Generates runs of slots as pairs of a first slot and a length. Runs are single slots, or long as in a
/// block table.
fn picks() -> impl Strategy<Value = Vec<(u16, usize)>> {
    prop::collection::vec((any::<u16>(), prop_oneof![Just(1), 1..40usize]), 0..100)
}

/// Returns the slots of `picks`, with padding instead of slots that do not exist or have already occurred.
fn slots(shape: &KvShape, picks: &[(u16, usize)]) -> Arc<[i64]> {
    let total = shape.num_blocks * shape.block_size;
    let mut taken = vec![false; total];
    let mut slot = |slot: usize| {
        if slot >= total || std::mem::replace(&mut taken[slot], true) { -1 } else { slot as i64 }
    };
    let run = |&(pick, count): &(u16, usize)| {
        let first = usize::from(pick) % (total + 3);
        first..first + count
    };
    picks.iter().flat_map(run).map(&mut slot).collect()
}

fn rope(dim: usize, rotary: usize, interleaved: bool, yarn: bool) -> Arc<Rope> {
    let scaling = RopeScaling::Yarn {
        factor: 4.0,
        attention_factor: 1.138_629_4,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_max_position: 64,
        truncate: true,
    };
    let rotary_dim = (rotary % dim + 1).next_multiple_of(2).min(dim / 2 * 2).max(2);
    let pairing = if interleaved { Pairing::Interleaved } else { Pairing::HalfSplit };
    let base = RopeConfig { rotary_dim, pairing, ..RopeConfig::new(dim, 1000.0) };
    let config = if yarn && rotary_dim > 2 { RopeConfig { scaling, ..base } } else { base };
    Arc::new(Rope::new(config, 5000).unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 80, max_shrink_iters: 50, ..ProptestConfig::default() })]

    #[test]
    fn rows_are_scattered(shape in shape(), picks in picks(), gap in 0..3usize, wide in any::<bool>()) {
        let slots = slots(&shape, &picks);
        compare(|lab| {
            let arena = lab.arena(&shape, 1);
            let dtype = if wide { DType::F32 } else { shape.format.storage_dtype() };
            let k = lab.rows(dtype, [slots.len(), shape.k_heads, shape.k_dim], gap, 3);
            let v = lab.rows(dtype, [slots.len(), shape.v_heads, shape.v_dim], gap, 4);
            let layer = shape.num_layers - 1;
            lab.stream.scatter(&Scatter { arena: arena.clone(), layer, k, v, slots: WriteSlots::unchecked(Arc::clone(&slots)), rotation: None }).unwrap();
            lab.contents(&arena)
        }, equal)?;
    }

    #[test]
    fn rows_are_gathered_and_rotated_on_the_way(
        shape in shape(),
        picks in picks(),
        gap in 0..3usize,
        turn in prop::option::of((-4000i64..4000, 0..150usize, any::<bool>())),
    ) {
        let slots = slots(&shape, &picks);
        compare(|lab| {
            let arena = lab.arena(&shape, 1);
            let dtype = shape.format.storage_dtype();
            let k = lab.rows(dtype, [slots.len(), shape.k_heads, shape.k_dim], gap, 3);
            let v = lab.rows(dtype, [slots.len(), shape.v_heads, shape.v_dim], gap, 4);
            let rotation = turn.map(|(delta, rotary, interleaved)| {
                Rotation { rope: rope(shape.k_dim, rotary, interleaved, false), delta }
            });
            let op = Gather { arena, layer: 0, slots: Arc::clone(&slots), k: k.clone(), v: v.clone(), rotation };
            lab.stream.gather(&op).unwrap();
            [lab.bytes(k.storage()), lab.bytes(v.storage())].concat()
        }, equal)?;
    }

    #[test]
    fn rows_are_rotated_in_place(
        rows in 0..60usize,
        heads in 1..5usize,
        dim in prop::sample::select(vec![2usize, 6, 16, 32, 48, 64, 66, 80, 128, 192]),
        (rotary, interleaved, yarn) in (0..200usize, any::<bool>(), any::<bool>()),
        dtype in prop::sample::select(DType::COMPUTE.to_vec()),
        gap in 0..3usize,
        first in -2000i64..2000,
    ) {
        let rope = rope(dim, rotary, interleaved, yarn);
        compare(|lab| {
            let view = lab.rows(dtype, [rows, heads, dim], gap, 5);
            let positions = (0..rows as i64).map(|i| first + i * i % 977).collect();
            lab.stream.rope(&ApplyRope { rows: view.clone(), positions, rope: Arc::clone(&rope) }).unwrap();
            lab.bytes(view.storage())
        }, equal)?;
    }

    #[test]
    fn blocks_are_copied_swapped_and_rotated(
        shape in shape(),
        chosen in any::<u16>(),
        other_order in any::<bool>(),
        (delta, rotary, interleaved) in (-4000i64..4000, 0..150usize, any::<bool>()),
    ) {
        // Some blocks of the first half are copied to the second half.
        let half = shape.num_blocks as u32 / 2;
        let pairs: Arc<[_]> = (0..half)
            .filter(|i| chosen >> i & 1 == 1)
            .map(|i| (BlockId(half - 1 - i), BlockId(half + i)))
            .collect();
        let order = match (other_order, shape.order) {
            (true, BlockOrder::HeadMajor) => BlockOrder::TokenMajor,
            (true, BlockOrder::TokenMajor) => BlockOrder::HeadMajor,
            (false, order) => order,
        };
        compare(|lab| {
            let (here, there) = (lab.arena(&shape, 1), lab.arena(&KvShape { order, ..shape.clone() }, 2));
            let pairs = Arc::clone(&pairs);
            lab.stream.copy_blocks(&CopyBlocks { arena: here.clone(), pairs: WritePairs::unchecked(Arc::clone(&pairs)) }).unwrap();
            let swap = SwapBlocks { src: here.clone(), dst: there.clone(), pairs: WritePairs::unchecked(Arc::clone(&pairs)) };
            lab.stream.swap_blocks(&swap).unwrap();
            let swapped = lab.contents(&there);
            let rotation = Rotation { rope: rope(shape.k_dim, rotary, interleaved, false), delta };
            for dst in [&here, &there] {
                let (src, dst, rotation) = (here.clone(), dst.clone(), rotation.clone());
                let op = RotateKeys { src, dst, layer: shape.num_layers - 1, pairs: WritePairs::unchecked(Arc::clone(&pairs)), rotation };
                lab.stream.rotate_keys(&op).unwrap();
            }
            [swapped, lab.contents(&here), lab.contents(&there)].concat()
        }, equal)?;
    }
}

/// The contract does not specify which row wins, but the slot must hold exactly one complete row.
#[rstest]
fn a_slot_that_occurs_twice_holds_one_of_its_rows(#[values(3, 4)] count: usize) {
    let shape = KvShape {
        num_layers: 1,
        num_blocks: 2,
        block_size: 4,
        k_heads: 2,
        v_heads: 2,
        k_dim: 64,
        v_dim: 64,
        format: DType::BF16.into(),
        order: BlockOrder::TokenMajor,
    };
    let slots: Arc<[i64]> = (0..600).map(|i| i % count as i64).collect();
    for way in super::ways() {
        let lab = super::Lab::new(&way);
        let arena = lab.arena(&shape, 1);
        let rows = |seed| lab.rows(DType::BF16, [600, 2, 64], 0, seed);
        let (k, v) = (rows(3), rows(4));
        lab.stream
            .scatter(&Scatter {
                arena: arena.clone(),
                layer: 0,
                k,
                v,
                slots: WriteSlots::unchecked(Arc::clone(&slots)),
                rotation: None,
            })
            .unwrap();
        let offered = encode(DType::BF16, &numbers(600 * 128, 3));
        let cache = lab.bytes(arena.k());
        for slot in 0..count {
            let row = &cache[slot * 256..][..256];
            let one_of = (slot..600).step_by(count).any(|i| &offered[i * 256..][..256] == row);
            assert!(one_of, "{way:?}: slot {slot}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, max_shrink_iters: 50, ..ProptestConfig::default() })]

    #[test]
    fn tensors_of_any_strides_are_copied(
        extents in prop::collection::vec(1usize..40, 1..4),
        last in prop::sample::select(vec![1usize, 2, 7, 40]),
        order in any::<[u8; 4]>(),
        gap in 0..3usize,
        dtype in prop::sample::select(vec![DType::F32, DType::BF16, DType::U8]),
    ) {
        let all: Vec<usize> = extents.iter().map(|n| n + gap).chain([last]).collect();
        let mut axes: Vec<usize> = (0..all.len()).collect();
        axes.sort_by_key(|&axis| order[axis]);
        compare(|lab| {
            let tensor = |shape: &[usize]| allocate_tensor(lab.backend.as_ref(), MemoryKind::Device, dtype, shape).unwrap();
            let src = tensor(&all);
            let bytes: Vec<u8> = (0..src.len() * dtype.bits() / 8).map(|i| (i % 251) as u8).collect();
            lab.stream.write(&src, &bytes).unwrap();
            let src = (0..extents.len()).fold(src, |view, axis| view.slice(axis, gap, gap + extents[axis]).unwrap());
            let src = src.permute(&axes).unwrap();
            let dst = tensor(src.shape());
            lab.stream.copy_tensor(&CopyTensor { src, dst: dst.clone() }).unwrap();
            lab.bytes(dst.storage())
        }, equal)?;
    }
}

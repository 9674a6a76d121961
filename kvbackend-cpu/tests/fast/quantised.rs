//! Quantised formats: checks that codes are equal, and that attention over them matches up to rounding.

use std::sync::Arc;

use kvcore::{
    Attend, AttendRows, AttendWork, BlockId, BlockOrder, DType, Dequantize, Gather, KeyForm, KvFormat,
    KvShape, MemoryKind, Quantize, QueryRow, Rope, RopeConfig, RotateKeys, Rotation, Scatter, Segment,
    WritePairs, WriteSlots, allocate_tensor,
};
use proptest::prelude::*;

use super::{Lab, compare};

fn shape() -> impl Strategy<Value = KvShape> {
    let format = prop::sample::select(vec![
        "int8:8",
        "int8:32",
        "int8:2",
        "int4:8",
        "int4:32",
        "int4:2",
        "fp8-e4m3",
        "fp8-e5m2:head",
    ]);
    (format, 1..3usize, 1..18usize, 1..4usize, 1..5usize, any::<bool>()).prop_map(
        |(format, num_layers, block_size, heads, dims, head_major)| KvShape {
            num_layers,
            num_blocks: 6,
            block_size,
            k_heads: heads,
            v_heads: heads,
            k_dim: 32 * dims,
            v_dim: 32 * (5 - dims),
            format: format.parse().unwrap(),
            order: if head_major { BlockOrder::HeadMajor } else { BlockOrder::TokenMajor },
        },
    )
}

/// Generates the bits of numbers of every magnitude, and occasionally of NaN or infinity.
fn any_float() -> impl Strategy<Value = u32> {
    let near = (-2.0f32..2.0).prop_map(f32::to_bits);
    let halves = (-600i32..600).prop_map(|x| (x as f32 / 2.0).to_bits());
    let tiny = (-1e-3f32..1e-3).prop_map(f32::to_bits);
    prop_oneof![200 => near, 100 => halves, 100 => tiny, 1 => any::<u32>()]
}

/// Returns an arena with rows scattered into all slots of every layer.
fn filled(lab: &Lab, shape: &KvShape, dtype: DType) -> kvcore::KvArena {
    let arena = lab.arena(shape, 0);
    if let (Some(k), Some(v)) = (arena.layout().k_scales(), arena.layout().v_scales())
        && k.is_static()
    {
        let scales = |bytes: usize| vec![0.02; bytes / 4];
        arena.set_scales(lab.stream.as_ref(), &scales(k.bytes), &scales(v.bytes)).unwrap();
    }
    let slots: Arc<[i64]> = (0..arena.layout().num_slots() as i64).rev().collect();
    for layer in 0..shape.num_layers {
        let k = lab.rows(dtype, [slots.len(), shape.k_heads, shape.k_dim], 1, 3 + layer as u64);
        let v = lab.rows(dtype, [slots.len(), shape.v_heads, shape.v_dim], 1, 4 + layer as u64);
        let op = Scatter {
            arena: arena.clone(),
            layer,
            k,
            v,
            slots: WriteSlots::unchecked(Arc::clone(&slots)),
            rotation: None,
        };
        lab.stream.scatter(&op).unwrap();
    }
    arena
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 30, max_shrink_iters: 50, ..ProptestConfig::default() })]

    #[test]
    fn codes_and_their_values_are_the_same(shape in shape(), dtype in prop::sample::select(DType::COMPUTE.to_vec()), turn in any::<bool>()) {
        let rope = Rope::new(RopeConfig::new(shape.k_dim, 100.0), 400).unwrap();
        let rotation = Rotation { rope: Arc::new(rope), delta: -37 };
        compare(|lab| {
            let arena = filled(lab, &shape, dtype);
            let slots: Arc<[i64]> = (-1..arena.layout().num_slots() as i64).collect();
            let k = lab.rows(dtype, [slots.len(), shape.k_heads, shape.k_dim], 2, 5);
            let v = lab.rows(dtype, [slots.len(), shape.v_heads, shape.v_dim], 0, 6);
            let op = Gather { arena: arena.clone(), layer: 0, slots, k: k.clone(), v: v.clone(), rotation: turn.then(|| rotation.clone()) };
            lab.stream.gather(&op).unwrap();
            let dense = lab.arena(&KvShape { format: KvFormat::Dense(dtype), ..shape.clone() }, 9);
            let pairs: Arc<[_]> = [(BlockId(1), BlockId(0)), (BlockId(5), BlockId(3))].into();
            let op = Dequantize { src: arena.clone(), dst: dense.clone(), pairs: WritePairs::unchecked(Arc::clone(&pairs)) };
            lab.stream.dequantize(&op).unwrap();
            let back: Arc<[_]> = [(BlockId(3), BlockId(2)), (BlockId(4), BlockId(1))].into();
            lab.stream.quantize(&Quantize { src: dense.clone(), dst: arena.clone(), pairs: WritePairs::unchecked(back) }).unwrap();
            let (src, dst, pairs) = (arena.clone(), arena.clone(), [(BlockId(0), BlockId(3))]);
            lab.stream.rotate_keys(&RotateKeys { src, dst, layer: 0, pairs: WritePairs::unchecked(pairs), rotation: rotation.clone() }).unwrap();
            [lab.contents(&arena), lab.contents(&dense), lab.bytes(k.storage()), lab.bytes(v.storage())].concat()
        }, super::equal)?;
    }

    #[test]
    fn any_float_has_the_same_code(
        format in prop::sample::select(vec!["int8:32", "int4:32", "fp8-e4m3", "fp8-e5m2"]),
        bits in prop::collection::vec(any_float(), 128),
        scale in prop::sample::select(vec![1.0f32, 0.02, 1e-30, 3e30]),
    ) {
        let one = KvShape {
            num_layers: 1, num_blocks: 1, block_size: 1, k_heads: 1, v_heads: 1, k_dim: 128, v_dim: 128,
            format: format.parse().unwrap(), order: BlockOrder::TokenMajor,
        };
        compare(|lab| {
            let arena = lab.arena(&one, 0);
            if arena.layout().k_scales().is_some_and(|scales| scales.is_static()) {
                arena.set_scales(lab.stream.as_ref(), &[scale], &[scale]).unwrap();
            }
            let row = allocate_tensor(lab.backend.as_ref(), MemoryKind::Device, DType::F32, &[1, 1, 128]).unwrap();
            lab.stream.write(&row, bytemuck::cast_slice(&bits)).unwrap();
            let (k, v) = (row.clone(), row);
            lab.stream.scatter(&Scatter { arena: arena.clone(), layer: 0, k, v, slots: WriteSlots::unchecked([0]), rotation: None }).unwrap();
            lab.contents(&arena)
        }, super::equal)?;
    }

    #[test]
    fn attention_over_codes_equals_the_reference(shape in shape(), rows in prop::sample::select(vec![1usize, 3, 20]), unrotated in any::<bool>()) {
        compare(|lab| {
            let tokens = shape.num_blocks * shape.block_size;
            let blocks = (0..6).map(BlockId).collect();
            let out = lab.rows(DType::F32, [rows, 2 * shape.k_heads, shape.v_dim], 0, 1);
            let rope = Rope::new(RopeConfig::new(shape.k_dim, 100.0), 400).unwrap();
            let op = Attend { arena: filled(lab, &shape, DType::F32), layer: 0, q: lab.rows(DType::F32, [rows, 2 * shape.k_heads, shape.k_dim], 0, 2), rope: Some(Arc::new(rope)), keys: if unrotated { KeyForm::Unrotated } else { KeyForm::Rotated }, work: Arc::new(AttendWork::new((0..rows).map(|i| QueryRow { logical: tokens / 2 + i, position: (tokens / 2 + i) as i64 }).collect::<Vec<_>>(), [AttendRows::new(0..rows, [Segment::new(blocks, tokens, 0, 0)])])), scale: 0.1, window: None, softcap: None, out: out.clone(), lse: None };
            lab.stream.attend(&op).unwrap();
            lab.f32s(&out)
        }, |got, expected| {
            for (x, y) in got.iter().zip(expected) {
                prop_assert!((x - y).abs() <= 2e-5 * y.abs().max(1.0), "{} is not {}", x, y);
            }
            Ok(())
        })?;
    }
}

//! The reference kernels with random shapes, compared with the f64 oracle.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use kvbackend_cpu::CpuBackend;
use kvconform::{Bench, oracle};
use kvcore::{
    Attend, AttendMass, AttendRows, AttendWork, BlockId, BlockOrder, CopyTensor, DType, Gather, KeyForm,
    KvArena, KvPlane, KvShape, MergeGroup, Pairing, QueryRow, Rope, RopeConfig, Scatter, Segment, Selection,
    SelectionUnit, WriteSlots,
};
use proptest::prelude::*;

/// Returns numbers between −1 and 1 that every element type can represent exactly.
fn numbers(n: usize, seed: u64) -> Vec<f32> {
    let step = |i: usize| (seed.wrapping_add(i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 57) as f32;
    (0..n).map(|i| step(i) / 64.0 - 1.0).collect()
}

fn shape() -> impl Strategy<Value = KvShape> {
    let heads = prop::sample::select(vec![(1, 1), (2, 2), (3, 3), (1, 2), (4, 2), (2, 6)]);
    (1..3usize, 1..6usize, 1..7usize, heads, 1..20usize, 1..20usize, any::<bool>(), 0..3usize).prop_map(
        |(num_layers, num_blocks, block_size, (k_heads, v_heads), k_dim, v_dim, head_major, dtype)| KvShape {
            num_layers,
            num_blocks,
            block_size,
            k_heads,
            v_heads,
            k_dim: 2 * k_dim,
            v_dim,
            format: DType::COMPUTE[dtype].into(),
            order: if head_major { BlockOrder::HeadMajor } else { BlockOrder::TokenMajor },
        },
    )
}

/// Fills the arena with `scatter`, and returns K and V by plane, in the form that the oracle reads.
fn fill(b: &Bench, arena: &KvArena, seed: u64) -> (Vec<f32>, Vec<f32>) {
    let (layout, s, dtype) = (arena.layout(), arena.layout().shape(), b.dtype);
    let slots: Arc<[i64]> = (0..layout.num_slots() as i64).collect();
    let values = |bytes: usize| vec![0.0; bytes * 8 / dtype.bits()];
    let (mut k, mut v) = (values(layout.k_bytes()), values(layout.v_bytes()));
    for layer in 0..s.num_layers {
        let rows = |plane: KvPlane, all: &mut [f32], seed| {
            let rows = numbers(slots.len() * plane.heads * plane.dim, seed);
            for (i, row) in rows.chunks(plane.dim).enumerate() {
                let at = oracle::index(layout, plane.strides, layer, i / plane.heads, i % plane.heads);
                all[at..at + plane.dim].copy_from_slice(row);
            }
            b.upload(dtype, &[slots.len(), plane.heads, plane.dim], &rows).unwrap()
        };
        let op = Scatter {
            arena: arena.clone(),
            layer,
            k: rows(arena.k_plane(), &mut k, seed + layer as u64),
            v: rows(arena.v_plane(), &mut v, !seed - layer as u64),
            slots: WriteSlots::unchecked(Arc::clone(&slots)),
            rotation: None,
        };
        b.stream.scatter(&op).unwrap();
    }
    (k, v)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn gather_after_scatter_is_the_identity(shape in shape(), seed in any::<u32>(), picks in prop::collection::vec(-2i64..40, 1..20)) {
        let b = Bench::new(CpuBackend::new(), shape.format.storage_dtype()).unwrap();
        let arena = b.arena_of(shape.clone()).unwrap();
        let (k, v) = fill(&b, &arena, u64::from(seed));
        let slots: Arc<[i64]> = picks.iter().map(|&s| s % arena.layout().num_slots() as i64).collect();
        let layer = seed as usize % shape.num_layers;
        let rows = |plane: KvPlane| b.tensor(b.dtype, &[slots.len(), plane.heads, plane.dim]).unwrap();
        let (out_k, out_v) = (rows(arena.k_plane()), rows(arena.v_plane()));
        let op = Gather { arena: arena.clone(), layer, slots: Arc::clone(&slots), k: out_k.clone(), v: out_v.clone(), rotation: None };
        b.stream.gather(&op).unwrap();
        for (out, all, plane) in [
            (b.download(&out_k).unwrap(), &k, arena.k_plane()),
            (b.download(&out_v).unwrap(), &v, arena.v_plane()),
        ] {
            for (i, got) in out.chunks(plane.dim).enumerate() {
                let (slot, head) = (slots[i / plane.heads], i % plane.heads);
                if slot < 0 {
                    prop_assert!(got.iter().all(|&x| x == 0.0), "padding is left alone");
                } else {
                    let at = oracle::index(arena.layout(), plane.strides, layer, slot as usize, head);
                    prop_assert_eq!(got, &all[at..at + plane.dim]);
                }
            }
        }
    }

    #[test]
    fn tensor_copies_equal_indexing(
        extents in prop::collection::vec(1..5usize, 1..5),
        cuts in prop::collection::vec((0..5usize, 0..5usize), 4),
        turn in 0..4usize,
        dtype in prop::sample::select(DType::COMPUTE.to_vec()),
    ) {
        let b = Bench::new(CpuBackend::new(), dtype).unwrap();
        let n: usize = extents.iter().product();
        let part = |seed: u64| {
            let values = numbers(n, seed);
            let whole = b.upload(dtype, &extents, &values).unwrap();
            let mut axes: Vec<usize> = (0..extents.len()).collect();
            let mut view = whole.clone();
            for (axis, &(start, end)) in axes.iter().zip(&cuts) {
                let end = end.min(extents[*axis]);
                view = view.slice(*axis, start.min(end), end).unwrap();
            }
            // the axes of source and destination are rotated alike, but their memory is not
            axes.rotate_left(turn % extents.len());
            (whole, view.permute(&axes).unwrap(), values)
        };
        let ((_, src, from), (whole, dst, mut expected)) = (part(1), part(2));
        let dense = b.tensor(dtype, if dst.is_empty() { &[1] } else { dst.shape() }).unwrap();
        if !dst.is_empty() {
            b.stream.copy_tensor(&CopyTensor { src: src.clone(), dst: dense.clone() }).unwrap();
            b.stream.copy_tensor(&CopyTensor { src: dense, dst: dst.clone() }).unwrap();
        }
        for (from_at, to_at) in oracle::elements(&src).into_iter().zip(oracle::elements(&dst)) {
            expected[to_at] = from[from_at];
        }
        prop_assert_eq!(b.download(&whole).unwrap(), expected);
    }

    #[test]
    fn attend_equals_the_oracle(
        shape in shape(),
        seed in any::<u32>(),
        group in 1..4usize,
        rows in prop::collection::vec((0..30usize, -5i64..60), 1..5),
        cuts in prop::collection::vec((0..30usize, 0..20usize, -20i64..40, 0..6u8), 1..4),
        window in prop::option::of(1..40usize),
        interleaved in any::<bool>(),
        unrotated in any::<bool>(),
        picked in prop::option::of((any::<bool>(), any::<u64>())),
    ) {
        let b = Bench::new(CpuBackend::new(), shape.format.storage_dtype()).unwrap();
        let arena = b.arena_of(shape.clone()).unwrap();
        let (k, v) = fill(&b, &arena, u64::from(seed));
        let heads = group * shape.k_heads.max(shape.v_heads);
        let q = numbers(rows.len() * heads * shape.k_dim, u64::from(seed) + 7);
        let all: Arc<[BlockId]> = (0..shape.num_blocks as u32).rev().map(BlockId).collect();
        let segments: Arc<[Segment]> = cuts.iter().map(|&(logical, len, offset, scale)| {
            let len = len.min(shape.num_blocks * shape.block_size);
            let segment = Segment::new(Arc::clone(&all), len, logical, 3).at_offset(offset);
            Segment { logit_scale: 0.5 + f32::from(scale) / 4.0, merge_group: usize::from(scale % 2), ..segment }
        }).collect();
        let selection = picked.map(|(blocks, mask)| {
            let unit = if blocks { SelectionUnit::Blocks } else { SelectionUnit::Tokens };
            let per_unit = if blocks { shape.block_size } else { 1 };
            let units: usize = segments.iter().map(|s| s.len.div_ceil(per_unit)).sum();
            let row = |i: usize| (0..units).filter(move |u| mask.rotate_right((u + 7 * i) as u32) & 1 == 1);
            let chosen: Vec<Vec<u32>> = (0..rows.len()).map(|i| row(i).map(|u| u as u32).collect()).collect();
            let offsets = (0..=rows.len()).map(|i| chosen[..i].concat().len() as u32).collect();
            Selection { unit, offsets, indices: chosen.concat().into() }
        });
        let pairing = if interleaved { Pairing::Interleaved } else { Pairing::HalfSplit };
        let config = RopeConfig { pairing, ..RopeConfig::new(shape.k_dim, 100.0) };
        let op = Attend { layer: seed as usize % shape.num_layers, q: b.upload(DType::F32, &[rows.len(), heads, shape.k_dim], &q).unwrap(), rope: Some(Arc::new(Rope::new(config, 200).unwrap())), keys: if unrotated { KeyForm::Unrotated } else { KeyForm::Rotated }, work: Arc::new(AttendWork::with_groups(rows.iter().map(|&(logical, position)| QueryRow { logical, position }).collect::<Vec<_>>(), [AttendRows { selection, ..AttendRows::new(0..rows.len(), segments) }], [MergeGroup::default(), MergeGroup { lse_scale: 0.8 }])), scale: 0.3, window, softcap: None, out: b.tensor(DType::F32, &[rows.len(), heads, shape.v_dim]).unwrap(), lse: Some(b.tensor(DType::F32, &[rows.len(), heads]).unwrap()), arena };
        b.stream.attend(&op).unwrap();
        let (out, lse) = oracle::attend(&op, &q, &k, &v, 0.0);
        for (got, expected) in [(b.download(&op.out).unwrap(), out), (b.download(op.lse.as_ref().unwrap()).unwrap(), lse)] {
            for (x, y) in got.iter().zip(&expected) {
                prop_assert!(x == y || (x - y).abs() <= 1e-5 * y.abs().max(1.0), "{} {}", x, y);
            }
        }
        let tokens = op.work.batch()[0].tokens_before();
        if tokens > 0 && op.work.batch()[0].selection.is_none() {
            let sums = b.tensor(DType::F32, &[tokens]).unwrap();
            let mass = AttendMass { attend: op, q_latent: None, entry: 0, sums };
            b.stream.attend_mass(&mass).unwrap();
            let expected = oracle::attend_mass(&mass, (&q, None), (&k, &v), &vec![0.0; tokens]);
            for (x, y) in b.download(&mass.sums).unwrap().iter().zip(&expected) {
                prop_assert!((x - y).abs() <= 5e-5 * y.abs().max(1.0), "{} {}", x, y);
            }
        }
    }
}

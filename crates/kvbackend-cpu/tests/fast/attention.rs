//! Attention: the same to rounding.

use std::sync::Arc;

use kvcore::kernels::{Attend, AttendMla, AttendRows, MergeGroup, QueryRow, Selection, SelectionUnit};
use kvcore::{BlockId, DType, KeyForm, KvShape, MemoryKind, Rope, RopeConfig, Segment, allocate_tensor};
use proptest::prelude::*;

use super::{Lab, compare, shape};

/// What a call is made of, apart from memory.
#[derive(Debug, Clone)]
struct Call {
    shape: KvShape,
    group: usize,
    rows: Vec<(usize, i64)>,
    cuts: Vec<(usize, usize, i64, u8)>,
    window: Option<usize>,
    softcap: Option<f32>,
    unrotated: bool,
    selected: Option<(bool, u64)>,
    latent: bool,
    q_dtype: DType,
    gap: usize,
    /// Results lie in the memory of the queries, this many elements further on.
    in_place: Option<usize>,
}

fn call() -> impl Strategy<Value = Call> {
    let rows = prop_oneof![
        prop::collection::vec((0..150usize, -5i64..160), 1..4),
        prop::collection::vec((0..150usize, -5i64..160), 4..40),
    ];
    let cuts = prop::collection::vec((0..100usize, 0..150usize, -20i64..40, 0..6u8), 1..4);
    let options = (
        prop::option::of(1..100usize),
        prop::option::of(0.5f32..5.0),
        any::<bool>(),
        prop::option::of((any::<bool>(), any::<u64>())),
        prop::bool::weighted(0.3),
        prop::sample::select(DType::COMPUTE.to_vec()),
        0..3usize,
        prop::option::weighted(0.3, 0..3usize),
    );
    (shape(), 1..9usize, rows, cuts, options).prop_map(|(shape, group, rows, cuts, options)| {
        let (window, softcap, unrotated, selected, latent, q_dtype, gap, in_place) = options;
        let q_dtype = if in_place.is_some() { DType::F32 } else { q_dtype };
        let shape = if latent { KvShape { k_heads: 1, v_heads: 1, ..shape } } else { shape };
        Call {
            shape,
            group,
            rows,
            cuts,
            window,
            softcap,
            unrotated,
            selected,
            latent,
            q_dtype,
            gap,
            in_place,
        }
    })
}

impl Call {
    fn segments(&self) -> Arc<[Segment]> {
        let shape = &self.shape;
        let all: Arc<[BlockId]> = (0..shape.num_blocks as u32).rev().map(BlockId).collect();
        let segment = |&(logical, len, offset, scale): &(usize, usize, i64, u8)| {
            let len = len.min(shape.num_blocks * shape.block_size);
            let segment = Segment::new(Arc::clone(&all), len, logical, 3).at_offset(offset);
            let logit_scale = 0.5 + f32::from(scale) / 4.0;
            Segment { logit_scale, merge_group: usize::from(scale % 2), ..segment }
        };
        self.cuts.iter().map(segment).collect()
    }

    fn selection(&self, segments: &[Segment]) -> Option<Selection> {
        let (blocks, mask) = self.selected?;
        let unit = if blocks { SelectionUnit::Blocks } else { SelectionUnit::Tokens };
        let per_unit = if blocks { self.shape.block_size } else { 1 };
        let units: usize = segments.iter().map(|s| s.len.div_ceil(per_unit)).sum();
        let row = |i: usize| (0..units).filter(move |u| mask.rotate_right((u + 7 * i) as u32) & 1 == 1);
        let chosen: Vec<Vec<u32>> =
            (0..self.rows.len()).map(|i| row(i).map(|u| u as u32).collect()).collect();
        let offsets = (0..=self.rows.len()).map(|i| chosen[..i].concat().len() as u32).collect();
        Some(Selection { unit, offsets, indices: chosen.concat().into() })
    }

    /// Output and log-sum-exp.
    fn run(&self, lab: &Lab) -> (Vec<f32>, Vec<f32>) {
        let (shape, rows) = (&self.shape, self.rows.len());
        let heads = self.group * shape.k_heads.max(shape.v_heads);
        let segments = self.segments();
        let selection = self.selection(&segments);
        let tensor = |shape: &[usize]| {
            allocate_tensor(lab.backend.as_ref(), MemoryKind::Device, DType::F32, shape).unwrap()
        };
        let lse = tensor(&[rows, heads]);
        let (q, out) = match self.in_place {
            None => {
                let q = lab.rows(self.q_dtype, [rows, heads, shape.k_dim], self.gap, 7);
                (q, tensor(&[rows, heads, shape.v_dim]))
            }
            Some(further) => {
                let both =
                    lab.rows(DType::F32, [rows, heads, shape.k_dim.max(shape.v_dim) + further], self.gap, 7);
                let end = further + shape.v_dim;
                (both.slice(2, 0, shape.k_dim).unwrap(), both.slice(2, further, end).unwrap())
            }
        };
        let attend = Attend {
            arena: lab.arena(shape, 1),
            layer: shape.num_layers - 1,
            q,
            rope: Some(Arc::new(Rope::new(RopeConfig::new(shape.k_dim, 100.0), 400).unwrap())),
            keys: if self.unrotated { KeyForm::Unrotated } else { KeyForm::Rotated },
            rows: self.rows.iter().map(|&(logical, position)| QueryRow { logical, position }).collect(),
            batch: [AttendRows { selection, ..AttendRows::new(0..rows, segments) }].into(),
            groups: [MergeGroup::default(), MergeGroup { lse_scale: 0.8 }].into(),
            // Of what meets: logits of a size at which rounding is what differs.
            scale: 1.0 / ((shape.k_dim + if self.latent { shape.v_dim } else { 0 }) as f32).sqrt(),
            window: self.window,
            softcap: self.softcap,
            out: out.clone(),
            lse: Some(lse.clone()),
        };
        if self.latent {
            let q_latent = lab.rows(self.q_dtype, [rows, heads, shape.v_dim], self.gap, 8);
            lab.stream.attend_mla(&AttendMla { attend, q_latent }).unwrap();
        } else {
            lab.stream.attend(&attend).unwrap();
        }
        let out = lab.bytes(out.storage());
        (out.chunks_exact(4).map(|x| f32::from_ne_bytes(x.try_into().unwrap())).collect(), lab.f32s(&lse))
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 80, max_shrink_iters: 50, ..ProptestConfig::default() })]

    #[test]
    fn any_call_equals_the_reference(call in call()) {
        compare(|lab| call.run(lab), |(out, lse), (expected, expected_lse)| {
            for (got, expected) in [(out, expected), (lse, expected_lse)] {
                for (i, (x, y)) in got.iter().zip(expected).enumerate() {
                    prop_assert!(x == y || (x - y).abs() <= 2e-5 * y.abs().max(1.0), "{}: {} is not {}", i, x, y);
                }
            }
            Ok(())
        })?;
    }
}

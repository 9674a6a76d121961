//! Checks that attention matches the reference up to rounding.

use std::sync::Arc;

use kvcore::{
    Attend, AttendMass, AttendMla, AttendRows, AttendWork, BlockId, BlockOrder, DType, KeyForm, KvShape,
    MemoryKind, MergeGroup, QueryRow, Rope, RopeConfig, Segment, Selection, SelectionUnit, TensorView,
    allocate_tensor,
};
use proptest::prelude::*;
use rstest::rstest;

use super::{Lab, compare, encode, shape};

/// The parameters of an attention call, without its memory.
#[derive(Debug, Clone)]
struct Call {
    shape: KvShape,
    group: usize,
    rows: Vec<(usize, i64)>,
    cuts: Vec<(usize, usize, i64, u8)>,
    window: Option<usize>,
    softcap: Option<f32>,
    unrotated: bool,
    /// True if the call rotates the queries.
    roped: bool,
    selected: Option<(bool, u64)>,
    latent: bool,
    q_dtype: DType,
    gap: usize,
    /// If set, results are written to the memory of the queries, this many elements after them.
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
            roped: true,
            selected,
            latent,
            q_dtype,
            gap,
            in_place,
        }
    })
}

/// Generates calls with many queries over rotated bf16 keys and values that fill whole tile rows, for which
/// [`kvbackend_cpu::SimdLevel::Amx`] uses matrix products. Only some of the block sizes are multiples of a
/// tile's rows.
fn many_queries() -> impl Strategy<Value = Call> {
    let dim = || prop::sample::select(vec![32usize, 64, 96, 128, 224]);
    let block_size = prop::sample::select(vec![1usize, 5, 16, 16, 32, 48]);
    let rows = prop::collection::vec((0..150usize, -5i64..160), 16..40);
    // With this many heads, even a single row has many queries, and may then select tokens.
    let group = prop::option::weighted(0.3, 16..20usize);
    (call(), rows, dim(), dim(), block_size, any::<bool>(), group).prop_map(
        |(call, rows, k_dim, v_dim, block_size, roped, group)| {
            let format = DType::BF16.into();
            let shape = KvShape { k_dim, v_dim, block_size, format, ..call.shape };
            // Only a call that rotates its queries can rotate them to the positions of moved segments.
            let offset = |offset: i64| if roped { offset } else { 0 };
            let cuts = call.cuts.into_iter().map(|(a, b, at, c)| (a, b, offset(at), c)).collect();
            let selected = call.selected.filter(|_| group.is_some());
            let group = group.unwrap_or(call.group);
            Call { shape, group, rows, cuts, roped, unrotated: false, selected, ..call }
        },
    )
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

    /// Runs the call, and returns the output and the log-sum-exp.
    ///
    /// Also returns the attention mass of the tokens before the last segment. It is empty if there is a
    /// selection, or if the output overwrites the queries.
    fn run(&self, lab: &Lab) -> [Vec<f32>; 3] {
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
            rope: self.roped.then(|| Arc::new(Rope::new(RopeConfig::new(shape.k_dim, 100.0), 400).unwrap())),
            keys: if self.unrotated { KeyForm::Unrotated } else { KeyForm::Rotated },
            // The scale depends on the dimension of the products, so that logits have a magnitude at which
            // only rounding differs.
            scale: 1.0 / ((shape.k_dim + if self.latent { shape.v_dim } else { 0 }) as f32).sqrt(),
            window: self.window,
            softcap: self.softcap,
            out: out.clone(),
            lse: Some(lse.clone()),
            work: Arc::new(AttendWork::with_groups(
                self.rows
                    .iter()
                    .map(|&(logical, position)| QueryRow { logical, position })
                    .collect::<Vec<_>>(),
                [AttendRows { selection, ..AttendRows::new(0..rows, segments) }],
                [MergeGroup::default(), MergeGroup { lse_scale: 0.8 }],
            )),
        };
        let q_latent = self.latent.then(|| lab.rows(self.q_dtype, [rows, heads, shape.v_dim], self.gap, 8));
        if let Some(q_latent) = q_latent.clone() {
            lab.stream.attend_mla(&AttendMla { attend: attend.clone(), q_latent }).unwrap();
        } else {
            lab.stream.attend(&attend).unwrap();
        }
        let tokens = attend.work.batch()[0].tokens_before();
        let mass = if tokens == 0 || self.selected.is_some() || self.in_place.is_some() {
            Vec::new()
        } else {
            let sums = tensor(&[tokens]);
            let mass = AttendMass { attend, q_latent, entry: 0, sums: sums.clone() };
            lab.stream.attend_mass(&mass).unwrap();
            lab.stream.attend_mass(&mass).unwrap();
            lab.f32s(&sums)
        };
        let out = lab.bytes(out.storage());
        let out = out.chunks_exact(4).map(|x| f32::from_ne_bytes(x.try_into().unwrap())).collect();
        [out, lab.f32s(&lse), mass]
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 80, max_shrink_iters: 50, ..ProptestConfig::default() })]

    #[test]
    fn any_call_equals_the_reference(call in call()) {
        equals_the_reference(&call)?;
    }

    #[test]
    fn many_queries_over_bf16_equal_the_reference(call in many_queries()) {
        equals_the_reference(&call)?;
    }
}

fn equals_the_reference(call: &Call) -> Result<(), TestCaseError> {
    compare(
        |lab| call.run(lab),
        |got, expected| {
            for (got, expected) in got.iter().zip(expected) {
                for (i, (x, y)) in got.iter().zip(expected).enumerate() {
                    let near = x == y || (x - y).abs() <= 2e-5 * y.abs().max(1.0);
                    prop_assert!(near, "{}: {} is not {}", i, x, y);
                }
            }
            Ok(())
        },
    )
}

/// Keys and values that are not finite affect only the queries that attend to them.
#[rstest]
fn infinity_and_nan_reach_only_queries_that_see_them(
    #[values(false, true)] of_keys: bool,
    #[values(f32::INFINITY, f32::NEG_INFINITY, f32::NAN)] odd: f32,
    #[values(DType::BF16, DType::F16, DType::F32)] dtype: DType,
) {
    const TOKENS: usize = 70;
    let shape = KvShape {
        num_layers: 1,
        num_blocks: 5,
        block_size: 16,
        k_heads: 1,
        v_heads: 1,
        k_dim: 64,
        v_dim: 64,
        format: dtype.into(),
        order: BlockOrder::TokenMajor,
    };
    let case = |lab: &Lab| {
        let tensor = |shape: &[usize]| {
            allocate_tensor(lab.backend.as_ref(), MemoryKind::Device, DType::F32, shape).unwrap()
        };
        let (arena, out) = (lab.arena(&shape, 1), tensor(&[TOKENS, 1, 64]));
        let storage = if of_keys { arena.k() } else { arena.v() };
        let plane = TensorView::new(Arc::clone(storage), dtype, &[80, 64]).unwrap();
        let element = plane.slice(0, 40, 41).unwrap().slice(1, 3, 4).unwrap();
        lab.stream.write(&element, &encode(dtype, &[odd])).unwrap();
        let blocks: Arc<[BlockId]> = (0..5).map(BlockId).collect();
        let segments: Arc<[Segment]> = [Segment::new(blocks, TOKENS, 0, 0)].into();
        let attend = Attend {
            arena,
            layer: 0,
            q: lab.rows(DType::F32, [TOKENS, 1, 64], 0, 7),
            rope: None,
            keys: KeyForm::Rotated,
            work: Arc::new(AttendWork::new(
                (0..TOKENS).map(|t| QueryRow { logical: t, position: t as i64 }).collect::<Vec<_>>(),
                [AttendRows::new(0..TOKENS, segments)],
            )),
            scale: 0.125,
            window: None,
            softcap: None,
            out: out.clone(),
            lse: None,
        };
        lab.stream.attend(&attend).unwrap();
        lab.f32s(&out)
    };
    compare(case, |got, expected| {
        for (i, (x, y)) in got.iter().zip(expected).enumerate() {
            let same = x == y || (x.is_nan() && y.is_nan()) || (x - y).abs() <= 2e-5;
            prop_assert!(same, "token {}, element {}: {} is not {}", i / 64, i % 64, x, y);
            // A value affects only one element. A key affects all elements, unless its weight is 0.
            let touched = i / 64 >= 40 && (of_keys || i % 64 == 3);
            prop_assert!(y.is_finite() || touched, "the reference gives {} at {}", y, i);
            prop_assert!(!y.is_finite() || !touched || of_keys, "the reference gives {} at {}", y, i);
        }
        prop_assert!(expected.iter().any(|y| !y.is_finite()), "nobody sees {}", odd);
        Ok(())
    })
    .unwrap();
}

//! Attention over arbitrary codes, which are written as bytes. Results must match the reference up to
//! rounding for all widths, groups and queries, and the same elements must be not finite.

use std::sync::Arc;

use half::f16;
use kvcore::{
    Attend, AttendMla, AttendRows, AttendWork, BlockId, BlockOrder, DType, Fp8Kind, KeyForm, KvArena,
    KvFormat, KvShape, MemoryKind, QueryRow, Segment, Storage, TensorView, allocate_tensor,
};
use proptest::prelude::*;

use super::{Lab, compare};

/// The largest finite magnitude of the generated codes.
const LARGEST: f32 = 2.0;

/// The parameters of an attention call, without its memory.
#[derive(Debug, Clone)]
struct Call {
    shape: KvShape,
    /// Number of query heads that share a K head or a V head.
    group: usize,
    /// Number of tokens before each row.
    rows: Vec<usize>,
    window: Option<usize>,
    latent: bool,
    seed: u64,
    /// Arbitrary codes. Each has a flag that selects V, a byte index (modulo the size of the plane), and a
    /// value.
    odd: Vec<(bool, usize, u8)>,
    /// True if some group scales are NaN or 0.
    odd_scales: bool,
    /// True if static scales are the largest f32 number.
    largest_scale: bool,
}

/// Generates a format, and the widths of K and V.
fn format() -> impl Strategy<Value = (KvFormat, usize, usize)> {
    let width = || prop::sample::select(vec![1usize, 2, 7, 8, 16, 31, 33, 40, 64, 96, 128, 150]);
    let fp8 = prop::sample::select(vec!["fp8-e4m3", "fp8-e4m3:head", "fp8-e5m2", "fp8-e5m2:head"]);
    let floats = (fp8, width(), width()).prop_map(|(format, k, v)| (format.parse().unwrap(), k, v));
    let group = prop::sample::select(vec![2usize, 8, 16, 24, 32, 40, 64, 66, 128]);
    let integers =
        (any::<bool>(), group, 1..4usize, 1..4usize, any::<bool>()).prop_map(|(wide, group, k, v, whole)| {
            let format = if wide { KvFormat::Int8 { group } } else { KvFormat::Int4 { group } };
            if whole { (format, group, group) } else { (format, k * group, v * group) }
        });
    prop_oneof![floats, integers]
}

fn call() -> impl Strategy<Value = Call> {
    let heads = prop::sample::select(vec![(1usize, 1usize), (2, 2), (1, 2), (4, 2)]);
    let rows = prop::collection::vec(0..200usize, 1..4);
    let odd = prop::collection::vec((any::<bool>(), any::<usize>(), any::<u8>()), 0..3);
    let memory = (1..20usize, any::<bool>(), any::<u64>(), odd, prop::bool::weighted(0.2));
    let options = (1..10usize, rows, prop::option::of(1..100usize), prop::bool::weighted(0.2));
    (format(), heads, memory, options).prop_map(
        |((format, k_dim, v_dim), (k_heads, v_heads), memory, options)| {
            let (block_size, head_major, seed, odd, odd_scales) = memory;
            let (group, rows, window, latent) = options;
            let (k_heads, v_heads) = if latent { (1, 1) } else { (k_heads, v_heads) };
            let order = if head_major { BlockOrder::HeadMajor } else { BlockOrder::TokenMajor };
            let num_blocks = 180usize.div_ceil(block_size);
            let shape = KvShape {
                num_layers: 1,
                num_blocks,
                block_size,
                k_heads,
                v_heads,
                k_dim,
                v_dim,
                format,
                order,
            };
            Call { shape, group, rows, window, latent, seed, odd, odd_scales, largest_scale: false }
        },
    )
}

/// Returns pseudo-random bytes that depend on the seed.
fn bytes(n: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as u8
    };
    (0..n).map(|_| next()).collect()
}

fn write(lab: &Lab, storage: &Arc<dyn Storage>, bytes: &[u8]) {
    let view = TensorView::new(Arc::clone(storage), DType::U8, &[bytes.len()]).unwrap();
    lab.stream.write(&view, bytes).unwrap();
}

impl Call {
    /// Returns the codes of a plane. All codes are finite, except for the ones in `odd`.
    fn codes(&self, n: usize, of_values: bool) -> Vec<u8> {
        let mut codes = bytes(n, self.seed.wrapping_add(u64::from(of_values)));
        if let KvFormat::Fp8 { kind, .. } = self.shape.format {
            for code in &mut codes {
                if !kind.decode(*code).is_finite() {
                    *code &= 0x8f;
                }
            }
        }
        for &(_, at, code) in self.odd.iter().filter(|(of, ..)| *of == of_values) {
            codes[at % n] = code;
        }
        codes
    }

    /// Returns the scales of a plane's groups.
    fn group_scales(&self, n: usize, seed: u64, largest_code: f32) -> Vec<u8> {
        let scale = |byte: u8| match byte {
            0 if self.odd_scales => f16::ZERO,
            1 if self.odd_scales => f16::NAN,
            byte => f16::from_f32((f32::from(byte) + 1.0) / 256.0 * LARGEST / largest_code),
        };
        bytes(n, seed).into_iter().flat_map(|byte| scale(byte).to_le_bytes()).collect()
    }

    fn arena(&self, lab: &Lab) -> KvArena {
        let arena = lab.arena(&self.shape, 0);
        write(lab, arena.k(), &self.codes(arena.k().len(), false));
        write(lab, arena.v(), &self.codes(arena.v().len(), true));
        let layout = arena.layout();
        let n = [layout.k_scales(), layout.v_scales()].map(|scales| scales.map_or(0, |scales| scales.bytes));
        match self.shape.format {
            KvFormat::Fp8 { kind, .. } => {
                let one = if self.largest_scale { f32::MAX } else { LARGEST / kind.max() };
                let scales = |n: usize| -> Vec<f32> { (1..=n / 4).map(|i| one / i as f32).collect() };
                arena.set_scales(lab.stream.as_ref(), &scales(n[0]), &scales(n[1])).unwrap();
            }
            format => {
                let largest = if matches!(format, KvFormat::Int8 { .. }) { 127.0 } else { 7.0 };
                for (i, storage) in arena.storages().skip(2).enumerate() {
                    write(lab, storage, &self.group_scales(n[i] / 2, self.seed ^ (i as u64 + 9), largest));
                }
            }
        }
        arena
    }

    /// Runs the call, and returns the output and the log-sum-exp.
    fn run(&self, lab: &Lab) -> (Vec<f32>, Vec<f32>) {
        let (shape, rows) = (&self.shape, self.rows.len());
        let heads = self.group * shape.k_heads.max(shape.v_heads);
        let tensor = |shape: &[usize]| {
            allocate_tensor(lab.backend.as_ref(), MemoryKind::Device, DType::F32, shape).unwrap()
        };
        let (out, lse) = (tensor(&[rows, heads, shape.v_dim]), tensor(&[rows, heads]));
        let blocks: Arc<[BlockId]> = (0..shape.num_blocks as u32).rev().map(BlockId).collect();
        let tokens = shape.num_blocks * shape.block_size;
        let position = |&logical: &usize| QueryRow { logical, position: logical as i64 };
        let width = shape.k_dim + if self.latent { shape.v_dim } else { 0 };
        let attend = Attend {
            arena: self.arena(lab),
            layer: 0,
            q: lab.rows(DType::F32, [rows, heads, shape.k_dim], 0, 7),
            rope: None,
            keys: KeyForm::Rotated,
            work: Arc::new(AttendWork::new(
                self.rows.iter().map(position).collect::<Vec<_>>(),
                [AttendRows::new(0..rows, [Segment::new(blocks, tokens, 0, 0)])],
            )),
            scale: 1.0 / (width as f32).sqrt(),
            window: self.window,
            softcap: None,
            out: out.clone(),
            lse: Some(lse.clone()),
        };
        if self.latent {
            let q_latent = lab.rows(DType::F32, [rows, heads, shape.v_dim], 0, 8);
            lab.stream.attend_mla(&AttendMla { attend, q_latent }).unwrap();
        } else {
            lab.stream.attend(&attend).unwrap();
        }
        (lab.f32s(&out), lab.f32s(&lse))
    }
}

fn equals_the_reference(call: &Call) -> Result<(), TestCaseError> {
    compare(
        |lab| call.run(lab),
        |(out, lse), (expected, expected_lse)| {
            for (got, expected) in [(out, expected), (lse, expected_lse)] {
                for (i, (x, y)) in got.iter().zip(expected).enumerate() {
                    let same = x == y || (x.is_nan() && y.is_nan());
                    let near = same || (x - y).abs() <= 2e-5 * y.abs().max(1.0);
                    prop_assert!(near, "{}: {} is not {}", i, x, y);
                }
            }
            Ok(())
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, max_shrink_iters: 50, ..ProptestConfig::default() })]

    #[test]
    fn attention_over_any_codes_equals_the_reference(call in call()) {
        equals_the_reference(&call)?;
    }
}

/// The codes of `fp8-e5m2` for infinity, and one that is not a number.
const NOT_FINITE: [u8; 3] = [0x7c, 0xfc, 0x7e];

/// Generates calls over few tokens, some of whose keys and values are infinite. In latent attention, an infinite value
/// also makes its logit infinite.
fn call_with_infinities() -> impl Strategy<Value = Call> {
    let width = || prop::sample::select(vec![1usize, 2, 8, 16, 33, 64]);
    let format = prop::sample::select(vec!["fp8-e5m2", "fp8-e5m2:head"]);
    let odd = (any::<bool>(), any::<usize>(), prop::sample::select(NOT_FINITE.to_vec()));
    let rows = prop::collection::vec(0..140usize, 1..8);
    let options = (1..8usize, rows, prop::option::of(1..70usize), any::<bool>());
    (format, width(), width(), prop::collection::vec(odd, 1..6), any::<u64>(), options).prop_map(
        |(format, k_dim, v_dim, odd, seed, (group, rows, window, latent))| {
            let shape = KvShape {
                num_layers: 1,
                num_blocks: 35,
                block_size: 4,
                k_heads: 1,
                v_heads: 1,
                k_dim,
                v_dim,
                format: format.parse().unwrap(),
                order: BlockOrder::TokenMajor,
            };
            let (odd_scales, largest_scale) = (false, false);
            Call { shape, group, rows, window, latent, seed, odd, odd_scales, largest_scale }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, max_shrink_iters: 200, ..ProptestConfig::default() })]

    #[test]
    fn attention_over_infinite_codes_equals_the_reference(call in call_with_infinities()) {
        equals_the_reference(&call)?;
    }
}

/// Returns a call over tokens with keys of one element and values of two. The key of token 3 is infinite, or its latent
/// logit, and so is the first element of its value.
fn infinite_token(code: u8, latent: bool, (rows, window): (&[usize], Option<usize>)) -> Call {
    let num_blocks = 35;
    // The blocks of a sequence stand in reverse order.
    let row = 4 * (num_blocks - 1) + 3;
    let key = (!latent).then_some((false, row, code));
    let odd: Vec<(bool, usize, u8)> = key.into_iter().chain([(true, 2 * row, code)]).collect();
    let plain = one_token("fp8-e5m2", odd.into_iter());
    let shape = KvShape { num_blocks, block_size: 4, k_dim: 1, v_dim: 2, ..plain.shape };
    Call { shape, rows: rows.to_vec(), window, latent, ..plain }
}

/// A token whose logit is −∞ has no weight, and 0 times infinity is NaN: in the first tile of a row, in a later one, and
/// as the only token.
#[test]
fn an_infinite_value_makes_the_output_nan_although_it_has_no_weight() {
    for code in [0x7c, 0xfc] {
        for latent in [false, true] {
            for seen in [
                (&[3, 90][..], None),
                (&[70, 139], None),
                (&[3], Some(1)),
                (&[4, 5], Some(3)),
                (&[67], Some(65)),
            ] {
                let call = infinite_token(code, latent, seen);
                equals_the_reference(&call).unwrap();
                let (out, _) = call.run(&Lab::new(&super::ways()[0]));
                let (infinite, other): (Vec<f32>, Vec<f32>) =
                    out.chunks(2).map(|pair| (pair[0], pair[1])).unzip();
                assert!(infinite.iter().all(|x| x.is_nan()), "{code} {latent} {seen:?}: {infinite:?}");
                assert!(other.iter().any(|x| x.is_finite()), "{code} {latent} {seen:?}: no logit is −∞");
            }
        }
    }
}

/// Returns a call over a single token of 64 elements. `odd` gives some of its codes.
fn one_token(format: &str, odd: impl Iterator<Item = (bool, usize, u8)>) -> Call {
    let (format, order) = (format.parse().unwrap(), BlockOrder::TokenMajor);
    let (num_layers, num_blocks, block_size, k_heads, v_heads, k_dim, v_dim) = (1, 1, 1, 1, 1, 64, 64);
    Call {
        shape: KvShape { num_layers, num_blocks, block_size, k_heads, v_heads, k_dim, v_dim, format, order },
        group: 4,
        rows: vec![1],
        window: None,
        latent: false,
        seed: 1,
        odd: odd.collect(),
        odd_scales: false,
        largest_scale: false,
    }
}

/// If there is only one token, the output is its value.
#[test]
fn every_code_has_its_value() {
    for format in ["int8:64", "int8:32", "int4:64", "int4:32", "fp8-e4m3", "fp8-e5m2", "fp8-e5m2:head"] {
        for first in (0..=255).step_by(8) {
            let call = one_token(format, (0..8).map(|i| (true, i, first + i as u8)));
            equals_the_reference(&call).unwrap();
            if let KvFormat::Fp8 { kind, .. } = call.shape.format {
                let (out, _) = call.run(&Lab::new(&super::ways()[0]));
                for (i, x) in out.iter().take(8).enumerate() {
                    let value = kind.decode(first + i as u8) * (LARGEST / kind.max());
                    assert!(*x == value || (x.is_nan() && value.is_nan()), "{format} {first} + {i}: {x}");
                }
            }
        }
    }
}

/// Multiplied by the unit in which `fp8-e4m3` vectors are read, the scale would be infinite.
#[test]
fn a_scale_near_the_largest_number_stays_finite() {
    let (keys, values) = ((0..64).map(|i| (false, i, 0)), (0..64).map(|i| (true, i, 0x01)));
    let largest = Call { largest_scale: true, ..one_token("fp8-e4m3", keys.chain(values)) };
    equals_the_reference(&largest).unwrap();
    let (out, _) = largest.run(&Lab::new(&super::ways()[1]));
    assert!(out.iter().all(|x| *x == Fp8Kind::E4M3.decode(0x01) * f32::MAX), "{out:?}");
}

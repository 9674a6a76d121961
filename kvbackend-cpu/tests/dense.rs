//! Compares products with matrices of every stored type with plain f64 sums, on every instruction set that
//! the processor supports, with one thread and with several.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use kvbackend_cpu::dense::{ComputeType, Matrix, Products, StoredType};
use kvbackend_cpu::{CpuOptions, SimdLevel};
use kvcore::Compared::Number;
use kvcore::Error;
use proptest::prelude::*;
use rstest::rstest;

/// Returns one [`Products`] for each instruction set and number of threads, with its name.
fn ways() -> Vec<(String, Products)> {
    let levels = SimdLevel::ALL.into_iter().filter(|level| level.is_available());
    let ways = levels.flat_map(|level| [(level, 1), (level, 3)]);
    let made = |(level, threads)| {
        let options = CpuOptions { simd: Some(level), threads: Some(threads), ..CpuOptions::default() };
        (format!("{level}, {threads} threads"), Products::with_options(&options).unwrap())
    };
    ways.map(made).collect()
}

/// Returns pseudo-random bytes that depend only on the seed.
fn noise(seed: u64, n: usize) -> Vec<u8> {
    let mixed = |i: usize| {
        let x = (i as u64 + (seed << 32)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        ((x ^ (x >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 40) as u8
    };
    (0..n).map(mixed).collect()
}

fn numbers(seed: u64, n: usize) -> Vec<f32> {
    noise(seed, 2 * n).as_chunks().0.iter().map(|&b| f32::from(i16::from_le_bytes(b)) / 16384.0).collect()
}

/// Returns the bytes of a stored matrix whose elements have moderate magnitudes.
fn stored(dtype: StoredType, rows: usize, width: usize, seed: u64) -> Vec<u8> {
    let blocks = rows * width / dtype.block_elements();
    let mut bytes = noise(seed, blocks * dtype.block_bytes());
    // The positions of f16 scales and of floats within a block. Their exponents are set to small numbers.
    let places: &[usize] = match dtype {
        StoredType::F32 => return bytemuck::cast_slice(&numbers(seed, rows * width)).to_vec(),
        StoredType::BF16 => {
            return numbers(seed, rows * width)
                .iter()
                .flat_map(|x| half::bf16::from_f32(*x).to_le_bytes())
                .collect();
        }
        StoredType::F16 | StoredType::Q8_0 | StoredType::Q4_0 | StoredType::Iq4Nl | StoredType::Q5_0 => &[0],
        StoredType::Q4_1 | StoredType::Q5_1 | StoredType::Q4K | StoredType::Q5K => &[0, 2],
        StoredType::Q2K => &[80, 82],
        StoredType::Q3K => &[108],
        StoredType::Q6K => &[208],
    };
    for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
        for &at in places {
            block[at + 1] = (block[at + 1] & 0x80) | 0x24 | (block[at + 1] & 3);
        }
    }
    bytes
}

/// Returns the expected products, each with the sum of the magnitudes of its terms.
fn expected(x: &[f32], w: &[f32], input: usize) -> Vec<(f64, f64)> {
    let dot = |x: &[f32], w: &[f32]| {
        let products = x.iter().zip(w).map(|(a, b)| f64::from(*a) * f64::from(*b));
        products.fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p.abs()))
    };
    x.chunks_exact(input).flat_map(|x| w.chunks_exact(input).map(move |w| dot(x, w))).collect()
}

fn check(dtype: StoredType, rows: usize, out: usize, input: usize, seed: u64) {
    let (x, bytes) = (numbers(seed, rows * input), stored(dtype, out, input, seed + 1));
    let mut w = vec![0.0; out * input];
    dtype.decode(&bytes, &mut w);
    assert!(w.iter().all(|x| x.is_finite()), "{dtype}");
    let expected = expected(&x, &w, input);
    let matrix = Matrix::new(dtype, out, input, &bytes).unwrap();
    // The earlier contents of `y` must not matter.
    let multiplied = |products: Products| {
        let mut y = vec![f32::NAN; rows * out];
        products.multiply(&x, &matrix, &mut y).unwrap();
        y
    };
    compare(&format!("{dtype} {rows} x {out} x {input}"), multiplied, &expected);
}

/// Compares the products of every instruction set and number of threads with the expected ones, and the numbers of
/// threads with each other.
fn compare(what: &str, multiplied: impl Fn(Products) -> Vec<f32>, expected: &[(f64, f64)]) {
    let mut known: Vec<(String, Vec<f32>)> = Vec::new();
    for (name, products) in ways() {
        let y = multiplied(products);
        assert_eq!(y.len(), expected.len(), "{name}, {what}");
        for (i, (y, (sum, size))) in y.iter().zip(expected).enumerate() {
            let off = (f64::from(*y) - sum).abs();
            assert!(off <= 2e-6 * size + 1e-30, "{name}, {what}, {i}: {y} and {sum}");
        }
        let level = name.split(',').next().unwrap().to_owned();
        match known.iter().find(|(known, _)| *known == level) {
            Some((_, alone)) => assert_eq!(&y, alone, "{name}: threads change no bit"),
            None => known.push((level, y)),
        }
    }
}

#[rstest]
fn every_type_multiplies_any_number_of_rows(#[values(1, 2, 3, 5, 6, 7, 13, 96, 97, 200)] rows: usize) {
    for (seed, dtype) in StoredType::ALL.into_iter().enumerate() {
        check(dtype, rows, 21, 512, seed as u64);
    }
}

/// Multiplies more rows than fit in one run. Their length is a multiple of 1,024 elements, so they map to the
/// same cache sets.
#[test]
fn many_rows_of_a_power_of_two_multiply() {
    for (rows, out, input) in [(24, 40, 1024), (70, 37, 1024), (400, 21, 2048)] {
        check(StoredType::F32, rows, out, input, 5);
    }
}

#[test]
fn rows_longer_than_a_step_are_summed_in_parts() {
    for dtype in [StoredType::F32, StoredType::BF16, StoredType::Q8_0, StoredType::Q6K] {
        for rows in [1, 4] {
            check(dtype, rows, 9, 2560, 3);
        }
    }
}

/// Returns rows rounded to eight bits in blocks of 32 elements, by plain loops.
fn rounded(x: &[f32]) -> Vec<f32> {
    let block = |x: &[f32]| {
        let step = x.iter().fold(0.0f32, |most, x| most.max(x.abs())) / 127.0;
        let inverse = if step < f32::MIN_POSITIVE { 0.0 } else { 1.0 / step };
        x.iter().map(|x| (x * inverse).round_ties_even() * step).collect::<Vec<f32>>()
    };
    x.chunks_exact(32).flat_map(block).collect()
}

/// Compares products of rounded rows with plain sums, for rows of very different magnitudes.
fn check_rounded(dtype: StoredType, rows: usize, out: usize, input: usize, seed: u64) {
    let mut x = numbers(seed, rows * input);
    for (block, x) in x.chunks_exact_mut(32).enumerate() {
        let factor = [1.0, 1e-3, 0.0, 1e4, 1e-42][block % 5];
        for x in x {
            *x *= factor;
        }
    }
    let bytes = stored(dtype, out, input, seed + 1);
    let mut w = vec![0.0; out * input];
    dtype.decode(&bytes, &mut w);
    let of = if dtype.is_blocks() { rounded(&x) } else { x.clone() };
    let expected = expected(&of, &w, input);
    let matrix = Matrix::new(dtype, out, input, &bytes).unwrap();
    let multiplied =
        |products: Products| products.with_compute(ComputeType::Int8).multiplied(&x, rows, &matrix).unwrap();
    compare(&format!("{dtype} {rows} x {out} x {input}, rounded"), multiplied, &expected);
}

#[rstest]
fn rows_rounded_to_eight_bits_multiply(#[values(1, 2, 5, 6, 7, 13, 97)] rows: usize) {
    for (seed, dtype) in StoredType::ALL.into_iter().enumerate() {
        for out in [1, 15, 16, 17, 32, 45] {
            check_rounded(dtype, rows, out, 512, seed as u64);
        }
    }
}

#[test]
fn long_and_many_rows_rounded_to_eight_bits_multiply() {
    for dtype in [StoredType::Q8_0, StoredType::Q4K, StoredType::Q6K] {
        for (rows, out, input) in [(1, 9, 2560), (8, 70, 3072), (1300, 33, 768)] {
            check_rounded(dtype, rows, out, input, 3);
        }
    }
    // Rows that do not consist of whole blocks of 256 elements.
    for input in [32, 96, 576, 1536 + 32] {
        check_rounded(StoredType::Q8_0, 9, 20, input, 4);
    }
}

/// Compares products of rows rounded to bf16 with plain sums.
fn check_bf16(rows: usize, out: usize, input: usize, seed: u64) {
    let mut x = numbers(seed, rows * input);
    for (place, x) in x.iter_mut().enumerate() {
        *x *= [1.0, 1e-3, 0.0, 1e4][place / 7 % 4];
    }
    let bytes = stored(StoredType::BF16, out, input, seed + 1);
    let mut w = vec![0.0; out * input];
    StoredType::BF16.decode(&bytes, &mut w);
    let of: Vec<f32> = x.iter().map(|x| half::bf16::from_f32(*x).to_f32()).collect();
    let expected = expected(&of, &w, input);
    // The matrix may begin at any byte.
    for offset in [0, 1] {
        let moved = [&vec![0; offset][..], &bytes].concat();
        let matrix = Matrix::new(StoredType::BF16, out, input, &moved[offset..]).unwrap();
        let multiplied = |products: Products| {
            products.with_compute(ComputeType::Bf16).multiplied(&x, rows, &matrix).unwrap()
        };
        compare(&format!("bf16 {rows} x {out} x {input}, rounded"), multiplied, &expected);
    }
}

#[rstest]
fn rows_rounded_to_bf16_multiply(#[values(1, 2, 5, 6, 7, 13, 23, 24, 25, 97)] rows: usize) {
    for (seed, out) in [1, 3, 4, 15, 16, 17, 31, 32, 33, 70].into_iter().enumerate() {
        for input in [1, 2, 31, 32, 33, 64, 577] {
            check_bf16(rows, out, input, seed as u64);
        }
    }
}

#[test]
fn long_and_many_rows_rounded_to_bf16_multiply() {
    for (rows, out, input) in [(1, 9, 2560), (8, 70, 3072), (1300, 33, 768), (50, 40, 2048), (2000, 3, 320)] {
        check_bf16(rows, out, input, 3);
    }
}

/// Types that a compute type does not round for are multiplied exactly, bit for bit.
#[test]
fn a_compute_type_leaves_other_matrices_alone() {
    for dtype in StoredType::ALL {
        for compute in ComputeType::ALL.into_iter().filter(|compute| !compute.rounds_for(dtype)) {
            let (x, bytes) = (numbers(1, 5 * 256), stored(dtype, 9, 256, 2));
            let matrix = Matrix::new(dtype, 9, 256, &bytes).unwrap();
            for (name, exact) in ways() {
                let other = exact.clone().with_compute(compute).multiplied(&x, 5, &matrix).unwrap();
                assert_eq!(other, exact.multiplied(&x, 5, &matrix).unwrap(), "{name}, {dtype}, {compute}");
            }
        }
    }
}

/// In a row that is no number or without bound somewhere, no product of bf16 is finite; other rows stay.
#[test]
fn a_fault_in_a_row_in_bf16_stays_visible() {
    let input = 100;
    let bytes = vec![0x3f; 2 * 40 * input];
    let matrix = Matrix::new(StoredType::BF16, 40, input, &bytes).unwrap();
    for rows in [3, 30] {
        let sound = numbers(9, rows * input);
        for (fault, place) in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX]
            .into_iter()
            .flat_map(|fault| [(fault, 0), (fault, 31), (fault, 99)])
        {
            let mut x = sound.clone();
            x[input + place] = fault;
            for (name, products) in ways() {
                let products = products.with_compute(ComputeType::Bf16);
                let expected = products.multiplied(&sound, rows, &matrix).unwrap();
                let y = products.multiplied(&x, rows, &matrix).unwrap();
                assert!(y[40..80].iter().all(|y| !y.is_finite()), "{name} {fault} {place}");
                assert_eq!((&y[..40], &y[80..]), (&expected[..40], &expected[80..]), "{name}");
            }
        }
    }
}

/// In a row that is no number or without bound somewhere, no product is a number; other rows stay.
#[test]
fn a_fault_in_a_row_that_is_rounded_stays_visible() {
    let (out, input) = (20, 128);
    for dtype in [StoredType::Q8_0, StoredType::Q5_1] {
        let bytes = stored(dtype, out, input, 8);
        let matrix = Matrix::new(dtype, out, input, &bytes).unwrap();
        let sound = numbers(9, 3 * input);
        for fault in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for place in [0, 17, 31, 127] {
                let mut x = sound.clone();
                x[input + place] = fault;
                for (name, products) in ways() {
                    let products = products.with_compute(ComputeType::Int8);
                    let expected = products.multiplied(&sound, 3, &matrix).unwrap();
                    let y = products.multiplied(&x, 3, &matrix).unwrap();
                    assert!(y[out..2 * out].iter().all(|y| y.is_nan()), "{name} {dtype} {fault} {place}");
                    assert_eq!(
                        (&y[..out], &y[2 * out..]),
                        (&expected[..out], &expected[2 * out..]),
                        "{name}"
                    );
                }
            }
        }
    }
}

/// Computes norms, gates and sums on every instruction set and number of threads, over few elements and over
/// enough elements for several threads.
#[rstest]
fn steps_between_products_are_those_of_plain_sums(
    #[values(1, 3, 200)] rows: usize,
    #[values(1, 7, 8, 33, 576)] width: usize,
) {
    let (x, y, weight) = (numbers(1, rows * width), numbers(2, rows * width), numbers(3, width));
    // The gates range from far below zero to far above zero.
    let gate: Vec<f32> = x.iter().map(|x| x * 60.0).collect();
    let wide = |x: &f32| f64::from(*x);
    let norm = x.chunks(width).flat_map(|x| {
        let mean = x.iter().map(|x| wide(x) * wide(x)).sum::<f64>() / width as f64;
        x.iter().zip(&weight).map(move |(x, w)| wide(x) * wide(w) / (mean + 1e-5).sqrt())
    });
    let norm: Vec<f64> = norm.collect();
    let gated = gate.iter().zip(&y).map(|(g, u)| wide(g) / (1.0 + (-wide(g)).exp()) * wide(u));
    let gated: Vec<f64> = gated.collect();
    let gelu = gate.iter().zip(&y).map(|(g, u)| {
        let g = wide(g);
        let inner = (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044_715 * g.powi(3));
        g / 2.0 * (1.0 + inner.tanh()) * wide(u)
    });
    let gelu: Vec<f64> = gelu.collect();
    let sums: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x + y).collect();
    let close = |got: &[f32], expected: &[f64], what: &str| {
        assert_eq!(got.len(), expected.len(), "{what}");
        for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
            let off = (f64::from(*got) - expected).abs();
            assert!(off <= 1e-6 * expected.abs() + 1e-30, "{what}, {i}: {got} and {expected}");
        }
    };
    for (name, steps) in ways() {
        close(&steps.rms_norm(&x, &weight, 1e-5).unwrap(), &norm, &name);
        close(&steps.gated(&gate, &y).unwrap(), &gated, &name);
        let got = steps.gated_gelu(&gate, &y).unwrap();
        for (i, (got, expected)) in got.iter().zip(&gelu).enumerate() {
            let off = (f64::from(*got) - expected).abs();
            assert!(off <= 1e-6 * wide(&(gate[i] * y[i])).abs(), "{name}, {i}: {got} and {expected}");
        }
        assert_eq!(steps.sums(&x, &y).unwrap(), sums, "{name}");
    }
}

#[test]
fn gates_that_are_no_numbers_or_without_bound_stay_so() {
    for (name, steps) in ways() {
        let (gate, up) = ([f32::NAN, f32::INFINITY, -200.0, 0.0, -1e6], [1.0, 2.0, 1.0, 5.0, 1.0]);
        for got in [steps.gated(&gate, &up).unwrap(), steps.gated_gelu(&gate, &up).unwrap()] {
            assert!(got[0].is_nan() && got[1] == f32::INFINITY, "{name}: {got:?}");
            assert!(got[2..].iter().all(|y| y.abs() < 1e-30), "{name}: {got:?}");
        }
    }
}

#[test]
fn steps_of_other_extents_are_refused() {
    let steps = Products::new();
    assert!(matches!(
        steps.rms_norm(&[1.0; 5], &[1.0; 2], 0.0),
        Err(Error::NotMultiple { value: 5, of: 2, .. })
    ));
    assert!(matches!(steps.rms_norm(&[1.0; 5], &[], 0.0), Err(Error::Zero { .. })));
    assert!(matches!(
        steps.gated(&[1.0; 5], &[1.0; 4]),
        Err(Error::Mismatch { expected: Number(5), got: Number(4), .. })
    ));
    assert!(matches!(
        steps.sums(&[], &[1.0]),
        Err(Error::Mismatch { expected: Number(0), got: Number(1), .. })
    ));
    let matrix = [0u8; 24];
    let matrix = Matrix::new(StoredType::F32, 2, 3, &matrix).unwrap();
    let refused = steps.multiplied(&[1.0; 4], 2, &matrix);
    assert!(matches!(refused, Err(Error::Mismatch { expected: Number(6), got: Number(4), .. })));
    assert!(steps.rms_norm(&[], &[1.0], 0.0).unwrap().is_empty());
    assert!(steps.gated(&[], &[]).unwrap().is_empty());
    assert_eq!(steps.multiplied(&[1.0; 3], 1, &matrix).unwrap(), [0.0; 2]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn floats_of_any_width_multiply(
        dtype in prop::sample::select(vec![StoredType::F32, StoredType::F16, StoredType::BF16]),
        rows in 0usize..20,
        out in 0usize..40,
        input in 1usize..70,
        seed in 0u64..1000,
    ) {
        check(dtype, rows, out, input, seed);
    }

    #[test]
    fn blocks_of_any_number_multiply(
        dtype in prop::sample::select(StoredType::ALL[3..].to_vec()),
        rows in 0usize..20,
        out in 0usize..40,
        blocks in 1usize..4,
        seed in 0u64..1000,
    ) {
        check(dtype, rows, out, blocks * dtype.block_elements(), seed);
    }
}

#[test]
fn bytes_at_odd_addresses_are_numbers_too() {
    for dtype in StoredType::ALL {
        let bytes = stored(dtype, 8, 256, 5);
        let moved: Vec<u8> = std::iter::once(0).chain(bytes.iter().copied()).collect();
        let x = numbers(1, 256);
        let [a, b] = [&bytes[..], &moved[1..]].map(|bytes| {
            let mut y = vec![0.0; 8];
            Products::new().multiply(&x, &Matrix::new(dtype, 8, 256, bytes).unwrap(), &mut y).unwrap();
            y
        });
        for (a, b) in a.iter().zip(&b) {
            assert!((a - b).abs() <= 1e-5 * (a.abs() + 1.0), "{dtype}: {a} and {b}");
        }
    }
}

#[test]
fn extents_that_do_not_fit_are_errors() {
    let wrong = Matrix::new(StoredType::Q8_0, 2, 40, &[0; 85]);
    assert!(matches!(wrong, Err(Error::NotMultiple { value: 40, of: 32, .. })), "{wrong:?}");
    let wrong = Matrix::new(StoredType::F32, 2, 3, &[0; 23]);
    assert!(matches!(wrong, Err(Error::Mismatch { expected: Number(24), got: Number(23), .. })), "{wrong:?}");
    assert!(Matrix::new(StoredType::F32, usize::MAX, 3, &[0; 23]).is_err());
    let bytes = [0; 24];
    let matrix = Matrix::new(StoredType::F32, 2, 3, &bytes).unwrap();
    for (x, y) in [(4, 2), (3, 3), (6, 2), (3, 0), (0, 2)] {
        let result = Products::new().multiply(&vec![0.0; x], &matrix, &mut vec![0.0; y]);
        assert!(matches!(result, Err(Error::Mismatch { .. })), "{x} and {y}: {result:?}");
    }
    let none = Matrix::new(StoredType::F32, 2, 0, &[]).unwrap();
    let mut y = [1.0; 4];
    Products::new().multiply(&[], &none, &mut y).unwrap();
    assert_eq!(y, [0.0; 4], "sums of nothing");
}

/// Compares products of f32 or bf16 matrices with plain sums. Except for denormals, they must be as close as
/// f32 sums, and they must not be finite where the sums are not. The number of threads must not change any
/// bit.
fn check_numbers(x: &[f32], w: &[f32], input: usize, dtype: StoredType) {
    let (rows, out) = (x.len() / input, w.len() / input);
    let bytes: Vec<u8> = match dtype {
        StoredType::F32 => bytemuck::cast_slice(w).to_vec(),
        _ => w.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect(),
    };
    let mut w = vec![0.0; out * input];
    dtype.decode(&bytes, &mut w);
    let matrix = Matrix::new(dtype, out, input, &bytes).unwrap();
    let expected = expected(x, &w, input);
    let total = |x: &[f32]| x.iter().map(|x| f64::from(x.abs())).filter(|x| x.is_finite()).sum::<f64>();
    let mut known: Vec<(String, Vec<f32>)> = Vec::new();
    for (name, products) in ways() {
        let mut y = vec![f32::NAN; rows * out];
        products.multiply(x, &matrix, &mut y).unwrap();
        for (i, (y, (sum, size))) in y.iter().zip(&expected).enumerate() {
            let (row, column) = (i / out, i % out);
            let flushed = total(&x[row * input..][..input]) + total(&w[column * input..][..input]);
            let bound = 1e-6 * size + 2f64.powi(-124) * (flushed + input as f64);
            let near = (f64::from(*y) - sum).abs() <= bound;
            // Intermediate f32 sums may overflow.
            let beyond = *size > f64::from(f32::MAX) && !y.is_finite();
            let same = sum.is_nan() && y.is_nan() || f64::from(*y) == *sum;
            let right = if sum.is_finite() { near || beyond } else { same || beyond };
            assert!(right, "{name}, {dtype} {rows} x {out} x {input}, {i}: {y} and {sum}, {bound}");
        }
        let level = name.split(',').next().unwrap().to_owned();
        match known.iter().find(|(known, _)| *known == level) {
            Some((_, alone)) => {
                let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
                assert!(y.iter().zip(alone).all(same), "{name}: threads change no bit");
            }
            None => known.push((level, y)),
        }
    }
}

#[test]
fn sums_of_one_sign_keep_their_digits() {
    let positive = |seed, n| -> Vec<f32> { numbers(seed, n).iter().map(|x| x.abs() + 0.1).collect() };
    for input in [31, 576, 1536, 2700] {
        check_numbers(&positive(4, 40 * input), &positive(5, 35 * input), input, StoredType::F32);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn every_type_multiplies_many_rows(
        dtype in prop::sample::select(StoredType::ALL.to_vec()),
        rows in 1usize..100,
        out in 1usize..70,
        blocks in 1usize..6,
        seed in 0u64..1000,
    ) {
        check(dtype, rows, out, blocks * dtype.block_elements().max(19), seed);
    }

    #[test]
    fn numbers_of_any_size_multiply(
        dtype in prop::sample::select(vec![StoredType::F32, StoredType::BF16]),
        rows in 1usize..100,
        out in 1usize..40,
        input in 1usize..200,
        spread in 1i32..75,
        seed in 0u64..1000,
    ) {
        let scaled = |seed: u64, n: usize| -> Vec<f32> {
            let sizes = noise(seed + 9, n);
            let scale = |byte: u8| 2f32.powi(i32::from(byte) % (2 * spread) - spread);
            numbers(seed, n).iter().zip(sizes).map(|(x, byte)| x * scale(byte)).collect()
        };
        check_numbers(&scaled(seed, rows * input), &scaled(seed + 50, out * input), input, dtype);
    }

    #[test]
    fn numbers_that_are_not_finite_stay_in_their_place(
        dtype in prop::sample::select(vec![StoredType::F32, StoredType::BF16]),
        rows in 1usize..60,
        out in 1usize..70,
        input in 1usize..100,
        places in prop::collection::vec((any::<bool>(), any::<prop::sample::Index>(), 0usize..6), 1..4),
    ) {
        let (mut x, mut w) = (numbers(6, rows * input), numbers(7, out * input));
        for (of_x, at, which) in places {
            let odd = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::from_bits(0x7fff_ffff), f32::MAX, 1e-39];
            let to = if of_x { &mut x } else { &mut w };
            let at = at.index(to.len());
            to[at] = odd[which];
        }
        check_numbers(&x, &w, input, dtype);
    }
}

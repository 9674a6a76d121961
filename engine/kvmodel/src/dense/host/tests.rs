//! Tests every step on the host against plain loops.

use half::{bf16, f16};
use kvbackend_cpu::{CpuBackend, CpuOptions, SimdLevel};
use kvcore::Compared::Number;
use kvcore::{DType, MemoryKind, allocate_tensor};
use rstest::rstest;

use super::*;
use crate::dense::{AttentionInput, StoredType};
use crate::error::WeightProblem;

static STEPS: std::sync::LazyLock<HostDense> = std::sync::LazyLock::new(HostDense::default);

/// Returns numbers between -1 and 1 that never repeat.
fn numbers(seed: usize, n: usize) -> Vec<f32> {
    (0..n).map(|i| ((seed * 7919 + i) as f32 * 0.618_034).fract() * 2.0 - 1.0).collect()
}

fn rows(shape: &[usize], values: &[f32]) -> Activation {
    activation(Tensor::from_slice(values, shape, &Device::Cpu)).unwrap()
}

fn read(x: &Activation) -> Vec<f32> {
    let mut values = vec![9.0; 3];
    STEPS.read(x, &mut values).unwrap();
    values
}

fn weight(shape: &[usize], values: &[f32], purpose: WeightUse) -> Arc<dyn Weight> {
    STEPS.load(&StoredWeight::of_f32("a", shape, values).unwrap(), purpose).unwrap()
}

fn close(got: &[f32], expected: &[f32], limit: f32) {
    assert_eq!(got.len(), expected.len());
    for (i, (a, b)) in got.iter().zip(expected).enumerate() {
        assert!((a - b).abs() <= limit, "{i}: {a} and {b}");
    }
}

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |m, y| m.max(y.abs()))
}

/// Returns `x · mᵀ`, where the rows of `x` and `m` are `width` wide.
fn product(x: &[f32], m: &[f32], width: usize) -> Vec<f32> {
    let dot = |x: &[f32], m: &[f32]| x.iter().zip(m).map(|(a, b)| a * b).sum();
    x.chunks(width).flat_map(|x| m.chunks(width).map(move |m| dot(x, m))).collect()
}

#[test]
fn embeddings_are_rows_of_the_table_tied_or_not() {
    let values = numbers(1, 5 * 4);
    let table = weight(&[5, 4], &values, WeightUse::Table);
    let x = STEPS.embed(table.as_ref(), &[3, 0, 3], 1.0).unwrap();
    assert_eq!(x.shape(), [3, 4]);
    assert_eq!(read(&x), [&values[12..16], &values[..4], &values[12..16]].concat());
    let head = STEPS.tied_head(table.as_ref(), WeightFormat::Stored).unwrap();
    assert_eq!((table.bytes(), head.bytes()), (80, 0), "the head shares the table's memory");
    let logits = STEPS.project(&x, head.as_ref(), None).unwrap();
    close(&read(&logits), &product(&read(&x), &values, 4), 1e-6);
}

#[rstest]
#[case(&[3, 8])]
#[case(&[3, 2, 8])]
fn norms_are_over_rows_or_heads(#[case] shape: &[usize]) {
    let (values, factors) = (numbers(2, shape.iter().product()), numbers(3, 8));
    let norm = weight(&[8], &factors, WeightUse::Vector);
    let y = STEPS.rms_norm(&rows(shape, &values), norm.as_ref(), 0.1).unwrap();
    let expected: Vec<f32> = values
        .chunks(8)
        .flat_map(|x| {
            let mean_square = x.iter().map(|x| x * x).sum::<f32>() / 8.0;
            x.iter().zip(&factors).map(move |(x, f)| x / (mean_square + 0.1).sqrt() * f).collect::<Vec<_>>()
        })
        .collect();
    assert_eq!(y.shape(), shape);
    close(&read(&y), &expected, 1e-6);
}

#[test]
fn projections_multiply_and_add_a_bias() {
    let (x, m, b) = (numbers(4, 3 * 6), numbers(5, 4 * 6), numbers(6, 4));
    let matrix = weight(&[4, 6], &m, WeightUse::Projection(WeightFormat::Stored));
    let bias = weight(&[4], &b, WeightUse::Vector);
    let y = STEPS.project(&rows(&[3, 6], &x), matrix.as_ref(), Some(bias.as_ref())).unwrap();
    let expected: Vec<f32> = product(&x, &m, 6).iter().zip(b.iter().cycle()).map(|(y, b)| y + b).collect();
    assert_eq!((y.shape(), y.rows()), (&[3, 4][..], 3));
    close(&read(&y), &expected, 1e-5);
    let none = STEPS.project(&rows(&[0, 6], &[]), matrix.as_ref(), None).unwrap();
    assert_eq!((none.shape(), read(&none).len()), (&[0, 4][..], 0));
}

#[test]
fn heads_have_matrices_of_their_own_transposed_or_not() {
    let (x, m) = (numbers(7, 2 * 3 * 4), numbers(8, 3 * 4 * 5));
    let activations = rows(&[2, 3, 4], &x);
    let at = |row: usize, head: usize, b: usize| -> f32 {
        (0..4).map(|a| x[(row * 3 + head) * 4 + a] * m[(head * 4 + a) * 5 + b]).sum()
    };
    let mut expected = Vec::new();
    for (row, head) in (0..2).flat_map(|row| (0..3).map(move |head| (row, head))) {
        expected.extend((0..5).map(|b| at(row, head, b)));
    }
    let direct = weight(&[3, 4, 5], &m, WeightUse::ByHead);
    let y = STEPS.by_head(&activations, direct.as_ref()).unwrap();
    assert_eq!(y.shape(), [2, 3, 5]);
    close(&read(&y), &expected, 1e-6);
    // The same matrices, stored transposed.
    let turned: Vec<f32> = (0..60).map(|i| m[(i / 20 * 4 + i % 4) * 5 + i / 4 % 5]).collect();
    let turned = weight(&[3, 5, 4], &turned, WeightUse::ByHeadTransposed);
    close(&read(&STEPS.by_head(&activations, turned.as_ref()).unwrap()), &expected, 1e-6);
}

#[test]
fn gates_sums_and_zeros_are_element_by_element() {
    let (a, b) = (numbers(9, 10), numbers(10, 10));
    let (x, y) = (rows(&[2, 5], &a), rows(&[2, 5], &b));
    let gated: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a / (1.0 + (-a).exp()) * b).collect();
    close(&read(&STEPS.gated(GateActivation::Silu, &x, &y).unwrap()), &gated, 1e-6);
    let tanh = |a: f32| (0.797_884_6 * (a + 0.044_715 * a.powi(3))).tanh();
    let gelu: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a / 2.0 * (1.0 + tanh(*a)) * b).collect();
    close(&read(&STEPS.gated(GateActivation::GeluTanh, &x, &y).unwrap()), &gelu, 1e-6);
    let sum: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
    assert_eq!(read(&STEPS.add(&x, &y).unwrap()), sum);
    let zeros = STEPS.zeros_like(&x).unwrap();
    assert_eq!((zeros.shape(), read(&zeros)), (&[2, 5][..], vec![0.0; 10]));
}

#[test]
fn heads_columns_and_rows_are_parts_of_the_same_numbers() {
    let values = numbers(11, 24);
    let x = rows(&[2, 12], &values);
    let heads = STEPS.split_heads(&x, 4).unwrap();
    assert_eq!((heads.shape(), read(&heads)), (&[2, 3, 4][..], values.clone()));
    let joined = STEPS.join_heads(&heads).unwrap();
    assert_eq!((joined.shape(), read(&joined)), (&[2, 12][..], values.clone()));
    let columns = STEPS.columns(&heads, 1..3).unwrap();
    let expected: Vec<f32> = values.chunks(4).flat_map(|head| head[1..3].to_vec()).collect();
    assert_eq!((columns.shape(), read(&columns)), (&[2, 3, 2][..], expected));
    // A part whose elements are not contiguous can still be split and normalised.
    let part = STEPS.split_heads(&STEPS.columns(&x, 4..8).unwrap(), 4).unwrap();
    assert_eq!((part.shape(), read(&part)), (&[2, 1, 4][..], [&values[4..8], &values[16..20]].concat()));
    let index = STEPS.index(vec![1, 1, 0]).unwrap();
    let chosen = STEPS.select(&columns, &index).unwrap();
    assert_eq!((index.len(), chosen.shape()), (3, &[3, 3, 2][..]));
    assert_eq!(read(&chosen)[6..12], read(&columns)[6..12]);
    assert!(STEPS.select(&x, &STEPS.index(Vec::new()).unwrap()).unwrap().rows() == 0);
}

#[test]
fn weighted_rows_are_added_to_their_places() {
    let (sum, y) = (numbers(12, 12), numbers(13, 6));
    let index = STEPS.index(vec![3, 1]).unwrap();
    let got = STEPS.add_rows(&rows(&[4, 3], &sum), &index, vec![0.5, -2.0], &rows(&[2, 3], &y)).unwrap();
    let mut expected = sum;
    for i in 0..3 {
        expected[9 + i] += 0.5 * y[i];
        expected[3 + i] += -2.0 * y[3 + i];
    }
    close(&read(&got), &expected, 1e-6);
}

#[test]
fn rows_cross_the_border_and_come_back() {
    let backend = CpuBackend::new();
    let stream = backend.stream().unwrap();
    let extents =
        BorderExtents { rows: 3, heads: 4, k_heads: 2, v_heads: 2, k_dim: 2, v_dim: 5, latent: false };
    let mut border = STEPS.border(backend.as_ref(), &extents).unwrap();
    assert_eq!(border.rows(), 3);
    let values = numbers(14, 2 * 4);
    let keys = rows(&[2, 2, 2], &values);
    let view = border.lend(stream.as_ref(), AttentionInput::Key, &keys).unwrap();
    assert_eq!(view.shape(), [2, 2, 2]);
    let mut bytes = vec![0; 32];
    stream.read(&view, &mut bytes).unwrap();
    assert_eq!(bytemuck::pod_collect_to_vec::<u8, f32>(&bytes), values);
    // Writes to the copy must not affect the activation.
    let copy = border.lend_copy(stream.as_ref(), AttentionInput::Key, &keys).unwrap();
    stream.write(&copy, &[0; 32]).unwrap();
    assert_eq!(read(&keys), values);
    let output = border.output(stream.as_ref(), 2).unwrap();
    assert_eq!(output.shape(), [2, 4, 5]);
    let attention = numbers(15, 40);
    stream.write(&output, bytemuck::cast_slice(&attention)).unwrap();
    let taken = border.take(stream.as_ref(), output).unwrap();
    assert_eq!((taken.shape(), read(&taken)), (&[2, 4, 5][..], attention));
    let refused = border.lend(stream.as_ref(), AttentionInput::LatentQuery, &keys).unwrap_err();
    assert!(refused.to_string().contains("latent"), "{refused}");
}

/// Returns a `Q8_0` block and its elements: a scale and 32 signed bytes.
fn q8_0(seed: usize) -> (Vec<u8>, Vec<f32>) {
    let scale = f16::from_f32(0.01 * (seed + 1) as f32);
    let bytes: Vec<i8> = (0..32).map(|i| ((i * 37 + seed * 11) % 255) as i8).collect();
    let block = scale.to_le_bytes().into_iter().chain(bytes.iter().map(|&q| q as u8)).collect();
    (block, bytes.iter().map(|&q| scale.to_f32() * f32::from(q)).collect())
}

/// Returns a `Q4_K` block and its elements, following the layout in ggml-common.h: `d` and `dmin` in f16,
/// eight pairs of six-bit numbers in 12 bytes, and 256 four-bit elements. Each group of 64 elements shares
/// 32 bytes, with its first 32 elements in the low halves.
fn q4_k(seed: usize) -> (Vec<u8>, Vec<f32>) {
    let (d, dmin) = (f16::from_f32(0.002 * (seed + 1) as f32), f16::from_f32(0.003));
    let scales: Vec<u8> = (0..8).map(|j| ((j * 23 + seed * 5 + 17) % 64) as u8).collect();
    let minima: Vec<u8> = (0..8).map(|j| ((j * 41 + seed * 3 + 29) % 64) as u8).collect();
    let quants: Vec<u8> = (0..256).map(|i| ((i * 7 + seed + i / 16) % 16) as u8).collect();
    let mut block = [d.to_le_bytes(), dmin.to_le_bytes()].concat();
    let mut packed = [0u8; 12];
    for j in 0..4 {
        packed[j] = scales[j] | (scales[j + 4] >> 4 << 6);
        packed[j + 4] = minima[j] | (minima[j + 4] >> 4 << 6);
        packed[j + 8] = (scales[j + 4] & 15) | (minima[j + 4] << 4);
    }
    block.extend(packed);
    for of_64 in quants.chunks(64) {
        block.extend((0..32).map(|i| of_64[i] | (of_64[i + 32] << 4)));
    }
    let value = |i: usize| {
        let (scale, minimum) = (f32::from(scales[i / 32]), f32::from(minima[i / 32]));
        d.to_f32() * scale * f32::from(quants[i]) - dmin.to_f32() * minimum
    };
    (block, (0..256).map(value).collect())
}

/// Returns a weight `[height, width]` stored in blocks, and its elements.
fn in_blocks(dtype: StoredType, height: usize, width: usize) -> (StoredWeight, Vec<f32>) {
    let of = if dtype == StoredType::Q8_0 { q8_0 } else { q4_k };
    let blocks = height * width / dtype.block_elements();
    let (bytes, values): (Vec<_>, Vec<_>) = (0..blocks).map(of).unzip();
    (StoredWeight::new("a", dtype, &[height, width], bytes.concat()).unwrap(), values.concat())
}

#[rstest]
fn blocks_are_decoded_as_ggml_lays_them_out(#[values(StoredType::Q8_0, StoredType::Q4K)] dtype: StoredType) {
    let (stored, values) = in_blocks(dtype, 3, 512);
    close(&stored.to_f32(), &values, 1e-6);
    let table = STEPS.load(&stored, WeightUse::Table).unwrap();
    assert_eq!(table.bytes(), stored.bytes().len(), "the blocks are kept");
    let x = STEPS.embed(table.as_ref(), &[2, 0], 1.0).unwrap();
    close(&read(&x), &[&values[1024..], &values[..512]].concat(), 1e-6);
    let exact = STEPS.load(&stored, WeightUse::ExactProjection).unwrap();
    assert_eq!(exact.bytes(), stored.bytes().len(), "blocks are multiplied in full precision");
    let y = STEPS.project(&x, exact.as_ref(), None).unwrap();
    let expected = product(&read(&x), &values, 512);
    close(&read(&y), &expected, 1e-5 * largest(&expected));
}

#[rstest]
fn blocks_multiply_in_full_precision(
    #[values(StoredType::Q8_0, StoredType::Q4K)] dtype: StoredType,
    #[values(WeightFormat::Stored, WeightFormat::Q8)] format: WeightFormat,
    #[values(1, 5)] count: usize,
) {
    let (stored, values) = in_blocks(dtype, 8, 512);
    let matrix = STEPS.load(&stored, WeightUse::Projection(format)).unwrap();
    assert_eq!(matrix.bytes(), stored.bytes().len(), "the blocks are kept in every format");
    let x = numbers(16, count * 512);
    let got = read(&STEPS.project(&rows(&[count, 512], &x), matrix.as_ref(), None).unwrap());
    let expected = product(&x, &values, 512);
    close(&got, &expected, 1e-5 * largest(&expected));
    let table = STEPS.load(&stored, WeightUse::Table).unwrap();
    let head = STEPS.tied_head(table.as_ref(), format).unwrap();
    assert_eq!(head.bytes(), 0);
    assert_eq!(read(&STEPS.project(&rows(&[count, 512], &x), head.as_ref(), None).unwrap()), got);
}

#[test]
fn half_precision_is_widened_exactly() {
    let values = numbers(17, 64);
    let f16s: Vec<f16> = values.iter().map(|&x| f16::from_f32(x)).collect();
    let bf16s: Vec<bf16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
    let load = |dtype, bytes: &[u8]| {
        let stored = StoredWeight::new("a", dtype, &[64], bytes.to_vec()).unwrap();
        let held = STEPS.load(&stored, WeightUse::Vector).unwrap();
        with_values(plain(held.as_ref()).unwrap(), |values| Ok(values.to_vec())).unwrap()
    };
    let expected: Vec<f32> = f16s.iter().map(|x| x.to_f32()).collect();
    assert_eq!(load(StoredType::F16, bytemuck::cast_slice(&f16s)), expected);
    let expected: Vec<f32> = bf16s.iter().map(|x| x.to_f32()).collect();
    assert_eq!(load(StoredType::BF16, bytemuck::cast_slice(&bf16s)), expected);
}

#[test]
fn eight_bits_take_a_quarter_where_rows_are_whole_blocks() {
    let values = numbers(18, 4 * 64);
    let q8 = WeightUse::Projection(WeightFormat::Q8);
    assert_eq!(weight(&[4, 64], &values, q8).bytes(), 4 * 2 * 34);
    assert_eq!(weight(&[8, 32], &values, q8).bytes(), 8 * 34);
    assert_eq!(weight(&[16, 16], &values, q8).bytes(), 4 * 256);
    let table = weight(&[4, 64], &values, WeightUse::Table);
    assert_eq!(STEPS.tied_head(table.as_ref(), WeightFormat::Q8).unwrap().bytes(), 4 * 2 * 34);
}

#[test]
fn a_weight_of_another_rank_names_the_tensor() {
    let stored = StoredWeight::of_f32("q_proj.weight", &[4], &[0.0; 4]).unwrap();
    match STEPS.load(&stored, WeightUse::Projection(WeightFormat::Stored)) {
        Err(Error::Weight { name, problem: WeightProblem::Rank { expected: 2, got: 1 } }) => {
            assert_eq!(name, "q_proj.weight");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn handles_of_others_and_unfit_extents_are_errors() {
    #[derive(Debug)]
    struct Other;
    impl Weight for Other {
        fn bytes(&self) -> usize {
            0
        }
        fn as_any(&self) -> &dyn std::any::Any {
            self
        }
    }
    let foreign = |result: Result<Activation>| {
        assert!(matches!(result, Err(Error::Core(kvcore::Error::ForeignHandle { backend: "host", .. }))));
    };
    let x = rows(&[1, 4], &[0.0; 4]);
    foreign(STEPS.project(&x, &Other, None));
    let backend = CpuBackend::new();
    let view = allocate_tensor(backend.as_ref(), MemoryKind::Device, DType::F32, &[1, 4]).unwrap();
    foreign(STEPS.add(&x, &Activation::on_device(view)));
    let list = backend.allocate(MemoryKind::Device, 4).unwrap();
    foreign(STEPS.select(&x, &RowIndex::on_device(list, 1)));
    let error = STEPS.add(&x, &rows(&[1, 3], &[0.0; 3])).unwrap_err();
    assert!(
        matches!(error, Error::Core(kvcore::Error::Mismatch { expected: Number(4), got: Number(3), .. })),
        "{error}"
    );
    let integers =
        Activation::on_host(HostRows(Tensor::zeros(4, candle_core::DType::U32, &Device::Cpu).unwrap()));
    let error = STEPS.read(&integers, &mut Vec::new()).unwrap_err();
    assert!(matches!(&error, Error::Dense { implementation: "host", .. }), "{error}");
    assert!(error.to_string().starts_with("dense steps (host): "), "{error}");
}

#[test]
fn a_precision_without_effect_is_noted() {
    let steps = |compute, simd| {
        let backend = CpuBackend::with_options(&CpuOptions { simd, ..CpuOptions::default() }).unwrap();
        HostDense::on(&backend).with_compute(compute)
    };
    let matrix = StoredWeight::of_f32("a", &[2, 32], &numbers(1, 64)).unwrap();
    let brain = StoredWeight::new("a", StoredType::BF16, &[2, 32], vec![0; 128]).unwrap();
    let (stored, blocks) = (WeightFormat::Stored, WeightFormat::Q8);
    for (compute, weight, format, simd, expected) in [
        (ComputeType::Exact, &matrix, stored, None, None),
        (ComputeType::Exact, &matrix, blocks, Some(SimdLevel::Portable), None),
        (ComputeType::Int8, &matrix, stored, None, Some("need weights in ggml blocks")),
        (ComputeType::Int8, &matrix, blocks, Some(SimdLevel::Portable), Some("has no AVX512_VNNI")),
        (ComputeType::Bf16, &matrix, stored, None, Some("need weights in bf16")),
        (ComputeType::Bf16, &brain, blocks, None, Some("need weights in bf16")),
        (ComputeType::Bf16, &brain, stored, Some(SimdLevel::Portable), Some("has no AVX512_BF16")),
    ] {
        let steps = steps(compute, simd);
        steps.load(weight, WeightUse::Projection(format)).unwrap();
        let note = steps.note();
        assert_eq!(note.is_some(), expected.is_some(), "{compute} {format:?}: {note:?}");
        assert!(expected.is_none_or(|words| note.as_ref().unwrap().contains(words)), "{note:?}");
    }
    for (compute, weight, format) in
        [(ComputeType::Int8, &matrix, blocks), (ComputeType::Bf16, &brain, stored)]
    {
        let fast = steps(compute, None);
        fast.load(weight, WeightUse::Projection(format)).unwrap();
        assert_eq!(fast.note().is_none(), fast.products.is_faster_than_exact(), "{compute}");
    }
    // A table alone does not multiply.
    let (tied, alone) = (steps(ComputeType::Bf16, None), steps(ComputeType::Bf16, None));
    let table = tied.load(&brain, WeightUse::Table).unwrap();
    alone.load(&brain, WeightUse::Table).unwrap();
    tied.tied_head(table.as_ref(), stored).unwrap();
    assert!(alone.note().is_some_and(|note| note.contains("need weights in bf16")));
    assert_eq!(tied.note().is_none(), tied.products.is_faster_than_exact());
}

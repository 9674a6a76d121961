//! A model's dense steps, compared with plain f64 loops.

use half::{bf16, f16};
use kvbackend_cuda::dense::{CudaSteps, StoredKind};
use kvcore::Compared::Number;
use kvcore::{Backend, CopyTensor, DType, Stream, TensorView};
use rstest::rstest;

use crate::common::{noise, opened};
use crate::double::{EAGER, LAZY, alone, among_others};

const KINDS: [StoredKind; 5] =
    [StoredKind::F32, StoredKind::F16, StoredKind::BF16, StoredKind::Q8_0, StoredKind::Q4K];

/// Returns the dense steps of a device, or prints why there are none.
fn steps(device: usize) -> Option<CudaSteps> {
    let backend = opened(device)?;
    CudaSteps::new(&backend).inspect_err(|reason| kvconform::skip(reason)).ok()
}

/// Returns `n` numbers between −1 and 1.
fn numbers(seed: u64, n: usize) -> Vec<f32> {
    noise(seed, 2 * n)
        .chunks_exact(2)
        .map(|b| f32::from(u16::from_le_bytes([b[0], b[1]])) / 32_768.0 - 1.0)
        .collect()
}

fn upload(steps: &CudaSteps, shape: &[usize], values: &[f32]) -> TensorView {
    let view = steps.rows(shape).unwrap();
    steps.stream().write(&view, bytemuck::cast_slice(values)).unwrap();
    view
}

fn read(steps: &CudaSteps, view: &TensorView) -> Vec<f32> {
    let mut values = Vec::new();
    steps.read(view, &mut values).unwrap();
    values
}

fn close(actual: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(actual.len(), expected.len());
    for (i, (&a, &e)) in actual.iter().zip(expected).enumerate() {
        assert!((f64::from(a) - e).abs() <= tolerance * e.abs().max(1.0), "element {i} is {a}, expected {e}");
    }
}

/// Returns a random matrix as its stored bytes and as its values.
fn stored(kind: StoredKind, rows: usize, width: usize, seed: u64) -> (Vec<u8>, Vec<f64>) {
    let values = numbers(seed, rows * width);
    let wide = |x: f32| f64::from(x);
    match kind {
        StoredKind::F32 => (bytemuck::cast_slice(&values).to_vec(), values.into_iter().map(wide).collect()),
        StoredKind::F16 => {
            let values: Vec<f16> = values.iter().map(|&x| f16::from_f32(x)).collect();
            (
                values.iter().flat_map(|x| x.to_le_bytes()).collect(),
                values.iter().map(|x| x.to_f64()).collect(),
            )
        }
        StoredKind::BF16 => {
            let values: Vec<bf16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
            (
                values.iter().flat_map(|x| x.to_le_bytes()).collect(),
                values.iter().map(|x| x.to_f64()).collect(),
            )
        }
        StoredKind::Q8_0 => {
            let (mut bytes, mut numbers) = (Vec::new(), Vec::new());
            for block in noise(seed, rows * width).chunks_exact(32) {
                let scale = f16::from_f32(0.01 + f32::from(block[0]) / 20_000.0);
                bytes.extend(scale.to_le_bytes());
                bytes.extend(block);
                numbers.extend(block.iter().map(|&code| scale.to_f64() * f64::from(code.cast_signed())));
            }
            (bytes, numbers)
        }
        StoredKind::Q4K => q4_k(rows * width / 256, seed),
    }
}

/// Returns `Q4_K` blocks in which all bits are used, and their values according to the format's definition.
fn q4_k(blocks: usize, seed: u64) -> (Vec<u8>, Vec<f64>) {
    let (mut bytes, mut numbers) = (Vec::new(), Vec::new());
    for (i, body) in (0..).zip(noise(seed, blocks * 140).chunks_exact(140)) {
        let (d, least) = (f16::from_f32(0.001 + 0.0001 * i as f32), f16::from_f32(0.002));
        bytes.extend(d.to_le_bytes());
        bytes.extend(least.to_le_bytes());
        bytes.extend(body);
        let (packed, quants) = body.split_at(12);
        for group in 0..8 {
            let (scale, minimum) = if group < 4 {
                (packed[group] & 63, packed[group + 4] & 63)
            } else {
                (
                    (packed[group + 4] & 0xf) | (packed[group - 4] >> 6 << 4),
                    (packed[group + 4] >> 4) | (packed[group] >> 6 << 4),
                )
            };
            for element in 0..32 {
                let byte = quants[group / 2 * 32 + element];
                let code = if group % 2 == 0 { byte & 0xf } else { byte >> 4 };
                let value =
                    d.to_f64() * f64::from(scale) * f64::from(code) - least.to_f64() * f64::from(minimum);
                numbers.push(value);
            }
        }
    }
    (bytes, numbers)
}

#[rstest]
fn projections_of_every_stored_type_equal_plain_loops(
    #[values(0, 1, 2, 3, 4)] kind: usize,
    #[values(0, 1, 3, 7, 8, 9, 40, 70)] rows: usize,
    #[values(EAGER, LAZY)] device: usize,
) {
    let _shared = among_others();
    let (Some(steps), kind) = (steps(device), KINDS[kind]) else { return };
    let (width, outputs) = (256, 37);
    let (bytes, matrix) = stored(kind, outputs, width, 7);
    let matrix_there = steps.weight(kind, outputs, width, &bytes).unwrap();
    assert!(matrix_there.bytes() >= bytes.len());
    let bias = numbers(8, outputs);
    let bias_there = steps.weight(StoredKind::F32, 1, outputs, bytemuck::cast_slice(&bias)).unwrap();
    // The rows are not contiguous: they are columns of a wider activation.
    let wide = numbers(9, rows * (width + 12));
    let x = upload(&steps, &[rows, width + 12], &wide).slice(1, 4, 4 + width).unwrap();
    for with_bias in [false, true] {
        let y = steps.project(&x, &matrix_there, with_bias.then_some(&bias_there)).unwrap();
        let mut expected = Vec::new();
        for row in 0..rows {
            for o in 0..outputs {
                let at = |i: usize| f64::from(wide[row * (width + 12) + 4 + i]) * matrix[o * width + i];
                let sum: f64 = (0..width).map(at).sum();
                expected.push(sum + if with_bias { f64::from(bias[o]) } else { 0.0 });
            }
        }
        close(&read(&steps, &y), &expected, 1e-5);
    }
}

#[test]
fn odd_widths_are_multiplied() {
    let _shared = among_others();
    let Some(steps) = steps(LAZY) else { return };
    for kind in &KINDS[..3] {
        for (rows, width, outputs) in [(1, 1, 1), (2, 7, 3), (5, 33, 9), (12, 13, 4)] {
            let (bytes, matrix) = stored(*kind, outputs, width, 17);
            let there = steps.weight(*kind, outputs, width, &bytes).unwrap();
            let x = numbers(18, rows * width);
            let y = steps.project(&upload(&steps, &[rows, width], &x), &there, None).unwrap();
            let product = |row: usize, o: usize| {
                (0..width).map(|i| f64::from(x[row * width + i]) * matrix[o * width + i]).sum::<f64>()
            };
            let expected: Vec<f64> = (0..rows)
                .flat_map(|row| (0..outputs).map(move |o| (row, o)))
                .map(|(r, o)| product(r, o))
                .collect();
            close(&read(&steps, &y), &expected, 1e-5);
        }
    }
}

#[test]
fn embeddings_norms_gates_and_sums_equal_plain_loops() {
    let _shared = among_others();
    let Some(steps) = steps(LAZY) else { return };
    for kind in KINDS {
        let (bytes, table) = stored(kind, 5, 256, 21);
        let there = steps.weight(kind, 5, 256, &bytes).unwrap();
        let expected: Vec<f64> = [4, 0, 4].iter().flat_map(|&t| table[t * 256..][..256].to_vec()).collect();
        for scale in [1.0, 25.25] {
            let rows = steps.embed(&there, &[4, 0, 4], scale).unwrap();
            let expected: Vec<f64> = expected.iter().map(|x| x * f64::from(scale)).collect();
            close(&read(&steps, &rows), &expected, 1e-7);
        }
        assert!(matches!(
            steps.embed(&there, &[5], 1.0),
            Err(kvcore::Error::OutOfRange { value: 5, limit: 5, .. })
        ));
    }
    let (a, b) = (numbers(22, 6 * 300), numbers(23, 6 * 300));
    let (x, y) = (upload(&steps, &[6, 300], &a), upload(&steps, &[6, 300], &b));
    let pairs = || a.iter().zip(&b).map(|(&a, &b)| (f64::from(a), f64::from(b)));
    close(&read(&steps, &steps.add(&x, &y).unwrap()), &pairs().map(|(a, b)| a + b).collect::<Vec<_>>(), 1e-6);
    let silu = pairs().map(|(a, b)| a / (1.0 + (-a).exp()) * b).collect::<Vec<_>>();
    close(&read(&steps, &steps.gated(&x, &y).unwrap()), &silu, 1e-6);
    let tanh = |x: f64| ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh();
    let gelu = pairs().map(|(a, b)| a / 2.0 * (1.0 + tanh(a)) * b).collect::<Vec<_>>();
    close(&read(&steps, &steps.gated_gelu(&x, &y).unwrap()), &gelu, 1e-6);
    assert!(read(&steps, &steps.zeros_like(&x).unwrap()).iter().all(|&x| x == 0.0));

    let weight = numbers(24, 100);
    let there = steps.weight(StoredKind::F32, 1, 100, bytemuck::cast_slice(&weight)).unwrap();
    let norm = |row: &[f32]| -> Vec<f64> {
        let mean = row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / row.len() as f64;
        let scale = (mean + 1e-5).sqrt();
        row.iter().zip(&weight).map(|(&x, &w)| f64::from(x) / scale * f64::from(w)).collect()
    };
    let heads = steps.split_heads(&x, 100).unwrap();
    let expected: Vec<f64> = a.chunks_exact(100).flat_map(norm).collect();
    let normed = steps.rms_norm(&heads, &there, 1e-5).unwrap();
    close(&read(&steps, &normed), &expected, 1e-6);
    // Takes some columns of each row, which are not contiguous.
    let columns = x.slice(1, 50, 150).unwrap();
    let expected: Vec<f64> = a.chunks_exact(300).flat_map(|row| norm(&row[50..150])).collect();
    close(&read(&steps, &steps.rms_norm(&columns, &there, 1e-5).unwrap()), &expected, 1e-6);
    let joined = steps.join_heads(&normed).unwrap();
    assert_eq!((joined.shape(), joined.storage().address()), (&[6, 300][..], normed.storage().address()));
    let apart = steps.split_heads(&columns, 25).unwrap();
    let expected: Vec<f64> = a
        .chunks_exact(300)
        .flat_map(|row| row[50..150].iter().map(|&x| f64::from(x)).collect::<Vec<_>>())
        .collect();
    close(&read(&steps, &steps.join_heads(&apart).unwrap()), &expected, 0.0);
}

#[test]
fn lists_of_many_steps_wait_side_by_side() {
    let _shared = among_others();
    let Some(steps) = steps(LAZY) else { return };
    let table = numbers(61, 50 * 8);
    let there = steps.weight(StoredKind::F32, 50, 8, bytemuck::cast_slice(&table)).unwrap();
    let rows: Vec<TensorView> = (0..50).map(|token| steps.embed(&there, &[token], 1.0).unwrap()).collect();
    for (token, row) in rows.iter().enumerate() {
        assert_eq!(read(&steps, row), &table[8 * token..][..8], "token {token}");
    }
}

#[test]
fn rows_are_chosen_and_added_back() {
    let _shared = among_others();
    let Some(steps) = steps(LAZY) else { return };
    let (a, b) = (numbers(31, 5 * 40), numbers(32, 2 * 40));
    let (sum, y) = (upload(&steps, &[5, 40], &a), upload(&steps, &[2, 40], &b));
    let index = steps.index(&[3, 1]).unwrap();
    let chosen = read(&steps, &steps.select(&sum, &index, 2).unwrap());
    assert_eq!(chosen, [&a[120..160], &a[40..80]].concat());
    let added = read(&steps, &steps.add_rows(&sum, &index, &[0.5, -2.0], &y).unwrap());
    let mut expected: Vec<f64> = a.iter().map(|&x| f64::from(x)).collect();
    for i in 0..40 {
        expected[120 + i] += 0.5 * f64::from(b[i]);
        expected[40 + i] -= 2.0 * f64::from(b[40 + i]);
    }
    close(&added, &expected, 1e-6);
    assert_eq!(read(&steps, &sum), a, "the sum before is as it was");
}

#[rstest]
fn each_head_has_its_matrix(#[values(false, true)] transposed: bool) {
    let _shared = among_others();
    let Some(steps) = steps(EAGER) else { return };
    let (rows, heads, a, b) = (5, 3, 8, 6);
    let (x, m) = (numbers(41, rows * heads * a), numbers(42, heads * a * b));
    let (height, width) = if transposed { (b, a) } else { (a, b) };
    let there = steps.weight(StoredKind::F32, heads * height, width, bytemuck::cast_slice(&m)).unwrap();
    let y = steps.by_head(&upload(&steps, &[rows, heads, a], &x), &there, transposed).unwrap();
    let mut expected = Vec::new();
    for row in 0..rows {
        for head in 0..heads {
            for j in 0..b {
                let at = |i: usize| if transposed { (head * b + j) * a + i } else { (head * a + i) * b + j };
                let product = |i: usize| f64::from(x[(row * heads + head) * a + i]) * f64::from(m[at(i)]);
                expected.push((0..a).map(product).sum::<f64>());
            }
        }
    }
    close(&read(&steps, &y), &expected, 1e-5);
}

#[test]
fn memory_of_results_is_used_again() {
    let _shared = among_others();
    let Some(steps) = steps(LAZY) else { return };
    let x = upload(&steps, &[64, 1000], &numbers(51, 64_000));
    let mut y = steps.add(&x, &x).unwrap();
    let mut addresses = std::collections::BTreeSet::new();
    for _ in 0..20 {
        y = steps.add(&y, &x).unwrap();
        addresses.insert(y.storage().address());
    }
    assert!(addresses.len() <= 3, "{} pieces of memory for one step after another", addresses.len());
    let expected: Vec<f64> = numbers(51, 64_000).iter().map(|&x| 22.0 * f64::from(x)).collect();
    close(&read(&steps, &y), &expected, 1e-5);
}

#[test]
fn another_stream_sees_results_after_the_order_and_the_steps_see_its_own() {
    let _shared = among_others();
    let Some(backend) = opened(LAZY) else { return };
    let Ok(steps) = CudaSteps::new(&backend).inspect_err(|reason| kvconform::skip(reason)) else { return };
    let stream = backend.stream().unwrap();
    let x = upload(&steps, &[4, 25], &numbers(71, 100));
    let y = steps.add(&x, &x).unwrap();
    CudaSteps::order(steps.stream(), stream.as_ref()).unwrap();
    let copy = steps.rows(&[4, 25]).unwrap();
    stream.copy_tensor(&CopyTensor { src: y, dst: copy.clone() }).unwrap();
    CudaSteps::order(stream.as_ref(), steps.stream()).unwrap();
    let sum = steps.add(&copy, &x).unwrap();
    let expected: Vec<f64> = numbers(71, 100).iter().map(|&x| 3.0 * f64::from(x)).collect();
    close(&read(&steps, &sum), &expected, 1e-6);
}

#[test]
fn unused_activations_are_freed_when_the_device_is_full_and_no_step_loses_its_own() {
    let Some((double, _alone)) = alone() else { return };
    let Some(steps) = steps(LAZY) else { return };
    let (rows, values) = ([1000, 1000], numbers(81, 1_000_000));
    let (x, y) = (upload(&steps, &rows, &values), upload(&steps, &rows, &values));
    let sum = steps.add(&x, &y).unwrap();
    drop((x, y)); // their memory waits for use, and the sum still reads it
    double.limit(LAZY, double.live_bytes(LAZY) + (1 << 20));
    let large = steps.rows(&[1500, 1000]).unwrap();
    double.limit(LAZY, 2 << 30);
    assert_eq!(large.len(), 1_500_000);
    let expected: Vec<f64> = values.iter().map(|&x| 2.0 * f64::from(x)).collect();
    close(&read(&steps, &sum), &expected, 1e-6);
}

#[test]
fn weights_of_wrong_sizes_are_refused() {
    let _shared = among_others();
    let Some(steps) = steps(EAGER) else { return };
    let mismatch = steps.weight(StoredKind::BF16, 2, 3, &[0; 11]);
    assert!(
        matches!(mismatch, Err(kvcore::Error::Mismatch { expected: Number(12), got: Number(11), .. })),
        "{mismatch:?}"
    );
    let blocks = steps.weight(StoredKind::Q8_0, 2, 33, &[0; 68]);
    assert!(matches!(blocks, Err(kvcore::Error::NotMultiple { value: 33, of: 32, .. })), "{blocks:?}");
    let x = steps.rows(&[2, 5]).unwrap();
    let other = steps.weight(StoredKind::F32, 3, 4, &[0; 48]).unwrap();
    assert!(steps.project(&x, &other, None).is_err() && steps.rms_norm(&x, &other, 1e-5).is_err());
    let half = kvcore::TensorView::new(x.storage().clone(), DType::F16, &[2, 5]).unwrap();
    assert!(matches!(steps.add(&half, &half), Err(kvcore::Error::Mismatch { .. })));
}

//! Measures products with stored matrices: a single row against a streaming read of the matrix's bytes, several rows
//! against a library's f32 product of the same size, and rows rounded to eight bits against exact products.
//!
//! `--mib N` sets the size of the matrices in f32 (default 128, too large for caches).
#![allow(clippy::expect_used, reason = "a benchmark fails by panicking")]

use kvbackend_cpu::dense::{ComputeType, Matrix, Products, StoredType};
use kvbench::limits::StreamingRead;
use kvbench::{in_turns, option, row};

/// The output dimension of a matrix `[out, input]`.
const OUT: usize = 2048;
/// The input dimension of a matrix `[out, input]`.
const INPUT: usize = 1024;

/// Returns the bytes of a matrix: small integers as floats, and a repeated pattern as blocks, whose numbers are finite and
/// not denormal, because those multiply slowly.
fn bytes(dtype: StoredType) -> Vec<u8> {
    let numbers = (0..OUT * INPUT).map(|i| (i % 13) as f32 - 6.0);
    match dtype {
        StoredType::F32 => numbers.flat_map(f32::to_le_bytes).collect(),
        StoredType::BF16 => numbers.flat_map(|x| ((x.to_bits() >> 16) as u16).to_le_bytes()).collect(),
        _ => {
            let len = OUT * dtype.row_bytes(INPUT).expect("whole blocks");
            (0..len).map(|i| (i * 31 % 61) as u8).collect()
        }
    }
}

/// Multiplies with a library, which uses its own threads: `y[r, c] = x[r] · w[c]`.
fn library(x: &[f32], rows: usize, w: &[f32], y: &mut [f32], threads: usize) {
    assert_eq!((x.len(), w.len(), y.len()), (rows * INPUT, OUT * INPUT, rows * OUT));
    let parallelism = if threads > 1 { gemm::Parallelism::Rayon(threads) } else { gemm::Parallelism::None };
    let (out, input) = (OUT.cast_signed(), INPUT.cast_signed());
    // SAFETY: the slices are long enough for these sizes and strides, as asserted above.
    unsafe {
        gemm::gemm(
            rows,
            OUT,
            INPUT,
            y.as_mut_ptr(),
            1,
            out,
            false,
            x.as_ptr(),
            1,
            input,
            w.as_ptr(),
            input,
            1,
            0.0,
            1.0,
            false,
            false,
            false,
            parallelism,
        );
    }
}

fn main() {
    let mib = option("--mib", 128);
    let count = (mib << 20).div_ceil(4 * OUT * INPUT);
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let products = Products::new();
    let plain: Vec<Vec<f32>> =
        (0..count).map(|c| (0..OUT * INPUT).map(|i| ((i + c) % 13) as f32 - 6.0).collect()).collect();
    for dtype in [
        StoredType::F32,
        StoredType::BF16,
        StoredType::Q8_0,
        StoredType::Q4_1,
        StoredType::Q4K,
        StoredType::Q6K,
    ] {
        let stored: Vec<Vec<u8>> = (0..count).map(|_| bytes(dtype)).collect();
        let matrices: Vec<Matrix> =
            stored.iter().map(|bytes| Matrix::new(dtype, OUT, INPUT, bytes).expect("a matrix")).collect();
        let size: usize = stored.iter().map(Vec::len).sum();
        let mut read = StreamingRead::new(size, threads);
        for rows in [1, 4, 16, 64, 512] {
            let x = vec![0.5f32; rows * INPUT];
            let (mut y, mut z) = (vec![0.0f32; rows * OUT], vec![0.0f32; rows * OUT]);
            let mut ours = || {
                for matrix in &matrices {
                    products.multiply(&x, matrix, &mut y).expect("a product");
                }
            };
            let what = format!("product, {rows} {}, {dtype}", if rows == 1 { "row" } else { "rows" });
            if rows == 1 {
                let [seconds, limit] = in_turns([&mut ours, &mut || read.run()]);
                row(&what, size, seconds, "streaming read", limit);
            } else {
                let mut theirs = || plain.iter().for_each(|w| library(&x, rows, w, &mut z, threads));
                let [seconds, limit] = in_turns([&mut ours, &mut theirs]);
                row(&what, size, seconds, "GEMM in f32", limit);
            }
            for compute in ComputeType::ALL.into_iter().filter(|compute| compute.rounds_for(dtype)) {
                let rounded = products.clone().with_compute(compute);
                let (mut y, mut z) = (vec![0.0f32; rows * OUT], vec![0.0f32; rows * OUT]);
                let run = |products: &Products, y: &mut [f32]| {
                    for matrix in &matrices {
                        products.multiply(&x, matrix, y).expect("a product");
                    }
                };
                let [seconds, exact] =
                    in_turns([&mut || run(&rounded, &mut y), &mut || run(&products, &mut z)]);
                row(&format!("{what}, in {compute}"), size, seconds, "exact product", exact);
            }
        }
    }
}

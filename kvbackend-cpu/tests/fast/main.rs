//! Compares fast kernels with reference kernels, on every instruction set that the processor supports, with
//! one thread and with several, and with stores that do and do not bypass the caches.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod attention;
mod codes;
mod large;
mod movement;
mod quantised;

use std::sync::Arc;

use half::{bf16, f16};
use kvbackend_cpu::{CpuBackend, CpuOptions, KernelSet, SimdLevel, Thresholds};
use kvcore::{
    Backend, BlockOrder, DType, KvArena, KvFormat, KvLayout, KvShape, MemoryKind, Storage, Stream,
    TensorView, allocate_tensor,
};
use proptest::prelude::*;

/// Returns the options to compare: first the reference kernels, then every level with one thread and with
/// several threads, which are used even for a single byte.
fn ways() -> Vec<CpuOptions> {
    let plain = CpuOptions { kernels: KernelSet::Reference, ..CpuOptions::default() };
    let levels = SimdLevel::ALL.into_iter().filter(|level| level.is_available());
    let fast = levels.flat_map(|level| {
        let alone = CpuOptions { simd: Some(level), threads: Some(1), ..CpuOptions::default() };
        let thresholds = Thresholds { bytes_per_thread: 1, stream_bytes: 0 };
        [alone, CpuOptions { threads: Some(3), thresholds, ..alone }]
    });
    std::iter::once(plain).chain(fast).collect()
}

/// A backend with one of the options, and its stream.
struct Lab {
    backend: Arc<CpuBackend>,
    stream: Arc<dyn Stream>,
}

/// Returns `n` pseudo-random numbers between −2 and 2 that depend on the seed.
fn numbers(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..n)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1 << 22) as f32 - 2.0
        })
        .collect()
}

fn encode(dtype: DType, values: &[f32]) -> Vec<u8> {
    match dtype {
        DType::F16 => values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
        DType::BF16 => values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}

impl Lab {
    fn new(options: &CpuOptions) -> Self {
        let backend = CpuBackend::with_options(options).unwrap();
        let stream = backend.stream().unwrap();
        Self { backend, stream }
    }

    /// Returns a view `[rows, heads, dim]` of a larger tensor, with gaps between rows and between heads.
    fn rows(&self, dtype: DType, shape: [usize; 3], gap: usize, seed: u64) -> TensorView {
        let [rows, heads, dim] = shape;
        let all = [rows.max(1), heads + gap, dim + gap];
        let view = allocate_tensor(self.backend.as_ref(), MemoryKind::Device, dtype, &all).unwrap();
        self.stream.write(&view, &encode(dtype, &numbers(all.iter().product(), seed))).unwrap();
        view.slice(0, 0, rows).unwrap().slice(1, 0, heads).unwrap().slice(2, gap, gap + dim).unwrap()
    }

    fn arena(&self, shape: &KvShape, seed: u64) -> KvArena {
        let layout = Arc::new(KvLayout::new(shape.clone()).unwrap());
        let arena = KvArena::allocate(self.backend.as_ref(), MemoryKind::Device, layout).unwrap();
        if let KvFormat::Dense(dtype) = shape.format {
            for (storage, seed) in [(arena.k(), seed), (arena.v(), seed + 1)] {
                let n = storage.len() * 8 / dtype.bits();
                let view = TensorView::new(Arc::clone(storage), dtype, &[n]).unwrap();
                self.stream.write(&view, &encode(dtype, &numbers(n, seed))).unwrap();
            }
        }
        arena
    }

    fn bytes(&self, storage: &Arc<dyn Storage>) -> Vec<u8> {
        let mut bytes = vec![0; storage.len()];
        let view = TensorView::new(Arc::clone(storage), DType::U8, &[bytes.len()]).unwrap();
        self.stream.read(&view, &mut bytes).unwrap();
        bytes
    }

    /// Returns all bytes of an arena, including its scales.
    fn contents(&self, arena: &KvArena) -> Vec<u8> {
        arena.storages().flat_map(|storage| self.bytes(storage)).collect()
    }

    fn f32s(&self, view: &TensorView) -> Vec<f32> {
        let mut values = vec![0.0; view.len()];
        self.stream.read(view, bytemuck::cast_slice_mut(&mut values)).unwrap();
        values
    }
}

/// Runs a case with all options. `same` compares each result with the result of the reference.
fn compare<T>(
    case: impl Fn(&Lab) -> T,
    same: impl Fn(&T, &T) -> Result<(), TestCaseError>,
) -> Result<(), TestCaseError> {
    let ways = ways();
    let expected = case(&Lab::new(&ways[0]));
    for way in &ways[1..] {
        let got = case(&Lab::new(way));
        same(&got, &expected).map_err(|error| match error {
            TestCaseError::Fail(reason) => TestCaseError::fail(format!("{way:?}: {reason}")),
            other @ TestCaseError::Reject(_) => other,
        })?;
    }
    Ok(())
}

/// Checks that both results have the same bits.
#[allow(clippy::ptr_arg, reason = "results are compared by reference, and these are vectors")]
fn equal(got: &Vec<u8>, expected: &Vec<u8>) -> Result<(), TestCaseError> {
    prop_assert_eq!(got.len(), expected.len());
    let first = got.iter().zip(expected).position(|(a, b)| a != b);
    prop_assert!(first.is_none(), "byte {:?} of {}", first, got.len());
    Ok(())
}

/// Generates shapes whose rows are between a single element and several vectors long.
fn shape() -> impl Strategy<Value = KvShape> {
    let heads = prop::sample::select(vec![(1, 1), (2, 2), (3, 3), (1, 2), (4, 2), (2, 6), (8, 8)]);
    let dim = || prop::sample::select(vec![1usize, 2, 7, 8, 16, 31, 33, 40, 64, 96, 128, 150]);
    (1..3usize, 2..9usize, 1..20usize, heads, dim(), dim(), any::<bool>(), 0..3usize).prop_map(
        |(num_layers, num_blocks, block_size, (k_heads, v_heads), k_dim, v_dim, head_major, dtype)| KvShape {
            num_layers,
            num_blocks,
            block_size,
            k_heads,
            v_heads,
            k_dim: k_dim.next_multiple_of(2),
            v_dim,
            format: DType::COMPUTE[dtype].into(),
            order: if head_major { BlockOrder::HeadMajor } else { BlockOrder::TokenMajor },
        },
    )
}

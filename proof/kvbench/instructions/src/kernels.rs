//! CPU kernels on small fixed sizes: 256 tokens with 8 heads of 128, in blocks of 16.

use std::sync::Arc;

use kvbackend_cpu::{CpuOptions, SimdLevel};
use kvbench::lab::Lab;
use kvcore::{DType, Result, Stream};

const TOKENS: usize = 256;

/// A function that does the work once on a stream.
type KernelWork = Box<dyn Fn(&dyn Stream) -> Result<()>>;

/// One operation, on a stream that runs work immediately.
pub struct HotKernel {
    stream: Arc<dyn Stream>,
    work: KernelWork,
}

impl HotKernel {
    /// Creates a `scatter` of all tokens into shuffled blocks.
    pub fn scatter(dtype: DType) -> Self {
        Self::ready(dtype, |lab| {
            let op = lab.scatter()?;
            Ok(Box::new(move |stream| stream.scatter(&op)))
        })
    }

    /// Creates a `gather` of all tokens.
    pub fn gather(dtype: DType) -> Self {
        Self::ready(dtype, |lab| {
            let op = lab.gather()?;
            Ok(Box::new(move |stream| stream.gather(&op)))
        })
    }

    /// Creates a `copy_blocks` of all blocks.
    pub fn copy_blocks(dtype: DType) -> Self {
        Self::ready(dtype, |lab| {
            let op = lab.copy_blocks();
            Ok(Box::new(move |stream| stream.copy_blocks(&op)))
        })
    }

    /// Creates a `rope` of one row per token.
    pub fn rope(dtype: DType) -> Self {
        Self::ready(dtype, |lab| {
            let op = lab.rope()?;
            Ok(Box::new(move |stream| stream.rope(&op)))
        })
    }

    /// Creates a `rotate_keys` of all blocks.
    pub fn rotate_keys(dtype: DType) -> Self {
        Self::ready(dtype, |lab| {
            let op = lab.rotate_keys();
            Ok(Box::new(move |stream| stream.rotate_keys(&op)))
        })
    }

    /// Creates an `attend` of the last `rows` tokens to all tokens: a decode step for one row, a prefill for
    /// more. Four query heads share one KV head.
    pub fn attend(dtype: DType, rows: usize) -> Self {
        Self::ready(dtype, |lab| {
            let op = lab.attend(rows, true)?;
            Ok(Box::new(move |stream| stream.attend(&op)))
        })
    }

    /// Creates an `attend_mass` of the last block's 16 tokens over all earlier tokens.
    pub fn attend_mass(dtype: DType) -> Self {
        Self::ready(dtype, |lab| {
            let op = lab.attend_mass()?;
            Ok(Box::new(move |stream| stream.attend_mass(&op)))
        })
    }

    /// Creates an operation and runs it once.
    fn ready(dtype: DType, make: impl FnOnce(&Lab) -> Result<KernelWork>) -> Self {
        // BLAKE3 and the C library also choose their code by the processor's features.
        assert!(!SimdLevel::Avx512.is_available(), "counted under valgrind, which hides AVX-512");
        // Only this thread is counted, so kernels that do not have their own thread pool must run on this
        // thread. A second call fails, which is harmless.
        let _ = rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build_global();
        let options = CpuOptions { simd: Some(SimdLevel::Avx2), threads: Some(1), ..CpuOptions::default() };
        let made = Lab::new(dtype, TOKENS, &options)
            .and_then(|lab| Ok(Self { work: make(&lab)?, stream: lab.stream }));
        let kernel = made.unwrap_or_else(|error| panic!("{error}"));
        kernel.run();
        kernel
    }

    /// Runs the operation.
    pub fn run(&self) {
        (self.work)(self.stream.as_ref()).unwrap_or_else(|error| panic!("{error}"));
    }
}

//! Kernels of the CPU backend on small fixed sizes: 256 tokens of 8 heads of 128, in blocks of 16.

use std::sync::Arc;

use kvbackend_cpu::{CpuOptions, SimdLevel};
use kvbench::lab::Lab;
use kvcore::{DType, Result, Stream};

const TOKENS: usize = 256;

/// Does the work once on a stream.
type Work = Box<dyn Fn(&dyn Stream) -> Result<()>>;

/// One operation on a stream that works at once.
pub struct Kernel {
    stream: Arc<dyn Stream>,
    work: Work,
}

impl Kernel {
    /// `scatter` of all tokens into blocks in no order.
    pub fn scatter(dtype: DType) -> Self {
        Self::ready(dtype, |lab| {
            let op = lab.scatter()?;
            Ok(Box::new(move |stream| stream.scatter(&op)))
        })
    }

    /// `gather` of the same.
    pub fn gather(dtype: DType) -> Self {
        Self::ready(dtype, |lab| {
            let op = lab.gather()?;
            Ok(Box::new(move |stream| stream.gather(&op)))
        })
    }

    /// `copy_blocks` of all blocks.
    pub fn copy_blocks(dtype: DType) -> Self {
        Self::ready(dtype, |lab| {
            let op = lab.copy_blocks();
            Ok(Box::new(move |stream| stream.copy_blocks(&op)))
        })
    }

    /// `rope` of one row per token.
    pub fn rope(dtype: DType) -> Self {
        Self::ready(dtype, |lab| {
            let op = lab.rope()?;
            Ok(Box::new(move |stream| stream.rope(&op)))
        })
    }

    /// `rotate_keys` of all blocks.
    pub fn rotate_keys(dtype: DType) -> Self {
        Self::ready(dtype, |lab| {
            let op = lab.rotate_keys();
            Ok(Box::new(move |stream| stream.rotate_keys(&op)))
        })
    }

    /// `attend` of the last `rows` tokens to all: one is a step of decoding, more are a prefill. Every query
    /// head reads a quarter of a KV head.
    pub fn attend(dtype: DType, rows: usize) -> Self {
        Self::ready(dtype, |lab| {
            let op = lab.attend(rows, true)?;
            Ok(Box::new(move |stream| stream.attend(&op)))
        })
    }

    /// The operation, which has run once.
    fn ready(dtype: DType, make: impl FnOnce(&Lab) -> Result<Work>) -> Self {
        // What BLAKE3 and the C library choose by the processor hangs on this too.
        assert!(!SimdLevel::Avx512.is_available(), "counted under valgrind, which hides AVX-512");
        // Only this thread is counted, so it is the one that plain kernels run on. It fails where it has been said.
        let _ = rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build_global();
        let options = CpuOptions { simd: Some(SimdLevel::Avx2), threads: Some(1), ..CpuOptions::default() };
        let made = Lab::new(dtype, TOKENS, &options)
            .and_then(|lab| Ok(Self { work: make(&lab)?, stream: lab.stream }));
        let kernel = made.unwrap_or_else(|error| panic!("{error}"));
        kernel.run();
        kernel
    }

    /// Runs it.
    pub fn run(&self) {
        (self.work)(self.stream.as_ref()).unwrap_or_else(|error| panic!("{error}"));
    }
}

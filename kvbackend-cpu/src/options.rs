//! Settings of a CPU backend.

use crate::simd::SimdLevel;

/// When enqueued work runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Execution {
    /// In the calling thread, at the time of the call.
    #[default]
    Immediate,
    /// When a read, a synchronisation or an event waits for the work.
    ///
    /// A program that forgets to wait does not see the results, as on a GPU. Meant for tests.
    Deferred,
}

/// The set of kernels that a backend runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KernelSet {
    /// Kernels made for speed: SIMD, threads, and stores that bypass the caches.
    #[default]
    Fast,
    /// Plain loops, against which the fast kernels are tested.
    Reference,
}

/// Settings of a [`CpuBackend`](crate::CpuBackend).
///
/// ```
/// use kvbackend_cpu::{CpuBackend, CpuOptions, KernelSet, SimdLevel};
/// let plain = CpuBackend::with_options(&CpuOptions { kernels: KernelSet::Reference, ..CpuOptions::default() })?;
/// let narrow = CpuOptions { simd: Some(SimdLevel::Portable), threads: Some(1), ..CpuOptions::default() };
/// let narrow = CpuBackend::with_options(&narrow)?;
/// assert_eq!(narrow.simd(), SimdLevel::Portable);
/// # Ok::<(), kvcore::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CpuOptions {
    /// When enqueued work runs.
    pub execution: Execution,
    /// The set of kernels to use.
    pub kernels: KernelSet,
    /// The instruction set of the fast kernels. Default: the best one that the processor supports.
    pub simd: Option<SimdLevel>,
    /// Number of threads per kernel, including the caller's.
    ///
    /// `None` means one thread per processor, from a pool that all such backends share and that ends with the
    /// last of them. With a number, the backend has its own threads, which end when the backend, its streams
    /// and its products are dropped.
    pub threads: Option<usize>,
    /// Sizes above which fast kernels use threads and bypass the caches.
    pub thresholds: Thresholds,
}

/// Sizes at which a fast kernel changes its method. Results are the same on both sides of a threshold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Thresholds {
    /// Bytes of work per thread: about as many as one thread moves in the time it takes to wake another one.
    pub bytes_per_thread: usize,
    /// Size in bytes at which copies start to bypass the caches: the start of so large a copy would no longer
    /// be cached when it is read.
    pub stream_bytes: usize,
}

impl Default for Thresholds {
    /// Returns 256 KiB per thread, and 4 MiB as the size at which copies start to bypass the caches.
    fn default() -> Self {
        Self { bytes_per_thread: 256 << 10, stream_bytes: 4 << 20 }
    }
}

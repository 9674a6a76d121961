//! Settings of a CPU backend.

use crate::simd::SimdLevel;

/// The time at which enqueued work runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Execution {
    /// Work runs in the calling thread, during the call that enqueues it.
    #[default]
    Immediate,
    /// Work runs when a read, a synchronisation or an event waits for it.
    ///
    /// As on a GPU, a program that forgets to wait does not see the results. This mode is meant for tests.
    Deferred,
}

/// The set of kernels that a backend runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KernelSet {
    /// Kernels optimised for speed, with SIMD, threads, and stores that bypass the caches.
    #[default]
    Fast,
    /// Plain loops. The fast kernels are tested against these.
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
    /// The time at which enqueued work runs.
    pub execution: Execution,
    /// The set of kernels that the backend runs.
    pub kernels: KernelSet,
    /// The instruction set of the fast kernels. Default: the best one that the processor supports.
    pub simd: Option<SimdLevel>,
    /// Number of threads per kernel, including the caller's.
    ///
    /// `None` means one thread per processor, from a pool shared by all backends that use `None`. If a number
    /// is given, the backend has its own pool. The threads of a pool end when every backend, stream and
    /// [`Products`](crate::dense::Products) that uses the pool has been dropped.
    pub threads: Option<usize>,
    /// The sizes at which fast kernels start to use threads and to bypass the caches.
    pub thresholds: Thresholds,
}

/// Sizes at which fast kernels change their strategy. A kernel's results are the same on both sides of a
/// threshold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Thresholds {
    /// Minimum amount of work per thread, in bytes: about as much as one thread moves in the time that it
    /// takes to wake another thread.
    pub bytes_per_thread: usize,
    /// Size in bytes at which copies start to bypass the caches. The beginning of such a large copy would no
    /// longer be cached when it is read later.
    pub stream_bytes: usize,
}

impl Default for Thresholds {
    /// Returns 256 KiB per thread, and 4 MiB as the size at which copies start to bypass the caches.
    fn default() -> Self {
        Self { bytes_per_thread: 256 << 10, stream_bytes: 4 << 20 }
    }
}

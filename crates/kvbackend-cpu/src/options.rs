//! How a CPU backend computes.

use crate::{Execution, SimdLevel};

/// Which kernels a backend runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KernelSet {
    /// Those for speed: vectors, threads, stores past the caches.
    #[default]
    Fast,
    /// The plain loops that fast ones are tested against.
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
    /// Which kernels run.
    pub kernels: KernelSet,
    /// Instruction set of fast kernels; by default the best that the processor has.
    pub simd: Option<SimdLevel>,
    /// Threads of a kernel, the caller's among them. By default one per processor, from threads that all such
    /// backends share.
    pub threads: Option<usize>,
    /// From which sizes on fast kernels take threads and pass the caches.
    pub thresholds: Thresholds,
}

/// Sizes at which a fast kernel changes its way. Results are the same on either side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Thresholds {
    /// Bytes of work for each thread: about what one moves in the time in which another is woken.
    pub bytes_per_thread: usize,
    /// Bytes from which on copies go past the caches: whoever reads so much later would not find it there.
    pub stream_bytes: usize,
}

impl Default for Thresholds {
    /// 256 KiB and 4 MiB.
    fn default() -> Self {
        Self { bytes_per_thread: 256 << 10, stream_bytes: 4 << 20 }
    }
}

//! The CPU backend: host memory, ordered streams, reference kernels and fast kernels.
//!
//! The reference kernels state the contract of [`kvcore::device::operation`] as plain loops, in f32
//! arithmetic for every element type. They are the oracle for every fast kernel, on the CPU and on other
//! devices. [`CpuOptions`] chooses between reference and fast kernels, and sets the instruction set and the
//! threads of the fast ones.
//!
//! ```
//! use kvbackend_cpu::CpuBackend;
//! use kvcore::{Backend, DType, MemoryKind, allocate_tensor};
//!
//! let backend = CpuBackend::new();
//! let stream = backend.stream()?;
//! let tensor = allocate_tensor(backend.as_ref(), MemoryKind::System, DType::F32, &[2])?;
//! stream.write(&tensor, &[0, 0, 128, 63, 0, 0, 0, 64])?; // 1.0, 2.0
//! let mut bytes = [0; 8];
//! stream.read(&tensor, &mut bytes)?;
//! assert_eq!(bytes, [0, 0, 128, 63, 0, 0, 0, 64]);
//! # Ok::<(), kvcore::Error>(())
//! ```

mod communicator;
#[allow(
    clippy::inline_always,
    clippy::cast_ptr_alignment,
    reason = "what is not inlined is not compiled for the instruction set; results are vectors of f32"
)]
pub mod dense;
mod element;
#[allow(
    clippy::inline_always,
    clippy::cast_ptr_alignment,
    reason = "what is not inlined is not compiled for the instruction set; views are aligned for their elements"
)]
mod fast;
mod foreign;
mod kernels;
mod load;
mod memory;
mod movement;
mod options;
mod plane;
mod raw;
mod reference;
#[allow(
    clippy::inline_always,
    clippy::cast_ptr_alignment,
    reason = "as for `fast`; vectors are loaded unaligned"
)]
mod simd;
mod stream;
mod workers;
mod writes;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

#[cfg(target_os = "linux")]
use kvcore::ReservedStorage;
use kvcore::{
    Backend, Capabilities, CounterSnapshot, Counters, DType, KvFormat, MemoryKind, Result, Storage, Stream,
};

use fast::Fast;
use kernels::KernelTable;
use simd::AvailableLevel;
use workers::Workers;

pub use communicator::ThreadCommunicator;
pub use foreign::{ForeignCache, ForeignLoad, ForeignOrder, ForeignPlane, ForeignShape};
#[cfg(target_os = "linux")]
pub use memory::CpuReserved;
pub use memory::{CpuStorage, HostView, HostViewMut, LentBytes, LentMemory};
pub use options::{CpuOptions, KernelSet, Thresholds};
pub use simd::SimdLevel;
pub use stream::{CpuEvent, CpuStream};

/// Name of the backend in errors and on command lines.
pub(crate) const NAME: &str = "cpu";

/// The time at which enqueued work runs.
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

/// The CPU as a device whose memory is host memory.
#[derive(Debug)]
pub struct CpuBackend {
    execution: Execution,
    level: AvailableLevel,
    workers: Arc<Workers>,
    kernels: KernelTable,
    counters: Arc<Counters>,
    streams: AtomicU64,
}

impl CpuBackend {
    /// Creates a backend that runs fast kernels immediately.
    pub fn new() -> Arc<Self> {
        Self::with_execution(Execution::Immediate)
    }

    /// Creates a backend that runs fast kernels when `execution` says; [`new`](Self::new) runs them
    /// immediately.
    pub fn with_execution(execution: Execution) -> Arc<Self> {
        let options = CpuOptions { execution, ..CpuOptions::default() };
        Self::made(&options, AvailableLevel::best(), Workers::of_the_machine())
    }

    /// Creates a backend with the given options.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::Unsupported`] if the processor lacks the instruction set of `options.simd`,
    /// and [`kvcore::Error::Zero`] if `options.threads` is 0.
    pub fn with_options(options: &CpuOptions) -> Result<Arc<Self>> {
        let level = options.simd.map_or_else(|| Ok(AvailableLevel::best()), AvailableLevel::new)?;
        let workers = match options.threads {
            None => Workers::of_the_machine(),
            Some(0) => return Err(kvcore::Error::Zero { what: "threads" }),
            Some(threads) => Arc::new(Workers::new(threads)),
        };
        Ok(Self::made(options, level, workers))
    }

    fn made(options: &CpuOptions, level: AvailableLevel, workers: Arc<Workers>) -> Arc<Self> {
        let kernels = match options.kernels {
            KernelSet::Reference => KernelTable::Reference,
            KernelSet::Fast => {
                let workers = Arc::clone(&workers);
                KernelTable::Fast(Arc::new(Fast::new(level, workers, options.thresholds)))
            }
        };
        Arc::new(Self {
            execution: options.execution,
            level,
            workers,
            kernels,
            counters: Arc::default(),
            streams: AtomicU64::new(0),
        })
    }

    /// Returns the instruction set of the fast kernels.
    pub fn simd(&self) -> SimdLevel {
        self.level.level()
    }
}

impl Backend for CpuBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            dtypes: DType::COMPUTE.to_vec(),
            formats: KvFormat::QUANTIZED.to_vec(),
            memory: vec![MemoryKind::Device, MemoryKind::Pinned, MemoryKind::System],
            missing: if cfg!(target_os = "linux") { vec!["graphs"] } else { vec!["graphs", "reserve"] },
        }
    }

    fn shares_host_memory(&self) -> bool {
        true
    }

    fn allocate(&self, kind: MemoryKind, bytes: usize) -> Result<Arc<dyn Storage>> {
        Ok(Arc::new(CpuStorage::allocate(kind, bytes)?))
    }

    #[cfg(target_os = "linux")]
    fn reserve(&self, kind: MemoryKind, bytes: usize) -> Result<Arc<dyn ReservedStorage>> {
        Ok(Arc::new(CpuReserved::reserve(kind, bytes)?))
    }

    fn stream(&self) -> Result<Arc<dyn Stream>> {
        let id = self.streams.fetch_add(1, Ordering::Relaxed);
        Ok(Arc::new(CpuStream::new(id, self.execution, Arc::clone(&self.counters), self.kernels.clone())))
    }

    fn counters(&self) -> CounterSnapshot {
        self.counters.snapshot()
    }
}

//! The CPU backend, which creates its kernels, workers and streams from options.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

#[cfg(target_os = "linux")]
use kvcore::ReservedStorage;
use kvcore::{
    Backend, Capabilities, CounterSnapshot, Counters, DType, KvFormat, MemoryKind, Result, Storage, Stream,
};

use crate::NAME;
use crate::fast::Fast;
use crate::kernels::KernelTable;
#[cfg(target_os = "linux")]
use crate::memory::CpuReserved;
use crate::memory::CpuStorage;
use crate::options::{CpuOptions, Execution, KernelSet};
use crate::simd::{AvailableLevel, SimdLevel};
use crate::stream::CpuStream;
use crate::workers::Workers;

/// A backend that runs on the CPU and uses host memory.
#[derive(Debug)]
pub struct CpuBackend {
    execution: Execution,
    pub(crate) level: AvailableLevel,
    pub(crate) workers: Arc<Workers>,
    pub(crate) kernels: KernelTable,
    counters: Arc<Counters>,
    streams: AtomicU64,
}

impl CpuBackend {
    /// Creates a backend that runs fast kernels immediately.
    pub fn new() -> Arc<Self> {
        Self::with_execution(Execution::Immediate)
    }

    /// Creates a backend with fast kernels and the given execution mode. [`new`](Self::new) executes
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

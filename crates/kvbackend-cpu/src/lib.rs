//! The CPU backend: host memory, ordered streams and reference kernels.
//!
//! The kernels here are the plain ones: each says in a loop what the contract of
//! [`kvcore::kernels`] says in words, in f32 arithmetic whatever the element type. They are the
//! oracle for every fast kernel, on this device and on others.
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

/// The README's example compiles and runs.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

mod element;
mod kernels;
mod memory;
mod plane;
mod stream;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

#[cfg(target_os = "linux")]
use kvcore::backend::ReservedStorage;
use kvcore::backend::{Backend, Capabilities, CounterSnapshot, Counters, MemoryKind, Storage, Stream};
use kvcore::{DType, KvFormat, Result};

#[cfg(target_os = "linux")]
pub use memory::CpuReserved;
pub use memory::CpuStorage;
pub use stream::{CpuEvent, CpuStream};

/// Name of this backend in errors and on command lines.
pub(crate) const NAME: &str = "cpu";

/// When enqueued work runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Execution {
    /// At once, in the caller's thread.
    #[default]
    Immediate,
    /// When something waits for it: a read, a synchronisation, an event. What a program forgets to
    /// wait for it does not see, as on a GPU. For tests.
    Deferred,
}

/// Host memory as a device.
#[derive(Debug)]
pub struct CpuBackend {
    execution: Execution,
    counters: Arc<Counters>,
    streams: AtomicU64,
}

impl CpuBackend {
    /// A backend that runs work at once.
    pub fn new() -> Arc<Self> {
        Self::with_execution(Execution::Immediate)
    }

    /// A backend with the given order of execution.
    pub fn with_execution(execution: Execution) -> Arc<Self> {
        Arc::new(Self { execution, counters: Arc::default(), streams: AtomicU64::new(0) })
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
            missing: if cfg!(target_os = "linux") { Vec::new() } else { vec!["reserve"] },
        }
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
        Ok(Arc::new(CpuStream::new(id, self.execution, Arc::clone(&self.counters))))
    }

    fn counters(&self) -> CounterSnapshot {
        self.counters.snapshot()
    }
}
